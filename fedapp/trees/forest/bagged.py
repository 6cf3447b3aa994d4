"""A forest that predicts the mean over its trees: class shares, or numbers, in the leaves."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt

from fedapp.errors import ConfigError
from fedapp.kernels import frozen, kernel
from fedapp.trees.categories import Categories
from fedapp.trees.forest.cart import Ints, Rules
from fedapp.trees.forest.levels import PER_NODE, Rows, count_drawn_columns, search_rows, winners
from fedapp.trees.losses import Objective
from fedapp.trees.model import (
    BAGGED,
    LEAF,
    NODE,
    Grown,
    KindsOfColumns,
    Margins,
    Model,
    Tree,
    class_values,
    ordered_sets,
    parents_of,
    split_trees,
    stack_trees,
    trees_with_sets,
)
from fedapp.trees.objective import margins_of, n_outputs
from fedapp.trees.predict import Nodes, find_leaves
from fedapp.trees.sets import (
    NO_SET,
    NO_SETS,
    CategorySets,
    CodedSets,
    category_counts,
    sets_of_rows,
)
from fedapp.trees.structure import NO_ROUTES, Routes, Structure, route_rows, routes_of

WRITTEN = "left", "column", "threshold", "default_left"  # in a document; other fields are 0
Doubles = npt.NDArray[np.float64]
ALL = np.empty(0, dtype=np.bool_)


@dataclass(frozen=True, slots=True, eq=False)
class BaggedForest(Model):
    """Trees whose leaf values are averaged."""

    KIND = BAGGED
    # objective, columns, classes, sets, categories, kinds: as in ``fedapp.trees.model.Ensemble``
    objective: Objective
    columns: tuple[str, ...]
    classes: tuple[str, ...]
    trees: tuple[Annotated[Tree, NODE, WRITTEN], ...]
    # per tree (n_nodes, n_outputs): probability of the second of two classes, of every class, or
    # a number; 0 at inner nodes
    values: tuple[Annotated[Doubles, "n_nodes", "n_outputs"], ...]
    sets: CodedSets = NO_SETS
    categories: Categories = ()
    kinds: KindsOfColumns = ()

    def completed(self) -> BaggedForest:
        """The model as a document has it, with numbered sets; ValueError if it is none."""
        Model.completed(self)
        shapes = [(len(tree), self.n_outputs) for tree in self.trees]
        if [values.shape for values in self.values] != shapes:
            raise ValueError(f"values must be of shapes {shapes}")
        widths = category_counts(self.categories, len(self.columns))
        trees, sets = trees_with_sets(self.trees, self.sets, widths)
        return replace(self, trees=trees, sets=sets)

    @property
    def n_outputs(self) -> int:
        """Numbers per prediction: the number of classes for softmax, else 1."""
        return n_outputs(self.objective, len(self.classes))

    @property
    def base_margin(self) -> npt.NDArray[np.float32]:
        """Where histograms of scores are centred: at even odds, as a forest starts nowhere."""
        return np.zeros(self.n_outputs, dtype=np.float32)

    def margins(self, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Predictions of rows on the scale of margins; float32, shape (n_rows, n_outputs)."""
        return margins_of(self.objective, self.predictions(self.leaves(values)))

    def predictions(
        self,
        leaves: Nodes,
        base_margins: Margins | None = None,
        counted: npt.NDArray[np.bool_] | None = None,
    ) -> Doubles:
        """Predictions of rows by their leaves; float64, shape (n_rows, n_outputs).

        ``leaves`` is int32, shape (n_trees, n_rows). ``counted``, of the same shape, selects the
        trees of each row, at least one; None: all. There are no ``base_margins``.
        """
        sums = np.zeros((leaves.shape[1], self.n_outputs))
        for tree, (values, leaf_ids) in enumerate(zip(self.values, leaves, strict=True)):
            is_counted = ALL if counted is None else counted[tree]
            _add_leaves(*(*frozen(values, leaf_ids, is_counted), sums))
        n_trees = len(self.trees) if counted is None else counted.sum(axis=0)[:, None]
        means: Doubles = sums / n_trees
        return means

    def leaf_terms(self, tree: int) -> Doubles:
        """What each node adds to a row's sums; float64, shape (n_nodes, n_outputs)."""
        return self.values[tree]

    def predictions_of(self, sums: Doubles) -> Doubles:
        """Predictions from sums of ``leaf_terms``, shape (n_rows, n_outputs)."""
        means: Doubles = sums / len(self.trees)
        return means

    def leaves(self, values: npt.NDArray[np.float32]) -> Nodes:
        """Leaf of each row in each tree; ``values`` is float32, shape (n_rows, n_columns)."""
        leaf_ids = np.zeros((len(self.trees), len(values)), dtype=np.int32)
        for tree, tree_leaf_ids in zip(self.trees, leaf_ids, strict=True):
            find_leaves(tree, values, tree_leaf_ids, self.sets)
        return leaf_ids


def branches(
    structure: Structure,
    routes: Routes | None = None,
    sets: CategorySets = NO_SETS,
) -> Grown:
    """Trees from their splits, with sets in the order of ``fedapp.trees.model.Grown``.

    Without ``routes`` a split has no threshold, and its column is its owner's number.
    """
    splits = structure.splits
    nodes, leaf = np.zeros(len(splits.trees), dtype=NODE), np.zeros((), dtype=NODE)
    nodes["left"], nodes["column"], leaf["left"] = splits.lefts, splits.owners, LEAF
    nodes["set"] = leaf["set"] = NO_SET
    if routes is not None:
        for name in ("left", "column", "threshold", "default_left", "set"):
            nodes[name] = routes[name]
    whole, offsets = stack_trees(splits.spread(nodes, structure.n_nodes, leaf))
    whole["parent"] = parents_of(whole["left"], offsets)
    return ordered_sets(split_trees(whole, offsets), sets)


def leaf_values(
    nodes: Nodes,
    draws: npt.NDArray[np.uint8],
    weights: Doubles,
    labels: npt.NDArray[np.float32],
    n_nodes: Ints,
    n_classes: int,
    n_outputs: int,
) -> tuple[Doubles, ...]:
    """Values of all nodes that rows are in; per tree float64, shape (n_nodes, n_outputs).

    Parameters
    ----------
    nodes, draws : shape (n_trees, n_rows): node of each row, and how often the tree draws it.
    labels : class ids, or numbers if ``n_classes`` is 0.
    n_outputs : shares are of the last classes, as many as this.
    """
    values = []
    for inside, drawn, size in zip(nodes, draws, n_nodes.tolist(), strict=True):
        sums = np.zeros((size, 1 + max(n_classes, 1)))  # of all rows, and by class or w y
        _add_rows(*(*frozen(inside, drawn, weights, labels), n_classes > 0, sums))
        totals, shares = sums[:, :1], sums[:, sums.shape[1] - n_outputs :]
        values.append(np.divide(shares, totals, where=totals > 0, out=shares * 0))
    return tuple(values)


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
    """Add a tree's values to the rows it counts for; all rows if ``counted`` is empty."""
    for row in range(len(leaves)):
        if len(counted) == 0 or counted[row]:
            for output in range(sums.shape[1]):
                sums[row, output] += values[leaves[row], output]


def grow_forest(
    rows: Rows,
    values: npt.NDArray[np.float32],
    column_seeds: Ints,
    n_drawn: int,
    max_depth: int,
    rules: Rules,
    per: str = PER_NODE,
) -> tuple[tuple[Tree, ...], CategorySets, Nodes]:
    """Grow a forest on pooled columns.

    ``values`` is float32, shape (n_rows, n_columns); ``column_seeds`` has one seed per column, and
    ``n_drawn`` columns are drawn for each node, or tree (``per``). Returns the trees, their sets,
    and the leaf of each row in each tree.
    """
    n_trees, owners = len(rows.counts), np.zeros(len(column_seeds), dtype=np.int64)
    nodes = np.zeros((n_trees, len(values)), dtype=np.int32)
    structure = Structure.roots(n_trees)
    levels, sets = [], NO_SETS
    for _ in range(max_depth):
        open_nodes = structure.open_nodes
        drawn = count_drawn_columns(column_seeds, owners, 1, n_drawn, open_nodes, per)[0]
        best = search_rows(rows, nodes, open_nodes, column_seeds, drawn, rules, per)
        won = np.flatnonzero(winners([best]) >= 0)
        if not len(won):
            break
        structure = structure.split(open_nodes[0][won], open_nodes[1][won], won * 0)
        splits = structure.last
        numbers, level_sets = sets_of_rows(best.widths[won], best.rights[won])
        cuts = best.columns[won], best.thresholds[won], best.defaults[won], numbers
        routes = routes_of(splits.trees, splits.nodes, splits.lefts, *cuts)
        nodes = route_rows(nodes, routes, values, level_sets)
        routes["set"][numbers != NO_SET] += len(sets)
        levels.append(routes)
        sets = sets.plus(level_sets)
    return *branches(structure, np.concatenate([NO_ROUTES, *levels]), sets), nodes


# The forest as a scikit-learn estimator with the same predictions (scikit-learn 1.6 to 1.9,
# ``sklearn/tree/_tree.pyx``). It sends ``x <= threshold`` left and fedapp ``x < threshold``, both
# with float32 values: the next smaller float32 gives the same split. Impurities and numbers of rows
# are unknown and stay 0, so ``feature_importances_`` is NaN.

NO_SPLIT = -2  # scikit-learn's column and threshold of a leaf


def to_sklearn(model: BaggedForest) -> Any:
    """A fitted random forest of scikit-learn; ConfigError for columns of categories."""
    from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
    from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

    categorical = [
        name for name, names in zip(model.columns, model.categories, strict=False) if names
    ]
    if categorical:
        rule = "must be of a forest of numeric columns only, as scikit-learn's trees have no"
        raise ConfigError(
            f"to_sklearn {rule} splits by sets of categories, got categories in "
            f"{', '.join(categorical[:5])}"
        )
    forest_of, tree_of = RandomForestRegressor, DecisionTreeRegressor
    if model.classes:
        forest_of, tree_of = RandomForestClassifier, DecisionTreeClassifier
    trees = [
        _fitted(tree_of(), model, _tree(branches, _shares(model, values), len(model.columns)))
        for branches, values in zip(model.trees, model.values, strict=True)
    ]
    forest = _fitted(forest_of(n_estimators=len(trees)), model)
    forest.feature_names_in_ = np.array(model.columns, dtype=object)
    forest.estimator_, forest.estimators_ = tree_of(), trees
    if model.classes:
        forest.classes_ = class_values(model.classes)
    return forest


def _fitted(estimator: Any, model: BaggedForest, tree: Any = None) -> Any:
    """The estimator with the attributes that ``fit`` sets for columns and classes."""
    estimator.n_features_in_, estimator.n_outputs_ = len(model.columns), 1
    if model.classes:
        estimator.n_classes_ = len(model.classes)
        estimator.classes_ = np.arange(len(model.classes))  # trees of a forest use class ids
    if tree is not None:
        estimator.tree_ = tree
    return estimator


def _shares(model: BaggedForest, values: Doubles) -> Doubles:
    """One share per class at each node, also for two classes; or a number."""
    is_binary = model.classes and values.shape[1] == 1
    return np.hstack([1 - values, values]) if is_binary else values


def _tree(branches: Tree, values: Doubles, n_columns: int) -> Any:
    """One tree in scikit-learn's representation."""
    from sklearn.tree._tree import NODE_DTYPE, Tree

    is_leaf = branches["left"] == LEAF
    nodes = np.zeros(len(branches), dtype=NODE_DTYPE)
    nodes["left_child"] = branches["left"]
    nodes["right_child"] = np.where(is_leaf, LEAF, branches["left"] + 1)
    nodes["feature"] = np.where(is_leaf, NO_SPLIT, branches["column"])
    with np.errstate(over="ignore"):  # below the lowest number is no number, where missing go left
        below = np.nextafter(branches["threshold"], np.float32(-np.inf))
    nodes["threshold"] = np.where(is_leaf, NO_SPLIT, below.astype(np.float64))
    nodes["missing_go_to_left"] = branches["default_left"] & ~is_leaf
    width = values.shape[1]
    tree = Tree(n_columns, np.array([width], dtype=np.intp), 1)
    depths = np.zeros(len(branches), dtype=np.int64)
    for node, left in enumerate(branches["left"].tolist()):
        if left != LEAF:
            depths[left : left + 2] = depths[node] + 1
    state = {
        "max_depth": int(depths.max(initial=0)),
        "node_count": len(nodes),
        "nodes": nodes,
        "values": np.ascontiguousarray(values[:, None, :]),
    }
    tree.__setstate__(state)
    return tree
