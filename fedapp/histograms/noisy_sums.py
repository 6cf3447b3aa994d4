"""Noised sums of gradients and hessians by bin, made to agree with each other.

Of each node, the bins of every column and its rows without a value come to the same total, but for
noise. The total is known best from all columns together. What the cells of a column have more or
less than that is taken from them in equal parts, which is the nearest set of sums that agree (least
squares): a sum over k of n cells then has about k (n - k) / n times the variance of a cell, at most
n / 4 times, and not k times.

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
    """Sums that agree.

    Parameters
    ----------
    histograms : float64, shape (n_nodes, n_bins, 2), columns one after the other.
    has_missing : bool, shape (n_nodes, n_columns): where rows without a value can be told from
        noise; elsewhere there are none.
    totals : float64, shape (n_nodes, 2): what the bins of each column, and its rows without a
        value, add up to.
    """

    histograms: Doubles
    has_missing: npt.NDArray[np.bool_]
    totals: Doubles


def agree(histograms: Doubles, missing: Doubles, widths: Ints, deviation: float) -> Agreed:
    """Make noised sums agree.

    Parameters
    ----------
    histograms : as in ``Agreed``.
    missing : float64, shape (n_nodes, n_columns, 2): of rows without a value.
    widths : int64, shape (n_columns,): bins of each column, >= 1.
    deviation : standard deviation of the noise of a cell's hessians.
    """
    has_missing = missing[..., 1] > CLEAR * deviation
    known = sums_by_column(histograms, widths) + np.where(has_missing[..., None], missing, 0)
    n_cells = (widths + has_missing)[..., None]
    # By their precision: each is of so many cells with the same noise.
    totals = (known / n_cells).sum(axis=1) / (1 / n_cells).sum(axis=1)
    shares = (totals[:, None] - known) / n_cells
    return Agreed(histograms + np.repeat(shares, widths, axis=1), has_missing, totals)


def sums_by_column(histograms: npt.NDArray[Sum], widths: Ints) -> npt.NDArray[Sum]:
    """Over the bins of each column: shape (n_nodes, n_columns, 2); arguments as of ``agree``, but
    for widths that may be 0."""
    ends = np.cumsum(widths)
    before = np.zeros_like(histograms, shape=(len(histograms), 1, 2))
    sums = np.concatenate((before, np.cumsum(histograms, axis=1)), axis=1)
    found: npt.NDArray[Sum] = sums[:, ends] - sums[:, ends - widths]
    return found
