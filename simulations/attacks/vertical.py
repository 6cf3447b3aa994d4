"""Attacks on vertical methods, from the letters and the state of one of two honest parties.

The active party of SecureBoost reads a passive party's bins (``reverse_sums``, ``solved_bins``)
and Fed-EINI's paths (``eini_paths``); a passive party learns labels from which rows share tree
nodes (``shared_nodes``, ``forest_nodes``, ``label_groups``). Each is described at its ``attack_``
function.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
from scipy.sparse import csr_array, hstack
from sklearn.decomposition import TruncatedSVD
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score
from sklearn.model_selection import RepeatedStratifiedKFold, cross_val_score

from clients.eini import NO_RECORD, Plan, plan_of
from clients.eini import Active as Predictor
from clients.federated_forest.party import Forest
from clients.inference import Predicting
from clients.secureboost import active as secureboost_active
from clients.secureboost import passive as secureboost_passive
from clients.secureboost import round as secureboost_round
from clients.vertical.growing import rows_after
from fedapp.crypto.packing import PRECISION, FixedPoint, SumLayout
from fedapp.crypto.paillier import decrypt
from fedapp.crypto.paillier_keys import PrivateKey
from fedapp.crypto.workers import shared_workers
from fedapp.data.datasets import read_source
from fedapp.messages.eini import Structure, Totals
from fedapp.messages.federated_forest import PartitionRequest
from fedapp.messages.secureboost import EncryptedGradients, HandOverRequest, SplitRequest
from fedapp.runs.baselines import join_tables
from fedapp.runs.local import run_local
from fedapp.settings import Settings, load_settings
from fedapp.site.answer import Site
from fedapp.trees.divided import Lookup, candidates
from fedapp.trees.forest.cart import fewest_rows
from fedapp.trees.model import LEAF
from fedapp.trees.predict import Nodes
from simulations.attack import (
    PLAIN,
    Attack,
    Outcome,
    Overrides,
    Trained,
    Transcript,
    listening,
    trained,
)
from simulations.study import write_rows

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
        return Outcome(auc, 0.5, run.score)


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
    },
    run=attack_label_groups,
)


# reverse_sums

Array = npt.NDArray[np.float64]
DIGITS = 44  # of 53; the others are the gradient
UNKNOWN = -1


class Writer:
    """An active party that writes rows into fixed-point numbers; the true codes only judge it."""

    def __init__(self) -> None:
        self.first = 0  # next row to write
        self.fresh = False  # rows are written and their sums not yet read
        self.bits: list[npt.NDArray[np.bool_]] = []  # of each round, shape (n_bins, 2 * DIGITS)
        self.widths = np.empty(0, dtype=np.int64)
        self.codes = np.empty((0, 0), dtype=np.int64)

    def note(self, transcript: Transcript) -> None:
        if (codes := true_bins(transcript)) is not None:
            self.codes = codes
        if isinstance(transcript.request, SplitRequest):
            self.widths = secureboost_active.Active.load(transcript.site).joint.widths[PASSIVE]

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Write rows into gradients and read them from sums, while the context is open."""
        writer = self

        class Written(FixedPoint):
            __slots__ = ()

            @staticmethod
            def covering(
                gradients: npt.NDArray[np.float32], precision: int = PRECISION
            ) -> FixedPoint:
                return Written(FixedPoint.covering(gradients, precision).exponents, precision)

            def encode(self, gradients: npt.NDArray[np.float32]) -> Ints:
                integers = FixedPoint.encode(self, gradients) >> DIGITS << DIGITS
                turn = np.arange(writer.first, min(writer.first + 2 * DIGITS, len(integers)))
                places = turn - writer.first
                integers[turn, 0, places // DIGITS] += 1 << places % DIGITS
                writer.first, writer.fresh = writer.first + 2 * DIGITS, True
                return integers

            def decode(self, sums: Sequence[Sequence[int]], n_outputs: int) -> Array:
                if writer.fresh:  # the first sums are of the root, which has all rows
                    # The lowest digits of each pair of numbers, shape (n_bins, 2 * DIGITS)
                    digits = [
                        [int(number) >> digit & 1 for number in pair for digit in range(DIGITS)]
                        for pair in sums
                    ]
                    writer.bits.append(np.array(digits, dtype=bool))
                    writer.fresh = False
                return FixedPoint.decode(self, sums, n_outputs)

        with (
            patch.object(secureboost_active, "FixedPoint", Written),
            patch.object(secureboost_round, "FixedPoint", Written),
        ):
            yield

    def codes_read(self, n_rows: int) -> Ints:
        """Bins of all rows, int64, shape (n_rows, n_columns).

        A missing value has the bin after the last; a row that was not written has ``UNKNOWN``.
        """
        codes = np.full((n_rows, len(self.widths)), UNKNOWN)
        ends = np.cumsum(self.widths)
        for number, bits in enumerate(self.bits):
            rows = np.arange(number * 2 * DIGITS, min((number + 1) * 2 * DIGITS, n_rows))
            for column, width in enumerate(self.widths.tolist()):
                bins = bits[ends[column] - width : ends[column], : len(rows)]
                codes[rows, column] = np.where(bins.any(axis=0), bins.argmax(axis=0), width)
        return codes


def attack_reverse_sums(overrides: Overrides) -> Outcome:
    """What a dishonest active party of SecureBoost reads by writing rows into gradients.

    Nobody sees what it encrypts. It gives up the lowest digits of a gradient, which a tree does not
    miss, and writes one digit for one row there: in a sum, that digit shows whether the bin holds
    the row. Two numbers of 44 digits read 88 rows a round, in every column of
    every other party, and the trees stay as good as they were. This is a lower bound: nodes of a
    level share no row, so below the root the same digits can serve other rows, as they do in
    ``crafted_gradients``, which gives up the trees. (Weng et al. 2020,
    "Practical Privacy Attacks on Vertical Federated Learning", arXiv:2011.09290, call it the
    reverse sum attack; theirs reads the order of the bins that rows are in.)

    Success is the share of values (rows times columns) whose bin is read, or guessed right as the
    largest bin for rows that were not written; chance is that of guessing only.
    """
    writer = Writer()
    with (
        writer.writing(),
        trained({**SECUREBOOST, **overrides}, [ACTIVE, PASSIVE], writer.note) as run,
    ):
        truth, codes = writer.codes, writer.codes_read(len(writer.codes))
        largest = np.array([np.bincount(column).argmax() for column in truth.T])
        guesses = np.where(codes == UNKNOWN, largest, codes)
        chance = float((truth == largest).mean())
        return Outcome(float((guesses == truth).mean()), chance, run.score)


REVERSE_SUMS = Attack(
    name="reverse_sums",
    holder="an active party of SecureBoost that breaks the rules, from sums of what it makes up",
    measure="share of a passive party's values whose bin is found; chance: the largest bin",
    data=BINNED,
    ways={
        PLAIN: {},
        "3 rounds": {"num-boost-round": 3},
        "50 rounds": {"num-boost-round": 50},
        "max-bin=8": {"max-bin": 8},
        "first-trees=5": {"secureboost.first-trees": 5},
    },
    run=attack_reverse_sums,
)


# solved_bins

Floats = npt.NDArray[np.float32]
# Smallest singular value used, relative to the largest. Sums are exact to about 1e-10; smaller
# singular values would amplify that error into all shares.
RANK = 1e-6
STEPS, STILL = 400, 1e-5  # stop when no share moves more in a step


class Active:
    """An active party that collects the equations; the true codes only judge it."""

    def __init__(self) -> None:
        self.coefficients: list[Array] = []  # shape (2 n_wanted, n_rows)
        self.sums: list[Array] = []  # shape (2 n_wanted, n_bins)
        self.widths = np.empty(0, dtype=np.int64)  # bins of each column
        self.codes = np.empty((0, 0), dtype=np.int64)  # the truth: a bin more for missing values

    def note(self, transcript: Transcript) -> None:
        """Decrypt the sums, as the party is about to do itself."""
        if (codes := true_bins(transcript)) is not None:
            self.codes = codes
        if not isinstance(transcript.request, SplitRequest):
            return
        party = secureboost_active.Active.load(transcript.site)
        if party.current.chosen is not None:
            party.apply_splits(transcript.mail)
        growth, rows = party.growing(), slice(party.n_train)
        histogram, _ = party.party_sums(transcript.mail, PASSIVE, growth)
        self.widths = party.joint.widths[PASSIVE]
        for place, (tree, node) in enumerate(growth.wanted):
            inside = party.nodes[tree, rows] == node
            self.coefficients.append((party.current.gradients[tree] * inside[:, None]).T)
            self.sums.append(histogram[place].T)


def solved(coefficients: Array, sums: Array, widths: Ints) -> Ints:
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


def _fitted(rows: Floats, sums: Floats, shares: Array) -> Floats:
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
    active = Active()
    with trained({**SECUREBOOST, **overrides}, [ACTIVE, PASSIVE], active.note) as run:
        if not active.sums:  # the active party grew all trees by itself
            chance = _largest(active.codes.T)
            return Outcome(chance, chance, run.score)
        sums = np.concatenate(active.coefficients), np.concatenate(active.sums)
        success = (solved(*sums, active.widths) == active.codes).mean()
        return Outcome(float(success), _largest(active.codes.T), run.score)


def _largest(columns: Iterable[Ints]) -> float:
    """Share of values in the largest bin of their column."""
    return float(np.mean([np.bincount(column).max() / len(column) for column in columns]))


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
        return Outcome(0.5, chance, run.score)
    embedding = embedded(rounds)
    model = LogisticRegression(C=INVERSE_PENALTY, max_iter=1000)
    by_nodes = [(embedding[:, :n], model) for n in DIMENSIONS]
    return Outcome(guessed(by_nodes, table.labels[train], seed), chance, run.score)


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


# eini_paths

Bools = npt.NDArray[np.bool_]
MOST, ROWS = 2**18, 100


class Curious:
    """An active party that records sums and what it knows; the true ways only judge it."""

    def __init__(self) -> None:
        # Terms and sums are in multiples of the unit of the fixed-point numbers.
        self.sums = np.empty(0)
        self.terms: list[Ints] = []  # of each tree, shape (n_rows, n_entries)
        self.open: list[Bools] = []  # same shape: which entries its splits leave open to a row
        self.theirs: list[Bools] = []  # the same by the passive party's splits: the truth
        self.sizes: list[Ints] = []  # of each tree, shape (n_entries,): training rows
        self.slack = 0  # possible rounding error of a sum

    def note(self, transcript: Transcript) -> None:
        site = transcript.site
        if structure := transcript.mail.all(Structure).get(ACTIVE):
            passive = Predicting.load(site)
            self._lookup, self._structure = passive.party_part().lookup, structure
            self.theirs = _open_by_passive(self._lookup, structure, passive.values)
        for _, letter in transcript.mail.each(Totals):
            self._take(site, letter)

    def _take(self, site: Site, letter: Totals) -> None:
        party = Predictor.load(site)
        plan, key = plan_of(party.active_part()), PrivateKey.from_array(party.key)
        layout = SumLayout(key.public.bits, *party.layout)
        plain = decrypt(key, letter.ciphertexts, shared_workers())
        unit = layout.precision - layout.exponent
        sums = layout.unpack(plain, letter.n_rows)[:, 0]
        self.sums = np.concatenate((self.sums, np.ldexp(sums, unit)))
        self.slack = layout.n_terms
        self._plan, self.open = plan, _open_by_active(plan, party.values)
        self.terms = []
        for tree, is_open in zip(plan.shared, self.open, strict=True):
            # What the open entries of a tree would add to the sums of rows
            skeleton, terms = plan.skeletons[tree], np.zeros(is_open.shape)
            for column, entry in enumerate(skeleton.sources[skeleton.entries]):
                rows = is_open[:, column]
                values = party.values[rows]
                terms[rows, column] = plan.terms_below(tree, int(entry), values)[:, 0]
            self.terms.append(np.rint(np.ldexp(terms, unit)).astype(np.int64))

    def count(self, settings: Settings) -> None:
        """Count the training rows of each entry, as the active party saw in training."""
        table, _, active = join_tables(settings)
        values = table.values[table.split.train]
        mine = _open_by_active(self._plan, values[:, active])
        others = np.delete(values, np.arange(values.shape[1])[active], axis=1)
        theirs = _open_by_passive(self._lookup, self._structure, others)
        self.sizes = [(a & b).sum(axis=0) for a, b in zip(mine, theirs, strict=True)]


def _open_by_active(plan: Plan, values: Floats) -> list[Bools]:
    """Entries of each tree that the active party's splits leave open to rows."""
    return [
        candidates(plan.skeletons[tree].lefts, plan.local_sides(tree, values), len(values))
        for tree in plan.shared
    ]


def _open_by_passive(lookup: Lookup, letter: Structure, values: Floats) -> list[Bools]:
    """Entries of each tree that the passive party's splits leave open to rows."""
    is_open = []
    for lefts, records in zip(
        np.split(letter.lefts, letter.ends[:-1]),
        np.split(letter.records, letter.ends[:-1]),
        strict=True,
    ):
        local_nodes = np.flatnonzero(records != NO_RECORD).tolist()
        sides = {node: lookup.sides(records[node], values) for node in local_nodes}
        is_open.append(candidates(lefts, sides, len(values)))
    return is_open


def the_way(options: Sequence[Ints], total: int, slack: int, most: int = MOST) -> list[int] | None:
    """Find the option of each list that together add up to ``total``.

    ``options`` are int64 arrays; a sum may be off by ``slack``; ``most`` limits the combinations
    tried for each half of the lists. Returns indices of the options; an empty list if none or
    several combinations fit, None if there are too many to try.
    """
    halves: list[list[int]] = [[], []]
    sizes = [1, 1]
    for index in np.argsort([-len(each) for each in options], kind="stable").tolist():
        half = int(sizes[1] < sizes[0])
        halves[half].append(index)
        sizes[half] *= len(options[index])
    if max(sizes) > most:
        return None
    first, second = ([options[index] for index in half] for half in halves)
    left, right = _all_sums(first), _all_sums(second)
    order = np.argsort(left)
    missing = total - right
    starts = np.searchsorted(left[order], missing - slack, side="left")
    ends = np.searchsorted(left[order], missing + slack, side="right")
    if (ends - starts).sum() != 1:
        return []
    position = int(np.argmax(ends - starts))
    chosen = _places(halves[0], options, int(order[starts[position]]))
    chosen |= _places(halves[1], options, position)
    return [chosen[index] for index in range(len(options))]


def _places(lists: Sequence[int], options: Sequence[Ints], number: int) -> dict[int, int]:
    """Index of each list's option in entry ``number`` of ``_all_sums``, by the list's number."""
    chosen = {}
    for index in reversed(lists):
        number, chosen[index] = divmod(number, len(options[index]))
    return chosen


def _all_sums(options: Sequence[Ints]) -> Ints:
    """Sums of one option of each list; the last list varies fastest."""
    sums = np.zeros(1, dtype=np.int64)
    for each in options:
        sums = np.add.outer(sums, each).ravel()
    return sums


def predicted(overrides: Overrides, model: str, curious: Curious) -> None:
    with tempfile.TemporaryDirectory() as folder:
        table = read_source(overrides["data"])
        drawn = np.random.default_rng(overrides["seed"]).permutation(table.n_rows)[:ROWS]
        ids = [f"row-{row}" for row in drawn]
        path = write_rows(Path(folder) / "rows.parquet", table, drawn, labelled=False, ids=ids)
        settings = load_settings(
            {
                "strategy": "eini",
                "data": path,
                "id": "id",
                "model": model,
                "run-dir": f"{folder}/run",
                "eini.key-bits": 512,
                "eini.insecure-small-key": True,
                "eini.unguarded": True,
                **{name: overrides[name] for name in ("columns", "parties", "align", "seed")},
            }
        )
        with listening([ACTIVE, PASSIVE], curious.note):
            run_local(settings)


def attack_eini_paths(overrides: Overrides) -> Outcome:
    """Which way rows went through another's splits, from Fed-EINI's sums.

    The active party knows all leaf values, and which leaves its own splits leave open to a row. It
    decrypts only their sum, in 53 bits and more; finding the values that add up to it is a
    subset-sum problem. The attack adds up the values of each half of the trees in all combinations,
    sorts one list and looks up for each entry of the other what is missing (Horowitz and Sahni
    1974). That takes the square root of the number of combinations, up to 2^18 for a half. Rows
    with more are counted as unfinished, and as not found: other searches go further, and lattice
    methods were not tried.

    Success is the share of rows for which exactly one way through all trees gives the sum, and it
    is the true one. Chance is the share of rows that went, in every tree, the way of most training
    rows among those that the active party's splits leave open; it has seen these numbers.
    """
    settings, curious = {**SECUREBOOST, **overrides}, Curious()
    n_found = n_guessed = n_unfinished = 0
    with trained(settings, [], curious.note) as run:
        predicted(settings, run.summary["model_id"], curious)
        curious.count(run.settings)
        for row, total in enumerate(curious.sums):
            # Entries that are open to the row, of each tree
            ids = [np.flatnonzero(each[row]) for each in curious.open]
            truth = [each[row, places] for each, places in zip(curious.theirs, ids, strict=True)]
            options = [each[row, places] for each, places in zip(curious.terms, ids, strict=True)]
            guess = [
                int(each[places].argmax()) for each, places in zip(curious.sizes, ids, strict=True)
            ]
            way = the_way(options, int(total), curious.slack)
            n_unfinished += way is None
            n_found += _is_true(way, truth) if way else 0
            n_guessed += _is_true(guess, truth)
    success, chance, unfinished = (
        each / len(curious.sums) for each in (n_found, n_guessed, n_unfinished)
    )
    return Outcome(success, chance, run.score, unfinished)


def _is_true(way: Sequence[int], truth: Sequence[Bools]) -> bool:
    return all(each[one] for each, one in zip(truth, way, strict=True))


EINI_PATHS = Attack(
    name="eini_paths",
    holder="the active party of Fed-EINI, from the sums of leaves that it decrypts",
    measure="share of rows whose way through all trees is found; chance: the usual way",
    data={
        "spambase": {"data": "spambase", "columns": "sizes:37,20", "test-fraction": 0.5},
        "default-credit": CREDIT,
    },
    ways={f"{n} trees": {"num-boost-round": n} for n in (5, 10, 20, 40)},
    run=attack_eini_paths,
)
