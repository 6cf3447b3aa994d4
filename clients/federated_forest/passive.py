"""Federated Forest at any party: bin the columns, search or sum them, store the part of the model.

Source: Liu et al. 2019, Algorithms 1 and 5. With encoded labels a party finds its best splits. With
encrypted ones, "encrypted label y" is taken literally: a passive party sums ciphertexts that it
cannot read for every bin of its columns, and the active party, who can decrypt, chooses.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from clients.federated_forest.splits import Bytes, Forest, SplitList
from fedapp.crypto.packing import SumLayout, integer_layout
from fedapp.crypto.paillier import PublicKey, check_ciphertexts, read_public_key
from fedapp.crypto.sums import SumJob, pack_terms
from fedapp.crypto.workers import shared_workers
from fedapp.errors import ProtocolError, as_protocol_error
from fedapp.messages.federated_forest import (
    PAILLIER,
    ColumnSums,
    EncryptedLabels,
    Labels,
    LevelRequest,
    PartitionReply,
    PartitionRequest,
    PartKept,
    SetupRequest,
    SumRequest,
    Won,
)
from fedapp.messages.fields import fields_of
from fedapp.messages.vertical import OrderRequest, SentReply
from fedapp.site.mail import Letters, Mail
from fedapp.site.roles import Order, role
from fedapp.site.store import part_digest, sent_bits, write_part
from fedapp.trees.forest.cart import LOWEST, Candidates, Floats, Ints
from fedapp.trees.forest.encrypted import Listing, OwnerColumns, list_columns
from fedapp.trees.forest.levels import by_tree, columns_of, inside_of, number_children
from fedapp.trees.model import LEAF
from fedapp.trees.predict import Places
from fedapp.trees.sets import CategorySets


@role
class Passive(Forest):
    """State of a passive party."""

    def setup(self, request: SetupRequest, mail: Mail) -> tuple[SentReply, Letters]:
        """Set up training."""
        self.begin(request)
        return SentReply(), []

    def _won(self, level: SplitList, mail: Mail) -> Letters:
        """Make the local splits that won; the sides for all others."""
        return self.make_local_splits(level)

    def partition(self, request: PartitionRequest, mail: Mail) -> tuple[PartitionReply, Letters]:
        """Make the local splits of a level, send their sides; after the last store the part."""
        self.keep_partitions(mail)
        letters = self._won(request, mail)
        if request.last:
            return self._hand_over(request)
        return PartitionReply(**self.model_fields(shared=False)), letters

    # A party keeps the structure of the trees and the lookup table of its splits: record id ->
    # column, threshold, default side. Record ids count a party's splits in the order in which they
    # were made, so every party knows them.
    def _hand_over(self, request: PartitionRequest) -> tuple[PartitionReply, Letters]:
        """Store the party's part of the model, and drop the rows."""
        letter = self.local_partition()
        last = request.trees, request.nodes, request.owners
        self.add_splits(*number_children(*last, self.n_nodes))
        is_local = self.splits.owners == self.peers.index(self.name)
        lefts = self.splits.spread(self.splits.lefts, self.n_nodes, LEAF)
        ids = np.where(is_local, self.splits.records, -1)
        trees = zip(lefts, self.splits.spread(ids, self.n_nodes, -1), strict=True)
        part = {
            **self.lookup_json(),
            "name": self.name,
            "trees": [
                {"lefts": children.tolist(), "records": records.tolist()}
                for children, records in trees
            ],
        }
        write_part(self.folder, part)
        digest = np.frombuffer(part_digest(self.folder), dtype=np.uint8)
        letters = [letter, PartKept(digest, *self.local_importance())]
        self.end()
        reply = PartitionReply(**self.model_fields(self.settings.master_keeps_model))
        return reply, [(self.active, each) for each in letters]


@role
class EncodedPassive(Passive):
    """State of a passive party that knows codes of the labels."""

    title = "a passive party with encoded labels"
    order = Order(
        {
            OrderRequest: {SetupRequest},
            SetupRequest: {LevelRequest},
            LevelRequest: {LevelRequest, PartitionRequest},
            PartitionRequest: {LevelRequest},
        }
    )

    def _take_letters(self, mail: Mail) -> None:
        """Check and store the codes of the labels."""
        letter, n_train = mail.one(Labels, self.active), self.n_train
        fits = len(letter.codes) == n_train and len(letter.weights) in (0, n_train)
        if letter.n_classes:
            fits = fits and bool(np.isin(letter.codes, np.arange(letter.n_classes)).all())
        if not fits:
            rule = f"must be of {n_train} rows, class ids below {letter.n_classes} where there are "
            raise ProtocolError(self.active, "Labels", "codes", f"{rule}classes")
        self.take_labels(letter)


@role
class PaillierPassive(Passive):
    """State of a passive party that cannot read the labels."""

    title = "a passive party with paillier labels"
    form = PAILLIER
    order = Order(
        {
            OrderRequest: {SetupRequest},
            SetupRequest: {SumRequest},
            SumRequest: {SumRequest, PartitionRequest},
            PartitionRequest: {SumRequest},
        }
    )
    n: Bytes  # the public key's, big-endian
    n_fields: int  # numbers of a row, and bits of the largest
    bits: int
    weighted: npt.NDArray[np.int64]  # training rows that have a weight
    ciphertexts: Bytes  # (n_weighted, n_ciphertext_bytes): their labels
    # Columns that the last sums are of
    listing: Listing
    thresholds: Floats  # (n_sums,)
    category_codes: Places  # (n_sums,)

    def sum_nodes(self, request: SumRequest, mail: Mail) -> tuple[SentReply, Letters]:
        """Apply the last level's splits, and sum encrypted labels of the open nodes."""
        letters: Letters = []
        if self.follows(SetupRequest):
            self._take_letters(mail)
        if len(request.trees):
            self.keep_partitions(mail)
            # Those of a PartitionRequest have been sent.
            letters = [] if self.follows(PartitionRequest) else self._won(request, mail)
            self.take_splits(request)
        return SentReply(), [*letters, (self.active, self.sum_columns(request))]

    def _layout(self, key: PublicKey) -> SumLayout:
        return integer_layout(key.bits, self.n_train, self.n_fields, self.bits)

    def _take_letters(self, mail: Mail) -> None:
        """Check and store the key, and a ciphertext for every row of positive weight."""
        active, name = self.active, EncryptedLabels.__name__
        letter = mail.one(EncryptedLabels, active)
        with as_protocol_error(active, name, "n"):
            insecure = self.settings.insecure_small_key
            key = read_public_key(letter.n, self.settings.key_bits, insecure_small_key=insecure)
            self.n, self.n_fields, self.bits = letter.n, letter.n_fields, letter.bits
            self._layout(key)
        bits = sent_bits(active, name, "weighted", letter.weighted, [self.n_train])
        self.weighted, self.ciphertexts = np.flatnonzero(bits[0]), letter.ciphertexts
        if len(self.ciphertexts) != len(self.weighted):
            rule = f"must be {len(self.weighted)}, got {len(self.ciphertexts)}"
            raise ProtocolError(active, name, "ciphertexts", rule)
        with as_protocol_error(active, name, "ciphertexts"):
            check_ciphertexts(key, self.ciphertexts)

    def _won(self, level: SplitList, mail: Mail) -> Letters:
        self.candidates = self._chosen(level, mail)
        letters = self.make_local_splits(level)
        return letters if len(self.local_indices(level)) else []

    def _chosen(self, level: SplitList, mail: Mail) -> Candidates:
        """The local split of each open node that has one, as the active party has chosen it."""
        active, listing = self.active, self.listing
        local = self.check_splits(level)[self.local_indices(level)]
        n_open, widths = len(listing.n_columns), self.bins.n_categories
        candidates = Candidates(
            np.zeros(n_open),
            np.zeros(n_open, dtype=np.int64),
            np.full(n_open, -1, dtype=np.int64),
            np.full(n_open, LOWEST, dtype=np.float32),
            np.zeros(n_open, dtype=np.uint8),
            np.zeros(n_open, dtype=np.int64),
            np.zeros((n_open, -(-int(widths.max(initial=0)) // 8)), dtype=np.uint8),
        )
        if not len(local):
            return candidates
        letter = mail.one(Won, active)
        listed, cuts = letter.listed, letter.cuts
        fits = letter.level == self.level + 1 and len(listed) == len(local)
        fits = fits and bool((listed < len(listing.columns)).all())
        fits = fits and np.array_equal(listing.nodes[listed], local)
        # Only where values are missing may all bins go to one side.
        fits = fits and bool((cuts + 1 < listing.n_bins[listed] + listing.missing[listed]).all())
        if not fits:
            raise ProtocolError(active, "Won", "listed", "must be the party's splits of this level")
        candidates.columns[local], candidates.defaults[local] = (
            listing.columns[listed],
            letter.defaults,
        )
        unordered, sizes = np.flatnonzero(listing.unordered[listed]), listing.n_bins[listed]
        with as_protocol_error(active, "Won", "set_bits"):
            sets = CategorySets(letter.set_bits, sizes[unordered])
            n_rights = np.array([sets.members(number).sum() for number in range(len(sets))])
            is_one_sided = (n_rights == 0) | (n_rights == sets.widths)
            if (is_one_sided & (listing.missing[listed[unordered]] == 0)).any():
                raise ValueError("must leave bins on both sides where no value is missing")
        candidates.widths[local] = widths[candidates.columns[local]]
        for number, index in enumerate(unordered.tolist()):
            start = int(listing.ends[listed[index]])
            codes = self.category_codes[start : start + int(sizes[index])]
            # A category of no row in the node goes where missing values go.
            is_right = np.full(candidates.widths[local[index]], not letter.defaults[index])
            is_right[codes] = sets.members(number)
            bits = np.packbits(is_right)
            candidates.rights[local[index], : len(bits)] = bits
        thresholds = self.thresholds[listing.ends[listed] + cuts]
        candidates.thresholds[local] = np.where(listing.unordered[listed], LOWEST, thresholds)
        return candidates

    def sum_columns(self, level: SumRequest) -> ColumnSums:
        """Algorithm 1 under encryption: sum the labels of the open nodes' rows, bin by bin."""
        trees, nodes = self.open_to(level)
        tables, jobs = [], []
        for first, end in by_tree(trees):
            of_tree = int(trees[first]), nodes[first:end], level.n_drawn[first:end]
            listing, local, terms = self._list_tree(*of_tree)
            tables.append((listing, local))
            jobs.append(terms)
        self.listing = Listing.joined([listing for listing, _ in tables])
        self.thresholds = np.concatenate([local.thresholds for _, local in tables])
        self.category_codes = np.concatenate([local.codes for _, local in tables])
        key = PublicKey.from_array(self.n)
        sums = pack_terms(key, self.ciphertexts, jobs, self._layout(key), shared_workers())
        fields = fields_of(self.listing, Listing)
        return ColumnSums(level=self.level + 1, **fields, ciphertexts=sums)

    def _list_tree(
        self, tree: int, nodes: Places, n_drawn: Ints
    ) -> tuple[Listing, OwnerColumns, SumJob]:
        """Columns to list for the open nodes of one tree, and the terms to sum."""
        counts, weighted = self.counts[tree], self.weighted
        is_weighted = np.zeros(self.n_train, dtype=bool)
        is_weighted[weighted] = True
        listing, local = list_columns(
            self.codes,
            self.bins,
            inside_of(self.nodes[tree, : self.n_train], is_weighted & (counts > 0), nodes),
            *columns_of(self.settings.column_seeds, tree, nodes),
            n_drawn,
            (self.settings.min_samples_split, self.settings.min_samples_leaf),
        )
        rows = np.searchsorted(weighted, local.rows).astype(np.int32)
        return listing, local, SumJob(rows, local.places, counts[weighted], len(listing.sizes))
