"""The best cut of one column of a node, from its sums by bin; see ``fedapp.trees.forest.cart``."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from fedapp.kernels import kernel

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
    weight, found = 0.0, 0.0
    for each in sums:
        weight += each
    for each in sums:
        if criterion == GINI:
            found += each * each
        elif each > 0:
            found += each * math.log2(each / weight)
    return found / weight if criterion == GINI else found
