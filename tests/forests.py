"""Federated forests put together from their parts, and the same forest grown in one place."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from fedapp.config import Settings
from fedapp.home import home
from fedapp.run_folder import RunFolder
from fedapp.trees.bagged import BaggedForest, from_json, grow, leaf_values
from fedapp.trees.cart import Criterion, Rules, bin_columns, code_columns
from fedapp.trees.draws import bootstrap_counts, n_features
from fedapp.trees.label_codes import class_codes, number_codes
from fedapp.trees.levels import Rows
from fedapp.trees.parts import PART, Lookup, split_owners
from strategies.federated_forest import FederatedForest
from tests.pooled import Pooled, made_columns, write_rows
from tests.transcript import summary_of


def part_of(party: str, model_id: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((home() / "sites" / party / model_id / PART).read_text())
    return found


def parts_of(folder: RunFolder) -> list[dict[str, Any]]:
    """What each party keeps of a run; the active one also knows the others' parts by digest."""
    summary = summary_of(folder)
    return [part_of(party["name"], summary["model_id"]) for party in summary["parties"]]


def encrypted_forest(
    make_settings: Callable[..., Settings], folder: Path
) -> Callable[..., Settings]:
    """``make(objective, parties, **more)``: settings of 3 trees of depth 3, labels under a small
    key; words after ``own_`` are the method's own."""

    def make(objective: str = "binary:logistic", parties: int = 2, **more: Any) -> Settings:
        data = folder / f"{objective[:5]}.csv"
        if not data.exists():
            write_rows(data, made_columns(objective, n_rows=200))
        given = {"data": str(data), "label": "y", "objective": objective, "parties": parties}
        given |= {"own_trees": 3, "own_max_depth": 3, "align": "ordered", "max_bin": 16}
        given |= {"own_labels": "paillier", "own_key_bits": 256, "own_insecure_small_key": True}
        own = "federated-forest__"
        values = {name.replace("own_", own, 1): value for name, value in (given | more).items()}
        return make_settings(strategy="federated-forest", **values)

    return make


def joined(folder: RunFolder) -> BaggedForest:
    """The whole forest of a run, from the parts that lie with its parties."""
    summary = summary_of(folder)
    parties = [party["name"] for party in summary["parties"]]
    parts = {name: part_of(name, summary["model_id"]) for name in parties}
    active = parts[summary["active"]]
    model = from_json(active["model"])
    firsts = dict(
        zip(parties, np.cumsum([0, *(len(p["columns"]) for p in parts.values())]), strict=False)
    )
    lookups = {name: Lookup.from_json(part) for name, part in parts.items()}
    for tree, owners, records in zip(
        model.trees, split_owners(model, active), active["splits"], strict=True
    ):
        for node in np.flatnonzero(tree["left"] >= 0):
            lookup, record = lookups[owners[node]], records[node]
            tree["column"][node] = lookup.columns[record] + firsts[owners[node]]
            tree["threshold"][node] = lookup.thresholds[record]
            tree["default_left"][node] = lookup.defaults[record]
    names = tuple(name for part in parts.values() for name in part["columns"])
    return BaggedForest(model.objective, names, model.classes, model.trees, model.values)


def pooled(settings: Settings) -> tuple[BaggedForest, Rows, Any]:
    """The forest of the joined table by the same draws; what it grew from, and where rows ended."""
    whole, own = Pooled(settings), FederatedForest.own_settings(settings)
    values, labels = whole.values[whole.train], whole.labels[whole.train]
    weights = whole.weights[whole.train].astype(np.float64)
    n_rows, n_columns = values.shape
    is_numbers = settings.objective == "reg:squarederror"
    codes, unit = number_codes(labels) if is_numbers else (class_codes(labels), 1.0)
    bins = bin_columns(values, settings.max_bin)
    counts = np.ones((own.trees, n_rows), np.uint8)
    if own.bootstrap:
        counts = bootstrap_counts(settings.seed, own.trees, n_rows)
    rows = Rows(code_columns(values, bins), bins, codes, weights, counts)
    n_classes = 0 if is_numbers else int(labels.max()) + 1
    n_outputs = n_classes if settings.objective == "multi:softprob" else 1
    default: Criterion = "variance" if is_numbers else "gini"
    rules = Rules(
        *(default if own.criterion == "auto" else own.criterion, n_classes),
        *(own.min_samples_split, own.min_samples_leaf, own.min_impurity_decrease / unit**2),
    )
    seeds = np.random.default_rng([settings.seed, 2]).integers(0, 2**63 - 1, n_columns)
    drawn = n_features(own.max_features, n_columns)
    trees, nodes = grow(rows, values, seeds, drawn, own.max_depth, rules)
    sizes = np.array([len(tree) for tree in trees])
    leaves = leaf_values(nodes, counts, weights, labels, sizes, n_classes, n_outputs)
    for tree, found in zip(trees, leaves, strict=True):
        found[tree["left"] >= 0] = 0
    classes = tuple(map(str, range(n_classes)))
    model = BaggedForest(settings.objective, whole.columns, classes, trees, leaves)
    return model, rows, nodes
