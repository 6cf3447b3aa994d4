"""What honest parties of vertical runs find out; see ``fedapp.audit.vertical``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from sklearn.metrics import roc_auc_score

from fedapp.audit.listening import Trained, trained
from fedapp.audit.vertical import (
    KNOWN,
    Active,
    BoostedParty,
    by_columns,
    by_nodes,
    guessed,
    largest_bins,
    solved,
)
from fedapp.runs.baselines import join_tables
from fedapp.runs.predict import model_of_text, predict
from fedapp.settings import load_settings
from simulations.attack import PLAIN, Attack, Outcome, Overrides

ACTIVE, PASSIVE = "party-1", "party-2"
SECUREBOOST: dict[str, Any] = {
    "strategy": "secureboost",
    "objective": "binary:logistic",
    "parties": 2,
    "align": "ordered",
    "valid-fraction": 0.0,
    "eta": 0.3,
    "num-boost-round": 10,
    "max-depth": 4,
    "max-bin": 32,
    "secureboost.key-bits": 512,
    "secureboost.insecure-small-key": True,
}
CREDIT: dict[str, Any] = {"data": "default-credit", "columns": "sizes:12,11", "test-fraction": 0.95}
# The whole model is written, to be scored by the labels as they are.
PRIVATE_LABELS: dict[str, Overrides] = {
    f"label-epsilon={epsilon:g}": {"label-epsilon": epsilon, "allow-export": True}
    for epsilon in (8.0, 4.0, 2.0, 1.0, 0.5)
}


def true_score(run: Trained) -> float:
    """Test AUC by the labels as they are; a run with ``label-epsilon`` counts randomised ones."""
    if not run.settings.label_epsilon:
        return run.score
    model = model_of_text(run.model)
    table, _, _ = join_tables(run.settings)
    column_ids = [table.columns.index(name) for name in model.columns]
    test = table.split.test
    predictions = np.asarray(predict(model, table.values[test][:, column_ids]))
    return float(roc_auc_score(table.labels[test], predictions[:, 0]))


def attack_shared_nodes(overrides: Overrides) -> Outcome:
    """What a passive party of SecureBoost learns about labels from the rows that share tree nodes.

    It sees the node of each row, except in the last level, where it sees only the rows at its own
    splits. Rows with the same label tend to stay together, since splits are chosen for that. The
    attack embeds rows by the nodes that they share, like communities of a graph (ID2Graph:
    Takahashi, Liu and Liu 2023, arXiv:2307.10318). Departures: instead of the paper's Louvain
    communities, the leading singular vectors of the table of rows by nodes, with each entry divided
    by the square root of its node's size (Dhillon 2001, "Co-clustering documents and words using
    bipartite spectral graph partitioning"); and the party knows the labels of 40 rows, half
    of each class, where the paper names clusters by the true labels.

    Success is the AUC of a logistic regression of the embedding, fitted to the known rows, over all
    other training rows. Chance is the same from the party's columns only, by ranks, without any
    message: a logistic regression or a forest. Cross-validation on the known rows chooses the
    number of dimensions, and which of both models. Both figures are means over five draws of
    these rows.
    """
    passive = BoostedParty()
    with trained(load_settings({**SECUREBOOST, **overrides}), [(PASSIVE, passive.note)]) as run:
        table, _, active_columns = join_tables(run.settings)
        train, seed = table.split.train, run.settings.seed
        labels, nodes = table.labels[train], passive.nodes
        values = np.delete(table.values[train], np.arange(table.values.shape[1])[active_columns], 1)
        chance = float(np.mean(guessed(by_columns(values), labels, seed)))
        success = float(np.mean(guessed(by_nodes(nodes), labels, seed))) if nodes else 0.5
        return Outcome(success, chance, true_score(run))


SHARED_NODES = Attack(
    holder=f"a passive party of SecureBoost, from nodes of rows and {KNOWN} known labels",
    measure="AUC of guessed labels; chance: of its own columns",
    data={
        "spambase": {"data": "spambase", "columns": "sizes:37,20", "test-fraction": 0.7},
        "default-credit": CREDIT,
    },
    ways={
        PLAIN: {},
        "first-trees=1": {"secureboost.first-trees": 1},
        "first-trees=2": {"secureboost.first-trees": 2},
        "first-trees=5": {"secureboost.first-trees": 5},
        "max-depth=2": {"max-depth": 2},
        "goss": {"secureboost.goss": True},
        **PRIVATE_LABELS,
    },
    run=attack_shared_nodes,
)


LONG = {"num-boost-round": 60, "eta": 0.1, "test-fraction": 0.2}
LABEL_PRIVACY = replace(
    SHARED_NODES,
    holder="as shared_nodes, on whole tables and 60 trees",
    data={
        "default-credit": {**CREDIT, **LONG},
        "spambase": {**SHARED_NODES.data["spambase"], **LONG},
    },
    ways={PLAIN: {}, **PRIVATE_LABELS},
)


def attack_solved_bins(overrides: Overrides) -> Outcome:
    """Which bin each row has in a passive party's columns, solved from the sums of SecureBoost.

    For each tree node, column and bin the active party decrypts the sums of gradients and hessians.
    It has both for every row and knows which rows are in the node, so each sum is an equation in
    which of these rows are in the bin. Gradients change every round, so equations add up. The
    attack fits the share of each row in each bin to all equations, by accelerated projected
    gradients (Beck and Teboulle 2009). It starts at the shares of the bins, which the first round
    reveals: there all hessians are equal.

    Success is the share of values (rows times columns) whose bin gets the largest share; chance is
    guessing the largest bin of each column. Rows that were in the same leaves of all trees have one
    gradient, and sums cannot separate them.
    """
    active = Active(PASSIVE)
    listeners = [(name, active.note) for name in (ACTIVE, PASSIVE)]
    with trained(load_settings({**SECUREBOOST, **overrides}), listeners) as run:
        if not active.sums:  # the active party grew all trees by itself
            chance = largest_bins(active.codes.T)
            return Outcome(chance, chance, run.score)
        coefficients, sums = np.concatenate(active.coefficients), np.concatenate(active.sums)
        success = (solved(coefficients, sums, active.widths) == active.codes).mean()
        return Outcome(float(success), largest_bins(active.codes.T), run.score)


SOLVED_BINS = Attack(
    holder="the active party of SecureBoost, from the sums that it decrypts",
    measure="share of a passive party's values whose bin is found; chance: the largest bin",
    data={
        "ionosphere": {"data": "ionosphere", "columns": "sizes:17,17"},
        "default-credit": CREDIT,
    },
    ways={
        PLAIN: {},
        "50 rounds": {"num-boost-round": 50},
        "max-depth=2": {"max-depth": 2},
        "max-bin=8": {"max-bin": 8},
        "first-trees=5": {"secureboost.first-trees": 5},
        "goss": {"secureboost.goss": True},
    },
    run=attack_solved_bins,
)
