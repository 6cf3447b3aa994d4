"""Detect rows to predict whose values differ from those a model was trained on.

A party stores quantiles of its columns with its part of a model, on its own disk, as column names
alone do not distinguish tables.

The two rules were measured on default-credit, give-me-some-credit and the breast-hetero tables,
each randomly cut in two (60 cuts, 5 to 1,000 rows to predict): no cut comes near either rule, and
the other party's file of default-credit is detected from 100 rows on. Tables whose columns are all
distributed alike (breast-hetero) cannot be distinguished; hence files are named after parties.

    warning     half of the columns have a Kolmogorov distance (largest difference of the
                distribution functions) above 0.15 + 1.5 / sqrt(n_rows), or most values outside
                the training range, widened by a tenth; the largest median of matching rows was
                0.36 at 20 rows, 0.13 at 300 to 1,000
    error       in most rows, most values and at least three are outside that range: one column
                that drifts, such as days since a date, does not make another table
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
    """Quantiles of each column, float32, shape (n_columns, 65); NaN for a column without values."""
    out = np.full((values.shape[1], N_QUANTILES), np.nan, dtype=np.float32)
    shares = np.linspace(0, 1, N_QUANTILES)
    for points, column in zip(out, values[:: 1 + len(values) // MOST_ROWS].T, strict=True):
        present = column[~np.isnan(column)]
        if present.size:
            points[:] = np.quantile(present, shares, method="inverted_cdf")
    return out


def unlike_columns(trained: Values, values: Values) -> list[int]:
    """Columns with another distribution than in training, if they are half of all; else none."""
    beyond = 2 * _outside(trained, values).sum(axis=0) > len(values)
    far = [
        place
        for place, (points, column) in enumerate(zip(trained, values.T, strict=True))
        if beyond[place] or _is_far(points, column)
    ]
    return far if 2 * len(far) >= len(trained) else []


def check_range(trained: Values, values: Values) -> None:
    """Check that most rows are in the training range; raises DataError."""
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
    """Values outside their column's training range; none of a constant column."""
    lows, highs = trained[:, 0], trained[:, -1]
    margins = MARGIN * (highs - lows)
    beyond = (values < lows - margins) | (values > highs + margins)
    return np.asarray(beyond & (lows < highs))


def _is_far(points: Values, column: Values) -> bool:
    """Whether the Kolmogorov distance of a column exceeds what rows of the same table reach."""
    present: Any = np.sort(column[~np.isnan(column)])
    if np.isnan(points).any() or not present.size:
        return False
    # Both distribution functions jump: compare them on both sides of every stored quantile.
    at = np.unique(points)
    sides: tuple[Literal["left", "right"], ...] = ("left", "right")
    distances = [
        np.searchsorted(present, at, side) / present.size
        - np.searchsorted(points, at, side) / points.size
        for side in sides
    ]
    return bool(np.abs(distances).max() > LEAST_DISTANCE + OF_FEW_ROWS / np.sqrt(present.size))
