"""Concordance of times from a table of cells, which parties add up.

A row is in one of ``2 N_TIMES`` rows of the table, by its time and whether it is an event, and in a
column by its predicted time. Pairs of one range of times are not counted; of the others, pairs of
one column count as one half.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

N_TIMES: Final = 64
STEEPNESS = 1000.0  # ranges are of equal width up to a 1000th of the longest time, then geometric
SPAN = -12.0, 4.0  # logarithms of predicted times over the longest; the outer columns have the rest
MIDDLE = math.exp(sum(SPAN) / 2)  # of the columns, over the longest time
N_SUMS = 2  # weight, and weight of events
FORM = 2 * N_TIMES
FARTHEST = 64.0  # margin of a hazard ratio, beyond which the outer columns have the rest


def places_of(labels: Array, predictions: Array, n_bins: int, longest: float) -> tuple[Ints, Ints]:
    """Range of times, and column, of each row; ``longest`` is no time below all times.

    Ranges are narrower near 0, where most times are.
    """
    times = np.log1p(STEEPNESS * np.abs(labels) / longest) / np.log1p(STEEPNESS)
    low, high = SPAN
    shares = (np.log(np.maximum(predictions / longest, math.exp(low))) - low) / (high - low)
    n_columns = columns_of(n_bins)
    return (
        np.minimum(times * N_TIMES, N_TIMES - 1).astype(np.int64),
        np.minimum(shares * n_columns, n_columns - 1).astype(np.int64),
    )


def times_of_hazards(margins: Array, longest: float) -> Array:
    """Predicted times in the order of hazard ratios, whose columns are narrowest around margin 0:
    their scale is free, so a column of a fixed width would miss all pairs of some models."""
    half = (SPAN[1] - SPAN[0]) / 2
    steps = np.arcsinh(2 * margins) / math.asinh(2 * FARTHEST)
    return np.asarray(longest * MIDDLE * np.exp(-half * np.clip(steps, -1, 1)))


def columns_of(n_bins: int) -> int:
    """Columns of the table where other objectives have ``n_bins`` bins."""
    return max(n_bins // 16, 2)


def cell_scores(cells: Array) -> tuple[float, float]:
    """Concordance, and how far it may be from that of all pairs; NaN without pairs."""
    by_event = cells.reshape(N_TIMES, 2, -1)
    events, rows = by_event[:, 1], by_event.sum(axis=1)
    # later[t]: rows of ranges after t, by column
    later = np.cumsum(rows[::-1], axis=0)[::-1] - rows
    above = np.cumsum(later[:, ::-1], axis=1)[:, ::-1] - later
    concordant = float((events * above).sum())
    ties = float((events * later).sum())
    counted = float((events.sum(axis=1) * later.sum(axis=1)).sum())
    # Pairs of a range: of an event and a censored row, or of two events, counted once.
    of_events, of_rows = events.sum(axis=1), rows.sum(axis=1)
    missing = float((of_events * (of_rows - of_events) + of_events**2 / 2).sum())
    if not counted > 0:
        return np.nan, np.nan
    value = (concordant + ties / 2) / counted
    low = concordant / (counted + missing)
    high = (concordant + ties + missing) / (counted + missing)
    return value, max(high - value, value - low)
