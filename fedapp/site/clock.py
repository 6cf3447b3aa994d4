"""The time that a home's sites go by: what is deleted, and what a day permits, depends on it.

A clock that is wrong once must not end a quota or a log. So each reading is compared with the one
before, which is in ``$FEDAPP_HOME/clock.json``, and is believed

- if it moved as the machine has run since, within an hour,
- or, after a start of the machine, if it moved by three days at most.

Where there is no file, the newest file of the sites is the reading before. While a reading is not
believed, time goes on as the machine runs. A clock that is right is believed again at once. Another
one is believed when it has gone on for a day; if the machine was started meanwhile, only as far as
it had come before. A person who has compared it empties the file.
"""

from __future__ import annotations

import fcntl
import json
import logging
import time
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import NamedTuple

from fedapp.home import secret_at

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
        return Reading(time.time(), up, _boot())
    except (OSError, ValueError):
        return Reading(time.time(), time.monotonic(), _process())


@cache
def _boot() -> str:
    return BOOT.read_text().strip()


@cache
def _process() -> str:
    return uuid.uuid4().hex


@dataclass(frozen=True, slots=True)
class Time:
    """The time that a home goes by."""

    now: float  # Unix time
    up: float = 0.0
    boot: str = ""
    doubted: Reading | None = None  # the first of the readings that are not believed
    fault: str = ""  # what is wrong with it, in words
    clock: float = 0.0  # what the clock says, if that is not believed
    doubted_from: float = 0.0  # when that began
    doubted_to: float = 0.0  # when it was last so; 0: never
    lags: bool = False  # whether time stood still meanwhile, as far as is known

    def age(self, written: float) -> float:
        """Seconds since something was written, at least.

        A wrong clock may have dated it, or may be believed now, by a `JUMP`.
        """
        if self.doubted_to and written > self.now + STEP:
            written = self.doubted_to
        return self.now - JUMP - max(written, self.doubted_to)

    def is_within(self, then: float, seconds: float) -> bool:
        """Whether less than some seconds may have passed since a recorded time."""
        if self.lags and self.doubted_from <= then:
            then = max(then, self.doubted_to)
        return -JUMP <= self.now - then < seconds

    @property
    def hint(self) -> str:
        """What to add to a refusal that would end with time."""
        return f"; {self.fault}" * bool(self.fault)

    def next(self, got: Reading) -> Time:
        """The time after another reading."""
        ran = got.since(self.up, self.boot)
        now, jump = self.now + (ran or 0.0), JUMP if ran is None else STEP
        first, is_same = self.doubted, False
        if first and (ran_since := got.since(first.up, first.boot)) is not None:
            is_same = abs(got.wall - first.wall - ran_since) <= STEP
            if is_same and ran_since >= SECONDS_A_DAY:
                return self._believing(got, lags=True)
        elif first:
            is_same = 0 <= got.wall - first.wall < SECONDS_A_DAY
            if got.wall - first.wall >= SECONDS_A_DAY:  # both agree that the first one has come
                ran_then = Reading(0.0, self.up, self.boot).since(first.up, first.boot) or 0.0
                now, jump, first = max(now, first.wall + ran_then), JUMP, None
        if now - STEP <= got.wall <= now + jump:
            return self._believing(got, lags=jump == JUMP)
        began = self.doubted_from if first else now
        if first and is_same:
            return Time(now, got.up, got.boot, first, self.fault, got.wall, began, now)
        fault = (
            f"clock must be at {_text(now)} to {_text(now + jump)} UTC, by its last reading, got "
            f"{_text(got.wall)}: set it; if it is right, empty {CLOCK} in the site's home, or wait "
            "for a day"
        )
        return Time(now, got.up, got.boot, got, fault, got.wall, began, now)

    def _believing(self, got: Reading, lags: bool) -> Time:
        if not self.doubted:
            return replace(self, now=got.wall, up=got.up, boot=got.boot)
        return Time(*got, doubted_from=self.doubted_from, doubted_to=got.wall, lags=lags)


def read_clock(home: Path) -> Time:
    """Read the clock, compare it with the reading before, and note it."""
    path = home / CLOCK
    secret_at(path, lambda: _first(home))
    with path.open("rb+", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        text = file.read()
        before, got = _parsed(text) or _parsed(_first(home) if text.strip() else b""), reading()
        now = before.next(got) if before else Time(*got)
        file.seek(0)
        file.write(json.dumps(asdict(now)).ljust(CLOCK_BYTES).encode())
    return now


@cache
def warn(fault: str) -> None:
    """Log what is wrong with the clock, once."""
    log.warning("%s. Until then nothing old is deleted, and no quota of a day starts again", fault)


def _first(home: Path) -> bytes:
    """What stands for a reading before the first: the time of the sites' newest file."""
    newest = 0.0
    for path in (home / "sites").glob("*/*"):
        with suppress(FileNotFoundError):  # another process has deleted it
            newest = max(newest, path.lstat().st_mtime)
    return json.dumps({"now": newest}).encode() if newest else b""


def _parsed(text: bytes) -> Time | None:
    try:
        fields = json.loads(text)
        doubted = fields.pop("doubted", None)
        time = Time(**fields, doubted=doubted and Reading(*doubted))
        moments = (time.now, time.clock, time.doubted_from, time.doubted_to, *(doubted or ())[:2])
        return time if all(0 <= moment < LATEST for moment in (*moments, time.up)) else None
    except (ValueError, TypeError, AttributeError):
        return None


def _text(moment: float) -> str:
    return f"{datetime.fromtimestamp(moment, UTC):%Y-%m-%d %H:%M}"
