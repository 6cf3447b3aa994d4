"""SecureBoost at a passive party: sum ciphertexts it cannot read, split its columns.

Source: Cheng et al. 2019, Algorithm 1. All the party keeps of the model is the lookup table of its
splits: record id -> column, threshold, default side. A round, by message::

    TakeRequest       a block of encrypted gradients, where one does not hold all
    SumRequest        splits of the level above, if any -> rows move down; encrypted sums
    PartitionRequest  splits of a level                 -> which rows the local ones send left
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import cast

import numpy as np
import numpy.typing as npt

from clients.inference import answers
from clients.secureboost.shared import Party
from clients.vertical.party import Bytes, Ints
from fedapp.crypto.lanes import ring_of
from fedapp.crypto.packing import PRECISION, PairLayout, grouped_layouts
from fedapp.crypto.paillier import check_ciphertexts
from fedapp.crypto.paillier_keys import PublicKey as Key
from fedapp.crypto.sums import pack_sums, sum_rows
from fedapp.crypto.workers import shared_workers
from fedapp.errors import DataError, ProtocolError, as_protocol_error
from fedapp.histograms.bins import digitise
from fedapp.histograms.build import slots_by_node, sum_jobs
from fedapp.messages.inference import Answers, Questions
from fedapp.messages.secureboost import (
    AnswerRequest,
    EncryptedGradients,
    EncryptedSums,
    HandOverRequest,
    MoreGradients,
    PartitionRequest,
    PartKept,
    PublicKey,
    SetupRequest,
    Splits,
    SumRequest,
    TakeRequest,
)
from fedapp.messages.vertical import OrderRequest, SentReply
from fedapp.site.account import planned
from fedapp.site.mail import Letters, Mail
from fedapp.site.roles import Order, role
from fedapp.site.store import sent_bits
from fedapp.trees.divided import Nesting, PassivePart
from fedapp.trees.grow import each_once_among
from fedapp.trees.losses import Objective
from fedapp.trees.model import LEAF
from fedapp.trees.objective import n_outputs
from fedapp.trees.predict import Places
from fedapp.trees.sets import CategorySets
from fedapp.trees.size import n_levels

Bools = npt.NDArray[np.bool_]


@role
class Passive(Party):
    """State of a passive party."""

    title = "a passive party"
    order = Order(
        {
            OrderRequest: {SetupRequest},
            SetupRequest: {AnswerRequest, TakeRequest, SumRequest, HandOverRequest},
            AnswerRequest: {AnswerRequest, TakeRequest, SumRequest, HandOverRequest},
            TakeRequest: {TakeRequest, SumRequest},
            SumRequest: {TakeRequest, SumRequest, PartitionRequest, HandOverRequest},
            PartitionRequest: {TakeRequest, SumRequest, HandOverRequest},
        }
    )
    key: PublicKey | None = None  # of the run, and how rows are packed under it
    # The round in progress
    round_id: int
    drawn: Ints  # rows that the round sums
    drawn_by: Bools  # (n_parallel, n_drawn): which of them each parallel tree sums
    drawn_columns: Ints  # of this party
    blocks: tuple[Bytes, ...] = ()  # its ciphertexts, layout by layout
    wanted_trees: Places  # of the nodes to sum
    wanted_nodes: Places
    splits: Splits | None = None  # of the level above, until the rows have moved

    def setup(self, request: SetupRequest, mail: Mail) -> tuple[SentReply, Letters]:
        """Check the rows' order, code the categories, bin the columns of the training rows."""
        self.accept(request)
        self.check_order(mail)
        train = self.cut_columns()
        codes, missing_code = digitise(train, self.cuts)
        widths = self.cuts.widths
        kind = np.uint8 if int(widths.max(initial=0)) < 256 else np.uint16
        # A missing value's bin is one more, the column's last.
        self.codes = np.where(codes == missing_code, widths, codes).astype(kind)
        return SentReply(), [(self.active, self.column_bins(self.begin_lookup()))]

    def answer(self, request: AnswerRequest, mail: Mail) -> tuple[SentReply, Letters]:
        """Sides of the rows asked about, by this party's splits of the initial model."""
        active, model = self.active, self.settings.init_model
        self._meet(mail)
        questions = mail.only(Questions, active)
        if questions is None:
            return SentReply(), []
        if not model:
            raise ProtocolError(active, "Questions", "records", "must be of init-model, got none")
        bits, _ = answers(self, self.party_part(model), questions)
        return SentReply(), [(active, Answers(self.part_digest(model), bits))]

    def take(self, request: TakeRequest, mail: Mail) -> tuple[SentReply, Letters]:
        """Start a round with the first block of its gradients, or store another block."""
        self._take(mail)
        return SentReply(), []

    def _take(self, mail: Mail) -> None:
        if self.follows(SetupRequest) or self.follows(AnswerRequest):
            self._meet(mail)
            self.last_answers = None  # no row of the initial model is asked about any more
        if not self.follows(TakeRequest):
            self._begin(mail.one(EncryptedGradients, self.active))
        elif more := mail.only(MoreGradients, self.active):
            n_taken = sum(map(len, self.blocks))
            if (more.round_id, more.start) != (self.round_id, n_taken):
                rule = f"must be {n_taken}, the first of round {self.round_id} that is missing"
                raise ProtocolError(self.active, "MoreGradients", "start", rule)
            self._keep_block(more)

    def sum_nodes(self, request: SumRequest, mail: Mail) -> tuple[SentReply, Letters]:
        """Algorithm 1: start the round if it is new, else apply the last level's splits; sum."""
        active, letters = self.active, Letters()
        is_new = any(map(self.follows, (SetupRequest, AnswerRequest, TakeRequest)))
        if is_new or mail.only(EncryptedGradients, active):
            self._take(mail)
            if (n_taken := sum(map(len, self.blocks))) != self._n_wanted:
                rule = f"must be {self._n_wanted}, got {n_taken}"
                raise ProtocolError(active, "EncryptedGradients", "ciphertexts", rule)
        else:
            if self.splits is None:
                letters = self._take_splits(mail.one(Splits, active))
            assert self.splits is not None
            self.keep_partitions(mail)
            self.take_splits(self.splits, active)
            self.splits = None
        return SentReply(), [*letters, (active, self.encrypted_sums())]

    def partition(self, request: PartitionRequest, mail: Mail) -> tuple[SentReply, Letters]:
        """Make the splits won; after the last level, a party may have won none."""
        self.keep_partitions(mail)
        splits = mail.only(Splits, self.active)
        return SentReply(), [] if splits is None else self._take_splits(splits)

    def hand_over(self, request: HandOverRequest, mail: Mail) -> tuple[SentReply, Letters]:
        """Store the lookup table, drop the rows; send the table if the site allows it."""
        self._nest()
        part = PassivePart(**self.part_fields(), lookup=self.lookup, nesting=self.nesting)
        letters: Letters = [(self.active, PartKept(self.store_part(part)))]
        if self.config.allows_export:
            letters.append((self.active, self.table_records()))
        self.end()
        return SentReply(), letters

    def _meet(self, mail: Mail) -> None:
        # The key comes with whatever message is the first.
        letter, active, n_train = mail.only(PublicKey, self.active), self.active, self.n_train
        if letter is None and self.key is not None:
            return
        letter = mail.one(PublicKey, active)
        if letter.most_rows != n_train:
            raise DataError(f"rows must be {n_train}, as aligned, got {letter.most_rows}")
        if self.key is not None:
            raise ProtocolError(active, "PublicKey", "letter", "must come once")
        # Slots no wider than the run needs: each of their bits can show which bin a row is in. Only
        # the active party knows how many classes there are.
        n_classes = letter.n_outputs // self.n_parallel
        n_pairs = self.n_parallel * n_outputs(cast(Objective, self.settings.objective), n_classes)
        for field, due in (("precision", PRECISION), ("n_outputs", n_pairs)):
            if (got := getattr(letter, field)) != due:
                raise ProtocolError(active, "PublicKey", field, f"must be {due}, got {got}")
        self.read_key(
            letter,
            letter.n,
            self.settings,
            lambda n: grouped_layouts(n.bits, n_train, letter.n_outputs, letter.precision),
        )
        self.key = letter

    def _keys(self) -> tuple[Key, tuple[PairLayout, ...]]:
        """The public key, and layouts of packed gradients under it."""
        letter = self.key
        assert letter is not None
        key = Key.from_array(letter.n)
        return key, grouped_layouts(key.bits, self.n_train, letter.n_outputs, letter.precision)

    def _begin(self, letter: EncryptedGradients) -> None:
        """Start a round: all rows at the roots, the first block of gradients."""
        active, n_train = self.active, self.n_train
        assert self.key is not None
        shape = self.n_parallel, n_train
        bits = sent_bits(active, "EncryptedGradients", "drawn", letter.drawn, math.prod(shape))
        is_drawn = bits.reshape(shape)
        n_columns = self.cuts.n_columns
        if (letter.columns >= n_columns).any() or (np.diff(letter.columns) < 1).any():
            rule = f"must be < {n_columns} and ascending, each once"
            raise ProtocolError(active, "EncryptedGradients", "columns", rule)
        # Also where a round has no column of this party: a draw is of the whole run's rows.
        n_drawn, fewest = int(is_drawn.sum(axis=1).min()), self.config.min_rows
        if n_drawn < fewest:
            rule = f"must be at least {fewest} rows (min-rows of {self.name}), got {n_drawn}"
            raise ProtocolError(active, "EncryptedGradients", "drawn", f"{rule}; draw more")
        self.drawn, self.drawn_columns = np.flatnonzero(is_drawn.any(axis=0)), letter.columns
        self.drawn_by = is_drawn[:, self.drawn]
        self.blocks = ()
        self._keep_block(letter)
        self._nest()
        self.begin_trees(1 if self.has_one_tree else self.key.n_outputs)
        self.round_id = letter.round_id
        self.wanted_trees, self.wanted_nodes = self.structure.open_nodes

    @property
    def _n_wanted(self) -> int:
        return len(self.drawn) * len(self._keys()[1]) if len(self.drawn_columns) else 0

    # Each block is a file of the site's state, so no array holds all of them.
    def _keep_block(self, letter: EncryptedGradients | MoreGradients) -> None:
        kind, n_wanted = type(letter).__name__, self._n_wanted
        n_left = n_wanted - sum(map(len, self.blocks))
        if len(letter.ciphertexts) > n_left:
            rule = f"must be {n_left} at most, of {n_wanted}, got {len(letter.ciphertexts)}"
            raise ProtocolError(self.active, kind, "ciphertexts", rule)
        with as_protocol_error(self.active, kind, "ciphertexts"):
            check_ciphertexts(self._keys()[0], letter.ciphertexts)
        self.blocks = (*self.blocks, letter.ciphertexts)

    def _take_splits(self, letter: Splits) -> Letters:
        """Store a level's splits; make the local ones, and send their sides to the others."""
        active, columns = self.active, letter.columns
        self._check_splits(letter)
        self.splits = letter
        self.wanted_trees, self.wanted_nodes = letter.wanted_trees, letter.wanted_nodes
        if not len(columns):
            return []
        widths = self.cuts.categories[columns]
        with as_protocol_error(active, "Splits", "set_bits"):
            sets = CategorySets(letter.set_bits, widths[widths > 0])
        partition = self.make_splits(letter, columns, letter.first_rights, letter.defaults, sets)
        # Rows do not move by the last level's splits, so only the active party needs these.
        return self.to_others(partition) if len(letter.wanted_nodes) else [(active, partition)]

    def _check_splits(self, letter: Splits) -> None:
        columns, widths = letter.columns, self.cuts.widths
        level, plan = self.structure.level + 1, planned(self.site.store)
        most = n_levels(self.settings.max_depth, self.settings.max_leaves)
        self.check_splits(letter, self.active)
        widest = np.bincount(letter.trees).max(initial=0)
        split = self.structure.split(letter.trees, letter.nodes, letter.owners)
        wanted = letter.wanted_trees, letter.wanted_nodes
        fits = (
            self.splits is None
            and letter.level == level <= most
            and widest < (plan["max_leaves"] or np.inf)
            and len(columns) == len(self.local_indices(letter))
            and bool((columns < len(widths)).all())
            and bool((letter.first_rights <= widths[columns]).all())
            and each_once_among(wanted, split.last.children())
            # The last level is not split, so nothing of it is summed.
            and (level < most or not len(letter.wanted_nodes))
        )
        if not fits:
            rule = "must be of this party and this level"
            raise ProtocolError(self.active, "Splits", "columns", rule)

    def _nest(self) -> None:
        """Note, after a round, which local split each of its local splits is under."""
        structure, first = self.structure, len(self.nesting.under)
        if self.splits is not None:  # of the last level, by which no row has moved
            last, self.splits = self.splits, None
            structure = structure.split(last.trees, last.nodes, last.owners)
        splits = structure.splits
        if not len(splits.trees):
            return
        ids = np.where(splits.owners == self.number, first + splits.records, -1)
        lefts = splits.spread(splits.lefts, structure.n_nodes, LEAF)
        trees = zip(lefts, splits.spread(ids, structure.n_nodes, -1), strict=True)
        nesting = Nesting.of(trees, self.lookup.n_records)
        # Earlier rounds count only if they have local splits; a model may have lost its last.
        first_tree = 1 + int(self.nesting.trees.max(initial=-1))
        self.nesting = self.nesting.plus(first_tree + nesting.trees[first:], nesting.under[first:])

    def encrypted_sums(self) -> EncryptedSums:
        """Sums of the wanted nodes, job by job; see ``fedapp.histograms.build.sum_jobs``."""
        (key, layouts), columns = self._keys(), self.drawn_columns
        level = self.structure.level
        trees, nodes = self.wanted_trees, self.wanted_nodes
        widths = self.cuts.widths[columns]
        offsets = np.concatenate(([0], np.cumsum(widths + 1)))  # with the bins of missing values
        codes = np.ascontiguousarray(self.codes[self.drawn][:, columns])
        inside = self.nodes[:, self.drawn]  # (n_trees, n_drawn)
        # Bins of missing values are counted in the clear, so their encrypted sums are not sent.
        present = np.ones(offsets[-1], dtype=bool)
        present[offsets[1:] - 1] = False
        workers, products = shared_workers(), ring_of(key.n_squared)
        packed = [np.empty((0, key.ciphertext_bytes), dtype=np.uint8)]
        has_one_tree = self.has_one_tree
        jobs = sum_jobs(layouts, level, trees, nodes, has_one_tree) if len(columns) else ()
        for layout_id, tree, wanted in jobs:
            slots = slots_by_node(inside[tree], wanted)[inside[tree]]  # -1: in no wanted node
            if level:  # at the root, one job sums for all trees of a group
                slots[~self._drawn_for(tree)] = -1
            # Ciphertexts are stored layout by layout. Their product encrypts the sum.
            sums, first = products.ones(len(wanted) * int(offsets[-1])), 0
            start, end = layout_id * len(slots), (layout_id + 1) * len(slots)
            for block in blocks_of(self.blocks, start, end):
                part = slice(first, first + len(block))
                of_block = sum_rows(
                    key, block, codes[part], offsets, slots[part], len(wanted), workers
                )
                sums = products.multiply(sums, of_block)
                first += len(block)
            present_sums = sums[np.tile(present, len(wanted))]
            packed.append(pack_sums(key, present_sums, layouts[layout_id], workers))
        missing = np.zeros((len(nodes), len(columns)), dtype=np.int32)
        rows, absent = np.nonzero(codes == widths)
        for tree in np.unique(trees):
            # Rows with a missing value, by node and column.
            counts = np.zeros((int((trees == tree).sum()), len(columns)), dtype=np.int32)
            slots = slots_by_node(inside[tree], nodes[trees == tree])[inside[tree][rows]]
            slots[~self._drawn_for(tree)[rows]] = -1
            np.add.at(counts, (slots[slots >= 0], absent[slots >= 0]), 1)
            missing[trees == tree] = counts
        return EncryptedSums(self.round_id, level, missing, np.concatenate(packed))

    def _drawn_for(self, tree: int) -> Bools:
        """Which of the round's rows a tree has drawn: trees of an output come one after the other,
        for each parallel tree those of all outputs."""
        assert self.key is not None
        n_outputs = self.key.n_outputs // self.n_parallel
        drawn: Bools = self.drawn_by[0 if self.has_one_tree else tree // n_outputs]
        return drawn


def blocks_of(blocks: tuple[Bytes, ...], first: int, last: int) -> Iterator[Bytes]:
    """Rows ``first`` to ``last`` of some blocks, block by block."""
    start = 0
    for block in blocks:
        low, high = max(first - start, 0), min(last - start, len(block))
        if low < high:
            yield block[low:high]
        start += len(block)
