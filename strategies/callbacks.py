"""Events that a strategy reports; ``fedapp.server_app`` writes them to a run's folder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fedapp.conversation import Checkpoint
from fedapp.run_folder import RoundInfo, RunState, Stage
from fedapp.settings import Settings


class Callbacks:
    """Receives a strategy's events, in its thread; each method does nothing here.

    Set ``strategy.callbacks = MyCallbacks()`` before the start.
    """

    def begin(self, settings: Settings, state: RunState) -> None:
        """Called once the parties are known, before the first message.

        ``settings`` have the number of parties; ``state`` is that of an earlier attempt, if any.
        """

    def warnings(self, simulated: bool) -> Iterable[str]:
        """More warnings about the parties' tables than their replies allow.

        ``simulated`` is whether the parties are on this machine.
        """
        return ()

    def stage(self, stage: Stage) -> None:
        """Called before each exchange, and while something is waited for."""

    def end_round(self, line: RoundInfo) -> object:
        """Called after every round; the run stops where it returns False."""

    def checkpoint(self, checkpoint: Checkpoint, state: RunState) -> None:
        """Called where an interrupted run could resume."""

    def write_model(self, files: Mapping[str, str]) -> None:
        """Called with the finished model: texts by file name, the model first."""

    def way_on(self) -> str:
        """How a stopped run can be resumed, for the error message."""
        return "its model so far is lost"
