"""``--engine``: which there are, what each is, and what Flower calls its SuperLinks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from fedapp.config import Settings
from fedapp.errors import ConfigError, RunFailedError, StoppedError
from fedapp.names import near
from fedapp.run_folder import RunFolder
from fedapp.toml import read_toml
from fedapp.watch import OnRound

if TYPE_CHECKING:
    from simulations.engines import Tell

SIMULATED = ("local", "simulation")


def flower_config() -> Path:
    """Flower's list of SuperLinks; a coordinator's env.sh names the folder it lies in."""
    return Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr") / "config.toml"


def superlinks() -> Mapping[str, Mapping[str, Any]]:
    """The SuperLinks that Flower's configuration names.

    Raises
    ------
    ConfigError : the file is no TOML.
    """
    path = flower_config()
    if not path.is_file():
        return {}
    try:
        listed = read_toml(path.read_text(), f"{path} must be TOML, got").get("superlink", {})
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} must be TOML, got: {error}") from None
    return {
        name: link
        for name, link in listed.items()
        if isinstance(link, Mapping) and name not in SIMULATED
    }


def check_engine(name: str) -> None:
    """Hold that an engine is known.

    Raises
    ------
    ConfigError : it is not; says which are, and what a coordinator has to do first.
    """
    known = [*SIMULATED, *superlinks()]
    if name not in known:
        rule = f"must be {', '.join(known)}, or another SuperLink in {flower_config()}"
        hint = near(name, known) or "; a coordinator first sources its own: . FOLDER/env.sh"
        raise ConfigError(f"engine {rule}, got {name!r}{hint}")


def told(name: str) -> str:
    """Which engine carries the messages, in a line."""
    if name == "local":
        return "engine local: the parties are simulated in this process"
    if name == "simulation":
        return (
            "engine simulation: Flower's own runtime, whose start takes some 15 s; "
            "--engine local makes the same model without it"
        )
    # A user's address holds the password.
    address = str(superlinks()[name].get("address", "no address")).rpartition("@")[2]
    return f"engine {name}: the SuperLink at {address}"


def engine_of(
    name: str, tell: Tell, on_round: OnRound | None = None
) -> Callable[[Settings], RunFolder | None]:
    """What carries the messages; ``tell`` is told what it does beside that.

    Parameters
    ----------
    on_round : called after every round; of a run that goes on elsewhere nothing is known.

    Raises
    ------
    ConfigError : there is no such engine.
    """
    from simulations import engines, local

    check_engine(name)
    if name == "local":
        return lambda settings: local.run_local(settings, on_round=on_round)
    if name == "simulation":

        def simulate(settings: Settings) -> RunFolder:
            with _reporting(RunFolder(Path(settings.run_dir)), on_round):
                return engines.run_simulation(settings, tell)

        return simulate
    return lambda settings: engines.run_superlink(settings, name, tell)


_TICK_SECONDS = 0.1


@contextmanager
def _reporting(folder: RunFolder, on_round: OnRound | None) -> Iterator[None]:
    """Call ``on_round`` from a thread after each round; the block raises what it raises."""
    from fedapp.report.progress import Rounds

    if on_round is None:
        yield
        return
    ended, faults = Event(), list[BaseException]()
    kept = folder.kept
    rounds = Rounds(folder.rounds, kept.rounds if kept else 0)

    def watch() -> None:
        going = True
        while going:
            going = not ended.wait(_TICK_SECONDS)
            try:
                for entry in rounds.new(lambda text: None):
                    if not faults and on_round(entry) is False:
                        folder.ask_to_stop()
            except BaseException as fault:
                faults.append(fault)
                folder.ask_to_stop()

    thread = Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    except RunFailedError as error:
        if faults or not folder.was_stopped:
            raise
        raise StoppedError(str(error)) from None
    finally:
        ended.set()
        thread.join()
        if faults:
            raise faults[0]
