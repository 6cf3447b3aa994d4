"""``fedapp compare``: several methods side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedapp.commands.common import (
    Folds,
    Overrides,
    console,
    folded,
    interruptible,
    new_follower,
)
from fedapp.config import Settings, parse_overrides
from fedapp.engines import SIMULATED
from fedapp.errors import ConfigError
from fedapp.report.summary import print_warning
from fedapp.run_folder import RunFolder
from fedapp.session import carry_out, check_method, check_tables

FINISHED_CELLS = "finished cells are saved; the same command continues with the others"


def compare(
    strategies: Annotated[list[str], typer.Argument(help="Methods, each once.")],
    config: Overrides = None,
    seeds: Annotated[int, typer.Option(help="Runs of each method.")] = 1,
    folds: Folds = 0,
    engine: Annotated[str, typer.Option(help="local, or simulation.")] = "local",
    output: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the runs; finished ones are not run again. By default one below runs/ "
            "that follows from the table and the settings.",
        ),
    ] = None,
) -> None:
    """Run several methods on the same rows, and set them side by side."""
    from fedapp.report.tradeoff import fact_table, score_table, tradeoff_page
    from simulations import comparable
    from simulations.compare import compare as compare_all
    from simulations.kept import other_code

    overrides = folded(parse_overrides(config or []), folds)
    follower = new_follower()

    def run(settings: Settings) -> RunFolder:
        folder = carry_out(settings, engine, follower)
        assert folder is not None  # of a simulated run
        return folder

    with interruptible(lambda: FINISHED_CELLS), follower.alive():
        follower.begin("reading the settings")
        if engine not in SIMULATED:
            raise ConfigError(f"--engine must be local or simulation to compare, got {engine}")
        runs = comparable.settings_of_all(strategies, overrides)
        for settings in runs:
            check_method(comparable.read_alone(settings), engine)
        comparable.check_comparable(runs, seeds)
        for settings in runs:
            check_tables(settings, engine, follower)
        folder = output or comparable.comparison_folder(runs[0], engine)
        shown = follower.tell, follower.begin
        found = compare_all(strategies, overrides, seeds, folder, run, engine, *shown)
        follower.begin("writing the page")
        RunFolder(folder).write("comparison.html", tradeoff_page(found))
    console.print(fact_table(found))
    console.print(score_table(found))
    console.print(f"{folder / 'comparison.html'}", soft_wrap=True)
    if told := other_code(folder):
        print_warning(console, told)
