"""SecureBoost at the active party: gradients, splits, leaf weights, and its part of the model.

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

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import cast

import numpy as np
import numpy.typing as npt

from clients.inference import Traversal, active_part
from clients.scoring import compare_with_local, score_arrays
from clients.secureboost.shared import (
    Bytes,
    Ints,
    Party,
    joint_constraints,
    nodes_after,
    read_constraints,
)
from clients.vertical import draw_key
from fedapp import metrics
from fedapp.crypto.packing import PRECISION, FixedPoint, PairLayout, grouped_layouts
from fedapp.crypto.paillier import PrivateKey, encrypt
from fedapp.crypto.sums import read_sums
from fedapp.crypto.workers import shared_workers
from fedapp.data.columns import check_kinds
from fedapp.data.labels import check_mean, check_weights
from fedapp.data.partition import SUBSETS
from fedapp.errors import ConfigError, DataError, ProtocolError, as_protocol_error
from fedapp.histograms.bins import digitise
from fedapp.histograms.build import Histogram, JointColumns, build_all_histograms, sum_jobs
from fedapp.messages.fields import Array, Request, parameters_of
from fedapp.messages.handshake import read_categories
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
    Splits,
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
from fedapp.site.store import write_part
from fedapp.trees.categories import Categories, side_by_side
from fedapp.trees.divided import ActivePart, Lookup, joint_names, whole_model
from fedapp.trees.grow import Growing, Growth, Limits, Routes, Shape, last_seen, mean_purity
from fedapp.trees.model import Ensemble, check_range, importance, split_trees, stack_trees
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
from fedapp.trees.sets import NO_SET, CategorySets, category_counts

Floats = npt.NDArray[np.float32]
Done = tuple[dict[str, float], dict[str, float], list[float]]  # scores, validation scores, purities

ROWS_AT_ONCE = 1 << 15  # packed and encrypted; bounds the Python integers in memory
BINS_A_COLUMN = 16  # on average, of most-columns: 26 MB of sums in a node with the usual 100,000


@dataclass(frozen=True, slots=True, eq=False)
class Chosen:
    """A level's splits, until the sides of all are known."""

    routes: npt.NDArray[np.void]  # on joint columns
    local: Ints  # indices of the local splits
    bits: Bytes  # packed sides of the local splits
    records: Ints  # record ids of the local splits


@dataclass(frozen=True, slots=True, eq=False)
class Best:
    """The round with the best validation score, the first of equals."""

    score: float  # larger is better
    n_rounds: int
    margins: Floats


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
    base_score: Floats  # (n_outputs,)
    key: npt.NDArray[np.uint8]  # the private key
    first_round: int  # not 0 if the run continues another model
    is_walking: bool  # whether rows are on their way down the initial model
    traversal: Traversal | None = None  # where they are
    # All parties' columns
    joint: JointColumns
    monotone: npt.NDArray[np.int8]  # (n_columns,), or empty
    interactions: tuple[tuple[int, ...], ...]
    shared_names: Mapping[str, tuple[str, ...]]  # of the columns of those that share them
    exports: bool  # whether all parties allow the export of the model
    # The model so far
    margins: Floats  # (n_rows, n_outputs)
    trees: npt.NDArray[np.void]  # nodes of all trees
    offsets: Ints  # the start of each tree, and the end
    records: Ints  # record id of each node's split in its owner's lookup, -1 at leaves
    best: Best | None = None
    # The round in progress
    gradients: Floats  # (n_outputs, n_train, 2), 0 for rows that are not drawn
    allowed: npt.NDArray[np.bool_]  # (n_outputs, n_columns)
    exponents: tuple[int, int]  # scales of the encrypted gradients
    unsent: Ints | None = None  # (n_drawn, n_outputs, 2): gradients to encrypt
    n_sent: int  # ciphertexts of these
    growth: Growing | None = None
    chosen: Chosen | None = None
    round_records: Ints  # (n_splits, 3): tree, node and record id
    nodes_before: npt.NDArray[np.int32]  # ``nodes`` before the last level's splits
    last_routes: npt.NDArray[np.void]  # these splits

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
    def n_rounds(self) -> int:
        """Finished rounds, with those of the initial model."""
        return (len(self.offsets) - 1) // self.width

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
        return SentReply(), [(name, letter) for name in self.others]

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
        self.base_score = base_score(objective, sums, weight_sum, self.parameters)
        check_mean(objective, self.base_score)
        self.trees, self.offsets = stack_trees(())
        self.records = np.empty(0, dtype=np.int64)
        if self.settings.init_model:
            self._begin_model()
        if self.base_margins is not None:
            try:
                check_base_margin(objective)
            except ValueError as error:
                raise ConfigError(str(error)) from error
            self.margins = self.base_margins[:, None]
        else:
            margin = base_margin(objective, self.base_score)
            self.margins = np.tile(margin, (len(self.numbers), 1))

    def _begin_model(self) -> None:
        """Start with the trees of the initial model, checked to fit the run."""
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
        self.trees, self.offsets = stack_trees(model.trees)
        self.records, self.base_score = np.concatenate(part.records), model.base_score

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
            leaves, margins = self.traversal.reached(), np.array(self.margins)
            for number, (tree, reached) in enumerate(zip(part.model.trees, leaves, strict=True)):
                margins[:, number % margins.shape[1]] += tree["value"][reached]
            self.margins, self.traversal = margins, None
        return WalkReply(not letters, self.n_rounds, len(part.model.trees)), letters

    def _meet(self, mail: Mail) -> None:
        """Check and store the others' numbers of bins, shared names and constraints."""
        config, wanted, local = self.config, self.wanted_constraints(), self.local_constraints()
        widths, categorical = {self.name: self.cuts.widths}, {self.name: self.cuts.by_category}
        names = {self.name: self.columns if config.shares_names else ()}
        allows, max_bin, limit = config.allows_export, self.settings.max_bin, "most-columns"
        constraints, most_columns = {self.name: local}, config.limits[limit]
        for name in self.others:
            bins = mail.one(ColumnBins, name)
            n_columns, n_all = len(bins.widths), int(bins.widths.sum())
            by_category = np.resize(bins.categorical.astype(bool), n_columns)
            most_bins = BINS_A_COLUMN * most_columns
            rules = (
                (
                    "names",
                    len(bins.names) in (0, n_columns),
                    f"must be {n_columns} or none, got {len(bins.names)}",
                ),
                (
                    "widths",
                    n_columns <= most_columns and (bins.widths[~by_category] <= max_bin).all(),
                    f"must be <= {max_bin} (max-bin), of {most_columns} columns at most ({limit})",
                ),
                (
                    "widths",
                    n_all <= most_bins,
                    f"must add up to <= {most_bins} ({BINS_A_COLUMN} x {limit} of {self.name}), "
                    f"got {n_all}; lower max-bin",
                ),
                (
                    "categorical",
                    len(bins.categorical) == n_columns,
                    f"must be {n_columns}, got {len(bins.categorical)}",
                ),
            )
            for field, holds, rule in rules:
                if not holds:
                    raise ProtocolError(name, "ColumnBins", field, rule)
            widths[name], names[name], categorical[name] = bins.widths, bins.names, by_category
            constraints[name] = read_constraints(name, bins, len(wanted.names), n_columns)
            allows = allows and bins.allows_export
        peers = self.peers
        self.joint = JointColumns(
            {name: widths[name] for name in peers}, {name: categorical[name] for name in peers}
        )
        self.monotone, self.interactions = joint_constraints(
            wanted, {name: constraints[name] for name in peers}, categorical
        )
        self.shared_names, self.exports = names, allows

    def begin_round(self, request: BeginRequest, mail: Mail) -> tuple[BeginReply, Letters]:
        """Finish the round in progress, grow rounds without passive columns, start another."""
        ends_round = self.growth is not None
        self._check_due(BeginRequest, not self.is_walking and not self._grows)
        if self.follows(SetupRequest) or self.follows(WalkRequest):
            self.first_round = self.n_rounds
        n_rounds = request.n_rounds - self.first_round
        check_within(self.config, self.site.store, "BeginRequest", "n_rounds", n_rounds, "rounds")
        if self.follows(SetupRequest):
            self._meet(mail)
        done, letters = list[Done](), Letters()
        if ends_round:
            self.apply_splits(mail)
            done.append(self._finish_round())
        while self.n_rounds < request.n_rounds and not letters:
            letters = self._new_round()
            if not letters:
                # Only the active party has columns in this round.
                growth = self.growing()
                while growth.growing:
                    self._send_splits(growth, *self._choose(growth, {}))
                    self.apply_splits(Mail(self.name, []))
                done.append(self._finish_round(is_local=True))
        n_blocks = self._n_blocks_left if letters else 0
        trees = split_trees(self.trees, self.offsets)
        reply = BeginReply(
            begun=bool(letters),
            n_blocks=n_blocks,
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
        self._check_due(EncryptRequest, self.unsent is not None)
        start, ciphertexts = self._next_block()
        letter = MoreGradients(self.n_rounds, start, ciphertexts)
        return SentReply(), [(name, letter) for name in self.others if len(self.drawn(name))]

    def split(self, request: SplitRequest, mail: Mail) -> tuple[SplitReply, Letters]:
        """Algorithm 2: decrypt the others' sums, add the local ones, choose."""
        self._check_due(SplitRequest, self._grows and self.unsent is None)
        if self.chosen is not None:
            self.apply_splits(mail)
        growth = self.growing()
        sums = {name: self.party_sums(mail, name, growth) for name in self.others}
        routes, sets = self._choose(growth, sums)
        letters = self._send_splits(growth, routes, sets)
        if not growth.growing:
            check_range(growth.grown().trees)
        others = {owner for owner, _ in self._owners(routes["column"])} - {self.name}
        return SplitReply(growth.growing, passive_splits=bool(others)), letters

    # A round

    @property
    def _grows(self) -> bool:
        """Whether nodes of the round's trees wait for sums."""
        return self.growth is not None and len(self.growth.open_nodes) > 0

    def growing(self) -> Growth:
        """Trees of the round in progress."""
        assert self.growth is not None
        shape = Shape.of(parameters_of(self.settings))
        cuts, limits = self.joint.cuts, self._limits
        return Growth(self.width, cuts, self.allowed, shape, limits, self.growth)

    @property
    def _limits(self) -> Limits:
        """Column draws of the round in progress, and constraints."""
        settings, groups = self.settings, tuple(map(frozenset, self.interactions))
        shares = settings.colsample_bylevel, settings.colsample_bynode
        return Limits(settings.seed, self.n_rounds, *shares, self.monotone, groups)

    def _owners(self, columns: npt.NDArray[np.generic]) -> list[tuple[str, int]]:
        """Owner of each joint column, and its number there."""
        return [self.joint.owner(column) for column in columns.tolist()]

    def drawn(self, party: str) -> Ints:
        """A party's columns, by its numbers, that some tree of the round may split."""
        return self.joint.columns_of(party, np.flatnonzero(self.allowed.any(axis=0)))

    def _new_round(self) -> Letters:
        """Start a round; letters with the first gradients, none if no passive column is drawn."""
        settings, joint, rows = self.settings, self.joint, slice(self.n_train)
        round_id, width, weights = self.n_rounds, self.width, self.weights[rows]
        margins, numbers = self.margins[rows], self.numbers[rows]
        pairs = gradients(self.objective, margins, numbers, weights, self.parameters)
        if settings.subsample < 1 or settings.goss:
            entropy = self.site.entropy(settings.seed, round_id, 1, share=settings.subsample)
            drawn = draw_rows(pairs.copy(), settings, np.random.default_rng(entropy))
            n_rows, n_drawn = (int(each.any(axis=(1, 2)).sum()) for each in (pairs, drawn))
            if check_sample_size(self.config, n_rows, n_drawn) == n_drawn:
                pairs = drawn
        n_columns = joint.cuts.n_columns
        sampling = Sampling(settings.seed, settings.colsample_bytree)
        allowed = sampling.columns(round_id, width, n_columns)
        if round_id < settings.first_trees:
            owners = np.array([owner for owner, _ in self._owners(np.arange(n_columns))])
            allowed = allowed & (owners == self.name)
        # pairs: (n_rows, n_outputs, 2)
        self.gradients = np.ascontiguousarray(pairs.transpose(1, 0, 2))
        self.allowed = allowed
        self.nodes = np.zeros((width, len(self.numbers)), dtype=np.int32)
        self.round_records = np.empty((0, 3), dtype=np.int64)
        shape = Shape.of(parameters_of(settings))
        growth = Growth(width, joint.cuts, allowed, shape, self._limits)
        growth.set_roots(pairs.sum(axis=0, dtype=np.float64))
        self.growth = growth.state
        columns = {name: self.drawn(name) for name in self.others}
        return self._encrypt(pairs, columns) if any(map(len, columns.values())) else []

    def _encrypt(self, pairs: Floats, columns: Mapping[str, Ints]) -> Letters:
        """Letters with the same ciphertexts for every party that has columns in this round."""
        drawn = (pairs != 0).any(axis=(1, 2))
        scale = FixedPoint.covering(pairs[drawn])
        self.exponents, self.n_sent = scale.exponents, 0
        self.unsent = scale.encode(pairs[drawn])
        _, ciphertexts = self._next_block()
        letter = EncryptedGradients(
            self.n_rounds, np.packbits(drawn), np.empty(0, np.int64), ciphertexts
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

    @property
    def _n_blocks_left(self) -> int:
        """Messages that the rest of the round's gradients takes."""
        if self.unsent is None:
            return 0
        return -(-(len(self.layouts) * len(self.unsent) - self.n_sent) // self._block_rows)

    def _next_block(self) -> tuple[int, Bytes]:
        """The next ciphertexts of the round, and the number of the first."""
        assert self.unsent is not None
        fields, start = self.unsent, self.n_sent
        n_all = len(self.layouts) * len(fields)
        self.n_sent = min(n_all, start + self._block_rows)
        if self.n_sent == n_all:
            self.unsent = None
        return start, encrypted(self.private_key, self.layouts, fields, start, self.n_sent)

    def _choose(
        self, growth: Growth, sums: Mapping[str, tuple[Histogram, Array]]
    ) -> tuple[Routes, CategorySets]:
        """Splits of a level from the sums of all parties, and their category sets."""
        joint, name = self.joint, self.name
        histograms = np.zeros((len(growth.wanted), len(growth.cuts.edges), 2))
        missing = np.zeros((len(growth.wanted), growth.cuts.n_columns), dtype=np.int32)
        local_columns = np.arange(len(joint.widths[name]))
        columns = {party: self.drawn(party) for party in sums} | {name: local_columns}
        local = build_all_histograms(
            self.codes,
            self.missing_code,
            local_columns,
            self.cuts.widths,
            self.gradients,
            self.nodes[:, : self.n_train],
            *growth.wanted.T,
        )
        for party, (histogram, counts) in {**sums, name: local}.items():
            histograms[:, joint.bins(party, columns[party])] = histogram
            missing[:, columns[party] + joint.firsts[party]] = counts
        return growth.split(histograms, missing)

    def party_sums(self, mail: Mail, party: str, growth: Growth) -> tuple[Histogram, Array]:
        """Decrypt a passive party's sums of the wanted nodes."""
        letter, columns = mail.one(EncryptedSums, party), self.drawn(party)
        wanted = growth.wanted
        if (letter.round_id, letter.level) != (self.n_rounds, growth.level):
            raise ProtocolError(party, "EncryptedSums", "level", "must be the one being split")
        if letter.missing.shape != (len(wanted), len(columns)):
            rule = f"must be of shape {(len(wanted), len(columns))}, got {letter.missing.shape}"
            raise ProtocolError(party, "EncryptedSums", "missing", rule)
        n_bins = int(self.joint.widths[party][columns].sum())
        key, layouts, scale = self.private_key, self.layouts, FixedPoint(self.exponents)
        with as_protocol_error(party, "EncryptedSums", "ciphertexts"):
            firsts = _firsts(layouts)
            jobs = list(sum_jobs(layouts, growth.level, *wanted.T)) if n_bins else []
            n_expected = sum(
                layouts[group].n_plaintexts(len(nodes) * n_bins) for group, _, nodes in jobs
            )
            if len(letter.ciphertexts) != n_expected:
                raise ValueError(f"ciphertexts must be {n_expected}, got {len(letter.ciphertexts)}")
            histograms, taken = np.zeros((len(wanted), n_bins, 2)), 0  # gradients, hessians
            for group, tree, nodes in jobs:
                layout, n_sums = layouts[group], len(nodes) * n_bins
                ciphertexts = letter.ciphertexts[taken : taken + layout.n_plaintexts(n_sums)]
                taken += layout.n_plaintexts(n_sums)
                sums = read_sums(key, ciphertexts, layout, scale, n_sums, shared_workers())
                # At the root, one job sums for all trees of a group.
                for member in (tree,) if growth.level else range(firsts[group], firsts[group + 1]):
                    node_sums = sums[:, member - firsts[group]].reshape(len(nodes), n_bins, 2)
                    histograms[wanted[:, 0] == member] = node_sums
            return histograms, letter.missing

    def _send_splits(self, growth: Growth, routes: Routes, sets: CategorySets) -> Letters:
        """Make the local splits of a level; returns the letters for the others."""
        owners = self._owners(routes["column"])
        is_local = np.array([name == self.name for name, _ in owners], dtype=bool)
        local, columns = routes[is_local], np.array([column for _, column in owners], np.int64)
        bits, records = self.make_splits(
            local["tree"],
            local["node"],
            columns[is_local],
            local["threshold"].astype(np.int64),
            local["default_left"].astype(np.uint8),
            _sets_of(local, sets),
        )
        self.chosen = Chosen(routes, np.flatnonzero(is_local), bits, records)
        self.growth = growth.state
        letters = [(party, self._splits_for(party, growth, sets)) for party in self.others]
        # After the last level, a party gets its splits only.
        return [(party, letter) for party, letter in letters if len(letter.trees)]

    def _splits_for(self, party: str, growth: Growth, sets: CategorySets) -> Splits:
        """A level's splits for one party, without others' cuts."""
        assert self.chosen is not None
        routes, local, bits = self.chosen.routes, self.chosen.local, self.chosen.bits
        owners = self._owners(routes["column"])
        is_theirs = np.array([name == party for name, _ in owners], dtype=bool)
        columns = np.array([column if name == party else -1 for name, column in owners], np.int64)
        shown = np.ones(len(routes), dtype=bool) if growth.growing else is_theirs
        wanted = growth.wanted
        return Splits(
            level=growth.level,
            trees=routes["tree"][shown],
            nodes=routes["node"][shown],
            lefts=routes["left"][shown],
            columns=columns[shown],
            first_rights=np.where(is_theirs, routes["threshold"], 0).astype(np.int64)[shown],
            defaults=(is_theirs & routes["default_left"]).astype(np.uint8)[shown],
            set_bits=_sets_of(routes[is_theirs], sets).bits,
            bits_of=local if growth.growing else local[:0],
            bits=bits if growth.growing else bits[:0],
            wanted_trees=wanted[:, 0],
            wanted_nodes=wanted[:, 1],
        )

    def apply_splits(self, mail: Mail) -> None:
        """Move all rows to the children, once the sides of every split are known."""
        assert self.chosen is not None
        assert self.growth is not None
        routes, local = self.chosen.routes, self.chosen.local
        is_last, level = not self._grows, self.growth.level
        owners = np.array([owner for owner, _ in self._owners(routes["column"])])
        sources, records = [(self.name, local, self.chosen.bits)], np.full(len(routes), -1)
        records[local] = self.chosen.records
        for party, letter in mail.all(Partition).items():
            theirs = np.flatnonzero(owners == party)
            # After the last level a party has received its splits only, so it numbers these.
            expected = np.arange(len(theirs)) if is_last else theirs
            fits = letter.level == level and np.array_equal(letter.bits_of, expected)
            if not fits or len(letter.records) != len(theirs):
                raise ProtocolError(party, "Partition", "bits_of", "must be its splits")
            sources.append((party, theirs, letter.bits))
            records[theirs] = letter.records
        self.nodes_before, self.last_routes = self.nodes, routes
        split = routes["tree"], routes["node"], routes["left"]
        self.nodes = nodes_after(self.nodes, *split, sources)
        of_level = np.stack((routes["tree"], routes["node"], records), axis=1).astype(np.int64)
        self.round_records = np.concatenate((self.round_records, of_level))
        self.chosen = None

    def _finish_round(self, is_local: bool = False) -> Done:
        """Add the trees and their leaf values; returns scores and purities."""
        trees = [tree.copy() for tree in self.growing().grown().trees]
        for tree in trees:
            tree["set"] = NO_SET  # sets are in the lookup tables
        steps = [tree["value"][nodes] for tree, nodes in zip(trees, self.nodes, strict=True)]
        self.margins = self.margins + np.stack(steps, axis=1)
        records = [np.full(len(tree), -1, dtype=np.int64) for tree in trees]
        for tree_id, node, record in self.round_records:
            records[tree_id][node] = record
        earlier = split_trees(self.trees, self.offsets)
        self.trees, self.offsets = stack_trees((*earlier, *trees))
        self.records = np.concatenate((self.records, *records))
        self.growth = None
        purities = [] if is_regression(self.objective) else self._purities(is_local)
        scores = self._scores(self.margins)
        self._note_best(scores["valid"])
        return scores["train"], scores["valid"], purities

    def _purities(self, is_local: bool) -> list[float]:
        """Mean purity of leaves, and of the row groups that each passive party can distinguish."""
        rows, routes = slice(self.n_train), self.last_routes
        labels, leaves = self.numbers[rows].astype(np.int64), self.nodes[:, rows]
        owners = np.array([owner for owner, _ in self._owners(routes["column"])])
        views = [leaves]
        for party in self.others:
            if is_local:
                views.append(np.zeros_like(leaves))
                continue
            seen = routes[owners == party]
            splits = np.stack((seen["tree"], seen["node"]), axis=1).astype(np.int64)
            views.append(last_seen(self.nodes_before[:, rows], leaves, splits))
        return [mean_purity(labels, groups) for groups in views]

    def _scores(self, margins: Floats) -> dict[str, dict[str, float]]:
        """Scores by subset; none for a subset without rows."""
        places = {subset: self.rows_of(subset) for subset in SUBSETS}
        rows = {
            subset: (margins[place], self.numbers[place], self.weights[place])
            for subset, place in places.items()
        }
        return metrics.pooled_subsets(self.objective, rows, self.settings.eval_metrics)

    def _note_best(self, valid: Mapping[str, float]) -> None:
        """Store the margins of a round that is the best so far."""
        name = metrics.stopping_metric(self.objective, self.settings.eval_metrics)
        score = valid.get(name, float("nan"))
        signed = score if metrics.larger_is_better(name) else -score
        if signed > (self.best.score if self.best else -np.inf):  # never true for NaN
            self.best = Best(float(signed), self.n_rounds, self.margins)

    # The end of a run

    def finish(self, request: FinishRequest, mail: Mail) -> tuple[FinishReply, Letters]:
        """Truncate the model to its best round, score and store it; join parts if all allow it."""
        margins = self._margins_after(request.best_round)
        model, records = self._first_rounds(request.best_round)
        if self.base_margins is not None:
            model = replace(model, margin_column=self.config.base_margin)
        scores = self._scores(margins)
        test_margins = margins[self.rows_of("test")]
        compare_with_local(self, self.numbers, self.objective, test_margins, self.parameters)
        part = ActivePart(
            **self.part_fields(),
            lookup=self.lookup,
            name=self.name,
            digests={name: mail.one(PartKept, name).digest.tobytes() for name in self.others},
            model=model,
            records=tuple(records),
            n_columns={name: len(widths) for name, widths in self.joint.widths.items()},
            threshold=scores["train"].get("threshold") or None,  # 0 is no proposal
        )
        write_part(self.folder, part)
        is_shared = all(self.shared_names.values())
        by_column = importance(model) if is_shared else {"total_gain": {}, "count": {}}
        reply = FinishReply(
            n_trees=len(model.trees),
            **score_arrays(scores),
            column_names=tuple(by_column["total_gain"]),
            column_gains=np.array(list(by_column["total_gain"].values()), dtype=np.float64),
            column_counts=np.array(list(by_column["count"].values()), dtype=np.int64),
            model=self._whole(mail, model, records),
            scale_pos_weight=self.parameters.scale_pos_weight,
        )
        self.end()
        return reply, []

    def _margins_after(self, n_rounds: int) -> Floats:
        """Margins after all rounds, or after the best; raises a ProtocolError for others."""
        if n_rounds == self.n_rounds:
            return self.margins
        if self.best is None or n_rounds != self.best.n_rounds:
            best = self.best.n_rounds if self.best else None
            rule = f"must be {self.n_rounds} or {best}, got {n_rounds}"
            raise ProtocolError(self.name, "FinishRequest", "best_round", rule)
        return self.best.margins

    def _first_rounds(self, n_rounds: int) -> tuple[Ensemble, list[Ints]]:
        """The first rounds without thresholds, and the record ids of each tree's nodes."""
        n_trees = n_rounds * self.width
        records = [self.records[a:b] for a, b in pairwise(self.offsets)]
        names = {
            party: self.shared_names[party]
            or [f"{party} column {column + 1}" for column in range(len(widths))]
            for party, widths in self.joint.widths.items()
        }
        trees = split_trees(self.trees, self.offsets)[:n_trees]
        model = Ensemble(
            self.objective,
            np.array(self.base_score),
            joint_names(names),
            self.classes,
            trees,
            parameters=self.parameters,
        )
        return model, records[:n_trees]

    def _whole(self, mail: Mail, model: Ensemble, records: list[Ints]) -> Bytes:
        """The whole model as JSON if every party allows it; else empty."""
        if not self.exports:
            return np.empty(0, dtype=np.uint8)
        order, parts = (
            list(self.joint.widths),
            {name: self._records(mail, name) for name in self.others},
        )
        parts[self.name] = self.lookup, self.columns, self.categories, self.kinds
        lookups = [parts[party][0] for party in order]
        owners = [
            np.array([order.index(owner) for owner, _ in self._owners(tree["column"])])
            for tree in model.trees
        ]
        # Each party must have sent every split that it has made.
        for number, (party, table) in enumerate(zip(order, lookups, strict=True)):
            own_records = [ids[by == number] for ids, by in zip(records, owners, strict=True)]
            n_made = 1 + max((int(ids.max(initial=-1)) for ids in own_records), default=-1)
            if n_made > len(table.thresholds):
                rule = f"must be {n_made} at least, got {len(table.thresholds)}"
                raise ProtocolError(party, "Records", "thresholds", rule)
        names = joint_names({party: parts[party][1] for party in order})
        coded = side_by_side((parts[party][2], len(parts[party][1])) for party in order)
        kinds = tuple(kind for party in order for kind in parts[party][3])
        text = to_text(whole_model(model, records, owners, lookups, names, coded, kinds))
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def _records(
        self, mail: Mail, party: str
    ) -> tuple[Lookup, tuple[str, ...], Categories, tuple[str, ...]]:
        """Another party's splits; names, categories and kinds of its columns."""
        letter, n_columns = mail.one(Records, party), len(self.joint.widths[party])
        if len(letter.names) != n_columns:
            rule = f"must be {n_columns}, got {len(letter.names)}"
            raise ProtocolError(party, "Records", "names", rule)
        categories = read_categories(party, letter, n_columns)
        n_bins = np.where(self.joint.categorical[party], self.joint.widths[party], 0)
        counts = category_counts(categories, n_columns)  # includes those in no training row
        fits = bool((counts >= n_bins).all()) and len(letter.widths) == len(letter.columns)
        fits = fits and bool((letter.columns < n_columns).all())
        if not fits or not np.array_equal(letter.widths, counts[letter.columns]):
            rule = "must be of the party's columns and their categories"
            raise ProtocolError(party, "Records", "widths", rule)
        with as_protocol_error(party, "Records", "kinds"):
            check_kinds(letter.kinds, n_columns)
        with as_protocol_error(party, "Records", "set_bits"):
            sets = CategorySets(letter.set_bits, letter.widths[letter.widths > 0])
        cuts = letter.columns, letter.thresholds, letter.defaults
        return Lookup(*cuts, letter.widths, sets.bits), letter.names, categories, letter.kinds


def draw_rows(pairs: Floats, settings: SetupRequest, rng: np.random.Generator) -> Floats:
    """Gradients, with those of rows that are not drawn set to 0.

    Source of GOSS: Ke et al. 2017, "LightGBM", Algorithm 2.
    """
    n_rows = len(pairs)
    if settings.subsample < 1:
        pairs[rng.random(n_rows) >= settings.subsample] = 0
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


def encrypted(
    key: PrivateKey, layouts: tuple[PairLayout, ...], fields: Ints, start: int, stop: int
) -> Bytes:
    """Ciphertexts ``start`` to ``stop`` of all rows, layout by layout."""
    firsts = _firsts(layouts)
    blocks = [np.empty((0, key.public.ciphertext_bytes), dtype=np.uint8)]
    while start < stop:
        group, row = divmod(start, len(fields))
        end = min(len(fields), row + min(ROWS_AT_ONCE, stop - start))
        group_fields = fields[row:end, firsts[group] : firsts[group + 1]]
        blocks.append(encrypt(key, layouts[group].pack(group_fields), shared_workers()))
        start += end - row
    return np.concatenate(blocks)


def _firsts(layouts: tuple[PairLayout, ...]) -> list[int]:
    """The first tree of each layout, and the end."""
    return [0, *accumulate(layout.n_outputs for layout in layouts)]


def _sets_of(routes: Routes, sets: CategorySets) -> CategorySets:
    return sets.take(routes["set"][routes["set"] != NO_SET])


def _rows(lists: list[list[float]]) -> npt.NDArray[np.float64]:
    width = len(lists[0]) if lists else 0  # all lists have one length
    return np.array(lists, dtype=np.float64).reshape(len(lists), width)
