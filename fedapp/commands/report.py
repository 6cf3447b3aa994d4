"""``fedapp report``: pages about finished runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from fedapp.commands.common import console


def report(
    run_dirs: Annotated[list[Path], typer.Argument(help="Folders of runs.")],
    output: Annotated[Path | None, typer.Option(help="Where the page goes.")] = None,
) -> None:
    """Write an HTML page about one run, or one that compares several."""
    from fedapp.report.page import compared_warnings, write_report

    console.print(f"{write_report(run_dirs, output)}", soft_wrap=True)
    if len(run_dirs) > 1:
        for line in compared_warnings(run_dirs):
            console.print(f"[yellow]![/] {escape(line)}", highlight=False, soft_wrap=True)
