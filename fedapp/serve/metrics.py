"""Prometheus metrics of a standing process: counts and times; no row, id or score."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

SECONDS = (0.001, 0.002, 0.004, 0.008, 0.015, 0.03, 0.06, 0.12, 0.25, 0.5, 1, 2, 4)

SCORED_ROWS = Counter("fedapp_scored_rows", "Rows that callers got scores of", ["way"])
SCORE_SECONDS = Histogram("fedapp_score_seconds", "From a call to its answer", buckets=SECONDS)
REFUSED = Counter("fedapp_scores_refused", "Calls without a score, by HTTP status", ["status"])
PEER_ROWS = Counter("fedapp_peer_rows", "Rows whose cells went to a peer", ["peer"])
PEER_SECONDS = Histogram("fedapp_peer_seconds", "From a peer's request on", buckets=SECONDS)
PEER_UP = Gauge("fedapp_peer_up", "1 for a peer that answers", ["peer"])
