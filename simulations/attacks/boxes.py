"""Rows reconstructed from the trees that they have grown: the arithmetic of TimberStrike.

See ``simulations.attacks.timberstrike``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import linprog
from scipy.sparse import coo_array, eye_array, hstack, vstack

from fedapp.trees.model import LEAF, Tree

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
WHOLE = 1e-6  # tolerance: a solver's share may be this far below a whole number of rows


@dataclass(frozen=True, slots=True, eq=False)
class Leaves:
    """The leaves of a tree that a row can be in."""

    lows: Array  # (n_leaves, n_columns): the boxes, lows <= values < highs
    highs: Array
    weights: Array  # (n_leaves,): -G / (H + lambda)
    hessians: Array  # (n_leaves,): H, or zeros if not disclosed
    steps: Array  # (n_leaves,): what a leaf adds to a row's margin

    @classmethod
    def of(cls, tree: Tree, n_columns: int, step: float, tells_hessians: bool = True) -> Leaves:
        """Read a tree whose leaf values are ``step`` times the weights."""
        lows, highs = (np.full((len(tree), n_columns), end) for end in (-np.inf, np.inf))
        for node in np.flatnonzero(tree["left"] != LEAF):
            left, column, threshold = (tree[name][node] for name in ("left", "column", "threshold"))
            lows[left : left + 2], highs[left : left + 2] = lows[node], highs[node]
            # Where parties merge bins, a split may leave one of the boxes empty.
            highs[left, column] = min(threshold, highs[node, column])
            lows[left + 1, column] = max(threshold, lows[node, column])
        leaves = (tree["left"] == LEAF) & (lows < highs).all(axis=1)
        values = tree["value"][leaves].astype(np.float64)
        hessians = tells_hessians * tree["hessian"][leaves].astype(np.float64)
        return cls(lows[leaves], highs[leaves], values / step, hessians, values)

    def reached(self, values: Array) -> Ints:
        """The leaf of each row; ``values``: shape (n_rows, n_columns), none missing."""
        inside = np.ones((len(values), len(self.steps)), dtype=bool)
        for column, column_values in enumerate(values.T[:, :, None]):
            inside &= self.lows[:, column] <= column_values
            inside &= column_values < self.highs[:, column]
        leaf_ids: Ints = inside.argmax(axis=1)
        return leaf_ids


@dataclass(slots=True, eq=False)
class Rows:
    """What is known of each row."""

    lows: Array  # (n_rows, n_columns): the box of each row
    highs: Array
    labels: Array  # (n_rows,), 0 or 1
    margins: Array  # (n_rows,)

    @classmethod
    def in_first(cls, leaves: Leaves, margin: float, reg_lambda: float, n_rows: int) -> Rows:
        """Rows of a first tree, before which all have one margin; at most ``n_rows`` in a leaf."""
        counts = first_counts(leaves, margin, reg_lambda, n_rows)
        leaf_ids = np.repeat(np.tile(np.arange(len(counts)), 2), counts.T.ravel())
        labels = np.repeat([0.0, 1.0], counts.sum(axis=0))
        margins = margin + leaves.steps[leaf_ids]
        return cls(leaves.lows[leaf_ids], leaves.highs[leaf_ids], labels, margins)

    def may_be_in(self, leaves: Leaves) -> Flags:
        """Whether the boxes of rows and leaves intersect, shape (n_rows, n_leaves)."""
        intersects = np.ones((len(self.labels), len(leaves.steps)), dtype=bool)
        used = (np.isfinite(leaves.lows) | np.isfinite(leaves.highs)).any(axis=0)
        for column in np.flatnonzero(used):
            intersects &= self.lows[:, [column]] < leaves.highs[:, column]
            intersects &= leaves.lows[:, column] < self.highs[:, [column]]
        return intersects

    def deal(self, leaves: Leaves, reg_lambda: float) -> None:
        """Put each row into a leaf of a tree that these rows have grown."""
        self.put(leaves, dealt(self, leaves, reg_lambda))

    def put(self, leaves: Leaves, leaf_ids: Ints) -> None:
        """Put each row into a leaf; its box becomes the intersection of both."""
        self.lows = np.maximum(self.lows, leaves.lows[leaf_ids])
        self.highs = np.minimum(self.highs, leaves.highs[leaf_ids])
        self.margins = self.margins + leaves.steps[leaf_ids]

    def move(self, leaves: Leaves) -> None:
        """Add the mean step of the leaves open to a row, in a tree that others have grown."""
        shares = self.may_be_in(leaves) * (leaves.hessians if leaves.hessians.any() else 1.0)
        shares = np.maximum(shares, 1e-12 * self.may_be_in(leaves))
        self.margins = self.margins + shares @ leaves.steps / shares.sum(axis=1)


def first_counts(leaves: Leaves, margin: float, reg_lambda: float, n_rows: int) -> Ints:
    """Rows of classes 0 and 1 in each leaf of a first tree, int64, shape (n_leaves, 2).

    Without hessians, the counts are those, of at most ``n_rows`` rows, whose weight is nearest.
    """
    mean = 1 / (1 + np.exp(-margin))
    hessian = mean * (1 - mean)
    if leaves.hessians.any():
        sizes = np.rint(leaves.hessians / hessian)
        sums = -leaves.weights * (leaves.hessians + reg_lambda)
        ones = np.clip(np.rint(sizes * mean - sums), 0, sizes)
    else:
        all_sizes = np.repeat(np.arange(1, n_rows + 1), np.arange(2, n_rows + 2))
        all_ones = np.concatenate([np.arange(size + 1) for size in range(1, n_rows + 1)])
        weights = (all_ones - all_sizes * mean) / (all_sizes * hessian + reg_lambda)
        order = np.argsort(weights, kind="stable")
        after = np.searchsorted(weights[order], leaves.weights).clip(1, len(order) - 1)
        nearer = weights[order[after]] - leaves.weights < leaves.weights - weights[order[after - 1]]
        nearest = order[np.where(nearer, after, after - 1)]
        sizes, ones = all_sizes[nearest].astype(float), all_ones[nearest].astype(float)
    return np.stack([sizes - ones, ones], axis=1).astype(np.int64)


def dealt(rows: Rows, leaves: Leaves, reg_lambda: float) -> Ints:
    """Assign each row to a leaf, such that its sums differ least from those of the leaves.

    Rows of one class and margin that are open to the same leaves are dealt out together.
    """
    open_to = rows.may_be_in(leaves)
    marks = np.column_stack([open_to, rows.labels, rows.margins])
    _, first, group, sizes = np.unique(
        marks, axis=0, return_index=True, return_inverse=True, return_counts=True
    )
    shares = _shares(
        open_to[first], sizes, rows.labels[first], rows.margins[first], leaves, reg_lambda
    )
    whole = np.floor(shares + WHOLE)
    fractions = shares - whole
    leaf_ids = np.empty(len(group), dtype=np.int64)
    for number, size in enumerate(sizes.tolist()):
        counts = whole[number].astype(np.int64)
        # Rounding: the rows that remain go to the leaves with the largest fractions.
        counts[np.argsort(-fractions[number], kind="stable")[: size - counts.sum()]] += 1
        leaf_ids[group == number] = np.repeat(np.arange(len(counts)), counts)
    return leaf_ids


def _shares(
    open_to: Flags, sizes: Ints, labels: Array, margins: Array, leaves: Leaves, reg_lambda: float
) -> Array:
    """How many rows of each group are in each leaf, float64, shape (n_groups, n_leaves)."""
    means = 1 / (1 + np.exp(-margins))
    gradients, hessians = means - labels, means * (1 - means)
    groups, leaf_ids = np.nonzero(open_to)
    n_leaves, n_pairs = open_to.shape[1], len(groups)
    if leaves.hessians.any():
        sums = -leaves.weights * (leaves.hessians + reg_lambda)
        equations_of_leaves = [(gradients[groups], sums), (hessians[groups], leaves.hessians)]
    else:  # G + w H = -w lambda
        coefficients = gradients[groups] + leaves.weights[leaf_ids] * hessians[groups]
        equations_of_leaves = [(coefficients, -leaves.weights * reg_lambda)]
    # Unknowns: shares of the pairs (group, leaf), then how far each sum is above and below its
    # target. The linear program minimises these deviations.
    pairs = np.arange(n_pairs)
    of_leaves = vstack(
        [
            coo_array((coefficients, (leaf_ids, pairs)), (n_leaves, n_pairs))
            for coefficients, _ in equations_of_leaves
        ]
    )
    of_groups = coo_array((np.ones(n_pairs), (groups, pairs)), (len(sizes), n_pairs))
    n_sums = of_leaves.shape[0]
    over, none = eye_array(n_sums), coo_array((len(sizes), 2 * n_sums))
    equations = vstack([hstack([of_leaves, over, -over]), hstack([of_groups, none])])
    costs = np.repeat([0.0, 1.0], [n_pairs, 2 * n_sums])
    targets = np.concatenate([*(sums for _, sums in equations_of_leaves), sizes])
    solution = linprog(costs, A_eq=equations.tocsr(), b_eq=targets, method="highs-ds").x
    shares = np.zeros(open_to.shape)
    shares[groups, leaf_ids] = solution[:n_pairs]
    return shares
