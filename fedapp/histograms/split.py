"""Leaf weights, split gains and the best split of a tree node, by XGBoost's rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.arrays import Doubles, Flags, Floats
from fedapp.histograms.bins import Cuts
from fedapp.histograms.build import Histogram
from fedapp.kernels import frozen, inlined, kernel

SPLIT = np.dtype(
    [
        ("gain", np.float32),
        ("column", np.int32),
        # Index of the threshold in the column's edges, -1 for the minimum; for a column of
        # categories see ``right_categories``.
        ("cut", np.int32),
        ("default_left", np.bool_),
        ("left", np.float64, (2,)),  # sums of gradients and hessians of the left child
        ("right", np.float64, (2,)),
    ]
)
SMALLEST_GAIN = np.float32(1e-6)  # XGBoost's kRtEps: no split gains less


@dataclass(frozen=True, slots=True)
class Penalties:
    """Regularisation, named as in XGBoost; all >= 0."""

    reg_lambda: float
    reg_alpha: float
    gamma: float
    min_child_weight: float
    max_delta_step: float = 0.0

    @property
    def of_leaves(self) -> tuple[float, float, float, float]:
        """All but ``gamma``, for kernels: what leaf weights depend on."""
        return self.reg_lambda, self.reg_alpha, self.min_child_weight, self.max_delta_step


@kernel
def leaf_weights(sums: Any, penalties: Any, bounds: Any) -> Any:
    """Optimal weight of each node before the learning rate, within bounds; float32, (n_nodes,).

    Source: Chen and Guestrin 2016 (arXiv:1603.02754v3), Eq. 5, with L1.

    ``sums`` is float64, shape (n_nodes, 2), ``bounds`` float32, shape (n_nodes, 2).
    """
    weights = np.zeros(len(sums), dtype=np.float32)
    for node in range(len(sums)):
        weights[node] = weight_within(sums[node, 0], sums[node, 1], penalties, bounds, node)
    return weights


@kernel
def shrunk(gradient: float, reg_alpha: float) -> Any:
    """A sum of gradients, moved towards 0 by the L1 penalty."""
    if gradient > reg_alpha:
        return gradient - reg_alpha
    if gradient < -reg_alpha:
        return gradient + reg_alpha
    return 0.0


@inlined
def _bounded_weight(gradient: float, hessian: float, penalties: Any) -> Any:
    """Optimal weight of rows as a leaf, without min_child_weight; hessian > 0."""
    reg_lambda, reg_alpha, _, longest = penalties
    weight = -shrunk(gradient, reg_alpha) / (hessian + reg_lambda)
    return min(max(weight, -longest), longest) if longest > 0.0 else weight


@inlined
def leaf_weight(gradient: float, hessian: float, penalties: Any) -> Any:
    """Optimal weight of rows as a leaf, 0 if ``min_child_weight`` forbids one, in float64."""
    if hessian < penalties[2] or hessian <= 0.0:
        return 0.0
    return _bounded_weight(gradient, hessian, penalties)


@kernel
def weight_within(gradient: float, hessian: float, penalties: Any, bounds: Any, node: int) -> Any:
    """``leaf_weight`` within the bounds of a node, in float32."""
    weight = np.float32(leaf_weight(gradient, hessian, penalties))
    return min(max(weight, bounds[node, 0]), bounds[node, 1])


@kernel
def gain_of_weight(gradient: float, hessian: float, penalties: Any, weight: Any) -> Any:
    """Score of one side of a split with a given weight, in float32."""
    if hessian <= 0.0:
        return np.float32(0.0)
    gained = np.float32(2.0) * np.float32(gradient) * weight
    spent = (np.float32(hessian) + np.float32(penalties[0])) * (weight * weight)
    return -(gained + spent)


@kernel
def side_gain(gradient: float, hessian: float, penalties: Any) -> Any:
    """Score of one side of a split, in float32; from the weight if weights are bounded."""
    reg_lambda, reg_alpha, _, longest = penalties
    if hessian <= 0.0:
        return np.float32(0.0)
    if longest > 0.0:
        weight = np.float32(_bounded_weight(gradient, hessian, penalties))
        return gain_of_weight(gradient, hessian, penalties, weight)
    moved = shrunk(gradient, reg_alpha)
    return np.float32(moved * moved) / np.float32(hessian + reg_lambda)


@dataclass(frozen=True, slots=True)
class CategoryRules:
    """How columns of categories are split, named as in XGBoost."""

    max_cat_to_onehot: int  # columns with fewer categories are split one-against-rest
    max_cat_threshold: int  # others by the order of weights, with fewer on the scanned side


def best_splits(
    histograms: Histogram,
    sums: Doubles,
    missing: npt.NDArray[np.int32],
    allowed: Flags,
    cuts: Cuts,
    penalties: Penalties,
    rules: CategoryRules,
    monotone: npt.NDArray[np.int8],
    bounds: Floats,
) -> npt.NDArray[Any]:
    """The split of largest gain of each node.

    Gains are without the factor 1/2 and compared as float32; the first of equals wins. The first
    scan has missing rows on the right and goes up from the lowest cut. The second has them on the
    left, goes down from the highest cut, and runs only if the node has missing rows in that column.

    A column of few categories is scanned one category at a time, which goes right, first with
    missing rows on the left. Any other is scanned in the order of its categories' weights as
    leaves: first up, the scanned categories go right, missing rows left; then down, the other way
    round.

    Source: Chen and Guestrin 2016 (arXiv:1603.02754v3), Eq. 7 and Algorithm 3; Fisher 1958, "On
    Grouping for Maximum Homogeneity"; order of the scans as in XGBoost 3.2.

    Parameters
    ----------
    histograms : float64, shape (n_nodes, n_bins, 2): sums of gradients and hessians.
    sums : float64, shape (n_nodes, 2): the same over all rows of the node.
    missing : int32, shape (n_nodes, n_columns): rows without a value.
    allowed : bool, shape (n_nodes, n_columns): columns that may split the node.
    monotone : int8, shape (n_columns,): 1 if the right side must not weigh less than the left, -1
        if not more, else 0; empty without constraints, which columns of categories exclude.
    bounds : float32, shape (n_nodes, 2): lowest and highest weight of each node's sides.

    Returns
    -------
    ``SPLIT``, shape (n_nodes,); ``column`` is -1 where no split gains enough.
    """
    splits = np.zeros(len(histograms), dtype=SPLIT)
    splits["column"] = -1
    _scan(
        frozen(histograms, sums, missing, allowed),
        frozen(cuts.offsets, cuts.by_category),
        (rules.max_cat_to_onehot, rules.max_cat_threshold),
        penalties.of_leaves,
        frozen(monotone, bounds),
        splits,
    )
    too_small = (splits["gain"] <= SMALLEST_GAIN) | (splits["gain"] < np.float32(penalties.gamma))
    splits["column"][too_small] = -1
    return splits


def right_categories(
    histogram: Histogram, cut: int, penalties: Penalties, rules: CategoryRules
) -> Flags:
    """Which categories a split sends right; bool, shape (n_categories,).

    ``histogram`` is float64, shape (n_categories, 2), of the node and column. ``cut`` is the
    category itself in a one-against-rest split, else the number that go right, lowest weights
    first.
    """
    right = np.zeros(len(histogram), dtype=bool)
    if len(histogram) < rules.max_cat_to_onehot:
        right[cut] = True
        return right
    right[_by_weight(histogram, penalties.of_leaves)[:cut]] = True
    return right


@kernel
def _by_weight(histogram: Any, penalties: Any) -> Any:
    """Categories by their float32 weights as leaves; lower codes first among equals."""
    weights = np.empty(histogram.shape[0], dtype=np.float32)
    for category in range(histogram.shape[0]):
        weights[category] = leaf_weight(histogram[category, 0], histogram[category, 1], penalties)
    return np.argsort(weights, kind="mergesort")


@kernel
def _scan(
    nodes: Any, columns: Any, rules: Any, penalties: Any, constraints: Any, splits: Any
) -> None:
    """Fill ``splits``; lower columns first, so that they win ties."""
    histograms, sums, missing, allowed = nodes
    (offsets, by_category), (monotone, bounds) = columns, constraints
    min_child_weight = penalties[2]
    for node in range(histograms.shape[0]):
        total_gradient, total_hessian = sums[node, 0], sums[node, 1]
        root_gain = side_gain(total_gradient, total_hessian, penalties)
        if len(monotone):
            weight = weight_within(total_gradient, total_hessian, penalties, bounds, node)
            root_gain = gain_of_weight(total_gradient, total_hessian, penalties, weight)
        for column in range(offsets.shape[0] - 1):
            if not allowed[node, column]:
                continue
            first = offsets[column]
            last = offsets[column + 1] - 1
            if by_category[column]:
                histogram = histograms[node, first : last + 1]
                _scan_categories(histogram, sums[node], rules, penalties, column, splits[node])
                continue
            for backward in range(2):
                if backward and missing[node, column] == 0:
                    continue
                gradient = 0.0
                hessian = 0.0
                for step in range(last - first + 1):
                    bin_id = last - step if backward else first + step
                    gradient += histograms[node, bin_id, 0]
                    hessian += histograms[node, bin_id, 1]
                    other_gradient = total_gradient - gradient
                    other_hessian = total_hessian - hessian
                    if hessian < min_child_weight or other_hessian < min_child_weight:
                        continue
                    if hessian == 0.0 or other_hessian == 0.0:
                        continue
                    if len(monotone):
                        weight = weight_within(gradient, hessian, penalties, bounds, node)
                        other = weight_within(
                            other_gradient, other_hessian, penalties, bounds, node
                        )
                        rise = weight - other if backward else other - weight
                        if rise * monotone[column] < 0:
                            continue
                        near_gain = gain_of_weight(gradient, hessian, penalties, weight)
                        far_gain = gain_of_weight(other_gradient, other_hessian, penalties, other)
                    else:
                        near_gain = side_gain(gradient, hessian, penalties)
                        far_gain = side_gain(other_gradient, other_hessian, penalties)
                    gain = np.float32(np.float32(near_gain + far_gain) - root_gain)
                    if gain > splits[node]["gain"]:
                        near = gradient, hessian
                        cut = bin_id - first - backward
                        _accept(splits[node], gain, column, cut, backward == 0, near, sums[node])


@kernel
def _scan_categories(
    histogram: Any,
    total: Any,
    rules: Any,
    penalties: Any,
    column: int,
    split: Any,
) -> None:
    """Replace the best split so far if a column of categories has a better one."""
    max_cat_to_onehot, max_cat_threshold = rules
    if histogram.shape[0] < max_cat_to_onehot:
        _scan_one_against_rest(histogram, total, penalties, column, split)
        return
    order = _by_weight(histogram, penalties)
    n_steps = min(max_cat_threshold, len(order)) - 1
    for backward in range(2):
        gradient = 0.0
        hessian = 0.0
        for step in range(n_steps):
            position = len(order) - 1 - step if backward else step
            gradient += histogram[order[position], 0]
            hessian += histogram[order[position], 1]
            cut = position if backward else position + 1
            _offer(gradient, hessian, total, backward == 1, column, cut, penalties, split)


@kernel
def _scan_one_against_rest(
    histogram: Any, total: Any, penalties: Any, column: int, split: Any
) -> None:
    """Replace the best split so far if sending one category right is better."""
    present = np.zeros(2)
    for category in range(histogram.shape[0]):
        present[0] += histogram[category, 0]
        present[1] += histogram[category, 1]
    missing = total[0] - present[0], total[1] - present[1]
    for category in range(histogram.shape[0]):
        gradient, hessian = histogram[category, 0], histogram[category, 1]
        _offer(gradient, hessian, total, False, column, category, penalties, split)
        gradient += missing[0]
        hessian += missing[1]
        if _offer(gradient, hessian, total, False, column, category, penalties, split):
            split["default_left"] = False


@kernel
def _offer(
    gradient: float,
    hessian: float,
    total: Any,
    is_left: bool,
    column: int,
    cut: int,
    penalties: Any,
    split: Any,
) -> Any:
    """Take a split by categories if it gains more than the best so far; returns whether it did."""
    # gradient, hessian: sums of one side, without the missing rows, which go to the other side.
    min_child_weight = penalties[2]
    other_gradient, other_hessian = total[0] - gradient, total[1] - hessian
    if hessian < min_child_weight or other_hessian < min_child_weight:
        return False
    gain = np.float32(
        np.float32(
            side_gain(gradient, hessian, penalties)
            + side_gain(other_gradient, other_hessian, penalties)
        )
        - side_gain(total[0], total[1], penalties)
    )
    if gain > split["gain"]:
        _accept(split, gain, column, cut, is_left, (gradient, hessian), total)
        return True
    return False


@kernel
def _accept(
    split: Any, gain: Any, column: int, cut: int, is_left: bool, near: Any, total: Any
) -> None:
    """Note the best split so far; ``near`` has the sums of one side, without the missing rows."""
    split["gain"], split["column"], split["cut"] = gain, column, cut
    split["default_left"] = not is_left
    for part in range(2):
        far = total[part] - near[part]
        split["left"][part] = near[part] if is_left else far
        split["right"][part] = far if is_left else near[part]


# All outputs at once, by XGBoost's rules for ``multi_output_tree``. They are not those of one
# output, added up: ``min_child_weight`` refuses no split, but gives an output with less of it
# weight 0; a gain is a float64 sum of products with float32 weights; and with ``max_delta_step`` it
# is another function of the weight. Source: ``HistMultiEvaluator`` in
# src/tree/hist/evaluate_splits.h, src/tree/hist/expand_entry.h and src/tree/param.h of XGBoost 3.2.


def best_vector_splits(
    histograms: Histogram,
    sums: Doubles,
    missing: npt.NDArray[np.int32],
    allowed: Flags,
    cuts: Cuts,
    penalties: Penalties,
) -> npt.NDArray[Any]:
    """The split of largest gain of each node, over all outputs; scans as in ``best_splits``.

    Parameters
    ----------
    histograms : float64, shape (n_nodes, n_bins, n_outputs, 2); no column is of categories.
    sums : float64, shape (n_nodes, n_outputs, 2).
    missing, allowed : as in ``best_splits``.

    Returns
    -------
    As ``best_splits``, with sums of the sides of shape (n_outputs, 2).
    """
    n_nodes = len(histograms)
    gains = np.zeros(n_nodes, dtype=np.float32)
    places = np.full((n_nodes, 3), -1)
    sides = np.zeros((n_nodes, 2, *sums.shape[1:]))
    arrays = frozen(histograms, sums, missing, allowed, cuts.offsets)
    _scan_vectors(*(*arrays, penalties.of_leaves, gains, places, sides))
    shapes = dict.fromkeys(("left", "right"), sums.shape[1:])
    fields = [(name, SPLIT[name].base, shapes.get(name, ())) for name in SPLIT.names or ()]
    splits = np.zeros(n_nodes, dtype=fields)
    splits["gain"] = gains
    splits["column"], splits["cut"], splits["default_left"] = places.T
    splits["left"], splits["right"] = sides[:, 0], sides[:, 1]
    is_one_sided = (sides[..., 1] == 0).all(axis=2).any(axis=1)
    too_small = (gains <= SMALLEST_GAIN) | (gains < np.float32(penalties.gamma))
    splits["column"][too_small | is_one_sided] = -1
    return splits


@kernel
def _scan_vectors(
    histograms: Any,
    sums: Any,
    missing: Any,
    allowed: Any,
    offsets: Any,
    penalties: Any,
    gains: Any,
    places: Any,
    sides: Any,
) -> None:
    """Fill ``gains``; of each node's split column, cut and default side; and its sides' sums."""
    near, far = np.empty(sums.shape[1:]), np.empty(sums.shape[1:])
    for node in range(histograms.shape[0]):
        root_gain = _vector_gain(sums[node], penalties)
        for column in range(offsets.shape[0] - 1):
            first, n_bins = offsets[column], offsets[column + 1] - offsets[column]
            for backward in range(2):
                if not allowed[node, column] or (backward and missing[node, column] == 0):
                    continue
                near[:] = 0.0
                for step in range(n_bins):
                    bin_id = first + (n_bins - 1 - step if backward else step)
                    for output in range(near.shape[0]):
                        for part in range(2):
                            near[output, part] += histograms[node, bin_id, output, part]
                            far[output, part] = sums[node, output, part] - near[output, part]
                    gained = _vector_gain(near, penalties) + _vector_gain(far, penalties)
                    gain = np.float32(gained - root_gain)
                    if gain > gains[node] and gain < np.inf:
                        gains[node] = gain
                        places[node, 0] = column
                        places[node, 1] = bin_id - first - backward
                        places[node, 2] = backward
                        sides[node, backward] = near
                        sides[node, 1 - backward] = far


@kernel
def _vector_gain(sums: Any, penalties: Any) -> Any:
    """Score of rows as a leaf, in float64, from weights in float32."""
    gain = 0.0
    for output in range(sums.shape[0]):
        weight = np.float32(leaf_weight(sums[output, 0], sums[output, 1], penalties))
        gain += -np.float64(weight) * shrunk(sums[output, 0], penalties[1])
    return gain


@kernel
def vector_weights(sums: Any, penalties: Any, eta: float) -> Any:
    """Weights of nodes, and these times ``eta``; both float32, shape (n_nodes, n_outputs)."""
    weights = np.empty(sums.shape[:2], dtype=np.float32)
    values = np.empty(sums.shape[:2], dtype=np.float32)
    for node in range(sums.shape[0]):
        for output in range(sums.shape[1]):
            weight = leaf_weight(sums[node, output, 0], sums[node, output, 1], penalties)
            weights[node, output], values[node, output] = weight, weight * eta
    return weights, values
