"""CART's search for splits: binned columns, codes of labels, the best cut of a column.

Source: Breiman, Friedman, Olshen, Stone 1984, "Classification and Regression Trees". Rules for
missing values, close values and small nodes are those of scikit-learn 1.9
(``sklearn/tree/_splitter.pyx``, ``node_split_best``).

Ties, which scikit-learn breaks at random, follow a rule here. Of equal improvements the lowest
column wins. Within a column, cuts that send missing values right come first, from the lowest value
up, the cut between present and missing values last; then cuts that send missing values left.

Columns of categories, which scikit-learn does not have, are cut as in Breiman et al. (section 4.2).
For numbers and two classes, categories are sorted by mean label; the best cut in that order is the
best of all partitions in two. With more classes, one category is split from all others. Of equal
means, and of equal improvements, the lowest code comes first. A category without rows in the node
goes where missing values go.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from fedapp.arrays import Doubles, Floats, Ints
from fedapp.kernels import kernel

# scikit-learn's FEATURE_THRESHOLD: no cut between values at most this far apart.
CLOSE = np.float32(1e-7)
GINI, ENTROPY, VARIANCE = 0, 1, 2
Criterion = Literal["gini", "entropy", "variance"]
Codes = npt.NDArray[np.uint16]
LabelCodes = Doubles

MOST_BITS = 40  # of a number's code
EPSILON = float(np.finfo(np.float64).eps)
CRITERIA = {"gini": GINI, "entropy": ENTROPY, "variance": VARIANCE}
# No number is below it, so only missing values can go left.
LOWEST = np.finfo(np.float32).min

DRAWN = 0  # rank of a split on a drawn column
NO_RANK = 2**63 - 1


@kernel
def scan(
    sums: Any, counts: Any, total: Any, n_bins: int, criterion: int, min_leaf: int
) -> tuple[float, int, int]:
    """Best cut of one column: improvement, last bin that goes left, default side.

    ``sums`` and ``counts`` are of the bins, each with rows, and then of missing values. A cut after
    the last bin is between present and missing values, and sends missing ones left.
    """
    n_inside, n_missing = 0, counts[n_bins]
    for code in range(n_bins + 1):
        n_inside += counts[code]
    left, right = np.empty(len(total)), np.empty(len(total))
    parent = _purity(total, criterion)
    best, best_cut, best_side = -np.inf, -1, 0
    for missing_left in range(2 if n_missing else 1):
        n_left = n_missing * missing_left
        # Element by element: an expression of arrays would make a new one for every cut.
        for kind in range(len(total)):
            left[kind] = sums[n_bins, kind] * missing_left
        for cut in range(n_bins):
            for kind in range(len(total)):
                left[kind] += sums[cut, kind]
                right[kind] = total[kind] - left[kind]
            n_left += counts[cut]
            n_right = n_inside - n_left
            if n_left >= min_leaf and n_right >= min_leaf:
                gain = _improvement(left, right, parent, criterion)
                if gain > best:
                    best, best_cut = gain, cut
                    best_side = missing_left if n_missing else int(n_left > n_right)
                    if cut == n_bins - 1:
                        best_side = 1
    return best, best_cut, best_side


@kernel
def scan_categories(
    sums: Any, counts: Any, total: Any, n_bins: int, criterion: int, min_leaf: int, lefts: Any
) -> tuple[float, int]:
    """Best partition of a column's categories: improvement, default side; fills ``lefts``."""
    n_kinds = len(total)
    order = np.arange(n_bins)
    bins, sizes = np.zeros((n_bins + 2, n_kinds)), np.zeros(n_bins + 2, np.int64)
    best, best_side, first, n_left = -np.inf, 0, 0, 0
    if criterion != VARIANCE and n_kinds > 2:
        n_parts = min(n_bins, 2)  # one category, and all others
        n_present = counts[:n_bins].sum()
        for code in range(n_bins):
            for kind in range(n_kinds):
                bins[0, kind] = sums[code, kind]
                bins[1, kind] = total[kind] - sums[n_bins, kind] - sums[code, kind]
                bins[n_parts, kind] = sums[n_bins, kind]
            sizes[0], sizes[1] = counts[code], n_present - counts[code]
            sizes[n_parts] = counts[n_bins]
            gain, cut, side = scan(bins, sizes, total, n_parts, criterion, min_leaf)
            if gain > best:
                best, best_side, first, n_left = gain, side, code, int(cut < n_parts - 1)
    else:
        means = np.empty(n_bins)
        for code in range(n_bins):
            weight = sums[code, 0] + (0.0 if criterion == VARIANCE else sums[code, 1])
            means[code] = sums[code, 1] / weight
        order[:] = np.argsort(means, kind="mergesort")
        for position in range(n_bins + 1):
            code = order[position] if position < n_bins else n_bins
            sizes[position] = counts[code]
            for kind in range(n_kinds):
                bins[position, kind] = sums[code, kind]
        best, cut, best_side = scan(bins, sizes, total, n_bins, criterion, min_leaf)
        # In the cut between present and missing values, only missing ones go left.
        n_left = cut + 1 if cut < n_bins - 1 else 0
    for position in range(n_bins):
        lefts[order[position]] = first <= position < first + n_left
    return best, best_side


@kernel
def _improvement(left: Any, right: Any, parent: float, criterion: int) -> float:
    """Weight times impurity of a node, minus that of its children."""
    if criterion == VARIANCE:
        # Invariant for y -> a + b y up to a factor b^2, unlike sums of squares.
        distance = left[1] / left[0] - right[1] / right[0]
        return float(distance * distance * (left[0] * right[0] / (left[0] + right[0])))
    return _purity(left, criterion) + _purity(right, criterion) - parent


@kernel
def _purity(sums: Any, criterion: int) -> float:
    """Weight of a node times (1 - Gini), or times its negative entropy in bits."""
    if criterion == VARIANCE:
        return 0.0
    weight, impurity = 0.0, 0.0
    for part in sums:
        weight += part
    for part in sums:
        if criterion == GINI:
            impurity += part * part
        elif part > 0:
            impurity += part * math.log2(part / weight)
    return impurity / weight if criterion == GINI else impurity


@dataclass(frozen=True, slots=True, eq=False)
class Bins:
    """Bins of all columns."""

    # lows, highs: (n_bins,): smallest and largest training value of each bin
    lows: Floats
    highs: Floats
    offsets: Ints  # (n_columns + 1,): first bin of each column
    n_categories: Ints  # (n_columns,): number of categories, one bin each; 0 if numeric


@dataclass(frozen=True, slots=True)
class Rules:
    """When a node is split."""

    criterion: Criterion  # measure of the improvement
    n_classes: int  # 0 for numbers
    # min_samples_split, min_samples_leaf: distinct rows, however often each is drawn
    min_samples_split: int
    min_samples_leaf: int
    min_decrease: float  # of the impurity, times the node's share of the tree's weight


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """The best split of each node over some columns."""

    improvements: Doubles  # (n_nodes,): decrease of weight times impurity, or NaN
    # (n_nodes,): ``DRAWN``; if no drawn column differs in the node, the key of the first that
    # does; else ``NO_RANK``
    ranks: Ints
    columns: Ints  # (n_nodes,); -1 without a split
    thresholds: Floats  # (n_nodes,): below goes left
    defaults: npt.NDArray[np.uint8]  # (n_nodes,): 1 if missing goes left
    widths: Ints  # (n_nodes,): number of categories of the column, 0 for a threshold
    rights: npt.NDArray[np.uint8]  # (n_nodes, n_bytes): bits of the categories that go right


def bin_columns(values: Floats, max_bin: int, n_categories: Ints | None = None) -> Bins:
    """One bin per distinct value of a column with at most ``max_bin`` of them, else quantiles.

    A column of categories has one bin per code.

    Parameters
    ----------
    values : float32, shape (n_rows, n_columns): training rows; NaN is missing.
    max_bin : 2 to 65535.
    n_categories : int64, shape (n_columns,), 0 for a numeric column; None: all are.
    """
    if n_categories is None:
        n_categories = np.zeros(values.shape[1], dtype=np.int64)
    lows, highs = [np.empty(0, np.float32)], [np.empty(0, np.float32)]
    offsets = np.zeros(values.shape[1] + 1, dtype=np.int64)
    for column in range(values.shape[1]):
        if n_categories[column]:
            codes = np.arange(n_categories[column], dtype=np.float32)
            lows.append(codes)
            highs.append(codes)
            offsets[column + 1] = offsets[column] + len(codes)
            continue
        present = values[:, column][~np.isnan(values[:, column])]
        distinct, counts = np.unique(present, return_counts=True)
        firsts = np.arange(len(distinct))
        if len(distinct) > max_bin:
            ends = np.cumsum(counts)
            shares = np.arange(1, max_bin) * (ends[-1] / max_bin)
            firsts = np.unique(np.concatenate(([0], np.searchsorted(ends, shares) + 1)))
            firsts = firsts[firsts < len(distinct)]
        ends = np.append(firsts[1:], len(distinct))[: len(firsts)]
        lows.append(distinct[firsts])
        highs.append(distinct[ends - 1])
        offsets[column + 1] = offsets[column] + len(firsts)
    return Bins(np.concatenate(lows), np.concatenate(highs), offsets, n_categories)


def code_columns(values: Floats, bins: Bins) -> Codes:
    """The bin of each training value; uint16, shape (n_columns, n_rows)."""
    codes: Codes = np.empty(values.shape[::-1], dtype=np.uint16)
    for column, (start, end) in enumerate(zip(bins.offsets, bins.offsets[1:], strict=False)):
        # NaN sorts last, so a missing value gets the number of bins as its code.
        codes[column] = np.searchsorted(bins.highs[start:end], values[:, column])
    return codes


def between(below: Floats, above: Floats) -> Floats:
    """Thresholds t for which x < t is equivalent to x <= m, m halfway between two values.

    scikit-learn keeps m in float64 and compares ``<=``. For float32 x the same is ``<`` with the
    next float32 above the largest one that is not above m.
    """
    middles = below.astype(np.float64) / 2.0 + above.astype(np.float64) / 2.0
    rounded = middles.astype(np.float32)
    at_most = np.where(rounded > middles, np.nextafter(rounded, np.float32(-np.inf)), rounded)
    thresholds: Floats = np.nextafter(at_most, np.float32(np.inf))
    return thresholds


def fewest_rows(min_split: int, min_leaf: int) -> int:
    """Minimum number of rows of a node that is split."""
    return max(min_split, 2 * min_leaf, 2)


# Labels as codes, whose sums are exact in any order. Codes determine the best splits and disclose
# as little else as possible. Gini and entropy depend only on which rows share a class, so classes
# are numbered by their first row, whatever their names and order. The variance is invariant up to
# y -> a + b y, so the first row's number becomes 0, the first different one is above it, and the
# largest distance is a power of two. All labellings that lead to the same forest have the same
# codes and cannot be distinguished.


def class_codes(labels: npt.NDArray[Any]) -> LabelCodes:
    """Class of each row, classes numbered by their first row; float64, shape (n_rows,)."""
    _, firsts, places = np.unique(labels, return_index=True, return_inverse=True)
    codes: LabelCodes = np.argsort(np.argsort(firsts))[places].astype(np.float64)
    return codes


def number_codes(labels: Floats) -> tuple[LabelCodes, float]:
    """Integer codes of numbers, up to an affine map that is not disclosed, and their unit.

    They are so small that their float64 sums are exact in any order, so ties are broken alike
    everywhere. ``labels`` must not all be equal. A step of 1 is ``unit`` in labels.
    """
    distances = labels.astype(np.float64) - float(labels[0])
    bits = min(MOST_BITS, 52 - math.ceil(math.log2(len(labels))))
    unit = np.abs(distances).max() / 2.0**bits
    # The first row that differs from row 0 is above it, whatever the direction of the labels.
    sign = np.sign(distances[np.flatnonzero(distances)[0]])
    return np.round(distances * sign / unit), float(unit)


def exact_weights(weights: LabelCodes) -> LabelCodes:
    """Round weights, >= 0, so that their float64 sum is exact in any order.

    They become multiples of about 2^-52 of the total weight. For 30,000 rows, float32 weights
    change if they are 2^13 times smaller than the largest. Weights above 0 stay above 0.
    """
    step = _step(weights)
    return np.ceil(weights / step) * step


def exact_products(weights: LabelCodes, codes: LabelCodes) -> LabelCodes:
    """Weights times codes, rounded like ``exact_weights``."""
    products = weights * codes
    step = _step(products)
    return np.round(products / step) * step


def _step(values: LabelCodes) -> float:
    """A power of two; a sum of this many values has fewer than 2^53 multiples of it."""
    exponent = math.frexp(np.abs(values).max(initial=0))[1]
    return math.ldexp(1.0, exponent + len(values).bit_length() - 52)


@dataclass(frozen=True, slots=True, eq=False)
class RowFields:
    """What each row adds to the sums that determine splits, as integers.

    The weight, to the field of the row's class; or the weight, and weight times number, to two.
    """

    firsts: Ints  # (n_rows,): first field that the row adds to
    amounts: LabelCodes  # (n_rows, 1 or 2): added to this field, and to the next
    units: LabelCodes  # (n_fields,): size of a step of 1; powers of two
    weights: LabelCodes  # (n_rows,): see ``exact_weights``

    @classmethod
    def of(cls, codes: LabelCodes, weights: LabelCodes, n_classes: int) -> RowFields:
        """From labels as codes; ``n_classes`` is 0 for numbers."""
        exact = exact_weights(weights)
        unit = _unit(exact)
        if n_classes:
            units, amounts = np.full(n_classes, unit), (exact / unit)[:, None]
            return cls(codes.astype(np.int64), amounts, units, exact)
        products = exact_products(exact, codes)
        units, firsts = np.array([unit, _unit(products)]), np.zeros(len(codes), dtype=np.int64)
        return cls(firsts, np.stack((exact, products), axis=1) / units, units, exact)

    @property
    def fields(self) -> Ints:
        """The field of each amount, of the amounts' shape."""
        return self.firsts[:, None] + np.arange(self.amounts.shape[1])

    @property
    def numbers(self) -> LabelCodes:
        """What each row adds to each field, also 0; shape (n_rows, n_fields)."""
        numbers = np.zeros((len(self.firsts), len(self.units)))
        np.put_along_axis(numbers, self.fields, self.amounts, axis=1)
        return numbers

    def of_rows(self, rows: npt.NDArray[np.int32], counts: npt.NDArray[np.uint8]) -> RowFields:
        """The same of some rows, as often as each counts."""
        amounts = self.amounts[rows] * counts[rows, None]
        return RowFields(self.firsts[rows], amounts, self.units, self.weights[rows] * counts[rows])

    @property
    def bits(self) -> int:
        """No number exceeds 2^bits in absolute value."""
        return (int(np.abs(self.amounts).max(initial=1)) - 1).bit_length()


def _unit(values: LabelCodes) -> float:
    """The largest power of two that divides all values."""
    fractions, exponents = np.frexp(values[values != 0])
    digits = np.ldexp(fractions, 53).astype(np.int64)
    # digits & -digits is the lowest set bit of each mantissa.
    lowest = exponents - 53 + np.log2(digits & -digits)
    return float(2.0 ** lowest.min(initial=1023)) if len(lowest) else 1.0
