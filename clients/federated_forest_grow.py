"""Federated Forest at any party: its columns, where the rows are, its best splits of a level.

Source: Liu et al. 2019, Algorithms 1 and 5. What the party keeps of the model is the structure of
the trees, and the lookup table of its own splits: record id -> column, threshold, default side. The
ids count its splits in the order in which they were made, so that everybody knows them.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.errors import ConfigError, ProtocolError
from fedapp.messages.federated_forest import (
    FinishRequest,
    Labels,
    LevelRequest,
    Partition,
    PartitionReply,
    PartitionRequest,
    PartKept,
    SetupRequest,
)
from fedapp.messages.fields import Letter
from fedapp.site.answer import Site
from fedapp.site.mail import Mail, read_mail, write_mail
from fedapp.site.store import Store
from fedapp.trees.bagged import branches
from fedapp.trees.cart import Bins, Candidates, Ints, Rules, bin_columns, code_columns
from fedapp.trees.draws import bootstrap_counts
from fedapp.trees.levels import (
    Places,
    Rows,
    Splits,
    moved,
    number,
    search,
    sides_of,
    sizes_of,
    slots_of,
)
from fedapp.trees.partition import Bits
from fedapp.trees.parts import Lookup, part_digest, write_part

Letters = list[tuple[str, Letter]]
WithSplits = LevelRequest | PartitionRequest | FinishRequest


def begin(site: Site, request: SetupRequest) -> None:
    """Bin the columns of the training rows, draw the rows of each tree, put all at the roots."""
    store, n_train = site.store, site.store.facts["n_train"]
    if request.master_keeps_model and not site.config.allows_export:
        rule = "must be true with federated-forest.master-keeps-model"
        raise ConfigError(f"allow-export {rule}, got false")
    values = np.asarray(store["values"][:n_train])
    if len(request.column_seeds) != values.shape[1]:
        rule = f"must be one a column of {values.shape[1]}, got {len(request.column_seeds)}"
        raise ProtocolError(site.name, "SetupRequest", "column_seeds", rule)
    told = {field.name: getattr(request, field.name) for field in fields(SetupRequest)}
    store.facts["forest"] = {
        name: value for name, value in told.items() if isinstance(value, str | bool | int | float)
    }
    bins = bin_columns(values, request.max_bin)
    for name in Bins.__slots__:
        store[f"bins.{name}"] = getattr(bins, name)
    store["codes"], store["column_seeds"] = code_columns(values, bins), request.column_seeds
    if request.bootstrap:
        counts = bootstrap_counts(request.rows_seed, request.trees, n_train)
    else:
        counts = np.ones((request.trees, n_train), dtype=np.uint8)
    store["counts"] = counts
    store["nodes"] = np.zeros((request.trees, len(store["values"])), dtype=np.int32)
    store["n_nodes"] = np.ones(request.trees, dtype=np.int64)
    keep_splits(store, "splits", Splits.none())
    store["gains"] = np.zeros(values.shape[1])
    store.facts["level"] = -1
    Lookup.empty().keep(store)


def keep_labels(store: Store, letter: Labels) -> None:
    """Keep what is known of the labels."""
    n_train = store.facts["n_train"]
    weights = letter.weights if len(letter.weights) else np.ones(n_train, dtype=np.float32)
    store["targets"], store["row_weights"] = letter.codes, weights.astype(np.float64)
    store["tree_weights"] = np.array(
        [of_tree @ store["row_weights"] for of_tree in store["counts"]]
    )
    store.facts["n_classes"] = letter.n_classes
    store.facts["least_decrease"] = letter.least_decrease


def take_labels(site: Site, mail: Mail) -> None:
    """Take the codes of the labels where they have come."""
    store, active = site.store, site.store.facts["active"]
    for letter in mail.all(Labels).values():
        n_train, n_classes = store.facts["n_train"], letter.n_classes
        fits = len(letter.codes) == n_train and len(letter.weights) in (0, n_train)
        if n_classes:
            fits = fits and bool(np.isin(letter.codes, np.arange(n_classes)).all())
        if not fits:
            rule = f"must be of {n_train} rows, class ids below {n_classes} where there are classes"
            raise ProtocolError(active, "Labels", "codes", rule)
        keep_labels(store, letter)
    if "targets" not in store:
        raise ProtocolError(active, "Labels", "letter", f"must reach {site.name}")


def search_level(site: Site, request: LevelRequest) -> Candidates:
    """Algorithm 1: the best own split of every open node, which is kept until it wins or not."""
    store, (trees, nodes) = site.store, open_nodes(site.store)
    n_train, n_columns = store.facts["n_train"], len(store["column_seeds"])
    if len(request.n_drawn) != len(trees) or (request.n_drawn > n_columns).any():
        rule = f"must be of {len(trees)} open nodes, at most {n_columns} each"
        raise ProtocolError(site.name, "LevelRequest", "n_drawn", rule)
    bins = Bins(*(store[f"bins.{name}"] for name in Bins.__slots__))
    given = store["targets"], store["row_weights"], store["counts"]
    rows = Rows(store["codes"], bins, *given)
    inside, seeds = store["nodes"][:, :n_train], store["column_seeds"]
    found = search(rows, inside, (trees, nodes), seeds, request.n_drawn, rules_of(store))
    for name in Candidates.__slots__:
        store[f"found.{name}"] = getattr(found, name)
    return found


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


def open_nodes(store: Store) -> tuple[Places, Places]:
    """Nodes that may be split next: children of the last level's splits, or the roots."""
    if store.facts["level"] >= 0:
        return kept_splits(store, "level").children()
    n_trees = len(store["n_nodes"])
    return np.arange(n_trees, dtype=np.int32), np.zeros(n_trees, dtype=np.int32)


def kept_splits(store: Store, name: str) -> Splits:
    """As ``keep_splits`` left them."""
    return Splits(*(store[f"{name}.{field}"] for field in Splits.__slots__))


def keep_splits(store: Store, name: str, splits: Splits) -> None:
    """Keep splits among other arrays."""
    for field in Splits.__slots__:
        store[f"{name}.{field}"] = getattr(splits, field)


def check_splits(site: Site, request: WithSplits) -> npt.NDArray[np.int64]:
    """Places of a request's splits among the open nodes.

    Raises
    ------
    ProtocolError : not all are open nodes, in their order, of parties of the run.
    """
    trees, nodes = (each.astype(np.int64) for each in open_nodes(site.store))
    wanted = (request.trees.astype(np.int64) << 32) | request.nodes
    known = (trees << 32) | nodes
    places = np.minimum(np.searchsorted(known, wanted), max(len(known) - 1, 0))
    fits = len(wanted) <= len(known) and bool((known[places] == wanted).all())
    fits = fits and bool((np.diff(wanted) > 0).all())
    if not fits or (request.owners >= len(site.store.facts["peers"])).any():
        rule = "must be open, in order, and of parties of the run"
        raise ProtocolError(site.name, type(request).__name__, "nodes", rule)
    return places


def make_own(site: Site, request: PartitionRequest | FinishRequest) -> Bits:
    """Make the own splits among these: note them, and which rows they send left."""
    store, places = site.store, check_splits(site, request)
    own = np.flatnonzero(request.owners == list(store.facts["peers"]).index(site.name))
    found = Candidates(*(store[f"found.{name}"][places[own]] for name in Candidates.__slots__))
    if (found.columns < 0).any():
        rule = "must be splits that this party has offered"
        raise ProtocolError(site.name, type(request).__name__, "owners", rule)
    cut = found.columns, found.thresholds, found.defaults
    Lookup.kept(store).plus(*cut).keep(store)
    gains, weights = np.array(store["gains"]), store["tree_weights"][request.trees[own]]
    np.add.at(gains, found.columns, found.improvements / weights / len(store["counts"]))
    store["gains"] = gains
    slots = slots_of(store["nodes"], request.trees[own], request.nodes[own])
    sides = sides_of(store["values"], *cut, slots)
    store["own.bits"] = np.packbits(sides)
    return sides


def take_splits(site: Site, request: WithSplits, mail: Mail) -> None:
    """Move all rows to the children of a level's splits, once all sides are known."""
    store = site.store
    check_splits(site, request)
    found = request.trees, request.nodes, request.owners
    splits, n_nodes = number(*found, np.asarray(store["n_nodes"]))
    slots = slots_of(store["nodes"], splits.trees, splits.nodes)
    sizes, names = sizes_of(slots, len(splits.trees)), list(store.facts["peers"])
    sides, firsts, n_known = [], np.zeros(len(sizes), dtype=np.int64), 0
    for owner in np.unique(splits.owners):
        mine = splits.owners == owner
        firsts[mine] = n_known + np.cumsum(sizes[mine]) - sizes[mine]
        sides.append(_bits(site, mail, names[owner], int(sizes[mine].sum())))
        n_known += len(sides[-1])
    store["nodes"] = moved(store["nodes"], splits, slots, firsts, np.concatenate(sides))
    note_splits(store, splits, n_nodes)


def note_splits(store: Store, splits: Splits, n_nodes: Ints) -> None:
    """Keep a level's splits."""
    store["n_nodes"] = n_nodes
    keep_splits(store, "level", splits)
    keep_splits(store, "splits", kept_splits(store, "splits").plus(splits))
    store.facts["level"] += 1
    store.drop("own.bits")


def _bits(site: Site, mail: Mail, owner: str, n_rows: int) -> Bits:
    """Sides of the rows in one party's nodes of this level."""
    store = site.store
    if owner == site.name:
        if "own.bits" not in store:
            rule = "must be splits that this party was asked to make"
            raise ProtocolError(site.name, "LevelRequest", "owners", rule)
        bits = store["own.bits"]
    else:
        letter = mail.one(Partition, owner)
        if letter.level != store.facts["level"] + 1:
            raise ProtocolError(owner, "Partition", "level", "must be the one being split")
        bits = letter.bits
    sides = np.unpackbits(bits)
    if len(bits) != -(-n_rows // 8) or sides[n_rows:].any():
        rule = f"must be of {n_rows} rows, and 0 past them"
        raise ProtocolError(owner, "Partition", "bits", rule)
    return sides[:n_rows].astype(bool)


def partition(site: Site, request: PartitionRequest) -> PartitionReply:
    """Make the own splits of a level and tell the others; after the last level keep the part."""
    store = site.store
    if store.finished:
        return _kept_reply(site)
    read_mail(site, request)
    sides = make_own(site, request)
    letter = Partition(store.facts["level"] + 1, np.packbits(sides))
    if request.last:
        return _hand_over(site, request, letter)
    others = [name for name in store.facts["peers"] if name != site.name]
    return PartitionReply(
        **write_mail(site, [(name, letter) for name in others]), **own_records(site, False)
    )


def own_records(site: Site, told: bool) -> dict[str, Any]:
    """The own splits, for a server that keeps the model; nothing else."""
    lookup = Lookup.kept(site.store) if told else Lookup.empty()
    names = tuple(site.store.facts["columns"]) if told else ()
    return {name: getattr(lookup, name) for name in Lookup.__slots__} | {"names": names}


def own_worth(site: Site) -> tuple[npt.NDArray[np.float64], Ints, tuple[str, ...]]:
    """What the own columns have gained, how often each was split, and names that are shared."""
    store = site.store
    counts = np.bincount(Lookup.kept(store).columns, minlength=len(store["gains"]))
    names = tuple(store.facts["columns"]) if site.config.shares_names else ()
    return np.maximum(store["gains"], 0.0), counts.astype(np.int64), names


def _hand_over(site: Site, request: PartitionRequest, letter: Partition) -> PartitionReply:
    """Keep the own part of the model, forget the rows."""
    store = site.store
    found = request.trees, request.nodes, request.owners
    note_splits(store, *number(*found, np.asarray(store["n_nodes"])))
    names = store.facts["columns"]
    part = Lookup.kept(store).to_json(names) | {"name": site.name, "trees": _structure(site)}
    write_part(store.folder, part)
    gains, counts, shared = own_worth(site)
    records = own_records(site, store.facts["forest"]["master_keeps_model"])
    store.forget()
    # A server started anew may ask again.
    store.facts["last"] = {"level": letter.level, "names": shared}
    store.facts["told_names"] = records.pop("names")
    for name, array in (*records.items(), ("gains", gains), ("worth", counts)):
        store[f"last.{name}"] = array
    store["last.bits"] = letter.bits
    return _kept_reply(site)


def _kept_reply(site: Site) -> PartitionReply:
    """The answer after the last level."""
    store, last = site.store, site.store.facts["last"]
    digest = np.frombuffer(part_digest(store.folder), dtype=np.uint8)
    letters: Letters = [
        (store.facts["active"], Partition(last["level"], store["last.bits"])),
        (
            store.facts["active"],
            PartKept(digest, store["last.gains"], store["last.worth"], tuple(last["names"])),
        ),
    ]
    records: dict[str, Any] = {name: store[f"last.{name}"] for name in Lookup.__slots__}
    names = tuple(store.facts["told_names"])
    return PartitionReply(**write_mail(site, letters), **records, names=names)


def _structure(site: Site) -> list[dict[str, list[int]]]:
    """All trees: left children, and the record id of each own split, -1 elsewhere."""
    store = site.store
    splits = kept_splits(store, "splits")
    own = list(store.facts["peers"]).index(site.name)
    trees = branches(splits, np.asarray(store["n_nodes"]))
    return [
        {"lefts": tree["left"].tolist(), "records": np.where(owners == own, ids, -1).tolist()}
        for tree, owners, ids in zip(
            trees, owners_of(splits, trees), record_ids(splits, trees), strict=True
        )
    ]


def owners_of(splits: Splits, trees: tuple[npt.NDArray[Any], ...]) -> list[Ints]:
    """Number of the party of each node's split; -1 for leaves."""
    found = [np.full(len(tree), -1, dtype=np.int64) for tree in trees]
    for tree, node, owner in zip(splits.trees, splits.nodes, splits.owners, strict=True):
        found[tree][node] = owner
    return found


def record_ids(splits: Splits, trees: tuple[npt.NDArray[Any], ...]) -> list[Ints]:
    """Record id of each node's split at its owner; -1 for leaves."""
    ids = np.zeros(len(splits.owners), dtype=np.int64)
    for owner in np.unique(splits.owners):
        mine = splits.owners == owner
        ids[mine] = np.arange(mine.sum())
    found = [np.full(len(tree), -1, dtype=np.int64) for tree in trees]
    for tree, node, record in zip(splits.trees, splits.nodes, ids, strict=True):
        found[tree][node] = record
    return found
