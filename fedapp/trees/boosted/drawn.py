"""Trees with random structure; only their leaf values depend on rows.

A tree then needs only sums at its leaves, so little noise is needed. ``random`` draws a column for
every split; ``cyclic`` uses one column per round, in turn, so that the model is a sum of functions
of single columns, as an explainable boosting machine is.

Source: Maddock, Cormode, Wang, Maple and Jha 2022, "Federated Boosted Decision Trees with
Differential Privacy" (arXiv:2210.02910): totally random splits and Newton leaves; Nori, Caruana,
Bu, Shen and Kulkarni 2021, "Accuracy, Interpretability, and Differential Privacy via Explainable
Boosting" (arXiv:2106.09680): cyclic. Departures: cuts are quantiles, no cut leaves a side without
values, and leaves are shrunk by the noise of their hessians.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from fedapp.histograms.bins import Cuts
from fedapp.histograms.split import Penalties, node_weight
from fedapp.trees.model import LEAF, NODE, Grown, Tree
from fedapp.trees.sets import NO_SET, CategorySets, Members

Kind = Literal["cyclic", "random"]
CYCLIC: Kind = "cyclic"
# Standard deviations of noise that are added to hessians, so that leaves of few rows do not follow
# their noise. On adult, 3 beat 0 and 1 for trees with many leaves, and was as good for others.
SHRINKING = 3.0


@dataclass(slots=True)
class _Open:
    """A node that may be split, and the bins of each column that reach it."""

    node: int
    bins: dict[int, npt.NDArray[np.int64]]


def draw_trees(
    kind: Kind, cuts: Cuts, allowed: npt.NDArray[np.bool_], max_depth: int, seed: int, round_id: int
) -> Grown:
    """Structures of a round's trees; ``allowed``, (n_trees, n_columns), are columns to split."""
    categories = cuts.categories if len(cuts.categories) else np.zeros_like(cuts.widths)
    widths = np.where(categories > 0, categories, cuts.widths)
    trees: list[Tree] = []
    sets: list[Members] = []
    for number, tree_columns in enumerate(allowed):
        columns = np.flatnonzero(tree_columns & (widths > 1)).tolist()
        # Every column once, in random order, then all again in another order.
        if kind == CYCLIC and columns:
            turns, place = divmod(round_id, len(columns))
            columns = [int(np.random.default_rng([seed, turns]).permutation(columns)[place])]
        rng = np.random.default_rng([seed, round_id, number])
        bins = {column: np.arange(widths[column]) for column in columns}
        trees.append(_draw_tree(cuts, bins, max_depth, rng, sets))
    return Grown(tuple(trees), CategorySets.of(sets))


def _draw_tree(
    cuts: Cuts,
    bins: dict[int, npt.NDArray[np.int64]],
    max_depth: int,
    rng: np.random.Generator,
    sets: list[Members],
) -> Tree:
    """One tree, level by level; appends the sets of its splits to ``sets``."""
    nodes = [_leaf(parent=-1)]
    level = [_Open(0, bins)]
    for _ in range(max_depth):
        below = []
        for at in level:
            columns = [column for column, column_bins in at.bins.items() if len(column_bins) > 1]
            if not columns:
                continue
            column = int(rng.choice(columns))
            right = _draw_right(at.bins[column], bool(cuts.by_category[column]), rng)
            split = nodes[at.node]
            split["left"], split["column"] = len(nodes), column
            split["default_left"] = rng.random() < 0.5
            if cuts.by_category[column]:
                members = np.zeros(cuts.categories[column], dtype=bool)
                members[at.bins[column][right]] = True
                split["set"] = len(sets)
                sets.append(members)
            else:
                first_right = at.bins[column][right][0]
                split["threshold"] = cuts.column(column)[first_right - 1]
            for side in (~right, right):
                below.append(_Open(len(nodes), {**at.bins, column: at.bins[column][side]}))
                nodes.append(_leaf(at.node))
        level = below
    return np.concatenate(nodes)


def _draw_right(
    bins: npt.NDArray[np.int64], by_category: bool, rng: np.random.Generator
) -> npt.NDArray[np.bool_]:
    """Which of at least two bins go right, never none or all; numeric bins: the upper ones."""
    n_right = int(rng.integers(1, len(bins)))
    if not by_category:
        return np.arange(len(bins)) >= len(bins) - n_right
    right = rng.random(len(bins)) < 0.5
    if right.all() or not right.any():
        right[rng.integers(len(bins))] ^= True
    return right


def _leaf(parent: int) -> Tree:
    leaf = np.zeros(1, dtype=NODE)
    leaf["left"], leaf["parent"], leaf["set"] = LEAF, parent, NO_SET
    return leaf


def weighed(
    grown: Grown,
    sums: npt.NDArray[np.float64],
    eta: float,
    penalties: Penalties,
    deviation: float,
    most: float,
) -> Grown:
    """The trees with leaf weights (Chen and Guestrin 2016, Eq. 5).

    Parameters
    ----------
    sums : float64, shape (n_leaves, 2): noised gradients and hessians, leaves of all trees in turn.
    deviation : standard deviation of the noise of a sum of hessians.
    most : upper bound of a leaf's absolute weight.
    """
    firmer = replace(
        penalties,
        reg_lambda=penalties.reg_lambda + SHRINKING * deviation,
        min_child_weight=0.0,
        max_delta_step=min(penalties.max_delta_step or most, most),
    )
    trees, first = [], 0
    for structure in grown.trees:
        tree, leaves = structure.copy(), np.flatnonzero(structure["left"] == LEAF)
        totals = np.zeros((len(tree), 2))
        totals[leaves] = sums[first : first + len(leaves)]
        first += len(leaves)
        totals[leaves, 1] = np.maximum(totals[leaves, 1], penalties.min_child_weight)
        # Children come after their parents: sums of inner nodes, from the leaves up.
        for node in range(len(tree) - 1, 0, -1):
            totals[tree["parent"][node]] += totals[node]
        weights = [node_weight(gradient, hessian, firmer) for gradient, hessian in totals.tolist()]
        tree["hessian"], tree["weight"] = totals[:, 1], weights
        tree["value"][leaves] = tree["weight"][leaves] * np.float32(eta)
        scores = totals[:, 0] ** 2 / (totals[:, 1] + max(firmer.reg_lambda, 1e-12))
        gains, splits = np.zeros(len(tree)), np.flatnonzero(tree["left"] != LEAF)
        lefts = tree["left"][splits]
        gains[splits] = np.maximum(scores[lefts] + scores[lefts + 1] - scores[splits], 0)
        tree["gain"] = gains
        trees.append(tree)
    return Grown(tuple(trees), grown.sets)
