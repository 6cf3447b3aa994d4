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

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import cast

import numpy as np
import numpy.typing as npt

from clients.scoring import compare_with_local, interval_fields, score_arrays
from clients.secureboost.claims import Claims, Rows
from clients.secureboost.joint import Ints
from clients.secureboost.model import joined
from clients.secureboost.round import (
    Floats,
    Round,
    Sums,
    Unsent,
    by_tree,
    draw_rows,
    encrypted,
    sets_of,
)
from clients.secureboost.start import Started
from clients.vertical.party import Bytes
from fedapp import metrics
from fedapp.crypto.packing import FixedPoint
from fedapp.data.partition import SUBSETS
from fedapp.histograms.build import build_all_histograms
from fedapp.histograms.vector_splits import build_vector_histograms
from fedapp.messages.fields import parameters_of
from fedapp.messages.secureboost import (
    BeginReply,
    BeginRequest,
    EncryptedGradients,
    EncryptedSums,
    EncryptRequest,
    FinishReply,
    FinishRequest,
    MoreGradients,
    PartKept,
    Records,
    SetupRequest,
    SplitReply,
    SplitRequest,
    Splits,
    WalkRequest,
)
from fedapp.messages.vertical import MatchRequest, SentReply, block_rows
from fedapp.metrics.names import UNCALIBRATED
from fedapp.records.document import to_text
from fedapp.site.account import check_within
from fedapp.site.mail import Letters, Mail
from fedapp.site.policy import check_sample_size
from fedapp.site.roles import Order, role
from fedapp.trees.calibration import Curve, calibrated, fit
from fedapp.trees.grow import Growth, Limits, Routes, Shape
from fedapp.trees.model import LEAF, Ensemble, Tree, check_range, importance
from fedapp.trees.objective import gradients, has_quantile_leaves, is_of_rows
from fedapp.trees.quantiles import leaf_level, leaf_quantiles
from fedapp.trees.queue import without_padding
from fedapp.trees.rounds import Sampling, n_leaves
from fedapp.trees.sets import CategorySets
from fedapp.trees.shown import not_counted
from fedapp.trees.size import MultiStrategy
from fedapp.trees.vector_leaves import VectorGrowth

Scores = dict[str, dict[str, float]]  # by subset


@role
class Active(Started):
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
    first_round: int  # not 0 if the run continues another model
    round: Round | None = None  # in progress
    curve: Curve | None = None  # of the finished model, if it is calibrated

    def begin_round(self, request: BeginRequest, mail: Mail) -> tuple[BeginReply, Letters]:
        """Finish the round in progress, grow rounds without passive columns, start another."""
        self.check_due(BeginRequest, not self.is_walking and not self._grows)
        if self.follows(SetupRequest) or self.follows(WalkRequest):
            self.first_round = self.boosted.n_rounds
        n_rounds = request.n_rounds - self.first_round
        check_within(self.config, self.site.store, "BeginRequest", "n_rounds", n_rounds, "rounds")
        if self.follows(SetupRequest):
            self.meet(mail)
        done, letters = list[Scores](), Letters()
        if self.round is not None:
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
        trees, unsent = self.boosted.trees, self.current.unsent if letters else None
        reply = BeginReply(
            begun=bool(letters),
            n_blocks=unsent.n_blocks(self.layouts, self._block_rows) if unsent else 0,
            n_trees=len(trees),
            n_leaves=n_leaves(map(without_padding, trees[-self.width :])),
            score_names=tuple(done[0]["train"]) if done else (),
            train_scores=_rows([list(scores["train"].values()) for scores in done]),
            valid_scores=_rows([list(scores["valid"].values()) for scores in done]),
        )
        return reply, letters

    def send_on(self, request: EncryptRequest, mail: Mail) -> tuple[SentReply, Letters]:
        """The next block of the round's gradients, for parties with columns in it."""
        unsent = self.round.unsent if self.round is not None else None
        self.check_due(EncryptRequest, unsent is not None)
        assert unsent is not None
        letter = MoreGradients(self.current.number, unsent.n_sent, self._next_block(unsent))
        return SentReply(), [(name, letter) for name in self.others if len(self.drawn(name))]

    def split(self, request: SplitRequest, mail: Mail) -> tuple[SplitReply, Letters]:
        """Algorithm 2: decrypt the others' sums, add the local ones, choose."""
        self.check_due(SplitRequest, self._grows and self.current.unsent is None)
        if self.current.chosen is not None:
            self.apply_splits(mail)
        growth = self.growing()
        sums = {name: self.party_sums(mail, name, growth) for name in self.others}
        claims = self.checked(growth, sums)
        routes, sets = self._choose(growth, sums)
        letters = self._send_splits(growth, routes, sets)
        self.round = replace(self.current, claims=claims.chosen(growth, routes, sets))
        if not growth.growing:
            check_range(growth.grown().trees)
        owners, _ = self.joint.owners(routes["column"])
        has_passive = bool((owners != self.number).any())
        return SplitReply(growth.growing, passive_splits=has_passive), letters

    # A round

    @property
    def current(self) -> Round:
        """The round in progress."""
        assert self.round is not None
        return self.round

    @property
    def _grows(self) -> bool:
        """Whether nodes of the round's trees wait for sums."""
        growth = self.round.growth if self.round is not None else None
        return growth is not None and len(growth.open_nodes) > 0

    def growing(self) -> Growth:
        """Trees of the round in progress."""
        settings, current, joint = self.settings, self.current, self.joint
        shape = Shape.of(parameters_of(settings), self.n_parallel)
        limits = Limits(
            settings.seed,
            current.number,
            settings.colsample_bylevel,
            settings.colsample_bynode,
            joint.monotone,
            tuple(map(frozenset, joint.interactions)),
        )
        n_outputs, allowed = len(current.gradients), current.allowed
        kind = VectorGrowth if self.has_one_tree else Growth
        return kind(n_outputs, joint.cuts, allowed, shape, limits, current.growth)

    def rows(self) -> Rows:
        """Training rows of the round in progress, in their nodes."""
        gradients, nodes = self.current.gradients, self.nodes[:, : self.n_train]
        by_draw = gradients.reshape(self.n_parallel, -1, *gradients.shape[1:])
        drawn = np.repeat(by_draw.any(axis=(1, 3)), by_draw.shape[1], axis=0)
        scale = FixedPoint(self.current.exponents)
        return Rows(self.current.number, gradients, drawn, nodes, scale)

    def drawn(self, party: str) -> Ints:
        """A party's columns, by its numbers, that some tree of the round may split."""
        return self.current.drawn(self.joint, party)

    def party_sums(self, mail: Mail, party: str, growth: Growth) -> Sums:
        """Decrypt a passive party's sums of the wanted nodes."""
        letter = mail.one(EncryptedSums, party)
        return self.current.party_sums(
            letter, party, self.joint, growth, self.private_key, self.layouts
        )

    def checked(self, growth: Growth, sums: Mapping[str, Sums]) -> Claims:
        """What passive parties claim of the open nodes, checked to be possible."""
        drawn = {name: self.drawn(name) for name in sums}
        sent = {name: of.claim for name, of in sums.items() if of.claim is not None}
        claims = Claims.of(growth, sent, self.current.claims, drawn, self.joint)
        claims.check_sums(self.rows())
        return claims

    def _new_round(self) -> Letters:
        """Start a round; letters with the first gradients, none if no passive column is drawn."""
        settings, number, pairs = self.settings, self.boosted.n_rounds, self._gradients()
        if settings.subsample < 1 or settings.goss:
            entropy = self.site.entropy(settings.seed, number, 1, share=settings.subsample)
            drawn = draw_rows(pairs.copy(), settings, np.random.default_rng(entropy))
            n_rows, n_drawn = (
                int(by_tree(of_rows, self.n_parallel).any(axis=(2, 3)).sum(axis=0).min())
                for of_rows in (pairs, drawn)
            )
            if check_sample_size(self.config, n_rows, n_drawn) == n_drawn:
                pairs = drawn
        n_columns = self.joint.cuts.n_columns
        sampling = Sampling(settings.seed, settings.colsample_bytree)
        allowed = sampling.columns(number, self.width, n_columns)
        if number < settings.first_trees:
            allowed = allowed & (self.joint.owners(np.arange(n_columns))[0] == self.number)
        self.round = Round(number, np.ascontiguousarray(pairs.transpose(1, 0, 2)), allowed)
        growth = self.growing()
        growth.set_roots(pairs.sum(axis=0, dtype=np.float64).reshape(-1, *growth.cell))
        self.round = replace(self.round, growth=growth.state)
        self.begin_trees(self.width)
        columns = {name: self.drawn(name) for name in self.others}
        return self._encrypt(pairs, columns) if any(map(len, columns.values())) else []

    def _encrypt(self, pairs: Floats, columns: Mapping[str, Ints]) -> Letters:
        """Letters with the same ciphertexts for every party that has columns in this round."""
        of_trees = np.any(by_tree(pairs, self.n_parallel), (2, 3))  # (n_rows, n_parallel)
        drawn = of_trees.any(axis=1)
        scale = FixedPoint.covering(pairs[drawn])
        self.round = replace(self.current, exponents=scale.exponents)
        ciphertexts = self._next_block(Unsent(scale.encode(pairs[drawn])))
        letter = EncryptedGradients(
            self.current.number, np.packbits(of_trees.T), np.empty(0, np.int64), ciphertexts
        )
        nothing = replace(letter, ciphertexts=ciphertexts[:0])  # for a party without columns
        return [
            (name, replace(letter if len(of_party) else nothing, columns=of_party))
            for name, of_party in columns.items()
        ]

    @property
    def _block_rows(self) -> int:
        """Most ciphertexts of a message."""
        n_receivers = sum(len(self.drawn(name)) > 0 for name in self.others)
        return block_rows(self.private_key.public.ciphertext_bytes, n_receivers)

    def _next_block(self, unsent: Unsent) -> Bytes:
        n_all, first = len(self.layouts) * len(unsent.fields), unsent.n_sent
        stop = min(n_all, first + self._block_rows)
        left = None if stop == n_all else replace(unsent, n_sent=stop)
        self.round = replace(self.current, unsent=left)
        return encrypted(self.private_key, self.layouts, unsent.fields, first, stop)

    def _finish_round(self) -> Scores:
        """Add the trees and their leaf values; returns scores."""
        growth, structure = self.growing(), self.structure
        splits, padded = structure.splits, growth.padded()
        records = splits.spread(self.n_made[splits.owners] + splits.records, structure.n_nodes, -1)
        self.n_made = self.n_made + np.bincount(splits.owners, minlength=len(self.peers))
        # Where the order of splits is not that of levels, the model's nodes have other numbers.
        numbers = [of_tree for _, of_tree in padded]
        ids = [of_tree[order] for of_tree, order in zip(records, numbers, strict=True)]
        pairs = zip(numbers, self.nodes, strict=True)
        reached = np.stack([np.argsort(order)[nodes] for order, nodes in pairs]).astype(np.int32)
        if has_quantile_leaves(self.objective):
            grown_nodes = growth.places()
            leaves = np.stack(
                [grown[of] for grown, of in zip(grown_nodes, self.nodes, strict=True)]
            )
            of_trees = zip(padded, grown_nodes, leaves, strict=True)
            for number, ((tree, order), grown, tree_leaves) in enumerate(of_trees):
                self._fit_leaves(number, growth.shape.eta, tree, order, grown, tree_leaves)
        self.boosted = self.boosted.plus([tree for tree, _ in padded], ids, reached)
        self.round = None
        scores = self._scores(self.boosted.margins)
        name = metrics.stopping_metric(self.objective, self.settings.eval_metrics)
        score = scores["valid"].get(name, float("nan"))
        self.boosted = self.boosted.scored(score if metrics.larger_is_better(name) else -score)
        return scores

    def _fit_leaves(
        self, number: int, eta: float, tree: Tree, numbers: Ints, grown: Ints, leaves: Ints
    ) -> None:
        """Set the leaves of a padded tree to quantiles of the residuals of their drawn rows.

        ``grown`` is each node's node in the grown tree, or the leaf above it.
        """
        drawn = np.flatnonzero(self.current.gradients[number, :, 1] != 0)
        residuals = self.numbers[drawn] - self.boosted.margins[drawn, 0]
        weights = self.column_weights
        level = leaf_level(self.objective, self.parameters)
        drawn_weights = None if weights is None else weights[drawn]
        quantiles = leaf_quantiles(leaves[drawn], residuals, drawn_weights, level, len(tree))
        values = quantiles * np.float32(eta)
        # Nodes below a leaf, whose splits the queue has dropped, have its value.
        tree["value"] = np.where(tree["left"] == LEAF, values[grown[numbers]], np.float32(0))
        check_range([tree])

    def _gradients(self) -> Floats:
        """Gradients and hessians of the training rows, shape (n_rows, n_pairs, 2)."""
        margins, numbers, weights = (
            of_all[: self.n_train] for of_all in (self.boosted.margins, self.numbers, self.weights)
        )
        pairs = gradients(self.objective, margins, numbers, weights, self.parameters)
        # Else the others would see which rows have no pair, or are censored before all events.
        if not is_of_rows(self.objective):
            pairs[..., 1] = np.maximum(pairs[..., 1], np.finfo(np.float32).tiny)
        return np.tile(pairs, (1, self.n_parallel, 1))

    def _choose(self, growth: Growth, sums: Mapping[str, Sums]) -> tuple[Routes, CategorySets]:
        """Splits of a level from the sums of all parties, and their category sets."""
        wanted_trees, wanted_nodes = growth.wanted.T
        build = build_vector_histograms if self.has_one_tree else build_all_histograms
        local = build(
            self.codes,
            self.missing_code,
            np.arange(len(self.columns)),
            self.cuts.widths,
            self.current.gradients,
            self.nodes[:, : self.n_train],
            wanted_trees,
            wanted_nodes,
        )
        histograms = np.zeros((len(growth.wanted), len(growth.cuts.edges), *growth.cell))
        missing = np.zeros((len(growth.wanted), growth.cuts.n_columns), dtype=np.int32)
        for party, of_party in {**sums, self.name: Sums(*local)}.items():
            # Those of this party are of all its columns, the others' of those that were drawn.
            columns = np.arange(len(self.columns))
            if party != self.name:
                columns = self.drawn(party)
            histograms[:, self.joint.bins(party, columns)] = of_party.histograms
            missing[:, columns + self.joint.firsts[party]] = of_party.missing
        return growth.split(histograms, missing)

    def _send_splits(self, growth: Growth, routes: Routes, sets: CategorySets) -> Letters:
        """Make the local splits of a level; returns the letters for the others."""
        owners, columns = self.joint.owners(routes["column"])
        chosen = self.structure.split(routes["tree"], routes["node"], owners).last
        is_local = owners == self.number
        local = routes[is_local]
        partition = self.make_splits(
            chosen,
            columns[is_local],
            local["threshold"].astype(np.int64),
            local["default_left"].astype(np.uint8),
            sets_of(local, sets),
        )
        self.round = replace(self.current, growth=growth.state, chosen=chosen)
        letters: Letters = []
        for name in self.others:
            is_theirs = owners == self.peers.index(name)
            theirs = routes[is_theirs]
            # After the last level, a party gets its splits only, and never others' cuts.
            shown = slice(None) if growth.growing else is_theirs
            splits = Splits(
                level=growth.level,
                trees=routes["tree"][shown],
                nodes=routes["node"][shown],
                owners=owners[shown],
                columns=columns[is_theirs],
                first_rights=theirs["threshold"].astype(np.int64),
                defaults=theirs["default_left"].astype(np.uint8),
                set_bits=sets_of(theirs, sets).bits,
                wanted_trees=growth.wanted[:, 0],
                wanted_nodes=growth.wanted[:, 1],
            )
            if len(splits.trees):
                letters.append((name, splits))
            # After the last level, only this party moves its rows.
            if growth.growing and len(local):
                letters.append((name, partition))
        return letters

    def apply_splits(self, mail: Mail) -> None:
        """Move all rows to the children, once the sides of every split have come."""
        chosen = self.current.chosen
        assert chosen is not None
        self.keep_partitions(mail)
        self.round = replace(self.current, chosen=None)
        self.take_splits(chosen)
        if self.current.claims is not None:
            self.current.claims.check_sides(self.peers, self.rows())

    def _scores(self, margins: Floats) -> dict[str, dict[str, float]]:
        """Scores by subset; none for a subset without rows."""
        rows = self._rows_to_score(margins)
        return metrics.pooled_subsets(self.objective, rows, self.settings.eval_metrics)

    def _rows_to_score(self, margins: Floats) -> dict[str, tuple[Floats, Floats, Floats]]:
        """Margins, labels and weights by subset."""
        by_subset = {}
        for subset in SUBSETS:
            rows = self.rows_of(subset)
            by_subset[subset] = margins[rows], self.numbers[rows], self.weights[rows]
        return by_subset

    # The end of a run

    def finish(self, request: FinishRequest, mail: Mail) -> tuple[FinishReply, Letters]:
        """Truncate the model to its best round, score and store it; join parts if all allow it."""
        joint, margins = self.joint, self.boosted.margins_after(request.best_round, self.name)
        n_trees, offsets = request.best_round * self.width, self.boosted.offsets
        records = [self.boosted.records[a:b] for a, b in pairwise(offsets[: n_trees + 1])]
        trees = self.boosted.trees[:n_trees]
        before = margins
        if self.calibration != "none":
            rows = margins[self.rows_of("valid"), 0].astype(float)
            least = self.config.min_bin_rows
            self.curve = fit(self.calibration, rows, self.validation_weights(), len(rows), least)
            margins = calibrated(self.curve, margins)
        model, scores = self._store_model(trees, records, margins, mail)
        if self.curve is not None:
            for subset, earlier in self._scores(before).items():
                scores[subset] |= {UNCALIBRATED: earlier["logloss"]} if earlier else {}
        # The whole model is without splits that were dropped, which the parts still have.
        model = replace(model, trees=tuple(map(without_padding, model.trees)))
        records = [
            np.where(tree["left"] == LEAF, -1, ids[: len(tree)])
            for ids, tree in zip(records, model.trees, strict=True)
        ]
        is_shared = all(joint.names.values())
        by_column = importance(model) if is_shared else {"total_gain": {}, "count": {}}
        text, few = "", not_counted()
        if joint.exports:
            letters = {name: mail.one(Records, name) for name in self.others}
            letters[self.name] = self.table_records()
            text = to_text(joined(model, records, joint, letters))
            few = np.sum([letter.few for letter in letters.values()], axis=0)
        reply = FinishReply(
            n_trees=len(model.trees),
            **score_arrays(scores),
            **interval_fields(
                self.objective,
                self._rows_to_score(margins)["test"],
                self.settings.eval_metrics,
            ),
            column_names=tuple(by_column["total_gain"]),
            column_gains=np.array(list(by_column["total_gain"].values()), dtype=np.float64),
            column_counts=np.array(list(by_column["count"].values()), dtype=np.int64),
            model=np.frombuffer(text.encode(), dtype=np.uint8),
            few=few,
            scale_pos_weight=self.parameters.scale_pos_weight,
            min_child_weight=self.settings.min_child_weight,
        )
        self.end()
        return reply, []

    def _store_model(
        self, trees: Sequence[Tree], records: Sequence[Ints], margins: Floats, mail: Mail
    ) -> tuple[Ensemble, dict[str, dict[str, float]]]:
        """Score the finished model and store this party's part; returns the model, its scores."""
        model = Ensemble(
            self.objective,
            self.boosted.base_score,
            self.joint.column_names,
            self.classes,
            tuple(trees),
            parameters=self.parameters,
            margin_column=self.config.base_margin if self.base_margins is not None else "",
            multi_strategy=cast(MultiStrategy, self.settings.multi_strategy),
            num_parallel_tree=self.n_parallel,
            curve=self.curve,
        )
        scores = self._scores(margins)
        test_margins = margins[self.rows_of("test")]
        compare_with_local(self, self.numbers, self.objective, test_margins, self.parameters)
        n_columns = {name: len(widths) for name, widths in self.joint.widths.items()}
        digests = {name: mail.one(PartKept, name).digest for name in self.others}
        threshold = scores["train"].get("threshold")
        self.store_active_part(model, records, n_columns, digests, threshold)
        return model, scores


def _rows(lists: list[list[float]]) -> npt.NDArray[np.float64]:
    width = len(lists[0]) if lists else 0  # all lists have one length
    return np.array(lists, dtype=np.float64).reshape(len(lists), width)
