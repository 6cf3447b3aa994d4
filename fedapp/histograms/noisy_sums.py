"""Make noised sums of gradients and hessians by bin consistent.

In each node, the bins of every column plus its missing rows have the same total, up to noise. All
columns together estimate the total best. A column's difference from it is subtracted from the
column's cells in equal parts, which gives the nearest consistent sums (least squares). A sum over k
of n cells then has about k (n - k) / n times the variance of a cell, at most n / 4 times, not k.

Source: Hay, Rastogi, Miklau and Suciu 2010, "Boosting the Accuracy of Differentially Private
Histograms Through Consistency" (arXiv:0904.0942), for one level of cells below a total.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from fedapp.histograms.bins import Ints
from fedapp.histograms.noisy_counts import CLEAR

Doubles = npt.NDArray[np.float64]
Sum = TypeVar("Sum", np.float64, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Agreed:
    """Consistent sums."""

    histograms: Doubles  # (n_nodes, n_bins, 2), columns one after the other
    has_missing: npt.NDArray[np.bool_]  # (n_nodes, n_columns): missing rows exceed the noise
    totals: Doubles  # (n_nodes, 2): sum of the bins and missing rows of every column


def agree(histograms: Doubles, missing: Doubles, widths: Ints, deviation: float) -> Agreed:
    """Make noised sums consistent.

    Parameters
    ----------
    histograms : as in ``Agreed``.
    missing : float64, shape (n_nodes, n_columns, 2): sums of rows without a value.
    widths : int64, shape (n_columns,): bins of each column, >= 1.
    deviation : standard deviation of the noise of a cell's hessians.
    """
    has_missing = missing[..., 1] > CLEAR * deviation
    column_totals = sums_by_column(histograms, widths) + np.where(
        has_missing[..., None], missing, 0
    )
    n_cells = (widths + has_missing)[..., None]
    # Weighted by precision: the variance of a column's total is proportional to its cells.
    totals = (column_totals / n_cells).sum(axis=1) / (1 / n_cells).sum(axis=1)
    shares = (totals[:, None] - column_totals) / n_cells
    return Agreed(histograms + np.repeat(shares, widths, axis=1), has_missing, totals)


def sums_by_column(histograms: npt.NDArray[Sum], widths: Ints) -> npt.NDArray[Sum]:
    """Sums over the bins of each column, (n_nodes, n_columns, 2); widths may be 0."""
    ends = np.cumsum(widths)
    before = np.zeros_like(histograms, shape=(len(histograms), 1, 2))
    sums = np.concatenate((before, np.cumsum(histograms, axis=1)), axis=1)
    column_sums: npt.NDArray[Sum] = sums[:, ends] - sums[:, ends - widths]
    return column_sums
