"""How far a site's clock is from its coordinator's.

Flower signs each request of a site with the time, and its SuperLink refuses one that is too early
or too late.
"""

from __future__ import annotations

from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_TOLERANCE

NOTICED = 2.0  # seconds; less than that disturbs nothing
RULE = (
    f"Flower refuses a site whose clock is {SYSTEM_TIME_TOLERANCE} s ahead of its SuperLink's, or "
    f"{TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE} s behind it"
)


def seconds_ahead(asked: float, answered: float, earliest: float, latest: float) -> float:
    """How far another clock is ahead of this one, at least; negative where it is behind.

    Parameters
    ----------
    asked, answered : Unix time by this clock; between them the other was read.
    earliest, latest : Unix time that the other showed then.
    """
    return max(0.0, earliest - answered) + min(0.0, latest - asked)


def clock_text(whose: str, ahead: float, than: str) -> str:
    """Says whose clock differs from which, and what Flower takes; empty where it hardly does."""
    if abs(ahead) < NOTICED:
        return ""
    side = "ahead of" if ahead > 0 else "behind"
    return f"{whose} clock is {abs(ahead):.0f} s {side} {than}; {RULE}"
