"""Prometheus metrics of a standing process: counts and times; no row, id or score.

Without prometheus-client nothing is counted, and ``text`` is empty.
"""

from __future__ import annotations

from typing import Any

SECONDS = (0.001, 0.002, 0.004, 0.008, 0.015, 0.03, 0.06, 0.12, 0.25, 0.5, 1, 2, 4)


class _Uncounted:
    """A metric that nobody reads."""

    def labels(self, *values: object) -> _Uncounted:
        return self

    def set(self, value: float) -> None:
        """Nothing."""

    inc = observe = set


def text() -> tuple[str, bytes]:
    """The media type and the metrics; nothing without the package."""
    try:
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
    except ImportError:
        return "text/plain", b""
    return CONTENT_TYPE_LATEST, generate_latest()


def _metric(kind: str, name: str, about: str, *labels: str, **more: Any) -> Any:
    try:
        import prometheus_client
    except ImportError:
        return _Uncounted()
    return getattr(prometheus_client, kind)(f"fedapp_{name}", about, labels, **more)


SCORED_ROWS = _metric("Counter", "scored_rows", "Rows that callers got scores of", "way")
SCORE_SECONDS = _metric("Histogram", "score_seconds", "Until a call's answer", buckets=SECONDS)
PEER_ROWS = _metric("Counter", "peer_rows", "Rows whose cells went to a peer", "peer")
PEER_SECONDS = _metric("Histogram", "peer_seconds", "Until a peer's answer", buckets=SECONDS)
PEER_UP = _metric("Gauge", "peer_up", "1 for a peer that answers", "peer")
