"""``fedapp clean``: delete what is of no more use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from fedapp.commands.common import say
from fedapp.home import RUNS, display_path

if TYPE_CHECKING:
    from fedapp.runs.clean import Cleaning


def clean(
    yes: Annotated[bool, typer.Option("--yes", help="Delete without asking.")] = False,
    older_than: Annotated[
        float | None,
        typer.Option(
            metavar="DAYS",
            min=0.0,
            help="Only what has not changed for so many days; otherwise unfinished runs of any "
            "age, and what sites keep after a week.",
        ),
    ] = None,
    all_parts: Annotated[
        bool,
        typer.Option(
            "--all", help="Parts of models too, also those that finished runs predict with."
        ),
    ] = False,
) -> None:
    """Delete failed and interrupted runs in ./runs, and what sites keep of old runs.

    Shows first what goes, and how large it is. Finished runs, runs that are going on, and the keys
    of sites always stay.
    """
    from fedapp.report.summary import human_bytes
    from fedapp.runs.clean import plan

    cleaning = plan(RUNS, older_than, all_parts, say)
    if cleaning.kept:
        size = human_bytes(sum(one.n_bytes for one in cleaning.kept))
        say(
            f"kept: parts of models at sites ({len(cleaning.kept)}), {size}; --all deletes them too"
        )
    if not (cleaning.runs or cleaning.states):
        say("nothing to delete")
        return
    _list(cleaning)
    if cleaning.needed:
        models = len({one.path.name for one in cleaning.needed})
        say(f"WARNING: finished runs in {RUNS} that cannot predict without these parts: {models}")
    if not yes:
        typer.confirm(f"Delete all this, {human_bytes(cleaning.n_bytes)}?", abort=True)
    say(f"deleted, {human_bytes(cleaning.carry_out(say))}")


def _list(cleaning: Cleaning) -> None:
    from fedapp.report.summary import human_bytes

    for run in cleaning.runs:
        say(f"{display_path(run.path)}  {run.state}, {run.method}, {human_bytes(run.n_bytes)}")
    for title, is_part in (("states of old runs", False), ("parts of models", True)):
        sizes: dict[str, list[int]] = {}
        for one in cleaning.states:
            if one.is_part == is_part:
                sizes.setdefault(one.site, []).append(one.n_bytes)
        for site, each in sorted(sizes.items()):
            say(f"site {site}: {title} ({len(each)}), {human_bytes(sum(each))}")
