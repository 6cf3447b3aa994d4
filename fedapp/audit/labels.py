"""Labels guessed by a passive party from which rows share nodes, in trees of any vertical method.

``bins`` attacks from the active party's side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array, hstack
from sklearn.decomposition import TruncatedSVD
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import RepeatedStratifiedKFold, cross_val_score

from clients.federated_forest.party import Party
from clients.secureboost import passive as secureboost_passive
from clients.vertical.growing import rows_after
from fedapp.audit.listening import Transcript
from fedapp.messages.federated_forest import PartitionRequest
from fedapp.messages.secureboost import EncryptedGradients, HandOverRequest
from fedapp.trees.forest.cart import fewest_rows
from fedapp.trees.model import LEAF
from fedapp.trees.predict import Nodes

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Labels = npt.NDArray[np.float32]
NOWHERE = -1  # the leaf of a row that was split once more; its child is not sent

# Groups of rows with one label, in a forest


def pure_nodes(
    lefts: Ints,
    leaves: npt.NDArray[np.int32],
    drawn: npt.NDArray[np.bool_],
    values: npt.NDArray[np.float32],
    fewest: int,
) -> Iterator[Ints]:
    """Yield the drawn rows of each leaf that would have been split were it not pure.

    Parameters
    ----------
    lefts : left child of each node above ``max-depth`` of a tree, ``LEAF`` at a leaf.
    leaves : shape (n_rows,): leaf of each row.
    values : shape (n_rows, n_columns): the passive party's columns.
    fewest : rows that a node needs to be split.
    """
    for leaf in np.flatnonzero(lefts == LEAF):
        members = np.flatnonzero((leaves == leaf) & drawn)
        filled = np.nan_to_num(values[members], nan=-np.inf)  # missing counts as a value
        if len(members) >= fewest and (filled != filled[:1]).any():
            yield members


def joined(groups: Ints, members: Ints) -> Ints:
    """Merge the groups of some rows."""
    merged = groups[members]
    return np.where(np.isin(groups, merged), merged.min(), groups)


def label_auc(groups: Ints, labels: Labels) -> float:
    """AUC of the two largest groups; ``labels`` are 0 and 1."""
    scores = np.full(len(labels), 0.5)
    names, sizes = np.unique(groups, return_counts=True)
    for name in names[np.argsort(sizes)[-2:]]:
        members = groups == name
        scores[members] = labels[members][0]
    return float(roc_auc_score(labels, scores))


# Rows that share nodes

# Features, and the model to fit to them.
Guess = tuple[Array, LogisticRegression | RandomForestClassifier]
KNOWN, DRAWS = 40, 5
DIMENSIONS = 4, 32  # of the embedding: limited by the number of known labels
INVERSE_PENALTY = 0.03  # of the regression of the embedding; 0.3 overfits forty labels
FOLDS = RepeatedStratifiedKFold(n_splits=5, n_repeats=3, random_state=0)


class BoostedParty:
    """A passive party that records the nodes of rows at the end of each round."""

    def __init__(self) -> None:
        self.nodes: list[Nodes] = []  # of each round, shape (n_trees, n_train)

    def note(self, transcript: Transcript) -> None:
        """Read the state before the next round or the end of the run."""
        ends = isinstance(transcript.request, HandOverRequest)
        if "trees" not in transcript.site.store:
            return
        party = secureboost_passive.Passive.load(transcript.site)
        if len(party.trees.nodes) and (ends or transcript.mail.all(EncryptedGradients)):
            self.nodes.append(np.array(self._last_seen(party)[:, : party.n_train]))

    def _last_seen(self, party: secureboost_passive.Passive) -> Nodes:
        """Nodes of rows, after this party's splits of the last level, which move no rows."""
        trees, splits = party.trees, party.splits
        if splits is None:
            return trees.nodes
        return rows_after(trees.nodes, trees.after(splits).last, trees.parties, trees.sides)


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


def guessed(guesses: Sequence[Guess], labels: Labels, seed: int) -> list[float]:
    """AUC over the rows of unknown label, of the guess that does best on the known rows.

    One for each of ``DRAWS`` draws of the known rows.
    """
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
        aucs.append(float(roc_auc_score(labels[other_ids], scores)))
    return aucs


def by_nodes(rounds: Sequence[Nodes]) -> list[Guess]:
    """Guesses from the nodes that rows share; see ``embedded``."""
    embedding = embedded(rounds)
    model = LogisticRegression(C=INVERSE_PENALTY, max_iter=1000)
    return [(embedding[:, :n], model) for n in DIMENSIONS]


def by_columns(values: npt.NDArray[np.float32]) -> list[Guess]:
    """Guesses from a party's columns, shape (n_rows, n_columns), by their ranks."""
    ranks = np.argsort(np.argsort(np.nan_to_num(values, nan=-np.inf), axis=0), axis=0)
    by_rank = ranks / len(values) - 0.5
    forest = RandomForestClassifier(50, min_samples_leaf=2, random_state=0)
    return [(by_rank, LogisticRegression(max_iter=1000)), (by_rank, forest)]


def unguided(embedding: Array, rarer: int) -> Array:
    """Scores of class 1 without a known label: the smaller cluster is of the ``rarer`` class."""
    widest = embedding[:, embedding.std(axis=0).argmax()]
    side = np.sign(np.mean(widest**3)) * (1 if rarer else -1)
    return np.asarray(widest * side)


class ForestParty:
    """A passive party that records the nodes of rows, and joins rows, when the forest is grown."""

    def __init__(self) -> None:
        self.nodes: list[Nodes] = []  # shape (n_trees, n_train)
        self.groups = np.empty(0, dtype=np.int64)  # of each training row

    def note(self, transcript: Transcript) -> None:
        """Read structure and nodes of rows; after this message, the rows are deleted."""
        request, party = transcript.request, Party.load(transcript.site)
        if not isinstance(request, PartitionRequest) or not request.last:
            return
        # A leaf counts if CART would have split it: above max-depth and with enough rows.
        n_train, forest, settings = party.n_train, party.forest, party.forest.settings
        rules = fewest_rows(settings.min_samples_split, settings.min_samples_leaf)
        lefts = (tree_lefts for tree_lefts, _ in forest.trees.records())
        self.nodes.append(np.array(forest.nodes))
        self.groups = np.arange(n_train)
        for number, tree in enumerate(lefts):
            leaves = self.nodes[-1][number].copy()
            leaves[np.isin(leaves, request.nodes[request.trees == number])] = NOWHERE
            drawn, values = forest.counts[number] > 0, np.asarray(party.values[:n_train])
            for members in pure_nodes(tree, leaves, drawn, values, rules):
                self.groups = joined(self.groups, members)
