"""SecureBoost at a passive party: sum ciphertexts it cannot read, split its columns.

Source: Cheng et al. 2019, Algorithm 1. All the party keeps of the model is the lookup table of its
splits: record id -> column, threshold, default side. A round, by message::

    TakeRequest       a block of encrypted gradients, where one does not hold all
    SumRequest        splits of the level above, if any -> rows move down; encrypted sums
    PartitionRequest  splits of a level                 -> which rows the local ones send left
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from clients.inference import answers
from clients.secureboost.columns import Table, check_setup, column_bins, initial_part
from clients.vertical.ciphertexts import EncryptedRows
from clients.vertical.growing import NO_SPLITS, Trees, split_table, store_part
from clients.vertical.party import Aligned
from fedapp.arrays import Flags, Ints
from fedapp.crypto.packing import PRECISION, grouped_layouts
from fedapp.errors import DataError, as_protocol_error
from fedapp.histograms.bins import Codes
from fedapp.histograms.build import slots_by_node, sum_jobs
from fedapp.messages.fields import check_fields
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
    Records,
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
from fedapp.trees.categories import CategorySets
from fedapp.trees.divided import NO_NESTING, Nesting, PassivePart
from fedapp.trees.limits import ONE_TREE, n_levels
from fedapp.trees.losses import Objective
from fedapp.trees.objective import n_outputs
from fedapp.trees.predict import Nodes, Places
from fedapp.trees.structure import each_once_among


@dataclass(frozen=True, slots=True, eq=False)
class Gradients:
    """Which gradients a round sums."""

    round_id: int
    rows: Ints  # that the round sums
    drawn_by: Flags  # (n_parallel, n_rows): which of them each parallel tree sums
    n_outputs: int  # trees come draw by draw, in each one for every output
    columns: Ints  # of this party
    n_wanted: int  # ciphertexts

    def drawn_for(self, tree: int) -> Flags:
        """Which of the rows a tree has drawn."""
        drawn: Flags = self.drawn_by[tree // self.n_outputs]
        return drawn


@role
class Passive(Aligned):
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
    settings: SetupRequest
    table: Table
    encrypted: EncryptedRows | None = None  # those of the round, under the key of the run
    last_answers: Nodes | None = None  # about the initial model; see ``answers``
    trees: Trees  # of the round, and all local splits
    nesting: Nesting  # where the local splits are in the trees
    gradients: Gradients
    splits: Splits | None = None  # of the level above, until the rows have moved

    def setup(self, request: SetupRequest, mail: Mail) -> tuple[SentReply, Letters]:
        """Check the rows' order, code the categories, bin the columns of the training rows."""
        check_setup(self.name, request)
        self.check_order(mail)
        self.settings, table = request, Table.of(self, request.max_bin)
        widths = table.cuts.widths
        kind = np.uint8 if int(widths.max(initial=0)) < 256 else np.uint16
        # A missing value's bin is one more, the column's last.
        codes: Codes = np.where(table.codes == table.missing_code, widths, table.codes).astype(kind)
        self.table = replace(table, codes=codes)
        part, digest = initial_part(self, request.init_model), np.empty(0, dtype=np.uint8)
        self.nesting = part.nesting if part else NO_NESTING
        self.trees = Trees.of(self, 0, part.lookup if part else NO_SPLITS)
        if part is not None:
            digest = self.part_digest(request.init_model)
        letter = column_bins(self, self.table, request, self.trees.lookup.n_records, digest)
        return SentReply(), [(self.active, letter)]

    def answer(self, request: AnswerRequest, mail: Mail) -> tuple[SentReply, Letters]:
        """Sides of the rows asked about, by this party's splits of the initial model."""
        active, model = self.active, self.settings.init_model
        self._meet(mail)
        questions = mail.only(Questions, active)
        if questions is None:
            return SentReply(), []
        check_fields(active, questions, ("records", model, "must be of init-model, got none"))
        part = self.party_part(model)
        bits, _, self.last_answers = answers(self, part, questions, self.last_answers)
        return SentReply(), [(active, Answers(self.part_digest(model), bits))]

    def _meet(self, mail: Mail) -> None:
        # The key comes with whatever message is the first.
        letter, active, n_train = mail.only(PublicKey, self.active), self.active, self.n_train
        if letter is None and self.encrypted is not None:
            return
        letter = mail.one(PublicKey, active)
        if letter.most_rows != n_train:
            raise DataError(f"rows must be {n_train}, as aligned, got {letter.most_rows}")
        # Slots no wider than the run needs: each of their bits can show which bin a row is in. Only
        # the active party knows how many classes there are.
        n_parallel, got = self.settings.num_parallel_tree, letter.n_outputs
        objective, precision = cast(Objective, self.settings.objective), letter.precision
        n_pairs = n_parallel * n_outputs(objective, got // n_parallel)
        is_due = f"must be {PRECISION}, got {precision}"
        check_fields(
            active,
            letter,
            ("letter", self.encrypted is None, "must come once"),
            ("precision", precision == PRECISION, is_due),
            ("n_outputs", got == n_pairs, f"must be {n_pairs}, got {got}"),
        )
        self.encrypted = EncryptedRows.none(
            self, letter, self.settings, lambda key: grouped_layouts(key.bits, n_train, got)
        )

    # A round

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
            round_id, n_taken = self.gradients.round_id, len(self._encrypted)
            is_next = (more.round_id, more.start) == (round_id, n_taken)
            rule = f"must be {n_taken}, the first of round {round_id} that is missing"
            check_fields(self.active, more, ("start", is_next, rule))
            self._keep_block(more)

    def _begin(self, letter: EncryptedGradients) -> None:
        """Start a round: all rows at the roots, the first block of gradients."""
        active, has_one_tree = self.active, self.settings.multi_strategy == ONE_TREE
        shape = self.settings.num_parallel_tree, self.n_train
        bits = sent_bits(active, "EncryptedGradients", "drawn", letter.drawn, math.prod(shape))
        is_drawn = bits.reshape(shape)
        n_columns = self.table.cuts.n_columns
        ascends = (letter.columns < n_columns).all() and (np.diff(letter.columns) > 0).all()
        rule = f"must be < {n_columns} and ascending, each once"
        check_fields(active, letter, ("columns", ascends, rule))
        # Also where a round has no column of this party: a draw is of the whole run's rows.
        n_drawn, fewest = int(is_drawn.sum(axis=1).min()), self.config.min_rows
        rule = f"must be at least {fewest} rows (min-rows of {self.name}), got {n_drawn}; draw more"
        check_fields(active, letter, ("drawn", n_drawn >= fewest, rule))
        rows = np.flatnonzero(is_drawn.any(axis=0))
        layouts = self._encrypted.layouts
        n_pairs = sum(layout.n_outputs for layout in layouts)
        self.gradients = Gradients(
            letter.round_id,
            rows,
            is_drawn[:, rows],
            n_pairs // shape[0],
            letter.columns,
            len(layouts) * len(rows) if len(letter.columns) else 0,
        )
        self.encrypted = replace(self._encrypted, blocks=())
        self._keep_block(letter)
        self._nest()
        self.trees = Trees.of(self, 1 if has_one_tree else n_pairs, self.trees.lookup)

    def _keep_block(self, letter: EncryptedGradients | MoreGradients) -> None:
        n_wanted, n_sent = self.gradients.n_wanted, len(letter.ciphertexts)
        n_left = n_wanted - len(self._encrypted)
        rule = f"must be {n_left} at most, of {n_wanted}, got {n_sent}"
        check_fields(self.active, letter, ("ciphertexts", n_sent <= n_left, rule))
        self.encrypted = self._encrypted.plus(self.active, letter)

    @property
    def _encrypted(self) -> EncryptedRows:
        assert self.encrypted is not None
        return self.encrypted

    def sum_nodes(self, request: SumRequest, mail: Mail) -> tuple[SentReply, Letters]:
        """Algorithm 1: start the round if it is new, else apply the last level's splits; sum."""
        active, letters = self.active, Letters()
        is_new = any(map(self.follows, (SetupRequest, AnswerRequest, TakeRequest)))
        if is_new or mail.only(EncryptedGradients, active):
            self._take(mail)
            n_taken, n_wanted = len(self._encrypted), self.gradients.n_wanted
            rule = f"must be {n_wanted}, got {n_taken}"
            check_fields(active, EncryptedGradients, ("ciphertexts", n_taken == n_wanted, rule))
            wanted = self.trees.structure.open_nodes
        else:
            if self.splits is None:
                letters = self._take_splits(mail.one(Splits, active))
            assert self.splits is not None
            self.trees = self.trees.received(mail).split(self.splits, active)
            wanted, self.splits = (self.splits.wanted_trees, self.splits.wanted_nodes), None
        return SentReply(), [*letters, (active, self.encrypted_sums(*wanted))]

    def encrypted_sums(self, trees: Places, nodes: Places) -> EncryptedSums:
        """Sums of the wanted nodes, job by job; see ``fedapp.histograms.build.sum_jobs``."""
        of_round, encrypted = self.gradients, self._encrypted
        level = self.trees.structure.level
        widths = self.table.cuts.widths[of_round.columns]
        offsets = np.concatenate(([0], np.cumsum(widths + 1)))  # with the bins of missing values
        codes = np.ascontiguousarray(self.table.codes[of_round.rows][:, of_round.columns])
        inside = self.trees.nodes[:, of_round.rows]  # (n_trees, n_drawn)
        # Bins of missing values are counted in the clear, so their encrypted sums are not sent.
        present = np.ones(offsets[-1], dtype=bool)
        present[offsets[1:] - 1] = False
        packed = [np.empty((0, encrypted.public_key.ciphertext_bytes), dtype=np.uint8)]
        has_one_tree = self.settings.multi_strategy == ONE_TREE
        n_outputs = [layout.n_outputs for layout in encrypted.layouts if len(widths)]
        jobs = sum_jobs(n_outputs, level, trees, nodes, has_one_tree)
        for layout_id, tree, wanted in jobs:
            slots = slots_by_node(inside[tree], wanted)[inside[tree]]  # -1: in no wanted node
            if level:  # at the root, one job sums for all trees of a group
                slots[~of_round.drawn_for(tree)] = -1
            packed.append(encrypted.sums(codes, offsets, slots, len(wanted), layout_id, present))
        missing = np.zeros((len(nodes), len(widths)), dtype=np.int32)
        rows, absent = np.nonzero(codes == widths)
        for tree in np.unique(trees):
            # Rows with a missing value, by node and column.
            counts = np.zeros((int((trees == tree).sum()), len(widths)), dtype=np.int32)
            slots = slots_by_node(inside[tree], nodes[trees == tree])[inside[tree][rows]]
            slots[~of_round.drawn_for(tree)[rows]] = -1
            np.add.at(counts, (slots[slots >= 0], absent[slots >= 0]), 1)
            missing[trees == tree] = counts
        return EncryptedSums(of_round.round_id, level, missing, np.concatenate(packed))

    def partition(self, request: PartitionRequest, mail: Mail) -> tuple[SentReply, Letters]:
        """Make the splits won; after the last level, a party may have won none."""
        self.trees = self.trees.received(mail)
        splits = mail.only(Splits, self.active)
        return SentReply(), [] if splits is None else self._take_splits(splits)

    def _take_splits(self, letter: Splits) -> Letters:
        """Store a level's splits; make the local ones, and send their sides to the others."""
        active, columns = self.active, letter.columns
        self._check_splits(letter)
        self.splits = letter
        if not len(columns):
            return []
        widths = self.table.cuts.categories[columns]
        with as_protocol_error(active, "Splits", "set_bits"):
            sets = CategorySets(letter.set_bits, widths[widths > 0])
        splits = self.table.splits(columns, letter.first_rights, letter.defaults, sets)
        self.trees = self.trees.made(letter, splits, self.values)
        partition = self.trees.partition
        # Rows do not move by the last level's splits, so only the active party needs these.
        return self.to_others(partition) if len(letter.wanted_nodes) else [(active, partition)]

    def _check_splits(self, letter: Splits) -> None:
        columns, widths = letter.columns, self.table.cuts.widths
        level, plan = self.trees.structure.level + 1, planned(self.site.store)
        most = n_levels(self.settings.max_depth, self.settings.max_leaves)
        self.trees.check(letter, self.active)
        widest = np.bincount(letter.trees).max(initial=0)
        wanted = letter.wanted_trees, letter.wanted_nodes
        fits = (
            self.splits is None
            and letter.level == level <= most
            and widest < (plan["max_leaves"] or np.inf)
            and len(columns) == len(self.trees.local(letter))
            and bool((columns < len(widths)).all())
            and bool((letter.first_rights <= widths[columns]).all())
            and each_once_among(wanted, self.trees.after(letter).open_nodes)
            # The last level is not split, so nothing of it is summed.
            and (level < most or not len(letter.wanted_nodes))
        )
        check_fields(self.active, letter, ("columns", fits, "must be of this party and this level"))

    def _nest(self) -> None:
        """Note, after a round, which local split each of its local splits is under."""
        first, last = len(self.nesting.under), self.splits  # by which no row has moved
        self.splits = None
        if last is None and not self.trees.structure.level:
            return
        nesting = Nesting.of(self.trees.records(last, first), self.trees.lookup.n_records)
        # Earlier rounds count only if they have local splits; a model may have lost its last.
        first_tree = 1 + int(self.nesting.trees.max(initial=-1))
        self.nesting = self.nesting.plus(first_tree + nesting.trees[first:], nesting.under[first:])

    def hand_over(self, request: HandOverRequest, mail: Mail) -> tuple[SentReply, Letters]:
        """Store the lookup table, drop the rows; send the table if the site allows it."""
        self._nest()
        lookup = self.trees.lookup
        digest = store_part(self, PassivePart, lookup, nesting=self.nesting)
        letters: Letters = [(self.active, PartKept(digest))]
        if self.config.allows_export:
            letters.append((self.active, Records(**split_table(self, lookup))))
        self.end()
        return SentReply(), letters
