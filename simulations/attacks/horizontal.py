"""Attacks on horizontal methods: rows rebuilt from sums or trees, and members found by scores.

``pax_rows`` reads PAX's sums, ``timberstrike`` the trees, ``membership`` the finished model's
scores. Each is described at its ``attack_`` or ``_main`` function.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from enum import Enum
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import linear_sum_assignment, linprog
from scipy.sparse import coo_array, eye_array, hstack, vstack

from clients.pax import Party
from clients.scoring import Binned
from fedapp.conversation import Conversation, Exchange, Parties, Saved
from fedapp.data.labels import class_ids
from fedapp.errors import ConfigError
from fedapp.histograms.bins import NO_CODE, Cuts, digitise
from fedapp.histograms.build import add_histograms
from fedapp.histograms.sketch import Sketch, fuse_sketches, sketch_cuts
from fedapp.messages.fields import Reply, Request
from fedapp.messages.handshake import HelloReply
from fedapp.messages.pax import GrowReply, GrowRequest, SketchReply, SketchRequest
from fedapp.messages.secagg import EVERYONE
from fedapp.records.document import from_text
from fedapp.runs.baselines import Scored, run_and_load, score
from fedapp.runs.local import LocalGrid, simulated_contexts
from fedapp.runs.tables import stacked_tables
from fedapp.settings import Settings, load_settings
from fedapp.site.answer import Site
from fedapp.site.settings import SiteConfig
from fedapp.site.store import Store
from fedapp.trees.model import LEAF, Ensemble, Tree
from fedapp.trees.objective import PLAIN
from fedapp.trees.rounds import Boosting
from fedapp.trees.stacked import StackedModel
from simulations.attack import Attack, Outcome, Overrides, Trained, trained
from simulations.study import check_names
from strategies.flower import FlowerStrategy
from strategies.method import Summary
from strategies.pax import PAX

Ints = npt.NDArray[np.int64]
Sums = npt.NDArray[np.float64]
Row = tuple[int, ...]  # a bin a column, then the label
ROUNDING = 2.0**-22  # rounding of h, in units of g
LEAST = 1e-9  # a smaller hessian may be a rounding error
MOST_ALONE = 100  # rows of a node whose pairs are tried


@dataclass(frozen=True, slots=True, eq=False)
class Level:
    """Request and reply of one level of a tree."""

    request: GrowRequest
    histograms: Sums  # (n_wanted, n_bins, 2)


class CuriousPAX(PAX):
    """The server's side of PAX, which sends honest requests and records the replies."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.n_bins = 0  # of the finest sketch
        self.cuts: Cuts | None = None
        self.sketches: dict[str, Sketch] = {}
        self.levels: dict[str, list[Level]] = defaultdict(list)

    def conversation(
        self, parties: Parties[HelloReply], saved: Saved | None
    ) -> Conversation[Summary]:
        conversation = super().conversation(parties, saved)
        step = next(conversation)
        while True:
            replies = yield step
            if isinstance(step, Exchange):
                for party, reply in sorted(replies.items()):
                    self._listen(party, step.requests[party], reply)
            try:
                step = conversation.send(replies)
            except StopIteration as ended:
                summary: Summary = ended.value
                return summary

    def _listen(self, party: str, request: Request, reply: Reply) -> None:
        if isinstance(request, SketchRequest) and isinstance(reply, SketchReply):
            arrays = (reply.representatives, reply.masses, reply.offsets, reply.maxima)
            self.sketches[party] = Sketch(*arrays)
            self.n_bins = max(self.n_bins, request.n_bins)

    def _ask_to_grow(
        self, parties: Parties[HelloReply], request: GrowRequest, boosting: Boosting
    ) -> Conversation[dict[str, GrowReply]]:
        replies = yield from super()._ask_to_grow(parties, request, boosting)
        self.cuts = boosting.cuts
        for party, reply in replies.items():
            self.levels[party].append(Level(request, reply.histograms))
        return replies


def pax_rows(
    data: str = "breast-cancer",
    parties: int = 3,
    rounds: int = 50,
    max_bin: int = 256,
    least_bin_rows: int = 0,
    aggregation: str = "both",
) -> Iterator[dict[str, Any]]:
    """How many training rows a coordinator rebuilds from what honest parties send it in PAX.

    A bin of one row gives itself away: its sums are the row's gradient g and hessian h, and for
    logistic loss h = |g| (1 - |g|) holds for one row and for hardly any sum of several. As g is the
    same in every column of a round, it links the bins of a row; g < 0 reveals its label. Nodes that
    are not sent follow as the difference of their parent and sibling. The contributions of known
    rows are subtracted from all sums, which isolates other rows in their bins, until no new row is
    found. Where parties merge bins of few rows (``least-bin-rows``), a node that is not sent is
    also read between the bins that its sibling has sent, where the difference of both is exact.

    ``python -m simulations attacks pax_rows`` trains, reads each party's sums, then only their sums
    over all parties; then it trains under secure aggregation and reads what is visible there: sums
    over all parties in bins of all parties. ``--data`` has two classes, ``--least-bin-rows`` sets
    the minimum of all parties, ``--aggregation plain`` or ``secure`` skips one of the runs. It
    prints a line for each: training rows known in all columns, up to the width of a bin, with their
    label; and rebuilt rows that do not exist.
    """
    check_names("aggregation", [aggregation], ("plain", "secure", "both"))
    config = {"data": data, "objective": "binary:logistic", "parties": parties, "max-bin": max_bin}
    config |= {"num-boost-round": rounds, "least-bin-rows": least_bin_rows, "preset": "xgboost"}
    with tempfile.TemporaryDirectory() as folder:
        if aggregation != "secure":
            plain = load_settings({**config, "run-dir": f"{folder}/run"})
            yield from ({**config, **line} for line in attack_plain_sums(plain))
        if aggregation != "plain":
            masked = {"pax.aggregation": "secure", "run-dir": f"{folder}/run-secure"}
            yield {**config, **attack_masked_sums(load_settings({**config, **masked}))}


def attack_plain_sums(settings: Settings) -> Iterator[dict[str, Any]]:
    """Rebuild training rows from each party's sums, and from their sums over all parties.

    Yields ``seen`` (whose sums), ``rows``, ``rebuilt`` and ``wrong``; raises ConfigError if
    gradients do not link the bins of a row, by the objective or a share of columns.
    """
    coordinator = _trained(settings)
    sketches, levels = coordinator.sketches, coordinator.levels
    truth = _truth(settings, {name: sketch_cuts(sketch) for name, sketch in sketches.items()})
    merged = settings.least_bin_rows > 0
    by_party = [
        (all_rebuilt(levels[name], sketch, merged), truth[name])
        for name, sketch in sketches.items()
    ]
    yield {"seen": "each party's sums", **_count(by_party)}
    cuts = fuse_sketches(tuple(sketches.values()), coordinator.n_bins)
    maps = coordinator.totals.state.places
    pooled = []
    for same_level in zip(*levels.values(), strict=True):
        # Add up the parties' sums in the layout of the common cuts.
        request = same_level[0].request
        total = np.zeros((len(request.wanted_nodes), len(cuts.edges), 2))
        for name, level in zip(levels, same_level, strict=True):
            add_histograms(total, level.histograms, maps[name])
        pooled.append(Level(request, total))
    rows = [
        _moved(row, sketches[name], maps[name], cuts.offsets)
        for name, all_rows in truth.items()
        for row in all_rows
    ]
    rebuilt_rows = all_rebuilt(pooled, _common_sketch(cuts), merged)
    yield {"seen": "sums over all parties", **_count([(rebuilt_rows, rows)])}


def attack_masked_sums(settings: Settings) -> dict[str, Any]:
    """Rebuild training rows where sums are masked; returns what ``attack_plain_sums`` yields."""
    coordinator = _trained(settings)
    assert list(coordinator.levels) == [EVERYONE], "sums are of all parties"
    assert coordinator.cuts is not None
    cuts = coordinator.cuts
    truth = _truth(settings, dict.fromkeys(coordinator.parties, cuts))
    levels, merged = coordinator.levels[EVERYONE], settings.least_bin_rows > 0
    rebuilt_rows = all_rebuilt(levels, _common_sketch(cuts), merged)
    rows = [row for party_rows in truth.values() for row in party_rows]
    return {"seen": "sums under masks", **_count([(rebuilt_rows, rows)])}


def _trained(settings: Settings) -> CuriousPAX:
    if settings.objective != "binary:logistic" or settings.colsample_bytree < 1:
        raise ConfigError("the attacked run must have two classes and all columns, got another")
    coordinator = CuriousPAX.of_run(settings)
    with closing(LocalGrid(simulated_contexts(settings))) as grid:
        FlowerStrategy(coordinator).start(grid)
    return coordinator


def all_rebuilt(levels: Sequence[Level], sketch: Sketch, merged: bool) -> set[Row]:
    """Rows that sums of one sender reveal; ``merged``: parties merge bins of few rows."""
    recovered: set[Row] = set()
    remaining = levels
    ways = (False, True) if merged else (False,)
    while (
        new := {row for way in ways for row in rebuilt(remaining, sketch.offsets, way)} - recovered
    ):
        recovered |= new
        sums = _sums_of(sorted(recovered), levels, sketch)
        remaining = [
            Level(level.request, level.histograms - known_sums)
            for level, known_sums in zip(levels, sums, strict=True)
        ]
    return recovered


def _sums_of(rows: Sequence[Row], levels: Iterable[Level], sketch: Sketch) -> Iterator[Sums]:
    """Contribution of rows to the sums of each level: the reply of a party with only these rows."""
    party, table = Party.load(Site(SiteConfig("known", data=""), Store(Path()))), np.array(rows)
    bins = sketch.representatives, sketch.offsets
    party.binned = Binned(table[:, :-1].astype(np.uint16), NO_CODE, *bins)
    party.category_widths = np.zeros(len(sketch.maxima), np.int64)
    n_rows = {"train": len(rows), "valid": 0}
    party.labels = {name: table[:n, -1].astype(np.float32) for name, n in n_rows.items()}
    party.weights = {name: np.ones(n, np.float32) for name, n in n_rows.items()}
    party.values = {"valid": np.empty((0, len(sketch.maxima)), np.float32)}
    party.objective, party.classes = "binary:logistic", ("0", "1")
    party.eval_metrics, party.loss = (), PLAIN
    for level in levels:
        reply = party.grow(level.request)
        assert isinstance(reply, GrowReply)
        yield reply.histograms


def rebuilt(levels: Iterable[Level], offsets: Ints, merged: bool = False) -> Iterator[Row]:
    """Yield rows that are the only one in a bin of every column, in some node of the same round.

    Parameters
    ----------
    levels : in the order in which they were sent.
    offsets : shape (n_columns + 1,): the bins of each column.
    merged : whether nodes that are not sent are read between the bins of their siblings.
    """
    for _, of_round in groupby(levels, lambda level: level.request.round_id):
        places: dict[float, set[tuple[int, int]]] = defaultdict(set)  # column and bin by gradient
        earlier: dict[int, Sums] = {}
        for level in of_round:
            fresh = dict(zip(level.request.wanted_nodes.tolist(), level.histograms, strict=True))
            splits = (level.request.split_nodes.tolist(), level.request.split_lefts.tolist())
            for parent, left in zip(*splits, strict=True):
                for child, sibling in ((left, left + 1), (left + 1, left)):
                    if parent in earlier and sibling in fresh and child not in fresh:
                        fresh[child] = earlier[parent] - fresh[sibling]
                        if merged:
                            fresh[child] = _between(fresh[child], fresh[sibling], offsets)
            for histogram in fresh.values():
                _note(places, histogram, offsets)
            earlier |= fresh
        n_columns = len(offsets) - 1
        for gradient, pairs in places.items():
            bins = dict(pairs)
            if len(pairs) == len(bins) == n_columns:  # exactly one bin in every column
                yield (*(bins[column] for column in range(n_columns)), int(gradient < 0))


def _between(difference: Sums, sibling: Sums, offsets: Ints) -> Sums:
    """Sums from one bin sent by the sibling to the next; unchanged after a column's last."""
    is_sent = sibling[:, 1] > LEAST
    between = np.zeros_like(difference)
    for begin, end in pairwise(offsets.tolist()):
        ends = begin + np.flatnonzero(is_sent[begin:end])
        first = ends[-1] + 1 if len(ends) else begin
        between[first:end] = difference[first:end]
        if len(ends):
            # reduceat adds up to the next first; the last span ends before the end of the array.
            firsts = np.concatenate(([begin], ends[:-1] + 1))
            between[ends] = np.add.reduceat(difference, firsts)[: len(ends)]
            last = slice(firsts[-1], ends[-1] + 1)
            between[ends[-1]] = difference[last].sum(axis=0)
    return between


def _note(places: dict[float, set[tuple[int, int]]], histogram: Sums, offsets: Ints) -> None:
    """Add bins of one row, or of two rows that are single elsewhere, by the rows' gradients."""
    gradients, hessians = histogram.T
    # One row: h = |g| (1 - |g|) for logistic loss.
    sizes = np.abs(gradients)
    filled = hessians > LEAST
    is_one = filled & (np.abs(hessians - sizes * (1 - sizes)) <= ROUNDING * sizes)
    columns = np.searchsorted(offsets, np.arange(len(histogram)), side="right") - 1
    singles, first_seen = np.unique(gradients[is_one].astype(np.float32), return_index=True)
    for place in np.flatnonzero(is_one):
        key = float(np.float32(gradients[place]))
        places[key].add((int(columns[place]), int(place - offsets[columns[place]])))
    if not 1 < len(singles) <= MOST_ALONE:
        return
    single_sums = histogram[is_one][first_seen]
    first_ids, second_ids = np.triu_indices(len(singles), 1)
    pairs = single_sums[first_ids] + single_sums[second_ids]
    for place in np.flatnonzero(filled & ~is_one):
        (matches,) = np.nonzero((np.abs(pairs - histogram[place]) <= ROUNDING).all(axis=1))
        if len(matches) == 1:
            for key in (
                float(singles[first_ids[matches[0]]]),
                float(singles[second_ids[matches[0]]]),
            ):
                places[key].add((int(columns[place]), int(place - offsets[columns[place]])))


def _common_sketch(cuts: Cuts) -> Sketch:
    """The common bins as a sketch of one party: each starts at its representative."""
    starts = [
        np.concatenate([cuts.minima[[column]], cuts.column(column)[:-1]])
        for column in range(cuts.n_columns)
    ]
    points = np.concatenate(starts)
    return Sketch(points, np.ones_like(points), cuts.offsets, cuts.edges[cuts.offsets[1:] - 1])


def _truth(settings: Settings, cuts: dict[str, Cuts]) -> dict[str, list[Row]]:
    """Each party's training rows as bins between its ``cuts``, with their labels."""
    table, rows = stacked_tables(settings)
    assert table.labels is not None
    labels = np.unique(table.labels, return_inverse=True)[1]
    rows_of = {}
    for name, party_cuts in cuts.items():
        train_rows = rows[name]["train"]
        codes, _ = digitise(table.values[train_rows], party_cuts)
        rows_of[name] = [
            (*code, int(label))
            for code, label in zip(codes.tolist(), labels[train_rows], strict=True)
        ]
    return rows_of


def _moved(row: Row, sketch: Sketch, places: Ints, offsets: Ints) -> Row:
    """Translate a row from its party's bins to the common bins."""
    *bins, label = row
    party_bins = sketch.offsets[:-1] + np.array(bins)
    inside = party_bins < sketch.offsets[1:]  # a missing value has no bin
    common = places[np.where(inside, party_bins, 0)] - offsets[:-1]
    return (*np.where(inside, common, -1).tolist(), label)


def _count(known_and_true: Iterable[tuple[set[Row], list[Row]]]) -> dict[str, int]:
    senders = list(known_and_true)
    return {
        "rows": sum(len(rows) for _, rows in senders),
        "rebuilt": sum(row in rebuilt_rows for rebuilt_rows, rows in senders for row in rows),
        "wrong": sum(len(rebuilt_rows - set(rows)) for rebuilt_rows, rows in senders),
    }


# timberstrike: the arithmetic

Array = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
WHOLE = 1e-6  # tolerance: a solver's share may be this far below a whole number of rows


@dataclass(frozen=True, slots=True, eq=False)
class Leaves:
    """The leaves of a tree that a row can be in."""

    lows: Array  # (n_leaves, n_columns): the boxes, lows <= values < highs
    highs: Array
    weights: Array  # (n_leaves,): -G / (H + lambda)
    hessians: Array  # (n_leaves,): H, or zeros if not disclosed
    steps: Array  # (n_leaves,): what a leaf adds to a row's margin

    @classmethod
    def of(cls, tree: Tree, n_columns: int, step: float, has_hessians: bool = True) -> Leaves:
        """Read a tree whose leaf values are ``step`` times the weights."""
        lows, highs = (np.full((len(tree), n_columns), end) for end in (-np.inf, np.inf))
        for node in np.flatnonzero(tree["left"] != LEAF):
            left, column, threshold = (tree[name][node] for name in ("left", "column", "threshold"))
            lows[left : left + 2], highs[left : left + 2] = lows[node], highs[node]
            # Where parties merge bins, a split may leave one of the boxes empty.
            highs[left, column] = min(threshold, highs[node, column])
            lows[left + 1, column] = max(threshold, lows[node, column])
        leaves = (tree["left"] == LEAF) & (lows < highs).all(axis=1)
        values = tree["value"][leaves].astype(np.float64)
        hessians = has_hessians * tree["hessian"][leaves].astype(np.float64)
        return cls(lows[leaves], highs[leaves], values / step, hessians, values)

    def reached(self, values: Array) -> Ints:
        """The leaf of each row; ``values``: shape (n_rows, n_columns), none missing."""
        inside = np.ones((len(values), len(self.steps)), dtype=bool)
        for column, column_values in enumerate(values.T[:, :, None]):
            inside &= self.lows[:, column] <= column_values
            inside &= column_values < self.highs[:, column]
        leaf_ids: Ints = inside.argmax(axis=1)
        return leaf_ids


@dataclass(slots=True, eq=False)
class Rows:
    """What is known of each row."""

    lows: Array  # (n_rows, n_columns): the box of each row
    highs: Array
    labels: Array  # (n_rows,), 0 or 1
    margins: Array  # (n_rows,)

    @classmethod
    def in_first(cls, leaves: Leaves, margin: float, reg_lambda: float, n_rows: int) -> Rows:
        """Rows of a first tree, before which all have one margin; at most ``n_rows`` in a leaf."""
        counts = first_counts(leaves, margin, reg_lambda, n_rows)
        leaf_ids = np.repeat(np.tile(np.arange(len(counts)), 2), counts.T.ravel())
        labels = np.repeat([0.0, 1.0], counts.sum(axis=0))
        margins = margin + leaves.steps[leaf_ids]
        return cls(leaves.lows[leaf_ids], leaves.highs[leaf_ids], labels, margins)

    def may_be_in(self, leaves: Leaves) -> Flags:
        """Whether the boxes of rows and leaves intersect, shape (n_rows, n_leaves)."""
        intersects = np.ones((len(self.labels), len(leaves.steps)), dtype=bool)
        used = (np.isfinite(leaves.lows) | np.isfinite(leaves.highs)).any(axis=0)
        for column in np.flatnonzero(used):
            intersects &= self.lows[:, [column]] < leaves.highs[:, column]
            intersects &= leaves.lows[:, column] < self.highs[:, [column]]
        return intersects

    def deal(self, leaves: Leaves, reg_lambda: float) -> None:
        """Put each row into a leaf of a tree that these rows have grown."""
        self.put(leaves, dealt(self, leaves, reg_lambda))

    def put(self, leaves: Leaves, leaf_ids: Ints) -> None:
        """Put each row into a leaf; its box becomes the intersection of both."""
        self.lows = np.maximum(self.lows, leaves.lows[leaf_ids])
        self.highs = np.minimum(self.highs, leaves.highs[leaf_ids])
        self.margins = self.margins + leaves.steps[leaf_ids]

    def move(self, leaves: Leaves) -> None:
        """Add the mean step of the leaves open to a row, in a tree that others have grown."""
        shares = self.may_be_in(leaves) * (leaves.hessians if leaves.hessians.any() else 1.0)
        shares = np.maximum(shares, 1e-12 * self.may_be_in(leaves))
        self.margins = self.margins + shares @ leaves.steps / shares.sum(axis=1)


def first_counts(leaves: Leaves, margin: float, reg_lambda: float, n_rows: int) -> Ints:
    """Rows of classes 0 and 1 in each leaf of a first tree, int64, shape (n_leaves, 2).

    Without hessians, the counts are those, of at most ``n_rows`` rows, whose weight is nearest.
    """
    mean = 1 / (1 + np.exp(-margin))
    hessian = mean * (1 - mean)
    if leaves.hessians.any():
        sizes = np.rint(leaves.hessians / hessian)
        sums = -leaves.weights * (leaves.hessians + reg_lambda)
        ones = np.clip(np.rint(sizes * mean - sums), 0, sizes)
    else:
        all_sizes = np.repeat(np.arange(1, n_rows + 1), np.arange(2, n_rows + 2))
        all_ones = np.concatenate([np.arange(size + 1) for size in range(1, n_rows + 1)])
        weights = (all_ones - all_sizes * mean) / (all_sizes * hessian + reg_lambda)
        order = np.argsort(weights, kind="stable")
        after = np.searchsorted(weights[order], leaves.weights).clip(1, len(order) - 1)
        nearer = weights[order[after]] - leaves.weights < leaves.weights - weights[order[after - 1]]
        nearest = order[np.where(nearer, after, after - 1)]
        sizes, ones = all_sizes[nearest].astype(float), all_ones[nearest].astype(float)
    return np.stack([sizes - ones, ones], axis=1).astype(np.int64)


def dealt(rows: Rows, leaves: Leaves, reg_lambda: float) -> Ints:
    """Assign each row to a leaf, such that its sums differ least from those of the leaves.

    Rows of one class and margin that are open to the same leaves are dealt out together.
    """
    open_to = rows.may_be_in(leaves)
    marks = np.column_stack([open_to, rows.labels, rows.margins])
    _, first, group, sizes = np.unique(
        marks, axis=0, return_index=True, return_inverse=True, return_counts=True
    )
    shares = _shares(
        open_to[first], sizes, rows.labels[first], rows.margins[first], leaves, reg_lambda
    )
    whole = np.floor(shares + WHOLE)
    fractions = shares - whole
    leaf_ids = np.empty(len(group), dtype=np.int64)
    for number, size in enumerate(sizes.tolist()):
        counts = whole[number].astype(np.int64)
        # Rounding: the rows that remain go to the leaves with the largest fractions.
        counts[np.argsort(-fractions[number], kind="stable")[: size - counts.sum()]] += 1
        leaf_ids[group == number] = np.repeat(np.arange(len(counts)), counts)
    return leaf_ids


def _shares(
    open_to: Flags, sizes: Ints, labels: Array, margins: Array, leaves: Leaves, reg_lambda: float
) -> Array:
    """How many rows of each group are in each leaf, float64, shape (n_groups, n_leaves)."""
    means = 1 / (1 + np.exp(-margins))
    gradients, hessians = means - labels, means * (1 - means)
    groups, leaf_ids = np.nonzero(open_to)
    n_leaves, n_pairs = open_to.shape[1], len(groups)
    if leaves.hessians.any():
        sums = -leaves.weights * (leaves.hessians + reg_lambda)
        equations_of_leaves = [(gradients[groups], sums), (hessians[groups], leaves.hessians)]
    else:  # G + w H = -w lambda
        coefficients = gradients[groups] + leaves.weights[leaf_ids] * hessians[groups]
        equations_of_leaves = [(coefficients, -leaves.weights * reg_lambda)]
    # Unknowns: shares of the pairs (group, leaf), then how far each sum is above and below its
    # target. The linear program minimises these deviations.
    pairs = np.arange(n_pairs)
    of_leaves = vstack(
        [
            coo_array((coefficients, (leaf_ids, pairs)), (n_leaves, n_pairs))
            for coefficients, _ in equations_of_leaves
        ]
    )
    of_groups = coo_array((np.ones(n_pairs), (groups, pairs)), (len(sizes), n_pairs))
    n_sums = of_leaves.shape[0]
    over, none = eye_array(n_sums), coo_array((len(sizes), 2 * n_sums))
    equations = vstack([hstack([of_leaves, over, -over]), hstack([of_groups, none])])
    costs = np.repeat([0.0, 1.0], [n_pairs, 2 * n_sums])
    targets = np.concatenate([*(sums for _, sums in equations_of_leaves), sizes])
    solution = linprog(costs, A_eq=equations.tocsr(), b_eq=targets, method="highs-ds").x
    shares = np.zeros(open_to.shape)
    shares[groups, leaf_ids] = solution[:n_pairs]
    return shares


# timberstrike: the attack

HESSIANS, KNOWS = "hessians sent", "attacker knows"  # options of the attack, not of a run
TOLERANCE = 0.319  # standard deviations; a quarter of the values of a normal column are as near
LIKE = 4  # power of the share of trees that put two rows into one leaf; 2 to 8 work equally well


class Knows(Enum):
    """What the attacker knows besides the trees and the number of rows of each class.

    ``BOUNDS`` of each column, as in the paper. ``VALUES``: as many similar rows, which did not
    train; each is moved into the nearest rebuilt box; chance takes them unchanged. ``ROWS``: the
    same rows, and for each attacked row its label and its leaf in every tree, which no attack can
    find out; the guess is the most likely value in the row's box, and chance the most likely of the
    label.
    """

    BOUNDS = "bounds"
    VALUES = "values"
    ROWS = "rows"


def drawn(rows: Rows, known_rows: Array, rng: np.random.Generator) -> Array:
    """Draw a value of each row in each column uniformly from its range, and append its label.

    ``known_rows``, shape (n_known, n_columns + 1), give the bounds; the labels are last. Returns
    float64, shape (n_rows, n_columns + 1).
    """
    lowest, highest = known_rows[:, :-1].min(axis=0), known_rows[:, :-1].max(axis=0)
    lows = np.where(np.isfinite(rows.lows), rows.lows, np.minimum(lowest, rows.highs))
    highs = np.where(np.isfinite(rows.highs), rows.highs, np.maximum(highest, lows))
    return np.column_stack([rng.uniform(lows, highs), rows.labels])


def likeliest(rows: Rows, known_rows: Array, likeness: Array, tolerances: Array) -> Array:
    """As ``drawn``, but choose the known value that has most known values within the tolerance.

    Rows of the label count, weighted by ``likeness``, shape (n_rows, n_own), >= 0, if their value
    is in the range; without any, the median is moved into the range. With unlimited ranges and
    equal weights this is the best constant for each label.
    """
    weights = np.where(rows.labels[:, None] == known_rows[:, -1], likeness + 1e-9, 0.0)
    guesses = np.empty_like(rows.lows)
    for column, (values, tolerance) in enumerate(
        zip(known_rows[:, :-1].T, tolerances, strict=False)
    ):
        lows, highs = rows.lows[:, [column]], rows.highs[:, [column]]
        inside = np.where((lows <= values) & (values < highs), weights, 0.0)
        near = np.abs(values[:, None] - values) <= tolerance
        best = np.where(inside > 0, inside @ near, 0.0).argmax(axis=1)
        median = np.clip(np.median(values), lows[:, 0], highs[:, 0])
        guesses[:, column] = np.where(inside.any(axis=1), values[best], median)
    return np.column_stack([guesses, rows.labels])


def moved(rows: Rows, known_rows: Array) -> Array:
    """As ``drawn``, but move the nearest known row into each box; each known row is used once.

    Rows of the same label are preferred.
    """
    deviations = known_rows.std(axis=0)
    # A wrong label costs as much as 10 deviations in every column.
    distances = len(deviations) * 10.0 * (rows.labels[:, None] != known_rows[:, -1])
    for column, deviation in enumerate(deviations[:-1]):
        values = known_rows[:, column]
        gaps = rows.lows[:, [column]] - values, values - rows.highs[:, [column]]
        distances += np.maximum(0, np.maximum(*gaps)) / max(deviation, 1e-300)
    values_of_nearest = known_rows[linear_sum_assignment(distances)[1], :-1]
    return np.column_stack([np.clip(values_of_nearest, rows.lows, rows.highs), rows.labels])


def in_place(rebuilt: Array, truth: Array, tolerances: Array) -> float:
    """Share of the true values that the rebuilt row at the same index has within the tolerance."""
    return float((np.abs(rebuilt - truth) <= tolerances).mean())


def accuracy(rebuilt: Array, truth: Array, tolerances: Array) -> float:
    """The same share when rows are matched one to one so that it is largest.

    ``rebuilt`` and ``truth`` have shape (n, n_columns + 1); excess rebuilt rows are dropped at
    random.
    """
    rebuilt = np.random.default_rng(0).permutation(rebuilt)[: len(truth)]
    right = np.zeros((len(rebuilt), len(truth)), dtype=np.int64)
    for column, tolerance in enumerate(tolerances):
        right += np.abs(rebuilt[:, [column]] - truth[:, column]) <= tolerance
    return float(right[linear_sum_assignment(right, maximize=True)].sum() / truth.size)


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """Trees and rows of one attack."""

    trees: Sequence[tuple[Leaves, bool]]  # in order, each with whether the rows have grown it
    margin: float  # of all rows before the first tree
    # (n_rows, n_columns + 1), the labels last: rows that have grown the trees, and as many known
    # to the attacker
    truth: Array
    known: Array

    def rebuilt(self, reg_lambda: float) -> Rows:
        """Rows rebuilt from the trees; they must have grown the first one."""
        (first, _), *later = self.trees
        rows = Rows.in_first(first, self.margin, reg_lambda, len(self.truth))
        for leaves, is_theirs in later:
            if is_theirs:
                rows.deal(leaves, reg_lambda)
            else:
                rows.move(leaves)
        return rows

    def true_boxes(self) -> Rows:
        """The rows in the boxes of their true leaves."""
        rows = self.blind()
        for leaves, is_theirs in self.trees:
            if is_theirs:
                rows.put(leaves, leaves.reached(self.truth[:, :-1]))
        return rows

    def likeness(self) -> Array:
        """Proximity of random forests (Breiman 2001) to known rows, shape (n_rows, n_own)."""
        same = [
            leaves.reached(self.truth[:, :-1])[:, None] == leaves.reached(self.known[:, :-1])
            for leaves, is_theirs in self.trees
            if is_theirs
        ]
        return np.asarray(np.mean(same, axis=0) ** LIKE)

    def blind(self) -> Rows:
        """Rows of which only the labels are known."""
        ends = np.full((len(self.truth), self.truth.shape[1] - 1), np.inf)
        return Rows(-ends, ends, self.truth[:, -1], np.full(len(ends), self.margin))

    def outcome(
        self, reg_lambda: float, score: float, knows: Knows, rng: np.random.Generator
    ) -> Outcome:
        """Score the attack, and a guess."""
        recovered, tolerances, measure = self.known, TOLERANCE * self.truth.std(axis=0), accuracy
        if knows is Knows.ROWS:
            measure, likeness = in_place, self.likeness()
            reconstruction = likeliest(self.true_boxes(), recovered, likeness, tolerances)
            guess = likeliest(self.blind(), recovered, np.ones_like(likeness), tolerances)
        elif knows is Knows.VALUES:
            reconstruction, guess = moved(self.rebuilt(reg_lambda), recovered), recovered
        else:
            reconstruction, guess = (
                drawn(self.rebuilt(reg_lambda), recovered, rng),
                drawn(self.blind(), recovered, rng),
            )
        # Without trees, the guess has the same background knowledge.
        success, chance = (
            measure(rows, self.truth, tolerances) for rows in (reconstruction, guess)
        )
        return Outcome(success, chance, score)


def target_of(run: Trained, has_hessians: bool) -> Target:
    """Rows and trees of the first party; of PAX, all rows and trees."""
    settings, is_pax = run.settings, run.settings.strategy == "pax"
    table, shares = stacked_tables(settings)
    names, eta, share = sorted(shares), settings.eta, 1.0
    attacked_parties = names if is_pax else names[:1]
    if settings.strategy == "fedxgbllr":
        model = from_text(run.model, StackedModel)
        bare, grown = model.bare, [(tree, True) for tree in model.ensembles[0]]
        eta = float(settings.sections["fedxgbllr"]["eta"])
    else:
        bare = from_text(run.model, Ensemble)
        grown = [(tree, is_pax or not index % len(names)) for index, tree in enumerate(bare.trees)]
    if settings.strategy == "bagging":
        share = len(shares[names[0]]["train"]) / sum(len(each["train"]) for each in shares.values())
    last_grown = [index for index, (_, is_theirs) in enumerate(grown) if is_theirs][-1]
    n_columns = len(bare.columns)
    # The weights are wrong for the trees of other parties, which do not use them.
    trees = [
        (Leaves.of(tree, n_columns, eta * share, has_hessians), is_theirs)
        for tree, is_theirs in grown[: last_grown + 1]
    ]
    assert table.labels is not None
    labels = class_ids(table.labels, bare.classes)
    numbers = np.column_stack([table.values, labels]).astype(np.float64)
    attacked_rows = np.concatenate([shares[name]["train"] for name in attacked_parties])
    held_back = np.concatenate([shares[name]["test"] for name in names])
    known_rows = np.random.default_rng(settings.seed).permutation(held_back)
    known_rows = np.resize(known_rows, len(attacked_rows))  # of too few, some twice
    return Target(trees, float(bare.base_margin[0]), numbers[attacked_rows], numbers[known_rows])


def attack_trees(overrides: Overrides) -> Outcome:
    """Training rows rebuilt from the trees of horizontal methods.

    Source: Di Gennaro et al. 2025, "TimberStrike: Dataset Reconstruction Attack Revealing Privacy
    Leakage in Federated Tree-Based Systems" (arXiv:2506.07605), and its public code.

    The leaves of a tree are boxes. Before a party's first tree all rows have the same margin, so
    the weight of a leaf and its sum of hessians reveal how many rows of each class it has. The
    attack starts with these rows, each in its leaf's box. It assigns them to the leaves of each
    later tree, every row to a leaf whose box intersects its own, so that the sums of gradients and
    hessians are as close as possible to those of the leaves. A row's box becomes the intersection,
    and the leaf's value is added to its margin. For a tree of another party, the margin changes by
    the mean of the leaves open to the row, weighted by their hessians. Departures:

    - The paper runs an integer solver for minutes for each tree. Here its problem is solved by
      shares of rows, at a vertex, where all but a few rows are in one leaf; the remaining shares
      are rounded.
    - A value is drawn uniformly from its range; the paper takes the middle. Rows with the same
      ranges then differ, and more of them are matched.
    - Without hessians, the rows of a leaf of the first tree are those with the nearest weight, and
      a leaf of a later tree gives one equation instead of two.

    Success is the paper's measure: the share of values, including labels, within 0.319 standard
    deviations of the true ones, when rebuilt and true rows are matched to maximise it. Matching
    raises the score of a guess, too; an attacker that knows which row is which is judged without
    it, row by row. Chance is a guess without trees with the same background knowledge (``Knows``),
    in the same measure.
    """
    options = {**HORIZONTAL, **overrides}
    has_hessians, knows = (
        bool(options.pop(HESSIANS, True)),
        Knows(options.pop(KNOWS, Knows.BOUNDS)),
    )
    with trained(options, (), lambda _: None) as run:
        rng = np.random.default_rng(run.settings.seed)
        target = target_of(run, has_hessians)
        return target.outcome(run.settings.reg_lambda, run.score, knows, rng)


HORIZONTAL = {"objective": "binary:logistic", "strategy": "bagging", "parties": 3}
HORIZONTAL |= {"valid-fraction": 0.0, "eta": 0.3, "num-boost-round": 50}
CYCLIC = {"strategy": "cyclic", "num-boost-round": 150}
FEDXGBLLR = {"strategy": "fedxgbllr"}
PAX_RUN = {"strategy": "pax"}
TIMBERSTRIKE = Attack(
    name="timberstrike",
    holder="whoever receives a party's trees (of PAX: the model) and the bounds of each column",
    measure="share of values rebuilt to 0.319 deviations, of matched rows (rows known: in place); "
    "chance: a guess without the trees",
    data={
        "breast-cancer": {"data": "breast-cancer", "test-fraction": 0.5},
        "default-credit": {"data": "default-credit", "test-fraction": 0.97},
    },
    ways={
        "bagging": {},
        "bagging, values known": {KNOWS: Knows.VALUES},
        "bagging, rows known": {KNOWS: Knows.ROWS},
        "bagging, no hessians": {HESSIANS: False},
        "bagging, max-depth=2": {"max-depth": 2},
        "bagging, min-child-weight=5": {"min-child-weight": 5.0},
        "bagging, gamma=2": {"gamma": 2.0},
        "bagging, 10 rounds": {"num-boost-round": 10},
        "cyclic": CYCLIC,
        "cyclic, values known": {**CYCLIC, KNOWS: Knows.VALUES},
        "cyclic, rows known": {**CYCLIC, KNOWS: Knows.ROWS},
        "cyclic, max-depth=2": {**CYCLIC, "max-depth": 2},
        "fedxgbllr": FEDXGBLLR,
        "fedxgbllr, values known": {**FEDXGBLLR, KNOWS: Knows.VALUES},
        "fedxgbllr, rows known": {**FEDXGBLLR, KNOWS: Knows.ROWS},
        "fedxgbllr, max-depth=2": {**FEDXGBLLR, "fedxgbllr.max-depth": 2},
        "pax": PAX_RUN,
        "pax, values known": {**PAX_RUN, KNOWS: Knows.VALUES},
        "pax, rows known": {**PAX_RUN, KNOWS: Knows.ROWS},
        "pax under masks": {**PAX_RUN, "pax.aggregation": "secure"},
        "pax, least-bin-rows=5": {**PAX_RUN, "least-bin-rows": 5},
    },
    run=attack_trees,
)


# membership

Doubles = npt.NDArray[np.float64]

USUAL = {"max-depth": 6, "num-boost-round": 50, "eta": 0.3, "parties": 3}
HALF = {"test-fraction": 0.5, "valid-fraction": 0.0}
MODELS: dict[str, dict[str, Any]] = {
    "plain": {"pax.aggregation": "plain"},
    "secure": {"pax.aggregation": "secure"},
    "epsilon 1": {"pax.aggregation": "secure", "privacy.epsilon": 1.0},
    "one party": {"parties": 1},  # the model that SecureBoost exports, node for node
}
HALVES, SHADOWS, RARE = 200, 16, 0.01


@dataclass(frozen=True, slots=True, eq=False)
class ScoredRows:
    """A model's margins of the rows of a table."""

    margins: Doubles  # (n_rows,): of the row's label
    members: Flags  # (n_rows,): whether the row trained the model


def own_margins(scored: Scored) -> Doubles:
    """Margin of each row's label, of two classes: the larger, the smaller the loss."""
    return np.where(scored.labels == 1, 1.0, -1.0) * scored.margins[:, 0]


def score_rows(data: str, how: Mapping[str, Any], seed: int) -> ScoredRows:
    """Train on the half of a table that follows from the seed."""
    settings, model, _ = run_and_load({"data": data, **USUAL, **HALF, **how, "seed": seed})
    _, rows = stacked_tables(settings)
    scored = score(settings, model)
    row_ids_of = {
        subset: np.concatenate([each[subset] for each in rows.values()])
        for subset in ("train", "test")
    }
    n_rows = sum(map(len, row_ids_of.values()))
    margins, members = np.empty(n_rows), np.zeros(n_rows, dtype=bool)
    for subset, row_ids in row_ids_of.items():
        margins[row_ids] = own_margins(scored[subset])
    members[row_ids_of["train"]] = True
    return ScoredRows(margins, members)


def above_usual(model: ScoredRows, shadows: Sequence[ScoredRows]) -> ScoredRows:
    """Margins above the middle of a row's mean margins over shadow models with and without the row.

    Only rows that have both.
    """
    members = np.stack([each.members for each in shadows])
    both = members.any(axis=0) & ~members.all(axis=0)
    margins, within = np.stack([each.margins for each in shadows])[:, both], members[:, both]
    means = [margins.mean(axis=0, where=side) for side in (within, ~within)]
    return ScoredRows(model.margins[both] - np.mean(means, axis=0), model.members[both])


def advantage(model: ScoredRows, rng: np.random.Generator) -> float:
    """Share of members taken minus that of others, by the threshold that fits other rows best."""
    members, others = model.margins[model.members], model.margins[~model.members]
    differences = []
    for _ in range(HALVES):
        first, second = _halves(members, rng), _halves(others, rng)
        threshold = _best_threshold(first[0], second[0])
        differences.append(np.mean(first[1] >= threshold) - np.mean(second[1] >= threshold))
    return float(np.mean(differences))


def _best_threshold(members: Doubles, others: Doubles) -> float:
    values = np.concatenate((members, others))
    order = np.argsort(-values)
    each = np.repeat([1 / len(members), -1 / len(others)], [len(members), len(others)])
    ends = np.append(np.diff(values[order]) != 0, True)  # equal values are taken together
    return float(values[order][np.where(ends, each[order].cumsum(), -1).argmax()])


def _halves(rows: Doubles, rng: np.random.Generator) -> tuple[Doubles, Doubles]:
    shuffled = rng.permutation(rows)
    return shuffled[: len(rows) // 2], shuffled[len(rows) // 2 :]


def caught(model: ScoredRows) -> float:
    """Share of members taken by the threshold that takes ``RARE`` of the others."""
    threshold = np.quantile(model.margins[~model.members], 1 - RARE)
    return float(np.mean(model.margins[model.members] > threshold))


def attack_membership(data: str, how: Mapping[str, Any], seeds: int) -> dict[str, float]:
    """Figures of both attacks, means over models of ``seeds`` seeds."""
    shadows = [score_rows(data, how, 1000 + number) for number in range(SHADOWS)]
    figures = []
    for seed in range(seeds):
        model, rng = score_rows(data, how, seed), np.random.default_rng(seed)
        relative = above_usual(model, shadows)
        figures.append(
            {
                "threshold": advantage(model, rng),
                "shadow": advantage(relative, rng),
                "threshold, caught": caught(model),
                "shadow, caught": caught(relative),
            }
        )
    return {kind: statistics.mean(each[kind] for each in figures) for kind in figures[0]}


def membership(
    data: tuple[str, ...] = ("breast-cancer", "default-credit"), seeds: int = 5
) -> Iterator[dict[str, Any]]:
    """How well a model's scores reveal which rows trained it.

    An attacker has the finished model and labelled rows, half of which trained it. The first attack
    takes the rows of whose labels the model is most certain (Yeom et al. 2018, "Privacy Risk in
    Machine Learning"). The second compares this certainty with what is usual for the row, under
    models of other halves of the rows, as an attacker with similar rows can train them (LiRA:
    Carlini et al. 2022, "Membership Inference Attacks From First Principles", arXiv:2112.03570).
    The margin of a row's label is normally distributed over models that the row trained, and again
    over the others. Departure: there are only ``SHADOWS`` models, enough for no more than two means
    of each row. With one variance and one distance of the means for all rows, the likelihood ratio
    grows with the distance of a margin from the middle of its row's two means.

    Two figures are reported. The advantage is the largest difference between the share of training
    rows and the share of other rows that are taken, over all thresholds. A threshold chosen on the
    rows that it is judged by finds something in noise too, so the one that fits one half of the
    rows is measured on the other half, averaged over many halves; it is 0 on average if there is
    nothing to find. The other figure is the share of training rows taken by the threshold that
    takes 1 % of the others: what is identified almost with certainty; 0.01 if there is nothing to
    find.

    ``python -m simulations attacks membership`` trains PAX plainly, under secure aggregation, with
    an epsilon of 1 and with one party on half of each table, and prints a line for each. One
    party's model is pooled XGBoost's, and so the one that SecureBoost exports.
    """
    for name, (kind, how) in itertools.product(data, MODELS.items()):
        start = time.perf_counter()
        figures = attack_membership(name, how, seeds)
        seconds = round(time.perf_counter() - start)
        yield {"data": name, "seeds": seeds, "how": kind, **figures, "seconds": seconds}
