"""Labels guessed by a passive party from which rows share nodes, in trees of any vertical method.

Each attack is described at its ``attack_`` function; ``vertical_bins`` and ``eini_paths`` attack
from the active party's side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array, hstack
from sklearn.decomposition import TruncatedSVD
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import RepeatedStratifiedKFold, cross_val_score

from clients.federated_forest.party import Forest
from clients.secureboost import passive as secureboost_passive
from clients.vertical.growing import rows_after
from fedapp.messages.federated_forest import PartitionRequest
from fedapp.messages.secureboost import EncryptedGradients, HandOverRequest
from fedapp.runs.baselines import join_tables
from fedapp.runs.predict import model_of_text
from fedapp.trees.forest.cart import fewest_rows
from fedapp.trees.model import LEAF
from fedapp.trees.predict import Nodes
from simulations.attack import PLAIN, Attack, Outcome, Overrides, Trained, Transcript, trained

Array = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Labels = npt.NDArray[np.float32]
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
NOWHERE = -1  # the leaf of a row that was split once more; its child is not sent
FOREST = {
    **VERTICAL,
    "strategy": "federated-forest",
    "federated-forest.trees": 30,
    "federated-forest.labels": "paillier",
    "federated-forest.key-bits": 512,
    "federated-forest.insecure-small-key": True,
}


def true_bins(transcript: Transcript) -> npt.NDArray[np.int64] | None:
    """True bins of the passive party's training rows, int64, shape (n_rows, n_columns).

    A missing value has the bin after the last. None unless the message is to that party and it has
    bins. Attacks are judged by these bins and do not use them.
    """
    if transcript.site.name != PASSIVE or "codes" not in transcript.site.store:
        return None
    return secureboost_passive.Passive.load(transcript.site).codes.astype(np.int64)


# label_groups


class GroupingParty:
    """A passive party that joins rows when the forest is grown."""

    def __init__(self) -> None:
        self.groups = np.empty(0, dtype=np.int64)  # of each training row

    def note(self, transcript: Transcript) -> None:
        """Read structure and nodes of rows before the rows are deleted."""
        request, party = transcript.request, Forest.load(transcript.site)
        if not isinstance(request, PartitionRequest) or not request.last:
            return
        # A leaf counts if CART would have split it: above max-depth and with enough rows.
        n_train, settings = party.n_train, party.settings
        rules = fewest_rows(settings.min_samples_split, settings.min_samples_leaf)
        splits = party.structure.splits
        lefts = splits.spread(splits.lefts, party.structure.n_nodes, LEAF)
        self.groups = np.arange(n_train)
        for number, tree in enumerate(lefts):
            leaves = np.array(party.nodes[number, :n_train])
            leaves[np.isin(leaves, request.nodes[request.trees == number])] = NOWHERE
            drawn, values = party.counts[number] > 0, np.asarray(party.values[:n_train])
            for members in pure_nodes(tree, leaves, drawn, values, rules):
                self.groups = joined(self.groups, members)


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
    passive = GroupingParty()
    with trained({**FOREST, **overrides}, [PASSIVE], passive.note) as run:
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


# shared_nodes

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
        if "nodes" in transcript.site.store and (ends or transcript.mail.all(EncryptedGradients)):
            party = secureboost_passive.Passive.load(transcript.site)
            self.nodes.append(np.array(self._last_seen(party)[:, : party.n_train]))

    def _last_seen(self, party: secureboost_passive.Passive) -> Nodes:
        """Nodes of rows, after this party's splits of the last level, which move no rows."""
        splits = party.splits
        if splits is None:
            return party.nodes
        last = party.structure.split(splits.trees, splits.nodes, splits.owners).last
        return rows_after(party.nodes, last, party.peers, party.sides)


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
        return Outcome(0.5, chance, true_score(run))
    embedding = embedded(rounds)
    model = LogisticRegression(C=INVERSE_PENALTY, max_iter=1000)
    by_nodes = [(embedding[:, :n], model) for n in DIMENSIONS]
    return Outcome(guessed(by_nodes, table.labels[train], seed), chance, true_score(run))


def true_score(run: Trained) -> float:
    """Test AUC by the labels as they are; a run with ``label-epsilon`` counts randomised ones."""
    if not run.settings.label_epsilon:
        return run.score
    model, predict = model_of_text(run.model)
    table, _, _ = join_tables(run.settings)
    places = [table.columns.index(name) for name in model.columns]
    test = table.split.test
    predictions = np.asarray(predict(model, table.values[test][:, places], None))
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
    with trained({**SECUREBOOST, **overrides}, [PASSIVE], passive.note) as run:
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


# forest_nodes


class ForestParty:
    """A passive party that records the nodes of rows when the forest is grown."""

    def __init__(self) -> None:
        self.nodes: list[Nodes] = []  # shape (n_trees, n_train)

    def note(self, transcript: Transcript) -> None:
        party = Forest.load(transcript.site)  # after this message, the rows are deleted
        if isinstance(transcript.request, PartitionRequest) and transcript.request.last:
            self.nodes.append(np.array(party.nodes[:, : party.n_train]))


def attack_forest_nodes(overrides: Overrides) -> Outcome:
    """What a passive party of a Federated Forest learns about labels from rows that share nodes.

    With ``labels=paillier`` it sees no labels, but which rows are in which nodes, except where
    other parties split at ``max-depth``. Nodes need not be pure: rows with the same label tend to
    stay together. The attack is that of ``shared_nodes``, which defines success and chance.
    """
    passive = ForestParty()
    with trained({**FOREST, **overrides}, [PASSIVE], passive.note) as run:
        return outcome(passive.nodes, run)


FOREST_NODES = Attack(
    name="forest_nodes",
    holder="a passive party of a Federated Forest with labels=paillier, from nodes of rows and "
    f"{KNOWN} known labels",
    measure="AUC of guessed labels; chance: of its own columns",
    data=LABEL_GROUPS.data,
    ways=LABEL_GROUPS.ways,
    run=attack_forest_nodes,
)
