"""What is known of a result's scores: sampling intervals, differences to baselines, binning."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedapp.data.schema import first

MOST_BASELINES = 5  # in a line


def score_text(value: float | None, digits: int = 4) -> str:
    """A score to `digits` decimals, or significant digits from 100 on; undefined is a dash."""
    if value is None or math.isnan(value):
        return "–"  # noqa: RUF001
    return f"{value:.{digits}f}" if abs(value) < 100 else f"{value:.{digits + 2}g}"


def span_text(span: Sequence[float]) -> str:
    """A difference and the ends of its interval: ``+0.0012 (-0.0003 to +0.0027)``."""
    value, low, high = span
    return f"{value:+.4f} ({low:+.4f} to {high:+.4f})"


def certainty_notes(summary: Mapping[str, Any], watched: str) -> list[str]:
    """Intervals of a run's scores and of their differences to baselines, and errors of binning.

    Of the ``watched`` score also the differences to parties alone.
    """
    lines = []
    if spans := summary.get("intervals"):
        ends = (f"{name} {' to '.join(map(score_text, span))}" for name, span in spans.items())
        lines.append(
            f"95 % intervals, test: {', '.join(ends)}; over samples of as many rows, auc by "
            "DeLong's method, shares of rows by Wilson's, others by bootstrap. Models are scored "
            "on the same rows, so their differences are known better"
        )
    compared = (summary.get("baselines") or {}).get("differences") or {}
    for metric, span in (compared.get("pooled") or {}).items():
        others = {"pooled": span} | {
            f"{name} alone": spans[metric]
            for name, spans in compared["alone"].items()
            if metric in spans and metric == watched
        }
        texts = [f"{name} {span_text(span)}" for name, span in others.items()]
        less = f"test {metric} less that of a baseline, with 95 % intervals"
        lines.append(f"{less}: {first(texts, MOST_BASELINES)}")
    errors = summary.get("binning_errors") or {}
    if texts := [f"{name} {_rounded_up(error)}" for name, error in errors.items() if error]:
        lines.append(f"scores from bins are this near those of rows: {', '.join(texts)}")
    return lines


def _rounded_up(value: float) -> str:
    """A bound to two significant digits."""
    step = 10.0 ** (math.floor(math.log10(value)) - 1)
    return f"{math.ceil(value / step) * step:.2g}"
