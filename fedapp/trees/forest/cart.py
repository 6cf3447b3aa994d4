"""CART's search for splits: binned columns, class weights per bin, the best cut of a node.

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

from fedapp.kernels import frozen, inlined, kernel

# scikit-learn's FEATURE_THRESHOLD: no cut between values at most this far apart.
CLOSE = np.float32(1e-7)
GINI, ENTROPY, VARIANCE = 0, 1, 2


@kernel
def scan(
    sums: Any,
    counts: Any,
    total: Any,
    low: int,
    high: int,
    missing: int,
    first: int,
    lows: Any,
    highs: Any,
    criterion: int,
    min_leaf: int,
) -> tuple[float, int, int, int]:
    """Best cut of one column: improvement, last bin left, first bin right, default side.

    A cut between present and missing values has the same bin on both sides, and missing goes left.
    """
    n_inside, n_missing = 0, counts[missing]
    for code in range(low, high + 1):
        n_inside += counts[code]
    n_inside += n_missing
    left, right = np.empty(len(total)), np.empty(len(total))
    parent = _purity(total, criterion)
    best, best_left, best_right, best_side = -np.inf, -1, -1, 0
    for missing_left in range(2 if n_missing else 1):
        left[:] = 0
        n_left = 0
        if missing_left:
            _copy(sums[missing], left)
            n_left = n_missing
        code = low
        while code < high:
            # Element by element: an expression of arrays would make a new one for every cut.
            for kind in range(len(total)):
                left[kind] += sums[code, kind]
                right[kind] = total[kind] - left[kind]
            n_left += counts[code]
            after = code + 1
            while counts[after] == 0:
                after += 1
            n_right = n_inside - n_left
            is_cut = lows[first + after] > highs[first + code] + CLOSE
            if is_cut and n_left >= min_leaf and n_right >= min_leaf:
                gain = _improvement(left, right, parent, criterion)
                if gain > best:
                    best, best_left, best_right = gain, code, after
                    best_side = missing_left if n_missing else int(n_left > n_right)
            code = after
        if n_missing and not missing_left and min(n_missing, n_inside - n_missing) >= min_leaf:
            _copy(sums[missing], right)
            for kind in range(len(total)):
                left[kind] = total[kind] - right[kind]
            gain = _improvement(left, right, parent, criterion)
            if gain > best:
                best, best_left, best_right, best_side = gain, high, high, 1
    return best, best_left, best_right, best_side


@kernel
def scan_categories(
    sums: Any,
    counts: Any,
    total: Any,
    low: int,
    high: int,
    missing: int,
    criterion: int,
    min_leaf: int,
    lefts: Any,
) -> tuple[float, int]:
    """Best partition of a column's categories: improvement, default side; fills ``lefts``."""
    codes, n_codes, n_present = np.empty(high - low + 1, np.int64), 0, 0
    present = np.zeros(sums.shape[1])
    for code in range(low, high + 1):
        if counts[code]:
            codes[n_codes] = code
            n_codes += 1
            n_present += counts[code]
            for kind in range(len(present)):
                present[kind] += sums[code, kind]
    # Bins in a new order, missing values after them; every cut is allowed.
    values = np.arange(n_codes + 2).astype(np.float32)
    bins, sizes = np.zeros((n_codes + 2, len(present))), np.zeros(n_codes + 2, np.int64)
    best, first_left, n_left, best_side = -np.inf, 0, 0, 0
    if criterion != VARIANCE and len(present) > 2:
        behind = min(n_codes, 2)
        for place in range(n_codes):
            _copy(sums[codes[place]], bins[0])
            for kind in range(len(present)):
                bins[1, kind] = present[kind] - bins[0, kind]
            sizes[0], sizes[1] = counts[codes[place]], n_present - counts[codes[place]]
            _copy(sums[missing], bins[behind])
            sizes[behind] = counts[missing]
            gain, left, right, side = scan(
                *(bins, sizes, total, 0, behind - 1, behind, 0, values, values),
                *(criterion, min_leaf),
            )
            if gain > best:
                best, best_side, first_left, n_left = gain, side, place, int(left < right)
    else:
        means = np.empty(n_codes)
        for place in range(n_codes):
            code = codes[place]
            weight = sums[code, 0] + (0.0 if criterion == VARIANCE else sums[code, 1])
            means[place] = sums[code, 1] / weight
        codes = codes[:n_codes][np.argsort(means, kind="mergesort")]
        for place in range(n_codes):
            _copy(sums[codes[place]], bins[place])
            sizes[place] = counts[codes[place]]
        _copy(sums[missing], bins[n_codes])
        sizes[n_codes] = counts[missing]
        best, left, right, best_side = scan(
            *(bins, sizes, total, 0, n_codes - 1, n_codes, 0, values, values),
            *(criterion, min_leaf),
        )
        n_left = left + 1 if left < right else 0
    # In the cut between present and missing values, only missing ones go left.
    for code in range(missing):
        lefts[code] = best_side == 1
    for place in range(n_codes):
        lefts[codes[place]] = first_left <= place < first_left + n_left
    return best, best_side


@kernel
def _copy(source: Any, target: Any) -> None:
    """``target[:] = source``, which takes numba a second to compile."""
    for place in range(len(source)):
        target[place] = source[place]


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
    for each in sums:
        weight += each
    for each in sums:
        if criterion == GINI:
            impurity += each * each
        elif each > 0:
            impurity += each * math.log2(each / weight)
    return impurity / weight if criterion == GINI else impurity


Criterion = Literal["gini", "entropy", "variance"]
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Codes = npt.NDArray[np.uint16]

EPSILON = float(np.finfo(np.float64).eps)
CRITERIA = {"gini": GINI, "entropy": ENTROPY, "variance": VARIANCE}
# No number is below it, so only missing values can go left.
LOWEST = np.finfo(np.float32).min

DRAWN = 0  # rank of a split on a drawn column
NO_RANK = 2**63 - 1


@dataclass(frozen=True, slots=True, eq=False)
class Bins:
    """Bins of all columns."""

    # lows, highs: (n_bins,): smallest and largest training value of each bin
    lows: Floats
    highs: Floats
    offsets: Ints  # (n_columns + 1,): first bin of each column
    n_categories: Ints  # (n_columns,): number of categories, one bin each; 0 if numeric

    @property
    def widths(self) -> Ints:
        """Bins of each column; also the code of a missing value there."""
        return np.diff(self.offsets)


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

    improvements: npt.NDArray[np.float64]  # (n_nodes,): decrease of weight times impurity, or NaN
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
        lows.append(distinct[firsts])
        highs.append(
            distinct[np.concatenate((firsts[1:], [len(distinct)])) - 1]
            if len(distinct)
            else distinct
        )
        offsets[column + 1] = offsets[column] + len(firsts)
    return Bins(np.concatenate(lows), np.concatenate(highs), offsets, n_categories)


def code_columns(values: Floats, bins: Bins) -> Codes:
    """The bin of each training value; uint16, shape (n_columns, n_rows)."""
    codes: Codes = np.empty(values.shape[::-1], dtype=np.uint16)
    for column, (start, end) in enumerate(zip(bins.offsets, bins.offsets[1:], strict=False)):
        # NaN sorts last, so a missing value gets the number of bins as its code.
        codes[column] = np.searchsorted(bins.highs[start:end], values[:, column])
    return codes


def best_splits(
    codes: Codes,
    bins: Bins,
    targets: npt.NDArray[np.float64],
    weights: npt.NDArray[np.float64],
    products: npt.NDArray[np.float64],
    draws: npt.NDArray[np.uint8],
    rows: npt.NDArray[np.int32],
    starts: Ints,
    columns: Ints,
    keys: Ints,
    n_drawn: Ints,
    rules: Rules,
) -> Candidates:
    """Search the nodes of one tree.

    If all drawn columns are constant within a node, the first other column that is not takes their
    place, as in scikit-learn.

    Parameters
    ----------
    codes : see ``code_columns``.
    targets : shape (n_rows,): class ids, or numbers.
    weights : shape (n_rows,), > 0 in ``rows``.
    products : shape (n_rows,): weights times numbers; see ``levels.exact_products``.
    draws : shape (n_rows,), > 0 in ``rows``: how often the tree draws each row.
    rows, starts : shapes (n_inside,) and (n_nodes + 1,): rows of each node, ascending.
    columns, keys : shape (n_nodes, n_columns): see ``levels.columns_of``.
    n_drawn : shape (n_nodes,): how many of the columns are drawn.
    """
    n_nodes = len(starts) - 1
    improvements, ranks = np.full(n_nodes, np.nan), np.full(n_nodes, NO_RANK, dtype=np.int64)
    chosen = np.full(n_nodes, -1, dtype=np.int64)
    left_bins, right_bins = np.zeros((2, n_nodes), dtype=np.int64)
    defaults = np.zeros(n_nodes, dtype=np.uint8)
    least = rules.min_decrease * (weights * draws).sum() if rules.min_decrease else -np.inf
    columns_read = codes, bins.lows, bins.highs, bins.offsets, bins.n_categories
    labelled = targets, weights, products, draws
    limits = rules.min_samples_split, rules.min_samples_leaf, least
    is_right = np.zeros((n_nodes, bins.n_categories.max(initial=0)), dtype=np.bool_)
    results = improvements, ranks, chosen, left_bins, right_bins, defaults, is_right
    measure = CRITERIA[rules.criterion], max(rules.n_classes, 2)
    _search(
        *(
            *frozen(*columns_read, *labelled, rows, starts, columns, keys, n_drawn),
            *measure,
            *limits,
            *results,
        )
    )
    thresholds = np.full(n_nodes, LOWEST, dtype=np.float32)
    widths = np.append(bins.n_categories, 0)[chosen]  # of no column 0
    cut = (chosen >= 0) & (left_bins < right_bins) & (widths == 0)
    firsts = bins.offsets[chosen[cut]]
    lefts, rights = firsts + left_bins[cut], firsts + right_bins[cut]
    thresholds[cut] = between(bins.highs[lefts], bins.lows[rights])
    rights = np.packbits(is_right, axis=1)
    return Candidates(improvements, ranks, chosen, thresholds, defaults, widths, rights)


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


@kernel
def _search(
    codes: Any,
    lows: Any,
    highs: Any,
    offsets: Any,
    n_categories: Any,
    targets: Any,
    weights: Any,
    products: Any,
    draws: Any,
    rows: Any,
    starts: Any,
    columns: Any,
    keys: Any,
    n_drawn: Any,
    criterion: int,
    n_sums: int,
    min_split: int,
    min_leaf: int,
    least: float,
    improvements: Any,
    ranks: Any,
    chosen: Any,
    left_bins: Any,
    right_bins: Any,
    defaults: Any,
    is_right: Any,
) -> None:
    no_code: Any = np.int64(-1)  # a literal would be a type of its own
    widest = 0
    for column in range(len(offsets) - 1):
        widest = max(widest, int(offsets[column + 1] - offsets[column]))
    lefts = np.zeros(is_right.shape[1], np.bool_)
    sums = np.zeros((widest + 1, n_sums))
    counts = np.zeros(widest + 1, np.int64)
    total = np.zeros(n_sums)
    # Read once per column: contiguous, in the order of the nodes' rows.
    adds = np.empty((len(rows), 2))
    kinds = np.empty(len(rows), np.int64)
    for node in range(len(starts) - 1):
        start, end = starts[node], starts[node + 1]
        n_inside = end - start
        if n_inside < fewest_rows(min_split, min_leaf):
            continue
        total[:] = 0
        pure = True
        for place in range(start, end):
            row = rows[place]
            pure = pure and targets[row] == targets[rows[start]]
            adds[place, 0] = weights[row] * draws[row]
            adds[place, 1] = products[row] * draws[row]
            kinds[place] = 0 if criterion == VARIANCE else np.int64(targets[row])
            _add(total, kinds[place], adds[place], criterion)
        if pure:
            continue
        best, differs = -np.inf, False
        for rank in range(columns.shape[1]):
            if rank >= n_drawn[node] and differs:
                break
            column = columns[node, rank]
            first = offsets[column]
            missing = offsets[column + 1] - first  # its code
            low, high = missing, no_code
            for place in range(start, end):
                code: Any = np.int64(codes[column, rows[place]])
                counts[code] += 1
                _add(sums[code], kinds[place], adds[place], criterion)
                if code != missing:
                    low, high = min(low, code), max(high, code)
            if not is_constant(low, high, counts[missing], first, lows, highs):
                if not differs:
                    differs = True
                    ranks[node] = DRAWN if rank < n_drawn[node] else keys[node, rank]
                left, right = 0, 0
                if n_categories[column]:
                    gain, side = scan_categories(
                        sums, counts, total, low, high, missing, criterion, min_leaf, lefts
                    )
                else:
                    gain, left, right, side = scan(
                        *(sums, counts, total, low, high, missing, first, lows, highs),
                        *(criterion, min_leaf),
                    )
                if beats(gain, column, best, chosen[node]):
                    best = gain
                    chosen[node], left_bins[node], right_bins[node] = column, left, right
                    defaults[node] = side
                    for code in range(n_categories[column]):
                        is_right[node, code] = not lefts[code]
                    for code in range(n_categories[column], is_right.shape[1]):
                        is_right[node, code] = False
            sums[low : high + 1] = 0
            counts[low : high + 1] = 0
            sums[missing] = 0
            counts[missing] = 0
        if best > -np.inf and best + EPSILON >= least:
            improvements[node] = best
        else:
            chosen[node] = -1


@kernel
def fewest_rows(min_split: int, min_leaf: int) -> int:
    """Minimum number of rows of a node that is split."""
    return max(min_split, 2 * min_leaf, 2)


@kernel
def is_constant(low: int, high: int, n_missing: int, first: int, lows: Any, highs: Any) -> bool:
    """Whether a column is the same throughout a node.

    Parameters
    ----------
    low, high : lowest and highest bin of its values there; without any, ``high`` is -1.
    n_missing : rows without a value.
    first : the column's first bin in ``lows`` and ``highs``.
    """
    return high < 0 or (n_missing == 0 and lows[first + high] <= highs[first + low] + CLOSE)


@kernel
def beats(gain: float, column: int, best: float, chosen: int) -> bool:
    """Whether a column wins: ties go to the lowest column, whatever the order of the draws."""
    return gain > best or (gain == best and gain > -np.inf and column < chosen)


@inlined
def _add(sums: Any, kind: int, weighted: Any, criterion: int) -> None:
    """Add class weights, or w and w y."""
    sums[kind] += weighted[0]
    if criterion == VARIANCE:
        sums[1] += weighted[1]
