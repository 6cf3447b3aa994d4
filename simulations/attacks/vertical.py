"""What honest parties of vertical runs find out; see ``fedapp.audit.vertical``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from sklearn.metrics import roc_auc_score

from fedapp.audit.listening import Trained, trained
from fedapp.audit.vertical import (
    KNOWN,
    Active,
    BoostedParty,
    ForestParty,
    by_columns,
    by_nodes,
    guessed,
    label_auc,
    largest_bins,
    solved,
)
from fedapp.runs.baselines import join_tables
from fedapp.runs.predict import model_of_text, predict
from fedapp.settings import load_settings
from fedapp.trees.predict import Nodes
from simulations.attack import PLAIN, Attack, Outcome, Overrides

ACTIVE, PASSIVE = "party-1", "party-2"
VERTICAL: dict[str, Any] = {"objective": "binary:logistic", "parties": 2, "align": "ordered"}
VERTICAL |= {"valid-fraction": 0.0, "eta": 0.3}
SECUREBOOST = {
    **VERTICAL,
    "strategy": "secureboost",
    "num-boost-round": 10,
    "max-depth": 4,
    "max-bin": 32,
    "secureboost.key-bits": 512,
    "secureboost.insecure-small-key": True,
}
CREDIT: dict[str, Any] = {"data": "default-credit", "columns": "sizes:12,11", "test-fraction": 0.95}
IONOSPHERE: dict[str, Any] = {"data": "ionosphere", "columns": "sizes:17,17"}
BINNED = {"ionosphere": IONOSPHERE, "default-credit": CREDIT}
# The whole model is written, to be scored by the labels as they are.
PRIVATE_LABELS: dict[str, Overrides] = {
    f"label-epsilon={epsilon:g}": {"label-epsilon": epsilon, "allow-export": True}
    for epsilon in (8.0, 4.0, 2.0, 1.0, 0.5)
}
FOREST = {
    **VERTICAL,
    "strategy": "federated-forest",
    "federated-forest.trees": 30,
    "federated-forest.labels": "paillier",
    "federated-forest.key-bits": 512,
    "federated-forest.insecure-small-key": True,
}


def attack_label_groups(overrides: Overrides) -> Outcome:
    """How many training rows a passive party of a Federated Forest can group by label.

    With ``labels=paillier`` a passive party sees no labels, but it sees the structure of the trees
    and which rows are in which nodes. CART splits every impure node above ``max-depth`` in which
    some column varies. So a node that is not split, although a column of this party varies in it,
    has a single label. The attack joins the rows of such nodes, tree after tree.

    Success is the AUC of an attacker who knows one label of each of the two largest groups, assigns
    it to the group, and ranks all other rows between them; chance, 0.5, is without messages. A
    forest whose nodes are left impure has no such groups, but is open to ``forest_nodes``.
    """
    passive = ForestParty()
    with trained(load_settings({**FOREST, **overrides}), [(PASSIVE, passive.note)]) as run:
        table, _, _ = join_tables(run.settings)
        auc = label_auc(passive.groups, table.labels[table.split.train])
        return Outcome(auc, 0.5, true_score(run))


LABEL_GROUPS = Attack(
    name="label_groups",
    holder="a passive party of a Federated Forest with labels=paillier, from nodes that stay whole",
    measure="AUC of guessed labels; chance: 0.5",
    data={
        "breast-cancer": {"data": "breast-cancer", "columns": "sizes:15,15"},
        "default-credit": {**CREDIT, "columns": "sizes:5,18"},
    },
    ways={
        PLAIN: {},
        "10 trees": {"federated-forest.trees": 10},
        "max-depth=3": {"federated-forest.max-depth": 3},
        "min-samples-leaf=10": {"federated-forest.min-samples-leaf": 10},
        **{
            name: {**way, "federated-forest.master-keeps-model": True}
            for name, way in PRIVATE_LABELS.items()
        },
    },
    run=attack_label_groups,
)


def outcome(rounds: Sequence[Nodes], run: Trained) -> Outcome:
    """Guess labels from the recorded nodes, and from the party's columns."""
    table, _, active_columns = join_tables(run.settings)
    train, seed = table.split.train, run.settings.seed
    labels = table.labels[train]
    values = np.delete(table.values[train], np.arange(table.values.shape[1])[active_columns], 1)
    chance = float(np.mean(guessed(by_columns(values), labels, seed)))
    success = float(np.mean(guessed(by_nodes(rounds), labels, seed))) if rounds else 0.5
    return Outcome(success, chance, true_score(run))


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
    these rows. ``forest_nodes`` is the same attack on a Federated Forest.
    """
    passive = BoostedParty()
    with trained(load_settings({**SECUREBOOST, **overrides}), [(PASSIVE, passive.note)]) as run:
        return outcome(passive.nodes, run)


SHARED_NODES = Attack(
    name="shared_nodes",
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
    name="label_privacy",
    holder="as shared_nodes, on whole tables and 60 trees",
    data={
        "default-credit": {**CREDIT, **LONG},
        "spambase": {**SHARED_NODES.data["spambase"], **LONG},
    },
    ways={PLAIN: {}, **PRIVATE_LABELS},
)


def attack_forest_nodes(overrides: Overrides) -> Outcome:
    """What a passive party of a Federated Forest learns about labels from rows that share nodes.

    With ``labels=paillier`` it sees no labels, but which rows are in which nodes, except where
    other parties split at ``max-depth``. Nodes need not be pure: rows with the same label tend to
    stay together. The attack is that of ``shared_nodes``, which defines success and chance.
    """
    passive = ForestParty()
    with trained(load_settings({**FOREST, **overrides}), [(PASSIVE, passive.note)]) as run:
        return outcome(passive.nodes, run)


FOREST_NODES = replace(
    LABEL_GROUPS,
    name="forest_nodes",
    holder="a passive party of a Federated Forest with labels=paillier, from nodes of rows and "
    f"{KNOWN} known labels",
    measure=SHARED_NODES.measure,
    run=attack_forest_nodes,
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
    name="solved_bins",
    holder="the active party of SecureBoost, from the sums that it decrypts",
    measure="share of a passive party's values whose bin is found; chance: the largest bin",
    data=BINNED,
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
