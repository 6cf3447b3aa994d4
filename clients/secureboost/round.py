"""A round at the active party: gradients, encrypted in blocks; trees that grow; claims of others.

A round replaces itself step by step; what it needs of the run is passed in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from clients.secureboost.columns import Joint
from clients.vertical.ciphertexts import Cipher
from clients.vertical.party import Aligned, Bytes
from fedapp.arrays import Flags, Floats, Ints
from fedapp.crypto.packing import FixedPoint
from fedapp.errors import ProtocolError
from fedapp.histograms.build import slots_by_node
from fedapp.histograms.claimed import carried, row_sums, unfit_column
from fedapp.messages.fields import Array, parameters_of
from fedapp.messages.secureboost import SetupRequest
from fedapp.site.policy import check_sample_size
from fedapp.trees.categories import NO_SET, CategorySets
from fedapp.trees.grow import Growing, Growth, Shape, VectorGrowth
from fedapp.trees.limits import Limits
from fedapp.trees.predict import Nodes, Places
from fedapp.trees.structure import Routes, SplitNodes, node_keys


@dataclass(frozen=True, slots=True, eq=False)
class Unsent:
    """Gradients that are encrypted block by block, all under one layout before the next."""

    fields: Ints  # (n_drawn, n_outputs, 2): in fixed point
    n_sent: int = 0  # ciphertexts
    n_blocks: int = 0  # that are left


@dataclass(frozen=True, slots=True, eq=False)
class Round:
    """A round in progress."""

    number: int
    gradients: Floats  # (n_outputs, n_train, 2), 0 for rows that are not drawn
    allowed: Flags  # (n_trees, n_columns): columns that each tree may split
    growth: Growing | None = None  # between two levels
    exponents: tuple[int, int] = (0, 0)  # scales of the encrypted gradients
    unsent: Unsent | None = None
    chosen: SplitNodes | None = None  # splits of a level by which the rows have not moved yet
    claims: Chosen | None = None  # by which they were chosen
    n_parallel: int = 1  # trees of each output, which draw rows of their own

    @property
    def has_one_tree(self) -> bool:
        """Whether one tree is of all outputs."""
        return len(self.allowed) < len(self.gradients)

    @property
    def grows(self) -> bool:
        """Whether nodes of its trees wait for sums."""
        return self.growth is not None and len(self.growth.open_nodes) > 0

    def drawn(self, joint: Joint, party: str) -> Ints:
        """A party's columns, by its numbers, that some tree may split."""
        return joint.columns_of(party, np.flatnonzero(self.allowed.any(axis=0)))

    def growing(self, settings: SetupRequest, joint: Joint) -> Growth:
        """Its trees."""
        shape = Shape.of(parameters_of(settings), settings.num_parallel_tree)
        limits = Limits(
            settings.seed,
            self.number,
            settings.colsample_bylevel,
            settings.colsample_bynode,
            joint.monotone,
            tuple(map(frozenset, joint.interactions)),
        )
        kind = VectorGrowth if self.has_one_tree else Growth
        return kind(len(self.gradients), joint.cuts, self.allowed, shape, limits, self.growth)

    def block(self, cipher: Cipher, unsent: Unsent, most: int) -> tuple[Round, Bytes]:
        """The round without the next gradients, at most ``most`` ciphertexts; and these."""
        n_all = len(cipher.layouts) * len(unsent.fields)
        stop = min(n_all, unsent.n_sent + most)
        left = replace(unsent, n_sent=stop, n_blocks=-(-(n_all - stop) // most))
        ciphertexts = cipher.encrypted(unsent.fields, unsent.n_sent, stop)
        return replace(self, unsent=left if left.n_blocks else None), ciphertexts

    def of(self, column: int) -> str:
        """A column of the round, by its number, in an error."""
        return f"column {column + 1} in round {self.number + 1}"

    def by_output(
        self, all_nodes: Nodes, trees: Places, nodes: Places
    ) -> Iterator[tuple[Ints, int, Ints, Nodes]]:
        """For each output: which of some nodes are of its tree; its number in the tree; and of the
        rows in these nodes, gradients and hessians in fixed point, and the index of the node."""
        by_draw = self.gradients.reshape(self.n_parallel, -1, *self.gradients.shape[1:])
        drawn = np.asarray(by_draw.any(axis=(1, 3)))  # by parallel tree
        scale = FixedPoint(self.exponents)
        for output, gradients in enumerate(self.gradients):
            tree = 0 if self.has_one_tree else output
            of_tree = np.flatnonzero(trees == tree)
            if not len(of_tree):
                continue
            inside = all_nodes[tree, : len(gradients)]
            slots = slots_by_node(inside, nodes[of_tree])[inside]
            rows = np.flatnonzero((slots >= 0) & drawn[output // by_draw.shape[1]])
            numbers = scale.encode(gradients[rows, None])[:, 0]
            yield of_tree, output if self.has_one_tree else 0, numbers, slots[rows]


NO_ROUND = Round(-1, np.empty((0, 0, 2), np.float32), np.empty((0, 0), bool))


def by_tree(pairs: Floats, n_parallel: int) -> Floats:
    """A view of gradients of shape (n_rows, n_pairs, 2) as (n_rows, n_parallel, n_outputs, 2)."""
    return pairs.reshape(len(pairs), n_parallel, -1, 2)


def drawn_pairs(party: Aligned, pairs: Floats, settings: SetupRequest, number: int) -> Floats:
    """Gradients of the rows that a round draws, 0 for others; of all if it left out too few."""
    if settings.subsample == 1 and not settings.goss:
        return pairs
    entropy = party.site.entropy(settings.seed, number, 1, share=settings.subsample)
    drawn = draw_rows(pairs.copy(), settings, np.random.default_rng(entropy))
    n_rows, n_drawn = (
        int(by_tree(of_rows, settings.num_parallel_tree).any(axis=(2, 3)).sum(axis=0).min())
        for of_rows in (pairs, drawn)
    )
    return drawn if check_sample_size(party.config, n_rows, n_drawn) == n_drawn else pairs


def draw_rows(pairs: Floats, settings: SetupRequest, rng: np.random.Generator) -> Floats:
    """Gradients, with those of rows that are not drawn set to 0; a draw for each parallel tree.

    Source of GOSS: Ke et al. 2017, "LightGBM", Algorithm 2.
    """
    n_rows = len(pairs)
    if settings.subsample < 1:
        shape = settings.num_parallel_tree, n_rows
        by_tree(pairs, shape[0])[(rng.random(shape) >= settings.subsample).T] = 0
    if not settings.goss:
        return pairs
    n_top, n_other = (int(rate * n_rows) for rate in (settings.top_rate, settings.other_rate))
    order = np.argsort(-np.abs(pairs[..., 0]).sum(axis=1), kind="stable")
    factors = np.zeros(n_rows, dtype=np.float32)
    factors[order[:n_top]] = 1
    others = rng.choice(order[n_top:], min(n_other, n_rows - n_top), replace=False)
    # Weighted up, so that sums over drawn rows estimate those over all.
    factors[others] = (1 - settings.top_rate) / settings.other_rate
    return pairs * factors[:, None, None]


# What passive parties claim of their sums is checked here, as the active party knows the rows. A
# passive party that lies could make a choice between two of its columns depend on a row's gradient,
# and read a label from what is chosen. All is checked in fixed point, to the last bit::
#
#     sums of a level come    -> each column's sums are possible for the rows of its nodes
#     its splits are chosen   -> the sums that each was chosen by are kept
#     the owners make them    -> these sums are those of the rows that the owner sends to that side
#
# The smaller child of each pair comes, its sibling is the parent minus it, so both are checked.
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
class Chosen:
    """What remains of a level's claims when its splits are chosen."""

    parents: Mapping[str, Claim]  # by party: of the parents of the nodes that are open next
    # Of the splits of passive parties: the child without missing values, and its claimed sums
    trees: Places
    nodes: Places
    owners: Ints
    columns: Ints  # by number at the owner
    sums: Ints  # (n_splits, n_outputs of a tree, 2, 2)

    def check_sides(self, peers: Sequence[str], current: Round, nodes: Nodes) -> None:
        """Check that the rows of these children have the sums; raises a ProtocolError."""
        for of_tree, output, numbers, slots in current.by_output(nodes, self.trees, self.nodes):
            sums = row_sums(numbers, slots, len(of_tree))
            for split in of_tree[(self.sums[of_tree, output] != sums).any(axis=(1, 2))]:
                owner, column = peers[self.owners[split]], self.columns[split]
                rule = f"must be of rows with the sums that were claimed of {current.of(column)}"
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

    def check_sums(self, current: Round, nodes: Nodes) -> None:
        """Check that rows of the nodes can have these sums; raises a ProtocolError."""
        for of_tree, output, numbers, slots in current.by_output(nodes, *self.nodes.T):
            for party, claim in self.by_party.items():
                columns = self.drawn[party]
                offsets = np.concatenate(([0], np.cumsum(self.joint.widths[party][columns])))
                sums, missing = claim.sums[of_tree, :, output], claim.missing[of_tree]
                unfit = unfit_column(sums, missing, offsets, numbers, slots)
                if unfit is not None:
                    rule = "must be sums that rows of the nodes can have, got others of "
                    rule += current.of(columns[unfit])
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
