"""A forest grown level by level: random draws, split search, and the model, a mean over its trees.

Draws of rows and columns are hashes of numbers, so they do not depend on numpy's version, and a
draw for one column discloses nothing about the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, Any, Protocol

import numpy as np
import numpy.typing as npt

from fedapp.arrays import Doubles, Flags, Floats, Ints
from fedapp.errors import ConfigError
from fedapp.histograms.build import inside_of
from fedapp.trees.categories import (
    NO_SET,
    NO_SETS,
    Categories,
    CategorySets,
    CodedSets,
    category_counts,
    sets_of_rows,
)
from fedapp.trees.forest.cart import Bins, Candidates, Codes, RowFields, Rules, fewest_rows
from fedapp.trees.forest.encrypted import NodeTotals, best_cuts, list_columns
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
from fedapp.trees.objective import margins_of
from fedapp.trees.predict import Nodes, Places, find_leaves
from fedapp.trees.structure import NO_ROUTES, Routes, Structure, joined, route_rows, routes_of

Words = npt.NDArray[np.uint64]

KEYS_AT_ONCE = 2**22  # column keys in memory: 32 MB, however many columns a party claims
PER_NODE, PER_TREE = "node", "tree"  # what columns are drawn for
# Java's SplittableRandom
GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
WRITTEN = "left", "column", "threshold", "default_left"  # in a document; other fields are 0


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Training rows as a split search sees them."""

    # codes, bins: see ``fedapp.trees.forest.cart``
    codes: Codes
    bins: Bins
    targets: Doubles  # (n_rows,): class ids or numbers
    weights: Doubles  # (n_rows,)
    counts: npt.NDArray[np.uint8]  # (n_trees, n_rows): how often each tree draws each row


def search_rows(
    rows: Rows,
    nodes: Nodes,
    open_nodes: tuple[Places, Places],
    column_seeds: Ints,
    n_drawn: Ints,
    rules: Rules,
    per: str = PER_NODE,
) -> Candidates:
    """The best split of every open node over some columns.

    Parameters
    ----------
    nodes : int32, shape (n_trees, n_rows): node of each training row.
    open_nodes : trees and nodes, by tree.
    column_seeds : int64, shape (n_columns,): see ``column_keys``.
    n_drawn : int64, shape (n_open,): how many of these columns are drawn for each node.
    per : see ``columns_of``.
    """
    fields, candidates = RowFields.of(rows.targets, rows.weights, rules.n_classes), []
    fewest = fewest_rows(rules.min_samples_split, rules.min_samples_leaf)
    for first, end in by_tree(open_nodes[0]):
        tree, wanted = int(open_nodes[0][first]), open_nodes[1][first:end]
        counts, n_wanted = rows.counts[tree], n_drawn[first:end]
        inside = inside_of(nodes[tree], (counts > 0) & (fields.weights > 0), wanted)
        columns, keys = columns_of(column_seeds, tree, wanted, n_wanted, per)
        terms = fields.of_rows(inside[0], counts)
        listing, local = list_columns(
            rows.codes, rows.bins, inside, columns, keys, n_wanted, fewest, terms
        )
        totals = NodeTotals.of(fields, rows.targets, counts, inside, fewest)
        choices = best_cuts(listing, local.sums, totals, fields.units, rules)
        candidates.append(local.candidates(listing, choices, rows.bins))
    return joined(candidates)


def by_tree(trees: Places) -> list[tuple[int, int]]:
    """Range of each tree, for nodes sorted by tree."""
    firsts = np.flatnonzero(np.diff(trees, prepend=-1)).tolist()
    return list(pairwise([*firsts, len(trees)]))


def columns_of(
    column_seeds: Ints, tree: int, wanted: Places, n_drawn: Ints, per: str = PER_NODE
) -> tuple[Ints, Ints]:
    """Columns of each wanted node of a tree, in drawing order, and their keys.

    ``per`` is what columns are drawn for: with ``PER_NODE`` those that are not drawn follow and may
    replace those that are the same in the node, with ``PER_TREE`` they are left out.
    """
    keys = column_keys(column_seeds, tree, wanted if per == PER_NODE else wanted * 0)
    columns = np.argsort(keys, axis=1, kind="stable")
    if per == PER_TREE:  # all nodes have the same
        columns = columns[:, : n_drawn.max(initial=0)]
    return columns, np.take_along_axis(keys, columns, axis=1)


class BestSplits(Protocol):
    """Improvements and ranks of a party's best splits, as in ``Candidates``."""

    @property
    def improvements(self) -> Doubles: ...
    @property
    def ranks(self) -> Ints: ...


def winners(offers: Sequence[BestSplits]) -> Ints:
    """Number of the party whose split each open node gets; -1 if it becomes a leaf.

    The largest improvement on a drawn column wins, the first party's if equal. If all drawn columns
    of all parties are constant in the node, the column with the smallest key wins.
    """
    improvements = np.stack([offer.improvements for offer in offers])
    ranks = np.stack([offer.ranks for offer in offers])
    # Rank 0 is a drawn column; any other rank is a key, so only the smallest key competes.
    at_first = ranks == ranks.min(axis=0)
    gains = np.where(at_first & ~np.isnan(improvements), improvements, -np.inf)
    best = gains.argmax(axis=0)
    chosen: Ints = np.where(gains.max(axis=0) > -np.inf, best, -1)
    return chosen


def count_drawn_columns(
    column_seeds: Ints,
    owners: Ints,
    n_parties: int,
    n_drawn: int,
    open_nodes: tuple[Places, Places],
    per: str = PER_NODE,
) -> Ints:
    """How many columns of each party are drawn for each open node: shape (n_parties, n_open).

    ``owners``, shape (n_columns,), is the party of each column; ``n_drawn`` is per node, over all
    parties.
    """
    trees, nodes = open_nodes[0], open_nodes[1] if per == PER_NODE else open_nodes[1] * 0
    sizes = np.bincount(owners, minlength=n_parties)
    if n_drawn >= len(owners):
        return np.tile(sizes[:, None], len(trees)).astype(np.int64)
    counts = np.zeros((n_parties, len(trees)), dtype=np.int64)
    at_once = max(1, KEYS_AT_ONCE // len(owners))
    for tree in np.unique(trees):
        tree_places = np.flatnonzero(trees == tree)
        for places in np.split(tree_places, range(at_once, len(tree_places), at_once)):
            keys = column_keys(column_seeds, int(tree), nodes[places])
            order = np.argsort(keys, axis=1, kind="stable")[:, :n_drawn]
            for party in range(n_parties):
                counts[party, places] = (owners[order] == party).sum(axis=1)
    return counts


# Random draws


def mix(words: Words) -> Words:
    """A bijective hash of each word.

    Source: Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators", Figure 16.
    """
    z = words + GAMMA
    z = (z ^ (z >> np.uint64(30))) * _FIRST
    z = (z ^ (z >> np.uint64(27))) * _SECOND
    mixed: Words = z ^ (z >> np.uint64(31))
    return mixed


def column_keys(column_seeds: Ints, tree: int, nodes: npt.NDArray[np.int32]) -> Ints:
    """Keys that select columns for the nodes of a tree: the smallest are drawn.

    ``column_seeds`` is int64, shape (n_columns,), >= 0; a column's owner has its seed.
    Returns int64, shape (n_nodes, n_columns), 1 to 2**63 - 2.
    """
    places = mix((np.uint64(tree) << np.uint64(32)) | nodes.astype(np.uint64))
    words = mix(column_seeds.astype(np.uint64)[None, :] ^ places[:, None])
    return (words >> np.uint64(1)).astype(np.int64).clip(1, 2**63 - 2)


def row_counts(bootstrap: bool, seed: int, n_trees: int, n_rows: int) -> npt.NDArray[np.uint8]:
    """How often each tree draws each row (1 without bootstrap); uint8, shape (n_trees, n_rows)."""
    counts = np.ones((n_trees, n_rows), dtype=np.uint8)
    if bootstrap:
        trees, rows = (mix(np.arange(n, dtype=np.uint64)) for n in (n_trees, n_rows))
        half = np.uint64(32)
        for tree, root in enumerate(mix(np.uint64(seed) ^ trees)):
            # One draw a word: its upper half as a fraction of 2**32.
            drawn = ((mix(root ^ rows) >> half) * np.uint64(n_rows)) >> half
            counts[tree] = np.bincount(drawn.astype(np.int64), minlength=n_rows).clip(max=255)
    return counts


def column_seeds(seed: int, n_columns: int) -> Ints:
    """Seeds of all parties' columns, from which they are drawn for nodes."""
    return np.random.default_rng([seed, 2]).integers(0, 2**63 - 1, (n_columns,))


def n_features(rule: str | float, n_columns: int) -> int:
    """Columns drawn per node; ``rule`` is all, sqrt, log2, or a share of the columns."""
    if rule == "all":
        return n_columns
    if rule in ("sqrt", "log2"):
        root_or_log = np.sqrt(n_columns) if rule == "sqrt" else np.log2(n_columns)
        return max(1, int(root_or_log))
    return max(1, int(float(rule) * n_columns))


# The model


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
    def base_margin(self) -> Floats:
        """Where histograms of scores are centred: at even odds, as a forest starts nowhere."""
        return np.zeros(self.n_outputs, dtype=np.float32)

    def margins(self, values: Floats) -> Floats:
        """Predictions of rows on the scale of margins; float32, shape (n_rows, n_outputs)."""
        return margins_of(self.objective, self.predictions(self.leaves(values)))

    def predictions(
        self,
        leaves: Nodes,
        base_margins: Margins | None = None,
        counted: Flags | None = None,
    ) -> Doubles:
        """Predictions of rows by their leaves; float64, shape (n_rows, n_outputs).

        ``leaves`` is int32, shape (n_trees, n_rows). ``counted``, of the same shape, selects the
        trees of each row, at least one; None: all. There are no ``base_margins``.
        """
        sums = np.zeros((leaves.shape[1], self.n_outputs))
        for tree, (values, leaf_ids) in enumerate(zip(self.values, leaves, strict=True)):
            terms = values[leaf_ids]
            sums += terms if counted is None else np.where(counted[tree][:, None], terms, 0.0)
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

    def leaves(self, values: Floats) -> Nodes:
        """Leaf of each row in each tree; ``values`` is float32, shape (n_rows, n_columns)."""
        return find_leaves(self.trees, values, self.sets)


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
    labels: Floats,
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
        drawn_weights = drawn * weights
        totals = np.bincount(inside, drawn_weights, size)[:, None]
        if n_classes:
            cells = inside.astype(np.int64) * n_classes + labels.astype(np.int64)
            sums = np.bincount(cells, drawn_weights, size * n_classes).reshape(size, n_classes)
        else:
            sums = np.bincount(inside, drawn_weights * labels, size)[:, None]
        shares = sums[:, sums.shape[1] - n_outputs :]
        values.append(np.divide(shares, totals, where=totals > 0, out=shares * 0))
    return tuple(values)


def grow_forest(
    rows: Rows,
    values: Floats,
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

    if categorical := [
        name for name, names in zip(model.columns, model.categories, strict=False) if names
    ]:
        rule = "must be of a forest of numeric columns only, as scikit-learn's trees have no"
        raise ConfigError(
            f"to_sklearn {rule} splits by sets of categories, got categories in "
            f"{', '.join(categorical[:5])}"
        )
    kind = RandomForestClassifier if model.classes else RandomForestRegressor
    # Fitted on a row of each class, so that all attributes are there; then with these trees.
    labels = np.arange(max(len(model.classes), 1))
    forest = kind(n_estimators=len(model.trees))
    forest.fit(np.zeros((len(labels), len(model.columns))), labels)
    forest.feature_names_in_ = np.array(model.columns, dtype=object)
    if model.classes:
        forest.classes_ = class_values(model.classes)
    for tree, nodes, values in zip(forest.estimators_, model.trees, model.values, strict=True):
        # One share per class at each node, also for two classes; or a number.
        is_binary = model.classes and values.shape[1] == 1
        shares = np.hstack([1 - values, values]) if is_binary else values
        tree.tree_ = _tree(nodes, shares, len(model.columns))
    return forest


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
