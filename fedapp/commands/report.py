"""``fedapp report``: pages about finished runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedapp.commands.common import console
from fedapp.report.summary import print_warning


def report(
    run_dirs: Annotated[list[Path], typer.Argument(help="Folders of runs.")],
    output: Annotated[Path | None, typer.Option(help="Where the page goes.")] = None,
) -> None:
    """Write an HTML page about one run, or one that compares several."""
    from fedapp.report.page import compared_warnings, write_report

    console.print(f"{write_report(run_dirs, output)}", soft_wrap=True)
    if len(run_dirs) > 1:
        for line in compared_warnings(run_dirs):
            print_warning(console, line)
