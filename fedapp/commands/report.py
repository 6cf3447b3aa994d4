"""``fedapp report``: pages about finished runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedapp.commands.common import console


def report(
    run_dirs: Annotated[list[Path], typer.Argument(help="Folders of runs.")],
    output: Annotated[Path | None, typer.Option(help="Where the page goes.")] = None,
) -> None:
    """Write an HTML page about one run, or one that compares several."""
    from fedapp.report.page import write_report

    console.print(f"{write_report(run_dirs, output)}", soft_wrap=True)
