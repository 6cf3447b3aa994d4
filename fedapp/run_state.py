"""Progress of a run, as its strategy counts it and every checkpoint has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class RunState:
    """Progress of a run at one step."""

    model_id: str  # drawn when the run begins; the same in all attempts
    attempt: int = 0  # times the run was resumed
    step: int = 0  # of the last exchange that was begun
    exchanges: int = 0  # finished
    rounds: int = 0  # reported
    left_out: tuple[Mapping[str, Any], ...] = ()  # excluded parties: party, step, reason
    warnings: tuple[str, ...] = ()
    asked: Mapping[str, int] = field(default_factory=dict)  # step of the last request, by party
    fingerprints: Mapping[str, str] = field(default_factory=dict)  # of the tables, by party
    keys: Mapping[str, str] = field(default_factory=dict)  # fingerprints of the parties' keys
    bytes: tuple[int, int] = (0, 0)  # sent to the parties, and to the server
    seconds: tuple[float, float] = (0.0, 0.0)  # in all, and in training; of all attempts

    def to_json(self) -> dict[str, Any]:
        """Fields for a checkpoint."""
        return asdict(self)

    @classmethod
    def from_json(cls, facts: Mapping[str, Any]) -> RunState:
        """Inverse of ``to_json``; other facts are ignored."""
        values: dict[str, Any] = {each.name: facts[each.name] for each in fields(cls)}
        lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        return cls(**{**values, **lists})

    def has_lost(self, party: str) -> bool:
        """Whether a party is excluded."""
        return any(gone["party"] == party for gone in self.left_out)

    def gap(self, party: str) -> int:
        """Steps since a party was last asked."""
        # Before the parties' names are known, a gap is known only if all were last asked together.
        steps = set(self.asked.values()) or {0}
        return self.step - self.asked.get(party, steps.pop() if len(steps) == 1 else self.step)
