"""``fedapp tune``: search for the best settings of a method."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedapp.commands.common import Overrides, console, interruptible, new_follower, say
from fedapp.errors import ConfigError, setting_of
from fedapp.home import display_path
from fedapp.settings import defaults, parse_overrides

TRIALS_SAVED = "finished trials are saved; the same command goes on after them"


def tune(
    strategy: Annotated[str, typer.Argument(help="The method: one of those below.")],
    config: Overrides = None,
    space: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=DOMAIN",
            help="Search a setting: eta=log:0.01:0.5, subsample=uniform:0.5:1, max-depth=int:3:8, "
            "pax.bins=share,equal. May be repeated; adds to the method's usual ones. Settings "
            "given by -c stay as they are.",
        ),
    ] = None,
    search: Annotated[str, typer.Option(help="random, or optuna (TPE).")] = "random",
    runs: Annotated[
        int | None, typer.Option(help="Trials at most; 20 where no budget is given.")
    ] = None,
    exchanges: Annotated[
        int | None, typer.Option(help="Exchanges of all trials and the last run at most.")
    ] = None,
    bytes_: Annotated[
        int | None,
        typer.Option("--bytes", help="Bytes of all trials and the last run at most."),
    ] = None,
    engine: Annotated[str, typer.Option(help="local, or simulation.")] = "local",
    output: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the search, which goes on where it is unfinished. By default one below "
            "runs/ that follows from the table, the settings and the space.",
        ),
    ] = None,
) -> None:
    """Search for the settings with the best validation score, then score its test rows once."""
    from fedapp.report.summary import repeat_command, trial_table
    from fedapp.runs.run import BEST, Tuned, read_trials
    from fedapp.runs.tune import Budget, Tuning

    follower = new_follower()
    with interruptible(lambda: TRIALS_SAVED), follower.alive():
        tuning = Tuning(
            strategy,
            parse_overrides(config or []),
            _domains(space or [], strategy),
            search,
            Budget(runs, exchanges, bytes_),
            engine,
            follower,
            output,
        )
        folder = tuning.carry_out().path
    summary = Tuned(folder).summary
    console.print(trial_table(read_trials(folder), summary["metric"]))
    test = ", ".join(
        f"{name} {value:.4f}" for name, value in summary["test"].items() if value is not None
    )
    say(f"test scores of the best, trial {summary['best']}: {test}")
    say(f"its model: {display_path(folder / BEST)}; in all {summary['exchanges']:,} exchanges")
    say(f"to repeat it:\n  {repeat_command(summary)}")


def _domains(pairs: list[str], method: str) -> dict[str, str]:
    space: dict[str, str] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise ConfigError(f"--space must be written as key=domain, got {pair}")
        setting = setting_of(name.strip(), defaults(), method)
        if setting in space:
            raise ConfigError(f"--space must name {setting} once, got {space[setting]} and {text}")
        space[setting] = text.strip()
    return space
