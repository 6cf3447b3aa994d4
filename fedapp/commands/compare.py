"""``fedapp compare``: several methods side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedapp.commands.common import (
    Overrides,
    carry_out,
    check_method,
    check_tables,
    console,
    interruptible,
    new_follower,
)
from fedapp.config import Settings, load_settings, parse_overrides
from fedapp.run_folder import RunFolder

FINISHED_CELLS = "finished cells are saved; the same command goes on with the others"


def compare(
    strategies: Annotated[list[str], typer.Argument(help="Two methods or more.")],
    config: Overrides = None,
    seeds: Annotated[int, typer.Option(help="Runs of each method.")] = 1,
    engine: Annotated[str, typer.Option(help="local, or simulation.")] = "local",
    output: Annotated[
        Path, typer.Option(help="Folder of the runs; finished ones are not run again.")
    ] = Path("runs/compare"),
) -> None:
    """Run several methods on the same rows, and set them side by side."""
    from fedapp.report.tradeoff import score_table, tradeoff_page
    from simulations.compare import compare as compare_all

    overrides = parse_overrides(config or [])
    follower = new_follower()

    def run(settings: Settings) -> RunFolder:
        return carry_out(settings, engine, follower)

    with interruptible(lambda: FINISHED_CELLS), follower.alive():
        follower.begin("reading the settings")
        for strategy in strategies:
            settings = load_settings({**overrides, "strategy": strategy})
            check_method(settings, engine)
            check_tables(settings, engine, follower)
        output.mkdir(parents=True, exist_ok=True)
        shown = follower.tell, follower.begin
        found = compare_all(strategies, overrides, seeds, output, run, *shown)
        follower.begin("writing the page")
        page = tradeoff_page(found.lines, found.metric, settings.data, len(found.seeds))
        RunFolder(output).write("comparison.html", page)
    console.print(score_table(found.lines, found.metric))
    console.print(f"{output / 'comparison.html'}", soft_wrap=True)
