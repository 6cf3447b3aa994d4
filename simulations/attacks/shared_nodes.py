"""What a passive party of SecureBoost can tell of labels from the rows that share tree nodes.

It sees the node of each row, except in the last level, where it sees only the rows at its own
splits. Rows with the same label tend to stay together, since splits are chosen for that. The attack
embeds rows by the nodes that they share, like communities of a graph (ID2Graph: Takahashi, Liu and
Liu 2023, arXiv:2307.10318). Departures: instead of the paper's Louvain communities, the leading
singular vectors of the table of rows by nodes, with each entry divided by the square root of its
node's size (Dhillon 2001, "Co-clustering documents and words using bipartite spectral graph
partitioning"); and the party knows the labels of ``KNOWN`` rows, half of each class, where the
paper names clusters by the true labels.

Success is the AUC of a logistic regression of the embedding, fitted to the known rows, over all
other training rows. Chance is the same from the party's columns only, by ranks, without any
message: a logistic regression or a forest. Cross-validation on the known rows chooses the number of
dimensions, and which of both models. Both figures are means over ``DRAWS`` draws of these rows.
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

from clients.secureboost.shared import SPLIT
from fedapp.messages.secureboost import EncryptedGradients, HandOverRequest, Splits
from fedapp.runs.baselines import join_tables
from fedapp.site.answer import phase_of
from fedapp.site.store import Store
from fedapp.trees.predict import Nodes, slots_of, unpack_bits
from simulations.attacks.frame import PLAIN, Attack, Outcome, Overrides, command
from simulations.attacks.heard import Heard, Trained, trained
from simulations.attacks.targets import CREDIT, PASSIVE, SECUREBOOST

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Labels = npt.NDArray[np.float32]
# Features, and the model to fit to them.
Guess = tuple[Array, LogisticRegression | RandomForestClassifier]
KNOWN, DRAWS = 40, 5
DIMENSIONS = 4, 32  # of the embedding: limited by the number of known labels
INVERSE_PENALTY = 0.03  # of the regression of the embedding; 0.3 overfits forty labels
FOLDS = RepeatedStratifiedKFold(n_splits=5, n_repeats=3, random_state=0)


class Passive:
    """A passive party that records the nodes of rows at the end of each round."""

    def __init__(self) -> None:
        self.nodes: list[Nodes] = []  # of each round, shape (n_trees, n_train)

    def note(self, heard: Heard) -> None:
        """Read the state before the next round or the end of the run."""
        store, n_train = heard.site.store, heard.site.store.facts.get("n_train", 0)
        ends = isinstance(heard.request, HandOverRequest)
        if "nodes" in store and (ends or heard.mail.all(EncryptedGradients)):
            self.nodes.append(np.array(self._last_seen(store)[:, :n_train]))

    def _last_seen(self, store: Store) -> Nodes:
        """Nodes of rows, after this party's splits of the last level, which move no rows."""
        nodes = store["nodes"]
        if phase_of(store) != SPLIT:
            return nodes
        splits, seen = store.record(Splits, "splits"), np.array(nodes)
        is_local = splits.columns >= 0
        trees, split, lefts = splits.trees[is_local], splits.nodes[is_local], splits.lefts[is_local]
        _, sizes = slots_of(nodes, trees, split)
        sides = unpack_bits(store["own_bits"], sizes.tolist())
        for tree, node, left, side in zip(trees, split, lefts, sides, strict=True):
            seen[tree, np.flatnonzero(nodes[tree] == node)] = left + ~side
        return seen


def embedded(rounds: Sequence[Nodes]) -> Array:
    """Embed rows by the nodes that they share.

    ``rounds`` are arrays of shape (n_trees, n_rows), the node of each row. Returns float64, shape
    (n_rows, at most ``max(DIMENSIONS)``): the widest dimension has variance 1, and the others are
    narrower, by their singular values.
    """
    trees = [tree for nodes in rounds for tree in nodes]
    n_rows = len(trees[0])
    node_ids = [np.unique(tree, return_inverse=True)[1] for tree in trees]
    ones, rows = np.ones(n_rows), np.arange(n_rows)
    members = hstack([csr_array((ones, (rows, ids))) for ids in node_ids], format="csr")
    # All rows are in the same number of nodes, so only the nodes' sizes matter.
    members = members.multiply(1 / np.sqrt(members.sum(axis=0)))
    n_dimensions = min(max(DIMENSIONS), members.shape[1] - 1)
    embedding = TruncatedSVD(n_dimensions, random_state=0).fit_transform(csr_array(members))
    embedding -= embedding.mean(axis=0)  # the first is as good as constant
    scaled: Array = embedding / embedding.std(axis=0).max()
    return scaled


def guessed(guesses: Sequence[Guess], labels: Labels, seed: int) -> float:
    """AUC over the rows of unknown label, of the guess that does best on the known rows."""
    aucs = []
    for draw in range(DRAWS):
        rng = np.random.default_rng([seed, draw])
        of_class = [rng.permutation(np.flatnonzero(labels == label)) for label in (0, 1)]
        known_ids = np.concatenate([rows[: KNOWN // 2] for rows in of_class])
        other_ids = np.setdiff1d(np.arange(len(labels)), known_ids)

        def validated(guess: Guess, known_ids: Ints = known_ids) -> float:
            features, model = guess
            scores = cross_val_score(
                model, features[known_ids], labels[known_ids], scoring="roc_auc", cv=FOLDS
            )
            return float(scores.mean())

        features, model = max(guesses, key=validated)
        model.fit(features[known_ids], labels[known_ids])
        scores = model.predict_proba(features[other_ids])[:, 1]
        aucs.append(roc_auc_score(labels[other_ids], scores))
    return float(np.mean(aucs))


def outcome(rounds: Sequence[Nodes], run: Trained) -> Outcome:
    """Guess labels from the recorded nodes, and from the party's columns."""
    table, _, active_columns = join_tables(run.settings)
    train, seed = table.split.train, run.settings.seed
    values = np.delete(table.values[train], np.arange(table.values.shape[1])[active_columns], 1)
    ranks = np.argsort(np.argsort(np.nan_to_num(values, nan=-np.inf), axis=0), axis=0)
    by_rank = ranks / len(values) - 0.5
    forest = RandomForestClassifier(50, min_samples_leaf=2, random_state=0)
    by_columns = [(by_rank, LogisticRegression(max_iter=1000)), (by_rank, forest)]
    chance = guessed(by_columns, table.labels[train], seed)
    if not rounds:
        return Outcome(0.5, chance, run.score)
    embedding = embedded(rounds)
    model = LogisticRegression(C=INVERSE_PENALTY, max_iter=1000)
    by_nodes = [(embedding[:, :n], model) for n in DIMENSIONS]
    return Outcome(guessed(by_nodes, table.labels[train], seed), chance, run.score)


def attacked(overrides: Overrides) -> Outcome:
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
