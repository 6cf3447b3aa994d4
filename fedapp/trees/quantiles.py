"""Leaves that are quantiles of residuals: ``reg:absoluteerror`` and ``reg:quantileerror``.

Once a tree has grown, each leaf gets the quantile of the residuals of its drawn rows, times
``eta``; penalties of leaves act on splits only. ``QuantileSearch`` finds the quantiles of rows that
several parties have, from counts by digit, as ``sketch.Descent`` does those of columns.

Source: XGBoost 3.2, src/objective/adaptive.cc and src/common/stats.h. XGBoost 3.4 minimises
other losses under these names.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from fedapp.arrays import Doubles, Flags, Floats
from fedapp.histograms.fixed_point import Whole
from fedapp.histograms.sketch import BASE, DIGIT_BITS, ValueKeys, digit_counts, values_of
from fedapp.trees.losses import LossParameters, Objective

Ints = npt.NDArray[np.integer]
MEDIAN = "reg:absoluteerror"


def quantile(values: Floats, level: float, weights: Floats | None = None) -> np.float32:
    """The quantile of float32 numbers, shape (n >= 1,): without weights that at rank
    ``level * (n + 1)``, interpolated; with weights the first up to which that share of them is."""
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    if weights is not None:
        totals = np.cumsum(weights[order], dtype=np.float32)  # one after the other
        rank = int(np.searchsorted(totals, np.float32(float(totals[-1]) * level)))
        return np.float32(ordered[min(rank, len(ordered) - 1)])
    ranks, share = ranks_around(np.array(len(ordered)), level)
    return np.float32(_between(ordered[ranks], share))


def ranks_around(n_rows: Whole, level: float) -> tuple[Whole, Doubles]:
    """Ranks, from 0, of the two rows around each quantile, (..., 2); and how far it is from the
    first to the second."""
    places = level * (n_rows + 1)
    is_inside = (1 / (n_rows + 1) < level) & (level < n_rows / (n_rows + 1))
    ends = n_rows * 0 if level < 0.5 else n_rows - 1
    low = np.where(is_inside, np.floor(places) - 1, ends).astype(np.int64)
    return np.stack((low, low + is_inside), axis=-1), np.where(is_inside, places - 1 - low, 0.0)


def _between(pairs: Floats, shares: Doubles) -> Floats:
    low, high = pairs[..., 0], pairs[..., 1]
    steps = (high - low).astype(np.float64)  # differences of float32
    return (low.astype(np.float64) + shares * steps).astype(np.float32)


def quantile_score(
    objective: Objective, labels: Floats, weights: Floats | None, parameters: LossParameters
) -> Floats:
    """The base score: the quantile of the labels of all rows; float32, shape (1,)."""
    score = quantile(labels, leaf_level(objective, parameters), weights)
    total = float(len(labels) if weights is None else weights.sum(dtype=np.float64))
    return as_base_score(objective, score, total)


def as_base_score(objective: Objective, score: np.float32, total: float) -> Floats:
    """The base score by the quantile of labels of rows of this weight; float32, shape (1,)."""
    if objective == MEDIAN:
        # XGBoost multiplies by the weight of the rows and divides again, each time as float32.
        score = np.float32(float(np.float32(float(score) * total)) * (1 / total))
    return np.array([score], dtype=np.float32)


def leaf_quantiles(
    leaves: Ints, residuals: Floats, weights: Floats | None, level: float, n_nodes: int
) -> Floats:
    """Quantile of the residuals of the rows in each node; float32, shape (n_nodes,), else 0."""
    values = np.zeros(n_nodes, dtype=np.float32)
    order = np.argsort(leaves, kind="stable")
    nodes, firsts = np.unique(leaves[order], return_index=True)
    for node, rows in zip(nodes, np.split(order, firsts[1:]), strict=True):
        values[node] = quantile(residuals[rows], level, None if weights is None else weights[rows])
    return values


def leaf_level(objective: str, parameters: LossParameters) -> float:
    """The level of the quantiles, between 0 and 1, as XGBoost rounds it."""
    return 0.5 if objective == MEDIAN else float(np.float32(parameters.quantile_alpha))


# Rows of several parties


def leaf_digit_counts(
    leaves: Ints, residuals: Floats, prefixes: ValueKeys, offsets: Whole, digit: int
) -> Whole:
    """``digit_counts`` of rows by their leaf; leaf i has prefixes ``offsets[i]`` to ``[i+1]``."""
    order = np.argsort(leaves, kind="stable")
    ends = np.searchsorted(leaves[order], np.arange(len(offsets)))
    ones = np.ones(len(order), dtype=np.int64)
    counts = [np.empty((0, BASE), dtype=np.int64)]
    for (start, end), (first, last) in zip(pairwise(ends), pairwise(offsets), strict=True):
        values, weights = residuals[order[start:end], None], ones[start:end]
        column_ends = np.array([0, last - first])
        counts.append(digit_counts(values, weights, prefixes[first:last], column_ends, digit))
    return np.concatenate(counts)


class QuantileSearch:
    """Search for the quantile of each leaf: of the two rows around it, digit by digit."""

    def __init__(self, n_leaves: int, level: float) -> None:
        self.level, self.digit = level, 0
        self.n_rows = np.zeros(n_leaves, dtype=np.int64)
        # (n_leaves, 2): digits so far, and the rank among the rows that have them.
        self._keys = np.zeros((n_leaves, 2), dtype=np.uint32)
        self._ranks = np.zeros((n_leaves, 2), dtype=np.int64)
        self._shares = np.zeros(n_leaves)
        self._counts: dict[str, Whole] = {}  # the last ones, by sender
        self._places: tuple[Ints, Ints] = (np.empty(0, np.int64),) * 2  # of each prefix in them

    @property
    def _differs(self) -> Flags:
        """Which of the keys are others than the one before, in the same leaf."""
        return np.stack((self._keys[:, 0] >= 0, self._keys[:, 1] != self._keys[:, 0]), axis=1)

    def wanted(self) -> tuple[ValueKeys, Whole]:
        """One or two prefixes of each leaf to count next, and the first of each leaf."""
        differs = self._differs
        return self._keys[differs], np.append(0, np.cumsum(differs.sum(axis=1)))

    def check(self, sender: str, counts: Whole) -> None:
        """ValueError if counts are not of the rows that the sender has counted by the last digit;
        to be called once a digit."""
        if self.digit and (counts.sum(axis=1) != self._counts[sender][self._places]).any():
            raise ValueError("must be of the rows that were counted by the digit before")
        self._counts[sender] = counts

    def take(self, counts: Whole) -> None:
        """Continue with the next digit, from the parties' ``leaf_digit_counts``, added up."""
        if not self.digit:
            self.n_rows = counts.sum(axis=1)
            self._ranks, self._shares = ranks_around(self.n_rows, self.level)
        rows = (np.cumsum(self._differs) - 1).reshape(-1, 2)
        up_to = np.cumsum(counts, axis=1)[rows]
        digits = (up_to <= self._ranks[..., None]).sum(axis=2).clip(max=BASE - 1)
        below = np.take_along_axis(up_to - counts[rows], digits[..., None], axis=2)
        self._ranks = self._ranks - below[..., 0]
        self._keys = (self._keys << np.uint32(DIGIT_BITS)) | digits.astype(np.uint32)
        self._places = rows[self._differs], digits[self._differs]
        self.digit += 1

    def values(self) -> Floats:
        """The quantiles, once all digits are counted; 0 without rows."""
        pairs = np.where(self.n_rows[:, None] > 0, values_of(self._keys), np.float32(0))
        return _between(pairs, self._shares)
