"""Differentially private scores: terms are clipped, and noised sums are made plausible again."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedapp.histograms.fixed_point import Bounds
from fedapp.metrics.adders import Array, Ints, WholeNumbers
from fedapp.metrics.sums import N_OWN_SUMS, Statistics
from fedapp.trees.objective import is_regression

LOSS_POWER = 2  # log losses are clipped at 4 nats
# Noise of a total over that of a cell. With equal noise a few totals would take most of the budget
# from the histograms, whose noise determines the error of the AUC.
TOTALS_NOISE = 2


class ClippedNumbers(WholeNumbers):
    """Whole numbers, each of which a row of the largest weight changes by at most as many units.

    ``error_power`` clips errors of regression at 2 to this power.
    """

    def __init__(self, bounds: Bounds, error_power: int) -> None:
        super().__init__(bounds)
        self._error_power, self._n_tables = error_power, 0

    @property
    def sensitivity(self) -> float:
        """Most that a row changes all sums so far (L2), in units."""
        # Each total, over TOTALS_NOISE, and one cell of each table.
        most = 2.0 ** (self.bounds.exponent(0) + self.bounds.heaviest)
        return float(most * np.sqrt(len(self.exponents) / TOTALS_NOISE**2 + self._n_tables))

    @property
    def n_totals(self) -> int:
        """Totals added up so far; among the sums they come before the cells."""
        return len(self.exponents)

    def cells(self, rows: Ints, columns: Ints, weights: Array, shape: tuple[int, int]) -> Ints:
        self._n_tables += 1
        return super().cells(rows, columns, weights, shape)

    def _power(self, size: str) -> int:
        powers = {
            "weight": 0,
            "loss": LOSS_POWER,
            "label": self.bounds.largest,
            "label square": 2 * self.bounds.largest,
            "error": self._error_power,
            "square": 2 * self._error_power,
        }
        return powers.get(size, self._error_power + LOSS_POWER)


def plausible(objective: str, found: Statistics) -> Statistics:
    """Noised sums, moved to values that rows could have.

    Cumulative sums over the bins are made to rise, halfway between the nearest rising sums above
    and below, so that curves are not biased.
    """
    totals = np.maximum(np.cumsum(found.histogram, axis=1), 0)
    totals = np.minimum(totals, totals[:, -1:])
    upper = np.maximum.accumulate(totals, axis=1)
    lower = np.minimum.accumulate(totals[:, ::-1], axis=1)[:, ::-1]
    histogram = np.diff((upper + lower) / 2, axis=1, prepend=0.0)
    return Statistics(_plausible_sums(objective, found.sums), np.maximum(histogram, 0))


def _plausible_sums(objective: str, noised: NDArray[np.float64]) -> Array:
    """Weight, then sums by objective: see ``fedapp.metrics.sums``."""
    sums = noised.copy()
    weight = sums[0] = max(sums[0], 1.0)
    if is_regression(objective):
        label = sums[3]
        # By Jensen, the sum of squared labels is at least the squared sum over the weight.
        sums[1:3] = np.maximum(sums[1:3], 0)
        sums[4] = max(sums[4], label**2 / weight)
        sums[N_OWN_SUMS:] = np.maximum(sums[N_OWN_SUMS:], 0)
        return sums
    sums[1:] = np.maximum(sums[1:], 0)
    counts = sums[2:N_OWN_SUMS] if objective == "binary:logistic" else sums[2:]
    if counts.sum() > weight:
        counts *= weight / counts.sum()
    return sums
