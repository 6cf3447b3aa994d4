"""Federated Forest at any party: a level's splits, and where they send the rows.

Source: Liu et al. 2019, Algorithms 1 and 5. The owner of a winning column makes the split and sends
the others the rows that go left; then every party knows where each row is.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fedapp.errors import ProtocolError
from fedapp.messages.federated_forest import (
    ENCODED,
    PAILLIER,
    FinishRequest,
    LevelRequest,
    LevelSplits,
    Partition,
    PartitionRequest,
    SetupRequest,
    SplitRequest,
    SumRequest,
)
from fedapp.messages.fields import Letter
from fedapp.site.answer import ALIGNED, FINISHED, Site, Table, is_active
from fedapp.site.mail import Letters, Mail
from fedapp.site.store import Store, sent_bits
from fedapp.trees.divided import Lookup
from fedapp.trees.forest.cart import Candidates, Ints
from fedapp.trees.forest.levels import Splits, number_children
from fedapp.trees.predict import Bits, Places, move_rows, sides_of, slots_of
from fedapp.trees.sets import sets_of_rows

SplitList = LevelSplits | Splits


def is_encrypted(store: Store) -> bool:
    """Whether the labels of this run only leave their party encrypted."""
    return bool(store.facts["forest"]["labels"] == PAILLIER)


def open_nodes(store: Store) -> tuple[Places, Places]:
    """Nodes that may be split next: children of the last level's splits, or the roots."""
    if store.facts["level"] >= 0:
        return store.record(Splits, "level").children()
    n_trees = len(store["n_nodes"])
    return np.arange(n_trees, dtype=np.int32), np.zeros(n_trees, dtype=np.int32)


def check_splits(site: Site, level: SplitList) -> npt.NDArray[np.int64]:
    """Indices of splits among the open nodes; raises a ProtocolError if one is not open."""
    trees, nodes = (each.astype(np.int64) for each in open_nodes(site.store))
    # tree and node in one sortable number
    keys = (level.trees.astype(np.int64) << 32) | level.nodes
    open_keys = (trees << 32) | nodes
    places = np.minimum(np.searchsorted(open_keys, keys), max(len(open_keys) - 1, 0))
    fits = len(keys) <= len(open_keys) and bool((open_keys[places] == keys).all())
    fits = fits and bool((np.diff(keys) > 0).all())
    if not fits or (level.owners >= len(site.store.facts["peers"])).any():
        rule = "must be open, in order, and of parties of the run"
        raise ProtocolError(site.name, type(level).__name__, "nodes", rule)
    return places


def local_indices(site: Site, level: SplitList) -> npt.NDArray[np.int64]:
    """Indices of the splits of this party's columns."""
    return np.flatnonzero(level.owners == list(site.store.facts["peers"]).index(site.name))


def make_local_splits(site: Site, level: SplitList) -> Bits:
    """Make the local splits: store them, and which rows they send left."""
    store, places, local = site.store, check_splits(site, level), local_indices(site, level)
    best = Candidates(*(store[f"found.{name}"][places[local]] for name in Candidates.__slots__))
    if (best.columns < 0).any():
        rule = "must be splits that this party has offered"
        raise ProtocolError(site.name, type(level).__name__, "owners", rule)
    cuts = best.columns, best.thresholds, best.defaults
    numbers, sets = sets_of_rows(best.widths, best.rights)
    table = Lookup.of(*cuts, best.widths, sets)
    store.put("lookup", store.record(Lookup, "lookup").plus(table))
    if "tree_weights" in store:
        gains = np.array(store["gains"])
        np.add.at(gains, best.columns, worth_of(store, level.trees[local], best.improvements))
        store["gains"] = gains
    slots = slots_of(store["nodes"], level.trees[local], level.nodes[local])
    sides = sides_of(store["values"], *cuts, *slots, numbers, sets)
    store[f"bits.{site.name}"] = np.packbits(sides)
    return sides


def worth_of(
    store: Store, trees: Places, improvements: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """What splits add to the importance of their columns, given the rows' weights."""
    worth: npt.NDArray[np.float64] = improvements / store["tree_weights"][trees]
    return worth / len(store["counts"])


def local_partition(site: Site) -> Partition:
    """Which rows the local splits of the level send left."""
    return Partition(site.store.facts["level"] + 1, site.store[f"bits.{site.name}"])


def letters_to_others(site: Site, letter: Letter) -> Letters:
    """The same letter for every other party."""
    return [(name, letter) for name in site.others]


def keep_partitions(site: Site, mail: Mail) -> None:
    """Store which rows others' splits of the level send left."""
    for owner, letter in mail.all(Partition).items():
        if letter.level != site.store.facts["level"] + 1:
            raise ProtocolError(owner, "Partition", "level", "must be the one being split")
        site.store[f"bits.{owner}"] = letter.bits


def take_splits(site: Site, level: SplitList) -> None:
    """Move all rows to the children of a level's splits."""
    store = site.store
    check_splits(site, level)
    n_nodes = np.asarray(store["n_nodes"])
    splits, n_nodes = number_children(level.trees, level.nodes, level.owners, n_nodes)
    slots, sizes = slots_of(store["nodes"], splits.trees, splits.nodes)
    names = list(store.facts["peers"])
    sides, n_known = list[Bits](), 0
    firsts = np.zeros(len(sizes), dtype=np.int64)  # where each node's sides begin
    for owner in np.unique(splits.owners):
        is_theirs = splits.owners == owner
        firsts[is_theirs] = n_known + np.cumsum(sizes[is_theirs]) - sizes[is_theirs]
        party, n_rows = names[owner], int(sizes[is_theirs].sum())
        if f"bits.{party}" not in store:
            raise ProtocolError(party, "Partition", "letter", f"must reach {site.name}")
        sides += sent_bits(party, "Partition", "bits", store[f"bits.{party}"], [n_rows])
        n_known += len(sides[-1])
    store["nodes"] = move_rows(store["nodes"], splits.lefts, slots, firsts, np.concatenate(sides))
    note_splits(store, splits, n_nodes)


def note_splits(store: Store, splits: Splits, n_nodes: Ints) -> None:
    """Store a level's splits."""
    store["n_nodes"] = n_nodes
    store.put("level", splits)
    store.put("splits", store.record(Splits, "splits").plus(splits))
    store.facts["level"] += 1
    store.drop("bits")


# The order of requests at each role: phase -> request -> the phases that may follow it.
SET_UP = "set up"  # columns are binned; passive parties do not have the labels yet
SEARCHED = "searched"  # the best splits of the open nodes are sent
SUMMED = "summed"  # encrypted sums of the open nodes are sent
CHOSEN = "chosen"  # the splits of the open nodes are chosen, for all parties
SPLIT = "told"  # (a name on disk) the local splits that won are made, and their sides sent

BEGINS: Table = {ALIGNED: {SetupRequest: (SET_UP,)}}
TABLES: dict[str, Table] = {
    f"the active party with {ENCODED} labels": {
        **BEGINS,
        SET_UP: {LevelRequest: (SEARCHED,)},
        SEARCHED: {
            LevelRequest: (SEARCHED,),
            PartitionRequest: (SPLIT,),
            FinishRequest: (FINISHED,),
        },
        SPLIT: {LevelRequest: (SEARCHED,)},
    },
    f"a passive party with {ENCODED} labels": {
        **BEGINS,
        SET_UP: {LevelRequest: (SEARCHED,)},
        SEARCHED: {LevelRequest: (SEARCHED,), PartitionRequest: (SPLIT, FINISHED)},
        SPLIT: {LevelRequest: (SEARCHED,)},
    },
    f"the active party with {PAILLIER} labels": {
        **BEGINS,
        SET_UP: {SplitRequest: (CHOSEN,)},
        CHOSEN: {SplitRequest: (CHOSEN,), FinishRequest: (FINISHED,)},
    },
    f"a passive party with {PAILLIER} labels": {
        **BEGINS,
        SET_UP: {SumRequest: (SUMMED,)},
        SUMMED: {SumRequest: (SUMMED,), PartitionRequest: (SPLIT, FINISHED)},
        SPLIT: {SumRequest: (SUMMED,)},
    },
}


def role_of(site: Site) -> tuple[str, Table]:
    """A site's role and its table."""
    labels = site.store.facts.get("forest", {}).get("labels", ENCODED)
    role = f"{'the active' if is_active(site) else 'a passive'} party with {labels} labels"
    return role, TABLES[role]
