"""Divided models: parts of parties, the whole model, and what splits of one party show of a row.

A party has the splits on its columns (``Lookup``); the active party has the trees. With some splits
only, rows can be narrowed to leaves in three ways: as bits by cell (``fedapp.trees.cells``);
``candidates`` as flags by row over a ``skeleton``; ``open_splits`` and ``path_to`` as what an
observer of single splits, or of the leaf, knows of a row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Self, TypeVar

import numpy as np
import numpy.typing as npt

from fedapp.arrays import Flags, Floats, Ints
from fedapp.errors import DataError
from fedapp.trees.categories import (
    NO_SET,
    NO_SETS,
    Categories,
    CategorySets,
    category_counts,
    set_numbers,
    side_by_side,
)
from fedapp.trees.forest.bagged import BaggedForest
from fedapp.trees.model import (
    ACTIVE,
    DIVIDED,
    IN_FOREST,
    LEAF,
    PASSIVE,
    Ensemble,
    Kinds,
    Model,
    Tree,
    check_trees,
    ordered_sets,
)
from fedapp.trees.predict import Bits, sides_of
from fedapp.trees.structure import joined

NONE = -1  # no local split above
Lefts = npt.NDArray[Any]  # left child of each node, LEAF at a leaf; the right child is the next


@dataclass(frozen=True, slots=True, eq=False)
class Lookup:
    """A party's splits; a record id is an index into the table."""

    columns: Annotated[Ints, "n_records", ">= 0"]  # column numbers at the party
    thresholds: Annotated[Floats, "n_records"]  # below goes left
    defaults: Annotated[npt.NDArray[np.uint8], "n_records", "<= 1"]  # 1 if missing goes left
    # widths: number of categories of the column, 0 for a threshold
    widths: Annotated[Ints, "n_records", ">= 0"]
    set_bits: npt.NDArray[np.uint8]  # the categories that go right, see ``CategorySets``

    @classmethod
    def empty(cls) -> Lookup:
        """Without splits."""
        ids, flags = np.empty(0, np.int64), np.empty(0, np.uint8)
        return cls(ids, np.empty(0, np.float32), flags, ids, flags)

    def completed(self) -> Lookup:
        """The table; ValueError if its sets do not match its splits."""
        CategorySets(self.set_bits, self.widths[self.widths > 0])  # checks both
        return self

    def plus(self, other: Lookup) -> Lookup:
        """With further splits appended."""
        return joined((self, other))

    @property
    def n_records(self) -> int:
        """Number of splits."""
        return len(self.columns)

    @property
    def sets(self) -> CategorySets:
        """Sets of the categorical splits, in order."""
        return CategorySets(self.set_bits, self.widths[self.widths > 0])

    @property
    def numbers(self) -> Ints:
        """Set number of each split, ``NO_SET`` for a threshold."""
        return set_numbers(self.widths)

    def sides(
        self,
        record: int | Ints,
        values: Floats,
        rows: npt.NDArray[Any] | slice | int = slice(None),
    ) -> Bits:
        """Which of some rows one split sends left, or which of several splits send one row left."""
        records = np.atleast_1d(record)
        if isinstance(rows, slice):
            rows = np.arange(len(values), dtype=np.int32)[rows]
        row_ids = np.atleast_1d(rows).astype(np.int32)
        return sides_of(
            values,
            self.columns[records],
            self.thresholds[records],
            self.defaults[records],
            np.tile(row_ids, len(records)),
            np.full(len(records), len(row_ids)),
            self.numbers[records],
            self.sets,
        )

    def n_ways(self, records: Ints, values: Floats) -> int:
        """Number of joint outcomes of some splits, with missing values if the columns have any."""
        ways = 1
        for column in np.unique(self.columns[records]):
            column_records = records[self.columns[records] == column]
            missing = [np.nan] if np.isnan(values[:, column]).any() else []
            width = int(self.widths[column_records[0]])
            regions = range(width) if width else [-np.inf, *self.thresholds[column_records]]
            # One point of each interval between thresholds, or each category.
            points = np.zeros((len(regions) + len(missing), column + 1), dtype=np.float32)
            points[:, column] = [*regions, *missing]
            sides = [self.sides(record, points) for record in column_records.tolist()]
            ways *= len(np.unique(sides, axis=1).T)
        return ways


# A party that knows where its splits are can recognise which questions about a row, and which
# structure, belong to the trained model. Of a place in a tree it needs only the nearest of its own
# splits above, and the side: one number, NONE or 2 * record + (1 if left). An example::
#
#              0: another party's split           node  0     1     2     3  4  5     6
#             /                        \          under NONE  NONE  NONE  1  0  NONE  NONE
#     1: local record 0        2: another's
#      /            \           /       \
#    3: record 1    4: leaf   5: leaf  6: record 2
@dataclass(frozen=True, slots=True, eq=False)
class Nesting:
    """Where one party's splits are in the trees, relative to each other."""

    trees: Ints  # (n_records,): number of the tree, in any numbering
    # (n_records,): the nearest local split above and the side, as one number
    under: Annotated[Ints, f">= {NONE}"]

    @classmethod
    def of(cls, trees: Iterable[tuple[Lefts, Ints]], n_records: int) -> Nesting:
        """From left children and record ids of all nodes, tree by tree; -1: no local split."""
        nesting = cls(np.zeros(n_records, np.int64), np.full(n_records, NONE, np.int64))
        for number, (lefts, records) in enumerate(trees):
            local = np.flatnonzero((lefts != LEAF) & (records >= 0))
            nesting.trees[records[local]] = number
            nesting.under[records[local]] = cells_of(lefts, records)[local]
        return nesting

    def plus(self, trees: Ints, under: Ints) -> Nesting:
        """With further splits appended."""
        return Nesting(np.concatenate((self.trees, trees)), np.concatenate((self.under, under)))

    def is_of_whole_trees(self, sent: Nesting, records: Ints) -> bool:
        """Whether another nesting of some splits is this one, tree by tree, with no split left out.

        ``sent`` may number the trees otherwise.
        """
        trees = self.trees[records]
        pairs = {*zip(trees.tolist(), sent.trees[records].tolist(), strict=True)}
        n_trees = len({here for here, _ in pairs}), len({there for _, there in pairs})
        return (
            np.array_equal(self.under[records], sent.under[records])
            and n_trees == (len(pairs), len(pairs))
            and int(np.isin(self.trees, trees).sum()) == len(records)
        )


def cells_of(lefts: Lefts, records: Ints) -> Ints:
    """The nearest local split above each node of a tree and the side; ``records`` as above."""
    cells = np.full(len(lefts), NONE, np.int64)
    # Children come after their parents.
    for node in np.flatnonzero(lefts != LEAF).tolist():
        left, record = int(lefts[node]), int(records[node])
        cells[left : left + 2] = cells[node] if record < 0 else [2 * record + 1, 2 * record]
    return cells


NO_NESTING = Nesting.of((), 0)


def way_down(
    nesting: Nesting, last: npt.NDArray[np.int32] | None, n_rows: int, records: Ints, rows: Ints
) -> tuple[Ints, npt.NDArray[np.int32]]:
    """Check that questions follow the answers to earlier ones; returns where answers are noted.

    Parameters
    ----------
    last : int32, shape (n_trees with local splits, n_rows), or None at the start: the last split at
        which a row was asked about in a tree and its side, as in ``Nesting``.
    records, rows : shape (n_asked,): splits and rows of the questions, of one letter.

    Returns
    -------
    slots : int64, shape (n_asked,): place of each question in ``last``, flattened.
    last : a copy, to be changed there to ``2 * records + sides``.

    Raises
    ------
    ValueError : a row is not where the answers have led it, or is asked about twice in a tree.
    """
    trees, numbers = np.unique(nesting.trees, return_inverse=True)
    if last is None:
        last = np.full((len(trees), n_rows), NONE, dtype=np.int32)
    slots = numbers[records] * n_rows + rows
    is_asked = np.zeros(last.size, dtype=bool)
    is_asked[slots] = True
    follows = (last.ravel()[slots] == nesting.under[records]).all()
    if not follows or np.count_nonzero(is_asked) < len(slots):
        raise ValueError("rows must be where the answers led them, each once a letter and tree")
    return slots, last.copy()


@dataclass(frozen=True, slots=True)
class DividedModel(Model):
    """Where the parts of a divided model are."""

    KIND = DIVIDED
    method: str
    model_id: str
    objective: str
    active: str  # names of parties
    passive: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Part(Model):
    """A party's part of a divided model."""

    columns: tuple[str, ...]
    kinds: Kinds = ()
    categories: Categories = ()  # names in the order of their codes
    # Of the columns, from ``fedapp.site.table``; or none.
    quantiles: Annotated[Floats, "", "", None]
    lookup: Lookup  # the party's splits
    active: str  # name of the party with the labels

    def check_active(self, party: str) -> None:
        """Raise a ValueError if another party had the labels when the model was trained."""
        if party != self.active:
            raise ValueError(f"active must be {self.active}, as in training, got {party}")

    @property
    def nesting(self) -> Nesting:
        """Where the splits are in the trees, at a passive party; else empty."""
        return NO_NESTING

    def completed(self) -> Self:
        """The part; ValueError if its fields do not fit together."""
        Model.completed(self)
        n_columns = len(self.columns)
        if (self.lookup.columns >= n_columns).any():
            raise ValueError(f"columns of lookup must be 0 to {n_columns - 1}")
        widths = category_counts(self.categories, n_columns)[self.lookup.columns]
        if not np.array_equal(self.lookup.widths, widths):
            raise ValueError("widths of lookup must be the columns' numbers of categories")
        return self


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PassivePart(Part):
    """A passive party's part of a boosted model."""

    KIND = PASSIVE
    nesting: Nesting = NO_NESTING  # where the splits are in the trees

    def completed(self) -> Self:
        """As of any part."""
        under, n_records = self.nesting.under, self.lookup.n_records
        if {len(under), len(self.nesting.trees)} != {n_records} or (under >= 2 * n_records).any():
            raise ValueError(f"nesting must be of {n_records} splits, those of lookup")
        return Part.completed(self)


@dataclass(frozen=True, slots=True, eq=False)
class PartTree:
    """What a passive party has of a tree of a forest."""

    lefts: Ints  # (n_nodes,): left child, LEAF at a leaf; the right child is the next
    records: Ints  # (n_nodes,): record id of a local split, -1 elsewhere


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ForestPart(Part):
    """A passive party's part of a forest."""

    KIND = IN_FOREST
    trees: tuple[PartTree, ...]

    def completed(self) -> Self:
        """As of any part."""
        for tree in self.trees:
            check_trees(tree.lefts, np.array([0, len(tree.lefts)]))
            _check_records(tree.lefts, tree.records, tree.records >= 0, self.lookup.n_records)
        return Part.completed(self)

    @property
    def nesting(self) -> Nesting:
        """Where the splits are in the trees."""
        trees = ((tree.lefts, tree.records) for tree in self.trees)
        return Nesting.of(trees, self.lookup.n_records)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ActivePart(Part):
    """The active party's part: also structure, leaves, and the owner of each split."""

    KIND = ACTIVE
    name: str  # of the party
    digests: Mapping[str, bytes]  # of the other parties' parts
    # Without thresholds. Of a forest only the owner of a split is known: it is the column.
    model: Ensemble | BaggedForest
    records: tuple[Ints, ...]  # by tree and node: number of a split in its owner's lookup
    n_columns: Mapping[str, Annotated[int, ">= 0"]]  # of the model, by party
    threshold: float | None = None  # for predictions of the second class

    def completed(self) -> Self:
        """As of any part."""
        if not self.n_columns or sum(self.n_columns.values()) != len(self.model.columns):
            raise ValueError(f"n_columns must add up to {len(self.model.columns)}")
        if len(self.records) != len(self.model.trees):
            raise ValueError(f"records must be {len(self.model.trees)}, one a tree")
        for number, (tree, records) in enumerate(zip(self.model.trees, self.records, strict=True)):
            is_local = np.array(self.owners(number)) == self.name
            _check_records(tree["left"], records, is_local, self.lookup.n_records)
        return Part.completed(self)

    @property
    def margin_column(self) -> str:
        """Of the whole model."""
        return self.model.margin_column

    def owners(self, tree: int) -> list[str]:
        """Party of each node's split; the entry of a leaf is meaningless."""
        names, ends = list(self.n_columns), np.cumsum(list(self.n_columns.values()))
        columns = self.model.trees[tree]["column"]
        places = np.searchsorted(ends, columns, side="right")
        return [names[owner] for owner in np.minimum(places, len(names) - 1)]

    def trees_of(self, party: str) -> list[tuple[Lefts, Ints]]:
        """Left children of each tree's nodes, and records of a party's splits, -1 elsewhere."""
        trees = []
        for number, tree in enumerate(self.model.trees):
            is_of_party = np.array(self.owners(number)) == party
            is_split = tree["left"] != LEAF
            records = np.where(is_of_party & is_split, self.records[number], -1)
            trees.append((tree["left"], records))
        return trees

    def check(self, party: str, digest: npt.NDArray[np.uint8]) -> None:
        """Raise a DataError if another party's part is not the one the model was trained with."""
        if digest.tobytes() != self.digests.get(party):
            raise DataError("model must be the one this run was trained with", party)


PARTS: tuple[type[Part], ...] = (ActivePart, PassivePart, ForestPart)


def _check_records(lefts: npt.NDArray[Any], records: Ints, is_local: Flags, n_records: int) -> None:
    """Check the record ids of a tree's nodes; raises ValueError."""
    if len(records) != len(lefts):
        raise ValueError(f"records must be {len(lefts)}, one a node, got {len(records)}")
    inner = lefts != LEAF
    local_records = records[inner & is_local]
    fits = ((local_records >= 0) & (local_records < n_records)).all() and (records >= -1).all()
    if not fits or (records[~inner] != -1).any():
        raise ValueError(f"records must be 0 to {n_records - 1} at local splits, -1 at leaves")


def joint_names(names: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Names of all parties' columns, parties in turn.

    Names stay if they are unique. If two parties share a column name, or a name begins with a
    party's name and a dot, all are prefixed with the party: ``bank.balance``. Raises DataError if
    that is still ambiguous.
    """
    plain = [name for columns in names.values() for name in columns]
    prefixes = tuple(f"{party}." for party in names)
    if len(set(plain)) == len(plain) and not any(name.startswith(prefixes) for name in plain):
        return tuple(plain)
    prefixed = [f"{party}.{name}" for party, columns in names.items() for name in columns]
    repeated = [name for name, count in Counter(prefixed).items() if count > 1]
    if repeated:
        rule = "columns of all parties must differ by party and name, got '{}' twice"
        raise DataError(rule.format(repeated[0]) + ": rename a column or a party")
    return tuple(prefixed)


M = TypeVar("M", Ensemble, BaggedForest)


def whole_model(
    model: M,
    records: Sequence[Ints],
    owners: Sequence[Ints],
    parts: Sequence[tuple[Lookup, Categories]],
    n_columns: Sequence[int],
    columns: Sequence[str],
    kinds: Kinds = (),
) -> M:
    """The whole model, with all columns, thresholds, default sides and sets.

    Parameters
    ----------
    model : with the structure of the trees; a split's column and cut are those of its owner.
    records, owners : per tree, int64, shape (n_nodes,): of each split, at leaves anything.
    parts : splits and categories of each party.
    n_columns : of each party.
    columns, kinds : of all parties, parties in turn.
    """
    first_columns = np.cumsum([0, *n_columns])
    first_sets = np.cumsum([0, *(len(lookup.sets) for lookup, _ in parts)])
    trees: list[Tree] = []
    for tree, record_ids, parties in zip(model.trees, records, owners, strict=True):
        whole = tree.copy()
        for party, (lookup, _) in enumerate(parts):
            nodes = np.flatnonzero((tree["left"] != LEAF) & (parties == party))
            cuts = record_ids[nodes]
            numbers = lookup.numbers[cuts]
            whole["column"][nodes] = first_columns[party] + lookup.columns[cuts]
            whole["threshold"][nodes] = lookup.thresholds[cuts]
            whole["default_left"][nodes] = lookup.defaults[cuts]
            whole["set"][nodes] = np.where(numbers == NO_SET, NO_SET, first_sets[party] + numbers)
        trees.append(whole)
    all_sets = NO_SETS.plus(*(lookup.sets for lookup, _ in parts))
    grown = ordered_sets(trees, all_sets)
    coded = side_by_side(
        (categories, n_local) for (_, categories), n_local in zip(parts, n_columns, strict=True)
    )
    return replace(
        model,
        trees=grown.trees,
        sets=grown.sets,
        columns=tuple(columns),
        categories=coded,
        kinds=kinds,
    )


# Leaves that each row may reach


@dataclass(frozen=True, slots=True, eq=False)
class Skeleton:
    """A tree cut at its entries; node 0 is the root, children come after their parents."""

    lefts: Ints  # (n_nodes,): left child, -1 at an entry; the right child is the next
    sources: Ints  # (n_nodes,): the node in the whole tree

    @property
    def entries(self) -> Ints:
        """Nodes that are entries, ascending."""
        return np.flatnonzero(self.lefts == LEAF)


def skeleton(lefts: npt.NDArray[np.int32], is_passive: Flags) -> Skeleton:
    """A tree in which every subtree without a passive split becomes one entry.

    Parameters
    ----------
    lefts : int32, shape (n_nodes,): left child, -1 at a leaf; the right child is the next.
    is_passive : bool, shape (n_nodes,): splits of passive parties.
    """
    has_passive = is_passive.copy()
    for node in range(len(lefts) - 1, -1, -1):
        if lefts[node] != LEAF:
            has_passive[node] |= has_passive[lefts[node]] | has_passive[lefts[node] + 1]
    sources, new_lefts = [0], []
    for node in sources:  # the list grows in the loop
        new_lefts.append(len(sources) if has_passive[node] else LEAF)
        if has_passive[node]:
            sources += [int(lefts[node]), int(lefts[node]) + 1]
    return Skeleton(np.array(new_lefts, dtype=np.int64), np.array(sources, dtype=np.int64))


def candidates(lefts: Ints, sides: Mapping[int, Bits], n_rows: int) -> Flags:
    """Entries that rows may reach by one party's splits; bool, shape (n_rows, n_entries).

    ``lefts`` is of a ``Skeleton``; ``sides`` has the party's splits by node. At others a row may go
    either way.
    """
    reached: dict[int, Bits] = {0: np.ones(n_rows, dtype=bool)}
    entries = []
    for node, left in enumerate(lefts.tolist()):
        inside = reached.pop(node)
        if left == LEAF:
            entries.append(inside)
            continue
        has_sides = node in sides
        reached[left] = inside & sides[node] if has_sides else inside
        reached[left + 1] = inside & ~sides[node] if has_sides else inside
    return np.stack(entries, axis=1)


# Splits that decide about one row


def open_splits(lefts: Lefts, nodes: Ints, goes_left: Flags) -> list[int]:
    """Splits that a row may reach, each after its parent; ``goes_left`` at some ``nodes``."""
    sides = dict(zip(nodes.tolist(), goes_left.tolist(), strict=True))
    reachable, splits = [0], []
    for node in reachable:  # the list grows in the loop
        left = int(lefts[node])
        if left == LEAF:
            continue
        splits.append(node)
        if sides.get(node, True):
            reachable.append(left)
        if not sides.get(node, False):
            reachable.append(left + 1)
    return splits


def path_to(lefts: Lefts, leaf: int) -> list[tuple[int, bool]]:
    """Nodes from the root to above a leaf, and whether the path goes left there."""
    parents = {}
    for node in np.flatnonzero(lefts != LEAF).tolist():
        left = int(lefts[node])
        parents[left], parents[left + 1] = (node, True), (node, False)
    path = []
    node = leaf
    while node:
        path.append(parents[node])
        node = parents[node][0]
    return path[::-1]
