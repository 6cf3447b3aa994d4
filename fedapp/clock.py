"""Difference between the clocks of a site and its coordinator.

Flower signs each request of a site with the time; its SuperLink refuses one that is too early or
too late.
"""

from __future__ import annotations

from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_TOLERANCE

NOTICED = 2.0  # seconds; a smaller difference does no harm
RULE = (
    f"Flower refuses a site whose clock is {SYSTEM_TIME_TOLERANCE} s ahead of its SuperLink's, or "
    f"{TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE} s behind it"
)


def seconds_ahead(asked: float, answered: float, earliest: float, latest: float) -> float:
    """Lower bound of how far another clock is ahead of this one; negative if it is behind.

    The other clock was read between ``asked`` and ``answered`` (Unix time by this clock) and showed
    a time between ``earliest`` and ``latest``.
    """
    return max(0.0, earliest - answered) + min(0.0, latest - asked)


def clock_text(whose: str, ahead: float, than: str) -> str:
    """Whose clock is off, by how much, and what Flower tolerates; empty below ``NOTICED``."""
    if abs(ahead) < NOTICED:
        return ""
    side = "ahead of" if ahead > 0 else "behind"
    return f"{whose} clock is {abs(ahead):.0f} s {side} {than}; {RULE}"
