"""Whether a table to predict has values like those a model was trained on.

A party keeps quantiles of its columns with its part of a model, on its own disk. Names alone do not
tell two tables apart whose columns are called alike.

Two rules, measured on default-credit, give-me-some-credit and the breast-hetero tables, each cut in
two by chance (60 cuts, 5 to 1,000 rows to predict): no cut comes near either of them, and the
other party's file of default-credit is seen from 100 rows on. Tables that are alike in every column
(as those of breast-hetero) cannot be told apart: hence files go by the parties' names.

    warned of   half of the columns differ by more than 0.15 + 1.5 / sqrt(n_rows) in their
                distribution (largest difference of the distribution functions, Kolmogorov's
                distance), or have most values outside of the range trained on, widened by a
                tenth; the largest median of honest rows was 0.36 at 20, 0.13 at 300 to 1,000
    refused     most values of most rows lie outside of that range, three of a row at least: one
                column that drifts, as days since a date do, is no other table
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fedapp.errors import DataError

Values = npt.NDArray[np.float32]
N_QUANTILES = 65
MOST_ROWS = 100_000  # of which quantiles are taken
MARGIN = 0.1  # of a column's range, beyond it
LEAST_DISTANCE, OF_FEW_ROWS = 0.15, 1.5
FEWEST_OUTSIDE = 3  # columns of a row


def quantiles(values: Values) -> Values:
    """Quantiles of each column without its missing values; float32, shape (n_columns, 65), NaN for
    a column that has no others.
    """
    found = np.full((values.shape[1], N_QUANTILES), np.nan, dtype=np.float32)
    shares = np.linspace(0, 1, N_QUANTILES)
    for points, column in zip(found, values[:: 1 + len(values) // MOST_ROWS].T, strict=True):
        known = column[~np.isnan(column)]
        if known.size:
            points[:] = np.quantile(known, shares, method="inverted_cdf")
    return found


def unlike_columns(trained: Values, values: Values) -> list[int]:
    """Columns whose values are spread unlike those trained on, where half of all are; else none."""
    beyond = 2 * _outside(trained, values).sum(axis=0) > len(values)
    far = [
        place
        for place, (points, column) in enumerate(zip(trained, values.T, strict=True))
        if beyond[place] or _is_far(points, column)
    ]
    return far if 2 * len(far) >= len(trained) else []


def check_range(trained: Values, values: Values) -> None:
    """Hold that not most values of most rows, of several columns, lie outside of the range trained
    on.

    Raises
    ------
    DataError : they do.
    """
    n_ranged = int((trained[:, 0] < trained[:, -1]).sum())
    n_outside = _outside(trained, values).sum(axis=1)
    n_rows = int(((2 * n_outside > n_ranged) & (n_outside >= FEWEST_OUTSIDE)).sum())
    if 2 * n_rows > len(values):
        rule = "table must have values in the range that the model was trained on"
        raise DataError(
            f"{rule}, got {n_rows:,} of {len(values):,} rows with most columns outside of it; "
            "is it the table of another party, or in other units?"
        )


def _outside(trained: Values, values: Values) -> npt.NDArray[np.bool_]:
    """Which values lie beyond a column's range, of columns that have one."""
    lows, highs = trained[:, 0], trained[:, -1]
    margins = MARGIN * (highs - lows)
    beyond = (values < lows - margins) | (values > highs + margins)
    return np.asarray(beyond & (lows < highs))


def _is_far(points: Values, column: Values) -> bool:
    """Whether a column's distribution differs by more than rows of the same table ever do."""
    known: Any = np.sort(column[~np.isnan(column)])
    if np.isnan(points).any() or not known.size:
        return False
    at = np.unique(points)
    sides: tuple[Literal["left", "right"], ...] = ("left", "right")
    distances = [
        np.searchsorted(known, at, side) / known.size
        - np.searchsorted(points, at, side) / points.size
        for side in sides
    ]
    return bool(np.abs(distances).max() > LEAST_DISTANCE + OF_FEW_ROWS / np.sqrt(known.size))
