"""Federated Forest at any party: bin the columns, search or sum them, store the part of the model.

Source: Liu et al. 2019, Algorithms 1 and 5. With encoded labels a party finds its best splits. With
encrypted ones, "encrypted label y" is taken literally: a passive party sums ciphertexts that it
cannot read for every bin of its columns, and the active party, who can decrypt, chooses.
"""

from __future__ import annotations

import numpy as np

from clients.federated_forest.splits import (
    SPLIT,
    SplitList,
    check_splits,
    letters_to_others,
    local_importance,
    local_indices,
    local_partition,
    make_local_splits,
    note_splits,
    open_to,
    record_fields,
    stored_lookup,
)
from fedapp.crypto.packing import integer_layout
from fedapp.crypto.paillier import PublicKey, check_ciphertexts, read_public_key
from fedapp.crypto.sums import SumJob, pack_terms
from fedapp.crypto.workers import shared_workers
from fedapp.errors import ProtocolError, as_protocol_error
from fedapp.messages.federated_forest import (
    ColumnSums,
    EncryptedLabels,
    PartitionReply,
    PartitionRequest,
    PartKept,
    SumRequest,
    Won,
)
from fedapp.messages.fields import fields_of
from fedapp.site.answer import Site, phase_of
from fedapp.site.mail import Letters, Mail
from fedapp.site.store import Store, part_digest, sent_bits, write_part
from fedapp.trees.forest.cart import LOWEST, Bins, Candidates, Ints
from fedapp.trees.forest.encrypted import Listing, OwnerColumns, list_columns
from fedapp.trees.forest.levels import Splits, by_tree, columns_of, inside_of, number_children
from fedapp.trees.model import LEAF
from fedapp.trees.predict import Places
from fedapp.trees.sets import CategorySets


def take_labels(site: Site, mail: Mail) -> None:
    """Check and store the key, and a ciphertext for every row of positive weight."""
    store, name = site.store, EncryptedLabels.__name__
    n_train, forest, active = (store.facts[name] for name in ("n_train", "forest", "active"))
    letter = mail.one(EncryptedLabels, active)
    with as_protocol_error(active, name, "n"):
        agreed = forest["key_bits"], forest["insecure_small_key"]
        key = read_public_key(letter.n, agreed[0], insecure_small_key=agreed[1])
        integer_layout(key.bits, n_train, letter.n_fields, letter.bits)
    bits = sent_bits(active, name, "weighted", letter.weighted, [n_train])
    weighted = np.flatnonzero(bits[0])
    if len(letter.ciphertexts) != len(weighted):
        rule = f"must be {len(weighted)}, got {len(letter.ciphertexts)}"
        raise ProtocolError(active, name, "ciphertexts", rule)
    with as_protocol_error(active, name, "ciphertexts"):
        check_ciphertexts(key, letter.ciphertexts)
    store["n"], store["weighted"] = letter.n, weighted
    store["ciphertexts"] = letter.ciphertexts
    store.facts["packing"] = [letter.n_fields, letter.bits]


def make_won(site: Site, level: SplitList, mail: Mail) -> Letters:
    """Make the local splits that won, unless done; send their sides."""
    if phase_of(site.store) == SPLIT:
        return []
    site.store.put("found", _won(site, level, mail))
    make_local_splits(site, level)
    return letters_to_others(site, local_partition(site)) if len(local_indices(site, level)) else []


def _won(site: Site, level: SplitList, mail: Mail) -> Candidates:
    """The local split of each open node that has one, as the active party has chosen it."""
    store, active = site.store, site.store.facts["active"]
    local = check_splits(site, level)[local_indices(site, level)]
    n_open, widths = len(store["listed.n_columns"]), store["bins.n_categories"]
    candidates = Candidates(
        np.zeros(n_open),
        np.zeros(n_open, dtype=np.int64),
        np.full(n_open, -1, dtype=np.int64),
        np.full(n_open, LOWEST, dtype=np.float32),
        np.zeros(n_open, dtype=np.uint8),
        np.zeros(n_open, dtype=np.int64),
        np.zeros((n_open, -(-int(widths.max(initial=0)) // 8)), dtype=np.uint8),
    )
    if not len(local):
        return candidates
    letter, listing = mail.one(Won, active), store.record(Listing, "listed")
    listed, cuts = letter.listed, letter.cuts
    fits = letter.level == store.facts["level"] + 1 and len(listed) == len(local)
    fits = fits and bool((listed < len(listing.columns)).all())
    fits = fits and np.array_equal(listing.nodes[listed], local)
    # Only where values are missing may all bins go to one side.
    fits = fits and bool((cuts + 1 < listing.n_bins[listed] + listing.missing[listed]).all())
    if not fits:
        raise ProtocolError(active, "Won", "listed", "must be the party's splits of this level")
    candidates.columns[local], candidates.defaults[local] = listing.columns[listed], letter.defaults
    unordered, sizes = np.flatnonzero(listing.unordered[listed]), listing.n_bins[listed]
    with as_protocol_error(active, "Won", "set_bits"):
        sets = CategorySets(letter.set_bits, sizes[unordered])
        n_rights = np.array([sets.members(number).sum() for number in range(len(sets))])
        is_one_sided = (n_rights == 0) | (n_rights == sets.widths)
        if (is_one_sided & (listing.missing[listed[unordered]] == 0)).any():
            raise ValueError("must leave bins on both sides where no value is missing")
    candidates.widths[local] = widths[candidates.columns[local]]
    for number, index in enumerate(unordered.tolist()):
        start = int(listing.ends[listed[index]])
        codes = store["listed.codes"][start : start + int(sizes[index])]
        # A category of no row in the node goes where missing values go.
        is_right = np.full(candidates.widths[local[index]], not letter.defaults[index])
        is_right[codes] = sets.members(number)
        bits = np.packbits(is_right)
        candidates.rights[local[index], : len(bits)] = bits
    thresholds = store["listed.thresholds"][listing.ends[listed] + cuts]
    candidates.thresholds[local] = np.where(listing.unordered[listed], LOWEST, thresholds)
    return candidates


def sum_columns(site: Site, request: SumRequest) -> ColumnSums:
    """Algorithm 1 under encryption: sum the labels of the open nodes' rows, bin by bin."""
    store, (trees, nodes) = site.store, open_to(site, request)
    listings, jobs = [], []
    for first, end in by_tree(trees):
        drawn_nodes = int(trees[first]), nodes[first:end], request.n_drawn[first:end]
        listing, local, terms = _list_tree(store, *drawn_nodes)
        listings.append((listing, local))
        jobs.append(terms)
    listing = Listing.joined([each for each, _ in listings])
    store.put("listed", listing)
    for name in ("thresholds", "codes"):
        store[f"listed.{name}"] = np.concatenate([getattr(each, name) for _, each in listings])
    key = PublicKey.from_array(store["n"])
    layout = integer_layout(key.bits, store.facts["n_train"], *store.facts["packing"])
    ciphertexts = pack_terms(key, store["ciphertexts"], jobs, layout, shared_workers())
    fields = fields_of(listing, Listing)
    return ColumnSums(level=store.facts["level"] + 1, **fields, ciphertexts=ciphertexts)


def _list_tree(
    store: Store, tree: int, nodes: Places, n_drawn: Ints
) -> tuple[Listing, OwnerColumns, SumJob]:
    """Columns to list for the open nodes of one tree, and the terms to sum."""
    n_train, forest = store.facts["n_train"], store.facts["forest"]
    counts, weighted = store["counts"][tree], store["weighted"]
    is_weighted = np.zeros(n_train, dtype=bool)
    is_weighted[weighted] = True
    inside = inside_of(store["nodes"][tree, :n_train], is_weighted & (counts > 0), nodes)
    listing, local = list_columns(
        store["codes"],
        store.record(Bins, "bins"),
        inside,
        *columns_of(store["column_seeds"], tree, nodes),
        n_drawn,
        (forest["min_samples_split"], forest["min_samples_leaf"]),
    )
    rows = np.searchsorted(weighted, local.rows).astype(np.int32)
    return listing, local, SumJob(rows, local.places, counts[weighted], len(listing.sizes))


# A party keeps the structure of the trees and the lookup table of its splits: record id -> column,
# threshold, default side. Record ids count a party's splits in the order in which they were made,
# so every party knows them.
def hand_over(site: Site, request: PartitionRequest) -> tuple[PartitionReply, Letters]:
    """Store the party's part of the model, and drop the rows."""
    store, letter = site.store, local_partition(site)
    last = request.trees, request.nodes, request.owners
    note_splits(store, *number_children(*last, np.asarray(store["n_nodes"])))
    splits, n_nodes = store.record(Splits, "splits"), np.asarray(store["n_nodes"])
    is_local = splits.owners == list(store.facts["peers"]).index(site.name)
    lefts = splits.spread(splits.lefts, n_nodes, LEAF)
    records = splits.spread(np.where(is_local, splits.records, -1), n_nodes, -1)
    part = {
        **stored_lookup(store),
        "name": site.name,
        "trees": [
            {"lefts": children.tolist(), "records": ids.tolist()}
            for children, ids in zip(lefts, records, strict=True)
        ],
    }
    write_part(store.folder, part)
    digest = np.frombuffer(part_digest(store.folder), dtype=np.uint8)
    letters = [letter, PartKept(digest, *local_importance(site))]
    reply = PartitionReply(**record_fields(site, store.facts["forest"]["master_keeps_model"]))
    store.forget()
    return reply, [(store.facts["active"], each) for each in letters]
