"""The time that a site goes by, where its clock is wrong."""

import os
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedapp.home import home
from fedapp.site import clock
from fedapp.site.clock import JUMP, SECONDS_A_DAY, STEP, Reading, Time
from fedapp.site.log import append
from tests.site.office import set_clock

DAY, HOUR, YEAR = SECONDS_A_DAY, 3600.0, 365 * SECONDS_A_DAY


@dataclass
class Machine:
    """A machine, its true time, and the time that its home goes by."""

    true: float = 1.8e9
    up: float = 0.0
    boot: int = 0
    now: Time | None = None
    written: list = field(default_factory=list)  # true times, stamps, and files' dates

    def passes(self, seconds, state="on"):
        """Time goes by while it runs; or while it is off, or stands still as a guest may."""
        self.true += seconds
        if state == "on":
            self.up += seconds
        elif state == "off":
            self.boot, self.up = self.boot + 1, 0.0

    def reads(self, off=0.0):
        """Read a clock that is ahead, and write something."""
        got = Reading(self.true + off, self.up, str(self.boot))
        self.now = self.now.next(got) if self.now else Time(got.wall, got.wall, *got)
        self.written.append((self.true, self.now.stamp, got.wall))

    def loses(self):
        """Its file is emptied: the log's last line has what was read before."""
        if self.now.stamp == self.now.now and self.now.ahead == 0:
            self.now = Time(self.now.now, self.now.wall, self.now.wall, doubted=self.now.now)


STATES = st.sampled_from(("on", "off", "still"))
# No gap is within an hour of what a clock is off by: by so much it may be set.
HOURS = st.sampled_from((0, 0.25, *range(3, 24 * 10, 3))).map(lambda n: n * HOUR)
AHEAD = (st.integers(-80, 80) | st.sampled_from((-2920, 2920))).map(lambda n: (3 * n + 1.5) * HOUR)
EVENTS = st.lists(
    st.tuples(st.just("right"), HOURS, STATES)
    | st.tuples(st.just("wrong"), HOURS, STATES, AHEAD, st.lists(HOURS, min_size=1, max_size=3))
    | st.tuples(st.just("loses")),
    max_size=12,
)


def played(events):
    """What a machine is after each event; a wrong clock is so for less than a day.

    If it is ahead by three days at most, for less than an hour. Then it is right again.
    """
    machine = Machine()
    machine.reads()
    for name, *words in events:
        if name == "loses":
            machine.loses()
        elif name == "right":
            machine.passes(*words)
            machine.reads()
        else:
            seconds, state, off, lasts = words
            machine.passes(seconds, state)
            machine.reads(off)
            # It may be right, for all that is known: the machine was off.
            ahead = machine.now.ahead
            most = HOUR if (ahead >= -STEP if off < 0 else ahead <= JUMP) else DAY
            for part in lasts:
                machine.passes(part % most / 4)
                machine.reads(off)
            machine.reads()
        yield machine


@given(EVENTS)
def test_nothing_is_older_than_it_is_by_a_clock_that_is_wrong_for_less_than_a_day(events):
    for machine in played(events):
        now = machine.now
        for true, stamp, dated in machine.written:
            passed = machine.true - true
            assert now.now - stamp <= passed + 1
            assert now.is_within(stamp, passed + 1)
            assert now.file_age(dated) <= passed


RIGHT = [(24, 0, "on"), (8, 16, "off"), (8, 160, "off"), (0, 168, "off"), (14, 10, "still")]


@pytest.mark.parametrize(("on", "gap", "state"), RIGHT)
@given(EVENTS, st.sampled_from((-YEAR, 0, YEAR)), HOURS)
def test_a_clock_that_is_right_again_refuses_nothing_for_long(on, gap, state, events, off, lasted):
    """On a machine that runs, by day, on Mondays, or whose uptime stands still at night."""
    *_, machine = played([*events, ("right", 0.0, "on")])
    machine.reads(off)
    machine.passes(lasted)
    machine.reads(off)
    n_days = (JUMP + DAY) / (on * HOUR + min(gap * HOUR, JUMP)) + 2
    before = len(machine.written)
    for n in range(2 * int(n_days + 1)):
        machine.passes(gap * HOUR, state)
        machine.reads()
        machine.passes(on * HOUR)
        machine.reads()
        if n > n_days:
            stamps = [stamp for _, stamp, _ in machine.written[:before]]
            assert not any(machine.now.is_within(stamp, DAY) for stamp in stamps)
            before += 2
            assert not machine.now.fault or gap > 24 or state == "still"


@pytest.mark.parametrize("content", [None, b"", b"{", b'{"now": NaN}'])
def test_a_reading_that_is_lost_is_in_the_log(content, monkeypatch):
    set_clock(monkeypatch, 1e9)
    append(home() / "sites" / "bank", "score")
    (home() / clock.CLOCK).unlink()
    set_clock(monkeypatch, 1e9 + YEAR)
    if content is None:
        (home() / clock.CLOCK).unlink()
    else:
        (home() / clock.CLOCK).write_bytes(content)
    now = clock.read_clock(home())
    assert (now.now, now.stamp) == (1e9, 1e9 + JUMP)
    assert now.fault.startswith("clock must be at 2001-09-09 01:46 to 2001-09-12 01:46 UTC, by")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root writes in another's home")
def test_the_file_of_the_clock_is_the_home_s_owner_s():
    home().mkdir()
    os.chown(home(), 65534, 65534)
    clock.read_clock(home())
    file = (home() / clock.CLOCK).stat()
    assert (file.st_uid, file.st_gid, file.st_mode & 0o777) == (65534, 65534, 0o600)


def test_the_kernel_says_how_long_the_machine_has_run(monkeypatch):
    first, second = clock.reading(), clock.reading()
    assert 0 <= second.since(first.up, first.boot) < 60
    monkeypatch.setattr(clock, "UPTIME", clock.UPTIME / "none")
    assert clock.reading().since(first.up, first.boot) is None
