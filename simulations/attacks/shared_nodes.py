"""What a passive party of SecureBoost can tell of labels from the rows that share tree nodes.

It is told the node of each row, down to the last level but one, and in the last level at its own
splits. Rows with the same label tend to stay together, since that is what splits are chosen for. So
rows are embedded by the nodes that they share, as communities of a graph are found (ID2Graph:
Takahashi, Liu and Liu 2023, arXiv:2307.10318). Departures: in place of the paper's Louvain
communities stand the leading singular vectors of the table of rows by nodes, each entry over the
root of its node's size (Dhillon 2001, "Co-clustering documents and words using bipartite spectral
graph partitioning"); and the party knows the labels of ``KNOWN`` rows, half of each class, where
the paper names clusters by what it is scored by.

Success is the AUC of a logistic regression of the embedding, fitted to these rows, over all other
training rows; chance, that of the party's own columns, by ranks: what it guesses with no message at
all, by a logistic regression or a forest. How many dimensions, and which of both, is chosen by
cross-validation on the known rows. Both are means over ``DRAWS`` draws of these rows.
``forest_nodes`` is the same attack on a Federated Forest.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array, hstack
from sklearn.decomposition import TruncatedSVD
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import RepeatedStratifiedKFold, cross_val_score

from clients.secureboost.phases import TOLD
from fedapp.messages.secureboost import EncryptedGradients, HandOverRequest, Splits
from fedapp.site.phases import phase_of
from fedapp.site.store import Store
from fedapp.trees.sides import Nodes, slots_of, unpack_bits
from simulations.attacks.frame import PLAIN, Attack, Outcome, Overrides, command
from simulations.attacks.heard import Heard, Trained, trained
from simulations.attacks.targets import CREDIT, PASSIVE, SECUREBOOST
from simulations.baselines import join_tables

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Labels = npt.NDArray[np.float32]
# What guesses labels: features, and what is fitted to them.
Guess = tuple[Array, LogisticRegression | RandomForestClassifier]
KNOWN, DRAWS = 40, 5
DIMENSIONS = 4, 32  # of the embedding: as many as the known labels allow
INVERSE_PENALTY = 0.03  # of the regression of the embedding; with 0.3 forty labels are overfitted
FOLDS = RepeatedStratifiedKFold(n_splits=5, n_repeats=3, random_state=0)


class Passive:
    """A passive party that keeps where rows are at the end of each round."""

    def __init__(self) -> None:
        self.nodes: list[Nodes] = []  # of each round, shape (n_trees, n_train)

    def note(self, heard: Heard) -> None:
        """Look at the state before a new round begins, or the run ends."""
        store, n_train = heard.site.store, heard.site.store.facts.get("n_train", 0)
        ends = isinstance(heard.request, HandOverRequest)
        if "nodes" in store and (ends or heard.mail.all(EncryptedGradients)):
            self.nodes.append(np.array(self._last_seen(store)[:, :n_train]))

    def _last_seen(self, store: Store) -> Nodes:
        """Where rows are, with the own splits of the last level, which nobody moves rows by."""
        nodes = store["nodes"]
        if phase_of(store) != TOLD:
            return nodes
        splits, seen = store.record(Splits, "splits"), np.array(nodes)
        own = splits.columns >= 0
        trees, split, lefts = splits.trees[own], splits.nodes[own], splits.lefts[own]
        _, sizes = slots_of(nodes, trees, split)
        sides = unpack_bits(store["own_bits"], sizes.tolist())
        for tree, node, left, side in zip(trees, split, lefts, sides, strict=True):
            seen[tree, np.flatnonzero(nodes[tree] == node)] = left + ~side
        return seen


def embedded(rounds: Sequence[Nodes]) -> Array:
    """Rows by the nodes that they share.

    Parameters
    ----------
    rounds : int32, shape (n_trees, n_rows) each: the node of each row.

    Returns
    -------
    float64, shape (n_rows, at most the most of ``DIMENSIONS``): the widest has variance 1, and the
    others are as much narrower as they tell less.
    """
    trees = [tree for nodes in rounds for tree in nodes]
    n_rows = len(trees[0])
    numbers = [np.unique(tree, return_inverse=True)[1] for tree in trees]
    ones, rows = np.ones(n_rows), np.arange(n_rows)
    members = hstack([csr_array((ones, (rows, found))) for found in numbers], format="csr")
    # All rows are in as many nodes, so the rows' sizes are a factor of everything.
    members = members.multiply(1 / np.sqrt(members.sum(axis=0)))
    n_found = min(max(DIMENSIONS), members.shape[1] - 1)
    found = TruncatedSVD(n_found, random_state=0).fit_transform(csr_array(members))
    found -= found.mean(axis=0)  # the first is as good as constant
    narrowed: Array = found / found.std(axis=0).max()
    return narrowed


def guessed(guesses: Sequence[Guess], labels: Labels, seed: int) -> float:
    """AUC over the rows whose labels are not known, of the guess that does best on the known."""
    found = []
    for draw in range(DRAWS):
        rng = np.random.default_rng([seed, draw])
        of_class = [rng.permutation(np.flatnonzero(labels == label)) for label in (0, 1)]
        known = np.concatenate([rows[: KNOWN // 2] for rows in of_class])
        others = np.setdiff1d(np.arange(len(labels)), known)

        def validated(guess: Guess, known: Ints = known) -> float:
            features, model = guess
            scores = cross_val_score(
                model, features[known], labels[known], scoring="roc_auc", cv=FOLDS
            )
            return float(scores.mean())

        features, model = max(guesses, key=validated)
        model.fit(features[known], labels[known])
        scores = model.predict_proba(features[others])[:, 1]
        found.append(roc_auc_score(labels[others], scores))
    return float(np.mean(found))


def outcome(rounds: Sequence[Nodes], run: Trained) -> Outcome:
    """Labels guessed by what the passive party has seen, and by its own columns."""
    table, _, active_columns = join_tables(run.settings)
    train, seed = table.split.train, run.settings.seed
    own = np.delete(table.values[train], np.arange(table.values.shape[1])[active_columns], 1)
    ranks = np.argsort(np.argsort(np.nan_to_num(own, nan=-np.inf), axis=0), axis=0)
    alone = ranks / len(own) - 0.5
    forest = RandomForestClassifier(50, min_samples_leaf=2, random_state=0)
    by_columns = [(alone, LogisticRegression(max_iter=1000)), (alone, forest)]
    chance = guessed(by_columns, table.labels[train], seed)
    if not rounds:
        return Outcome(0.5, chance, run.score)
    features = embedded(rounds)
    model = LogisticRegression(C=INVERSE_PENALTY, max_iter=1000)
    by_nodes = [(features[:, :n], model) for n in DIMENSIONS]
    return Outcome(guessed(by_nodes, table.labels[train], seed), chance, run.score)


def attacked(overrides: Overrides) -> Outcome:
    """Guess labels by what the passive party has seen, and by its own columns."""
    passive = Passive()
    with trained({**SECUREBOOST, **overrides}, [PASSIVE], passive.note) as run:
        return outcome(passive.nodes, run)


ATTACK = Attack(
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
    },
    run=attacked,
)

if __name__ == "__main__":
    command(ATTACK)
