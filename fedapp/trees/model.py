"""A boosted model: its trees, and its form on disk."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fedapp.data.categories import Categories
from fedapp.errors import DivergedError
from fedapp.trees.base_score import base_margin, check_base_score, read_base_score
from fedapp.trees.objective import PLAIN, LossParameters, Objective, exact_predictions, n_outputs
from fedapp.trees.sets import NO_SET, NO_SETS, CategorySets, Ints, category_counts, sets_of_codes
from fedapp.trees.text import (
    Opening,
    exact,
    model_text,
    read_categories,
    read_model,
    write_model,
    written_categories,
)

KIND = ""  # the text of a boosted model names none
LEAF = -1
# Far enough within float32 that what some hundred trees add up to stays within it.
LARGEST_LEAF = float(np.finfo(np.float32).max) / 256

# A tree is an array of these; node 0 is the root, a right child follows its left sibling.
NODE = np.dtype(
    [
        ("left", np.int32),  # LEAF where the node is one; the right child is left + 1
        ("parent", np.int32),  # -1 at the root
        ("column", np.int32),
        ("threshold", np.float32),  # x < threshold goes left
        ("default_left", np.bool_),  # where a missing value goes
        ("gain", np.float32),
        ("hessian", np.float32),  # sum over the rows of the node
        ("weight", np.float32),  # optimal weight before the learning rate
        ("value", np.float32),  # of a leaf: weight * eta; 0 elsewhere
        ("set", np.int32),  # number of the set that goes right, where the column is of categories
    ]
)
TEXT_FIELDS = tuple(name for name in NODE.names or () if name != "set")  # of a tree in JSON
Tree = npt.NDArray[Any]
Margins = npt.NDArray[np.float32]


class Grown(NamedTuple):
    """Trees with the sets of their categorical splits.

    The sets stand in the order of the splits that have one, trees in turn and nodes ascending, so
    a tree's ``set`` fields follow from which of its columns are of categories.
    """

    trees: tuple[Tree, ...]
    sets: CategorySets = NO_SETS


NO_TREES = Grown(())


@dataclass(frozen=True, slots=True, eq=False)
class Ensemble:
    """Trees whose leaf values add up to margins.

    Parameters
    ----------
    objective : the loss it was trained for.
    base_score : float32, shape (n_outputs,): prediction without any tree (a probability for
        logistic loss); for softmax the margin of each class.
    columns : names of the features, in order.
    classes : names of the classes in the order of their ids; empty for regression.
    trees : arrays of ``NODE``; with k outputs, tree i adds to output ``i % k``.
    sets : of the categorical splits, in the order of ``Grown``.
    categories : names of the categories of each column; empty where all hold numbers.
    parameters : of the objective.
    margin_column : of the margins that rows start from in place of ``base_score``; empty where they
        start from that.
    """

    objective: Objective
    base_score: Margins
    columns: tuple[str, ...]
    classes: tuple[str, ...]
    trees: tuple[Tree, ...]
    sets: CategorySets = NO_SETS
    categories: Categories = ()
    parameters: LossParameters = PLAIN
    margin_column: str = ""

    @property
    def n_outputs(self) -> int:
        """Margins of a row: classes for softmax, else 1."""
        return n_outputs(self.objective, len(self.classes))

    @property
    def grown(self) -> Grown:
        """The trees with their sets."""
        return Grown(self.trees, self.sets)

    @property
    def base_margin(self) -> Margins:
        """``base_score`` on the scale of the margins; float32, shape (n_outputs,)."""
        return base_margin(self.objective, self.base_score)

    def starts(self, n_rows: int, base_margins: Margins | None = None) -> Margins:
        """Margins of rows before the first tree; float32, shape (n_rows, n_outputs).

        Parameters
        ----------
        base_margins : of the rows, shape (n_rows,), where the model has a ``margin_column``.

        Raises
        ------
        ValueError : they are not given, or given to a model that has no such column.
        """
        if (base_margins is not None) != bool(self.margin_column):
            column = repr(self.margin_column) if self.margin_column else "none"
            raise ValueError(f"base_margins must be those of the model's column, which is {column}")
        if base_margins is None:
            return np.full((n_rows, self.n_outputs), self.base_margin, dtype=np.float32)
        return base_margins.astype(np.float32).reshape(n_rows, 1)

    def predictions(
        self, leaves: npt.NDArray[np.int32], base_margins: Margins | None = None
    ) -> npt.NDArray[np.float64]:
        """Predictions of rows by their leaves: margins are summed in float64.

        Parameters
        ----------
        leaves : int32, shape (n_trees, n_rows).
        base_margins : see ``starts``.

        Returns
        -------
        float64, shape (n_rows, n_outputs).
        """
        margins = self.starts(leaves.shape[1], base_margins).astype(np.float64)
        for number, (tree, found) in enumerate(zip(self.trees, leaves, strict=True)):
            margins[:, number % self.n_outputs] += tree["value"][found]
        return exact_predictions(self.objective, margins)

    def leaf_terms(self, tree: int) -> npt.NDArray[np.float64]:
        """What a tree's leaves add to a row's sums; float64, shape (n_nodes, n_outputs)."""
        values = self.trees[tree]["value"]
        terms = np.zeros((len(values), self.n_outputs))
        terms[:, tree % self.n_outputs] = values
        return terms

    def predictions_of(
        self, sums: npt.NDArray[np.float64], base_margins: Margins | None = None
    ) -> npt.NDArray[np.float64]:
        """Predictions of rows by the sums of their ``leaf_terms``, shape (n_rows, n_outputs).

        Parameters
        ----------
        base_margins : see ``starts``.
        """
        return exact_predictions(self.objective, self.starts(len(sums), base_margins) + sums)

    def first_rounds(self, n_rounds: int) -> Ensemble:
        """The model as it was after ``n_rounds`` boosting rounds."""
        return self.with_trees(in_order(self.trees[: n_rounds * self.n_outputs], self.sets))

    def with_trees(self, grown: Grown) -> Ensemble:
        """The model with these trees in place of its own."""
        return replace(self, trees=grown.trees, sets=grown.sets)


def check_range(trees: Iterable[Tree]) -> None:
    """Raise the DivergedError where gains, or sums of leaf weights, may leave float32."""
    for tree in trees:
        if not ((np.abs(tree["value"]) <= LARGEST_LEAF) & np.isfinite(tree["gain"])).all():
            raise DivergedError("gains and leaf weights must stay within float32, got larger ones")


def importance(model: Ensemble) -> dict[str, dict[str, float]]:
    """Of each column that splits anywhere, the one with the largest total gain first: ``gain`` a
    split and ``total_gain``, as XGBoost names them, and ``count`` of splits, its ``weight``."""
    nodes = np.concatenate([*model.trees, np.empty(0, dtype=NODE)])
    splits = nodes[nodes["left"] != LEAF]
    n_columns = len(model.columns)
    weights = splits["gain"].astype(np.float64)
    gains = np.bincount(splits["column"], weights=weights, minlength=n_columns).astype(np.float64)
    counts = np.bincount(splits["column"], minlength=n_columns)
    return importance_of(model.columns, gains, counts)


def importance_of(
    columns: Sequence[str], gains: npt.NDArray[np.float64], counts: npt.NDArray[np.int64]
) -> dict[str, dict[str, float]]:
    """The same of columns by their total gain and number of splits."""
    order = [c for c in np.argsort(-gains, kind="stable") if counts[c]]
    return {
        "gain": {columns[c]: float(gains[c] / counts[c]) for c in order},
        "total_gain": {columns[c]: float(gains[c]) for c in order},
        "count": {columns[c]: int(counts[c]) for c in order},
    }


def stack_trees(
    trees: Sequence[Tree], nodes: np.dtype[Any] = NODE
) -> tuple[Tree, npt.NDArray[np.int64]]:
    """Trees one after the other, and where each begins (and the last ends).

    Parameters
    ----------
    nodes : what the trees are arrays of.
    """
    offsets = np.zeros(len(trees) + 1, dtype=np.int64)
    np.cumsum([len(tree) for tree in trees], out=offsets[1:])
    return np.concatenate([*trees, np.empty(0, dtype=nodes)]), offsets


def split_trees(nodes: Tree, offsets: npt.NDArray[np.int64]) -> tuple[Tree, ...]:
    """Undo ``stack_trees``."""
    return tuple(nodes[a:b] for a, b in pairwise(offsets))


def in_order(trees: Sequence[Tree], sets: CategorySets, kind: np.dtype[Any] = NODE) -> Grown:
    """The trees with those of the sets that they have, in the order of their splits.

    Parameters
    ----------
    trees : arrays of this kind; their splits have the sets' numbers in any order.
    """
    if not len(sets):
        return Grown(tuple(trees))
    nodes, offsets = stack_trees(trees, kind)
    used = nodes["set"] != NO_SET
    kept = sets.take(nodes["set"][used])
    nodes["set"][used] = np.arange(len(kept))
    return Grown(split_trees(nodes, offsets), kept)


def together(parts: Iterable[Grown]) -> Grown:
    """Trees of several parts, one part after the other."""
    trees: list[Tree] = []
    sets = NO_SETS
    for part in parts:
        trees += [_renumbered(tree, len(sets)) for tree in part.trees]
        sets = sets.plus(part.sets)
    return Grown(tuple(trees), sets)


def _renumbered(tree: Tree, first: int) -> Tree:
    """The tree with the numbers of its sets raised."""
    if not first or (tree["set"] == NO_SET).all():
        return tree
    found = tree.copy()
    found["set"][tree["set"] != NO_SET] += first
    return found


def number_sets(nodes: Tree, widths: Ints) -> Ints:
    """Give every split of a column of categories the number of its set, in the order of ``Grown``.

    Parameters
    ----------
    nodes : trees one after the other; ``set`` is changed in place.
    widths : int64, shape (n_columns,): categories of each column, 0 for one of numbers.

    Returns
    -------
    int64, shape (n_sets,): categories of each set's column.
    """
    splits = np.flatnonzero(nodes["left"] != LEAF)
    of_splits: Ints = widths[nodes["column"][splits]]
    nodes["set"] = NO_SET
    nodes["set"][splits[of_splits > 0]] = np.arange(np.count_nonzero(of_splits))
    found: Ints = of_splits[of_splits > 0]
    return found


def check_trees(
    lefts: npt.NDArray[Any],
    offsets: npt.NDArray[np.int64],
    columns: npt.NDArray[Any] | None = None,
    n_columns: int = 0,
) -> None:
    """Hold that nodes are whole trees, one after the other, children behind their parents: a walk
    down each ends at a leaf, may reach every node, and meets no column that is not there.

    Parameters
    ----------
    lefts : shape (n_nodes,): left child within the tree, -1 at a leaf; the right child is the next.
    offsets : shape (n_trees + 1,): where each tree begins, and the last ends.
    columns : that may be met; None where no columns are told.

    Raises
    ------
    ValueError : says which rule is broken.
    """
    lefts, n_nodes, sizes = lefts.astype(np.int64), len(lefts), np.diff(offsets)
    whole = len(offsets) > 0 and offsets[0] == 0 and offsets[-1] == n_nodes
    if not whole or (sizes < 1).any():
        raise ValueError(f"trees must divide {n_nodes} nodes, one each at least")
    if columns is not None and ((columns < 0) | (columns >= n_columns)).any():
        raise ValueError(f"columns must be 0 to {n_columns - 1}")
    starts, nodes, inner = np.repeat(offsets[:-1], sizes), np.arange(n_nodes), lefts != LEAF
    children = starts + lefts
    leads_on = (children > nodes) & (children + 1 < np.repeat(offsets[1:], sizes))
    if not leads_on[inner].all():
        raise ValueError("lefts must lead to two later nodes of the same tree")
    n_parents = np.bincount(np.ravel([children[inner], children[inner] + 1]), minlength=n_nodes)
    if not np.array_equal(n_parents, nodes > starts):
        raise ValueError("lefts must reach every node once")


def parents_of(
    lefts: npt.NDArray[np.int32], offsets: npt.NDArray[np.int64]
) -> npt.NDArray[np.int32]:
    """Parent of each node within its tree, -1 at the roots; arguments as ``check_trees`` holds."""
    starts, inner = np.repeat(offsets[:-1], np.diff(offsets)), np.flatnonzero(lefts != LEAF)
    parents = np.full(len(lefts), -1, dtype=np.int32)
    for side in (0, 1):
        parents[starts[inner] + lefts[inner] + side] = inner - starts[inner]
    return parents


def scaled(tree: Tree, factor: float) -> Tree:
    """The tree with its values times a factor; gains and hessians stay those of the rows."""
    copy = tree.copy()
    for field in ("value", "weight"):
        copy[field] *= np.float32(factor)
    return copy


def to_json(model: Ensemble) -> str:
    """The model as text; the same model always gives the same text."""
    trees = [
        {name: [exact(value) for value in tree[name]] for name in TEXT_FIELDS}
        for tree in model.trees
    ]
    is_plain = model.parameters == PLAIN
    parameters: dict[str, Any] = {} if is_plain else {"parameters": asdict(model.parameters)}
    if model.margin_column:
        parameters["base_margin"] = model.margin_column
    coding = written_categories(model.categories, model.sets)
    content = {**parameters, **coding, "trees": trees}
    return write_model(KIND, model, content, model.base_score)


def from_json(text: str) -> Ensemble:
    """Read a model that ``to_json`` wrote.

    Raises
    ------
    DataError : the text is no model of this format.
    """

    def build(said: Opening, document: dict[str, Any]) -> Ensemble:
        categories = read_categories(document, len(said.columns))
        read = [read_tree(tree, len(said.columns), NODE) for tree in document["trees"]]
        widths = category_counts(categories, len(said.columns))
        trees, sets = with_sets(read, document.get("sets", []), widths)
        width = n_outputs(said.objective, len(said.classes))
        if len(trees) % width:
            raise ValueError("trees must be one for every output")
        mean = read_base_score(document["base_score"], width)
        check_base_score(said.objective, mean)
        # What is not said of the objective is plain.
        told = {name: float(value) for name, value in document.get("parameters", {}).items()}
        names = said.columns, said.classes
        parameters = replace(PLAIN, **told)
        column = str(document.get("base_margin", ""))
        kept = Ensemble(said.objective, mean, *names, trees, sets, categories, parameters)
        return replace(kept, margin_column=column)

    return read_model(text, KIND, build)


def with_sets(
    trees: Sequence[Tree],
    codes: Sequence[Sequence[int]],
    widths: Ints,
    kind: np.dtype[Any] = NODE,
) -> Grown:
    """Trees with their sets as a text tells them, ``CategorySets.codes``.

    Parameters
    ----------
    trees : arrays of this kind.
    widths : int64, shape (n_columns,): categories of each column, 0 for one of numbers.

    Raises
    ------
    ValueError : not one a categorical split, or of a category that the column has not.
    """
    nodes, offsets = stack_trees(trees, kind)
    found = sets_of_codes(codes, number_sets(nodes, widths))
    return Grown(split_trees(nodes, offsets), found)


def read_tree(
    fields: Mapping[str, Sequence[float]], n_columns: int, nodes: np.dtype[Any]
) -> npt.NDArray[Any]:
    """One tree from its fields; a walk down it ends, and meets no column that is not there.

    Parameters
    ----------
    fields : a list a field of ``nodes``, ``left`` and ``column`` among them, but for ``set``.
    """
    tree = np.zeros(len(fields["left"]), dtype=nodes)
    for name in (name for name in nodes.names or () if name != "set"):
        if len(fields[name]) != len(tree):
            raise ValueError(f"{name} must be one a node")
        tree[name] = fields[name]
        if tree[name].dtype.kind == "f" and not np.isfinite(tree[name]).all():
            raise ValueError(f"{name} must be finite")
    columns = tree["column"][tree["left"] != LEAF]
    check_trees(tree["left"], np.array([0, len(tree)]), columns, n_columns)
    return tree


def load_model(path: Path) -> Ensemble:
    """Read the ``model.json`` of a boosted model.

    Raises
    ------
    DataError : there is no such file, or it holds no such model.
    """
    return from_json(model_text(path))
