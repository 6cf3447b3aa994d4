"""What ``fedapp audit`` measured on a run, as ``audit.json`` has it and pages show it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from fedapp.errors import DataError
from fedapp.records.document import from_text, model_text

AUDIT = "audit.json"
HEAD = ("attack", "seat", "success [95 % interval]", "chance", "lowered by (elsewhere)", "cost")
TITLE = "What attacks found"
BOUND = (
    "Every success is a lower bound: a better attack, or parties that act together, may reach more."
)


@dataclass(frozen=True, slots=True)
class Finding:
    """How far one attack got from one seat."""

    attack: str  # its name
    seat: str  # who attacks
    measure: str  # what ``success`` and ``chance`` count
    success: float  # share, 0 to 1
    low: float  # low end of the 95 % interval of ``success``
    high: float  # high end
    chance: float  # the same without what the seat sees
    interval: str  # what the interval is over
    lowered_by: str  # a setting
    cost: str  # of that setting

    @property
    def is_above_chance(self) -> bool:
        """Whether the interval of ``success`` is above chance."""
        return self.low > self.chance

    @property
    def cells(self) -> tuple[str, ...]:
        """A line below ``HEAD``."""
        success = f"{self.success:.3f} [{self.low:.3f}, {self.high:.3f}]"
        chance = f"{self.chance:.3f}"
        return self.attack, self.seat, success, chance, self.lowered_by, self.cost


@dataclass(frozen=True, slots=True)
class Unmeasured:
    """What the records of a seat do not allow to measure."""

    attack: str  # its name
    seat: str  # who attacks
    why: str  # what is missing


@dataclass(frozen=True, slots=True)
class Audit:
    """An audit of a run."""

    KIND: ClassVar[str] = "audit"
    date: str
    seconds: float
    quick: bool  # with fewer models, columns and draws
    subject: str  # which run was attacked
    findings: tuple[Finding, ...]
    unmeasured: tuple[Unmeasured, ...]

    @property
    def notes(self) -> Iterator[str]:
        """Sentences below the table."""
        notes = (
            f"{finding.attack}: {finding.measure}. Interval over {finding.interval}."
            for finding in self.findings
        )
        yield from dict.fromkeys(notes)
        for missing in self.unmeasured:
            yield f"not measured: {missing.attack} by {missing.seat}: {missing.why}."

    @property
    def summary(self) -> str:
        """The sentence above the table."""
        how = "fedapp audit --quick" if self.quick else "fedapp audit"
        return f"{how}, {self.date}: {self.subject}. {BOUND}"


def read_audit(run_dir: Path) -> Audit | None:
    """The audit in a run's folder, or None; DataError if the file is damaged."""
    path = run_dir / AUDIT
    if not path.is_file():
        return None
    try:
        return from_text(model_text(path), Audit)
    except DataError as error:
        rule = f"{AUDIT} must be as fedapp audit wrote it, got another"
        raise DataError(f"{rule}: audit the run again ({error})") from error
