"""SecureBoost at the active party: gradients, splits, leaf weights, and its part of the model.

Source: Cheng et al. 2019, Algorithm 2. Trees grow as XGBoost's do over the joint columns of all
parties; of other parties' columns this one knows only the number of bins.

Departures: the paper encrypts gradient and hessian separately, here both share a ciphertext; only
the smaller child of each pair is summed, the other is the difference to the parent. Rules for ties
and missing values are XGBoost's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from clients.handshake import number_rows, stored_categories
from clients.inference import active_part, ask_on, begin_trees, take_answers
from clients.scoring import rows_of, score_arrays, warn_if_local_is_better
from clients.secureboost.shared import (
    BEGUN,
    CHOSEN,
    ENCRYPTING,
    GROWN,
    IDLE,
    INIT_MODEL,
    SET_UP,
    TO_WALK,
    WALKED,
    ConfiguredConstraints,
    add_leaves,
    apply_local_splits,
    code_categories,
    joint_constraints,
    keep_cuts,
    load_initial_lookup,
    load_initial_trees,
    local_constraints,
    nodes_after,
    parse_constraints,
    read_constraints,
)
from clients.vertical import check_order, draw_key
from fedapp import metrics
from fedapp.crypto.packing import PRECISION, FixedPoint, PairLayout, grouped_layouts
from fedapp.crypto.paillier import PrivateKey, encrypt
from fedapp.crypto.sums import read_sums
from fedapp.crypto.workers import shared_workers
from fedapp.data.labels import check_mean, check_weights
from fedapp.data.partition import SUBSETS
from fedapp.errors import ConfigError, ProtocolError, as_protocol_error
from fedapp.histograms.bins import digitise
from fedapp.histograms.build import Histogram, JointColumns, build_all_histograms, sum_jobs
from fedapp.messages.fields import Array, fields_of
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
from fedapp.messages.vertical import SentReply
from fedapp.site.answer import Site, enter, phase_of
from fedapp.site.mail import Letters, Mail
from fedapp.site.settings import check_sample_size
from fedapp.site.store import Store, write_part
from fedapp.site.trust import FIRST_ROUND, check_within
from fedapp.trees.categories import Categories, side_by_side
from fedapp.trees.divided import Lookup, joint_names, whole_model
from fedapp.trees.grow import Growth, Limits, Routes, Shape, last_seen, mean_purity
from fedapp.trees.model import Ensemble, check_range, importance, split_trees, stack_trees, to_json
from fedapp.trees.objective import (
    LossParameters,
    Objective,
    base_margin,
    base_score,
    check_base_margin,
    check_objective,
    gradients,
    is_regression,
    label_sums,
    n_outputs,
)
from fedapp.trees.predict import pack_bits
from fedapp.trees.rounds import Sampling, n_leaves
from fedapp.trees.sets import NO_SET, CategorySets, category_counts

Ints = npt.NDArray[np.int64]
Done = tuple[dict[str, float], dict[str, float], list[float]]  # scores, validation scores, purities

ROWS_AT_ONCE = 1 << 15  # packed and encrypted; bounds the Python integers in memory
BINS_A_COLUMN = 16  # on average, of most-columns: 26 MB of sums in a node with the usual 100,000


def setup(site: Site, request: SetupRequest, mail: Mail) -> tuple[SentReply, Letters]:
    """Check the rows' order, bin the columns, code the labels, draw and test the key."""
    store = site.store
    check_order(site, mail)
    settings = fields_of(request, SetupRequest)
    store.facts["boost"] = {
        name: value for name, value in settings.items() if not isinstance(value, np.ndarray | tuple)
    }
    with as_protocol_error(site.name, "SetupRequest", "objective"):
        check_objective(request.objective)
    with as_protocol_error(site.name, "SetupRequest", "eval_metrics"):
        metrics.check_metrics(request.objective, request.eval_metrics)
    store.facts["eval_metrics"] = list(request.eval_metrics)
    width = _code_labels(site, request)
    cuts = keep_cuts(store, request.max_bin, code_categories(store))
    train = np.asarray(store["values"][: store.facts["n_train"]])
    store["codes"], store.facts["missing_code"] = digitise(train, cuts)
    load_initial_lookup(site)
    parse_constraints(site, request)  # raises for malformed texts before anything is sent
    n_train = store.facts["n_train"]
    key = draw_key(
        site, request, "secureboost", lambda public: grouped_layouts(public.bits, n_train, width)
    )
    store["key"] = key.to_array()
    enter(store, TO_WALK if request.init_model else SET_UP)
    letter = PublicKey(key.public.to_array(), width, n_train, PRECISION)
    return SentReply(), [(name, letter) for name in site.others]


def walk(site: Site, request: WalkRequest, mail: Mail) -> tuple[WalkReply, Letters]:
    """Route the rows down the initial model as far as answers and local splits allow."""
    store, part = site.store, active_part(site, site.store.facts[INIT_MODEL])
    if "nodes" not in store:
        _meet(site, mail)
        for name in site.others:
            part.check(name, mail.one(ColumnBins, name).part)
        begin_trees(store, part, 0, 0)
    else:
        take_answers(site, mail, part)
    letters = ask_on(site, part, 0)
    if not letters:
        add_leaves(store, part)
    enter(store, TO_WALK if letters else WALKED)
    n_trees = len(part.model.trees)
    return WalkReply(not letters, n_rounds=store.facts["n_rounds"], n_trees=n_trees), letters


def begin(site: Site, request: BeginRequest, mail: Mail) -> tuple[BeginReply, Letters]:
    """Finish the round in progress, grow rounds without passive columns, start another."""
    store, phase = site.store, phase_of(site.store)
    first = store.facts.setdefault(FIRST_ROUND, store.facts["n_rounds"])
    n_rounds = request.n_rounds - first
    check_within(site.config, store, "BeginRequest", "n_rounds", n_rounds, "rounds")
    if phase == SET_UP:
        _meet(site, mail)
    state, done, letters = ActiveState.read(site), list[Done](), Letters()
    if phase == GROWN:
        make_splits(state, mail)
        done.append(finish_round(state))
    while store.facts["n_rounds"] < request.n_rounds and not letters:
        letters = new_round(site, state)
        if not letters:
            # Only the active party has columns in this round.
            growth = state.growth()
            while growth.growing:
                send_splits(state, growth, *choose(state, growth, {}))
                make_splits(state, Mail(state.name, []))
            done.append(finish_round(state, is_local=True))
    n_blocks = n_blocks_left(state) if letters else 0
    enter(store, (ENCRYPTING if n_blocks else BEGUN) if letters else IDLE)
    reply = BeginReply(
        begun=bool(letters),
        n_blocks=n_blocks,
        n_trees=len(store["model.offsets"]) - 1,
        n_leaves=store.facts["n_leaves"],
        score_names=tuple(done[0][0]) if done else (),
        train_scores=_rows([list(train.values()) for train, _, _ in done]),
        valid_scores=_rows([list(valid.values()) for _, valid, _ in done]),
        purities=_rows([views for _, _, views in done]),
    )
    return reply, letters


def send_on(site: Site, request: EncryptRequest, mail: Mail) -> tuple[SentReply, Letters]:
    """The next block of the round's gradients, for parties with columns in it."""
    state = ActiveState.read(site)
    receivers = [name for name in state.passive if len(state.drawn(name))]
    start, ciphertexts = _next_block(state, len(receivers))
    letter = MoreGradients(site.store.facts["n_rounds"], start, ciphertexts)
    enter(site.store, ENCRYPTING if n_blocks_left(state) else BEGUN)
    return SentReply(), [(name, letter) for name in receivers]


def split(site: Site, request: SplitRequest, mail: Mail) -> tuple[SplitReply, Letters]:
    """Algorithm 2: decrypt the others' sums, add the local ones, choose."""
    state = ActiveState.read(site)
    if phase_of(site.store) == CHOSEN:
        make_splits(state, mail)
    growth = state.growth()
    sums = {name: read_party_sums(state, mail, name, growth) for name in state.passive}
    routes, sets = choose(state, growth, sums)
    letters = send_splits(state, growth, routes, sets)
    if not growth.growing:
        check_range(growth.grown().trees)
    enter(site.store, CHOSEN if growth.growing else GROWN)
    others = {owner for owner, _ in state.owners(routes["column"])} - {site.name}
    return SplitReply(growth.growing, passive_splits=bool(others)), letters


def _code_labels(site: Site, request: SetupRequest) -> int:
    """Code labels, set the initial margins; returns the number of trees per round."""
    objective, parameters = cast(Objective, request.objective), LossParameters.of(request)
    store, n_train = site.store, site.store.facts["n_train"]
    classes, labels = number_rows(site, objective)
    check_weights(store["weights"][:n_train])
    rows = labels[:n_train], store["weights"][:n_train]
    sums = label_sums(objective, *rows, len(classes)), float(rows[1].sum(dtype=np.float64))
    mean = base_score(objective, *sums, parameters)
    check_mean(objective, mean)
    store.facts |= {"n_rounds": 0, "n_leaves": 0}
    store["labels"] = labels
    store["model.nodes"], store["model.offsets"] = stack_trees(())
    store["model.records"] = np.empty(0, dtype=np.int64)
    if request.init_model:
        mean = load_initial_trees(site, request, classes)
    store.facts["classes"], store["base_score"] = list(classes), mean
    if "base_margins" in store:
        try:
            check_base_margin(objective)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        store["margins"] = store["base_margins"][:, None]
    else:
        store["margins"] = np.tile(base_margin(objective, mean), (len(store["labels"]), 1))
    return len(mean)


def _meet(site: Site, mail: Mail) -> None:
    """Check and store the others' numbers of bins, shared names and constraints."""
    store = site.store
    widths = {site.name: np.diff(store["offsets"]).tolist()}
    categorical = {site.name: (store["set_widths"] > 0).tolist()}
    names = {site.name: list(store.facts["columns"]) if site.config.shares_names else []}
    allows, boost = site.config.allows_export, store.facts["boost"]
    wanted = ConfiguredConstraints.of(
        boost["monotone_constraints"], boost["interaction_constraints"]
    )
    constraints = {site.name: local_constraints(site, wanted)}
    for name in site.others:
        bins = mail.one(ColumnBins, name)
        if len(bins.names) not in (0, len(bins.widths)):
            rule = f"must be {len(bins.widths)} or none, got {len(bins.names)}"
            raise ProtocolError(name, "ColumnBins", "names", rule)
        n_columns, max_bin = len(bins.widths), boost["max_bin"]
        limit = site.config.limits["most-columns"]
        by_category = np.resize(bins.categorical.astype(bool), n_columns)
        if n_columns > limit or (bins.widths[~by_category] > max_bin).any():
            rule = f"must be <= {max_bin} (max-bin), of {limit} columns at most (most-columns)"
            raise ProtocolError(name, "ColumnBins", "widths", rule)
        if (n_all := int(bins.widths.sum())) > (most_bins := BINS_A_COLUMN * limit):
            rule = f"must add up to <= {most_bins} ({BINS_A_COLUMN} x most-columns of {site.name})"
            raise ProtocolError(name, "ColumnBins", "widths", f"{rule}, got {n_all}; lower max-bin")
        if len(bins.categorical) != n_columns:
            rule = f"must be {n_columns}, got {len(bins.categorical)}"
            raise ProtocolError(name, "ColumnBins", "categorical", rule)
        widths[name], names[name] = bins.widths.tolist(), list(bins.names)
        categorical[name] = by_category.tolist()
        constraints[name] = read_constraints(name, bins, len(wanted.names), n_columns)
        allows = allows and bins.allows_export
    peers = store.facts["peers"]
    store.facts["widths"] = {name: widths[name] for name in peers}
    store.facts["categorical"] = {name: categorical[name] for name in peers}
    joint = joint_constraints(wanted, {name: constraints[name] for name in peers}, categorical)
    store.facts["monotone"], store.facts["interactions"] = joint
    store.facts["shared_names"], store.facts["export"] = names, allows


def _rows(lists: list[list[float]]) -> npt.NDArray[np.float64]:
    width = len(lists[0]) if lists else 0  # all lists have one length
    return np.array(lists, dtype=np.float64).reshape(len(lists), width)


@dataclass(frozen=True, slots=True, eq=False)
class ActiveState:
    """Constants of a run, and access to the state of its round; read from the store once a step."""

    name: str  # of the active party
    passive: list[str]
    store: Store
    boost: Mapping[str, Any]  # settings, by the names of ``SetupRequest``
    objective: Objective
    parameters: LossParameters
    eval_metrics: tuple[str, ...]  # besides the objective's
    n_train: int  # training rows are the first ones
    width: int  # trees per round
    joint: JointColumns
    key: PrivateKey
    layouts: tuple[PairLayout, ...]  # of packed gradients, one per group of trees

    @classmethod
    def read(cls, site: Site) -> ActiveState:
        """The state, from the first round on."""
        store, facts = site.store, site.store.facts
        boost, n_train, key = facts["boost"], facts["n_train"], PrivateKey.from_array(store["key"])
        width = n_outputs(boost["objective"], len(facts["classes"]))
        return cls(
            name=site.name,
            passive=site.others,
            store=store,
            boost=boost,
            objective=boost["objective"],
            parameters=LossParameters(
                **{each.name: boost[each.name] for each in fields(LossParameters)}
            ),
            eval_metrics=tuple(facts["eval_metrics"]),
            n_train=n_train,
            width=width,
            joint=JointColumns(
                {name: np.array(w, np.int64) for name, w in facts["widths"].items()},
                {name: np.array(c, dtype=bool) for name, c in facts["categorical"].items()},
            ),
            key=key,
            layouts=grouped_layouts(key.public.bits, n_train, width),
        )

    def owners(self, columns: npt.NDArray[Any]) -> list[tuple[str, int]]:
        """Owner of each joint column, and its number there."""
        return [self.joint.owner(int(column)) for column in columns]

    def growth(self) -> Growth:
        """The round in progress."""
        allowed = self.store["allowed"].astype(bool)
        shape = Shape.of(self.boost)
        return Growth.restored(
            lambda name: self.store[f"growth.{name}"], self.joint.cuts, allowed, shape, self.limits
        )

    @property
    def limits(self) -> Limits:
        """Column draws of the round in progress, and constraints."""
        boost, facts = self.boost, self.store.facts
        shares = boost["colsample_bylevel"], boost["colsample_bynode"]
        monotone = np.array(facts["monotone"], dtype=np.int8)
        interactions = tuple(map(frozenset, facts["interactions"]))
        return Limits(boost["seed"], facts["n_rounds"], *shares, monotone, interactions)

    def keep(self, growth: Growth) -> None:
        """Store the round in progress."""
        for name, array in growth.arrays().items():
            self.store[f"growth.{name}"] = array

    def drawn(self, party: str) -> Ints:
        """A party's columns, by its numbers, that some tree of the round may split."""
        return self.joint.columns_of(party, np.flatnonzero(self.store["allowed"].any(axis=0)))


@dataclass(frozen=True, slots=True, eq=False)
class Chosen:
    """A level's splits, until the sides of all are known."""

    routes: Routes  # on joint columns
    own: Ints  # indices of the local splits
    bits: npt.NDArray[np.uint8]  # packed sides of the local splits
    records: Ints  # record ids of the local splits


def new_round(site: Site, state: ActiveState) -> Letters:
    """Start a round; letters with the first gradients, none if no passive column is drawn."""
    store, boost, joint = state.store, state.boost, state.joint
    rows, round_id = slice(state.n_train), store.facts["n_rounds"]
    labels, weights = store["labels"][rows], store["weights"][rows]
    pairs = gradients(state.objective, store["margins"][rows], labels, weights, state.parameters)
    if boost["subsample"] < 1 or boost["goss"]:
        entropy = site.entropy(boost["seed"], round_id, 1, share=boost["subsample"])
        drawn = draw_rows(pairs.copy(), boost, np.random.default_rng(entropy))
        n_rows, n_drawn = (int(each.any(axis=(1, 2)).sum()) for each in (pairs, drawn))
        if check_sample_size(site.config, n_rows, n_drawn) == n_drawn:
            pairs = drawn
    n_columns = joint.cuts.n_columns
    sampling = Sampling(boost["seed"], boost["colsample_bytree"])
    allowed = sampling.columns(round_id, state.width, n_columns)
    if round_id < boost["first_trees"]:
        owners = np.array([owner for owner, _ in state.owners(np.arange(n_columns))])
        allowed = allowed & (owners == state.name)
    # pairs: (n_rows, n_trees, 2); the store keeps (n_trees, n_rows, 2)
    store["gradients"] = np.ascontiguousarray(pairs.transpose(1, 0, 2))
    store["allowed"] = allowed.astype(np.uint8)
    store["nodes"] = np.zeros((state.width, len(store["labels"])), dtype=np.int32)
    store["round.records"] = np.empty((0, 3), dtype=np.int64)
    growth = Growth(state.width, joint.cuts, allowed, Shape.of(boost), state.limits)
    growth.set_roots(pairs.sum(axis=0, dtype=np.float64))
    state.keep(growth)
    columns = {name: state.drawn(name) for name in state.passive}
    return _encrypt(state, pairs, columns) if any(map(len, columns.values())) else []


def draw_rows(pairs: Array, boost: Mapping[str, Any], rng: np.random.Generator) -> Array:
    """Gradients, with those of rows that are not drawn set to 0.

    Source of GOSS: Ke et al. 2017, "LightGBM", Algorithm 2.
    """
    n_rows = len(pairs)
    if boost["subsample"] < 1:
        pairs[rng.random(n_rows) >= boost["subsample"]] = 0
    if not boost["goss"]:
        return pairs
    n_top, n_other = (int(boost[rate] * n_rows) for rate in ("top_rate", "other_rate"))
    order = np.argsort(-np.abs(pairs[..., 0]).sum(axis=1), kind="stable")
    factors = np.zeros(n_rows, dtype=np.float32)
    factors[order[:n_top]] = 1
    others = rng.choice(order[n_top:], min(n_other, n_rows - n_top), replace=False)
    # Weighted up, so that sums over drawn rows estimate those over all.
    factors[others] = (1 - boost["top_rate"]) / boost["other_rate"]
    return pairs * factors[:, None, None]


def _encrypt(state: ActiveState, pairs: Array, columns: dict[str, Ints]) -> Letters:
    """Letters with the same ciphertexts for every party that has columns in this round."""
    drawn = (pairs != 0).any(axis=(1, 2))
    scale = FixedPoint.covering(pairs[drawn])
    store, facts = state.store, state.store.facts
    facts["scale"] = list(scale.exponents)
    store["unsent"], facts["sent"] = scale.encode(pairs[drawn]), 0
    _, ciphertexts = _next_block(
        state, sum(len(party_columns) > 0 for party_columns in columns.values())
    )
    bits = np.packbits(drawn)
    n_rounds, nothing = facts["n_rounds"], ciphertexts[:0]  # for a party without columns
    return [
        (
            name,
            EncryptedGradients(
                n_rounds, bits, party_columns, ciphertexts if len(party_columns) else nothing
            ),
        )
        for name, party_columns in columns.items()
    ]


def n_blocks_left(state: ActiveState) -> int:
    """Messages that the rest of the round's gradients takes."""
    if "unsent" not in state.store:
        return 0
    n_receivers = sum(len(state.drawn(name)) > 0 for name in state.passive)
    n_left = len(state.layouts) * len(state.store["unsent"]) - int(state.store.facts["sent"])
    return -(-n_left // block_rows(state.key.public.ciphertext_bytes, n_receivers))


def _next_block(state: ActiveState, n_receivers: int) -> tuple[int, npt.NDArray[np.uint8]]:
    store, width = state.store, state.key.public.ciphertext_bytes
    fields, start = store["unsent"], store.facts["sent"]
    n_all = len(state.layouts) * len(fields)
    stop = store.facts["sent"] = min(n_all, start + block_rows(width, n_receivers))
    if stop == n_all:
        store.drop("unsent")
    return start, _encrypted(state, fields, start, stop)


def _encrypted(
    state: ActiveState, fields: npt.NDArray[np.int64], start: int, stop: int
) -> npt.NDArray[np.uint8]:
    """Ciphertexts ``start`` to ``stop`` of all rows, layout by layout."""
    firsts = np.cumsum([0, *(layout.n_outputs for layout in state.layouts)]).tolist()
    blocks = [np.empty((0, state.key.public.ciphertext_bytes), dtype=np.uint8)]
    while start < stop:
        group, row = divmod(start, len(fields))
        end = min(len(fields), row + min(ROWS_AT_ONCE, stop - start))
        group_fields = fields[row:end, firsts[group] : firsts[group + 1]]
        blocks.append(encrypt(state.key, state.layouts[group].pack(group_fields), shared_workers()))
        start += end - row
    return np.concatenate(blocks)


def choose(
    state: ActiveState, growth: Growth, sums: dict[str, tuple[Histogram, Array]]
) -> tuple[Routes, CategorySets]:
    """Splits of a level from the sums of all parties, and their category sets."""
    joint, name = state.joint, state.name
    histograms = np.zeros((len(growth.wanted), len(growth.cuts.edges), 2))
    missing = np.zeros((len(growth.wanted), growth.cuts.n_columns), dtype=np.int32)
    local_columns = np.arange(len(joint.widths[name]))
    columns = {party: state.drawn(party) for party in sums} | {name: local_columns}
    all_sums = sums | {
        name: build_all_histograms(
            state.store["codes"],
            state.store.facts["missing_code"],
            local_columns,
            np.diff(state.store["offsets"]),
            state.store["gradients"],
            state.store["nodes"][:, : state.n_train],
            *growth.wanted_pairs.T,
        )
    }
    for party, (histogram, counts) in all_sums.items():
        histograms[:, joint.bins(party, columns[party])] = histogram
        missing[:, columns[party] + joint.firsts[party]] = counts
    return growth.split(histograms, missing)


def read_party_sums(
    state: ActiveState, mail: Mail, party: str, growth: Growth
) -> tuple[Histogram, Array]:
    """Decrypt a passive party's sums of the wanted nodes."""
    letter, columns = mail.one(EncryptedSums, party), state.drawn(party)
    wanted = growth.wanted_pairs
    if (letter.round_id, letter.level) != (state.store.facts["n_rounds"], growth.level):
        raise ProtocolError(party, "EncryptedSums", "level", "must be the one being split")
    if letter.missing.shape != (len(wanted), len(columns)):
        rule = f"must be of shape {(len(wanted), len(columns))}, got {letter.missing.shape}"
        raise ProtocolError(party, "EncryptedSums", "missing", rule)
    n_bins = int(state.joint.widths[party][columns].sum())
    with as_protocol_error(party, "EncryptedSums", "ciphertexts"):
        key, layouts = state.key, state.layouts
        first, second = state.store.facts["scale"]
        scale = FixedPoint((first, second))
        firsts = np.cumsum([0, *(layout.n_outputs for layout in layouts)]).tolist()
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


def send_splits(state: ActiveState, growth: Growth, routes: Routes, sets: CategorySets) -> Letters:
    """Make the local splits of a level; returns the letters for the others."""
    store, owners = state.store, state.owners(routes["column"])
    local = np.array(
        [index for index, (name, _) in enumerate(owners) if name == state.name], dtype=np.int64
    )
    local_routes = routes[local]
    sides, records = apply_local_splits(
        store,
        local_routes["tree"],
        local_routes["node"],
        np.array([owners[index][1] for index in local], dtype=np.int64),
        local_routes["threshold"].astype(np.int64),
        local_routes["default_left"].astype(np.uint8),
        _sets_of(local_routes, sets),
    )
    chosen = Chosen(routes, local, pack_bits(sides), records)
    store.put("chosen", chosen)
    state.keep(growth)
    letters = [(party, _splits_for(party, owners, growth, chosen, sets)) for party in state.passive]
    # After the last level, a party gets its splits only.
    return [(party, letter) for party, letter in letters if len(letter.trees)]


def _splits_for(
    party: str, owners: list[tuple[str, int]], growth: Growth, chosen: Chosen, sets: CategorySets
) -> Splits:
    """A level's splits for one party, without others' cuts."""
    routes, local, bits = chosen.routes, chosen.own, chosen.bits
    is_theirs = np.array([name == party for name, _ in owners], dtype=bool)
    columns = np.array([column if name == party else -1 for name, column in owners], dtype=np.int64)
    shown = np.ones(len(routes), dtype=bool) if growth.growing else is_theirs
    wanted = growth.wanted_pairs
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


def _sets_of(routes: Routes, sets: CategorySets) -> CategorySets:
    return sets.take(routes["set"][routes["set"] != NO_SET])


def make_splits(state: ActiveState, mail: Mail) -> None:
    """Move all rows to the children, once the sides of every split are known."""
    store = state.store
    chosen = store.record(Chosen, "chosen")
    routes, local = chosen.routes, chosen.own
    last, nodes = not len(store["growth.wanted"]), store["nodes"]
    owners = np.array([owner for owner, _ in state.owners(routes["column"])])
    sources, records = [(state.name, local, chosen.bits)], np.full(len(routes), -1, dtype=np.int64)
    records[local] = chosen.records
    for party, letter in mail.all(Partition).items():
        theirs = np.flatnonzero(owners == party)
        # After the last level a party has received its splits only, so it numbers these.
        expected = np.arange(len(theirs)) if last else theirs
        fits = letter.level == store["growth.level"] and np.array_equal(letter.bits_of, expected)
        if not fits or len(letter.records) != len(theirs):
            raise ProtocolError(party, "Partition", "bits_of", "must be its splits")
        sources.append((party, theirs, letter.bits))
        records[theirs] = letter.records
    store["before"], store["last.routes"], store["last.owners"] = nodes, routes, owners
    split = routes["tree"], routes["node"], routes["left"]
    store["nodes"] = nodes_after(nodes, *split, sources)
    records_made = np.stack((routes["tree"], routes["node"], records), axis=1).astype(np.int64)
    store["round.records"] = np.concatenate((store["round.records"], records_made))
    store.drop("chosen")


def finish_round(state: ActiveState, is_local: bool = False) -> Done:
    """Add the trees and their leaf values; returns scores and purities."""
    store, trees = state.store, [tree.copy() for tree in state.growth().grown().trees]
    for tree in trees:
        tree["set"] = NO_SET  # sets are in the lookup tables
    nodes = store["nodes"]
    steps = [tree["value"][nodes[index]] for index, tree in enumerate(trees)]
    store["margins"] = store["margins"] + np.stack(steps, axis=1)
    # Record id of each split in its owner's lookup table.
    records = [np.full(len(tree), -1, dtype=np.int64) for tree in trees]
    for tree_id, node, record in store["round.records"]:
        records[tree_id][node] = record
    earlier = split_trees(store["model.nodes"], store["model.offsets"])
    store["model.nodes"], store["model.offsets"] = stack_trees((*earlier, *trees))
    store["model.records"] = np.concatenate((store["model.records"], *records))
    store.facts["n_rounds"] += 1
    store.facts["n_leaves"] = n_leaves(trees)
    purities = [] if is_regression(state.objective) else _purities(state, is_local)
    store.drop("growth", "before", "last", "gradients", "round")
    scores = scores_of(state, store["margins"])
    note_best(state, scores["valid"])
    return scores["train"], scores["valid"], purities


def _purities(state: ActiveState, is_local: bool) -> list[float]:
    """Mean purity of the leaves, and of the row groups that each passive party can distinguish."""
    store, rows = state.store, slice(state.n_train)
    labels, leaves = store["labels"][rows].astype(np.int64), store["nodes"][:, rows]
    views = [leaves]
    for party in state.passive:
        if is_local:
            views.append(np.zeros_like(leaves))
            continue
        routes = store["last.routes"][store["last.owners"] == party]
        splits_seen = np.stack((routes["tree"], routes["node"]), axis=1).astype(np.int64)
        views.append(last_seen(store["before"][:, rows], leaves, splits_seen))
    return [mean_purity(labels, groups) for groups in views]


def scores_of(state: ActiveState, margins: Array) -> dict[str, dict[str, float]]:
    """Scores by subset; none for a subset without rows."""
    labels, weights = state.store["labels"], state.store["weights"]
    places = {subset: rows_of(state.store, subset) for subset in SUBSETS}
    rows = {
        subset: (margins[of_subset], labels[of_subset], weights[of_subset])
        for subset, of_subset in places.items()
    }
    return metrics.pooled_subsets(state.objective, rows, state.eval_metrics)


def note_best(state: ActiveState, valid: dict[str, float]) -> None:
    """Store the margins of the round with the best validation score, the first of equals."""
    name = metrics.stopping_metric(state.objective, state.eval_metrics)
    facts = state.store.facts
    score = valid.get(name, float("nan"))
    signed = score if metrics.larger_is_better(name) else -score
    if signed > facts.get("best_score", -np.inf):  # never true for NaN
        facts |= {"best_score": signed, "best_round": facts["n_rounds"]}
        state.store["best.margins"] = state.store["margins"]


def margins_after(state: ActiveState, n_rounds: int) -> Array:
    """Margins after ``n_rounds``: all of them, or the best; raises a ProtocolError for others."""
    store, facts = state.store, state.store.facts
    if n_rounds == facts["n_rounds"]:
        return store["margins"]
    if n_rounds != facts.get("best_round"):
        rule = f"must be {facts['n_rounds']} or {facts.get('best_round')}, got {n_rounds}"
        raise ProtocolError(state.name, "FinishRequest", "best_round", rule)
    return store["best.margins"]


def finish(site: Site, request: FinishRequest, mail: Mail) -> tuple[FinishReply, Letters]:
    """Truncate the model to its best round, score and store it; join the parts if all allow it."""
    state, store = ActiveState.read(site), site.store
    model, records = _first_rounds(state, request.best_round)
    if "base_margins" in store:
        model = replace(model, margin_column=site.config.base_margin)
    margins = margins_after(state, request.best_round)
    scores = scores_of(state, margins)
    warn_if_local_is_better(site, state.objective, margins, state.parameters)
    part = {
        **store.record(Lookup, "lookup").to_json(
            store.facts["columns"], store["quantiles"], stored_categories(store)
        ),
        "active": True,
        "threshold": scores["train"].get("threshold"),
        "name": site.name,
        "parts": {n: mail.one(PartKept, n).digest.tobytes().hex() for n in state.passive},
        "model": to_json(model),
        "splits": [each.tolist() for each in records],
        "n_columns": {name: len(widths) for name, widths in state.joint.widths.items()},
        **({"base_margin": model.margin_column} if model.margin_column else {}),
    }
    write_part(store.folder, part)
    is_shared = all(store.facts["shared_names"].values())
    by_column = importance(model) if is_shared else {"total_gain": {}, "count": {}}
    whole = _whole(state, mail, model, records)
    kinds = [
        store.facts["kinds"] if name == state.name else mail.one(Records, name).kinds
        for name in (state.joint.widths if len(whole) else ())
    ]
    reply = FinishReply(
        n_trees=len(model.trees),
        **score_arrays(scores),
        column_names=tuple(by_column["total_gain"]),
        column_gains=np.array(list(by_column["total_gain"].values()), dtype=np.float64),
        column_counts=np.array(list(by_column["count"].values()), dtype=np.int64),
        model=whole,
        kinds=tuple(kind for each in kinds for kind in each),
    )
    store.forget()
    return reply, []


def _first_rounds(state: ActiveState, n_rounds: int) -> tuple[Ensemble, list[Ints]]:
    """The first rounds without thresholds, and the record ids of each tree's nodes."""
    store, n_trees = state.store, n_rounds * state.width
    offsets = store["model.offsets"]
    records = [store["model.records"][a:b] for a, b in pairwise(offsets)]
    shared = store.facts["shared_names"]
    names = {
        party: shared[party] or [f"{party} column {column + 1}" for column in range(len(widths))]
        for party, widths in state.joint.widths.items()
    }
    classes, mean = tuple(store.facts["classes"]), np.array(store["base_score"])
    trees = split_trees(store["model.nodes"], offsets)[:n_trees]
    columns, parameters = joint_names(names), state.parameters
    model = Ensemble(state.objective, mean, columns, classes, trees, parameters=parameters)
    return model, records[:n_trees]


def _whole(state: ActiveState, mail: Mail, model: Ensemble, records: list[Ints]) -> Array:
    """The whole model as JSON if every party allows it; else empty."""
    store, order = state.store, list(state.joint.widths)
    if not store.facts["export"]:
        return np.empty(0, dtype=np.uint8)
    parts = {name: _records(state, mail, name) for name in state.passive}
    lookup, categories = store.record(Lookup, "lookup"), stored_categories(store)
    parts[state.name] = lookup, list(store.facts["columns"]), categories
    lookups = [parts[party][0] for party in order]
    owners = [
        np.array([order.index(owner) for owner, _ in state.owners(tree["column"])])
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
    text = to_json(whole_model(model, records, owners, lookups, names, coded))
    return np.frombuffer(text.encode(), dtype=np.uint8)


def _records(state: ActiveState, mail: Mail, party: str) -> tuple[Lookup, list[str], Categories]:
    letter, n_columns = mail.one(Records, party), len(state.joint.widths[party])
    if len(letter.names) != n_columns:
        rule = f"must be {n_columns}, got {len(letter.names)}"
        raise ProtocolError(party, "Records", "names", rule)
    categories = read_categories(party, letter, n_columns)
    n_bins = np.where(state.joint.categorical[party], state.joint.widths[party], 0)
    counts = category_counts(categories, n_columns)  # includes those in no training row
    fits = bool((counts >= n_bins).all()) and len(letter.widths) == len(letter.columns)
    fits = fits and bool((letter.columns < n_columns).all())
    if not fits or not np.array_equal(letter.widths, counts[letter.columns]):
        rule = "must be of the party's columns and their categories"
        raise ProtocolError(party, "Records", "widths", rule)
    with as_protocol_error(party, "Records", "set_bits"):
        sets = CategorySets(letter.set_bits, letter.widths[letter.widths > 0])
    lookup = Lookup.of(letter.columns, letter.thresholds, letter.defaults, letter.widths, sets)
    return lookup, list(letter.names), categories
