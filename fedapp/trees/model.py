"""A boosted model: its trees, and trees as compact arrays for messages.

``pack_trees`` concatenates trees::

    sizes      per tree   nodes of the tree
    lefts      per node   left child within the tree, 0 at a leaf; the right child is the next
    values     per node   threshold of a split (below goes left), value of a leaf
    columns    per split
    defaults   per split  1 if missing goes left
    sets       per split of a column of categories: one bit per category, 1 if it goes right, padded
               to whole bytes (see ``fedapp.trees.categories``); no bytes for other splits

and, if explanations will be made of them, ``gains`` per split, ``hessians`` and ``weights`` (before
the learning rate) per node.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Annotated, Any, ClassVar, NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt

from fedapp.arrays import Doubles, Floats, Ints
from fedapp.errors import DivergedError, as_plain
from fedapp.kernels import frozen, kernel
from fedapp.trees.calibration import Curve, calibrated
from fedapp.trees.categories import (
    NO_SET,
    NO_SETS,
    Categories,
    CategorySets,
    CodedSets,
    category_counts,
    chosen,
)
from fedapp.trees.limits import ONE_TREE, MultiStrategy
from fedapp.trees.losses import PLAIN, LossParameters, Objective
from fedapp.trees.objective import (
    base_margin,
    check_base_score,
    check_classes,
    exact_predictions,
    n_outputs,
)

Kinds = tuple[str, ...]
BOOSTED, BAGGED, STACKED = "boosted", "bagged", "trees under a head"
LINEAR, DIVIDED = "linear", "parts"  # a divided model's document: where its parts are
PASSIVE, IN_FOREST, ACTIVE = "passive part", "forest part", "active part"


def _without_numbers(kinds: Kinds) -> Kinds:
    return kinds if {*kinds} - {"number"} else ()


def _as_written(kinds: tuple[str, ...]) -> Kinds:
    return kinds


KindsOfColumns = Annotated[Kinds, _without_numbers, _as_written]  # none if all are numbers

LEAF = -1
# The sum of some hundred trees stays within float32.
LARGEST_LEAF = float(np.finfo(np.float32).max) / 256

# A tree is an array of nodes; node 0 is the root, a right child follows its left sibling.
NODE = np.dtype(
    [
        ("left", np.int32),  # LEAF for a leaf; the right child is left + 1
        ("parent", np.int32),  # -1 at the root
        ("column", np.int32),
        ("threshold", np.float32),  # x < threshold goes left
        ("default_left", np.bool_),  # where a missing value goes
        ("gain", np.float32),
        ("hessian", np.float32),  # sum over the rows of the node
        ("weight", np.float32),  # optimal weight before the learning rate
        ("value", np.float32),  # of a leaf: weight * eta; 0 elsewhere
        ("set", np.int32),  # of a column of categories: number of the set that goes right
    ]
)
Tree = npt.NDArray[Any]  # of ``NODE``, or of ``node_of`` several outputs
# In a document; the other fields follow from these.
WRITTEN = tuple(name for name in NODE.names or () if name not in ("parent", "set"))
VECTORS = ("weight", "value")  # with one tree for all outputs, a row of numbers a node
WrittenTree = Annotated[Tree, NODE, WRITTEN, VECTORS]
Margins = Floats


@dataclass(frozen=True, slots=True)
class Edit:
    """That a person has edited the curves of an additive model; see ``fedapp.trees.edited``."""

    by: str
    when: str  # ISO 8601, UTC
    model_id: str  # of the run that trained it

    def __str__(self) -> str:
        what = f"the curves of model {self.model_id} were edited by {self.by} on {self.when}"
        return as_plain(f"{what}; the run's scores and figures are of the model before")


class Model:
    """Base of all kinds of models; a kind is a dataclass, see ``records.document``."""

    __slots__ = ()
    KIND: ClassVar[str]

    @property
    def margin_column(self) -> str:
        """Column whose values the margins of rows start from; empty for none."""
        return ""

    @property
    def n_outputs(self) -> int:
        """Numbers per prediction of a whole model: the number of classes for softmax, else 1."""
        model: Any = self
        return n_outputs(model.objective, len(model.classes))

    def completed(self) -> Self:
        """The model with what follows from its fields; ValueError if they do not fit together."""
        model: Any = self
        if hasattr(model, "classes"):
            check_classes(model.objective, len(model.classes))
        n_columns = len(getattr(model, "columns", ()))
        for name in ("categories", "kinds", "quantiles"):
            if (n := len(getattr(model, name, ()))) not in (0, n_columns):
                raise ValueError(f"{name} must be {n_columns}, one a column, got {n}")
        for names in getattr(model, "categories", ()):
            if names is not None and len({*names}) < len(names):
                raise ValueError("categories must differ within a column")
        return self


def node_of(n_outputs: int) -> np.dtype[Any]:
    """``NODE`` with a vector, a number an output, as weight and as value."""
    shapes = dict.fromkeys(VECTORS, (n_outputs,))
    return np.dtype([(name, NODE[name], shapes.get(name, ())) for name in NODE.names or ()])


class Grown(NamedTuple):
    """Trees with the sets of their categorical splits.

    Sets are in the order of the categorical splits, tree by tree, nodes ascending. So a tree's
    ``set`` fields follow from which of its columns are categorical.
    """

    trees: tuple[Tree, ...]
    sets: CategorySets = NO_SETS


NO_TREES = Grown(())


@dataclass(frozen=True, slots=True, eq=False)
class Ensemble(Model):
    """Trees whose leaf values add up to margins."""

    KIND = BOOSTED
    objective: Objective  # the loss it was trained for
    base_score: Annotated[Margins, "n_outputs"]  # prediction without trees; for softmax margins
    columns: tuple[str, ...]  # names of the features, in order
    classes: tuple[str, ...]  # names of the classes in the order of their ids; empty for regression
    trees: tuple[WrittenTree, ...]  # with k outputs, tree i adds to output ``i % k``, or to all
    sets: CodedSets = NO_SETS  # of the categorical splits, in the order of ``Grown``
    categories: Categories = ()  # names by column; empty if all columns are numeric
    parameters: LossParameters = PLAIN  # of the objective
    margin_column: str = ""  # rows start from its values, not from ``base_score``; or empty
    kinds: KindsOfColumns = ()  # see ``fedapp.data.columns``; empty if all are numbers
    num_parallel_tree: int = 1  # trees a round of each output, which so come one after the other
    multi_strategy: MultiStrategy = "one_output_per_tree"
    curve: Curve | None = None  # by which predictions are calibrated; margins are not
    edits: tuple[Edit, ...] = ()  # of its curves, the last one last

    def completed(self) -> Ensemble:
        """The model as a document has it, with numbered sets; ValueError if it is none."""
        Model.completed(self)
        check_base_score(self.objective, self.base_score)
        if self.num_parallel_tree < 1 or len(self.trees) % self.width:
            raise ValueError("trees must be num_parallel_tree a round for every output")
        if self.multi_strategy == ONE_TREE and self.n_outputs < 2:
            raise ValueError("multi_strategy must be one_output_per_tree with one output")
        for field in VECTORS:
            if any(tree.dtype[field].shape != self.node[field].shape for tree in self.trees):
                rule = f"must have {self.n_outputs} numbers a node with {ONE_TREE}, else one"
                raise ValueError(f"{field} {rule}")
        if self.curve and self.objective != "binary:logistic":
            raise ValueError("curve must be of binary:logistic")
        widths = category_counts(self.categories, len(self.columns))
        return self.with_trees(trees_with_sets(self.trees, self.sets, widths))

    @property
    def width(self) -> int:
        """Trees of a round: one of each output, or of all, ``num_parallel_tree`` times."""
        has_one = self.multi_strategy == ONE_TREE
        return self.num_parallel_tree * (1 if has_one else self.n_outputs)

    @property
    def node(self) -> np.dtype[Any]:
        """Type of the trees' nodes."""
        return node_of(self.n_outputs) if self.multi_strategy == ONE_TREE else NODE

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

        ``base_margins``, shape (n_rows,), is required if and only if the model has a
        ``margin_column``; else ValueError.
        """
        if (base_margins is not None) != bool(self.margin_column):
            column = repr(self.margin_column) if self.margin_column else "none"
            raise ValueError(f"base_margins must be those of the model's column, which is {column}")
        if base_margins is None:
            return np.full((n_rows, self.n_outputs), self.base_margin, dtype=np.float32)
        return base_margins.astype(np.float32).reshape(n_rows, 1)

    def predictions(
        self, leaves: npt.NDArray[np.int32], base_margins: Margins | None = None
    ) -> Doubles:
        """Predictions of rows by their leaves: float64, shape (n_rows, n_outputs).

        ``leaves`` is int32, shape (n_trees, n_rows); for ``base_margins`` see ``starts``. Margins
        are summed in float64.
        """
        margins = self.starts(leaves.shape[1], base_margins).astype(np.float64)
        _add_leaves(*(*frozen(*_leaf_values(self), leaves), margins))
        return exact_predictions(self.objective, self.calibrated(margins))

    def calibrated(self, margins: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Margins by which to predict."""
        return calibrated(self.curve, margins)

    def leaf_terms(self, tree: int) -> Doubles:
        """What each node adds to a row's margins; float64, shape (n_nodes, n_outputs)."""
        values = self.trees[tree]["value"]
        terms = np.zeros((len(values), self.n_outputs))
        terms[:, self.outputs_of(tree)] = values
        return terms

    def outputs_of(self, tree: int) -> int | slice:
        """The outputs that a tree adds to."""
        return slice(None) if self.multi_strategy == ONE_TREE else tree % self.n_outputs

    def predictions_of(self, sums: Doubles, base_margins: Margins | None = None) -> Doubles:
        """Predictions from sums of ``leaf_terms``, shape (n_rows, n_outputs); see ``starts``."""
        margins = self.starts(len(sums), base_margins) + sums
        return exact_predictions(self.objective, self.calibrated(margins))

    def first_rounds(self, n_rounds: int) -> Ensemble:
        """The model as it was after ``n_rounds`` boosting rounds."""
        return self.with_trees(ordered_sets(self.trees[: n_rounds * self.width], self.sets))

    def in_order(self, columns: tuple[str, ...]) -> Ensemble:
        """The model of rows whose columns are in another order; of other columns, as it is."""
        if columns == self.columns or sorted(columns) != sorted(self.columns):
            return self
        places = np.array([columns.index(name) for name in self.columns], np.int32)
        trees = tuple(tree.copy() for tree in self.trees)
        for tree in trees:
            is_split = tree["left"] != LEAF
            tree["column"][is_split] = places[tree["column"][is_split]]
        order = [self.columns.index(name) for name in columns]
        return replace(
            self,
            columns=columns,
            trees=trees,
            categories=chosen(self.categories, order),
            kinds=tuple(self.kinds[column] for column in order if self.kinds),
        )

    def with_trees(self, grown: Grown) -> Ensemble:
        """The model with other trees; a curve is of all trees, so it is left out with fewer."""
        curve = self.curve if len(grown.trees) == len(self.trees) else None
        return replace(self, trees=grown.trees, sets=grown.sets, curve=curve)


@lru_cache(8)
def _leaf_values(model: Ensemble) -> tuple[Margins, Ints]:
    """Values of all nodes, (n_nodes, 1 or n_outputs), and each tree's start among them."""
    nodes, offsets = stack_trees(model.trees)
    return leaf_rows(nodes), offsets


def leaf_rows(nodes: Tree) -> Margins:
    """Values of nodes as rows of one number, or of one number an output."""
    return np.ascontiguousarray(nodes["value"]).reshape(len(nodes), nodes["value"][:1].size or 1)


@kernel
def _add_leaves(values: Any, offsets: Any, leaves: Any, margins: Any) -> None:
    n_outputs = margins.shape[1]
    for tree in range(len(leaves)):
        first = tree % n_outputs if values.shape[1] == 1 else 0
        for row in range(leaves.shape[1]):
            for output in range(values.shape[1]):
                margins[row, first + output] += values[offsets[tree] + leaves[tree, row], output]


class Described(Protocol):
    """A whole model of any kind."""

    @property
    def objective(self) -> Objective: ...
    @property
    def columns(self) -> tuple[str, ...]: ...
    @property
    def classes(self) -> tuple[str, ...]: ...
    @property
    def kinds(self) -> Kinds: ...


def check_range(trees: Iterable[Tree]) -> None:
    """Raise DivergedError if gains, or sums of leaf weights, may exceed float32."""
    for tree in trees:
        is_small = np.abs(tree["value"]) <= LARGEST_LEAF
        if not (is_small.all() and np.isfinite(tree["gain"]).all()):
            raise DivergedError("gains and leaf weights must stay within float32, got larger ones")


def importance(model: Ensemble) -> dict[str, dict[str, float]]:
    """By column, descending: ``gain`` per split, ``total_gain``, ``count`` (XGBoost's weight)."""
    nodes, _ = stack_trees(model.trees)
    splits = nodes[nodes["left"] != LEAF]
    n_columns = len(model.columns)
    weights = splits["gain"].astype(np.float64)
    gains = np.bincount(splits["column"], weights=weights, minlength=n_columns).astype(np.float64)
    counts = np.bincount(splits["column"], minlength=n_columns)
    return importance_of(model.columns, gains, counts)


def importance_of(
    columns: Sequence[str], gains: Doubles, counts: Ints
) -> dict[str, dict[str, float]]:
    """``importance`` from each column's total gain and number of splits."""
    order = [c for c in np.argsort(-gains, kind="stable") if counts[c]]
    return {
        "gain": {columns[c]: float(gains[c] / counts[c]) for c in order},
        "total_gain": {columns[c]: float(gains[c]) for c in order},
        "count": {columns[c]: int(counts[c]) for c in order},
    }


def stack_trees(trees: Sequence[Tree], nodes: np.dtype[Any] = NODE) -> tuple[Tree, Ints]:
    """Concatenate trees of one type; returns the start of each too, and the end.

    ``nodes`` is the type if there are no trees.
    """
    offsets = np.zeros(len(trees) + 1, dtype=np.int64)
    np.cumsum([len(tree) for tree in trees], out=offsets[1:])
    return np.concatenate(trees) if len(trees) else np.empty(0, dtype=nodes), offsets


def split_trees(nodes: Tree, offsets: Ints) -> tuple[Tree, ...]:
    """Undo ``stack_trees``."""
    return tuple(nodes[a:b] for a, b in pairwise(offsets))


def ordered_sets(trees: Sequence[Tree], sets: CategorySets) -> Grown:
    """The trees with only the sets that they use, in the order of their splits."""
    if not len(sets):
        return Grown(tuple(trees))
    nodes, offsets = stack_trees(trees)
    has_set = nodes["set"] != NO_SET
    used_sets = sets.take(nodes["set"][has_set])
    nodes["set"][has_set] = np.arange(len(used_sets))
    return Grown(split_trees(nodes, offsets), used_sets)


def concatenated(parts: Iterable[Grown]) -> Grown:
    """Trees of several parts, one part after the other."""
    trees: list[Tree] = []
    sets = NO_SETS
    for part in parts:
        for tree in part.trees:
            if len(sets) and (tree["set"] != NO_SET).any():
                tree = tree.copy()
                tree["set"][tree["set"] != NO_SET] += len(sets)
            trees.append(tree)
        sets = sets.plus(part.sets)
    return Grown(tuple(trees), sets)


def number_sets(nodes: Tree, widths: Ints) -> Ints:
    """Number the sets of the splits in ``nodes``, in place; returns each set's categories."""
    splits = np.flatnonzero(nodes["left"] != LEAF)
    split_widths: Ints = widths[nodes["column"][splits]]
    nodes["set"] = NO_SET
    nodes["set"][splits[split_widths > 0]] = np.arange(np.count_nonzero(split_widths))
    set_widths: Ints = split_widths[split_widths > 0]
    return set_widths


def check_trees(
    lefts: npt.NDArray[Any],
    offsets: Ints,
    columns: npt.NDArray[Any] | None = None,
    n_columns: int = 0,
) -> None:
    """Check that nodes form whole trees: a walk ends at a leaf, and every node can be reached.

    Parameters
    ----------
    lefts : shape (n_nodes,): left child within the tree, -1 at a leaf; the right child is the next.
        Children come after their parents.
    offsets : shape (n_trees + 1,): start of each tree, and the end of the last.
    columns : of the splits, checked against ``n_columns``.

    Raises
    ------
    ValueError : names the broken rule.
    """
    lefts, n_nodes, sizes = lefts.astype(np.int64), len(lefts), np.diff(offsets)
    is_divided = len(offsets) > 0 and offsets[0] == 0 and offsets[-1] == n_nodes
    if not is_divided or (sizes < 1).any():
        raise ValueError(f"trees must divide {n_nodes} nodes, one each at least")
    if columns is not None and ((columns < 0) | (columns >= n_columns)).any():
        raise ValueError(f"columns must be 0 to {n_columns - 1}")
    starts = np.repeat(offsets[:-1], sizes)
    nodes = np.arange(n_nodes)
    inner = lefts != LEAF
    children = starts + lefts
    has_children = (children > nodes) & (children + 1 < np.repeat(offsets[1:], sizes))
    if not has_children[inner].all():
        raise ValueError("lefts must lead to two later nodes of the same tree")
    n_parents = np.bincount(np.ravel([children[inner], children[inner] + 1]), minlength=n_nodes)
    if not np.array_equal(n_parents, nodes > starts):
        raise ValueError("lefts must reach every node once")


def parents_of(lefts: npt.NDArray[np.int32], offsets: Ints) -> npt.NDArray[np.int32]:
    """Parent of each node within its tree, -1 at the roots; arguments as in ``check_trees``."""
    starts = np.repeat(offsets[:-1], np.diff(offsets))
    inner = np.flatnonzero(lefts != LEAF)
    parents = np.full(len(lefts), -1, dtype=np.int32)
    for side in (0, 1):
        parents[starts[inner] + lefts[inner] + side] = inner - starts[inner]
    return parents


def scaled(tree: Tree, factor: float) -> Tree:
    """The tree with values and weights times a factor; gains and hessians stay."""
    copy = tree.copy()
    for field in ("value", "weight"):
        copy[field] *= np.float32(factor)
    return copy


def trees_with_sets(trees: Sequence[Tree], sets: CategorySets, widths: Ints) -> Grown:
    """Checked trees with the sets of their categorical splits, as a document has them.

    ``widths`` is the number of categories of each column. Raises ValueError if trees are not whole,
    or if the sets do not match the splits.
    """
    nodes, offsets = stack_trees(trees)
    check_trees(nodes["left"], offsets, nodes["column"][nodes["left"] != LEAF], len(widths))
    nodes["parent"] = parents_of(nodes["left"], offsets)
    return Grown(split_trees(nodes, offsets), sets.widened(number_sets(nodes, widths)))


# Compact arrays

Array = npt.NDArray[Any]
TREES: Mapping[str, type[np.generic]] = {
    "sizes": np.int32,
    "lefts": np.uint16,
    "values": np.float32,
    "columns": np.int32,
    "defaults": np.uint8,
    "sets": np.uint8,
}
EXPLAINED = ("gains", "hessians", "weights")
SPLIT_ARRAYS = ("columns", "defaults", "gains")  # one value per split; all others per node
MOST_NODES = 2**16  # per tree: a left child fits in 16 bits
NO_CHILD = 0  # node 0 is the root and nobody's child


def pack_trees(
    trees: Sequence[Tree], explained: Sequence[str] = (), sets: CategorySets = NO_SETS
) -> dict[str, Array]:
    """Pack trees of at most 2^16 nodes each; ``explained`` selects arrays of ``EXPLAINED``."""
    trees, sets = ordered_sets(trees, sets)
    nodes, offsets = stack_trees(trees)
    sizes = np.diff(offsets)
    assert (sizes <= MOST_NODES).all()
    inner = nodes["left"] != LEAF
    arrays = {
        "sizes": sizes,
        "lefts": np.where(inner, nodes["left"], NO_CHILD),
        "values": np.where(inner, nodes["threshold"], nodes["value"]),
        "columns": nodes["column"][inner],
        "defaults": nodes["default_left"][inner],
        "sets": sets.bits,
    }
    packed = {name: array.astype(TREES[name]) for name, array in arrays.items()}
    for name in explained:
        node_values = nodes[name.removesuffix("s")]
        packed[name] = node_values[inner] if name in SPLIT_ARRAYS else node_values.copy()
    return packed


def unpack_trees(arrays: Mapping[str, Array], widths: Ints) -> Grown:
    """Unpack trees of a table's columns; they are checked as by ``check_trees``.

    Missing arrays of ``EXPLAINED`` are read as 0. ``widths`` is the number of categories of each
    column, 0 for a numeric one. Raises ValueError naming the array and the broken rule.
    """
    inner = arrays["lefts"] != NO_CHILD
    nodes = np.zeros(len(inner), dtype=NODE)
    present = {name: arrays[name] for name in (*TREES, *EXPLAINED) if name in arrays}
    for name, array in present.items():
        wanted = np.count_nonzero(inner) if name in SPLIT_ARRAYS else len(inner)
        if name not in {"sizes", "sets"} and len(array) != wanted:
            raise ValueError(f"{name} must be {wanted}, got {len(array)}")
    offsets = np.concatenate(([0], np.cumsum(arrays["sizes"], dtype=np.int64)))
    nodes["left"] = np.where(inner, arrays["lefts"].astype(np.int32), LEAF)
    check_trees(nodes["left"], offsets, arrays["columns"], len(widths))
    nodes["parent"] = parents_of(nodes["left"], offsets)
    nodes["column"][inner], nodes["default_left"][inner] = arrays["columns"], arrays["defaults"]
    nodes["threshold"][inner] = arrays["values"][inner]
    nodes["value"][~inner] = arrays["values"][~inner]
    for name in present.keys() & set(EXPLAINED):
        nodes[name.removesuffix("s")][inner if name in SPLIT_ARRAYS else slice(None)] = present[
            name
        ]
    sets = CategorySets(arrays["sets"], number_sets(nodes, widths))
    return Grown(split_trees(nodes, offsets), sets)


def class_values(classes: Sequence[str]) -> npt.NDArray[Any]:
    """Class names as numbers if all are numbers, otherwise unchanged."""
    for kind in (np.int64, np.float64):
        try:
            return np.array([kind(name) for name in classes])
        except ValueError:
            continue
    return np.array(classes)
