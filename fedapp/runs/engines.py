"""Engines of ``--engine``: local, simulation, and the SuperLinks of Flower's configuration.

`engine_of` returns the function that carries out a run. Locally a thread answers for each party,
in this process; otherwise a SuperLink starts the run and is asked for its status.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

from fedapp.errors import RunFailedError, StoppedError
from fedapp.run_folder import QUIET, OnRound, RunFolder, Watcher
from fedapp.settings import Settings
from fedapp.superlinks import SIMULATED, find_superlink


def check_engine(name: str) -> None:
    """Raise ConfigError if there is no such engine."""
    if name not in SIMULATED:
        find_superlink(name)


def describe_engine(name: str) -> str:
    """Describe an engine in a line."""
    if name == "local":
        return "engine local: the parties are simulated in this process"
    if name == "simulation":
        return (
            "engine simulation: Flower's own runtime, whose start takes some 15 s; "
            "--engine local makes the same model without it"
        )
    return f"engine {name}: the SuperLink at {find_superlink(name).host}"


def engine_of(
    name: str, watcher: Watcher, on_round: OnRound | None = None
) -> Callable[[Settings], RunFolder | None]:
    """The function that carries out a run; `watcher` shows what it does around the run.
    ``on_round`` is called after every round; ignored if the run's folder is on another machine."""
    check_engine(name)
    if name == "local":
        from fedapp.runs.local import run_local  # Flower takes a second to import

        return lambda settings: run_local(settings, on_round=on_round)
    from fedapp.runs.flower import run_simulation, run_superlink

    if name == "simulation":

        def simulate(settings: Settings) -> RunFolder:
            with _reporting(RunFolder(Path(settings.run_dir)), on_round):
                return run_simulation(settings, watcher)

        return simulate
    return lambda settings: run_superlink(settings, name, watcher)


@contextmanager
def _reporting(folder: RunFolder, on_round: OnRound | None) -> Iterator[None]:
    """Call ``on_round`` from a thread after each round, and raise here what it raises."""
    from fedapp.report.progress import Rounds

    if on_round is None:
        yield
        return
    ended, faults = Event(), list[BaseException]()
    saved = folder.saved_state
    rounds = Rounds(folder.rounds, saved.rounds if saved else 0)

    def watch() -> None:
        is_running = True
        while is_running:  # one pass more after the end, for the last lines
            is_running = not ended.wait(0.1)
            try:
                for entry in rounds.new(QUIET.tell):
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
        if faults or folder.error != StoppedError.__name__:
            raise
        raise StoppedError(str(error)) from None
    finally:
        ended.set()
        thread.join()
        if faults:
            raise faults[0]
