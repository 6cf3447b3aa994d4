"""Federated Forest at any party: its part of the finished model.

A party keeps the structure of the trees and the lookup table of its splits: record id -> column,
threshold, default side. Record ids count a party's splits in the order in which they were made, so
every party knows them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from clients.dictionary import kept_categories
from clients.federated_forest.splits import note_splits, own_partition
from fedapp.messages.federated_forest import PartitionReply, PartitionRequest, PartKept
from fedapp.messages.handshake import pack_categories
from fedapp.site.answer import Site
from fedapp.site.mail import Letters
from fedapp.site.store import Store, part_digest, write_part
from fedapp.trees.divided import Lookup
from fedapp.trees.forest.cart import Ints
from fedapp.trees.forest.levels import Splits, number_children
from fedapp.trees.model import LEAF


def own_records(site: Site, shared: bool) -> dict[str, Any]:
    """Local splits as fields of a reply, for a server that keeps the model; else none."""
    lookup = site.store.record(Lookup, "lookup") if shared else Lookup.empty()
    names = tuple(site.store.facts["columns"]) if shared else ()
    categories = kept_categories(site.store) if shared else ()
    cuts = {name: getattr(lookup, name) for name in Lookup.__slots__}
    return {**cuts, "names": names, **pack_categories(categories)}


def kept_lookup(store: Store) -> dict[str, Any]:
    """Lookup table of the local splits, as a part has it."""
    lookup = store.record(Lookup, "lookup")
    return lookup.to_json(store.facts["columns"], store["quantiles"], kept_categories(store))


def own_worth(site: Site) -> tuple[npt.NDArray[np.float64], Ints, tuple[str, ...]]:
    """Gain and number of splits of each local column, and their names if shared."""
    store = site.store
    counts = np.bincount(store["lookup.columns"], minlength=len(store["gains"]))
    names = tuple(store.facts["columns"]) if site.config.shares_names else ()
    return np.maximum(store["gains"], 0.0), counts.astype(np.int64), names


def hand_over(site: Site, request: PartitionRequest) -> tuple[PartitionReply, Letters]:
    """Store the party's part of the model, and drop the rows."""
    store, letter = site.store, own_partition(site)
    last = request.trees, request.nodes, request.owners
    note_splits(store, *number_children(*last, np.asarray(store["n_nodes"])))
    splits, n_nodes = store.record(Splits, "splits"), np.asarray(store["n_nodes"])
    is_local = splits.owners == list(store.facts["peers"]).index(site.name)
    lefts = splits.spread(splits.lefts, n_nodes, LEAF)
    records = splits.spread(np.where(is_local, splits.records, -1), n_nodes, -1)
    part = {
        **kept_lookup(store),
        "name": site.name,
        "trees": [
            {"lefts": children.tolist(), "records": ids.tolist()}
            for children, ids in zip(lefts, records, strict=True)
        ],
    }
    write_part(store.folder, part)
    digest = np.frombuffer(part_digest(store.folder), dtype=np.uint8)
    letters = [letter, PartKept(digest, *own_worth(site))]
    reply = PartitionReply(**own_records(site, store.facts["forest"]["master_keeps_model"]))
    store.forget()
    return reply, [(store.facts["active"], each) for each in letters]
