"""Federated Forest with labels under Paillier: sums at a passive party, choices at the active one.

The form of the sums is in ``fedapp.trees.forest.encrypted``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt

from clients.federated_forest.party import Active, Passive, Worth
from clients.vertical.ciphertexts import Cipher, EncryptedRows, of_numbers
from clients.vertical.growing import SplitList
from fedapp.arrays import Doubles, Flags, Ints
from fedapp.crypto.sums import SumJob
from fedapp.errors import ProtocolError, as_protocol_error
from fedapp.histograms.build import inside_of
from fedapp.messages.federated_forest import (
    PAILLIER,
    ColumnSums,
    EncryptedLabels,
    EncryptRequest,
    FinishRequest,
    Labels,
    MoreLabels,
    PartitionRequest,
    PartKept,
    SetupRequest,
    SplitReply,
    SplitRequest,
    SumRequest,
    TakeRequest,
    Won,
)
from fedapp.messages.fields import Array, Letter, check_fields, fields_of
from fedapp.messages.vertical import MatchRequest, OrderRequest, SentReply, block_rows
from fedapp.site.mail import Letters, Mail
from fedapp.site.roles import Order, role
from fedapp.site.store import sent_bits
from fedapp.trees.categories import CategorySets, sets_of_rows
from fedapp.trees.divided import Lookup
from fedapp.trees.forest.bagged import by_tree, columns_of, winners
from fedapp.trees.forest.cart import DRAWN, NO_RANK, RowFields, fewest_rows
from fedapp.trees.forest.encrypted import (
    Choices,
    Extremes,
    LeftClaims,
    Listing,
    NodeTotals,
    OwnerColumns,
    Sums,
    best_cuts,
    list_columns,
)
from fedapp.trees.predict import Places
from fedapp.trees.structure import SplitNodes, joined


@role
class PaillierPassive(Passive):
    """State of a passive party that cannot read the labels."""

    title = "a passive party with paillier labels"
    form = PAILLIER
    order = Order(
        {
            OrderRequest: {SetupRequest},
            SetupRequest: {TakeRequest, SumRequest},
            TakeRequest: {TakeRequest, SumRequest},
            SumRequest: {SumRequest, PartitionRequest},
            PartitionRequest: {SumRequest},
        }
    )
    weighted: npt.NDArray[np.int64]  # training rows that have a weight
    encrypted: EncryptedRows  # their labels
    # Columns that the last sums are of
    listing: Listing
    bounds: Places  # (2, n_sums): see ``OwnerColumns``

    def take(self, request: TakeRequest, mail: Mail) -> tuple[SentReply, Letters]:
        """Store a block of labels, the first with the key; others follow."""
        self._take_block(mail)
        return SentReply(), []

    def sum_nodes(self, request: SumRequest, mail: Mail) -> tuple[SentReply, Letters]:
        """Apply the last level's splits, and sum encrypted labels of the open nodes."""
        letters: Letters = []
        if self.follows(SetupRequest) or self.follows(TakeRequest):
            self._take_block(mail, last=True)
        if len(request.trees):
            self.receive(mail)
            # Those of a PartitionRequest have been sent.
            letters = [] if self.follows(PartitionRequest) else self._won(request, mail)
            self.move(request)
        return SentReply(), [*letters, (self.active, self.sum_columns(request))]

    def _take_block(self, mail: Mail, last: bool = False) -> None:
        """Check and store the key, and ciphertexts of the next rows of positive weight."""
        active = self.active
        letter: EncryptedLabels | MoreLabels
        if self.follows(SetupRequest):
            letter = mail.one(EncryptedLabels, active)
            layouts_of = of_numbers(self.n_train, letter.n_fields, letter.bits)
            self.encrypted = EncryptedRows.none(self, letter, self.forest.settings, layouts_of)
            bits = active, "EncryptedLabels", "weighted", letter.weighted
            self.weighted = np.flatnonzero(sent_bits(*bits, self.n_train))
        else:
            letter = mail.one(MoreLabels, active)
        n_taken, n_rows = len(self.encrypted) + len(letter.ciphertexts), len(self.weighted)
        fits = n_taken <= n_rows and not (last and n_taken < n_rows)
        rule = f"must be {n_rows}, got {n_taken}"
        check_fields(active, letter, ("ciphertexts", fits, rule))
        self.encrypted = self.encrypted.plus(active, letter)

    def _won(self, level: SplitList, mail: Mail) -> Letters:
        trees = self.forest.trees.made(level, self._chosen(level, mail), self.values)
        self.forest = replace(self.forest, trees=trees)
        return self.to_others(trees.partition) if len(trees.local(level)) else []

    def _chosen(self, level: SplitList, mail: Mail) -> Lookup:
        """The local splits of a level, as the active party has chosen them."""
        active, listing = self.active, self.listing
        local = self.forest.trees.check(level)[self.forest.trees.local(level)]
        if not len(local):
            return Lookup.empty()
        letter = mail.one(Won, active)
        listed, cuts = letter.listed, letter.cuts
        fits = letter.level == self.forest.trees.structure.level and len(listed) == len(local)
        fits = fits and bool((listed < len(listing.columns)).all())
        fits = fits and np.array_equal(listing.nodes[listed], local)
        # Only where values are missing may all bins go to one side.
        fits = fits and bool((cuts < listing.n_bins[listed] + listing.missing[listed] - 1).all())
        check_fields(active, letter, ("listed", fits, "must be the party's splits of this level"))
        columns, starts = listing.columns[listed], listing.ends[listed]
        is_unordered, sizes = listing.unordered[listed].astype(bool), listing.n_bins[listed]
        with as_protocol_error(active, "Won", "set_bits"):
            sets = CategorySets(letter.set_bits, sizes[is_unordered])
            members = [sets.members(number) for number in range(len(sets))]
            n_rights = np.array([is_right.sum() for is_right in members])
            is_one_sided = (n_rights == 0) | (n_rights == sets.widths)
            if (is_one_sided & (listing.missing[listed[is_unordered]] == 0)).any():
                raise ValueError("must leave bins on both sides where no value is missing")
        widths, of_columns = self.forest.bins.n_categories[columns], list[npt.NDArray[np.bool_]]()
        for index, is_right in zip(np.flatnonzero(is_unordered), members, strict=True):
            # A category of no row in the node goes where missing values go.
            of_column = np.full(widths[index], not letter.defaults[index])
            of_column[self.bounds[0, starts[index] : starts[index] + sizes[index]]] = is_right
            of_columns.append(of_column)
        thresholds = listing.thresholds(listed, cuts, self.bounds, self.forest.bins)
        set_bits = CategorySets.of(of_columns).bits
        return Lookup(columns, thresholds, letter.defaults, widths, set_bits)

    def sum_columns(self, level: SumRequest) -> ColumnSums:
        """Algorithm 1 under encryption: sum the labels of the open nodes' rows, bin by bin."""
        trees, nodes = self.forest.open_to(level)
        tables, jobs = [], []
        for first, end in by_tree(trees):
            listing, local, terms = self._list_tree(
                int(trees[first]), nodes[first:end], level.n_drawn[first:end]
            )
            tables.append((listing, local))
            jobs.append(terms)
        self.listing = joined([listing for listing, _ in tables])
        self.bounds = np.concatenate([local.bounds for _, local in tables], axis=1)
        fields, sums = fields_of(self.listing, Listing), self.encrypted.sums_of(jobs)
        return ColumnSums(level=self.forest.trees.structure.level, **fields, ciphertexts=sums)

    def _list_tree(
        self, tree: int, nodes: Places, n_drawn: Ints
    ) -> tuple[Listing, OwnerColumns, SumJob]:
        """Columns to list for the open nodes of one tree, and the terms to sum."""
        forest, weighted, asked = self.forest, self.weighted, self.forest.settings
        counts, per = forest.counts[tree], asked.max_features_per
        is_weighted = np.zeros(self.n_train, dtype=bool)
        is_weighted[weighted] = True
        columns, keys = columns_of(asked.column_seeds, tree, nodes, n_drawn, per)
        listing, local = list_columns(
            forest.codes,
            forest.bins,
            inside_of(forest.nodes[tree], is_weighted & (counts > 0), nodes),
            columns,
            keys,
            n_drawn,
            fewest_rows(asked.min_samples_split, asked.min_samples_leaf),
        )
        rows = np.searchsorted(weighted, local.rows).astype(np.int32)
        return listing, local, SumJob(rows, local.places, counts[weighted], len(listing.sizes))


# Source: Liu et al. 2019, Algorithms 2 and 6. Departure: the active party compares the splits, not
# the master, who would learn from improvements how impure nodes are; the active party knows that.
@role
class PaillierActive(Active):
    """State of the active party where the others cannot read the labels."""

    title = "the active party with paillier labels"
    form = PAILLIER
    order = Order(
        {
            MatchRequest: {SetupRequest},
            SetupRequest: {EncryptRequest, SplitRequest},
            EncryptRequest: {EncryptRequest, SplitRequest},
            SplitRequest: {SplitRequest, FinishRequest},
        }
    )
    cipher: Cipher
    n_blocks: int = 0  # of labels that were encrypted
    chosen: SplitNodes  # of the open nodes, for all parties
    claims: LeftClaims = LeftClaims.none()  # of those of others
    # Others' splits: party, column, and gain, which it cannot know
    worth: Doubles = np.zeros((0, 3))

    def _send(self, letter: Labels) -> Letters:
        """Draw a key; encrypt the first rows under it."""
        fields = self.forest.labels.fields
        n_rows, n_fields = fields.numbers.shape
        layouts_of = of_numbers(n_rows, n_fields, fields.bits)
        self.cipher = Cipher.drawn(self, self.forest.settings, layouts_of)
        n, weighted = self.cipher.public_key.to_array(), np.packbits(self.forest.labels.weights > 0)
        return self._next_block(partial(EncryptedLabels, n, n_fields, fields.bits, weighted))

    def send_block(self, request: EncryptRequest, mail: Mail) -> tuple[SentReply, Letters]:
        """Encrypt the labels of the next rows."""
        rule = "must come once a block of labels, got one more"
        check_fields(self.name, request, ("step", self.n_blocks < self._due_blocks, rule))
        return SentReply(), self._next_block(MoreLabels)

    @property
    def _due_blocks(self) -> int:
        width = self.cipher.public_key.ciphertext_bytes
        return -(-self.n_train // block_rows(width, len(self.others)))

    def _next_block(self, letter: Callable[[Array], Letter]) -> Letters:
        """Letters with the next rows that have a weight, encrypted afresh for each party."""
        # Blocks of one size: that of each would else show where rows without a weight are.
        labels = self.forest.labels
        rows = np.array_split(np.flatnonzero(labels.weights > 0), self._due_blocks)[self.n_blocks]
        of_rows = labels.fields.of_rows(rows.astype(np.int32), np.ones(self.n_train, np.uint8))
        self.n_blocks += 1
        numbers = of_rows.numbers.astype(np.int64)
        return [(name, letter(self.cipher.encrypted(numbers))) for name in self.others]

    def split(self, request: SplitRequest, mail: Mail) -> tuple[SplitReply, Letters]:
        """Apply the last level's splits, and choose those of the open nodes for all parties."""
        if len(request.trees):
            self._check_chosen(request)
            self.receive(mail)
            self.move(request)
        scores = self.level_scores(request)
        letters = self.choose(request, mail)
        chosen = self.chosen
        reply = SplitReply(trees=chosen.trees, nodes=chosen.nodes, owners=chosen.owners, **scores)
        return reply, letters

    def choose(self, level: SplitRequest, mail: Mail) -> Letters:
        """Algorithm 2: decrypt the others' sums, take the best split of each node.

        Pure nodes are not searched. Only this party knows which they are, so the others have summed
        them too; ciphertexts with no other node's sums are not decrypted.
        """
        trees, nodes = self.forest.open_to(level)
        spans, fields, peers = by_tree(trees), self.forest.labels.fields, self.peers
        of_trees = [self._totals(fields, int(trees[a]), nodes[a:b]) for a, b in spans]
        totals = joined([of_nodes for of_nodes, _ in of_trees])
        extremes = joined([of_rows for _, of_rows in of_trees])
        starts = [a for a, _ in spans[1:]]
        sums = {
            name: self._read_offer(name, mail.one(ColumnSums, name), totals, extremes, starts)
            for name in self.others
        }
        self.forest, local = self.forest.searched(level)
        best = winners([local if name == self.name else sums[name][2] for name in peers])
        split = np.flatnonzero(best >= 0)
        splits = self.forest.trees.structure.split(trees[split], nodes[split], best[split]).last
        self.chosen, self.forest = splits, self.forest.made(splits, self.values)
        grown, letters = self.forest.trees, Letters()
        if not level.last and len(grown.local(splits)):
            letters = self.to_others(grown.partition)
        claims = list[LeftClaims]()
        for name, (listing, of_listing, offer) in sums.items():
            owner = peers.index(name)
            nodes_won = split[best[split] == owner]
            if len(nodes_won):
                letters.append((name, won(grown.structure.level, listing, offer, nodes_won)))
                places = np.flatnonzero(splits.owners == owner)
                claims.append(LeftClaims.of(places, listing, of_listing, offer, nodes_won))
                worth = self.forest.worth_of(trees[nodes_won], offer.improvements[nodes_won])
                columns = listing.columns[offer.listed[nodes_won]]
                gained = np.stack((np.full(len(nodes_won), owner), columns, worth), axis=1)
                self.worth = np.concatenate((self.worth, gained))
        self.claims = LeftClaims.joined(claims)
        return letters

    def move(self, level: SplitList) -> None:
        """Move all rows, and compare those that go left with the sums by which it was chosen."""
        super().move(level)
        splits, claims = self.forest.trees.structure.last, self.claims
        fields = self.forest.labels.fields
        trees, lefts = splits.trees[claims.splits], splits.lefts[claims.splits]
        if not len(trees):
            return
        of_trees = [self._totals(fields, int(trees[a]), lefts[a:b])[0] for a, b in by_tree(trees)]
        if (false := claims.first_false(joined(of_trees))) is not None:
            party = self.peers[splits.owners[claims.splits[false]]]
            rule = f"must be of the rows sent left, those of column {claims.columns[false] + 1} are"
            raise ProtocolError(party, "ColumnSums", "ciphertexts", f"{rule} not")

    def _won(self, level: SplitList, mail: Mail) -> Letters:
        self._check_chosen(level)  # they were made when they were chosen
        return []

    def _check_chosen(self, level: SplitList) -> None:
        chosen, names = self.chosen, ("trees", "nodes", "owners")
        fits = all(np.array_equal(getattr(chosen, name), getattr(level, name)) for name in names)
        rule = "must be the splits that this party has chosen"
        check_fields(self.name, level, ("nodes", fits, rule))

    def _worth(self, party: str, letter: PartKept) -> Worth:
        of_party = self.worth[self.worth[:, 0] == self.peers.index(party)]
        columns, gains = of_party[:, 1].astype(np.int64), np.zeros(len(letter.gains))
        least = columns.max(initial=-1) + 1
        rule = f"must be {least} columns at least, got {len(gains)}"
        check_fields(party, letter, ("gains", least <= len(gains), rule))
        np.add.at(gains, columns, of_party[:, 2])
        return gains, letter.counts, letter.names

    def _totals(self, fields: RowFields, tree: int, nodes: Places) -> tuple[NodeTotals, Extremes]:
        """Sums and sizes of nodes of a tree, and the extremes of their rows."""
        forest, labels, asked = self.forest, self.forest.labels, self.forest.settings
        counts = forest.counts[tree]
        drawn = (counts > 0) & (labels.weights > 0)
        inside = inside_of(forest.nodes[tree], drawn, nodes)
        fewest = fewest_rows(asked.min_samples_split, asked.min_samples_leaf)
        totals = NodeTotals.of(fields, labels.targets, counts, inside, fewest)
        return totals, Extremes.of(fields.of_rows(inside[0], counts), inside)

    def _read_offer(
        self,
        party: str,
        letter: ColumnSums,
        totals: NodeTotals,
        extremes: Extremes,
        starts: list[int],
    ) -> tuple[Listing, Sums, Choices]:
        """A party's columns, their sums, decrypted and checked, and the best split of each node.

        A ciphertext has sums of one tree only; ``starts`` are the first nodes of all but the first.
        """
        listing = Listing(*(getattr(letter, field) for field in Listing.__slots__))
        is_due = letter.level == self.forest.trees.structure.level
        rule = f"must be of {len(totals.large)} open nodes, only those with enough rows"
        check_fields(party, letter, ("level", is_due, "must be the one being split"))
        check_fields(party, letter, ("columns", _fits(listing, totals.large), rule))
        matches = listing.per_column(listing.sizes) == totals.sizes[listing.nodes]
        check_fields(
            party, letter, ("sizes", matches.all(), "must add up to the rows of each node")
        )
        columns, units = totals.is_open[listing.nodes], self.forest.labels.fields.units
        wanted = np.repeat(columns, listing.n_bins + listing.missing)
        by_tree = np.split(wanted, listing.ends[np.searchsorted(listing.nodes, starts)])
        jobs, to_array = [(0, of_tree) for of_tree in by_tree], partial(np.array, dtype=np.float64)
        of_jobs = self.cipher.read(party, letter, jobs, to_array)
        sums = np.concatenate([of_job.reshape(-1, len(units)) for of_job in of_jobs])
        matches = listing.per_column(sums)[columns] == totals.totals[listing.nodes][columns]
        weights = sums[wanted] if self.forest.labels.n_classes else sums[wanted, :1]
        # Weights of rows are not negative, and some are not 0.
        adds_up = matches.all() and (weights >= 0).all() and (weights.sum(axis=1) > 0).all()
        rule = "must add up to the labels of each node"
        check_fields(party, letter, ("ciphertexts", adds_up, rule))
        fits = extremes.fit(listing, sums)[wanted].all()
        rule = "must be sums that as many rows of the node can have"
        check_fields(party, letter, ("ciphertexts", fits, rule))
        return listing, sums, best_cuts(listing, sums, totals, units, self.forest.rules)


def won(level: int, listing: Listing, offer: Choices, nodes: Ints) -> Won:
    """The splits of some nodes, for the party that has offered them."""
    listed = offer.listed[nodes]
    widths = listing.n_bins[listed] * listing.unordered[listed]
    _, sets = sets_of_rows(widths, offer.rights[nodes])
    return Won(level, listed, offer.cuts[nodes], offer.defaults[nodes], sets.bits)


def _fits(listing: Listing, large: Flags) -> bool:
    n_listed, n_sums = len(listing.columns), len(listing.sizes)
    fits = len(listing.ranks) == len(large) and bool((listing.n_columns <= n_listed).all())
    fits = fits and int(listing.n_columns.sum()) == n_listed
    fits = fits and bool(((listing.n_bins > 0) & (listing.n_bins <= n_sums)).all())
    if not fits or listing.ends[-1] != n_sums:
        return False
    # Columns ascend in a node. Without a drawn rank a node lists one column at most; a node is
    # ranked exactly if it lists columns, which only large nodes do.
    is_listed, nodes = listing.n_columns > 0, listing.nodes
    ascends = (np.diff(listing.columns) > 0) | (np.diff(nodes) > 0)
    single = (listing.ranks == DRAWN) | (listing.n_columns <= 1)
    ranked = is_listed == (listing.ranks < NO_RANK)
    return bool(ascends.all() and single.all() and ranked.all() and not (is_listed & ~large).any())
