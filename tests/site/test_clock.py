"""The time that a site goes by, where its clock is wrong."""

import time

from hypothesis import given
from hypothesis import strategies as st

from fedapp.home import home
from fedapp.site import clock
from fedapp.site.clock import SECONDS_A_DAY, STEP, Reading, Time

DAY, YEAR = SECONDS_A_DAY, 365 * SECONDS_A_DAY
HOURS = st.integers(0, 24 * 40).map(lambda n: n * 3600.0)


@st.composite
def days_of_a_site(draw):
    """True times of readings, and these; at most one start of the machine had a wrong clock.

    That start has readings for less than a day, and the clock is right again.
    """
    now, up, boot, readings = 1.8e9, 0.0, 0, []
    n_starts = draw(st.integers(1, 6))
    wrong = draw(st.integers(-n_starts, n_starts - 1))
    eighths = st.integers(-400, 400).map(lambda n: n * DAY / 8)
    offset = draw(st.sampled_from((-YEAR, YEAR)) | eighths)
    for start in range(n_starts):
        if start and draw(st.booleans()):
            boot, up, now = boot + 1, 0.0, now + draw(HOURS)  # the machine was off
        is_wrong = start == wrong
        for _ in range(draw(st.integers(1, 4))):
            ran = draw(st.integers(0, 5)) * 3600.0 if is_wrong else draw(HOURS)
            now, up = now + ran, up + ran
            readings.append((now, Reading(now + is_wrong * offset, up, str(boot))))
    return readings


def times_of(readings):
    """The site's time at each reading, beside the true one."""
    before, times = None, []
    for true, got in readings:
        before = before.next(got) if before else Time(*got)
        times.append((true, before))
    return times


@given(days_of_a_site())
def test_one_wrong_start_makes_nothing_older_than_it_is(readings):
    times = times_of(readings)
    for n, (true, now) in enumerate(times):
        for written, then in times[:n]:
            assert now.age(then.now) <= true - written + STEP


@given(days_of_a_site(), st.lists(st.integers(0, 3), min_size=24, max_size=24))
def test_one_wrong_start_permits_no_more_than_one_day_more(readings, asked):
    begun = []
    for n, (true, now) in enumerate(times_of(readings)):
        for _ in range(asked[n % len(asked)]):
            if sum(now.is_within(then, DAY) for _, then in begun) < 2:
                begun.append((true, now.now))
    for true, _ in begun:
        assert sum(true - DAY + STEP < other <= true for other, _ in begun) <= 4


@given(days_of_a_site())
def test_a_clock_that_is_right_again_is_believed_within_a_day(readings):
    *_, (true, now) = times_of(readings)
    for hours in range(1, 72):
        got = Reading(true + 3600.0 * hours, now.up + 3600.0, now.boot)
        now = now.next(got)
        assert hours < 25 or (now.now == got.wall and not now.fault)


def test_the_newest_file_stands_for_the_reading_before_the_first(monkeypatch):
    log = home() / "sites" / "bank" / "log.jsonl"
    log.parent.mkdir(parents=True)
    log.touch()
    now = time.time()
    monkeypatch.setattr(clock, "reading", lambda: Reading(now + YEAR, 0.0, "one"))
    for content in (None, b"{"):  # there is none, or it is broken
        if content:
            (home() / clock.CLOCK).write_bytes(content)
        assert abs(clock.read_clock(home()).now - now) < STEP
    (home() / clock.CLOCK).write_bytes(b"")  # a person believes the clock
    assert clock.read_clock(home()).now == now + YEAR


def test_the_kernel_says_how_long_the_machine_has_run(monkeypatch):
    first, second = clock.reading(), clock.reading()
    assert 0 <= second.since(first.up, first.boot) < 60
    monkeypatch.setattr(clock, "UPTIME", clock.UPTIME / "none")
    assert clock.reading().since(first.up, first.boot) is None
