"""A forest whose prediction is the mean over its trees: class shares, or numbers, in the leaves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.data.categories import Categories
from fedapp.kernels import frozen, kernel
from fedapp.trees.forest.cart import Ints, Rules
from fedapp.trees.forest.levels import Rows, Splits, draw_columns, number, search, winners
from fedapp.trees.model import LEAF, Grown, in_order, read_tree, with_sets
from fedapp.trees.objective import Objective, n_outputs
from fedapp.trees.predict import find_leaves
from fedapp.trees.sets import NO_SET, NO_SETS, CategorySets, category_counts, sets_of_rows
from fedapp.trees.sides import Nodes, moved, sides_of, slots_of
from fedapp.trees.text import Opening, read_categories, read_model, write_model, written_categories

KIND = "bagged"
BRANCH = np.dtype(
    [
        ("left", np.int32),  # LEAF where the node is one; the right child is left + 1
        ("column", np.int32),
        ("threshold", np.float32),  # x < threshold goes left
        ("default_left", np.bool_),
        ("set", np.int32),  # number of the set that goes right, where the column is of categories
    ]
)
TEXT_FIELDS = tuple(name for name in BRANCH.names or () if name != "set")  # of a tree in JSON
Branches = npt.NDArray[Any]
Values = npt.NDArray[np.float64]
ALL = np.empty(0, dtype=np.bool_)


@dataclass(frozen=True, slots=True, eq=False)
class BaggedForest:
    """Trees whose leaf values are averaged.

    Parameters
    ----------
    objective : what is predicted.
    columns : names of the features, in order.
    classes : names of the classes in the order of their ids; empty for regression.
    trees : arrays of ``BRANCH``.
    values : of each tree, float64, shape (n_nodes, n_outputs): probability of the second of two
        classes, of every class, or a number; 0 where the node is no leaf.
    sets, categories : as in ``fedapp.trees.model.Ensemble``.
    """

    objective: Objective
    columns: tuple[str, ...]
    classes: tuple[str, ...]
    trees: tuple[Branches, ...]
    values: tuple[Values, ...]
    sets: CategorySets = NO_SETS
    categories: Categories = ()

    @property
    def n_outputs(self) -> int:
        """Numbers of a prediction: classes for softmax, else 1."""
        return n_outputs(self.objective, len(self.classes))

    def predictions(self, leaves: Nodes, counted: npt.NDArray[np.bool_] | None = None) -> Values:
        """Predictions of rows by their leaves; float64, shape (n_rows, n_outputs).

        Parameters
        ----------
        leaves : int32, shape (n_trees, n_rows).
        counted : shape (n_trees, n_rows): which trees count for each row, one at least; None: all.
        """
        sums = np.zeros((leaves.shape[1], self.n_outputs))
        for tree, (values, found) in enumerate(zip(self.values, leaves, strict=True)):
            is_counted = ALL if counted is None else counted[tree]
            _add_leaves(*(*frozen(values, found, is_counted), sums))
        n_trees = len(self.trees) if counted is None else counted.sum(axis=0)[:, None]
        means: Values = sums / n_trees
        return means

    def leaf_terms(self, tree: int) -> Values:
        """What a tree's leaves add to a row's sums; float64, shape (n_nodes, n_outputs)."""
        return self.values[tree]

    def predictions_of(self, sums: Values) -> Values:
        """Predictions of rows by the sums of their ``leaf_terms``, shape (n_rows, n_outputs)."""
        means: Values = sums / len(self.trees)
        return means

    def leaves(self, values: npt.NDArray[np.float32]) -> Nodes:
        """Leaf of each row in each tree; ``values``: float32, shape (n_rows, n_columns)."""
        found = np.zeros((len(self.trees), len(values)), dtype=np.int32)
        for tree, nodes in zip(self.trees, found, strict=True):
            find_leaves(tree, values, nodes, self.sets)
        return found


def branches(
    splits: Splits,
    n_nodes: Ints,
    cuts: Sequence[npt.NDArray[Any]] = (),
    sets: CategorySets = NO_SETS,
) -> Grown:
    """Trees of these splits, and their sets in the order of ``fedapp.trees.model.Grown``.

    Parameters
    ----------
    n_nodes : int64, shape (n_trees,): nodes of each tree.
    cuts : columns, thresholds, default sides, and numbers of sets of the splits; without them a
        split has no threshold, and its column is the number of its owner.
    sets : by their numbers.
    """
    found, leaf = np.zeros(len(splits.trees), dtype=BRANCH), np.zeros((), dtype=BRANCH)
    found["left"], found["column"], leaf["left"] = splits.lefts, splits.owners, LEAF
    found["set"] = leaf["set"] = NO_SET
    for name, of_splits in zip(("column", "threshold", "default_left", "set"), cuts, strict=False):
        found[name] = of_splits
    return in_order(splits.spread(found, n_nodes, leaf), sets, BRANCH)


def leaf_values(
    nodes: Nodes,
    draws: npt.NDArray[np.uint8],
    weights: Values,
    labels: npt.NDArray[np.float32],
    n_nodes: Ints,
    n_classes: int,
    n_outputs: int,
) -> tuple[Values, ...]:
    """Values of all nodes that rows are in.

    Parameters
    ----------
    nodes : int32, shape (n_trees, n_rows).
    draws : shape (n_trees, n_rows): how often each tree draws each row.
    weights : shape (n_rows,).
    labels : class ids, or numbers where ``n_classes`` is 0.
    n_outputs : shares of the last so many classes are kept.
    """
    found = []
    for inside, drawn, size in zip(nodes, draws, n_nodes.tolist(), strict=True):
        sums = np.zeros((size, 1 + max(n_classes, 1)))  # of all rows, and by class or w y
        _add_rows(*(*frozen(inside, drawn, weights, labels), n_classes > 0, sums))
        totals, shares = sums[:, :1], sums[:, sums.shape[1] - n_outputs :]
        found.append(np.divide(shares, totals, where=totals > 0, out=shares * 0))
    return tuple(found)


@kernel
def _add_rows(nodes: Any, draws: Any, weights: Any, labels: Any, is_class: bool, sums: Any) -> None:
    for row in range(len(nodes)):
        weight = draws[row] * weights[row]
        sums[nodes[row], 0] += weight
        if is_class:
            sums[nodes[row], 1 + np.int64(labels[row])] += weight
        else:
            sums[nodes[row], 1] += weight * labels[row]


@kernel
def _add_leaves(values: Any, leaves: Any, counted: Any, sums: Any) -> None:
    """Add a tree's values to those of the rows it counts for; none named: for all."""
    for row in range(len(leaves)):
        if len(counted) == 0 or counted[row]:
            for output in range(sums.shape[1]):
                sums[row, output] += values[leaves[row], output]


def grow(
    rows: Rows,
    values: npt.NDArray[np.float32],
    column_seeds: Ints,
    n_drawn: int,
    max_depth: int,
    rules: Rules,
) -> tuple[tuple[Branches, ...], CategorySets, Nodes]:
    """Grow a forest where all columns lie in one place.

    Parameters
    ----------
    values : float32, shape (n_rows, n_columns): the training rows.
    column_seeds : one a column; ``n_drawn`` of them are drawn for each node.

    Returns
    -------
    The trees, their sets, and the leaf of each row in each of them.
    """
    n_trees, owners = len(rows.counts), np.zeros(len(column_seeds), dtype=np.int64)
    nodes = np.zeros((n_trees, len(values)), dtype=np.int32)
    n_nodes, all_splits = np.ones(n_trees, dtype=np.int64), Splits.none()
    open_nodes = np.arange(n_trees, dtype=np.int32), np.zeros(n_trees, dtype=np.int32)
    kept, sets = [], NO_SETS
    for _ in range(max_depth):
        drawn = draw_columns(column_seeds, owners, 1, n_drawn, open_nodes)[0]
        found = search(rows, nodes, open_nodes, column_seeds, drawn, rules)
        won = np.flatnonzero(winners([found]) >= 0)
        if not len(won):
            break
        splits, n_nodes = number(open_nodes[0][won], open_nodes[1][won], won * 0, n_nodes)
        cut = found.columns[won], found.thresholds[won], found.defaults[won]
        slots, sizes = slots_of(nodes, splits.trees, splits.nodes)
        numbers, own = sets_of_rows(found.widths[won], found.rights[won])
        sides = sides_of(values, *cut, slots, sizes, numbers, own)
        nodes = moved(nodes, splits.lefts, slots, np.cumsum(sizes) - sizes, sides)
        all_splits, open_nodes = all_splits.plus(splits), splits.children()
        kept.append((*cut, np.where(numbers == NO_SET, NO_SET, numbers + len(sets))))
        sets = sets.plus(own)
    cuts = [np.concatenate(arrays) for arrays in zip(*kept, strict=True)]
    return *branches(all_splits, n_nodes, cuts, sets), nodes


def to_json(model: BaggedForest) -> str:
    """The model as text; the same model always gives the same text."""
    trees = [
        {name: tree[name].tolist() for name in TEXT_FIELDS} | {"value": values.tolist()}
        for tree, values in zip(model.trees, model.values, strict=True)
    ]
    told = written_categories(model.categories, model.sets)
    return write_model(KIND, model, {**told, "trees": trees})


def from_json(text: str) -> BaggedForest:
    """Read a model that ``to_json`` wrote.

    Raises
    ------
    DataError : the text is no model of this format.
    """

    def build(said: Opening, document: dict[str, Any]) -> BaggedForest:
        width = n_outputs(said.objective, len(said.classes))
        categories = read_categories(document, len(said.columns))
        trees = tuple(read_tree(tree, len(said.columns), BRANCH) for tree in document["trees"])
        values = tuple(
            np.array(fields["value"], dtype=np.float64).reshape(len(tree), width)
            for fields, tree in zip(document["trees"], trees, strict=True)
        )
        widths = category_counts(categories, len(said.columns))
        grown = with_sets(trees, document.get("sets", []), widths, BRANCH)
        return BaggedForest(*said, grown.trees, values, grown.sets, categories)

    return read_model(text, KIND, build)
