"""Trees that grow over the columns of several parties, at any party.

A level at a time. All parties know which nodes are split and who owns the columns (``Structure``).
The owner of a column makes its splits: it stores them in its lookup table, and sends the others
which rows go left. Then every party knows where each row is::

    make              the local splits of a level -> a letter with the rows that go left
    keep_partitions   the letters of the other owners
    take_splits       all rows move to the children

How splits are chosen is the method's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from clients.vertical.party import Aligned, Bytes, Ints
from fedapp.errors import ProtocolError, as_protocol_error
from fedapp.messages.fields import Array
from fedapp.messages.handshake import pack_categories
from fedapp.messages.vertical import LevelSplits, Partition
from fedapp.site.account import planned
from fedapp.site.mail import Mail
from fedapp.site.roles import role
from fedapp.site.store import sent_bits, write_part
from fedapp.trees.divided import ActivePart, ForestPart, Lookup, Part, PartTree
from fedapp.trees.forest.bagged import BaggedForest
from fedapp.trees.model import LEAF, Ensemble
from fedapp.trees.predict import Nodes, rows_at, sides_of
from fedapp.trees.shown import cuts_by_column, few_rows, not_counted
from fedapp.trees.structure import SplitNodes, Structure

SplitList = LevelSplits | SplitNodes


@role
class Growing(Aligned):
    """State of any party while trees grow."""

    lookup: Lookup  # the local splits
    nodes: Nodes  # (n_trees, n_rows): held-back rows move too, they are scored by leaves
    structure: Structure = Structure.roots(0)  # the trees in which the rows are
    # By owner: which rows its splits of the level send left, a bit for each row of their nodes
    sides: Mapping[str, Bytes] = {}

    def begin_trees(self, n_trees: int) -> None:
        """Put all rows at the roots of new trees."""
        self.nodes = np.zeros((n_trees, len(self.values)), dtype=np.int32)
        self.structure, self.sides = Structure.roots(n_trees), {}

    @property
    def number(self) -> int:
        """This party's number among the owners of splits."""
        return self.peers.index(self.name)

    def local_indices(self, level: SplitList) -> Ints:
        """Indices of the splits of this party's columns."""
        return np.flatnonzero(level.owners == self.number)

    def check_splits(self, level: SplitList, sender: str = "") -> Ints:
        """Indices of splits among the open nodes; raises a ProtocolError if one is not open."""
        with as_protocol_error(sender or self.name, type(level).__name__, "nodes"):
            return self.structure.places(level.trees, level.nodes, level.owners, len(self.peers))

    def make(self, level: SplitList, splits: Lookup) -> Partition:
        """Store the local splits of a level; which rows they send left, for the other parties."""
        local = self.local_indices(level)
        rows, sizes = rows_at(self.nodes, level.trees[local], level.nodes[local])
        sides = sides_of(
            self.values,
            splits.columns,
            splits.thresholds,
            splits.defaults,
            rows,
            sizes,
            splits.numbers,
            splits.sets,
        )
        self.lookup = self.lookup.plus(splits)
        self.sides = {**self.sides, self.name: np.packbits(sides)}
        return self.local_partition()

    def local_partition(self) -> Partition:
        """Which rows the local splits of the level send left."""
        return Partition(self.structure.level, self.sides[self.name])

    def keep_partitions(self, mail: Mail) -> None:
        """Store which rows others' splits of the level send left."""
        for owner, letter in mail.all(Partition).items():
            if letter.level != self.structure.level:
                raise ProtocolError(owner, "Partition", "level", "must be the one being split")
            self.sides = {**self.sides, owner: letter.bits}

    def take_splits(self, level: SplitList, sender: str = "") -> None:
        """Move all rows to the children of a level's splits."""
        self.check_splits(level, sender)
        structure = self.structure.split(level.trees, level.nodes, level.owners)
        for owner in np.unique(level.owners):
            party = self.peers[owner]
            if party not in self.sides:
                raise ProtocolError(party, "Partition", "letter", f"must reach {self.name}")
        self.nodes = rows_after(self.nodes, structure.last, self.peers, self.sides)
        self.structure, self.sides = structure, {}

    def split_table(self, shared: bool = True) -> dict[str, Any]:
        """Local splits and columns as fields of a ``SplitTable``; empty unless ``shared``."""
        lookup = self.lookup if shared else Lookup.empty()
        cuts = cuts_by_column(lookup.columns, lookup.thresholds, len(self.columns))
        least = planned(self.site.store)["least_rows_per_name"]
        few = few_rows([self.values], cuts, self.categories, least) if shared else not_counted()
        return {
            **{name: getattr(lookup, name) for name in Lookup.__slots__},
            "names": self.columns if shared else (),
            "kinds": self.kinds if shared else (),
            **pack_categories(self.categories if shared else ()),
            "few": few,
        }

    def forest_part(self) -> ForestPart:
        """The party's part of trees whose whole structure it knows: its splits, by node."""
        splits, n_nodes = self.structure.splits, self.structure.n_nodes
        ids = np.where(splits.owners == self.number, splits.records, -1)
        lefts = splits.spread(splits.lefts, n_nodes, LEAF)
        trees = tuple(map(PartTree, lefts, splits.spread(ids, n_nodes, -1)))
        return ForestPart(**self.part_fields(), lookup=self.lookup, trees=trees)

    def store_part(self, part: Part) -> Array:
        """Store the party's part of the model; returns its digest, uint8, shape (32,)."""
        write_part(self.folder, part)
        return self.part_digest(self.folder.name)

    def store_active_part(
        self,
        model: Ensemble | BaggedForest,
        records: Sequence[Ints],
        n_columns: Mapping[str, int],
        digests: Mapping[str, Array],
        threshold: float | None,
    ) -> None:
        """Store the active party's part; ``digests`` are of the others' parts."""
        part = ActivePart(
            **self.part_fields(),
            lookup=self.lookup,
            name=self.name,
            digests={name: digest.tobytes() for name, digest in digests.items()},
            model=model,
            records=tuple(records),
            n_columns=n_columns,
            threshold=threshold or None,  # 0 is no proposal
        )
        write_part(self.folder, part)


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
