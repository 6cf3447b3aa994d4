"""Bins of a table's columns, in the layout of XGBoost's histograms.

All columns are concatenated in one flat array::

    offsets  0        3           7      9
    edges    c0 c1 c2 c0 c1 c2 c3 c0 c1         one upper edge per bin
    column   ---0---- -----1----- --2--

Bin ``b`` of a column contains ``edges[b-1] <= x < edges[b]``; bin 0 also everything below, the last
bin everything above. A column of categories has one bin per code, up to the highest code in use;
its edges are 1, 2, 3 and so on, and any value that is not a category's code is missing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
Codes = npt.NDArray[np.uint8 | np.uint16]

NO_CODE = -1


@dataclass(frozen=True, slots=True, eq=False)
class Cuts:
    """Bin edges of all columns of a table."""

    edges: Floats  # (n_bins,): upper edges, ascending by column, the last above all values
    offsets: Ints  # (n_columns + 1,): bins of column f are offsets[f] to offsets[f+1]
    minima: Floats  # (n_columns,): below all values; as a threshold, only missing go left
    # (n_columns,): number of categories, 0 for a numeric column; empty if all are numeric
    categories: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    @property
    def n_columns(self) -> int:
        """Number of columns."""
        return len(self.minima)

    @property
    def widths(self) -> Ints:
        """Number of bins of each column; int64, shape (n_columns,)."""
        return np.diff(self.offsets)

    @property
    def by_category(self) -> npt.NDArray[np.bool_]:
        """Which columns are categorical; bool, shape (n_columns,)."""
        if not len(self.categories):
            return np.zeros(self.n_columns, dtype=bool)
        return self.categories > 0

    def column(self, column_id: int) -> Floats:
        """Upper edges of one column."""
        return self.edges[self.offsets[column_id] : self.offsets[column_id + 1]]


def ragged(arrays: list[npt.NDArray[np.float32]]) -> tuple[Floats, Ints]:
    """Concatenate arrays; returns the flat array and the start of each."""
    offsets = np.zeros(len(arrays) + 1, dtype=np.int64)
    np.cumsum([len(array) for array in arrays], out=offsets[1:])
    flat = np.concatenate(arrays) if arrays else np.empty(0, dtype=np.float32)
    return flat.astype(np.float32, copy=False), offsets


def spans(lengths: Ints) -> tuple[Ints, Ints]:
    """For each element of spans of these lengths: its span, and its place there."""
    spans = np.repeat(np.arange(len(lengths)), lengths)
    return spans, np.arange(len(spans)) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def with_categories(cuts: Cuts, categories: Ints, used: Ints) -> Cuts:
    """Replace the bins of columns of categories by one bin per category.

    ``categories`` is as in ``Cuts``, with all columns; ``used`` is int64, shape (n_columns,), the
    number of bins of these columns. Categories beyond do not occur.
    """
    if not categories.any():
        return cuts
    edges = [
        np.arange(1, used[column_id] + 1, dtype=np.float32) if width else cuts.column(column_id)
        for column_id, width in enumerate(categories.tolist())
    ]
    return Cuts(*ragged(edges), np.where(categories > 0, np.float32(0), cuts.minima), categories)


def without_categories(values: Floats, categories: Ints) -> Floats:
    """The values, with columns of categories set to missing; ``categories`` as in ``Cuts``."""
    return np.where(categories > 0, np.float32(np.nan), values) if categories.any() else values


def digitise(values: Floats, cuts: Cuts) -> tuple[Codes, int]:
    """Replace every value by the number of its bin.

    Parameters
    ----------
    values : float32, shape (n_rows, n_columns); NaN is missing, and so is an unknown code of a
        category.

    Returns
    -------
    codes : uint8 (uint16 past 256 codes), shape (n_rows, n_columns).
    missing_code : the code of a missing value, or -1 if no value is missing.
    """
    widths, by_category = cuts.widths.tolist(), cuts.by_category.tolist()
    # Number of codes of a column of categories, 0 for a numeric one.
    limits = [width if named else 0 for width, named in zip(widths, by_category, strict=True)]
    pairs = zip(values.T, limits, strict=True)
    any_absent = any(absent(column, limit).any() for column, limit in pairs)
    kind = np.uint8 if max(widths, default=0) + any_absent <= 256 else np.uint16
    missing_code = int(np.iinfo(kind).max) if any_absent else NO_CODE
    codes: Codes = np.empty(values.shape, dtype=kind)
    for column_id, (column, limit) in enumerate(zip(values.T, limits, strict=True)):
        edges = cuts.column(column_id)[:-1]
        codes[:, column_id] = np.searchsorted(edges, column, side="right")
        # In a numeric column without bins only rows without weight have values.
        if not (widths[column_id] or by_category[column_id]):
            codes[:, column_id] = np.iinfo(kind).max
        if any_absent:
            codes[absent(column, limit), column_id] = missing_code
    return codes, missing_code


def absent(column: Floats, n_categories: int) -> npt.NDArray[np.bool_]:
    """Which values of a column are missing, or no code of its categories, 0 if it is numeric."""
    is_absent: npt.NDArray[np.bool_] = np.isnan(column)
    if n_categories:
        is_absent |= (column < 0) | (column >= n_categories)
    return is_absent
