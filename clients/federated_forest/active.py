"""Federated Forest at the active party: coded or encrypted labels, choices, leaf values, scores.

Source: Liu et al. 2019, Algorithms 2 and 6; leaf labels stay here. With encrypted labels this party
decrypts the others' sums, and chooses the splits of all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from clients.federated_forest.party import Doubles, Forest
from clients.scoring import compare_with_local, score_arrays
from clients.vertical.party import Bytes, draw_key
from fedapp import metrics
from fedapp.crypto.packing import integer_layout
from fedapp.crypto.paillier import PrivateKey, encrypt
from fedapp.crypto.sealed import LARGEST_CONTENT
from fedapp.crypto.sums import read_jobs
from fedapp.crypto.workers import shared_workers
from fedapp.data.partition import SUBSETS, WATCHED
from fedapp.errors import ConfigError, DataError, ProtocolError, as_protocol_error
from fedapp.messages.federated_forest import (
    PAILLIER,
    ColumnSums,
    EncryptedLabels,
    FinishReply,
    FinishRequest,
    Labels,
    LevelRequest,
    PartitionReply,
    PartitionRequest,
    PartKept,
    SetupRequest,
    SplitReply,
    SplitRequest,
    Won,
)
from fedapp.messages.fields import Array
from fedapp.messages.vertical import LevelSplits, MatchRequest, SentReply
from fedapp.site.mail import Letters, Mail
from fedapp.site.roles import Order, role
from fedapp.trees.divided import joint_names
from fedapp.trees.forest.cart import DRAWN, NO_RANK, Ints
from fedapp.trees.forest.encrypted import (
    Choices,
    Flags,
    Listing,
    NodeTotals,
    Places,
    Sums,
    best_cuts,
)
from fedapp.trees.forest.levels import (
    RowFields,
    by_tree,
    class_codes,
    inside_of,
    number_codes,
    winners,
)
from fedapp.trees.forest.model import BaggedForest, branches, leaf_values
from fedapp.trees.objective import REGRESSION, Objective, check_objective, margins_of, n_outputs
from fedapp.trees.sets import sets_of_rows
from fedapp.trees.structure import SplitNodes

SCORE_BINS = 2**12
SPARE_BYTES = 2**24  # of a letter, for all but its ciphertexts, such as a bit per row
Scored = tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]  # margins, labels, weights


@role
class Active(Forest):
    """State of the active party."""

    objective: Objective
    numbers: npt.NDArray[np.float32]  # (n_rows,): label of each row, a class id or number
    classes: tuple[str, ...]
    unit: float  # of the codes: the numbers' distance for 1

    def setup(self, request: SetupRequest, mail: Mail) -> tuple[SentReply, Letters]:
        """Check the rows' order, bin the columns, send the others coded or encrypted labels."""
        self.check_order(mail)
        self.begin(request)
        if self.config.encrypts_labels and self.form != PAILLIER:
            rule = "must be paillier where a node config has encrypted-labels"
            raise ConfigError(f"federated-forest.labels {rule}, got {request.labels}")
        letter = self._code_labels(request)
        self.take_labels(letter)
        return SentReply(), self._send(letter)

    def _send(self, letter: Labels) -> Letters:
        return self.to_others(letter)

    def _code_labels(self, request: SetupRequest) -> Labels:
        with as_protocol_error(self.name, "SetupRequest", "objective"):
            check_objective(request.objective)
        self.objective = cast(Objective, request.objective)
        self.classes, self.numbers = self.number_labels(request.objective)
        weights, self.labels = self.weights[: self.n_train], None
        if not ((self.counts > 0) @ weights.astype(np.float64) > 0).all():
            raise DataError("weight must be > 0 in some training row of every tree")
        numbers, self.unit = self.numbers[: self.n_train], 1.0
        if self.classes:
            codes = class_codes(numbers)
        else:
            codes, self.unit = number_codes(numbers)
        return Labels(
            int(codes.max()) + 1 if self.classes else 0,
            codes,
            weights if (weights != 1).any() else weights[:0],
            request.min_impurity_decrease / self.unit**2,
        )

    def forest(self) -> BaggedForest:
        """The forest so far, without thresholds; a split's column is its owner's number."""
        n_classes = 0 if self.objective == REGRESSION else len(self.classes)
        values = leaf_values(
            self.nodes[:, : self.n_train],
            self.counts,
            self.row_weights,
            self.numbers[: self.n_train],
            self.structure.n_nodes,
            n_classes,
            n_outputs(self.objective, n_classes),
        )
        trees, _ = branches(self.structure)
        return BaggedForest(self.objective, tuple(self.peers), self.classes, trees, values)

    def level_scores(self, request: LevelSplits) -> dict[str, Any]:
        scores: dict[str, dict[str, float]] = {subset: {} for subset in WATCHED}
        if not len(request.trees):
            return score_arrays(scores)
        model = self.forest()
        for subset in WATCHED:
            rows = self._rows(model, subset)
            if len(rows[1]):
                statistics = metrics.statistics(model.objective, *rows, SCORE_BINS)
                scores[subset] = metrics.scores(model.objective, statistics)
        return score_arrays(scores)

    def _rows(self, model: BaggedForest, subset: str) -> Scored:
        rows = self.rows_of(subset)
        margins = margins_of(model.objective, model.predictions(self.nodes[:, rows]))
        return margins, self.numbers[rows], self.weights[rows]

    def finish(self, request: FinishRequest, mail: Mail) -> tuple[FinishReply, Letters]:
        """Apply the last splits, score the forest, store the party's part of the model."""
        if len(request.trees):
            self.keep_partitions(mail)
            self._make_last(request)
            self.take_splits(request)
        model = self.forest()
        letters = {name: mail.one(PartKept, name) for name in self.others}
        scores = metrics.pooled_subsets(model.objective, self._scored(model))
        splits = self.structure.splits
        ids = splits.spread(splits.records, self.structure.n_nodes, -1)
        # Only the owner of a split is known, so each party counts as one column.
        n_columns = dict.fromkeys(self.peers, 1)
        digests = {name: letter.digest for name, letter in letters.items()}
        self.store_active_part(model, ids, n_columns, digests, scores["train"].get("threshold"))
        names, gains, counts = self._importance(letters)
        keeps_model = self.settings.master_keeps_model
        values = np.concatenate(model.values) if keeps_model else np.zeros((0, model.n_outputs))
        self.end()
        reply = FinishReply(
            **score_arrays(scores),
            column_names=names,
            column_gains=gains,
            column_counts=counts,
            **self.split_table(keeps_model),
            classes=model.classes if keeps_model else (),
            leaf_values=values,
        )
        return reply, []

    def _make_last(self, request: FinishRequest) -> None:
        """Make the local splits of the last level."""
        self.make_local_splits(request)

    def _scored(self, model: BaggedForest) -> dict[str, Scored]:
        """Rows to score by subset; out-of-bag rows by the trees that have not drawn them."""
        rows = {subset: self._rows(model, subset) for subset in SUBSETS}
        compare_with_local(self, self.numbers, model.objective, rows["test"][0])
        unseen = self.counts == 0
        oob = np.flatnonzero(unseen.any(axis=0))
        predictions = model.predictions(self.nodes[:, oob], unseen[:, oob])
        margins = margins_of(model.objective, predictions)
        return {**rows, "oob": (margins, self.numbers[oob], self.weights[oob])}

    def _gains(self, party: str, letter: PartKept) -> Doubles:
        """Gain of each column of another party."""
        return letter.gains

    def _importance(
        self, letters: Mapping[str, PartKept]
    ) -> tuple[tuple[str, ...], Doubles, npt.NDArray[np.int64]]:
        """Total gain and splits of all columns, numbered unless all parties share names."""
        worth = {self.name: self.local_importance()}
        for name, letter in letters.items():
            worth[name] = self._gains(name, letter), letter.counts, letter.names
        columns = {party: len(worth[party][0]) for party in self.peers}
        shared = all(len(worth[party][2]) == n_columns for party, n_columns in columns.items())
        names = joint_names(
            {
                party: worth[party][2]
                if shared
                else [f"{party} column {column + 1}" for column in range(n_columns)]
                for party, n_columns in columns.items()
            }
        )
        gains = np.concatenate([worth[party][0] for party in columns]) * self.unit**2
        return names, gains, np.concatenate([worth[party][1] for party in columns])


@role
class EncodedActive(Active):
    """State of the active party where the others know codes of the labels."""

    title = "the active party with encoded labels"
    order = Order(
        {
            MatchRequest: {SetupRequest},
            SetupRequest: {LevelRequest},
            LevelRequest: {LevelRequest, PartitionRequest, FinishRequest},
            PartitionRequest: {LevelRequest},
        }
    )

    def partition(self, request: PartitionRequest, mail: Mail) -> tuple[PartitionReply, Letters]:
        """Make the local splits of a level, send their sides."""
        self.keep_partitions(mail)
        letters = self.make_local_splits(request)
        if request.last:
            rule = "must be false at the active party"
            raise ProtocolError(self.name, "PartitionRequest", "last", rule)
        return PartitionReply(**self.split_table(shared=False)), letters


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
            SetupRequest: {SplitRequest},
            SplitRequest: {SplitRequest, FinishRequest},
        }
    )
    key: Bytes  # the private key
    chosen: SplitNodes  # of the open nodes, for all parties
    worth: Doubles = np.zeros(
        (0, 3)
    )  # others' splits: party, column, and gain, which it cannot know

    @property
    def _fields(self) -> RowFields:
        return RowFields.of(self.targets, self.row_weights, self.n_classes)

    def _send(self, letter: Labels) -> Letters:
        """Draw a key; encrypt the rows under it, afresh for each party."""
        fields = self._fields
        sizes = *fields.numbers.shape, fields.bits
        key = draw_key(
            self.site,
            self.settings,
            "federated-forest",
            lambda public: integer_layout(public.bits, *sizes),
        )
        layout, self.key = integer_layout(key.public.bits, *sizes), key.to_array()
        weighted = self.row_weights > 0
        max_rows = (LARGEST_CONTENT - SPARE_BYTES) // key.public.ciphertext_bytes
        if int(weighted.sum()) > max_rows:
            rule = f"rows must be <= {max_rows} with labels=paillier and key-bits={key.public.bits}"
            way_out = "secureboost sends its rows in blocks, and labels=encoded sends none"
            raise DataError(f"{rule}, got more: they travel in one letter; {way_out}")
        plaintexts, workers = layout.pack(fields.numbers[weighted]), shared_workers()
        header = key.public.to_array(), sizes[1], fields.bits, np.packbits(weighted)
        return [
            (name, EncryptedLabels(*header, encrypt(key, plaintexts, workers)))
            for name in self.others
        ]

    def split(self, request: SplitRequest, mail: Mail) -> tuple[SplitReply, Letters]:
        """Apply the last level's splits, and choose those of the open nodes for all parties."""
        if len(request.trees):
            self._check_chosen(request)
            self.keep_partitions(mail)
            self.take_splits(request)
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
        trees, nodes = self.open_to(level)
        sums, local, peers = self._read_offers(mail, trees, nodes), self.search(level), self.peers
        best = winners([local if name == self.name else sums[name][1] for name in peers])
        won = np.flatnonzero(best >= 0)
        splits = self.structure.split(trees[won], nodes[won], best[won]).last
        self.chosen, letters = splits, self.make_local_splits(splits)
        if level.last or not len(self.local_indices(splits)):
            letters = []
        for name, (listing, offer) in sums.items():
            owner = peers.index(name)
            nodes_won = won[best[won] == owner]
            if len(nodes_won):
                letters.append((name, self._won(listing, offer, nodes_won)))
                worth = self.worth_of(trees[nodes_won], offer.improvements[nodes_won])
                columns = listing.columns[offer.listed[nodes_won]]
                gained = np.stack((np.full(len(nodes_won), owner), columns, worth), axis=1)
                self.worth = np.concatenate((self.worth, gained))
        return letters

    def _make_last(self, request: FinishRequest) -> None:
        self._check_chosen(request)  # they were made when they were chosen

    def _check_chosen(self, level: LevelSplits) -> None:
        """Check that splits are those this party has chosen."""
        names = ("trees", "nodes", "owners")
        chosen = self.chosen
        if not all(np.array_equal(getattr(chosen, name), getattr(level, name)) for name in names):
            rule = "must be the splits that this party has chosen"
            raise ProtocolError(self.name, type(level).__name__, "nodes", rule)

    def _won(self, listing: Listing, offer: Choices, nodes: Ints) -> Won:
        listed = offer.listed[nodes]
        widths = listing.n_bins[listed] * listing.unordered[listed]
        _, sets = sets_of_rows(widths, offer.rights[nodes])
        return Won(
            self.structure.level, listed, offer.cuts[nodes], offer.defaults[nodes], sets.bits
        )

    def _gains(self, party: str, letter: PartKept) -> Doubles:
        of_party = self.worth[self.worth[:, 0] == self.peers.index(party)]
        columns, gains = of_party[:, 1].astype(np.int64), np.zeros(len(letter.gains))
        if (columns >= len(gains)).any():
            rule = f"must be {columns.max() + 1} columns at least, got {len(gains)}"
            raise ProtocolError(party, "PartKept", "gains", rule)
        np.add.at(gains, columns, of_party[:, 2])
        return gains

    def _read_offers(
        self, mail: Mail, trees: Places, nodes: Places
    ) -> dict[str, tuple[Listing, Choices]]:
        spans, fields = by_tree(trees), self._fields
        of_trees = [self._totals(fields, int(trees[a]), nodes[a:b]) for a, b in spans]
        totals, offers = NodeTotals.joined(of_trees), dict[str, tuple[Listing, Choices]]()
        for name in self.others:
            listing, ciphertexts = self._listing(mail, name, totals)
            sums = self._sums(name, ciphertexts, fields, listing, totals, [a for a, _ in spans[1:]])
            offers[name] = listing, best_cuts(listing, sums, totals, fields.units, self.rules)
        return offers

    def _totals(self, fields: RowFields, tree: int, nodes: Places) -> NodeTotals:
        counts = self.counts[tree]
        drawn = (counts > 0) & (self.row_weights > 0)
        inside = inside_of(self.nodes[tree, : self.n_train], drawn, nodes)
        fewest = self.settings.min_samples_split, self.settings.min_samples_leaf
        return NodeTotals.of(fields, self.targets, counts, inside, fewest)

    def _listing(self, mail: Mail, party: str, totals: NodeTotals) -> tuple[Listing, Array]:
        """The columns that another party has summed, checked against the rows of the nodes."""
        letter = mail.one(ColumnSums, party)
        if letter.level != self.structure.level:
            raise ProtocolError(party, "ColumnSums", "level", "must be the one being split")
        listing = Listing(*(getattr(letter, name) for name in Listing.__slots__))
        if not _fits(listing, totals.large):
            rule = f"must be of {len(totals.large)} open nodes, only those with enough rows"
            raise ProtocolError(party, "ColumnSums", "columns", rule)
        if (listing.per_column(listing.sizes) != totals.sizes[listing.nodes]).any():
            raise ProtocolError(
                party, "ColumnSums", "sizes", "must add up to the rows of each node"
            )
        return listing, letter.ciphertexts

    def _sums(
        self,
        party: str,
        ciphertexts: Array,
        fields: RowFields,
        listing: Listing,
        totals: NodeTotals,
        starts: list[int],
    ) -> Sums:
        """Decrypted sums, checked against the totals of the nodes.

        A ciphertext has sums of one tree only; ``starts`` are the first nodes of all but the first.
        """
        key, columns = PrivateKey.from_array(self.key), totals.is_open[listing.nodes]
        wanted = np.repeat(columns, listing.n_bins + listing.missing)
        n_rows, n_fields = fields.numbers.shape
        layout = integer_layout(key.public.bits, n_rows, n_fields, fields.bits)
        by_tree = np.split(wanted, listing.ends[np.searchsorted(listing.nodes, starts)])
        with as_protocol_error(party, "ColumnSums", "ciphertexts"):
            jobs = [(layout, of_tree) for of_tree in by_tree]
            sums = np.concatenate(read_jobs(key, ciphertexts, jobs, shared_workers()))
        matches = listing.per_column(sums)[columns] == totals.totals[listing.nodes][columns]
        weights = sums[wanted] if self.n_classes else sums[wanted, :1]
        # Weights of rows are not negative, and some are not 0.
        if not (matches.all() and (weights >= 0).all() and (weights.sum(axis=1) > 0).all()):
            rule = "must add up to the labels of each node"
            raise ProtocolError(party, "ColumnSums", "ciphertexts", rule)
        return sums


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
