"""What is known of a result's scores: sampling intervals, differences to baselines, binning.

``verdict`` says which differences are more than chance; ``certainty_notes`` has all in figures.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedapp.data.schema import first
from fedapp.errors import as_plain
from fedapp.metrics import larger_is_better

MOST_BASELINES, LONGEST = 5, 40  # in a line, and characters of a name
BETTER, WORSE, EQUAL = "better than {}", "worse than {}", "equal to {}"
UNDECIDED = "against {} no difference is shown"
Span = Sequence[float]  # a difference, and the ends of its interval


def score_text(value: float | None, digits: int = 4) -> str:
    """A score to `digits` decimals, or significant digits from 100 on; undefined is a dash."""
    if value is None or math.isnan(value):
        return "–"  # noqa: RUF001
    return f"{value:.{digits}f}" if abs(value) < 100 else f"{value:.{digits + 2}g}"


def span_text(span: Sequence[float]) -> str:
    """A difference and the ends of its interval: ``+0.0012 (-0.0003 to +0.0027)``."""
    value, low, high = span
    return f"{value:+.4f} ({low:+.4f} to {high:+.4f})"


def percent_text(share: float) -> str:
    """A share in per cent: ``33%``, ``6.2%``."""
    return f"{100 * share:.1f}".removesuffix(".0") + "%"


def compared_with(summary: Mapping[str, Any], metric: str) -> dict[str, Span]:
    """Differences of the run's score to those of the pooled model and of each party alone."""
    every = by_baseline((summary.get("baselines") or {}).get("differences"))
    spans = {name: of_metric.get(metric) or [None] for name, of_metric in every.items()}
    return {name: span for name, span in spans.items() if None not in span}


def by_baseline(of: Mapping[str, Any] | None, form: str = "{} alone") -> dict[str, Any]:
    """What is of the pooled model and of each party alone, by the names of the models."""
    every = of or {}
    alone = {form.format(name): values for name, values in (every.get("alone") or {}).items()}
    return {"pooled": every.get("pooled") or {}, **alone}


def verdict(summary: Mapping[str, Any], metric: str) -> str:
    """Which baselines the model is better than, by the differences whose interval excludes 0."""
    outcomes = BETTER, WORSE, EQUAL, UNDECIDED
    clauses: dict[tuple[int, str], list[str]] = {}
    if not (spans := compared_with(summary, metric)):
        return ""
    sign = 1 if larger_is_better(metric) else -1
    for name in sorted(spans, key="pooled".__eq__):  # last
        ends = sorted(sign * end for end in spans[name][1:])
        outcome = 2 if not any(ends) else 0 if ends[0] > 0 else 1 if ends[1] < 0 else 3
        party, _, alone = name.rpartition(" ")
        clauses.setdefault((outcome, alone if party else ""), []).append(party or name)
    texts = []
    for (outcome, alone), names in sorted(clauses.items(), key=lambda clause: clause[0][0]):
        shown = [as_plain(name, LONGEST) for name in names]
        is_long = len(shown) > MOST_BASELINES
        text = first(shown, MOST_BASELINES) if is_long else enumerated(shown)
        texts.append(outcomes[outcome].format(f"{text} {alone}".strip()))
    return f"By {metric} on the same test rows: {'; '.join(texts)}."


def enumerated(names: Sequence[str], word: str = "and") -> str:
    """Names in a sentence: ``a, b and c``."""
    *others, last = names
    return f"{', '.join(others)} {word} {last}" if others else last


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
    for metric in compared.get("pooled") or ():
        texts = [
            f"{name} {span_text(span)}"
            for name, span in compared_with(summary, metric).items()
            if metric == watched or name == "pooled"
        ]
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
