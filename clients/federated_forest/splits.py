"""Federated Forest at any party: the splits of a level, and where they send the rows.

Source: Liu et al. 2019, Algorithms 1 and 5. A level's splits are made by those who won, who tell
the others which rows go left; then all know where every row is.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fedapp.errors import ProtocolError
from fedapp.messages.federated_forest import PAILLIER, LevelSplits, Partition
from fedapp.messages.fields import Letter
from fedapp.site.answer import Site
from fedapp.site.bits import sent_bits
from fedapp.site.mail import Letters, Mail
from fedapp.site.store import Store
from fedapp.trees.divided.lookup import Lookup
from fedapp.trees.forest.cart import Candidates, Ints
from fedapp.trees.forest.levels import Splits, number
from fedapp.trees.sets import sets_of_rows
from fedapp.trees.sides import Bits, Places, moved, sides_of, slots_of

Told = LevelSplits | Splits


def is_encrypted(store: Store) -> bool:
    """Whether the labels of this run leave their party under encryption alone."""
    return bool(store.facts["forest"]["labels"] == PAILLIER)


def open_nodes(store: Store) -> tuple[Places, Places]:
    """Nodes that may be split next: children of the last level's splits, or the roots."""
    if store.facts["level"] >= 0:
        return store.record(Splits, "level").children()
    n_trees = len(store["n_nodes"])
    return np.arange(n_trees, dtype=np.int32), np.zeros(n_trees, dtype=np.int32)


def check_splits(site: Site, told: Told) -> npt.NDArray[np.int64]:
    """Places of splits among the open nodes.

    Raises
    ------
    ProtocolError : not all are open nodes, in their order, of parties of the run.
    """
    trees, nodes = (each.astype(np.int64) for each in open_nodes(site.store))
    wanted = (told.trees.astype(np.int64) << 32) | told.nodes
    known = (trees << 32) | nodes
    places = np.minimum(np.searchsorted(known, wanted), max(len(known) - 1, 0))
    fits = len(wanted) <= len(known) and bool((known[places] == wanted).all())
    fits = fits and bool((np.diff(wanted) > 0).all())
    if not fits or (told.owners >= len(site.store.facts["peers"])).any():
        rule = "must be open, in order, and of parties of the run"
        raise ProtocolError(site.name, type(told).__name__, "nodes", rule)
    return places


def own_among(site: Site, told: Told) -> npt.NDArray[np.int64]:
    """Which of these splits are of this party's columns."""
    return np.flatnonzero(told.owners == list(site.store.facts["peers"]).index(site.name))


def make_own(site: Site, told: Told) -> Bits:
    """Make the own splits among these: note them, and which rows they send left."""
    store, places, own = site.store, check_splits(site, told), own_among(site, told)
    found = Candidates(*(store[f"found.{name}"][places[own]] for name in Candidates.__slots__))
    if (found.columns < 0).any():
        rule = "must be splits that this party has offered"
        raise ProtocolError(site.name, type(told).__name__, "owners", rule)
    cut = found.columns, found.thresholds, found.defaults
    numbers, sets = sets_of_rows(found.widths, found.rights)
    made = Lookup.of(*cut, found.widths, sets)
    store.put("lookup", store.record(Lookup, "lookup").plus(made))
    if "tree_weights" in store:
        gains = np.array(store["gains"])
        np.add.at(gains, found.columns, worth_of(store, told.trees[own], found.improvements))
        store["gains"] = gains
    slots = slots_of(store["nodes"], told.trees[own], told.nodes[own])
    sides = sides_of(store["values"], *cut, *slots, numbers, sets)
    store[f"bits.{site.name}"] = np.packbits(sides)
    return sides


def worth_of(
    store: Store, trees: Places, improvements: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """What splits add to the importance of their columns, for who knows the rows' weights."""
    worth: npt.NDArray[np.float64] = improvements / store["tree_weights"][trees]
    return worth / len(store["counts"])


def own_partition(site: Site) -> Partition:
    """Which rows the own splits of the level send left, for the others."""
    return Partition(site.store.facts["level"] + 1, site.store[f"bits.{site.name}"])


def tell_others(site: Site, letter: Letter) -> Letters:
    """The same letter for every other party."""
    return [(name, letter) for name in site.others]


def keep_partitions(site: Site, mail: Mail) -> None:
    """Keep which rows others' splits of the level send left, until all are known."""
    for owner, letter in mail.all(Partition).items():
        if letter.level != site.store.facts["level"] + 1:
            raise ProtocolError(owner, "Partition", "level", "must be the one being split")
        site.store[f"bits.{owner}"] = letter.bits


def take_splits(site: Site, told: Told) -> None:
    """Move all rows to the children of a level's splits, whose sides are all known."""
    store = site.store
    check_splits(site, told)
    found = told.trees, told.nodes, told.owners
    splits, n_nodes = number(*found, np.asarray(store["n_nodes"]))
    slots, sizes = slots_of(store["nodes"], splits.trees, splits.nodes)
    names = list(store.facts["peers"])
    sides, firsts, n_known = [], np.zeros(len(sizes), dtype=np.int64), 0
    for owner in np.unique(splits.owners):
        mine = splits.owners == owner
        firsts[mine] = n_known + np.cumsum(sizes[mine]) - sizes[mine]
        sides.append(_sides(site, names[owner], int(sizes[mine].sum())))
        n_known += len(sides[-1])
    store["nodes"] = moved(store["nodes"], splits.lefts, slots, firsts, np.concatenate(sides))
    note_splits(store, splits, n_nodes)


def note_splits(store: Store, splits: Splits, n_nodes: Ints) -> None:
    """Keep a level's splits."""
    store["n_nodes"] = n_nodes
    store.put("level", splits)
    store.put("splits", store.record(Splits, "splits").plus(splits))
    store.facts["level"] += 1
    store.drop("bits")


def _sides(site: Site, owner: str, n_rows: int) -> Bits:
    """Sides of the rows in one party's nodes of this level."""
    name = f"bits.{owner}"
    if name not in site.store:
        raise ProtocolError(owner, "Partition", "letter", f"must reach {site.name}")
    return sent_bits(owner, "Partition", "bits", site.store[name], [n_rows])[0]
