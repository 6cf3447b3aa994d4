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
training rows; chance, that of the same regression of the party's own columns, by ranks: what it
guesses with no message at all. Both are means over ``DRAWS`` draws of the known rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array, hstack
from sklearn.decomposition import TruncatedSVD
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from clients.secureboost.phases import TOLD
from fedapp.messages.secureboost import EncryptedGradients, HandOverRequest, Splits
from fedapp.site.phases import phase_of
from fedapp.site.store import Store
from fedapp.trees.sides import Nodes, slots_of, unpack_bits
from simulations.attacks.frame import PLAIN, Attack, Outcome, Overrides, command
from simulations.attacks.heard import Heard, trained
from simulations.attacks.targets import CREDIT, PASSIVE, SECUREBOOST
from simulations.baselines import join_tables

Array = npt.NDArray[np.float64]
KNOWN, DRAWS, DIMENSIONS = 40, 5, 16


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
    float64, shape (n_rows, at most ``DIMENSIONS``).
    """
    trees = [tree for nodes in rounds for tree in nodes]
    n_rows = len(trees[0])
    numbers = [np.unique(tree, return_inverse=True)[1] for tree in trees]
    ones, rows = np.ones(n_rows), np.arange(n_rows)
    members = hstack([csr_array((ones, (rows, found))) for found in numbers], format="csr")
    # All rows are in as many nodes, so the rows' sizes are a factor of everything.
    members = members.multiply(1 / np.sqrt(members.sum(axis=0)))
    n_found = min(DIMENSIONS, members.shape[1] - 1)
    found = TruncatedSVD(n_found, random_state=0).fit_transform(csr_array(members))
    scaled: Array = found / found.std(axis=0).clip(1e-12)
    return scaled


def guessed(features: Array, labels: npt.NDArray[np.float32], seed: int) -> float:
    """AUC over the rows whose labels are not known."""
    found = []
    for draw in range(DRAWS):
        rng = np.random.default_rng([seed, draw])
        of_class = [rng.permutation(np.flatnonzero(labels == label)) for label in (0, 1)]
        known = np.concatenate([rows[: KNOWN // 2] for rows in of_class])
        others = np.setdiff1d(np.arange(len(labels)), known)
        model = LogisticRegression(max_iter=1000).fit(features[known], labels[known])
        found.append(roc_auc_score(labels[others], model.decision_function(features[others])))
    return float(np.mean(found))


def attacked(overrides: Overrides) -> Outcome:
    """Guess labels by what the passive party has seen, and by its own columns."""
    passive = Passive()
    with trained({**SECUREBOOST, **overrides}, [PASSIVE], passive.note) as run:
        table, _, active_columns = join_tables(run.settings)
        train = table.split.train
        own = np.delete(table.values[train], np.arange(table.values.shape[1])[active_columns], 1)
        ranks = np.argsort(np.argsort(np.nan_to_num(own, nan=-np.inf), axis=0), axis=0)
        labels, seed = table.labels[train], run.settings.seed
        success = guessed(embedded(passive.nodes), labels, seed) if passive.nodes else 0.5
        return Outcome(success, guessed(ranks / len(own) - 0.5, labels, seed), run.score)


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
