"""Federated Forest at the active party: coded or encrypted labels, choices, leaf values, scores.

Source: Liu et al. 2019, Algorithms 2 and 6; leaf labels stay here. With encrypted labels this party
decrypts the others' sums, and chooses the splits of all.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from clients.federated_forest.splits import (
    SplitList,
    begin,
    is_encrypted,
    keep_labels,
    keep_partitions,
    letters_to_others,
    local_importance,
    local_indices,
    local_partition,
    make_local_splits,
    open_to,
    record_fields,
    rules_of,
    search_level,
    stored_lookup,
    take_splits,
    worth_of,
)
from clients.handshake import number_rows
from clients.scoring import rows_of, score_arrays, warn_if_local_is_better
from clients.vertical import check_order, draw_key
from fedapp import metrics
from fedapp.crypto.packing import integer_layout
from fedapp.crypto.paillier import PrivateKey, encrypt
from fedapp.crypto.sealed import LARGEST_CONTENT
from fedapp.crypto.sums import read_terms
from fedapp.crypto.workers import shared_workers
from fedapp.data.partition import SUBSETS, WATCHED
from fedapp.errors import ConfigError, DataError, ProtocolError, as_protocol_error
from fedapp.messages.federated_forest import (
    ColumnSums,
    EncryptedLabels,
    FinishReply,
    FinishRequest,
    Labels,
    PartKept,
    SetupRequest,
    SplitRequest,
    Won,
)
from fedapp.messages.fields import Array
from fedapp.site.answer import Site
from fedapp.site.mail import Letters, Mail
from fedapp.site.store import Store, write_part
from fedapp.trees.divided import joint_names
from fedapp.trees.forest.cart import DRAWN, NO_RANK, Ints
from fedapp.trees.forest.encrypted import (
    Choices,
    Flags,
    Listing,
    NodeTotals,
    Places,
    Sums,
    best_cuts,
)
from fedapp.trees.forest.levels import (
    RowFields,
    Splits,
    by_tree,
    class_codes,
    inside_of,
    number_children,
    number_codes,
    winners,
)
from fedapp.trees.forest.model import BaggedForest, branches, leaf_values, to_json
from fedapp.trees.objective import REGRESSION, check_objective, margins_of, n_outputs
from fedapp.trees.sets import sets_of_rows

SCORE_BINS = 2**12
SPARE_BYTES = 2**24  # of a letter, for all but its ciphertexts, such as a bit per row
Scores = dict[str, float]
Scored = tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]  # margins, labels, weights


def setup(site: Site, request: SetupRequest, mail: Mail) -> Letters:
    """Check the rows' order, bin the columns, send the others coded or encrypted labels."""
    store = site.store
    check_order(site, mail)
    begin(site, request)
    encrypted = is_encrypted(store)
    if site.config.encrypts_labels and not encrypted:
        rule = "must be paillier where a node config has encrypted-labels"
        raise ConfigError(f"federated-forest.labels {rule}, got {request.labels}")
    letter = _code_labels(site, request)
    keep_labels(store, letter)
    return encrypt_labels(site, request) if encrypted else letters_to_others(site, letter)


def _code_labels(site: Site, request: SetupRequest) -> Labels:
    store, n_train = site.store, site.store.facts["n_train"]
    with as_protocol_error(site.name, "SetupRequest", "objective"):
        check_objective(request.objective)
    classes, labels = number_rows(site, request.objective)
    weights = store["weights"][:n_train]
    if not ((store["counts"] > 0) @ weights.astype(np.float64) > 0).all():
        raise DataError("weight must be > 0 in some training row of every tree")
    store["labels"], store.facts["classes"], store.facts["unit"] = labels, list(classes), 1.0
    if classes:
        codes = class_codes(labels[:n_train])
    else:
        codes, store.facts["unit"] = number_codes(labels[:n_train])
    return Labels(
        int(codes.max()) + 1 if classes else 0,
        codes,
        weights if (weights != 1).any() else weights[:0],
        request.min_impurity_decrease / store.facts["unit"] ** 2,
    )


def forest(store: Store) -> BaggedForest:
    """The forest so far, without thresholds; a split's column is its owner's number."""
    objective, n_train = store.facts["forest"]["objective"], store.facts["n_train"]
    classes, n_nodes = tuple(store.facts["classes"]), np.asarray(store["n_nodes"])
    n_classes = 0 if objective == REGRESSION else len(classes)
    values = leaf_values(
        store["nodes"][:, :n_train],
        store["counts"],
        store["row_weights"],
        store["labels"][:n_train],
        n_nodes,
        n_classes,
        n_outputs(objective, n_classes),
    )
    trees, _ = branches(store.record(Splits, "splits"), n_nodes)
    return BaggedForest(objective, tuple(store.facts["peers"]), classes, trees, values)


def level_scores(store: Store) -> dict[str, Scores]:
    """Scores of the training and the validation rows by the forest so far."""
    model, scores = forest(store), dict[str, Scores]()
    for subset in WATCHED:
        rows = _rows(store, model, subset)
        scores[subset] = {}
        if len(rows[1]):
            statistics = metrics.statistics(model.objective, *rows, SCORE_BINS)
            scores[subset] = metrics.scores(model.objective, statistics)
    return scores


def _rows(store: Store, model: BaggedForest, subset: str) -> Scored:
    rows = rows_of(store, subset)
    margins = margins_of(model.objective, model.predictions(store["nodes"][:, rows]))
    return margins, store["labels"][rows], store["weights"][rows]


def finish(site: Site, request: FinishRequest, mail: Mail) -> tuple[FinishReply, Letters]:
    """Apply the last splits, score the forest, store the party's part of the model."""
    store = site.store
    if len(request.trees):
        keep_partitions(site, mail)
        if is_encrypted(store):
            check_chosen(site, request)
        else:
            make_local_splits(site, request)
        take_splits(site, request)
    model = forest(store)
    letters = {name: mail.one(PartKept, name) for name in site.others}
    rows = {subset: _rows(store, model, subset) for subset in SUBSETS}
    warn_if_local_is_better(
        site, model.objective, np.concatenate([rows[subset][0] for subset in SUBSETS])
    )
    # Out-of-bag rows, each predicted by the trees that have not drawn it.
    unseen = store["counts"] == 0
    oob = np.flatnonzero(unseen.any(axis=0))
    predictions = model.predictions(store["nodes"][:, oob], unseen[:, oob])
    margins = margins_of(model.objective, predictions)
    rows["oob"] = margins, store["labels"][oob], store["weights"][oob]
    scores = metrics.pooled_subsets(model.objective, rows)
    threshold = scores["train"].get("threshold")
    splits, n_nodes = store.record(Splits, "splits"), np.asarray(store["n_nodes"])
    records = splits.spread(splits.records, n_nodes, -1)
    part = {
        **stored_lookup(store),
        "active": True,
        "name": site.name,
        "parts": {name: letter.digest.tobytes().hex() for name, letter in letters.items()},
        "model": to_json(model),
        "splits": [each.tolist() for each in records],
        # Only the owner of a split is known, so each party counts as one column.
        "n_columns": dict.fromkeys(store.facts["peers"], 1),
        "threshold": threshold,
    }
    write_part(store.folder, part)
    names, gains, counts = _importance(site, letters)
    keeps_model = store.facts["forest"]["master_keeps_model"]
    reply = FinishReply(
        **score_arrays(scores),
        column_names=names,
        column_gains=gains,
        column_counts=counts,
        **record_fields(site, keeps_model),
        classes=model.classes if keeps_model else (),
        leaf_values=np.concatenate(model.values) if keeps_model else np.zeros((0, model.n_outputs)),
    )
    store.forget()
    return reply, []


def _importance(
    site: Site, letters: dict[str, PartKept]
) -> tuple[tuple[str, ...], npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Total gain and splits of all columns, numbered unless all parties share names."""
    store = site.store
    # With encrypted labels a party cannot know its gains, so this one computes them.
    encrypted = is_encrypted(store)
    worth = {site.name: local_importance(site)}
    for name, letter in letters.items():
        gains = gains_of(site, name, len(letter.gains)) if encrypted else letter.gains
        worth[name] = gains, letter.counts, letter.names
    order = list(store.facts["peers"])
    shared = all(len(worth[name][2]) == len(worth[name][0]) for name in order)
    names = joint_names(
        {
            party: worth[party][2]
            if shared
            else [f"{party} column {column + 1}" for column in range(len(worth[party][0]))]
            for party in order
        }
    )
    gains = np.concatenate([worth[name][0] for name in order]) * store.facts["unit"] ** 2
    return names, gains, np.concatenate([worth[name][1] for name in order])


# Source: Liu et al. 2019, Algorithms 2 and 6. Departure: the active party compares the splits, not
# the master, who would learn from improvements how impure nodes are; the active party knows that.
def encrypt_labels(site: Site, request: SetupRequest) -> Letters:
    """Draw a key; encrypt the rows under it, afresh for each party."""
    store = site.store
    fields = RowFields.of(store["targets"], store["row_weights"], store.facts["n_classes"])
    sizes = *fields.numbers.shape, fields.bits
    key = draw_key(
        site, request, "federated-forest", lambda public: integer_layout(public.bits, *sizes)
    )
    layout = integer_layout(key.public.bits, *sizes)
    store["key"], store["worth"] = key.to_array(), np.zeros((0, 3))
    weighted = store["row_weights"] > 0
    n_rows = int(weighted.sum())
    max_rows = (LARGEST_CONTENT - SPARE_BYTES) // key.public.ciphertext_bytes
    if n_rows > max_rows:
        rule = f"rows must be <= {max_rows} with labels=paillier and key-bits={key.public.bits}"
        way_out = "secureboost sends its rows in blocks, and labels=encoded sends none"
        raise DataError(f"{rule}, got more: they travel in one letter; {way_out}")
    plaintexts, workers = layout.pack(fields.numbers[weighted]), shared_workers()
    n_fields, bits = fields.numbers.shape[1], fields.bits
    header = key.public.to_array(), n_fields, bits, np.packbits(weighted)
    return [
        (name, EncryptedLabels(*header, encrypt(key, plaintexts, workers))) for name in site.others
    ]


def choose(site: Site, request: SplitRequest, mail: Mail) -> tuple[Splits, Letters]:
    """Algorithm 2: decrypt the others' sums, take the best split of each node.

    Pure nodes are not searched. Only this party knows which they are, so the others have summed
    them too; ciphertexts with no other node's sums are not decrypted.
    """
    store, (trees, nodes) = site.store, open_to(site, request)
    sums = _read_offers(site, mail, trees, nodes)
    local, peers = search_level(site, request), list(store.facts["peers"])
    best = winners([local if name == site.name else sums[name][1] for name in peers])
    won = np.flatnonzero(best >= 0)
    splits, _ = number_children(trees[won], nodes[won], best[won], np.asarray(store["n_nodes"]))
    store.put("chosen", splits)
    make_local_splits(site, splits)
    sends_sides = len(local_indices(site, splits)) and not request.last
    letters = letters_to_others(site, local_partition(site)) if sends_sides else []
    for name, (listing, offer) in sums.items():
        nodes_won = won[best[won] == peers.index(name)]
        if len(nodes_won):
            letters.append((name, _won(store, listing, offer, nodes_won)))
            # Gain of its splits, which the party cannot know.
            worth = worth_of(store, trees[nodes_won], offer.improvements[nodes_won])
            columns = listing.columns[offer.listed[nodes_won]]
            gained = np.stack((np.full(len(nodes_won), peers.index(name)), columns, worth), axis=1)
            store["worth"] = np.concatenate((store["worth"], gained))
    return splits, letters


def check_chosen(site: Site, level: SplitList) -> None:
    """Check that splits are those this party has chosen."""
    chosen = site.store.record(Splits, "chosen")
    names = ("trees", "nodes", "owners")
    if not all(np.array_equal(getattr(chosen, name), getattr(level, name)) for name in names):
        rule = "must be the splits that this party has chosen"
        raise ProtocolError(site.name, type(level).__name__, "nodes", rule)


def _won(store: Store, listing: Listing, offer: Choices, nodes: Ints) -> Won:
    listed = offer.listed[nodes]
    _, sets = sets_of_rows(listing.n_bins[listed] * listing.unordered[listed], offer.rights[nodes])
    return Won(
        store.facts["level"] + 1, listed, offer.cuts[nodes], offer.defaults[nodes], sets.bits
    )


def gains_of(site: Site, party: str, n_columns: int) -> Sums:
    """Total gain of each column of another party."""
    worth = site.store["worth"]
    of_party = worth[worth[:, 0] == list(site.store.facts["peers"]).index(party)]
    columns = of_party[:, 1].astype(np.int64)
    if (columns >= n_columns).any():
        rule = f"must be {columns.max() + 1} columns at least, got {n_columns}"
        raise ProtocolError(party, "PartKept", "gains", rule)
    gains = np.zeros(n_columns)
    np.add.at(gains, columns, of_party[:, 2])
    return gains


def _read_offers(
    site: Site, mail: Mail, trees: Places, nodes: Places
) -> dict[str, tuple[Listing, Choices]]:
    store, spans = site.store, by_tree(trees)
    fields = RowFields.of(store["targets"], store["row_weights"], store.facts["n_classes"])
    totals = [_totals(store, fields, int(trees[a]), nodes[a:b]) for a, b in spans]
    rules, offers = rules_of(store), {}
    for name in site.others:
        listing, ciphertexts = _listing(site, mail, name, totals)
        listings = [listing.of_nodes(*span) for span in spans]
        sums = _sums(store, name, ciphertexts, fields, listings, totals)
        choices = [
            (of_tree, best_cuts(of_tree, tree_sums, tree_totals, fields.units, rules))
            for of_tree, tree_sums, tree_totals in zip(listings, sums, totals, strict=True)
        ]
        offers[name] = listing, Choices.joined(choices)
    return offers


def _totals(store: Store, fields: RowFields, tree: int, nodes: Places) -> NodeTotals:
    counts, forest = store["counts"][tree], store.facts["forest"]
    drawn = (counts > 0) & (store["row_weights"] > 0)
    inside = inside_of(store["nodes"][tree, : store.facts["n_train"]], drawn, nodes)
    fewest = forest["min_samples_split"], forest["min_samples_leaf"]
    return NodeTotals.of(fields, store["targets"], counts, inside, fewest)


def _listing(
    site: Site, mail: Mail, party: str, node_totals: list[NodeTotals]
) -> tuple[Listing, Array]:
    """The columns that another party has summed, checked against the rows of the nodes."""
    letter = mail.one(ColumnSums, party)
    if letter.level != site.store.facts["level"] + 1:
        raise ProtocolError(party, "ColumnSums", "level", "must be the one being split")
    listing = Listing(*(getattr(letter, name) for name in Listing.__slots__))
    large = np.concatenate([totals.large for totals in node_totals])
    if not _fits(listing, large):
        rule = f"must be of {len(large)} open nodes, only those with enough rows"
        raise ProtocolError(party, "ColumnSums", "columns", rule)
    sizes = np.concatenate([totals.sizes for totals in node_totals])[listing.nodes]
    if (listing.per_column(listing.sizes) != sizes).any():
        raise ProtocolError(party, "ColumnSums", "sizes", "must add up to the rows of each node")
    return listing, letter.ciphertexts


def _fits(listing: Listing, large: Flags) -> bool:
    n_listed, n_sums = len(listing.columns), len(listing.sizes)
    fits = len(listing.ranks) == len(large) and bool((listing.n_columns <= n_listed).all())
    fits = fits and int(listing.n_columns.sum()) == n_listed
    fits = fits and bool(((listing.n_bins > 0) & (listing.n_bins <= n_sums)).all())
    if not fits or listing.ends[-1] != n_sums:
        return False
    # Columns ascend in a node. Without a drawn rank a node lists one column at most; a node is
    # ranked exactly if it lists columns, which only large nodes do.
    is_listed, nodes = listing.n_columns > 0, listing.nodes
    ascends = (np.diff(listing.columns) > 0) | (np.diff(nodes) > 0)
    single = (listing.ranks == DRAWN) | (listing.n_columns <= 1)
    ranked = is_listed == (listing.ranks < NO_RANK)
    return bool(ascends.all() and single.all() and ranked.all() and not (is_listed & ~large).any())


def _sums(
    store: Store,
    party: str,
    ciphertexts: Array,
    fields: RowFields,
    listings: list[Listing],
    node_totals: list[NodeTotals],
) -> list[Sums]:
    """Decrypted sums of each tree, checked against the totals of the nodes."""
    key = PrivateKey.from_array(store["key"])
    pairs = list(zip(listings, node_totals, strict=True))
    read = [totals.is_open[listing.nodes] for listing, totals in pairs]
    wanted = [
        np.repeat(r, listing.n_bins + listing.missing)
        for r, listing in zip(read, listings, strict=True)
    ]
    n_rows, n_fields = fields.numbers.shape
    layout = integer_layout(key.public.bits, n_rows, n_fields, fields.bits)
    with as_protocol_error(party, "ColumnSums", "ciphertexts"):
        plain = read_terms(key, ciphertexts, layout, wanted, shared_workers())
    for (listing, totals), sums, columns, used in zip(pairs, plain, read, wanted, strict=True):
        matches = listing.per_column(sums)[columns] == totals.totals[listing.nodes][columns]
        weights = sums[used] if store.facts["n_classes"] else sums[used, :1]
        # Weights of rows are not negative, and some are not 0.
        if not (matches.all() and (weights >= 0).all() and (weights.sum(axis=1) > 0).all()):
            rule = "must add up to the labels of each node"
            raise ProtocolError(party, "ColumnSums", "ciphertexts", rule)
    return plain
