"""A round of SecureBoost at the active party: gradients out, sums in, splits chosen, leaf weights.

Source: Cheng et al. 2019, Algorithm 2.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from clients.secureboost.kept import GROWTH, Kept
from clients.secureboost.splits import nodes_after, own_sides
from fedapp.crypto.packing import FixedPoint
from fedapp.crypto.paillier import encrypt
from fedapp.crypto.sums import read_sums
from fedapp.crypto.workers import shared_workers
from fedapp.errors import ProtocolError, blaming
from fedapp.histograms.build import Histogram, build_all_histograms
from fedapp.histograms.joint import sum_jobs
from fedapp.messages.fields import Array
from fedapp.messages.secureboost import EncryptedGradients, EncryptedSums, Partition, Splits
from fedapp.site.mail import Letters, Mail
from fedapp.site.store import Store
from fedapp.trees.boosted.grow import Growth
from fedapp.trees.boosted.purity import last_seen, mean_purity
from fedapp.trees.boosted.rounds import Sampling, n_leaves
from fedapp.trees.boosted.routes import Routes
from fedapp.trees.objective import REGRESSION, gradients
from fedapp.trees.sides import pack_bits

Ints = npt.NDArray[np.int64]
PENDING = ("pending.routes", "pending.own", "pending.bits", "pending.records")
Done = tuple[dict[str, float], dict[str, float], list[float]]  # scores, validation scores, purities


def new_round(kept: Kept) -> Letters:
    """Gradients of the rows that are drawn; letters for the others, none if it is grown alone."""
    store, boost, joint = kept.store, kept.boost, kept.joint
    rows, round_id = slice(kept.n_train), kept.n_rounds
    labels, weights = store["labels"][rows], store["weights"][rows]
    pairs = gradients(kept.objective, store["margins"][rows], labels, weights)
    pairs = draw_rows(pairs, kept, np.random.default_rng([boost["seed"], round_id, 1]))
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


def draw_rows(pairs: Array, kept: Kept, rng: np.random.Generator) -> Array:
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
    integers, first, encrypted = scale.encode(pairs[drawn]), 0, []
    for layout in kept.layouts:
        group = integers[:, first : first + layout.n_outputs]
        encrypted.append(encrypt(kept.key, layout.pack(group), shared_workers()))
        first += layout.n_outputs
    ciphertexts, bits = np.concatenate(encrypted), np.packbits(drawn)
    return [
        (name, EncryptedGradients(kept.n_rounds, bits, own, ciphertexts[: _all_if(own)]))
        for name, own in columns.items()
    ]


def _all_if(columns: Ints) -> int | None:
    """End of a slice: of everything, or of nothing where there are no columns."""
    return None if len(columns) else 0


def grow_alone(kept: Kept) -> None:
    """All levels of a round of which the others have no columns."""
    growth = kept.growth()
    while growth.growing:
        routes = choose(kept, growth, {})
        tell_splits(kept, growth, routes)
        make_splits(kept, Mail(kept.site.name, []))


def choose(kept: Kept, growth: Growth, sums: dict[str, tuple[Histogram, Array]]) -> Routes:
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
    return build_all_histograms(
        store["codes"],
        store.facts["missing_code"],
        columns,
        np.diff(store["offsets"]),
        store["gradients"],
        store["nodes"][:, :n_train],
        *growth.wanted_pairs.T,
    )


def read_party_sums(kept: Kept, mail: Mail, party: str, growth: Growth) -> tuple[Histogram, Array]:
    """A passive party's sums of the wanted nodes, decrypted."""
    letter, columns = mail.one(EncryptedSums, party), kept.drawn(party)
    wanted = growth.wanted_pairs
    if (letter.round_id, letter.level) != (kept.n_rounds, growth.level):
        raise ProtocolError(party, "EncryptedSums", "level", "must be the one being split")
    if letter.missing.shape != (len(wanted), len(columns)):
        rule = f"must be of shape {(len(wanted), len(columns))}, got {letter.missing.shape}"
        raise ProtocolError(party, "EncryptedSums", "missing", rule)
    n_bins = int(kept.joint.widths[party][columns].sum())
    with blaming(party, "EncryptedSums", "ciphertexts"):
        return _decrypt(kept, letter.ciphertexts, wanted, n_bins, growth.level), letter.missing


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
        own = ciphertexts[taken : taken + layout.n_plaintexts(n_sums)]
        taken += layout.n_plaintexts(n_sums)
        sums = read_sums(key, own, layout, scale, n_sums, shared_workers())
        # At the root one job is for all trees of the group.
        for member in (tree,) if level else range(firsts[group], firsts[group + 1]):
            found = sums[:, member - firsts[group]].reshape(len(nodes), n_bins, 2)
            histograms[wanted[:, 0] == member] = found
    if taken != len(ciphertexts):
        raise ValueError(f"ciphertexts must be {taken}, got {len(ciphertexts)}")
    return histograms


def tell_splits(kept: Kept, growth: Growth, routes: Routes) -> Letters:
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
    wanted = growth.wanted_pairs
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


def make_splits(kept: Kept, mail: Mail) -> None:
    """Move all rows to the children, once the sides of every split are known."""
    store = kept.store
    if "pending.routes" not in store:
        return
    routes, own, bits, own_records = (np.asarray(store[name]) for name in PENDING)
    last, nodes = not len(store["growth.wanted"]), store["nodes"]
    owners = np.array([kept.joint.owner(int(column))[0] for column in routes["column"]])
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
    store["before"], store["last.routes"], store["last.owners"] = nodes, routes, owners
    split = routes["tree"], routes["node"], routes["left"]
    store["nodes"] = nodes_after(nodes, *split, sources)
    found = np.stack((routes["tree"], routes["node"], records), axis=1).astype(np.int64)
    store["round.records"] = np.concatenate((store["round.records"], found))
    store.drop(*PENDING)


def finish_round(kept: Kept, alone: bool = False) -> Done:
    """Add the trees and their leaf weights; scores of the training and validation rows."""
    store, trees = kept.store, kept.growth().trees()
    nodes = store["nodes"]
    steps = [tree["value"][nodes[place]] for place, tree in enumerate(trees)]
    store["margins"] = store["margins"] + np.stack(steps, axis=1)
    kept.add_trees(trees, store["round.records"])
    store.facts["n_leaves"] = n_leaves(trees)
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
