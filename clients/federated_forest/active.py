"""Federated Forest at the active party: codes of the labels, leaf values, scores.

Source: Liu et al. 2019, Algorithms 2 and 6; the leaves' labels stay here.
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
from fedapp.errors import ConfigError, DataError, blaming
from fedapp.messages.federated_forest import (
    FinishReply,
    FinishRequest,
    Labels,
    PartKept,
    SetupRequest,
)
from fedapp.site.answer import Site
from fedapp.site.mail import Letters, Mail
from fedapp.site.part_file import write_part
from fedapp.site.store import Store
from fedapp.trees.divided.lookup import joint_names
from fedapp.trees.forest.label_codes import class_codes, number_codes
from fedapp.trees.forest.levels import Splits
from fedapp.trees.forest.model import BaggedForest, branches, leaf_values, to_json
from fedapp.trees.objective import REGRESSION, check_objective, margins_of, n_outputs

SCORE_BINS = 2**12
Scores = dict[str, float]
Scored = tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]  # margins, labels, weights


def setup(site: Site, request: SetupRequest, mail: Mail) -> Letters:
    """Check the rows' order, bin the columns, send the others labels in codes or encrypted."""
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
    """Labels as numbers; of those that train the codes that the others get."""
    store, n_train = site.store, site.store.facts["n_train"]
    with blaming(site.name, "SetupRequest", "objective"):
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
    """The forest as it is, without thresholds; a split's column is the number of its owner."""
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
    """Scores of the training and the validation rows by the forest as it is."""
    model = forest(store)
    return {subset: _scores(store, model, subset) for subset in WATCHED}


def _rows(store: Store, model: BaggedForest, subset: str) -> Scored:
    """Margins, labels and weights of a subset of the rows."""
    rows = rows_of(store, subset)
    margins = margins_of(model.objective, model.predictions(store["nodes"][:, rows]))
    return margins, store["labels"][rows], store["weights"][rows]


def _scores(store: Store, model: BaggedForest, subset: str) -> Scores:
    """Scores of a subset of the rows, by a histogram; none without rows."""
    given = _rows(store, model, subset)
    if not len(given[1]):
        return {}
    return metrics.scores(model.objective, metrics.statistics(model.objective, *given, SCORE_BINS))


def _oob_rows(store: Store, model: BaggedForest) -> Scored:
    """The training rows that some trees have not drawn, each by these trees."""
    n_train = store.facts["n_train"]
    unseen = store["counts"] == 0
    rows = np.flatnonzero(unseen.any(axis=0))
    found = model.predictions(store["nodes"][:, rows], unseen[:, rows])
    given = store["labels"][:n_train][rows], store["weights"][:n_train][rows]
    return margins_of(model.objective, found), *given


def finish(site: Site, request: FinishRequest, mail: Mail) -> tuple[FinishReply, Letters]:
    """Make the last splits, score the forest, keep the own part of the model."""
    store = site.store
    if len(request.trees):
        make_last(site, request, mail)
    model = forest(store)
    kept = {name: mail.one(PartKept, name) for name in site.others}
    rows = {subset: _rows(store, model, subset) for subset in SUBSETS}
    compare(site, model.objective, np.concatenate([rows[subset][0] for subset in SUBSETS]))
    rows["oob"] = _oob_rows(store, model)
    scores = metrics.pooled_subsets(model.objective, rows)
    threshold = scores["train"].get("threshold")
    write_part(store.folder, {**_part(site, model, kept), "threshold": threshold})
    names, gains, counts = _importance(site, kept)
    told = store.facts["forest"]["master_keeps_model"]
    reply = FinishReply(
        **told_scores(scores),
        column_names=names,
        column_gains=gains,
        column_counts=counts,
        **own_records(site, told),
        classes=model.classes if told else (),
        leaf_values=np.concatenate(model.values) if told else np.zeros((0, model.n_outputs)),
    )
    store.forget()
    return reply, []


def make_last(site: Site, request: FinishRequest, mail: Mail) -> None:
    """Make the splits of the last level, the own ones where that is not done."""
    keep_partitions(site, mail)
    if is_encrypted(site.store):
        check_told(site, request)
    else:
        make_own(site, request)
    take_splits(site, request)


def _part(site: Site, model: BaggedForest, kept: dict[str, PartKept]) -> dict[str, Any]:
    """The active party's part: structure, leaf values, own thresholds, whose each split is."""
    store = site.store
    splits, n_nodes = store.record(Splits, "splits"), np.asarray(store["n_nodes"])
    records = splits.spread(splits.records, n_nodes, -1)
    return {
        **kept_lookup(store),
        "active": True,
        "name": site.name,
        "parts": {name: letter.digest.tobytes().hex() for name, letter in kept.items()},
        "model": to_json(model),
        "splits": [each.tolist() for each in records],
        # Of a split nothing but its owner is known: a column a party.
        "n_columns": dict.fromkeys(store.facts["peers"], 1),
    }


def _importance(
    site: Site, kept: dict[str, PartKept]
) -> tuple[tuple[str, ...], npt.NDArray[np.float64], npt.NDArray[np.int64]]:
    """Total gain and splits of all columns; under numbers unless all parties share their names."""
    store = site.store
    # What another's columns have gained by its own word, or by ours where it cannot know.
    own = is_encrypted(store)
    worth = {
        name: (gains_of(site, name, len(one.gains)) if own else one.gains, one.counts, one.names)
        for name, one in kept.items()
    }
    worth[site.name] = own_worth(site)
    order = list(store.facts["peers"])
    shared = all(len(worth[name][2]) == len(worth[name][0]) for name in order)
    names = joint_names(
        {
            party: worth[party][2]
            if shared
            else [f"{party} column {place + 1}" for place in range(len(worth[party][0]))]
            for party in order
        }
    )
    gains = np.concatenate([worth[name][0] for name in order]) * store.facts["unit"] ** 2
    return names, gains, np.concatenate([worth[name][1] for name in order])
