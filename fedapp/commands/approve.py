"""``fedapp site approve``: a person at a site lets a run begin."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from fedapp.commands.common import console
from fedapp.errors import ConfigError

if TYPE_CHECKING:
    from fedapp.site.register import Run


def approve_command(
    run: Annotated[str, typer.Argument(help="Id of its model; without it, all that wait.")] = "",
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask again.")] = False,
) -> None:
    """Show what a run is and what it would reveal, and let it begin."""
    from fedapp.home import home
    from fedapp.site.register import approve, runs_of

    found = {
        model_id: (folder, one)
        for folder in sorted(home().glob("sites/*"))
        for model_id, one in runs_of(folder).items()
        if not one.approved and not one.begun
    }
    if not run:
        for model_id, (folder, one) in found.items():
            console.print(f"{model_id}  {folder.name}  {one.method}", highlight=False)
        if not found:
            console.print("no run waits here")
        return
    if run not in found:
        waiting = ", ".join(found) or "none"
        raise ConfigError(f"run must be one that waits here ({waiting}), got {run}")
    folder, one = found[run]
    console.print(escape(_told(folder, run, one)), highlight=False)
    for name, value in one.settings.items():
        console.print(f"  {name.replace('_', '-')} {escape(ascii(value))}", highlight=False)
    console.print(escape(_reveals(one.method)), highlight=False)
    if not yes and not typer.confirm(f"Let {folder.name} take part?"):
        raise typer.Exit(1)
    approve(folder, run)
    console.print(f"approved: {run}", highlight=False)


def _told(folder: Path, run: str, one: Run) -> str:
    day = time.strftime("%Y-%m-%d %H:%M", time.localtime(one.asked))
    where = f"at {folder.name} on {one.data!a}"
    return f"Run {run} of {one.method} {where}, first asked for {day}, with"


def _reveals(method: str) -> str:
    """What a method is and reveals, in the words of its message modules."""
    from fedapp.messages.methods import modules_of_method

    texts = []
    for module in modules_of_method(method):
        title, _, rest = (module.__doc__ or "").partition("\n")
        texts.append(f"\n{title}\n\nReveals{rest.partition('Reveals')[2].rstrip()}")
    return "\n".join(texts)
