"""A boosted model: its trees, its form on disk, and trees as compact arrays for messages.

Every ``model.json`` of any kind (``write_model``, ``read_model``) is one line of JSON: format, kind
(not for a boosted model), objective, base score (if the kind has one), names of columns and
classes, and the content of the kind. ``pack_trees`` concatenates trees::

    sizes      per tree   nodes of the tree
    lefts      per node   left child within the tree, 0 at a leaf; the right child is the next
    values     per node   threshold of a split (below goes left), value of a leaf
    columns    per split
    defaults   per split  1 if missing goes left
    sets       per split of a column of categories: one bit per category, 1 if it goes right, padded
               to whole bytes (see ``fedapp.trees.sets``); no bytes for other splits

and, if explanations will be made of them, ``gains`` per split, ``hessians`` and ``weights`` (before
the learning rate) per node.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, cast, get_args

import numpy as np
import numpy.typing as npt

from fedapp.errors import DataError, DivergedError, as_plain
from fedapp.trees.categories import Categories
from fedapp.trees.objective import (
    PLAIN,
    LossParameters,
    Objective,
    base_margin,
    check_base_score,
    check_classes,
    exact_predictions,
    n_outputs,
    read_base_score,
)
from fedapp.trees.sets import NO_SET, NO_SETS, CategorySets, Ints, category_counts, sets_of_codes

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Kinds = tuple[str, ...]
KIND = ""  # the text of a boosted model has no kind
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
TEXT_FIELDS = tuple(name for name in NODE.names or () if name != "set")  # of a tree in JSON
Tree = npt.NDArray[Any]
Margins = npt.NDArray[np.float32]


class Grown(NamedTuple):
    """Trees with the sets of their categorical splits.

    Sets are in the order of the categorical splits, tree by tree, nodes ascending. So a tree's
    ``set`` fields follow from which of its columns are categorical.
    """

    trees: tuple[Tree, ...]
    sets: CategorySets = NO_SETS


NO_TREES = Grown(())


@dataclass(frozen=True, slots=True, eq=False)
class Ensemble:
    """Trees whose leaf values add up to margins."""

    objective: Objective  # the loss it was trained for
    base_score: Margins  # (n_outputs,): prediction without trees; for softmax margins
    columns: tuple[str, ...]  # names of the features, in order
    classes: tuple[str, ...]  # names of the classes in the order of their ids; empty for regression
    trees: tuple[Tree, ...]  # arrays of ``NODE``; with k outputs, tree i adds to output ``i % k``
    sets: CategorySets = NO_SETS  # of the categorical splits, in the order of ``Grown``
    categories: Categories = ()  # names by column; empty if all columns are numeric
    parameters: LossParameters = PLAIN  # of the objective
    margin_column: str = ""  # rows start from its values, not from ``base_score``; or empty
    kinds: Kinds = ()  # of the columns, see ``fedapp.data.columns``; empty if all are numbers

    @property
    def n_outputs(self) -> int:
        """Margins per row: the number of classes for softmax, else 1."""
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
    ) -> npt.NDArray[np.float64]:
        """Predictions of rows by their leaves: float64, shape (n_rows, n_outputs).

        ``leaves`` is int32, shape (n_trees, n_rows); for ``base_margins`` see ``starts``. Margins
        are summed in float64.
        """
        margins = self.starts(leaves.shape[1], base_margins).astype(np.float64)
        for number, (tree, leaf_ids) in enumerate(zip(self.trees, leaves, strict=True)):
            margins[:, number % self.n_outputs] += tree["value"][leaf_ids]
        return exact_predictions(self.objective, margins)

    def leaf_terms(self, tree: int) -> npt.NDArray[np.float64]:
        """What each node adds to a row's margins; float64, shape (n_nodes, n_outputs)."""
        values = self.trees[tree]["value"]
        terms = np.zeros((len(values), self.n_outputs))
        terms[:, tree % self.n_outputs] = values
        return terms

    def predictions_of(
        self, sums: npt.NDArray[np.float64], base_margins: Margins | None = None
    ) -> npt.NDArray[np.float64]:
        """Predictions from sums of ``leaf_terms``, shape (n_rows, n_outputs); see ``starts``."""
        return exact_predictions(self.objective, self.starts(len(sums), base_margins) + sums)

    def first_rounds(self, n_rounds: int) -> Ensemble:
        """The model as it was after ``n_rounds`` boosting rounds."""
        return self.with_trees(ordered_sets(self.trees[: n_rounds * self.n_outputs], self.sets))

    def with_trees(self, grown: Grown) -> Ensemble:
        """The model with other trees."""
        return replace(self, trees=grown.trees, sets=grown.sets)


def check_range(trees: Iterable[Tree]) -> None:
    """Raise DivergedError if gains, or sums of leaf weights, may exceed float32."""
    for tree in trees:
        if not ((np.abs(tree["value"]) <= LARGEST_LEAF) & np.isfinite(tree["gain"])).all():
            raise DivergedError("gains and leaf weights must stay within float32, got larger ones")


def importance(model: Ensemble) -> dict[str, dict[str, float]]:
    """By column, descending: ``gain`` per split, ``total_gain``, ``count`` (XGBoost's weight)."""
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
    """``importance`` from each column's total gain and number of splits."""
    order = [c for c in np.argsort(-gains, kind="stable") if counts[c]]
    return {
        "gain": {columns[c]: float(gains[c] / counts[c]) for c in order},
        "total_gain": {columns[c]: float(gains[c]) for c in order},
        "count": {columns[c]: int(counts[c]) for c in order},
    }


def stack_trees(
    trees: Sequence[Tree], nodes: np.dtype[Any] = NODE
) -> tuple[Tree, npt.NDArray[np.int64]]:
    """Concatenate trees (arrays of ``nodes``); returns the start of each too, and the end."""
    offsets = np.zeros(len(trees) + 1, dtype=np.int64)
    np.cumsum([len(tree) for tree in trees], out=offsets[1:])
    return np.concatenate([*trees, np.empty(0, dtype=nodes)]), offsets


def split_trees(nodes: Tree, offsets: npt.NDArray[np.int64]) -> tuple[Tree, ...]:
    """Undo ``stack_trees``."""
    return tuple(nodes[a:b] for a, b in pairwise(offsets))


def ordered_sets(trees: Sequence[Tree], sets: CategorySets, kind: np.dtype[Any] = NODE) -> Grown:
    """The trees with only the sets that they use, in the order of their splits."""
    if not len(sets):
        return Grown(tuple(trees))
    nodes, offsets = stack_trees(trees, kind)
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
    offsets: npt.NDArray[np.int64],
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
    starts, nodes, inner = np.repeat(offsets[:-1], sizes), np.arange(n_nodes), lefts != LEAF
    children = starts + lefts
    has_children = (children > nodes) & (children + 1 < np.repeat(offsets[1:], sizes))
    if not has_children[inner].all():
        raise ValueError("lefts must lead to two later nodes of the same tree")
    n_parents = np.bincount(np.ravel([children[inner], children[inner] + 1]), minlength=n_nodes)
    if not np.array_equal(n_parents, nodes > starts):
        raise ValueError("lefts must reach every node once")


def parents_of(
    lefts: npt.NDArray[np.int32], offsets: npt.NDArray[np.int64]
) -> npt.NDArray[np.int32]:
    """Parent of each node within its tree, -1 at the roots; arguments as in ``check_trees``."""
    starts, inner = np.repeat(offsets[:-1], np.diff(offsets)), np.flatnonzero(lefts != LEAF)
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


def to_json(model: Ensemble) -> str:
    """The model as text; deterministic."""
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
    """Read a model that ``to_json`` wrote; raises DataError for any other text."""

    def build(header: ModelHeader, document: dict[str, Any]) -> Ensemble:
        categories = read_categories(document, len(header.columns))
        raw_trees = [read_tree(tree, len(header.columns), NODE) for tree in document["trees"]]
        widths = category_counts(categories, len(header.columns))
        trees, sets = trees_with_sets(raw_trees, document.get("sets", []), widths)
        width = n_outputs(header.objective, len(header.classes))
        if len(trees) % width:
            raise ValueError("trees must be one for every output")
        mean = read_base_score(document["base_score"], width)
        check_base_score(header.objective, mean)
        settings = {name: float(value) for name, value in document.get("parameters", {}).items()}
        names = header.columns, header.classes
        parameters = replace(PLAIN, **settings)
        column = str(document.get("base_margin", ""))
        model = Ensemble(header.objective, mean, *names, trees, sets, categories, parameters)
        return replace(model, margin_column=column)

    return read_model(text, KIND, build)


def trees_with_sets(
    trees: Sequence[Tree],
    codes: Sequence[Sequence[int]],
    widths: Ints,
    kind: np.dtype[Any] = NODE,
) -> Grown:
    """Trees with sets, from ``CategorySets.codes``; ValueError if they do not match the splits."""
    nodes, offsets = stack_trees(trees, kind)
    sets = sets_of_codes(codes, number_sets(nodes, widths))
    return Grown(split_trees(nodes, offsets), sets)


def read_tree(
    fields: Mapping[str, Sequence[float]], n_columns: int, nodes: np.dtype[Any]
) -> npt.NDArray[Any]:
    """One checked tree from the lists of its fields, all of ``nodes`` but ``set``."""
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
    """Read a boosted model's ``model.json``; raises DataError for a missing or other file."""
    return from_json(model_text(path))


# The text of models of any kind

FORMAT = 1
# Half the size of the largest message. Parsed, the file takes about ten times the memory.
MOST_BYTES = 2**30
_BEGINS = re.compile(r'\{"format":\d+,"kind":"([^"]*)"')
# Raised for JSON of an unexpected form, or nested too deeply.
UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)


class Described(Protocol):
    """A model of any kind."""

    @property
    def objective(self) -> Objective: ...
    @property
    def columns(self) -> tuple[str, ...]: ...
    @property
    def classes(self) -> tuple[str, ...]: ...
    @property
    def kinds(self) -> Kinds: ...


D = TypeVar("D", bound="DataclassInstance")


class ModelHeader(NamedTuple):
    """The fields that every kind of model begins with."""

    objective: Objective
    columns: tuple[str, ...]
    classes: tuple[str, ...]


def write_model(
    kind: str,
    model: Described,
    content: Mapping[str, Any],
    base_score: npt.NDArray[np.float32] | None = None,
    ensure_ascii: bool = True,
) -> str:
    """The model as text; deterministic.

    ``kind`` is empty for a boosted model; floats in ``content`` come from ``exact``. A base score
    of one output is written as a number, else as a list.
    """
    scores = [] if base_score is None else [exact(score) for score in base_score]
    document = {
        "format": FORMAT,
        **({"kind": kind} if kind else {}),
        "objective": model.objective,
        **({"base_score": scores[0] if len(scores) == 1 else scores} if scores else {}),
        "columns": list(model.columns),
        **({"kinds": list(model.kinds)} if {*model.kinds} - {"number"} else {}),
        "classes": list(model.classes),
        **content,
    }
    return json.dumps(document, separators=(",", ":"), ensure_ascii=ensure_ascii) + "\n"


def read_model(text: str, kind: str, build: Callable[[ModelHeader, dict[str, Any]], D]) -> D:
    """Undo ``write_model`` by ``build(header, document)``; DataError for any other text."""
    try:
        document = json.loads(text)
        identity = document["format"], document.get("kind", ""), document["objective"]
        if identity[:2] != (FORMAT, kind) or identity[2] not in get_args(Objective):
            raise ValueError("format {}, kind {!r}, objective {}".format(*identity))
        names = (_names(document, key) for key in ("columns", "classes"))
        header = ModelHeader(cast(Objective, identity[2]), *names)
        check_classes(header.objective, len(header.classes))
        kinds = _names(document, "kinds") if "kinds" in document else ()
        if len(kinds) not in (0, len(header.columns)):
            raise ValueError("kinds must be one a column")
        return replace(build(header, document), kinds=kinds)
    except UNREADABLE as error:
        got = as_plain(repr(error))
        raise DataError(f"model must be JSON of fedapp's format {FORMAT}, got {got}") from error


def _names(document: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """A list of texts."""
    names = document[key]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{key} must be a list of texts")
    return tuple(names)


def written_categories(categories: Categories, sets: CategorySets) -> dict[str, Any]:
    """JSON fields for categories: names by column, and the codes each split sends right."""
    if not categories:
        return {}
    names = [None if column_names is None else list(column_names) for column_names in categories]
    return {"categories": names, "sets": sets.codes()}


def read_categories(document: Mapping[str, Any], n_columns: int) -> Categories:
    """Undo ``written_categories``: names by column. Raises ValueError for any other form."""
    categories = document.get("categories", [])
    if not isinstance(categories, list) or len(categories) not in {0, n_columns}:
        raise ValueError(f"categories must be {n_columns}, one a column")
    for names in (names for names in categories if names is not None):
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError("categories must be lists of texts")
        if len(set(names)) < len(names):
            raise ValueError("categories must differ within a column")
    return tuple(None if names is None else tuple(names) for names in categories)


def exact(value: Any) -> Any:
    """A JSON number that reads back to the same bits."""
    return float(str(value)) if isinstance(value, np.floating) else value.item()


def kind_of(text: str) -> str:
    """Kind of a model's text, by its beginning."""
    begins = _BEGINS.match(text)
    return begins[1] if begins else ""


def json_of(text: str) -> dict[str, Any]:
    """A model's text, parsed; DataError if it is not JSON, or nested too deeply."""
    try:
        document: dict[str, Any] = json.loads(text)
    except UNREADABLE as error:
        raise DataError(f"model must be JSON, got {as_plain(repr(error))}") from None
    return document


def model_text(path: Path) -> str:
    """Text of a ``model.json`` of any kind; DataError if it is missing or too large."""
    if not path.is_file():
        raise DataError(f"model must be a file, got {path}")
    if (n_bytes := path.stat().st_size) > MOST_BYTES:
        raise DataError(f"model must be a file of <= {MOST_BYTES:,} bytes, got {n_bytes:,}: {path}")
    return path.read_text()


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
