"""Federated Forest at any party: bin the columns, search or sum them, store the part of the model.

Source: Liu et al. 2019, Algorithms 1 and 5. With encoded labels a party finds its best splits. With
encrypted ones, "encrypted label y" is taken literally: a passive party sums ciphertexts that it
cannot read for every bin of its columns, and the active party, who can decrypt, chooses.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from clients.federated_forest.splits import (
    SPLIT,
    SplitList,
    check_splits,
    letters_to_others,
    local_indices,
    local_partition,
    make_local_splits,
    note_splits,
    open_nodes,
)
from clients.handshake import stored_categories
from fedapp.crypto.packing import integer_layout
from fedapp.crypto.paillier import PublicKey, check_ciphertexts, read_public_key
from fedapp.crypto.sums import SumJob, pack_terms
from fedapp.crypto.workers import shared_workers
from fedapp.errors import ConfigError, ProtocolError, as_protocol_error
from fedapp.messages.federated_forest import (
    ColumnSums,
    EncryptedLabels,
    Labels,
    LevelRequest,
    PartitionReply,
    PartitionRequest,
    PartKept,
    SetupRequest,
    SplitRequest,
    SumRequest,
    Won,
)
from fedapp.messages.fields import fields_of
from fedapp.messages.handshake import pack_categories
from fedapp.site.answer import Site, phase_of
from fedapp.site.mail import Letters, Mail
from fedapp.site.store import Store, part_digest, sent_bits, write_part
from fedapp.trees.divided import Lookup
from fedapp.trees.forest.cart import (
    LOWEST,
    Bins,
    Candidates,
    Ints,
    Rules,
    bin_columns,
    code_columns,
)
from fedapp.trees.forest.encrypted import Listing, OwnerColumns, list_columns
from fedapp.trees.forest.levels import (
    Rows,
    Splits,
    by_tree,
    columns_of,
    inside_of,
    number_children,
    row_counts,
    search,
)
from fedapp.trees.model import LEAF
from fedapp.trees.predict import Places
from fedapp.trees.sets import CategorySets, category_counts


def begin(site: Site, request: SetupRequest) -> None:
    """Bin the columns of the training rows, draw each tree's rows, put all at the roots."""
    store, n_train = site.store, site.store.facts["n_train"]
    if request.master_keeps_model and not site.config.allows_export:
        rule = "must be true with federated-forest.master-keeps-model"
        raise ConfigError(f"allow-export {rule}, got false")
    values = np.asarray(store["values"][:n_train])
    if len(request.column_seeds) != values.shape[1]:
        rule = f"must be one a column of {values.shape[1]}, got {len(request.column_seeds)}"
        raise ProtocolError(site.name, "SetupRequest", "column_seeds", rule)
    sent = fields_of(request, SetupRequest)
    store.facts["forest"] = {
        name: value for name, value in sent.items() if isinstance(value, str | bool | int | float)
    }
    widths = category_counts(stored_categories(store), values.shape[1])
    bins = bin_columns(values, request.max_bin, widths)
    store.put("bins", bins)
    store["codes"], store["column_seeds"] = code_columns(values, bins), request.column_seeds
    store["counts"] = row_counts(request.bootstrap, request.rows_seed, request.trees, n_train)
    # All parties draw the same rows. A tree must neither draw nor leave out too few.
    drawn, min_rows = np.count_nonzero(store["counts"], axis=1), site.config.min_rows
    fewest = min(drawn.min(), n_train - drawn.max())
    if request.bootstrap and fewest < min_rows:
        rule = f"must be false where a tree draws or leaves out fewer than {min_rows} training rows"
        raise ConfigError(
            f"federated-forest.bootstrap {rule} (min-rows of {site.name}), got true and {fewest}"
        )
    store["nodes"] = np.zeros((request.trees, len(store["values"])), dtype=np.int32)
    store["n_nodes"] = np.ones(request.trees, dtype=np.int64)
    store.put("splits", Splits.none())
    store["gains"] = np.zeros(values.shape[1])
    store.facts["level"] = -1
    store.put("lookup", Lookup.empty())


def keep_labels(store: Store, letter: Labels) -> None:
    """Store label codes, weights, and the weight of each tree."""
    n_train = store.facts["n_train"]
    weights = letter.weights if len(letter.weights) else np.ones(n_train, dtype=np.float32)
    store["targets"], store["row_weights"] = letter.codes, weights.astype(np.float64)
    store["tree_weights"] = np.array(
        [of_tree @ store["row_weights"] for of_tree in store["counts"]]
    )
    store.facts["n_classes"] = letter.n_classes
    store.facts["least_decrease"] = letter.least_decrease


def take_encoded_labels(site: Site, mail: Mail) -> None:
    """Check and store the codes of the labels."""
    store, active = site.store, site.store.facts["active"]
    letter = mail.one(Labels, active)
    n_train, n_classes = store.facts["n_train"], letter.n_classes
    fits = len(letter.codes) == n_train and len(letter.weights) in (0, n_train)
    if n_classes:
        fits = fits and bool(np.isin(letter.codes, np.arange(n_classes)).all())
    if not fits:
        rule = f"must be of {n_train} rows, class ids below {n_classes} where there are classes"
        raise ProtocolError(active, "Labels", "codes", rule)
    keep_labels(store, letter)


def search_level(site: Site, request: LevelRequest | SplitRequest) -> Candidates:
    """Algorithm 1: the best local split of every open node, stored until the winners are known."""
    store, (trees, nodes) = site.store, open_to(site, request)
    labelled_rows = store["targets"], store["row_weights"], store["counts"]
    rows = Rows(store["codes"], store.record(Bins, "bins"), *labelled_rows)
    inside, seeds = store["nodes"][:, : store.facts["n_train"]], store["column_seeds"]
    candidates = search(rows, inside, (trees, nodes), seeds, request.n_drawn, rules_of(store))
    store.put("found", candidates)
    return candidates


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


def open_to(site: Site, request: LevelRequest | SumRequest | SplitRequest) -> tuple[Places, Places]:
    """Trees and nodes that may be split next; checks ``n_drawn`` of the request."""
    trees, nodes = open_nodes(site.store)
    n_columns = len(site.store["column_seeds"])
    if len(request.n_drawn) != len(trees) or (request.n_drawn > n_columns).any():
        rule = f"must be of {len(trees)} open nodes, at most {n_columns} each"
        raise ProtocolError(site.name, type(request).__name__, "n_drawn", rule)
    return trees, nodes


def rules_of(store: Store) -> Rules:
    """When nodes are split."""
    forest = store.facts["forest"]
    return Rules(
        forest["criterion"],
        store.facts["n_classes"],
        forest["min_samples_split"],
        forest["min_samples_leaf"],
        store.facts["least_decrease"],
    )


# A party keeps the structure of the trees and the lookup table of its splits: record id -> column,
# threshold, default side. Record ids count a party's splits in the order in which they were made,
# so every party knows them.


def record_fields(site: Site, shared: bool) -> dict[str, Any]:
    """Local splits as fields of a reply, for a server that keeps the model; else none."""
    lookup = site.store.record(Lookup, "lookup") if shared else Lookup.empty()
    names = tuple(site.store.facts["columns"]) if shared else ()
    categories = stored_categories(site.store) if shared else ()
    cuts = {name: getattr(lookup, name) for name in Lookup.__slots__}
    return {**cuts, "names": names, **pack_categories(categories)}


def stored_lookup(store: Store) -> dict[str, Any]:
    """Lookup table of the local splits, as a part has it."""
    lookup = store.record(Lookup, "lookup")
    return lookup.to_json(store.facts["columns"], store["quantiles"], stored_categories(store))


def local_importance(site: Site) -> tuple[npt.NDArray[np.float64], Ints, tuple[str, ...]]:
    """Gain and number of splits of each local column, and their names if shared."""
    store = site.store
    counts = np.bincount(store["lookup.columns"], minlength=len(store["gains"]))
    names = tuple(store.facts["columns"]) if site.config.shares_names else ()
    return np.maximum(store["gains"], 0.0), counts.astype(np.int64), names


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
