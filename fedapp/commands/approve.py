"""``fedapp site approve``: a person at a site lets a run begin."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table as Grid

from fedapp.commands.common import console
from fedapp.errors import ConfigError

if TYPE_CHECKING:
    from fedapp.site.register import Run

# What leaves a site by aggregation, and settings that are not shown as a name and a value.
LEAVES = {"secure": "only sums over all parties leave", "sealed": "in letters between parties"}
SHOWN = (
    *("aggregation", "epsilon", "delta", "multiplier", "parties", "fingerprints"),
    *("test_fraction", "valid_fraction", "seed", "fold", "folds"),
    "rounded",  # of a masked run always
)


def approve_command(
    run: Annotated[str, typer.Argument(help="Id of its model; without it, all that wait.")] = "",
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask again.")] = False,
) -> None:
    """Show what a run may ask for and what it would reveal, and let it begin."""
    from fedapp.home import home
    from fedapp.site.register import approve, runs_of

    registers = {folder: runs_of(folder) for folder in sorted(home().glob("sites/*"))}
    waiting = {
        one.model: (folder, one)
        for folder, runs in registers.items()
        for one in runs
        if one.reasons and not one.admitted and one.approved != one.digest
    }
    if not run:
        for model_id, (folder, one) in waiting.items():
            line = f"{model_id}  {folder.name}  {one.method}  first asked {_first_asked(one)}"
            console.print(line, highlight=False)
        if not waiting:
            where = f"under {home()} (at a site, first: . env.sh)"
            console.print(f"no run waits {where}", highlight=False, soft_wrap=True)
        return
    if run not in waiting:
        names = ", ".join(waiting) or "none"
        where = f"under {home()} ({names}; at a site, first: . env.sh)"
        raise ConfigError(f"run must be one that waits {where}, got {run}")
    folder, one = waiting[run]
    # What is long comes first, so that the plan is beside the question.
    console.print(escape(_reveals(one.method)) + "\n", highlight=False)
    grid = Grid.grid(padding=(0, 2))
    for title, text in _rows(folder.name, one, registers[folder]):
        grid.add_row(title, escape(text))
    console.print(grid, highlight=False)
    if not yes and not typer.confirm(f"Let {folder.name} take part?"):
        raise typer.Exit(1)
    approve(folder, one)
    console.print(f"approved: {run}", highlight=False)


def _rows(site: str, run: Run, runs: Iterable[Run]) -> Iterator[tuple[str, str]]:
    """A title and a text for each line of a plan. A coordinator's texts are shown in ASCII."""
    from fedapp.site.register import spending

    plan = run.settings
    yield "run", f"{run.model} of {run.method}, at {site} on {run.data!a}"
    yield "first asked", _first_asked(run)
    for reason in run.reasons:
        yield "waits because", _plain(reason)
    kind = _plain(plan["aggregation"])
    yield "aggregation", f"{kind}: {LEAVES.get(kind, 'what the site has, as under Reveals')}"
    noise = f"{plan['epsilon']:g} for delta {plan['delta']:g}, noise {plan['multiplier']:.4g}"
    yield "epsilon", noise if plan["epsilon"] else "none: no noise is added"
    others = [one for one in runs if one.admitted and one.data == run.data]
    yield "spent", f"epsilon {spending(others, run.total_epsilon)}"
    if plan["epsilon"]:
        yield "with this run", f"epsilon {spending([*others, run], run.total_epsilon)}"
    held = f"fold {plan['fold']} of {plan['folds']}" if plan["folds"] else plan["test_fraction"]
    yield "test rows", f"{held}, drawn with seed {plan['seed']}"
    yield "validation", f"{plan['valid_fraction']} of the others"
    for name, value in plan.items():
        if name not in SHOWN and (value or isinstance(value, bool)):
            yield name.replace("_", "-"), _plain(value)
    for name, key in zip(plan["parties"], plan["fingerprints"], strict=False):
        mark = "pinned here" if run.trusted.get(name) == key else "NOT PINNED HERE"
        yield "party", f"{_plain(name)}  {_plain(key)}  {'this site' if name == site else mark}"


def _first_asked(run: Run) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(run.asked))


def _plain(value: object) -> str:
    return ascii(value).strip("'\"")


def _reveals(method: str) -> str:
    """What a method is and reveals, in the words of its message modules."""
    from fedapp.messages.methods import modules_of_method

    texts = []
    for module in modules_of_method(method):
        title, _, rest = (module.__doc__ or "").partition("\n")
        texts.append(f"\n{title}\n\nReveals{rest.partition('Reveals')[2].rstrip()}")
    # A paragraph or an item a line, which the console breaks at its own width.
    return re.sub(r"(?<!\n)\n(?!\n|- ) *", " ", "\n".join(texts))
