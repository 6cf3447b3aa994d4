"""SecureBoost at the active party: gradients, choice of splits, leaf weights.

Source: Cheng et al. 2019, Algorithm 2. The trees grow as XGBoost's do over the joined columns of
all parties, of which this party knows its own alone; of another's it knows how many bins there are.

Departures: the paper encrypts gradient and hessian apart, here both travel in one ciphertext; the
smaller child of each pair is summed alone, the other is the difference to the parent. Rules for
ties and for missing values are XGBoost's.
"""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import numpy.typing as npt

from clients.alignment import check_order
from clients.secureboost_kept import GROWTH, Kept
from clients.secureboost_passive import Letters, own_sides, sides_of
from fedapp.crypto.keys import PrivateKey, generate_key
from fedapp.crypto.packing import PRECISION, FixedPoint, grouped_layouts
from fedapp.crypto.paillier import encrypt
from fedapp.crypto.sums import read_sums, self_test
from fedapp.crypto.workers import n_cores, shared_workers
from fedapp.errors import ConfigError, DataError, ProtocolError
from fedapp.histograms.bins import Cuts, digitise
from fedapp.histograms.build import Histogram, build_histograms
from fedapp.histograms.sketch import quantile_cuts
from fedapp.messages.fields import Array
from fedapp.messages.secureboost import (
    BeginReply,
    BeginRequest,
    ColumnBins,
    EncryptedGradients,
    EncryptedSums,
    FinishReply,
    FinishRequest,
    Partition,
    PartKept,
    PublicKey,
    Records,
    SentReply,
    SetupRequest,
    SplitReply,
    SplitRequest,
    Splits,
)
from fedapp.site.answer import Site, keep_reply, kept_reply
from fedapp.site.labels import REGRESSION, class_ids, class_names
from fedapp.site.mail import Mail, read_mail, write_mail
from fedapp.site.store import Store
from fedapp.trees.boost import Sampling
from fedapp.trees.grow import Growth, Routes
from fedapp.trees.model import LEAF, Ensemble, importance, stack_trees, to_json
from fedapp.trees.objective import base_margin, base_score, gradients
from fedapp.trees.partition import move_rows, pack_bits, rows_of
from fedapp.trees.parts import Lookup, sum_jobs, write_part
from fedapp.trees.purity import last_seen, mean_purity

Ints = npt.NDArray[np.int64]
NO_CUTS = Cuts(np.empty(0, np.float32), np.zeros(1, np.int64), np.empty(0, np.float32))
PENDING = ("pending.routes", "pending.own", "pending.bits", "pending.records")
Done = tuple[dict[str, float], dict[str, float], list[float]]  # scores, validation scores, purities


def setup(site: Site, request: SetupRequest) -> SentReply:
    """Check the rows' order, bin the columns, code the labels, draw the key and try it."""
    store, kept = site.store, Kept(site)
    check_order(site, read_mail(site, request))
    told = {field.name: getattr(request, field.name) for field in fields(SetupRequest)}
    store.facts["boost"] = {
        name: value for name, value in told.items() if not isinstance(value, np.ndarray | tuple)
    }
    _code_labels(kept)
    _bin_columns(kept, request.max_bin)
    key = _draw_key(kept, request)
    store["key"] = np.frombuffer(f"{key.p} {key.q}".encode(), dtype=np.uint8)
    modulus = int(key.public.n).to_bytes((key.public.bits + 7) // 8, "big")
    letter = PublicKey(np.frombuffer(modulus, np.uint8), kept.width, kept.n_train, PRECISION)
    return SentReply(**write_mail(site, [(name, letter) for name in kept.passive]))


def begin(site: Site, request: BeginRequest) -> BeginReply:
    """Finish the round that is under way; grow alone what is grown alone; begin another."""
    if site.store.finished:
        # A server started anew asks again before it comes to the end.
        return _nothing_begun(site)
    kept, mail = Kept(site), read_mail(site, request)
    if "widths" not in kept.store.facts:
        _meet(kept, mail)
    done: list[Done] = []
    if "growth.level" in kept.store and not kept.store["growth.level"]:
        # The server stopped early, was started anew, and asks again.
        _drop_round(kept.store)
    if "growth.level" in kept.store:
        _make_splits(kept, mail)
        done.append(_finish_round(kept))
    letters: Letters = []
    while kept.n_rounds < request.n_rounds and not letters:
        letters = _new_round(kept)
        if not letters:
            _grow_alone(kept)
            done.append(_finish_round(kept, alone=True))
    return BeginReply(
        **write_mail(site, letters),
        begun=bool(letters),
        n_trees=len(kept.trees),
        n_leaves=kept.store.facts["n_leaves"],
        score_names=tuple(done[0][0]) if done else (),
        train_scores=_rows([list(train.values()) for train, _, _ in done]),
        valid_scores=_rows([list(valid.values()) for _, valid, _ in done]),
        purities=_rows([views for _, _, views in done]),
    )


def _nothing_begun(site: Site) -> BeginReply:
    """What is left to say when the rows are forgotten."""
    facts, nothing = site.store.facts, _rows([])
    return BeginReply(
        **write_mail(site, []),
        begun=False,
        n_trees=facts["reply"]["n_trees"],
        n_leaves=facts["n_leaves"],
        score_names=(),
        train_scores=nothing,
        valid_scores=nothing,
        purities=nothing,
    )


def split(site: Site, request: SplitRequest) -> SplitReply:
    """Algorithm 2: decrypt the others' sums, add the own ones, choose."""
    kept, mail = Kept(site), read_mail(site, request)
    _make_splits(kept, mail)
    growth = kept.growth()
    sums = {name: _read_sums(kept, mail, name, growth) for name in kept.passive}
    routes = _choose(kept, growth, sums)
    letters = _tell_splits(kept, growth, routes)
    owners = {kept.joint.owner(int(column))[0] for column in routes["column"]}
    return SplitReply(
        **write_mail(site, letters),
        growing=growth.growing,
        passive_splits=bool(owners - {site.name}),
    )


def finish(site: Site, request: FinishRequest) -> FinishReply:
    """Cut the model back to its best round, score and keep it; join the parts if all allow it."""
    kept, store = Kept(site), site.store
    if store.finished:
        return kept_reply(store, FinishReply)
    mail = read_mail(site, request)
    model, records = kept.model(request.best_round)
    parts = {name: mail.one(PartKept, name).digest.tobytes().hex() for name in kept.passive}
    write_part(store.folder, kept.part(model, records, parts))
    scores = kept.scores(kept.margins(request.best_round))
    columns, gains, counts = _importance(store, model)
    reply = FinishReply(
        **write_mail(site, []),
        n_trees=len(model.trees),
        score_names=tuple(scores["train"]),
        train_scores=np.array(list(scores["train"].values())),
        valid_scores=np.array(list(scores["valid"].values())),
        test_scores=np.array(list(scores["test"].values())),
        column_names=columns,
        column_gains=gains,
        column_counts=counts,
        model=_joined(kept, mail, model, records),
    )
    store.forget()
    keep_reply(store, reply)
    return reply


# Setting up


def _code_labels(kept: Kept) -> None:
    """Labels as numbers, and the margin that everything begins with."""
    store, objective, n_train = kept.store, kept.objective, kept.n_train
    classes = class_names(store["labels"], objective)
    labels = class_ids(store["labels"], classes)
    if len(np.unique(labels[:n_train])) < 2:
        raise DataError("label must not be the same in every training row")
    weights = store["weights"][:n_train].astype(np.float64)
    if not weights.sum() > 0:
        raise DataError("weight must be > 0 in some training row")
    mean = base_score(objective, float(labels[:n_train] @ weights), float(weights.sum()))
    store.facts |= {"classes": list(classes), "base_score": float(mean)}
    store.facts |= {"n_rounds": 0, "n_leaves": 0}
    store["labels"] = labels
    margin = base_margin(objective, mean)
    store["margins"] = np.full((len(labels), kept.width), margin, dtype=np.float32)
    store["model.nodes"], store["model.offsets"] = stack_trees(())
    store["model.records"] = np.empty(0, dtype=np.int64)
    Lookup.empty().keep(store)


def _bin_columns(kept: Kept, max_bin: int) -> None:
    """Cuts of the training rows, and the bin of each value."""
    store, n_train = kept.store, kept.n_train
    train = np.asarray(store["values"][:n_train])
    # Without weights, because no other party knows them.
    cuts = quantile_cuts(train, None, max_bin) if train.shape[1] else NO_CUTS
    store["edges"], store["offsets"], store["minima"] = cuts.edges, cuts.offsets, cuts.minima
    store["codes"], store.facts["missing_code"] = digitise(train, cuts)


def _draw_key(kept: Kept, request: SetupRequest) -> PrivateKey:
    """A key that holds a row's gradients, tried out."""
    try:
        key = generate_key(request.key_bits, insecure_small_key=request.insecure_small_key)
        grouped_layouts(key.public.bits, kept.n_train, kept.width)
    except ValueError as error:
        raise ConfigError(f"secureboost.{error}") from error
    self_test(key)
    return key


def _meet(kept: Kept, mail: Mail) -> None:
    """Note how many bins the others' columns have, and what they allow."""
    site, store = kept.site, kept.store
    widths = {site.name: np.diff(store["offsets"]).tolist()}
    names = {site.name: list(store.facts["columns"]) if site.config.shares_names else []}
    allows = site.config.allows_export
    for name in kept.passive:
        bins = mail.one(ColumnBins, name)
        if len(bins.names) not in (0, len(bins.widths)):
            rule = f"must be {len(bins.widths)} or none, got {len(bins.names)}"
            raise ProtocolError(name, "ColumnBins", "names", rule)
        widths[name], names[name] = bins.widths.tolist(), list(bins.names)
        allows = allows and bins.allows_export
    order = list(store.facts["peers"])
    store.facts["widths"] = {name: widths[name] for name in order}
    store.facts["shared_names"], store.facts["export"] = names, allows


# A round


def _new_round(kept: Kept) -> Letters:
    """Gradients of the rows that are drawn; letters for the others, none if it is grown alone."""
    store, boost, joint = kept.store, kept.boost, kept.joint
    rows, round_id = slice(kept.n_train), kept.n_rounds
    labels, weights = store["labels"][rows], store["weights"][rows]
    pairs = gradients(kept.objective, store["margins"][rows], labels, weights)
    pairs = _draw(pairs, kept, np.random.default_rng([boost["seed"], round_id, 1]))
    n_columns = joint.cuts.n_columns
    sampling = Sampling(boost["seed"], boost["colsample_bytree"])
    allowed = sampling.columns(round_id, kept.width, n_columns)
    if round_id < boost["first_trees"]:
        own = joint.own(kept.site.name, np.arange(n_columns)) + joint.firsts[kept.site.name]
        allowed = allowed & np.isin(np.arange(n_columns), own)
    store["gradients"] = np.ascontiguousarray(pairs.transpose(1, 0, 2))
    store["allowed"] = allowed.astype(np.uint8)
    store["nodes"] = np.zeros((kept.width, len(store["labels"])), dtype=np.int32)
    store["round.records"] = np.empty((0, 3), dtype=np.int64)
    growth = Growth(kept.width, joint.cuts, allowed, kept.shape)
    growth.set_roots(pairs.sum(axis=0, dtype=np.float64))
    kept.keep_growth(growth)
    columns = {name: kept.drawn(name) for name in kept.passive}
    return _encrypt(kept, pairs, columns) if any(map(len, columns.values())) else []


def _draw(pairs: Array, kept: Kept, rng: np.random.Generator) -> Array:
    """Gradients with those of rows that are not drawn set to 0.

    Source of GOSS: Ke et al. 2017, "LightGBM", Algorithm 2.
    """
    boost, n_rows = kept.boost, len(pairs)
    if boost["subsample"] < 1:
        pairs[rng.random(n_rows) >= boost["subsample"]] = 0
    if not boost["goss"]:
        return pairs
    n_top, n_other = (int(boost[rate] * n_rows) for rate in ("top_rate", "other_rate"))
    order = np.argsort(-np.abs(pairs[..., 0]).sum(axis=1), kind="stable")
    factors = np.zeros(n_rows, dtype=np.float32)
    factors[order[:n_top]] = 1
    others = rng.choice(order[n_top:], min(n_other, n_rows - n_top), replace=False)
    factors[others] = (1 - boost["top_rate"]) / boost["other_rate"]
    return pairs * factors[:, None, None]


def _encrypt(kept: Kept, pairs: Array, columns: dict[str, Ints]) -> Letters:
    """The same ciphertexts for every party that has columns in this round."""
    drawn = (pairs != 0).any(axis=(1, 2))
    scale = FixedPoint.covering(pairs[drawn])
    kept.store.facts["scale"] = list(scale.exponents)
    integers, first, parts = scale.encode(pairs[drawn]), 0, []
    for layout in kept.layouts:
        group = integers[:, first : first + layout.n_outputs]
        parts.append(encrypt(kept.key, layout.pack(group), shared_workers(n_cores())))
        first += layout.n_outputs
    ciphertexts, bits = np.concatenate(parts), np.packbits(drawn)
    return [
        (name, EncryptedGradients(kept.n_rounds, bits, own, ciphertexts[: _all_if(own)]))
        for name, own in columns.items()
    ]


def _all_if(columns: Ints) -> int | None:
    """End of a slice: of everything, or of nothing where there are no columns."""
    return None if len(columns) else 0


def _grow_alone(kept: Kept) -> None:
    """All levels of a round of which the others have no columns."""
    growth = kept.growth()
    while growth.growing:
        routes = _choose(kept, growth, {})
        _tell_splits(kept, growth, routes)
        _make_splits(kept, Mail(kept.site.name, []))


def _choose(kept: Kept, growth: Growth, sums: dict[str, tuple[Histogram, Array]]) -> Routes:
    """The splits of a level, from the own sums and those of the others."""
    joint, name = kept.joint, kept.site.name
    histograms = np.zeros((len(growth.wanted), len(growth.cuts.edges), 2))
    missing = np.zeros((len(growth.wanted), growth.cuts.n_columns), dtype=np.int32)
    own = np.arange(len(joint.widths[name]))
    places = {party: kept.drawn(party) for party in sums} | {name: own}
    found = sums | {name: _own_sums(kept.store, growth, own, kept.n_train)}
    for party, (histogram, counts) in found.items():
        histograms[:, joint.bins(party, places[party])] = histogram
        missing[:, places[party] + joint.firsts[party]] = counts
    return growth.split(histograms, missing)


def _own_sums(store: Store, growth: Growth, columns: Ints, n_train: int) -> tuple[Histogram, Array]:
    """Sums over the own columns, of the wanted nodes in their order."""
    wanted = np.array(growth.wanted, dtype=np.int32).reshape(-1, 2)
    found = [
        build_histograms(
            store["codes"],
            store.facts["missing_code"],
            columns,
            np.diff(store["offsets"]),
            store["gradients"][tree],
            store["nodes"][tree, :n_train],
            wanted[wanted[:, 0] == tree, 1],
        )
        for tree in np.unique(wanted[:, 0])
    ]
    return np.concatenate([h for h, _ in found]), np.concatenate([m for _, m in found])


def _read_sums(kept: Kept, mail: Mail, party: str, growth: Growth) -> tuple[Histogram, Array]:
    """A passive party's sums of the wanted nodes, decrypted."""
    letter, columns = mail.one(EncryptedSums, party), kept.drawn(party)
    wanted = np.array(growth.wanted, dtype=np.int32).reshape(-1, 2)
    if (letter.round_id, letter.level) != (kept.n_rounds, growth.level):
        raise ProtocolError(party, "EncryptedSums", "level", "must be the one being split")
    if letter.missing.shape != (len(wanted), len(columns)):
        rule = f"must be of shape {(len(wanted), len(columns))}, got {letter.missing.shape}"
        raise ProtocolError(party, "EncryptedSums", "missing", rule)
    n_bins = int(kept.joint.widths[party][columns].sum())
    try:
        return _decrypt(kept, letter.ciphertexts, wanted, n_bins, growth.level), letter.missing
    except ValueError as error:
        raise ProtocolError(party, "EncryptedSums", "ciphertexts", str(error)) from error


def _decrypt(
    kept: Kept, ciphertexts: Array, wanted: npt.NDArray[np.int32], n_bins: int, level: int
) -> Histogram:
    """Histograms of the wanted nodes, from the jobs of ``sum_jobs``.

    Raises
    ------
    ValueError : ciphertexts are not those of the sums, or more or fewer than there must be.
    """
    key, layouts, scale = kept.key, kept.layouts, kept.scale
    firsts = np.cumsum([0, *(layout.n_outputs for layout in layouts)]).tolist()
    histograms, taken = np.zeros((len(wanted), n_bins, 2)), 0
    for group, tree, nodes in sum_jobs(layouts, level, *wanted.T) if n_bins else ():
        layout, n_sums = layouts[group], len(nodes) * n_bins
        part = ciphertexts[taken : taken + layout.n_plaintexts(n_sums)]
        taken += layout.n_plaintexts(n_sums)
        sums = read_sums(key, part, layout, scale, n_sums, shared_workers(n_cores()))
        # At the root one job is for all trees of the group.
        for member in (tree,) if level else range(firsts[group], firsts[group + 1]):
            found = sums[:, member - firsts[group]].reshape(len(nodes), n_bins, 2)
            histograms[wanted[:, 0] == member] = found
    if taken != len(ciphertexts):
        raise ValueError(f"ciphertexts must be {taken}, got {len(ciphertexts)}")
    return histograms


def _tell_splits(kept: Kept, growth: Growth, routes: Routes) -> Letters:
    """Make the own splits of a level, and tell the others what they need to know."""
    store, site = kept.store, kept.site
    owners = [kept.joint.owner(int(column)) for column in routes["column"]]
    own = np.array([p for p, (name, _) in enumerate(owners) if name == site.name], dtype=np.int64)
    mine = routes[own]
    sides, records = own_sides(
        store,
        mine["tree"],
        mine["node"],
        np.array([owners[place][1] for place in own], dtype=np.int64),
        mine["threshold"].astype(np.int64),
        mine["default_left"].astype(np.uint8),
    )
    kept_now: tuple[Array, ...] = (routes, own, pack_bits(sides), records)
    for name, array in zip(PENDING, kept_now, strict=True):
        store[name] = array
    kept.keep_growth(growth)
    found = [(party, _splits_for(party, owners, growth, store)) for party in kept.passive]
    # After the last level nobody need know more than the own splits.
    return [(party, letter) for party, letter in found if len(letter.trees)]


def _splits_for(party: str, owners: list[tuple[str, int]], growth: Growth, store: Store) -> Splits:
    """A level's splits as one party is told of them."""
    routes, own, bits = store["pending.routes"], store["pending.own"], store["pending.bits"]
    is_theirs = np.array([name == party for name, _ in owners], dtype=bool)
    columns = np.array([c if name == party else -1 for name, c in owners], dtype=np.int64)
    shown = np.ones(len(routes), dtype=bool) if growth.growing else is_theirs
    wanted = np.array(growth.wanted, dtype=np.int32).reshape(-1, 2)
    return Splits(
        level=growth.level,
        trees=routes["tree"][shown],
        nodes=routes["node"][shown],
        lefts=routes["left"][shown],
        columns=columns[shown],
        first_rights=np.where(is_theirs, routes["threshold"], 0).astype(np.int64)[shown],
        defaults=(is_theirs & routes["default_left"]).astype(np.uint8)[shown],
        bits_of=own if growth.growing else own[:0],
        bits=bits if growth.growing else bits[:0],
        wanted_trees=wanted[:, 0],
        wanted_nodes=wanted[:, 1],
    )


def _make_splits(kept: Kept, mail: Mail) -> None:
    """Move all rows to the children, once the sides of every split are known."""
    store = kept.store
    if "pending.routes" not in store:
        return
    routes, own, bits, own_records = (np.asarray(store[name]) for name in PENDING)
    last, nodes = not len(store["growth.wanted"]), store["nodes"]
    owners = np.array([kept.joint.owner(int(column))[0] for column in routes["column"]])
    sizes = [len(rows_of(nodes, route["tree"], route["node"])) for route in routes]
    sources, records = [(kept.site.name, own, bits)], np.full(len(routes), -1, dtype=np.int64)
    records[own] = own_records
    for party, letter in mail.all(Partition).items():
        theirs = np.flatnonzero(owners == party)
        # After the last level a party is told of its own splits alone, and numbers these.
        told = np.arange(len(theirs)) if last else theirs
        fits = letter.level == store["growth.level"] and np.array_equal(letter.bits_of, told)
        if not fits or len(letter.records) != len(theirs):
            raise ProtocolError(party, "Partition", "bits_of", "must be its own splits")
        sources.append((party, theirs, letter.bits))
        records[theirs] = letter.records
    sides = sides_of(sources, sizes)
    store["before"], store["last.routes"], store["last.owners"] = nodes, routes, owners
    store["nodes"] = move_rows(
        nodes,
        {
            (int(route["tree"]), int(route["node"])): (int(route["left"]), sides[place])
            for place, route in enumerate(routes)
        },
    )
    found = np.stack((routes["tree"], routes["node"], records), axis=1).astype(np.int64)
    store["round.records"] = np.concatenate((store["round.records"], found))
    store.drop(*PENDING)


def _finish_round(kept: Kept, alone: bool = False) -> Done:
    """Add the trees and their leaf weights; scores of the training and validation rows."""
    store, trees = kept.store, kept.growth().trees()
    nodes = store["nodes"]
    steps = [tree["value"][nodes[place]] for place, tree in enumerate(trees)]
    store["margins"] = store["margins"] + np.stack(steps, axis=1)
    kept.add_trees(trees, store["round.records"])
    store.facts["n_leaves"] = sum(int((tree["left"] == LEAF).sum()) for tree in trees)
    purities = [] if kept.objective == REGRESSION else _purities(kept, alone)
    _drop_round(store)
    scores = kept.scores(store["margins"])
    kept.note_best(scores["valid"])
    return scores["train"], scores["valid"], purities


def _drop_round(store: Store) -> None:
    """Forget what only a round under way needs."""
    growing = [f"growth.{name}" for name in GROWTH]
    store.drop(*growing, "before", "last.routes", "last.owners", "gradients", "round.records")


def _purities(kept: Kept, alone: bool) -> list[float]:
    """Mean purity of the leaves, and of what each passive party can tell apart."""
    store, rows = kept.store, slice(kept.n_train)
    labels, leaves = store["labels"][rows].astype(np.int64), store["nodes"][:, rows]
    views = [leaves]
    for party in kept.passive:
        if alone or "before" not in store:
            views.append(np.zeros_like(leaves))
            continue
        routes = store["last.routes"][store["last.owners"] == party]
        known = np.stack((routes["tree"], routes["node"]), axis=1).astype(np.int64)
        views.append(last_seen(store["before"][:, rows], leaves, known))
    return [mean_purity(labels, view) for view in views]


# The end


def _importance(
    store: Store, model: Ensemble
) -> tuple[tuple[str, ...], npt.NDArray[np.float64], Ints]:
    """Gain and splits of the columns, where all parties share names."""
    if not all(store.facts["shared_names"].values()):
        return (), np.empty(0), np.empty(0, dtype=np.int64)
    found = importance(model)
    gains, counts = found["gain"], found["count"]
    return (
        tuple(gains),
        np.array(list(gains.values()), dtype=np.float64),
        np.array(list(counts.values()), dtype=np.int64),
    )


def _joined(kept: Kept, mail: Mail, model: Ensemble, records: list[Ints]) -> npt.NDArray[np.uint8]:
    """The whole model as JSON, where every party allows it; else nothing."""
    store = kept.store
    if not store.facts["export"]:
        return np.empty(0, dtype=np.uint8)
    lookups = {kept.site.name: Lookup.kept(store)}
    names = {kept.site.name: list(store.facts["columns"])}
    for party in kept.passive:
        letter, n_columns = mail.one(Records, party), len(kept.joint.widths[party])
        if len(letter.names) != n_columns:
            rule = f"must be {n_columns}, got {len(letter.names)}"
            raise ProtocolError(party, "Records", "names", rule)
        defaults = np.zeros(len(letter.columns), dtype=np.uint8)  # the structure has them
        lookups[party] = Lookup(letter.columns, letter.thresholds, defaults)
        names[party] = list(letter.names)
    text = to_json(kept.joined(model, records, lookups, names))
    return np.frombuffer(text.encode(), dtype=np.uint8)


def _rows(lists: list[list[float]]) -> npt.NDArray[np.float64]:
    """One row a list; all are of one length."""
    width = len(lists[0]) if lists else 0
    return np.array(lists, dtype=np.float64).reshape(len(lists), width)
