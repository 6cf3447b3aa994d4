"""Federated Forest at the active party: codes of the labels, leaf values, scores.

Source: Liu et al. 2019, Algorithms 2 and 6; leaf labels stay here.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from clients.alignment import check_order
from clients.federated_forest.grow import begin, keep_labels
from clients.federated_forest.paillier_active import check_told, encrypt_labels, gains_of
from clients.federated_forest.part import kept_lookup, own_records, own_worth
from clients.federated_forest.splits import (
    is_encrypted,
    keep_partitions,
    make_own,
    take_splits,
    tell_others,
)
from clients.labels import number_rows
from clients.vertical_scores import compare, rows_of, told_scores
from fedapp import metrics
from fedapp.data.partition import SUBSETS, WATCHED
from fedapp.errors import ConfigError, DataError, as_protocol_error
from fedapp.messages.federated_forest import (
    FinishReply,
    FinishRequest,
    Labels,
    PartKept,
    SetupRequest,
)
from fedapp.site.answer import Site
from fedapp.site.mail import Letters, Mail
from fedapp.site.store import Store, write_part
from fedapp.trees.divided import joint_names
from fedapp.trees.forest.levels import Splits, class_codes, number_codes
from fedapp.trees.forest.model import BaggedForest, branches, leaf_values, to_json
from fedapp.trees.objective import REGRESSION, check_objective, margins_of, n_outputs

SCORE_BINS = 2**12
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
    return encrypt_labels(site, request) if encrypted else tell_others(site, letter)


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
            check_told(site, request)
        else:
            make_own(site, request)
        take_splits(site, request)
    model = forest(store)
    letters = {name: mail.one(PartKept, name) for name in site.others}
    rows = {subset: _rows(store, model, subset) for subset in SUBSETS}
    compare(site, model.objective, np.concatenate([rows[subset][0] for subset in SUBSETS]))
    # Out-of-bag rows, each predicted by the trees that have not drawn it.
    unseen = store["counts"] == 0
    oob = np.flatnonzero(unseen.any(axis=0))
    predictions = model.predictions(store["nodes"][:, oob], unseen[:, oob])
    margins = margins_of(model.objective, predictions)
    rows["oob"] = margins, store["labels"][oob], store["weights"][oob]
    scores = metrics.pooled_subsets(model.objective, rows)
    threshold = scores["train"].get("threshold")
    write_part(store.folder, {**_part(site, model, letters), "threshold": threshold})
    names, gains, counts = _importance(site, letters)
    keeps_model = store.facts["forest"]["master_keeps_model"]
    reply = FinishReply(
        **told_scores(scores),
        column_names=names,
        column_gains=gains,
        column_counts=counts,
        **own_records(site, keeps_model),
        classes=model.classes if keeps_model else (),
        leaf_values=np.concatenate(model.values) if keeps_model else np.zeros((0, model.n_outputs)),
    )
    store.forget()
    return reply, []


def _part(site: Site, model: BaggedForest, letters: dict[str, PartKept]) -> dict[str, Any]:
    store = site.store
    splits, n_nodes = store.record(Splits, "splits"), np.asarray(store["n_nodes"])
    records = splits.spread(splits.records, n_nodes, -1)
    return {
        **kept_lookup(store),
        "active": True,
        "name": site.name,
        "parts": {name: letter.digest.tobytes().hex() for name, letter in letters.items()},
        "model": to_json(model),
        "splits": [each.tolist() for each in records],
        # Only the owner of a split is known, so each party counts as one column.
        "n_columns": dict.fromkeys(store.facts["peers"], 1),
    }


def _importance(
    site: Site, letters: dict[str, PartKept]
) -> tuple[tuple[str, ...], npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Total gain and splits of all columns, numbered unless all parties share names."""
    store = site.store
    # With encrypted labels a party cannot know its gains, so this one computes them.
    encrypted = is_encrypted(store)
    worth = {site.name: own_worth(site)}
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
