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
from fedapp.report.summary import fact_grid, print_warning
from fedapp.settings import parse_overrides

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
    from fedapp.report.comparison import score_table
    from fedapp.runs.compare import carry_out, other_code
    from fedapp.runs.run import PAGE

    overrides = folded(parse_overrides(config or []), folds)
    follower = new_follower()
    with interruptible(lambda: FINISHED_CELLS), follower.alive():
        folder, comparison = carry_out(strategies, overrides, seeds, engine, follower, output)
    console.print(fact_grid(comparison.facts))
    console.print(score_table(comparison))
    console.print(f"{folder / PAGE}", soft_wrap=True)
    if warning := other_code(folder):
        print_warning(console, warning)
