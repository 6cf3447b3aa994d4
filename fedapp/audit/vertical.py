"""What a party of a vertical method finds out of others' rows.

A passive party guesses labels from which rows share nodes, in trees of any method; the active party
of SecureBoost solves for the bins of rows from the sums that it decrypts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array, hstack
from sklearn.decomposition import TruncatedSVD
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import RepeatedStratifiedKFold, cross_val_score

from clients.federated_forest.party import Party
from clients.secureboost import active as secureboost_active
from clients.secureboost import passive as secureboost_passive
from clients.vertical.growing import rows_after
from fedapp.arrays import Doubles, Flags, Floats, Ints
from fedapp.audit.listening import Trained, Transcript
from fedapp.messages.federated_forest import PartitionRequest
from fedapp.messages.secureboost import (
    EncryptedGradients,
    EncryptedSums,
    HandOverRequest,
    SplitRequest,
)
from fedapp.trees.forest.cart import fewest_rows
from fedapp.trees.model import LEAF
from fedapp.trees.predict import Nodes

Labels = Floats
NOWHERE = -1  # the leaf of a row that was split once more; its child is not sent

# Groups of rows with one label, in a forest


def pure_nodes(
    lefts: Ints,
    leaves: npt.NDArray[np.int32],
    drawn: Flags,
    values: Floats,
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
Guess = tuple[Doubles, LogisticRegression | RandomForestClassifier]
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
        trees, nodes = party.trees, party.trees.nodes
        if len(nodes) and (ends or transcript.mail.all(EncryptedGradients)):
            if (splits := party.splits) is not None:  # of the last level, which move no rows
                nodes = rows_after(nodes, trees.after(splits).last, trees.parties, trees.sides)
            self.nodes.append(np.array(nodes[:, : party.n_train]))


def embedded(rounds: Sequence[Nodes]) -> Doubles:
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
    scaled: Doubles = embedding / embedding.std(axis=0).max()
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


def by_columns(values: Floats) -> list[Guess]:
    """Guesses from a party's columns, shape (n_rows, n_columns), by their ranks."""
    ranks = np.argsort(np.argsort(np.nan_to_num(values, nan=-np.inf), axis=0), axis=0)
    by_rank = ranks / len(values) - 0.5
    forest = RandomForestClassifier(50, min_samples_leaf=2, random_state=0)
    return [(by_rank, LogisticRegression(max_iter=1000)), (by_rank, forest)]


def unguided(embedding: Doubles, labels: Labels) -> Doubles:
    """Scores of class 1 without a known label, but for their sign: any known label shows it."""
    widest = embedding[:, embedding.std(axis=0).argmax()]
    return np.asarray(widest if roc_auc_score(labels, widest) >= 0.5 else -widest)


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


# Bins of rows


def true_bins(transcript: Transcript, passive: str) -> Ints | None:
    """True bins of a passive party's training rows, int64, shape (n_rows, n_columns).

    A missing value has the bin after the last. None unless the message is to that party and it has
    bins. Attacks are judged by these bins and do not use them.
    """
    if transcript.site.name != passive or "table" not in transcript.site.store:
        return None
    return secureboost_passive.Passive.load(transcript.site).table.codes.astype(np.int64)


# Smallest singular value used, relative to the largest. Sums are exact to about 1e-10; smaller
# singular values would amplify that error into all shares.
RANK = 1e-6
STEPS, STILL = 400, 1e-5  # stop when no share moves more in a step


class Active:
    """An active party that collects equations of a passive party, ``most`` if there are more.

    The true codes only judge it.
    """

    def __init__(self, passive: str, most: int | None = None) -> None:
        self._passive, self._most = passive, most
        self.coefficients: list[Doubles] = []  # shape (2 n_wanted, n_rows)
        self.sums: list[Doubles] = []  # shape (2 n_wanted, n_bins)
        self.widths = np.empty(0, dtype=np.int64)  # bins of each column
        self.codes = np.empty((0, 0), dtype=np.int64)  # the truth: a bin more for missing values

    def note(self, transcript: Transcript) -> None:
        """Decrypt the sums, as the party is about to do itself."""
        if (codes := true_bins(transcript, self._passive)) is not None:
            self.codes = codes
        is_full = self._most is not None and 2 * len(self.sums) >= self._most
        if is_full or not isinstance(transcript.request, SplitRequest):
            return
        party = secureboost_active.Active.load(transcript.site)
        if party.round.chosen is not None:
            party.apply_splits(transcript.mail)
        growth, rows = party.growing(), slice(party.n_train)
        letter = transcript.mail.one(EncryptedSums, self._passive)
        histogram, _ = party.party_sums(letter, self._passive, growth)
        self.widths = party.joint.widths[self._passive]
        for index, (tree, node) in enumerate(growth.wanted):
            inside = party.trees.nodes[tree, rows] == node
            gradients = party.round.gradients
            of_node = histogram[index]
            outputs = range(len(gradients)) if party.round.has_one_tree else [tree]
            of_outputs = of_node.reshape(len(of_node), len(outputs), 2).transpose(1, 2, 0)
            for output, of_output in zip(outputs, of_outputs, strict=True):
                self.coefficients.append((gradients[output] * inside[:, None]).T)
                self.sums.append(of_output)

    def finds_planted(self, run: Trained) -> bool:
        """Whether the bins of a row are found that is alone in a node."""
        pair = self.coefficients[0][:, self.coefficients[0].any(axis=0)][:, :1]  # of any row
        coefficients = np.pad(np.concatenate(self.coefficients), ((0, 2), (0, 1)))
        coefficients[-2:, -1:] = pair
        bins = np.concatenate([np.arange(width) == width - 1 for width in self.widths])
        sums = np.concatenate((*self.sums, pair * bins))
        return bool((solved(coefficients, sums, self.widths)[-1] == self.widths - 1).all())


def solved(coefficients: Doubles, sums: Doubles, widths: Ints) -> Ints:
    """Solve for the bin that each row is in, for each column.

    Parameters
    ----------
    coefficients : shape (n_equations, n_rows): gradients and hessians in turn; the second is
        of all rows' hessians, which are equal.
    sums : shape (n_equations, n_bins).
    widths : bins of each column; one more is for missing values, whose sums are the rest.

    Returns
    -------
    The bin of each row in each column, shape (n_rows, n_columns).
    """
    scale = np.sqrt((coefficients**2).sum(axis=1)).clip(1e-300)[:, None]
    totals = coefficients.sum(axis=1)
    left, sizes, right = np.linalg.svd(coefficients / scale, full_matrices=False)
    is_large = sizes > RANK * sizes[0]
    # Orthonormal combinations of the equations, and their weights.
    rows, weights = right[is_large].astype(np.float32), left.T[is_large] / sizes[is_large, None]
    columns = []
    for column_sums in np.split(sums, np.cumsum(widths)[:-1], axis=1):
        full = np.hstack([column_sums, (totals - column_sums.sum(axis=1))[:, None]])
        combined = (weights @ (full / scale)).astype(np.float32)
        columns.append(_fitted(rows, combined, full[1] / totals[1]).argmax(axis=1))
    return np.stack(columns, axis=1)


def _fitted(rows: Floats, sums: Floats, shares: Doubles) -> Floats:
    """Shares of each row in the bins of a column, shape (n_rows, n_bins).

    ``rows``, shape (n_equations, n_rows), are orthonormal; ``shares`` start the search.
    """
    fit = ahead = np.tile(shares.astype(np.float32), (rows.shape[1], 1))
    speed = 1.0
    for _ in range(STEPS):
        previous, fit = fit, _to_shares(ahead - rows.T @ (rows @ ahead - sums))
        if np.abs(fit - previous).max() < STILL:
            break
        # Momentum: extrapolate along the last step.
        speed, last = (1 + np.sqrt(1 + 4 * speed**2)) / 2, speed
        ahead = fit + np.float32((last - 1) / speed) * (fit - previous)
    return fit


def _to_shares(values: Floats) -> Floats:
    """Project rows to the simplex: >= 0, sum 1 (Duchi et al. 2008)."""
    ordered = -np.sort(-values, axis=1)
    over = np.cumsum(ordered, axis=1) - 1
    counts = np.arange(1, values.shape[1] + 1, dtype=np.float32)
    last = (ordered * counts > over).sum(axis=1)
    level = over[np.arange(len(values)), last - 1] / last.astype(np.float32)
    nearest: Floats = np.maximum(values - level[:, None], 0)
    return nearest


def largest_bins(columns: Iterable[Ints]) -> float:
    """Share of values in the largest bin of their column."""
    return float(np.mean([np.bincount(column).max() / len(column) for column in columns]))
