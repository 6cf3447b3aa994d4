"""The time that a home's sites go by: what is deleted, and what a day permits, depends on it.

No single reading of the clock decides that. ``Time.now`` counts the seconds that have surely passed
since the home's first reading: those that the machine has run, and those by which the clock is
ahead after the machine was off or stood still, three days each time at most. These count once the
clock is believed: it has moved as the machine runs

- for an hour after a start of the machine, if it is ahead by three days at most,
- or for a day.

If it moves otherwise before, what counts is the median of three: of what was due, of what the clock
before would say, and of what this one says. So one that was wrong between two right ones counts
nothing. What is written meanwhile has a stamp as if they counted: it is as young as it may be.

``$FEDAPP_HOME/clock.json`` has the last reading; where it is lost, the sites' logs have one.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import time
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import NamedTuple

from fedapp.home import PRIVATE, private_folder

log = logging.getLogger("fedapp.site")
CLOCK = "clock.json"
CLOCK_BYTES = 1024
SECONDS_A_DAY = 24 * 60 * 60
STEP = 60 * 60  # that a running machine's clock may be set by
LATEST = 2.0**37  # no clock is later
JUMP = 3 * SECONDS_A_DAY  # over a start of the machine, which may be off for a weekend
BOOT, UPTIME = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/uptime")


class Reading(NamedTuple):
    """The wall clock, and how long the machine has run."""

    wall: float  # Unix time
    up: float  # seconds
    boot: str  # id of the machine's start

    def since(self, up: float, boot: str) -> float | None:
        """Seconds that the machine has run since another reading; None if it was restarted."""
        return self.up - up if boot == self.boot and up <= self.up else None


def reading() -> Reading:
    """Read the clocks. libfaketime changes all but the kernel's file."""
    try:
        up = float(UPTIME.read_text().split()[0])
        return Reading(time.time(), up, BOOT.read_text().strip())
    except (OSError, ValueError):
        return Reading(time.time(), time.monotonic(), _process())


@cache
def _process() -> str:
    return uuid.uuid4().hex


@dataclass(frozen=True, slots=True)
class Time:
    """The time that a home goes by; all but ``up`` and ``since`` in seconds of Unix time."""

    now: float  # which has surely come, as counted since the first reading
    due: float  # what the clock says at least, as far as it is believed
    wall: float  # what it says
    up: float = 0.0
    boot: str = ""
    since: float = 0.0  # ``up`` of the reading since which it moves as the machine runs
    started: bool = True  # whether that one was the first of a start
    believed: bool = True
    claim: float = JUMP  # the least of what it was ahead by since it was not believed
    doubted: float = 0.0  # ``now`` of the last reading that dates files wrongly

    @property
    def ahead(self) -> float:
        """Seconds by which the clock is ahead of what is due."""
        return self.wall - self.due

    @property
    def stamp(self) -> float:
        """When something is written now, at the latest."""
        return self.now + _counted(self.ahead)

    @property
    def shown(self) -> float:
        """What a right clock says, as far as is known."""
        return self.due if self.fault else self.wall

    def age(self, stamp: float) -> float:
        """Seconds since something with a stamp was written, at least."""
        return self.now - JUMP - stamp

    def file_age(self, written: float) -> float:
        """Seconds since a file was written, at least; the clock that dated it may be wrong."""
        age, since = self.wall - written, self.now - self.doubted
        return (min(age, since) if age >= -JUMP else since) - JUMP

    def is_within(self, stamp: float, seconds: float) -> bool:
        """Whether less than some seconds may have passed since a stamp."""
        return -2 * JUMP <= self.now - stamp < seconds

    @property
    def fault(self) -> str:
        """What is wrong with the clock, in words."""
        most = JUMP if self.started else STEP
        if -STEP <= self.ahead <= most:
            return ""
        return (
            f"clock must be at {_text(self.due)} to {_text(self.due + most)} UTC, by its last "
            f"reading, got {_text(self.wall)}: set it; if it is right, it is believed in a day"
        )

    @property
    def hint(self) -> str:
        """What to add to a refusal that would end with time."""
        return f"; {self.fault}" * bool(self.fault)

    def next(self, got: Reading) -> Time:
        """The time after another reading."""
        ran = got.since(self.up, self.boot)
        now, due, wall = (moment + (ran or 0.0) for moment in (self.now, self.due, self.wall))
        if self.believed and ran is not None and abs(got.wall - wall) <= STEP:
            return replace(self, now=now, due=got.wall, wall=got.wall, up=got.up)
        since, started, claim = self.since, self.started, self.claim
        if ran is None or abs(got.wall - wall) > STEP:
            agreed = sorted((due, wall, got.wall))[1]
            if agreed != due and (ran is None or self.up - since >= STEP):
                now, due, claim = now + min(_counted(agreed - due), claim), agreed, JUMP
            since, started = got.up, ran is None
        ahead = got.wall - due
        claim = min(_counted(ahead), claim)
        doubted = self.doubted if -STEP <= ahead <= JUMP else now
        if got.up - since < (STEP if started and 0 <= ahead <= JUMP else SECONDS_A_DAY):
            return Time(now, due, *got, since, started, False, claim, doubted)
        return Time(now + claim, got.wall, *got, since, started, doubted=doubted)


def _counted(ahead: float) -> float:
    """Seconds of those by which a clock is ahead that count, once it is believed."""
    return min(max(ahead, 0.0), JUMP)


def read_clock(home: Path) -> Time:
    """Read the clock, compare it with the reading before, and note it."""
    private_folder(home)
    file = os.open(home / CLOCK, os.O_RDWR | os.O_CREAT, PRIVATE)
    try:
        if os.fstat(file).st_uid != (owner := home.stat()).st_uid:  # root has made it
            with suppress(PermissionError):
                os.fchown(file, owner.st_uid, owner.st_gid)
        fcntl.flock(file, fcntl.LOCK_EX)
        before = _parsed(os.pread(file, CLOCK_BYTES, 0)) or _logged(home)
        got = reading()
        now = before.next(got) if before else Time(got.wall, got.wall, *got)
        os.pwrite(file, json.dumps(asdict(now)).ljust(CLOCK_BYTES).encode(), 0)
    finally:
        os.close(file)
    if now.fault and not (before and before.fault):
        log.warning("%s. Until then only the time that the machine runs counts", now.fault)
    return now


def _parsed(text: bytes) -> Time | None:
    try:
        time = Time(**json.loads(text))
        numbers = time.now, time.due, time.wall, time.up, time.since, time.doubted
        return time if all(0 <= number < LATEST for number in numbers) else None
    except (ValueError, TypeError):
        return None


def _logged(home: Path) -> Time | None:
    """What stands for a reading that is lost."""
    times = []
    for path in (home / "sites").glob("*/log*.jsonl"):
        with suppress(OSError, ValueError, TypeError, LookupError, AttributeError):
            fields = json.loads(path.read_bytes().rpartition(b"\n")[0].splitlines()[-1])
            wall = float(fields.get("clock", fields["time"]))
            times.append(Time(float(fields["time"]), wall, wall, doubted=float(fields["time"])))
    return max(times, key=lambda time: time.now, default=None)


def _text(moment: float) -> str:
    return f"{datetime.fromtimestamp(moment, UTC):%Y-%m-%d %H:%M}"
