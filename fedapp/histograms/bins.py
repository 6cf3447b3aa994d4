"""Bins of a table's columns, in the layout of XGBoost's histograms.

All columns lie one after the other in one flat array::

    offsets  0        3           7      9
    edges    c0 c1 c2 c0 c1 c2 c3 c0 c1         one upper edge a bin
    column   ---0---- -----1----- --2--

Bin ``b`` of a column holds ``edges[b-1] <= x < edges[b]``; bin 0 also holds everything below, the
last bin everything above. A column of categories has a bin a code, up to the highest that occurs;
edges are 1, 2, 3 and so on, and what is no code of a category is missing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from fedapp.histograms.search import any_missing, find_bins

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]
Codes = npt.NDArray[np.uint8 | np.uint16]

NO_CODE = -1


@dataclass(frozen=True, slots=True, eq=False)
class Cuts:
    """Where the columns of a table are cut.

    Parameters
    ----------
    edges : float32, shape (n_bins,): upper edges, ascending within a column; the last of a column
        lies above every value.
    offsets : int64, shape (n_columns + 1,): bins of column f are ``offsets[f]`` to
        ``offsets[f+1]``.
    minima : float32, shape (n_columns,): a value below every value of the column, the threshold
        that sends missing rows alone to the left.
    categories : int64, shape (n_columns,): categories of each column, 0 for one of numbers; empty
        where all are.
    """

    edges: Floats
    offsets: Ints
    minima: Floats
    categories: Ints = field(default_factory=lambda: np.empty(0, dtype=np.int64))

    @property
    def n_columns(self) -> int:
        """Number of columns."""
        return len(self.minima)

    @property
    def widths(self) -> Ints:
        """Number of bins of each column, int64, shape (n_columns,)."""
        return np.diff(self.offsets)

    @property
    def by_category(self) -> npt.NDArray[np.bool_]:
        """Which columns are of categories; bool, shape (n_columns,)."""
        if not len(self.categories):
            return np.zeros(self.n_columns, dtype=bool)
        return self.categories > 0

    def column(self, column_id: int) -> Floats:
        """Upper edges of one column."""
        return self.edges[self.offsets[column_id] : self.offsets[column_id + 1]]


def ragged(arrays: list[npt.NDArray[np.float32]]) -> tuple[Floats, Ints]:
    """Lay arrays one after the other; returns the flat array and where each begins."""
    offsets = np.zeros(len(arrays) + 1, dtype=np.int64)
    np.cumsum([len(array) for array in arrays], out=offsets[1:])
    flat = np.concatenate(arrays) if arrays else np.empty(0, dtype=np.float32)
    return flat.astype(np.float32, copy=False), offsets


def with_categories(cuts: Cuts, categories: Ints, used: Ints) -> Cuts:
    """The cuts with one bin a category in place of what they have of columns of categories.

    Parameters
    ----------
    categories : as in ``Cuts``, of every column.
    used : int64, shape (n_columns,): bins of these columns; the categories past them occur nowhere.
    """
    if not categories.any():
        return cuts
    edges = [
        np.arange(1, used[column_id] + 1, dtype=np.float32) if width else cuts.column(column_id)
        for column_id, width in enumerate(categories.tolist())
    ]
    return Cuts(*ragged(edges), np.where(categories > 0, np.float32(0), cuts.minima), categories)


def numbers_alone(values: Floats, categories: Ints) -> Floats:
    """The values, missing in columns of categories; ``categories`` as in ``Cuts``."""
    return np.where(categories > 0, np.float32(np.nan), values) if categories.any() else values


def code_type(max_width: int, any_missing: bool) -> tuple[type[np.uint8] | type[np.uint16], int]:
    """Smallest code that tells ``max_width`` bins and, where needed, a missing value apart.

    Returns
    -------
    The dtype, and the code of a missing value (``NO_CODE`` where none can occur).
    """
    kind = np.uint8 if max_width + any_missing <= 256 else np.uint16
    return kind, int(np.iinfo(kind).max) if any_missing else NO_CODE


def digitise(values: Floats, cuts: Cuts) -> tuple[Codes, int]:
    """Replace every value by the number of its bin.

    Parameters
    ----------
    values : float32, shape (n_rows, n_columns); NaN is missing, and in a column of categories
        what is no code of any.
    cuts : where the columns are cut.

    Returns
    -------
    codes : uint8 (uint16 past 256 codes), shape (n_rows, n_columns).
    missing_code : the code that stands for a missing value, or -1 where no value is missing.
    """
    widths = cuts.widths
    limits = np.where(cuts.by_category, widths, 0)
    # A column of numbers without bins has values of rows without weight alone.
    limits[(widths == 0) & ~cuts.by_category] = -1
    is_missing = any_missing(values, limits)
    kind, missing_code = code_type(int(widths.max(initial=0)), is_missing)
    codes: Codes = np.empty(values.shape, dtype=kind)
    columns = [cuts.column(column_id)[:-1] for column_id in range(cuts.n_columns)]
    find_bins(values, columns, limits, missing_code, codes)
    return codes, missing_code
