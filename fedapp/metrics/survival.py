"""Concordance of times from a table of cells, which parties add up.

``Cells`` says where the table is divided. A row is in a range by its time: at one of the points,
which are times of rows, or between two of them. It is in a column by its margin. So a table has few
cells, and where there are few times, each range has one:

    times      t < a    t = a    a < t < b    t = b    t > b
    range        0        1          2          3        4

Pairs of one range are counted exactly where it is a point: there an event comes before a row that
is censored. Between points their order is unknown, and pairs of one column may be in any order;
``cell_scores`` counts what is unknown as one half, and bounds the error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from fedapp.arrays import Ints
from fedapp.histograms.sketch import prune

Array = npt.NDArray[np.float64]

N_SUMS = 3  # weight, weight of events, and squared weights of events between points
FORM: Final = 2  # rows of the table: censored, events; range x column is flat
NEAR, FAR = 1e-3, 50.0  # distances from the middle margin: of the narrowest column, the widest


@dataclass(frozen=True, slots=True, eq=False)
class Cells:
    """Where a table is divided; both may be shorter than ``most_points`` and ``n_columns`` say."""

    points: Array  # times, ascending
    edges: Array  # of the columns, ascending: of margins, or where these are hazards, of minus them

    @classmethod
    def of_rows(cls, times: Array, margins: Array, n_bins: int) -> Cells:
        """Points and edges at quantiles of rows; margins rise with times."""
        shares = np.arange(1, n_columns(n_bins)) / n_columns(n_bins)
        edges = np.unique(np.quantile(margins, shares)) if len(margins) else np.empty(0)
        values, counts = np.unique(times, return_counts=True)
        return cls(quantile_points(values, counts.astype(float), n_bins), edges)

    def places(self, times: Array, margins: Array) -> tuple[Ints, Ints]:
        """Range and column of each row."""
        sides = [np.searchsorted(self.points, times, side) for side in ("left", "right")]
        return sides[0] + sides[1], np.searchsorted(self.edges, margins, "right").astype(np.int64)


def n_columns(n_bins: int) -> int:
    """Columns of the table where other objectives have ``n_bins`` bins; even."""
    return 2 * max(n_bins // 32, 1)


def most_points(n_bins: int) -> int:
    """Most points of time of the table."""
    return n_columns(n_bins) // 2 - 1


def n_cells(n_bins: int) -> int:
    """Ranges of times (points, and those before, between and after them) times columns."""
    return (2 * most_points(n_bins) + 1) * n_columns(n_bins)


def first_edges(center: float, n_bins: int) -> Array:
    """Edges around a margin."""
    return _spread_edges(center, n_columns(n_bins) - 1)


def quantile_points(values: npt.NDArray[np.floating], masses: Array, n_bins: int) -> Array:
    """All of some times, ascending, or those at quantiles of their weight."""
    most = most_points(n_bins)
    if len(values) > most:
        values = values[prune(masses, most + 1)]
    return np.asarray(values, dtype=np.float64)


def _spread_edges(center: float, n_edges: int) -> Array:
    """Edges that are narrowest around a margin."""
    steps = np.linspace(-1, 1, n_edges) * math.asinh(FAR / NEAR)
    return center + NEAR * np.sinh(steps)


def next_edges(cells: Array, edges: Array, n_bins: int) -> Array:
    """Edges of the next table: most are quantiles of the last one's columns, as margins move
    little, the others around its middle; ``cells`` is a table of these ``edges``."""
    n_edges = n_columns(n_bins) - 1
    by_column = by_range(cells).sum(axis=(0, 1))[: len(edges) + 1]
    below = np.cumsum(by_column)[:-1] / by_column.sum()
    n_shares = 3 * n_edges // 4
    shares = np.arange(1, n_shares + 1) / (n_shares + 1)
    center = float(np.interp(0.5, below, edges))
    around = _spread_edges(center, n_edges - len(shares))
    return np.unique(np.concatenate((np.interp(shares, below, edges), around)))


def by_range(cells: Array) -> Array:
    """Cells as an array of censored rows and events, by range and column."""
    return cells.reshape(FORM, math.isqrt(cells.shape[1]), -1)


def cell_scores(cells: Array, squares: float = 0.0) -> tuple[float, float]:
    """Concordance, and how far it may be from that of all pairs; NaN without pairs.

    ``squares`` is the last of the sums: an event is no pair with itself.
    """
    censored, events = by_range(cells)
    rows = censored + events
    # later[t]: rows after the events of range t, by column
    later = np.cumsum(rows[::-1], axis=0)[::-1] - rows
    later[1::2] += censored[1::2]
    right, ties, wrong = _pairs(events, later)
    # Between points a censored row may be before an event, and so be no pair with it; of two
    # events either may be first, or neither.
    maybe_right, maybe_tied, maybe_wrong = _pairs(events[::2], censored[::2])
    in_one_column = float((events[::2] ** 2).sum()) / 2
    events_only = float((events[::2].sum(axis=1) ** 2).sum()) / 2 - in_one_column
    in_one_column = max(in_one_column - squares / 2, 0.0)
    maybe = maybe_right + maybe_tied + maybe_wrong
    counted = right + ties + wrong + maybe / 2 + events_only
    if not counted > 0:  # all pairs are of events in one cell, which may be ordered either way
        return (0.5, 0.5) if in_one_column > 0 else (np.nan, np.nan)
    value = right + ties / 2 + (maybe_right + maybe_tied / 2) / 2 + events_only / 2
    value /= counted
    unknown = maybe_tied + events_only + in_one_column
    low = right / (right + ties + wrong + maybe_wrong + unknown)
    most = right + ties + maybe_right + unknown
    return value, max(most / (most + wrong) - value, value - low)


def _pairs(events: Array, later: Array) -> tuple[float, float, float]:
    """Weights of pairs by whether the later row is in a column above, the same, or below."""
    above = np.cumsum(later[:, ::-1], axis=1)[:, ::-1] - later
    right, ties = float((events * above).sum()), float((events * later).sum())
    return right, ties, float((events.sum(axis=1) * later.sum(axis=1)).sum()) - right - ties
