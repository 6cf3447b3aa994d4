"""Callbacks of a run: progress shown to the user, and a function called after every round."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypedDict

from fedapp.run_folder import RunFolder


class RoundInfo(TypedDict):
    """A finished round, as on its line of ``rounds.jsonl``.

    ``round`` is from 1 to ``rounds``, ``trees`` counts those of the model, ``leaves`` those of the
    round; ``train`` and ``valid`` are scores by name, None if not finite; ``exchanges`` is the
    number since the run began; ``bytes`` (``to_parties`` and ``to_server``) and ``seconds`` are of
    this round.
    """

    round: int
    rounds: int
    trees: int
    leaves: float | None
    train: Mapping[str, float | None]
    valid: Mapping[str, float | None]
    exchanges: int
    bytes: Mapping[str, int]
    seconds: float


# Called after every round, in order. If it returns False the run stops, and can be resumed.
OnRound = Callable[[RoundInfo], object]


class Watcher(Protocol):
    """Shows the progress of a command or a call and of its run."""

    @property
    def seconds(self) -> float:
        """Seconds since the command or the call began."""

    def begin(self, doing: str, ends: bool = False) -> None:
        """Show what is done from now on; with ``ends``, in place of the run's own stages."""

    def tell(self, text: str) -> None:
        """Print a line that stays."""

    def run(self, folder: RunFolder, metric: str) -> AbstractContextManager[None]:
        """A context during which the folder's run is shown; ``metric`` is the score shown first."""


class Silent:
    """A watcher that shows nothing."""

    def __init__(self) -> None:
        self._began = time.time()

    @property
    def seconds(self) -> float:
        """Since the call began."""
        return time.time() - self._began

    def begin(self, doing: str, ends: bool = False) -> None:
        """Nothing."""

    def tell(self, text: str) -> None:
        """Nothing."""

    def run(self, folder: RunFolder, metric: str) -> AbstractContextManager[None]:
        """Nothing."""
        return nullcontext()
