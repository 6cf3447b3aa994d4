"""What passive parties claim of their sums, checked at the active party, which knows the rows.

A passive party that lies could make a choice between two of its columns depend on a row's gradient,
and read a label from what is chosen. All is checked in fixed point, to the last bit::

    sums of a level come    -> each column's sums are possible for the rows of its nodes
    its splits are chosen   -> the sums that each was chosen by are kept
    the owners make them    -> these sums are those of the rows that the owner sends to that side

The smaller child of each pair comes, its sibling is the parent minus it, so both are checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from clients.secureboost.joint import Ints, Joint
from fedapp.crypto.packing import FixedPoint
from fedapp.errors import ProtocolError
from fedapp.histograms.build import slots_by_node
from fedapp.histograms.claimed import carried, row_sums, unfit_column
from fedapp.messages.fields import Array
from fedapp.trees.grow import Growth, Routes, node_keys
from fedapp.trees.predict import Nodes, Places
from fedapp.trees.sets import NO_SET, CategorySets

ROWS_AT_ONCE = 1 << 15  # encoded; bounds the floats in memory


@dataclass(frozen=True, slots=True, eq=False)
class Claim:
    """A passive party's sums of some nodes, as of ``fedapp.histograms.claimed``."""

    sums: Ints  # (n_nodes, n_bins, n_outputs of a tree, 2, 2): gradients and hessians, in words
    missing: Array  # (n_nodes, n_columns)

    def take(self, nodes: Ints) -> Claim:
        """The claim of some of the nodes."""
        return Claim(self.sums[nodes], self.missing[nodes])

    def completed(self, parents: Claim, wanted: Ints) -> Claim:
        """The claim of both children of each parent, where one is ``wanted``."""
        sums = np.empty((2 * len(wanted), *self.sums.shape[1:]), dtype=np.int64)
        sums[wanted], sums[wanted ^ 1] = self.sums, carried(parents.sums - self.sums)
        missing = np.empty((2 * len(wanted), self.missing.shape[1]), dtype=np.int64)
        missing[wanted], missing[wanted ^ 1] = self.missing, parents.missing - self.missing
        return Claim(sums, missing)


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Training rows of a round, and the nodes that they are in."""

    number: int  # of the round
    gradients: npt.NDArray[np.float32]  # (n_outputs, n_train, 2)
    drawn: npt.NDArray[np.bool_]  # (n_outputs, n_train): which the trees of an output sum
    nodes: Nodes  # (n_trees, n_train)
    scale: FixedPoint

    def of(self, column: int) -> str:
        """A column of these rows, by its number, in an error."""
        return f"column {column + 1} in round {self.number + 1}"

    def by_output(self, trees: Places, nodes: Places) -> Iterator[tuple[Ints, int, Ints, Nodes]]:
        """For each output: which of some nodes are of its tree; its number in the tree; and of the
        rows in these nodes, gradients and hessians in fixed point, and the index of the node."""
        has_one_tree = len(self.nodes) < len(self.gradients)
        for output, gradients in enumerate(self.gradients):
            tree = 0 if has_one_tree else output
            of_tree = np.flatnonzero(trees == tree)
            if not len(of_tree):
                continue
            slots = slots_by_node(self.nodes[tree], nodes[of_tree])[self.nodes[tree]]
            rows = np.flatnonzero((slots >= 0) & self.drawn[output])
            numbers = np.empty((len(rows), 2), dtype=np.int64)
            for first in range(0, len(rows), ROWS_AT_ONCE):
                part = slice(first, first + ROWS_AT_ONCE)
                numbers[part] = self.scale.encode(gradients[rows[part], None])[:, 0]
            yield of_tree, output if has_one_tree else 0, numbers, slots[rows]


@dataclass(frozen=True, slots=True, eq=False)
class Chosen:
    """What remains of a level's claims when its splits are chosen."""

    parents: Mapping[str, Claim]  # by party: of the parents of the nodes that are open next
    # Of the splits of passive parties: the child without missing values, and its claimed sums
    trees: Places
    nodes: Places
    owners: Ints
    columns: Ints  # by number at the owner
    sums: Ints  # (n_splits, n_outputs of a tree, 2, 2)

    def check_sides(self, peers: Sequence[str], rows: Rows) -> None:
        """Check that the rows of these children have the sums; raises a ProtocolError."""
        for of_tree, output, numbers, slots in rows.by_output(self.trees, self.nodes):
            sums = row_sums(numbers, slots, len(of_tree))
            for split in of_tree[(self.sums[of_tree, output] != sums).any(axis=(1, 2))]:
                owner, column = peers[self.owners[split]], self.columns[split]
                rule = f"must be of rows with the sums that were claimed of {rows.of(column)}"
                raise ProtocolError(owner, "Partition", "bits", f"{rule}: other sums show labels")


@dataclass(frozen=True, slots=True, eq=False)
class Claims:
    """What all passive parties claim of the open nodes."""

    nodes: npt.NDArray[np.int32]  # (n_nodes, 2): tree and node, ascending
    by_party: Mapping[str, Claim]
    drawn: Mapping[str, Ints]  # by party: its columns that are claimed, by its numbers
    joint: Joint

    @classmethod
    def of(
        cls,
        growth: Growth,
        sent: Mapping[str, Claim],
        before: Chosen | None,
        drawn: Mapping[str, Ints],
        joint: Joint,
    ) -> Claims:
        """From what was sent of the wanted nodes, and of their parents before."""
        nodes, every = growth.state.open_nodes, dict(sent)
        if before is not None and growth.level:
            wanted = _places(nodes, growth.wanted)
            every = {name: of.completed(before.parents[name], wanted) for name, of in sent.items()}
        return cls(nodes, every, drawn, joint)

    def check_sums(self, rows: Rows) -> None:
        """Check that rows of the nodes can have these sums; raises a ProtocolError."""
        for of_tree, output, numbers, slots in rows.by_output(*self.nodes.T):
            for party, claim in self.by_party.items():
                columns = self.drawn[party]
                offsets = np.concatenate(([0], np.cumsum(self.joint.widths[party][columns])))
                sums, missing = claim.sums[of_tree, :, output], claim.missing[of_tree]
                unfit = unfit_column(sums, missing, offsets, numbers, slots)
                if unfit is not None:
                    rule = "must be sums that rows of the nodes can have, got others of "
                    rule += rows.of(columns[unfit])
                    raise ProtocolError(party, "EncryptedSums", "ciphertexts", rule)

    def chosen(self, growth: Growth, routes: Routes, sets: CategorySets) -> Chosen:
        """What to compare and to subtract from later; ``growth`` has been split by the routes."""
        names = list(self.joint.widths)
        owners, columns = self.joint.owners(routes["column"])
        is_claimed = np.array([names[owner] in self.by_party for owner in owners], dtype=bool)
        theirs, owners, columns = routes[is_claimed], owners[is_claimed], columns[is_claimed]
        places = _places(self.nodes, np.stack((theirs["tree"], theirs["node"]), axis=1))
        sums = [
            self._near_sums(names[owner], column, place, route, sets)
            for owner, column, place, route in zip(owners, columns, places, theirs, strict=True)
        ]
        shape = next(iter(self.by_party.values())).sums.shape[2:]
        lefts, trees = growth.state.open_nodes[::2], growth.state.trees
        above = [(tree, trees[tree]["parent"][left]) for tree, left in lefts]
        parents = _places(self.nodes, np.array(above, dtype=np.int32).reshape(-1, 2))
        return Chosen(
            {name: claim.take(parents) for name, claim in self.by_party.items()},
            theirs["tree"],
            theirs["left"] + theirs["default_left"].astype(np.int32),
            owners,
            columns,
            np.array(sums, dtype=np.int64).reshape(-1, *shape),
        )

    def _near_sums(
        self, party: str, column: int, place: int, route: np.void, sets: CategorySets
    ) -> Ints:
        """Sums of the side of a split that has no missing values."""
        widths, drawn = self.joint.widths[party], self.drawn[party]
        first, width = int(widths[drawn[drawn < column]].sum()), int(widths[column])
        goes_left = np.arange(width) < route["threshold"]
        if route["set"] != NO_SET:
            goes_left = ~sets.members(route["set"])
        bins = first + np.flatnonzero(goes_left != route["default_left"])
        return carried(self.by_party[party].sums[place, bins].sum(axis=0))


def _places(nodes: npt.NDArray[np.int32], some: npt.NDArray[np.int32]) -> Ints:
    """Indices of some nodes among others, which ascend."""
    keys, wanted = (node_keys((of[:, 0], of[:, 1])) for of in (nodes, some))
    return np.searchsorted(keys, wanted)
