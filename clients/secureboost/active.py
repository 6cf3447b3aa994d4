"""SecureBoost at the active party: it starts rounds, chooses splits, and stores the model.

Source: Cheng et al. 2019, Algorithm 2. Trees grow as XGBoost's do over the joint columns of all
parties; of other parties' columns this one knows only the number of bins. A round, by message::

    BeginRequest    finish the last round; draw rows and columns -> encrypted gradients
    EncryptRequest  another block of these, if one is not enough
    SplitRequest    sums of a level                              -> its splits

Departures: the paper encrypts gradient and hessian separately, here both share a ciphertext; only
the smaller child of each pair is summed, the other is the difference to the parent. Rules for ties
and missing values are XGBoost's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import numpy.typing as npt

from clients.inference import Traversal
from clients.scoring import compare_with_local, interval_fields, score_arrays
from clients.secureboost.columns import (
    ConfiguredConstraints,
    Joint,
    Table,
    check_bins,
    check_setup,
    column_bins,
    initial_part,
)
from clients.secureboost.model import Boosted, Scores, Target, joined, margin_column, trimmed
from clients.secureboost.round import NO_ROUND, Claim, Claims, Round, Unsent, by_tree, drawn_pairs
from clients.vertical.ciphertexts import Cipher
from clients.vertical.growing import NO_SPLITS, Trees, split_table, store_active_part
from clients.vertical.party import Aligned, Bytes
from fedapp import metrics
from fedapp.crypto.packing import PRECISION, FixedPoint, grouped_layouts
from fedapp.errors import ConfigError
from fedapp.histograms.build import (
    Histogram,
    build_all_histograms,
    build_vector_histograms,
    sum_jobs,
)
from fedapp.histograms.claimed import words_of
from fedapp.messages.fields import Array, check_fields, check_sizes
from fedapp.messages.secureboost import (
    MOST_PAIRS,
    BeginReply,
    BeginRequest,
    ColumnBins,
    EncryptedGradients,
    EncryptedSums,
    EncryptRequest,
    FinishReply,
    FinishRequest,
    MoreGradients,
    PartKept,
    PublicKey,
    Records,
    SetupRequest,
    SplitReply,
    SplitRequest,
    Splits,
    WalkReply,
    WalkRequest,
)
from fedapp.messages.vertical import MatchRequest, SentReply, block_rows
from fedapp.metrics.names import UNCALIBRATED
from fedapp.records.document import to_text
from fedapp.site.account import check_within
from fedapp.site.mail import Letters, Mail
from fedapp.site.roles import Order, role
from fedapp.trees.calibration import Calibration, calibrated, fit
from fedapp.trees.categories import NO_SET, CategorySets, auto_child_weight
from fedapp.trees.divided import ActivePart
from fedapp.trees.grow import Growth, without_padding
from fedapp.trees.limits import Limits, MultiStrategy
from fedapp.trees.model import Ensemble, check_range, importance
from fedapp.trees.objective import has_quantile_leaves
from fedapp.trees.rounds import n_leaves
from fedapp.trees.shown import not_counted
from fedapp.trees.structure import Routes

DUE = "must be due: blocks of gradients and levels of trees come one after the other"
Sums = tuple[Histogram, Array]  # of a party, by node and bin; missing rows, by node and column


@role
class Active(Aligned):
    """State of the active party."""

    title = "the active party"
    order = Order(
        {
            MatchRequest: {SetupRequest},
            SetupRequest: {WalkRequest, BeginRequest},
            WalkRequest: {WalkRequest, BeginRequest},
            BeginRequest: {EncryptRequest, SplitRequest, FinishRequest},
            EncryptRequest: {EncryptRequest, SplitRequest, FinishRequest},
            SplitRequest: {SplitRequest, BeginRequest},
        }
    )
    settings: SetupRequest
    table: Table
    target: Target
    cipher: Cipher
    traversal: Traversal | None = None  # of rows on their way down the initial model
    joint: Joint
    boosted: Boosted  # the model so far
    trees: Trees  # of the round, and all local splits
    round: Round = NO_ROUND  # in progress

    def setup(self, request: SetupRequest, mail: Mail) -> tuple[SentReply, Letters]:
        """Check the rows' order, code the labels, bin the columns, draw and test the key."""
        check_setup(self.name, request)
        self.check_order(mail)
        self.settings, n_rows = request, self.n_train
        self.target, score = Target.of(self, request)
        self.labels, n_pairs = None, self.target.n_pairs
        self.boosted = self.target.begun(self, request, score)
        self.table = Table.of(self, request.max_bin)
        part = initial_part(self, request.init_model)
        self.trees = Trees.of(self, 0, part.lookup if part else NO_SPLITS)
        ConfiguredConstraints.of(self.name, request)  # raises before anything is sent
        if n_pairs > MOST_PAIRS:
            rule = f"must be at most {MOST_PAIRS // self.target.n_outputs} with this number of "
            raise ConfigError(f"num-parallel-tree {rule}classes, got {request.num_parallel_tree}")
        self.cipher = Cipher.drawn(
            self, request, lambda key: grouped_layouts(key.bits, n_rows, n_pairs)
        )
        if isinstance(part, ActivePart):
            self.traversal = Traversal.of(part, len(self.ids), 0)
        letter = PublicKey(self.cipher.public_key.to_array(), n_pairs, n_rows, PRECISION)
        return SentReply(), self.to_others(letter)

    def walk(self, request: WalkRequest, mail: Mail) -> tuple[WalkReply, Letters]:
        """Route the rows down the initial model as far as answers and local splits allow."""
        traversal = self.traversal
        check_fields(self.name, request, ("step", traversal is not None, DUE))
        assert traversal is not None
        part = self.active_part(self.settings.init_model)
        if self.follows(SetupRequest):
            self._meet(mail)
            for name in self.others:
                part.check(name, mail.one(ColumnBins, name).part)
        else:
            traversal = traversal.answered(part, mail)
        traversal, letters = traversal.ask_on(part, self.values, 0)
        self.traversal = traversal if letters else None
        if not letters:
            # Leaf values of the initial model are the first margins.
            assert isinstance(part.model, Ensemble)
            margins, of_trees = np.array(self.boosted.margins), part.model.trees
            for number, leaves in enumerate(traversal.reached()):
                margins[:, part.model.outputs_of(number)] += of_trees[number]["value"][leaves]
            self.boosted = replace(self.boosted, margins=margins)
        return WalkReply(not letters, self.boosted.n_rounds, len(part.model.trees)), letters

    def _meet(self, mail: Mail) -> None:
        """Check and join the parties' descriptions of their columns."""
        settings, wanted = self.settings, ConfiguredConstraints.of(self.name, self.settings)
        n_records, none = self.trees.lookup.n_records, np.empty(0, dtype=np.uint8)
        letters = {self.name: column_bins(self, self.table, settings, n_records, none)}
        for name in self.others:
            letters[name] = mail.one(ColumnBins, name)
            most = self.config.most_columns
            check_bins(name, letters[name], wanted, settings.max_bin, most, self.name)
        self.joint = Joint.of({name: letters[name] for name in self.peers}, wanted)
        if settings.auto_child_weight:
            weight = auto_child_weight(self.joint.cuts.categories.tolist())
            self.settings = replace(settings, min_child_weight=weight)
        self.joint.check(self.target.objective, self.target.has_one_tree)
        n_made = np.array(list(self.joint.n_records.values()))
        self.boosted = replace(self.boosted, n_made=n_made)

    # A round

    def begin_round(self, request: BeginRequest, mail: Mail) -> tuple[BeginReply, Letters]:
        """Finish the round in progress, grow rounds without passive columns, start another."""
        is_due = self.traversal is None and not self.round.grows
        check_fields(self.name, request, ("step", is_due, DUE))
        n_rounds = request.n_rounds - self.boosted.first_round
        check_within(self.config, self.site.store, "BeginRequest", "n_rounds", n_rounds, "rounds")
        if self.follows(SetupRequest):
            self._meet(mail)
        done, letters = list[Scores](), Letters()
        if self.round.growth is not None:
            self.apply_splits(mail)
            done.append(self._finish_round())
        while self.boosted.n_rounds < request.n_rounds and not letters:
            letters = self._new_round()
            if not letters:
                # Only the active party has columns in this round.
                growth = self.growing()
                while growth.growing:
                    self._send_splits(growth, *self._choose(growth, {}))
                    self.apply_splits(Mail(self.name, []))
                done.append(self._finish_round())
        trees, unsent = self.boosted.trees, self.round.unsent
        reply = BeginReply(
            begun=bool(letters),
            n_blocks=unsent.n_blocks if unsent else 0,
            n_trees=len(trees),
            n_leaves=n_leaves(map(without_padding, trees[-self.target.width :])),
            score_names=tuple(done[0]["train"]) if done else (),
            train_scores=_rows(done, "train"),
            valid_scores=_rows(done, "valid"),
        )
        return reply, letters

    def _new_round(self) -> Letters:
        """Start a round; letters with the first gradients, none if no passive column is drawn."""
        settings, number = self.settings, self.boosted.n_rounds
        n_parallel, width = settings.num_parallel_tree, self.target.width
        pairs = drawn_pairs(self, self.target.gradients(self.boosted.margins), settings, number)
        n_columns = self.joint.cuts.n_columns
        limits = Limits(settings.seed, number)
        allowed = limits.of_trees(settings.colsample_bytree, width, n_columns)
        if number < settings.first_trees:
            owners, _ = self.joint.owners(np.arange(n_columns))
            allowed = allowed & (owners == self.trees.number)
        gradients = np.ascontiguousarray(pairs.transpose(1, 0, 2))
        self.round = Round(number, gradients, allowed, n_parallel=n_parallel)
        growth = self.growing()
        growth.set_roots(pairs.sum(axis=0, dtype=np.float64).reshape(-1, *growth.cell))
        self.round = replace(self.round, growth=growth.state)
        self.trees = Trees.of(self, width, self.trees.lookup)
        columns = {name: self.round.drawn(self.joint, name) for name in self.others}
        if not any(map(len, columns.values())):
            return []
        of_trees = np.any(by_tree(pairs, n_parallel), (2, 3))  # (n_rows, n_parallel)
        drawn = pairs[of_trees.any(axis=1)]
        scale = FixedPoint.covering(drawn)
        self.round = replace(self.round, exponents=scale.exponents)
        ciphertexts = self._next_block(Unsent(scale.encode(drawn)))
        bits, letters = np.packbits(of_trees.T), Letters()
        # The same ciphertexts for every party that has columns in this round.
        for name, of_party in columns.items():
            of_columns = ciphertexts if len(of_party) else ciphertexts[:0]
            letters.append((name, EncryptedGradients(number, bits, of_party, of_columns)))
        return letters

    def _next_block(self, unsent: Unsent) -> Bytes:
        n_receivers = sum(len(self.round.drawn(self.joint, name)) > 0 for name in self.others)
        most = block_rows(self.cipher.public_key.ciphertext_bytes, n_receivers)
        self.round, ciphertexts = self.round.block(self.cipher, unsent, most)
        return ciphertexts

    def send_on(self, request: EncryptRequest, mail: Mail) -> tuple[SentReply, Letters]:
        """The next block of the round's gradients, for parties with columns in it."""
        unsent = self.round.unsent
        check_fields(self.name, request, ("step", unsent is not None, DUE))
        assert unsent is not None
        letter = MoreGradients(self.round.number, unsent.n_sent, self._next_block(unsent))
        others = (name for name in self.others if len(self.round.drawn(self.joint, name)))
        return SentReply(), [(name, letter) for name in others]

    def split(self, request: SplitRequest, mail: Mail) -> tuple[SplitReply, Letters]:
        """Algorithm 2: decrypt the others' sums, add the local ones, choose."""
        is_due = self.round.grows and self.round.unsent is None
        check_fields(self.name, request, ("step", is_due, DUE))
        if self.round.chosen is not None:
            self.apply_splits(mail)
        growth, others, current = self.growing(), self.others, self.round
        sums, sent = dict[str, Sums](), dict[str, Claim]()
        for name in others:
            letter = mail.one(EncryptedSums, name)
            histogram, sent[name] = self.party_sums(letter, name, growth)
            sums[name] = histogram, letter.missing
        drawn = {name: current.drawn(self.joint, name) for name in others}
        claims = Claims.of(growth, sent, current.claims, drawn, self.joint)
        claims.check_sums(current, self.trees.nodes)
        routes, sets = self._choose(growth, sums)
        letters = self._send_splits(growth, routes, sets)
        self.round = replace(self.round, claims=claims.chosen(growth, routes, sets))
        if not growth.growing:
            check_range(growth.grown().trees)
        owners, _ = self.joint.owners(routes["column"])
        has_passive = bool((owners != self.trees.number).any())
        return SplitReply(growth.growing, passive_splits=has_passive), letters

    def growing(self) -> Growth:
        """Trees of the round in progress."""
        return self.round.growing(self.settings, self.joint)

    def party_sums(
        self, letter: EncryptedSums, party: str, growth: Growth
    ) -> tuple[Histogram, Claim]:
        """Decrypt a passive party's sums of the wanted nodes: rounded, and in fixed point."""
        cipher, joint = self.cipher, self.joint
        wanted, columns = growth.wanted, self.round.drawn(joint, party)
        firsts, has_one_tree = cipher.firsts, self.target.has_one_tree
        is_due = (letter.round_id, letter.level) == (self.round.number, growth.level)
        check_fields(party, letter, ("level", is_due, "must be the one being split"))
        check_sizes(party, letter, n_wanted=len(wanted), n_columns=len(columns))
        n_bins, scale = int(joint.widths[party][columns].sum()), FixedPoint(self.round.exponents)
        trees, nodes = wanted.T
        n_outputs = [layout.n_outputs for layout in cipher.layouts]
        ordered = sum_jobs(n_outputs, growth.level, trees, nodes, has_one_tree)
        jobs = list(ordered) if n_bins else []
        is_read = [(group, np.ones(len(nodes) * n_bins, bool)) for group, _, nodes in jobs]
        fields = cipher.read(party, letter, is_read)
        shape = len(wanted), n_bins, *growth.cell
        histograms, exact = np.zeros(shape), np.zeros((*shape, 2), dtype=np.int64)
        for (group, tree, _), of_job in zip(jobs, fields, strict=True):
            first, end = firsts[group : group + 2]
            sums = scale.decode(of_job, end - first)  # gradients, hessians
            words = words_of(of_job).reshape(*sums.shape, 2)
            for of_all, of_group in ((histograms, sums), (exact, words)):
                if has_one_tree:
                    of_outputs = of_group.reshape(len(wanted), n_bins, *of_group.shape[1:])
                    of_all[:, :, first:end] = of_outputs
                    continue
                # At the root, one job sums for all trees of a group.
                for member in (tree,) if growth.level else range(first, end):
                    of_tree = of_group[:, member - first].reshape(-1, *of_all.shape[1:])
                    of_all[wanted[:, 0] == member] = of_tree
        words = exact.reshape(len(wanted), n_bins, math.prod(growth.cell[:-1]), 2, 2)
        return histograms, Claim(words, letter.missing)

    def _choose(self, growth: Growth, sums: Mapping[str, Sums]) -> tuple[Routes, CategorySets]:
        """Splits of a level from the sums of all parties, and their category sets."""
        wanted, all_columns = growth.wanted, np.arange(len(self.columns))
        build = build_vector_histograms if self.target.has_one_tree else build_all_histograms
        local = build(
            self.table.codes,
            self.table.missing_code,
            all_columns,
            self.table.cuts.widths,
            self.round.gradients,
            self.trees.nodes[:, : self.n_train],
            *wanted.T,
        )
        histograms = np.zeros((len(wanted), len(growth.cuts.edges), *growth.cell))
        missing = np.zeros((len(wanted), growth.cuts.n_columns), dtype=np.int32)
        for party, (of_bins, of_columns) in {**sums, self.name: local}.items():
            # Those of this party are of all its columns, the others' of those that were drawn.
            is_local = party == self.name
            columns = all_columns if is_local else self.round.drawn(self.joint, party)
            histograms[:, self.joint.bins(party, columns)] = of_bins
            missing[:, columns + self.joint.firsts[party]] = of_columns
        return growth.split(histograms, missing)

    def _send_splits(self, growth: Growth, routes: Routes, sets: CategorySets) -> Letters:
        """Make the local splits of a level; returns the letters for the others."""
        owners, columns = self.joint.owners(routes["column"])
        chosen = self.trees.structure.split(routes["tree"], routes["node"], owners).last
        by_party = {}
        for number, name in enumerate(self.peers):
            theirs = routes[owners == number]
            by_party[name] = (
                columns[owners == number],
                theirs["threshold"].astype(np.int64),
                theirs["default_left"].astype(np.uint8),
                sets.take(theirs["set"][theirs["set"] != NO_SET]),
            )
        local = self.table.splits(*by_party[self.name])
        self.trees = self.trees.made(chosen, local, self.values)
        partition = self.trees.partition
        self.round = replace(self.round, growth=growth.state, chosen=chosen)
        letters: Letters = []
        for name in self.others:
            of_columns, first_rights, defaults, of_party = by_party[name]
            # After the last level, a party gets its splits only, and never others' cuts.
            shown = slice(None) if growth.growing else owners == self.peers.index(name)
            splits = Splits(
                level=growth.level,
                trees=routes["tree"][shown],
                nodes=routes["node"][shown],
                owners=owners[shown],
                columns=of_columns,
                first_rights=first_rights,
                defaults=defaults,
                set_bits=of_party.bits,
                wanted_trees=growth.wanted[:, 0],
                wanted_nodes=growth.wanted[:, 1],
            )
            if len(splits.trees):
                letters.append((name, splits))
            # After the last level, only this party moves its rows.
            if growth.growing and local.n_records:
                letters.append((name, partition))
        return letters

    def apply_splits(self, mail: Mail) -> None:
        """Move all rows to the children, once the sides of every split have come."""
        current = self.round
        assert current.chosen is not None
        self.trees = self.trees.received(mail).split(current.chosen)
        self.round = replace(current, chosen=None)
        if current.claims is not None:
            current.claims.check_sides(self.peers, current, self.trees.nodes)

    def _finish_round(self) -> Scores:
        """Add the trees and their leaf values; returns scores."""
        growth, target, nodes = self.growing(), self.target, self.trees.nodes
        padded, margins = growth.padded(), self.boosted.margins
        if has_quantile_leaves(target.objective):
            pairs = self.round.gradients
            target.fit_leaves(padded, growth.places(), nodes, pairs, margins, growth.shape.eta)
        self.boosted = self.boosted.plus(padded, self.trees.structure, nodes)
        self.round, scores = NO_ROUND, target.scores(self.boosted.margins)
        name = metrics.stopping_metric(target.objective, target.metrics)
        score = scores["valid"].get(name, float("nan"))
        self.boosted = self.boosted.scored(score if metrics.larger_is_better(name) else -score)
        return scores

    # The end of a run

    def finish(self, request: FinishRequest, mail: Mail) -> tuple[FinishReply, Letters]:
        """Truncate the model to its best round, score and store it; join parts if all allow it."""
        settings, target, joint, boosted = self.settings, self.target, self.joint, self.boosted
        margins = before = boosted.margins_after(request.best_round, self.name)
        trees, records = boosted.first_trees(request.best_round * target.width)
        calibration, curve = cast(Calibration, settings.calibration), None
        if calibration != "none":
            rows = margins[self.n_rows.of("valid"), 0].astype(float)
            least = self.config.min_bin_rows
            curve = fit(calibration, rows, target.validation_weights(), len(rows), least)
            margins = calibrated(curve, margins)
        model = Ensemble(
            target.objective,
            boosted.base_score,
            joint.column_names,
            target.classes,
            trees,
            parameters=target.loss,
            margin_column=margin_column(self),
            multi_strategy=cast(MultiStrategy, settings.multi_strategy),
            num_parallel_tree=settings.num_parallel_tree,
            curve=curve,
        )
        scores, test = target.scores(margins), target.by_subset(margins)["test"]
        compare_with_local(self, target.numbers, target.objective, test[0], target.loss)
        digests = {name: mail.one(PartKept, name).digest for name in self.others}
        n_columns = {name: len(widths) for name, widths in joint.widths.items()}
        store_active_part(self, self.trees.lookup, model, records, n_columns, digests, scores)
        if curve is not None:
            for subset, earlier in target.scores(before).items():
                scores[subset] |= {UNCALIBRATED: earlier["logloss"]} if earlier else {}
        # The whole model is without splits that were dropped, which the parts still have.
        model, records = trimmed(model, records)
        is_shared = all(joint.names.values())
        by_column = importance(model) if is_shared else {"total_gain": {}, "count": {}}
        text, few = "", not_counted()
        if joint.exports:
            letters = {name: mail.one(Records, name) for name in self.others}
            letters[self.name] = Records(**split_table(self, self.trees.lookup))
            text = to_text(joined(model, records, joint, letters))
            few = np.sum([letter.few for letter in letters.values()], axis=0)
        reply = FinishReply(
            n_trees=len(model.trees),
            **score_arrays(scores),
            **interval_fields(target.objective, test, target.metrics),
            column_names=tuple(by_column["total_gain"]),
            column_gains=np.array(list(by_column["total_gain"].values()), dtype=np.float64),
            column_counts=np.array(list(by_column["count"].values()), dtype=np.int64),
            model=np.frombuffer(text.encode(), dtype=np.uint8),
            few=few,
            scale_pos_weight=target.loss.scale_pos_weight,
            min_child_weight=settings.min_child_weight,
        )
        self.end()
        return reply, []


def _rows(rounds: Sequence[Scores], subset: str) -> npt.NDArray[np.float64]:
    rows = [[*scores[subset].values()] for scores in rounds]  # all of one length
    return np.array(rows, dtype=np.float64).reshape(len(rows), len(rows[0]) if rows else 0)
