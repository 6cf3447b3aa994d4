"""What is told while a run goes on: to whom it is shown, and after every round."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, TypedDict

from fedapp.run_folder import RunFolder


class RoundInfo(TypedDict):
    """A finished round, as on its line of ``rounds.jsonl``.

    ``round`` counts from 1, ``rounds`` is how many were asked for, ``trees`` and ``leaves`` count
    those of the model and of the round; ``train`` and ``valid`` hold scores by name, with None
    for one that is not finite; ``exchanges`` counts since the run began, ``bytes`` (``to_parties``
    and ``to_server``) and ``seconds`` are of this round.
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


# Called after every round, in order; a run that it returns False to stops, and can be resumed.
OnRound = Callable[[RoundInfo], object]


class Watcher(Protocol):
    """Shows what a command or a call does, and where the run is that it waits for."""

    @property
    def seconds(self) -> float:
        """Since the command or the call began."""

    def begin(self, doing: str, ends: bool = False) -> None:
        """Told what is done from now on; ``ends``: whatever the run says of itself."""

    def tell(self, text: str) -> None:
        """Told a line that stays."""

    def run(self, folder: RunFolder, metric: str) -> AbstractContextManager[None]:
        """A context in which the run of a folder goes on; ``metric`` is the score to show first."""


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
