"""Federated Forest at any party: bin the columns, and find its best splits where it knows labels.

Source: Liu et al. 2019, Algorithms 1 and 5.
"""

from __future__ import annotations

import numpy as np

from clients.dictionary import kept_categories
from clients.federated_forest.splits import open_nodes
from fedapp.errors import ConfigError, ProtocolError
from fedapp.messages.federated_forest import (
    Labels,
    LevelRequest,
    SetupRequest,
    SplitRequest,
    SumRequest,
)
from fedapp.messages.fields import fields_of
from fedapp.site.answer import Site
from fedapp.site.mail import Mail
from fedapp.site.store import Store
from fedapp.trees.divided import Lookup
from fedapp.trees.forest.cart import Bins, Candidates, Rules, bin_columns, code_columns
from fedapp.trees.forest.levels import Rows, Splits, row_counts, search
from fedapp.trees.predict import Places
from fedapp.trees.sets import category_counts


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
    widths = category_counts(kept_categories(store), values.shape[1])
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


def take_labels(site: Site, mail: Mail) -> None:
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
