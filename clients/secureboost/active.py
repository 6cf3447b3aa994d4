"""SecureBoost at the active party: it starts rounds, chooses splits, and stores the model.

Source: Cheng et al. 2019, Algorithm 2. Trees grow as XGBoost's do over the joint columns of all
parties; of other parties' columns this one knows only the number of bins. A round, by message::

    BeginRequest    finish the last round; draw rows and columns -> encrypted gradients
    EncryptRequest  another block of these, if one is not enough
    SplitRequest    sums of a level                              -> its splits

Departures: the paper encrypts gradient and hessian separately, here both share a ciphertext; only
the smaller child of each pair is summed, the other is the difference to the parent. Rules for ties
and missing values are XGBoost's.

``joint`` is what it knows of all parties' columns, ``round`` has the trees that grow,
``boosted`` those that are finished.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import cast

import numpy as np
import numpy.typing as npt

from clients.inference import Traversal, active_part
from clients.scoring import compare_with_local, score_arrays
from clients.secureboost.joint import Ints, Joint, check_bins
from clients.secureboost.model import Boosted, joined
from clients.secureboost.round import Level, Round, Sums, Unsent, draw_rows, sets_of
from clients.secureboost.shared import Party
from clients.vertical.aligned import draw_key
from clients.vertical.splitting import Bytes, rows_after
from fedapp import metrics
from fedapp.crypto.packing import PRECISION, FixedPoint, PairLayout, grouped_layouts
from fedapp.crypto.paillier import PrivateKey
from fedapp.data.labels import check_mean, check_weights
from fedapp.data.partition import SUBSETS
from fedapp.errors import ConfigError, DataError, ProtocolError, as_protocol_error
from fedapp.histograms.bins import digitise
from fedapp.histograms.build import build_all_histograms
from fedapp.messages.fields import Request
from fedapp.messages.secureboost import (
    BeginReply,
    BeginRequest,
    ColumnBins,
    EncryptedGradients,
    EncryptedSums,
    EncryptRequest,
    FinishReply,
    FinishRequest,
    MoreGradients,
    Partition,
    PartKept,
    PublicKey,
    Records,
    SetupRequest,
    SplitReply,
    SplitRequest,
    WalkReply,
    WalkRequest,
    block_rows,
)
from fedapp.messages.vertical import MatchRequest, SentReply
from fedapp.records.document import to_text
from fedapp.site.account import check_within
from fedapp.site.mail import Letters, Mail
from fedapp.site.roles import Order, role
from fedapp.site.settings import check_sample_size
from fedapp.trees.grow import Growth, Routes
from fedapp.trees.model import Ensemble, check_range, importance, stack_trees
from fedapp.trees.objective import (
    LossParameters,
    Objective,
    balance,
    base_margin,
    base_score,
    check_base_margin,
    check_objective,
    gradients,
    is_regression,
    label_sums,
    n_outputs,
)
from fedapp.trees.rounds import Sampling, n_leaves
from fedapp.trees.sets import CategorySets

Floats = npt.NDArray[np.float32]
Done = tuple[dict[str, float], dict[str, float], list[float]]  # scores, validation scores, purities


@role
class Active(Party):
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
    missing_code: int
    numbers: Floats  # (n_rows,): label of each row, a class id or number
    classes: tuple[str, ...]
    key: npt.NDArray[np.uint8]  # the private key
    is_walking: bool  # whether rows are on their way down the initial model
    traversal: Traversal | None = None  # where they are
    joint: Joint
    boosted: Boosted
    first_round: int  # not 0 if the run continues another model
    round: Round | None = None  # in progress

    @property
    def objective(self) -> Objective:
        """Of the run."""
        return cast(Objective, self.settings.objective)

    @property
    def parameters(self) -> LossParameters:
        """Of the objective."""
        return LossParameters.of(self.settings)

    @property
    def width(self) -> int:
        """Trees per round."""
        return n_outputs(self.objective, len(self.classes))

    @property
    def private_key(self) -> PrivateKey:
        """Key of this run."""
        return PrivateKey.from_array(self.key)

    @property
    def layouts(self) -> tuple[PairLayout, ...]:
        """Of packed gradients, one per group of trees."""
        return grouped_layouts(self.private_key.public.bits, self.n_train, self.width)

    def setup(self, request: SetupRequest, mail: Mail) -> tuple[SentReply, Letters]:
        """Check the rows' order, bin the columns, code the labels, draw and test the key."""
        self.accept(request)
        self.check_order(mail)
        with as_protocol_error(self.name, "SetupRequest", "objective"):
            check_objective(request.objective)
        with as_protocol_error(self.name, "SetupRequest", "eval_metrics"):
            metrics.check_metrics(request.objective, request.eval_metrics)
        self._code_labels()
        self.codes, self.missing_code = digitise(self.cut_columns(), self.cuts)
        self.begin_lookup()
        self.wanted_constraints()  # raises for malformed texts before anything is sent
        n_train, width = self.n_train, self.width
        key = draw_key(
            self.site,
            request,
            "secureboost",
            lambda public: grouped_layouts(public.bits, n_train, width),
        )
        self.key, self.is_walking = key.to_array(), bool(request.init_model)
        letter = PublicKey(key.public.to_array(), width, n_train, PRECISION)
        return SentReply(), self.to_others(letter)

    def _code_labels(self) -> None:
        """Code labels, set the initial model and margins."""
        objective, n_train = self.objective, self.n_train
        self.classes, self.numbers = self.number_labels(objective)
        self.labels = None
        weights = self.weights[:n_train]
        check_weights(weights)
        sums = label_sums(objective, self.numbers[:n_train], weights, len(self.classes))
        weight_sum = float(weights.sum(dtype=np.float64))
        if not self.settings.scale_pos_weight:
            scale = balance(float(sums[0]), weight_sum)
            self.settings = replace(self.settings, scale_pos_weight=scale)
        score = base_score(objective, sums, weight_sum, self.parameters)
        check_mean(objective, score)
        trees, records = stack_trees(()), np.empty(0, dtype=np.int64)
        if self.settings.init_model:
            model, ids = self._initial_model()
            trees, records, score = stack_trees(model.trees), np.concatenate(ids), model.base_score
        if self.base_margins is not None:
            try:
                check_base_margin(objective)
            except ValueError as error:
                raise ConfigError(str(error)) from error
            margins = self.base_margins[:, None]
        else:
            margins = np.tile(base_margin(objective, score), (len(self.numbers), 1))
        self.boosted = Boosted(score, margins, *trees, records)

    def _initial_model(self) -> tuple[Ensemble, tuple[Ints, ...]]:
        """The initial model, checked to fit the run, and the record ids of its nodes."""
        part = active_part(self.site, self.settings.init_model)
        model = part.model
        if not isinstance(model, Ensemble):
            raise ConfigError("init-model must be a boosted model, got a forest")
        parties = sorted(part.n_columns)
        if parties != sorted(self.peers):
            raise DataError(f"parties must be those of init-model ({', '.join(parties)})")
        margins = self.config.base_margin if self.base_margins is not None else ""
        settings = {
            "objective": (self.objective, model.objective),
            "classes": (self.classes, model.classes),
            "parameters": (self.parameters, model.parameters),
            "base-margin": (margins, model.margin_column),
        }
        for field, (wanted, of_model) in settings.items():
            if wanted != of_model:
                # Without the values: class and column names stay at the party.
                raise ConfigError(f"{field} of init-model must be the run's at {self.name}")
        return model, part.records

    def _check_due(self, kind: type[Request], is_due: bool) -> None:
        """Check that a request is due now, beyond what the order says."""
        if not is_due:
            rule = "must be due: blocks of gradients and levels of trees come one after the other"
            raise ProtocolError(self.name, kind.__name__, "step", rule)

    def walk(self, request: WalkRequest, mail: Mail) -> tuple[WalkReply, Letters]:
        """Route the rows down the initial model as far as answers and local splits allow."""
        self._check_due(WalkRequest, self.is_walking)
        part = active_part(self.site, self.settings.init_model)
        if self.follows(SetupRequest):
            self._meet(mail)
            for name in self.others:
                part.check(name, mail.one(ColumnBins, name).part)
            traversal = Traversal.of(part, len(self.ids), 0)
        else:
            assert self.traversal is not None
            traversal = self.traversal.answered(part, mail)
        self.traversal, letters = traversal.ask_on(part, self.values, 0)
        self.is_walking = bool(letters)
        if not letters:
            # Leaf values of the initial model are the first margins.
            leaves, margins = self.traversal.reached(), np.array(self.boosted.margins)
            for number, (tree, reached) in enumerate(zip(part.model.trees, leaves, strict=True)):
                margins[:, number % margins.shape[1]] += tree["value"][reached]
            self.boosted, self.traversal = replace(self.boosted, margins=margins), None
        return WalkReply(not letters, self.boosted.n_rounds, len(part.model.trees)), letters

    def _meet(self, mail: Mail) -> None:
        """Check and join the parties' descriptions of their columns."""
        letters = {self.name: self.column_bins(np.empty(0, dtype=np.uint8))}
        wanted, limits = self.wanted_constraints(), self.config.limits
        for name in self.others:
            letters[name] = mail.one(ColumnBins, name)
            most = self.settings.max_bin, limits["most-columns"]
            check_bins(name, letters[name], wanted, *most, self.name)
        ordered = {name: letters[name] for name in self.peers}
        self.joint = Joint.of(ordered, wanted)

    def begin_round(self, request: BeginRequest, mail: Mail) -> tuple[BeginReply, Letters]:
        """Finish the round in progress, grow rounds without passive columns, start another."""
        self._check_due(BeginRequest, not self.is_walking and not self._grows)
        if self.follows(SetupRequest) or self.follows(WalkRequest):
            self.first_round = self.boosted.n_rounds
        n_rounds = request.n_rounds - self.first_round
        check_within(self.config, self.site.store, "BeginRequest", "n_rounds", n_rounds, "rounds")
        if self.follows(SetupRequest):
            self._meet(mail)
        done, letters = list[Done](), Letters()
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
                done.append(self._finish_round(is_local=True))
        trees, unsent = self.boosted.trees, self.current.unsent if letters else None
        reply = BeginReply(
            begun=bool(letters),
            n_blocks=unsent.n_blocks(self.layouts, self._block_rows) if unsent else 0,
            n_trees=len(trees),
            n_leaves=n_leaves(trees[-self.width :]),
            score_names=tuple(done[0][0]) if done else (),
            train_scores=_rows([list(train.values()) for train, _, _ in done]),
            valid_scores=_rows([list(valid.values()) for _, valid, _ in done]),
            purities=_rows([views for _, _, views in done]),
        )
        return reply, letters

    def send_on(self, request: EncryptRequest, mail: Mail) -> tuple[SentReply, Letters]:
        """The next block of the round's gradients, for parties with columns in it."""
        unsent = self.round.unsent if self.round is not None else None
        self._check_due(EncryptRequest, unsent is not None)
        assert unsent is not None
        letter = MoreGradients(self.current.number, unsent.n_sent, self._next_block(unsent))
        return SentReply(), [(name, letter) for name in self.others if len(self.drawn(name))]

    def split(self, request: SplitRequest, mail: Mail) -> tuple[SplitReply, Letters]:
        """Algorithm 2: decrypt the others' sums, add the local ones, choose."""
        self._check_due(SplitRequest, self._grows and self.current.unsent is None)
        if self.current.waits:
            self.apply_splits(mail)
        growth = self.growing()
        sums = {name: self.party_sums(mail, name, growth) for name in self.others}
        routes, sets = self._choose(growth, sums)
        letters = self._send_splits(growth, routes, sets)
        if not growth.growing:
            check_range(growth.grown().trees)
        owners, _ = self.joint.owners(routes["column"])
        return SplitReply(growth.growing, passive_splits=bool((owners != self.name).any())), letters

    # A round

    @property
    def current(self) -> Round:
        """The round in progress."""
        assert self.round is not None
        return self.round

    @property
    def _grows(self) -> bool:
        """Whether nodes of the round's trees wait for sums."""
        return self.round is not None and self.round.grows

    def growing(self) -> Growth:
        """Trees of the round in progress."""
        return self.current.growing(self.joint, self.settings)

    def drawn(self, party: str) -> Ints:
        """A party's columns, by its numbers, that some tree of the round may split."""
        return self.current.drawn(self.joint, party)

    def party_sums(self, mail: Mail, party: str, growth: Growth) -> Sums:
        """Decrypt a passive party's sums of the wanted nodes."""
        letter, keys = mail.one(EncryptedSums, party), (self.private_key, self.layouts)
        return self.current.party_sums(letter, party, self.joint, growth, *keys)

    def _new_round(self) -> Letters:
        """Start a round; letters with the first gradients, none if no passive column is drawn."""
        settings, rows, number = self.settings, slice(self.n_train), self.boosted.n_rounds
        margins, numbers, weights = (
            of_all[rows] for of_all in (self.boosted.margins, self.numbers, self.weights)
        )
        pairs = gradients(self.objective, margins, numbers, weights, self.parameters)
        if settings.subsample < 1 or settings.goss:
            entropy = self.site.entropy(settings.seed, number, 1, share=settings.subsample)
            drawn = draw_rows(pairs.copy(), settings, np.random.default_rng(entropy))
            n_rows, n_drawn = (int(each.any(axis=(1, 2)).sum()) for each in (pairs, drawn))
            if check_sample_size(self.config, n_rows, n_drawn) == n_drawn:
                pairs = drawn
        n_columns = self.joint.cuts.n_columns
        sampling = Sampling(settings.seed, settings.colsample_bytree)
        allowed = sampling.columns(number, self.width, n_columns)
        if number < settings.first_trees:
            allowed = allowed & (self.joint.owners(np.arange(n_columns))[0] == self.name)
        # pairs: (n_rows, n_outputs, 2)
        self.round = Round(number, np.ascontiguousarray(pairs.transpose(1, 0, 2)), allowed)
        growth = self.growing()
        growth.set_roots(pairs.sum(axis=0, dtype=np.float64))
        self.round = replace(self.round, growth=growth.state)
        self.nodes = np.zeros((self.width, len(self.numbers)), dtype=np.int32)
        columns = {name: self.drawn(name) for name in self.others}
        return self._encrypt(pairs, columns) if any(map(len, columns.values())) else []

    def _encrypt(self, pairs: Floats, columns: Mapping[str, Ints]) -> Letters:
        """Letters with the same ciphertexts for every party that has columns in this round."""
        drawn = (pairs != 0).any(axis=(1, 2))
        scale = FixedPoint.covering(pairs[drawn])
        self.round = replace(self.current, exponents=scale.exponents)
        ciphertexts = self._next_block(Unsent(scale.encode(pairs[drawn])))
        letter = EncryptedGradients(
            self.current.number, np.packbits(drawn), np.empty(0, np.int64), ciphertexts
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
        """The next ciphertexts of the round."""
        block, left = unsent.next_block(self.private_key, self.layouts, self._block_rows)
        self.round = replace(self.current, unsent=left)
        return block

    def _choose(self, growth: Growth, sums: Mapping[str, Sums]) -> tuple[Routes, CategorySets]:
        """Splits of a level from the sums of all parties, and their category sets."""
        local = build_all_histograms(
            self.codes,
            self.missing_code,
            np.arange(len(self.columns)),
            self.cuts.widths,
            self.current.gradients,
            self.nodes[:, : self.n_train],
            *growth.wanted.T,
        )
        return self.current.choose(self.joint, growth, {**sums, self.name: local}, self.name)

    def _send_splits(self, growth: Growth, routes: Routes, sets: CategorySets) -> Letters:
        """Make the local splits of a level; returns the letters for the others."""
        owners, columns = self.joint.owners(routes["column"])
        is_local = owners == self.name
        local = routes[is_local]
        bits, records = self.make_splits(
            local["tree"],
            local["node"],
            columns[is_local],
            local["threshold"].astype(np.int64),
            local["default_left"].astype(np.uint8),
            sets_of(local, sets),
        )
        level = Level(routes, np.flatnonzero(is_local), bits, records)
        grown = self.round = replace(self.current, growth=growth.state, level=level)
        splits = {name: grown.splits_for(name, self.joint, growth, sets) for name in self.others}
        return [(name, letter) for name, letter in splits.items() if len(letter.trees)]

    def apply_splits(self, mail: Mail) -> None:
        """Move all rows to the children, once the sides of every split are known."""
        routes = self.current.last.routes
        sources, records = self.current.sides(self.name, mail.all(Partition), self.joint)
        split = routes["tree"], routes["node"], routes["left"]
        moved = rows_after(self.nodes, *split, sources, padded=True)
        self.round, self.nodes = self.current.after(records, self.nodes), moved

    def _finish_round(self, is_local: bool = False) -> Done:
        """Add the trees and their leaf values; returns scores and purities."""
        trees, splits = self.growing().grown().trees, self.current.splits
        self.boosted = self.boosted.plus(trees, np.concatenate(splits), self.nodes)
        purities = list[float]()
        if not is_regression(self.objective):
            classes, passive = self.numbers[: self.n_train].astype(np.int64), self.others
            purities = self.current.purities(self.joint, classes, self.nodes, passive, is_local)
        self.round = None
        scores = self._scores(self.boosted.margins)
        name = metrics.stopping_metric(self.objective, self.settings.eval_metrics)
        score = scores["valid"].get(name, float("nan"))
        self.boosted = self.boosted.scored(score if metrics.larger_is_better(name) else -score)
        return scores["train"], scores["valid"], purities

    def _scores(self, margins: Floats) -> dict[str, dict[str, float]]:
        """Scores by subset; none for a subset without rows."""
        places = {subset: self.rows_of(subset) for subset in SUBSETS}
        rows = {
            subset: (margins[place], self.numbers[place], self.weights[place])
            for subset, place in places.items()
        }
        return metrics.pooled_subsets(self.objective, rows, self.settings.eval_metrics)

    # The end of a run

    def finish(self, request: FinishRequest, mail: Mail) -> tuple[FinishReply, Letters]:
        """Truncate the model to its best round, score and store it; join parts if all allow it."""
        joint, margins = self.joint, self.boosted.margins_after(request.best_round, self.name)
        loss = self.objective, self.classes, self.parameters
        model, records = self.boosted.first_rounds(request.best_round, joint, *loss)
        if self.base_margins is not None:
            model = replace(model, margin_column=self.config.base_margin)
        scores = self._scores(margins)
        test_margins = margins[self.rows_of("test")]
        compare_with_local(self, self.numbers, self.objective, test_margins, self.parameters)
        n_columns = {name: len(widths) for name, widths in joint.widths.items()}
        digests = {name: mail.one(PartKept, name).digest for name in self.others}
        threshold = scores["train"].get("threshold")
        self.store_active_part(model, records, n_columns, digests, threshold)
        is_shared = all(joint.names.values())
        by_column = importance(model) if is_shared else {"total_gain": {}, "count": {}}
        text = ""
        if joint.exports:
            letters = {name: mail.one(Records, name) for name in self.others}
            letters[self.name] = self.table_records()
            text = to_text(joined(model, records, joint, letters))
        reply = FinishReply(
            n_trees=len(model.trees),
            **score_arrays(scores),
            column_names=tuple(by_column["total_gain"]),
            column_gains=np.array(list(by_column["total_gain"].values()), dtype=np.float64),
            column_counts=np.array(list(by_column["count"].values()), dtype=np.int64),
            model=np.frombuffer(text.encode(), dtype=np.uint8),
            scale_pos_weight=self.parameters.scale_pos_weight,
        )
        self.end()
        return reply, []


def _rows(lists: list[list[float]]) -> npt.NDArray[np.float64]:
    width = len(lists[0]) if lists else 0  # all lists have one length
    return np.array(lists, dtype=np.float64).reshape(len(lists), width)
