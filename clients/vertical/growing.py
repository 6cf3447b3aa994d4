"""Trees that grow over the columns of several parties, at any party.

A level at a time. All parties know which nodes are split and who owns the columns (``Structure``).
The owner of a column makes its splits: it stores them in its lookup table, and sends the others
which rows go left. Then every party knows where each row is::

    made       the local splits of a level -> ``partition``, a letter with the rows that go left
    received   the letters of the other owners
    split      all rows move to the children

How splits are chosen is the method's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from clients.vertical.party import Aligned, Bytes
from fedapp.arrays import Floats, Ints
from fedapp.data.scratch import batches
from fedapp.errors import ProtocolError, as_protocol_error
from fedapp.messages.fields import Array
from fedapp.messages.handshake import pack_categories
from fedapp.messages.vertical import LevelSplits, Partition
from fedapp.site.account import planned
from fedapp.site.mail import Mail
from fedapp.site.store import sent_bits, write_part
from fedapp.trees.divided import ActivePart, Lookup, Part
from fedapp.trees.forest.bagged import BaggedForest
from fedapp.trees.model import LEAF, Ensemble
from fedapp.trees.predict import Nodes, rows_at, sides_of
from fedapp.trees.shown import cuts_by_column, few_rows, not_counted
from fedapp.trees.structure import SplitNodes, Structure

SplitList = LevelSplits | SplitNodes
NO_SPLITS = Lookup.empty()


@dataclass(frozen=True, slots=True, eq=False)
class Trees:
    """Trees that grow, as one of the parties knows them."""

    party: str
    parties: tuple[str, ...]  # all: by this order owners of splits are numbered
    lookup: Lookup  # the local splits
    nodes: Nodes  # (n_trees, n_rows): held-back rows move too, they are scored by leaves
    structure: Structure  # the trees in which the rows are
    # By owner: which rows its splits of the level send left, a bit for each row of their nodes
    sides: Mapping[str, Bytes]

    @classmethod
    def of(cls, party: Aligned, n_trees: int, lookup: Lookup = NO_SPLITS) -> Trees:
        """All rows of a party at the roots of new trees."""
        nodes = np.zeros((n_trees, len(party.values)), dtype=np.int32)
        roots = Structure.roots(n_trees)
        return cls(party.name, tuple(party.peers), lookup, nodes, roots, {})

    @property
    def number(self) -> int:
        """The party's number among the owners of splits."""
        return self.parties.index(self.party)

    def local(self, level: SplitList) -> Ints:
        """Indices of the splits of the party's columns."""
        return np.flatnonzero(level.owners == self.number)

    def check(self, level: SplitList, sender: str = "") -> Ints:
        """Indices of splits among the open nodes; raises a ProtocolError if one is not open."""
        with as_protocol_error(sender or self.party, type(level).__name__, "nodes"):
            n_parties = len(self.parties)
            return self.structure.places(level.trees, level.nodes, level.owners, n_parties)

    def made(self, level: SplitList, splits: Lookup, values: Floats) -> Trees:
        """With the local splits of a level, and the rows of ``values`` that they send left."""
        local = self.local(level)
        rows, sizes = rows_at(self.nodes, level.trees[local], level.nodes[local])
        cut = splits.columns, splits.thresholds, splits.defaults
        sides = sides_of(values, *cut, rows, sizes, splits.numbers, splits.sets)
        sides_by_owner = {**self.sides, self.party: np.packbits(sides)}
        return replace(self, lookup=self.lookup.plus(splits), sides=sides_by_owner)

    @property
    def partition(self) -> Partition:
        """Which rows the local splits of the level send left, for the other parties."""
        return Partition(self.structure.level, self.sides[self.party])

    def received(self, mail: Mail) -> Trees:
        """With the rows that others' splits of the level send left."""
        sides = dict(self.sides)
        for owner, letter in mail.all(Partition).items():
            if letter.level != self.structure.level:
                raise ProtocolError(owner, "Partition", "level", "must be the one being split")
            sides[owner] = letter.bits
        return replace(self, sides=sides)

    def split(self, level: SplitList, sender: str = "") -> Trees:
        """With all rows at the children of a level's splits."""
        self.check(level, sender)
        structure = self.after(level)
        for owner in np.unique(level.owners):
            if (party := self.parties[owner]) not in self.sides:
                raise ProtocolError(party, "Partition", "letter", f"must reach {self.party}")
        nodes = rows_after(self.nodes, structure.last, self.parties, self.sides)
        return replace(self, nodes=nodes, structure=structure, sides={})

    def after(self, level: SplitList) -> Structure:
        """The trees after a level's splits, whether or not its rows have moved."""
        return self.structure.split(level.trees, level.nodes, level.owners)

    def records(self, last: SplitList | None = None, first: int = 0) -> Iterator[tuple[Ints, Ints]]:
        """Left children and numbers of local splits, tree by tree; LEAF and -1 at other nodes.

        ``last`` are splits by which no row has moved; numbers begin with ``first``.
        """
        structure = self.structure if last is None else self.after(last)
        splits, n_nodes = structure.splits, structure.n_nodes
        ids = np.where(splits.owners == self.number, first + splits.records, -1)
        lefts = splits.spread(splits.lefts, n_nodes, LEAF)
        return zip(lefts, splits.spread(ids, n_nodes, -1), strict=True)


def split_table(party: Aligned, lookup: Lookup, shared: bool = True) -> dict[str, Any]:
    """A party's splits and columns as fields of a ``SplitTable``; empty unless ``shared``."""
    lookup = lookup if shared else NO_SPLITS
    cuts = cuts_by_column(lookup.columns, lookup.thresholds, len(party.columns))
    least = planned(party.site.store)["least_rows_per_name"]
    values, slices = party.values, batches(len(party.values), 4 * len(party.columns))
    some = (np.ascontiguousarray(values[rows]) for rows in slices)
    few = few_rows(some, cuts, party.categories, least) if shared else not_counted()
    return {
        **{name: getattr(lookup, name) for name in Lookup.__slots__},
        "names": party.columns if shared else (),
        "kinds": party.kinds if shared else (),
        **pack_categories(party.categories if shared else ()),
        "few": few,
    }


def store_part(party: Aligned, kind: type[Part], lookup: Lookup, **fields: Any) -> Array:
    """Store the party's part of the model; returns its digest, uint8, shape (32,)."""
    names = ("columns", "kinds", "categories", "quantiles", "active")
    of_columns = {name: getattr(party, name) for name in names}
    write_part(party.folder, kind(**of_columns, lookup=lookup, **fields))
    return party.part_digest(party.folder.name)


def store_active_part(
    party: Aligned,
    lookup: Lookup,
    model: Ensemble | BaggedForest,
    records: tuple[Ints, ...],
    n_columns: Mapping[str, int],
    digests: Mapping[str, Array],
    scores: Mapping[str, Mapping[str, float]],
) -> None:
    """Store the active party's part; ``digests`` are of the others' parts."""
    store_part(
        party,
        ActivePart,
        lookup,
        name=party.name,
        digests={name: digest.tobytes() for name, digest in digests.items()},
        model=model,
        records=records,
        n_columns=n_columns,
        threshold=scores["train"].get("threshold") or None,  # 0 is no proposal
    )


def rows_after(
    nodes: Nodes,
    splits: SplitNodes,
    parties: Sequence[str],
    sides: Mapping[str, Bytes],
    letter: str = "Partition",
) -> Nodes:
    """Rows at the children of some splits, once all owners have sent which go left.

    Parameters
    ----------
    nodes : int32, shape (n_trees, n_rows).
    parties : names of the owners, by their numbers.
    sides : by owner, packed bits of the rows of the nodes that it splits, split by split; rows
        ascend in each.
    letter : class of the letters, for a ProtocolError about their bits.
    """
    rows, sizes = rows_at(nodes, splits.trees, splits.nodes)
    is_left = np.empty(len(rows), dtype=bool)
    for owner in np.unique(splits.owners):
        of_owner = np.repeat(splits.owners == owner, sizes)
        party, n_rows = parties[owner], int(of_owner.sum())
        is_left[of_owner] = sent_bits(party, letter, "bits", sides[party], n_rows)
    moved = nodes.copy()
    moved[np.repeat(splits.trees, sizes), rows] = np.repeat(splits.lefts, sizes) + ~is_left
    return moved
