"""A round of SecureBoost at the active party: send gradients, read sums, choose splits, set leaves.

Source: Cheng et al. 2019, Algorithm 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from clients.secureboost.scores import note_best, scores_of
from clients.secureboost.splits import nodes_after, own_sides
from clients.secureboost.view import Ints, View
from fedapp.crypto.packing import FixedPoint
from fedapp.crypto.paillier import encrypt
from fedapp.crypto.sums import read_sums
from fedapp.crypto.workers import shared_workers
from fedapp.errors import ProtocolError, as_protocol_error
from fedapp.histograms.build import Histogram, build_all_histograms, sum_jobs
from fedapp.messages.fields import Array
from fedapp.messages.secureboost import (
    EncryptedGradients,
    EncryptedSums,
    MoreGradients,
    Partition,
    Splits,
    block_rows,
)
from fedapp.site.answer import Site
from fedapp.site.mail import Letters, Mail
from fedapp.site.settings import check_sample_size
from fedapp.trees.grow import Growth, Routes, Shape, last_seen, mean_purity
from fedapp.trees.model import split_trees, stack_trees
from fedapp.trees.objective import gradients, is_regression
from fedapp.trees.predict import pack_bits
from fedapp.trees.rounds import Sampling, n_leaves
from fedapp.trees.sets import NO_SET, CategorySets

ROWS_AT_ONCE = 1 << 15  # packed and encrypted; bounds the Python integers in memory

Done = tuple[dict[str, float], dict[str, float], list[float]]  # scores, validation scores, purities


@dataclass(frozen=True, slots=True, eq=False)
class Chosen:
    """A level's splits, until the sides of all are known."""

    routes: Routes  # on joint columns
    own: Ints  # indices of the local splits
    bits: npt.NDArray[np.uint8]  # packed sides of the local splits
    records: Ints  # record ids of the local splits


def new_round(site: Site, view: View) -> Letters:
    """Start a round; letters with the first gradients, none if no passive column is drawn."""
    store, boost, joint = view.store, view.boost, view.joint
    rows, round_id = slice(view.n_train), store.facts["n_rounds"]
    labels, weights = store["labels"][rows], store["weights"][rows]
    pairs = gradients(view.objective, store["margins"][rows], labels, weights, view.parameters)
    if boost["subsample"] < 1 or boost["goss"]:
        entropy = site.entropy(boost["seed"], round_id, 1, share=boost["subsample"])
        drawn = draw_rows(pairs.copy(), boost, np.random.default_rng(entropy))
        n_rows, n_drawn = (int(each.any(axis=(1, 2)).sum()) for each in (pairs, drawn))
        if check_sample_size(site.config, n_rows, n_drawn) == n_drawn:
            pairs = drawn
    n_columns = joint.cuts.n_columns
    sampling = Sampling(boost["seed"], boost["colsample_bytree"])
    allowed = sampling.columns(round_id, view.width, n_columns)
    if round_id < boost["first_trees"]:
        owners = np.array([owner for owner, _ in view.owners(np.arange(n_columns))])
        allowed = allowed & (owners == view.name)
    # pairs: (n_rows, n_trees, 2); the store keeps (n_trees, n_rows, 2)
    store["gradients"] = np.ascontiguousarray(pairs.transpose(1, 0, 2))
    store["allowed"] = allowed.astype(np.uint8)
    store["nodes"] = np.zeros((view.width, len(store["labels"])), dtype=np.int32)
    store["round.records"] = np.empty((0, 3), dtype=np.int64)
    growth = Growth(view.width, joint.cuts, allowed, Shape.of(boost), view.limits)
    growth.set_roots(pairs.sum(axis=0, dtype=np.float64))
    view.keep(growth)
    columns = {name: view.drawn(name) for name in view.passive}
    return _encrypt(view, pairs, columns) if any(map(len, columns.values())) else []


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


def _encrypt(view: View, pairs: Array, columns: dict[str, Ints]) -> Letters:
    """Letters with the same ciphertexts for every party that has columns in this round."""
    drawn = (pairs != 0).any(axis=(1, 2))
    scale = FixedPoint.covering(pairs[drawn])
    store, facts = view.store, view.store.facts
    facts["scale"] = list(scale.exponents)
    store["unsent"], facts["sent"] = scale.encode(pairs[drawn]), 0
    _, ciphertexts = _next_block(
        view, sum(len(party_columns) > 0 for party_columns in columns.values())
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


def more_gradients(view: View) -> Letters:
    """The next block of the round's gradients, for parties with columns in it."""
    receivers = [name for name in view.passive if len(view.drawn(name))]
    start, ciphertexts = _next_block(view, len(receivers))
    letter = MoreGradients(view.store.facts["n_rounds"], start, ciphertexts)
    return [(name, letter) for name in receivers]


def n_blocks_left(view: View) -> int:
    """Messages that the rest of the round's gradients takes."""
    if "unsent" not in view.store:
        return 0
    n_receivers = sum(len(view.drawn(name)) > 0 for name in view.passive)
    n_left = len(view.layouts) * len(view.store["unsent"]) - int(view.store.facts["sent"])
    return -(-n_left // block_rows(view.key.public.ciphertext_bytes, n_receivers))


def _next_block(view: View, n_receivers: int) -> tuple[int, npt.NDArray[np.uint8]]:
    store, width = view.store, view.key.public.ciphertext_bytes
    fields, start = store["unsent"], store.facts["sent"]
    n_all = len(view.layouts) * len(fields)
    stop = store.facts["sent"] = min(n_all, start + block_rows(width, n_receivers))
    if stop == n_all:
        store.drop("unsent")
    return start, _encrypted(view, fields, start, stop)


def _encrypted(
    view: View, fields: npt.NDArray[np.int64], start: int, stop: int
) -> npt.NDArray[np.uint8]:
    """Ciphertexts ``start`` to ``stop`` of all rows, layout by layout."""
    firsts = np.cumsum([0, *(layout.n_outputs for layout in view.layouts)]).tolist()
    blocks = [np.empty((0, view.key.public.ciphertext_bytes), dtype=np.uint8)]
    while start < stop:
        group, row = divmod(start, len(fields))
        end = min(len(fields), row + min(ROWS_AT_ONCE, stop - start))
        group_fields = fields[row:end, firsts[group] : firsts[group + 1]]
        blocks.append(encrypt(view.key, view.layouts[group].pack(group_fields), shared_workers()))
        start += end - row
    return np.concatenate(blocks)


def grow_alone(view: View) -> None:
    """All levels of a round in which only the active party has columns."""
    growth = view.growth()
    while growth.growing:
        tell_splits(view, growth, *choose(view, growth, {}))
        make_splits(view, Mail(view.name, []))


def choose(
    view: View, growth: Growth, sums: dict[str, tuple[Histogram, Array]]
) -> tuple[Routes, CategorySets]:
    """Splits of a level from the sums of all parties, and their category sets."""
    joint, name = view.joint, view.name
    histograms = np.zeros((len(growth.wanted), len(growth.cuts.edges), 2))
    missing = np.zeros((len(growth.wanted), growth.cuts.n_columns), dtype=np.int32)
    local_columns = np.arange(len(joint.widths[name]))
    columns = {party: view.drawn(party) for party in sums} | {name: local_columns}
    all_sums = sums | {
        name: build_all_histograms(
            view.store["codes"],
            view.store.facts["missing_code"],
            local_columns,
            np.diff(view.store["offsets"]),
            view.store["gradients"],
            view.store["nodes"][:, : view.n_train],
            *growth.wanted_pairs.T,
        )
    }
    for party, (histogram, counts) in all_sums.items():
        histograms[:, joint.bins(party, columns[party])] = histogram
        missing[:, columns[party] + joint.firsts[party]] = counts
    return growth.split(histograms, missing)


def read_party_sums(view: View, mail: Mail, party: str, growth: Growth) -> tuple[Histogram, Array]:
    """Decrypt a passive party's sums of the wanted nodes."""
    letter, columns = mail.one(EncryptedSums, party), view.drawn(party)
    wanted = growth.wanted_pairs
    if (letter.round_id, letter.level) != (view.store.facts["n_rounds"], growth.level):
        raise ProtocolError(party, "EncryptedSums", "level", "must be the one being split")
    if letter.missing.shape != (len(wanted), len(columns)):
        rule = f"must be of shape {(len(wanted), len(columns))}, got {letter.missing.shape}"
        raise ProtocolError(party, "EncryptedSums", "missing", rule)
    n_bins = int(view.joint.widths[party][columns].sum())
    with as_protocol_error(party, "EncryptedSums", "ciphertexts"):
        key, layouts = view.key, view.layouts
        first, second = view.store.facts["scale"]
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


def tell_splits(view: View, growth: Growth, routes: Routes, sets: CategorySets) -> Letters:
    """Make the local splits of a level; returns the letters for the others."""
    store, owners = view.store, view.owners(routes["column"])
    local = np.array(
        [index for index, (name, _) in enumerate(owners) if name == view.name], dtype=np.int64
    )
    local_routes = routes[local]
    sides, records = own_sides(
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
    view.keep(growth)
    letters = [(party, _splits_for(party, owners, growth, chosen, sets)) for party in view.passive]
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


def make_splits(view: View, mail: Mail) -> None:
    """Move all rows to the children, once the sides of every split are known."""
    store = view.store
    chosen = store.record(Chosen, "chosen")
    routes, local = chosen.routes, chosen.own
    last, nodes = not len(store["growth.wanted"]), store["nodes"]
    owners = np.array([owner for owner, _ in view.owners(routes["column"])])
    sources, records = [(view.name, local, chosen.bits)], np.full(len(routes), -1, dtype=np.int64)
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


def finish_round(view: View, alone: bool = False) -> Done:
    """Add the trees and their leaf values; returns scores and purities."""
    store, trees = view.store, [tree.copy() for tree in view.growth().grown().trees]
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
    purities = [] if is_regression(view.objective) else _purities(view, alone)
    store.drop("growth", "before", "last", "gradients", "round")
    scores = scores_of(view, store["margins"])
    note_best(view, scores["valid"])
    return scores["train"], scores["valid"], purities


def _purities(view: View, alone: bool) -> list[float]:
    """Mean purity of the leaves, and of the row groups that each passive party can distinguish."""
    store, rows = view.store, slice(view.n_train)
    labels, leaves = store["labels"][rows].astype(np.int64), store["nodes"][:, rows]
    views = [leaves]
    for party in view.passive:
        if alone:
            views.append(np.zeros_like(leaves))
            continue
        routes = store["last.routes"][store["last.owners"] == party]
        splits_seen = np.stack((routes["tree"], routes["node"]), axis=1).astype(np.int64)
        views.append(last_seen(store["before"][:, rows], leaves, splits_seen))
    return [mean_purity(labels, view) for view in views]
