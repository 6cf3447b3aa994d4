"""Where a run is: what its parties are doing, since when, and how long it may take."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fedapp.messages.fields import Request

PACE_ROUNDS = 5  # the last ones tell how long the next takes
BRIEF = 0.1  # seconds; nobody sees a stage that lasts no longer


@dataclass(frozen=True, slots=True)
class Stage:
    """One step of a command or of the run it follows.

    Parameters
    ----------
    doing : in words, such as "aligning the rows".
    since : when it began, seconds of Unix time.
    seconds : it may take in all; None where nothing is known.
    round, rounds : the training round from 1 on, and how many there are; 0 outside the rounds.
    rounds_seconds : from ``since`` to the end of the last round; None where nothing is known.
    waiting : parties whose replies are missing.
    """

    doing: str
    since: float
    seconds: float | None = None
    round: int = 0
    rounds: int = 0
    rounds_seconds: float | None = None
    waiting: Sequence[str] = ()


class Stages:
    """Turns the exchanges of a run into stages, and learns from each how long its like takes.

    The like of an exchange is the one of the same kind at the same place of the last round.

    Parameters
    ----------
    note : told every stage.
    clock : Unix time in seconds.
    """

    def __init__(self, note: Callable[[Stage], None], clock: Callable[[], float] = time.time):
        self._note, self._clock = note, clock
        self._phase, self._phase_began = "", 0.0
        self._took: dict[tuple[str, int], float] = {}
        self._places: Counter[str] = Counter()
        self._round, self._round_began = 0, 0.0
        self._noted = ("", 0)  # what the parties do, and the round
        self._paces: deque[float] = deque(maxlen=PACE_ROUNDS)
        self._stage = Stage("", 0.0)

    def wait(self, doing: str) -> None:
        """Something else than an exchange."""
        self._phase, self._phase_began = doing, self._clock()
        self._noted = ("", 0)
        self._note(Stage(doing, self._phase_began))

    def begin(
        self, request: Request, round_id: int, n_rounds: int, seconds: float | None = None
    ) -> Callable[[], None]:
        """An exchange.

        Parameters
        ----------
        request : that goes out.
        round_id : being trained, from 1 on; counts where the request is one of a round's.
        n_rounds : of the run.
        seconds : that it may take, where that is known before any like it was timed.

        Returns
        -------
        To be called when the replies are there.
        """
        now = self._clock()
        if request.each_round:
            self._enter(round_id, now)
        self._places[request.kind] += 1
        place = request.kind, self._places[request.kind]
        expected = self._took.get(place, seconds)
        if request.each_round:
            left = self._rounds_seconds(n_rounds, now)
            # A round more than there are: the last one's scores come with its first exchange.
            number = min(round_id, n_rounds)
            self._phase, noted = "", (request.doing, number)
            self._stage = Stage(request.doing, now, expected, number, n_rounds, left)
            # Of a round's exchanges that will be brief the first stands for all.
            if noted != self._noted or expected is None or expected >= BRIEF:
                self._note(self._stage)
            self._noted = noted
        else:
            self._noted = ("", 0)
            # Exchanges of one phase follow each other, and its time goes on.
            if request.doing != self._phase:
                self._phase, self._phase_began = request.doing, now
            since = self._phase_began
            self._stage = Stage(request.doing, since, expected and expected + now - since)
            self._note(self._stage)

        def end() -> None:
            self._took[place] = self._clock() - now

        return end

    def name_waiting(self, parties: Sequence[str]) -> None:
        """Name the parties whose replies to the exchange are missing."""
        self._noted = ("", 0)  # the next exchange is noted, however brief
        doing = f"{self._stage.doing}; waiting for {', '.join(parties)}"
        self._note(replace(self._stage, doing=doing, waiting=parties))

    def _enter(self, round_id: int, now: float) -> None:
        """Take the time of the last round where another one begins."""
        if round_id == self._round:
            return
        if self._round:
            self._paces.append(now - self._round_began)
        self._round, self._round_began = round_id, now
        self._places.clear()

    def _rounds_seconds(self, n_rounds: int, now: float) -> float | None:
        """Seconds to the end of the last round, at the pace of the last ones."""
        if not self._paces:
            return None
        pace = sum(self._paces) / len(self._paces)
        return max(0.0, pace * (n_rounds - self._round + 1) - (now - self._round_began))
