"""Progress of a run: what its parties are doing, since when, and how long it may take."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from fedapp.messages.fields import Request

PACE_ROUNDS = 5  # the mean time of the last ones predicts the next
BRIEF = 0.1  # seconds; a shorter stage is not shown


@dataclass(frozen=True, slots=True)
class Stage:
    """One step of a command or of a run."""

    doing: str  # such as "aligning the rows"
    since: float  # Unix time of its start
    seconds: float | None = None  # expected in all; None: unknown
    round: int = 0  # from 1; 0 outside the rounds
    rounds: int = 0  # number of rounds; 0 outside of them
    rounds_seconds: float | None = None  # expected from ``since`` to the end of the last round
    waiting: Sequence[str] = ()  # parties whose replies are missing


class Stages:
    """Turns the exchanges of a run into stages, with expected times.

    An exchange is expected to take as long as that of the same kind and place in the last round.
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
        """Begin a stage without an exchange."""
        self._phase, self._phase_began = doing, self._clock()
        self._noted = ("", 0)
        self._note(Stage(doing, self._phase_began))

    def begin(
        self, request: Request, round_id: int, n_rounds: int, seconds: float | None = None
    ) -> Callable[[], None]:
        """Begin an exchange; returns a function to call when all replies are there.

        ``seconds`` is its expected time before a similar one was timed. ``round_id`` is from 1, and
        ignored if the request is not part of a round.
        """
        now = self._clock()
        if request.each_round and round_id != self._round:
            if self._round:
                self._paces.append(now - self._round_began)
            self._round, self._round_began = round_id, now
            self._places.clear()
        self._places[request.kind] += 1
        place = request.kind, self._places[request.kind]
        expected = self._took.get(place, seconds)
        if request.each_round:
            remaining = None
            if self._paces:
                pace = sum(self._paces) / len(self._paces)
                rounds_time = pace * (n_rounds - self._round + 1)
                remaining = max(0.0, rounds_time - (now - self._round_began))
            # May be n_rounds + 1: an exchange after the last round has that round's scores.
            number = min(round_id, n_rounds)
            self._phase, noted = "", (request.doing, number)
            self._stage = Stage(request.doing, now, expected, number, n_rounds, remaining)
            # Of a round's brief exchanges only the first is noted.
            if noted != self._noted or expected is None or expected >= BRIEF:
                self._note(self._stage)
            self._noted = noted
        else:
            self._noted = ("", 0)
            # Successive exchanges of one phase count as one stage.
            if request.doing != self._phase:
                self._phase, self._phase_began = request.doing, now
            since = self._phase_began
            self._stage = Stage(request.doing, since, expected and expected + now - since)
            self._note(self._stage)

        def end() -> None:
            self._took[place] = self._clock() - now

        return end

    def name_waiting(self, parties: Sequence[str]) -> None:
        """Note the parties whose replies to the exchange are missing."""
        self._noted = ("", 0)  # the next exchange is noted, however brief
        doing = f"{self._stage.doing}; waiting for {', '.join(parties)}"
        self._note(replace(self._stage, doing=doing, waiting=parties))
