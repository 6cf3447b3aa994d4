"""How far a run has come, as its strategy knows it and every checkpoint keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class RunState:
    """Facts of a run at one step.

    Parameters
    ----------
    model_id : drawn when the run began; the same in all attempts.
    attempt : 0 for the first, one more for each time the run was resumed.
    step : of the last exchange that was begun.
    exchanges : that are finished.
    rounds : that are reported.
    left_out : excluded parties: ``party``, ``step`` and ``reason`` of each.
    warnings : told to the user.
    asked : step at which each party was last asked.
    fingerprints : of the parties' tables.
    keys : fingerprints of the parties' keys, as in the plan of the run.
    bytes : sent to parties, and to the server.
    seconds : since the run began, and in training, earlier attempts included.
    """

    model_id: str
    attempt: int = 0
    step: int = 0
    exchanges: int = 0
    rounds: int = 0
    left_out: tuple[Mapping[str, Any], ...] = ()
    warnings: tuple[str, ...] = ()
    asked: Mapping[str, int] = field(default_factory=dict)
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    bytes: tuple[int, int] = (0, 0)
    seconds: tuple[float, float] = (0.0, 0.0)

    def to_json(self) -> dict[str, Any]:
        """As a checkpoint keeps it."""
        return asdict(self)

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> RunState:
        """As ``to_json`` wrote it, whatever else is kept beside it."""
        known: dict[str, Any] = {each.name: facts[each.name] for each in fields(cls)}
        lists = {name: tuple(value) for name, value in known.items() if isinstance(value, list)}
        return cls(**{**known, **lists})

    def has_lost(self, party: str) -> bool:
        """Whether a party is excluded."""
        return any(gone["party"] == party for gone in self.left_out)

    def gap(self, party: str) -> int:
        """Steps since a party was last asked."""
        # Before the parties have said their names, all that is known is when all were last asked.
        known = set(self.asked.values()) or {0}
        return self.step - self.asked.get(party, known.pop() if len(known) == 1 else self.step)
