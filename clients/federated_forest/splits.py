"""Federated Forest at any party: a level's splits, and where they send the rows.

Source: Liu et al. 2019, Algorithms 1 and 5. The owner of a winning column makes the split and sends
the others the rows that go left; then every party knows where each row is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from clients.handshake import stored_categories
from fedapp.errors import ConfigError, ProtocolError
from fedapp.messages.federated_forest import (
    ENCODED,
    PAILLIER,
    FinishRequest,
    Labels,
    LevelRequest,
    LevelSplits,
    Partition,
    PartitionRequest,
    SetupRequest,
    SplitRequest,
    SumRequest,
)
from fedapp.messages.fields import Letter, fields_of
from fedapp.messages.handshake import pack_categories
from fedapp.site.answer import ALIGNED, FINISHED, Site, Table, is_active
from fedapp.site.mail import Letters, Mail
from fedapp.site.store import Store, sent_bits
from fedapp.trees.divided import Lookup
from fedapp.trees.forest.cart import Bins, Candidates, Ints, Rules, bin_columns, code_columns
from fedapp.trees.forest.levels import Rows, Splits, number_children, row_counts, search
from fedapp.trees.predict import Bits, Places, move_rows, sides_of, slots_of
from fedapp.trees.sets import category_counts, sets_of_rows

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
