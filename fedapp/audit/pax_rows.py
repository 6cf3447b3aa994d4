"""Rows rebuilt from PAX's sums by bin, by a curious coordinator."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt

from clients.pax import Party
from clients.scoring import Binned
from fedapp.conversation import Conversation, Exchange, Parties, Saved
from fedapp.histograms.bins import NO_CODE, Cuts, digitise
from fedapp.histograms.sketch import Sketch, sketch_cuts
from fedapp.messages.fields import Reply, Request
from fedapp.messages.handshake import HelloReply
from fedapp.messages.pax import GrowReply, GrowRequest, SketchReply, SketchRequest
from fedapp.messages.secagg import EVERYONE
from fedapp.runs.tables import stacked_tables
from fedapp.settings import Settings
from fedapp.site.answer import Site
from fedapp.site.settings import SiteConfig
from fedapp.site.store import Store
from fedapp.trees.losses import PLAIN
from fedapp.trees.rounds import Boosting
from strategies.method import Outcome
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
    ) -> Conversation[Outcome]:
        conversation = super().conversation(parties, saved)
        step = next(conversation)
        while True:
            replies = yield step
            if isinstance(step, Exchange):
                for party, reply in sorted(replies.items()):
                    self.listen(party, step.requests[party], reply)
            try:
                step = conversation.send(replies)
            except StopIteration as ended:
                summary: Outcome = ended.value
                return summary

    def listen(self, party: str, request: Request, reply: Reply) -> None:
        if isinstance(request, SketchRequest) and isinstance(reply, SketchReply):
            self.sketches[party] = Sketch(
                reply.representatives, reply.masses, reply.offsets, reply.maxima
            )
            self.n_bins = max(self.n_bins, request.n_bins)

    def _ask_to_grow(
        self, parties: Parties[HelloReply], request: GrowRequest, boosting: Boosting
    ) -> Conversation[dict[str, GrowReply]]:
        replies = yield from super()._ask_to_grow(parties, request, boosting)
        self.cuts = boosting.cuts
        for party, reply in replies.items():
            self.levels[party].append(Level(request, reply.histograms))
        return replies


def rebuilt_of_senders(
    coordinator: CuriousPAX, settings: Settings
) -> list[tuple[set[Row], list[Row]]]:
    """Rows rebuilt from each sender's sums, and the true rows: one sender under masks."""
    levels, merged = coordinator.levels, settings.least_bin_rows > 0
    if list(levels) == [EVERYONE]:
        assert coordinator.cuts is not None
        truth = _truth(settings, dict.fromkeys(coordinator.parties, coordinator.cuts))
        rows = [row for party_rows in truth.values() for row in party_rows]
        sketch = common_sketch(coordinator.cuts)
        return [(all_rebuilt(levels[EVERYONE], sketch, merged), rows)]
    sketches = coordinator.sketches
    truth = _truth(settings, {name: sketch_cuts(sketch) for name, sketch in sketches.items()})
    return [
        (all_rebuilt(levels[name], sketch, merged), truth[name])
        for name, sketch in sketches.items()
    ]


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
    codes = table[:, :-1].astype(np.uint16)
    party.binned = Binned(codes, NO_CODE, sketch.representatives, sketch.offsets)
    party.columns = ("",) * len(sketch.maxima)
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
        by_gradient: dict[float, set[tuple[int, int]]] = defaultdict(set)  # columns and bins
        earlier: dict[int, Sums] = {}
        for level in of_round:
            fresh = dict(zip(level.request.wanted_nodes.tolist(), level.histograms, strict=True))
            parents, lefts = level.request.split_nodes.tolist(), level.request.split_lefts.tolist()
            for parent, left in zip(parents, lefts, strict=True):
                for child, sibling in ((left, left + 1), (left + 1, left)):
                    if parent in earlier and sibling in fresh and child not in fresh:
                        fresh[child] = earlier[parent] - fresh[sibling]
                        if merged:
                            fresh[child] = _between(fresh[child], fresh[sibling], offsets)
            for histogram in fresh.values():
                _note(by_gradient, histogram, offsets)
            earlier |= fresh
        n_columns = len(offsets) - 1
        for gradient, pairs in by_gradient.items():
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


def _note(by_gradient: dict[float, set[tuple[int, int]]], histogram: Sums, offsets: Ints) -> None:
    """Add bins of one row, or of two rows that are single elsewhere, by the rows' gradients."""
    gradients, hessians = histogram.T
    # One row: h = |g| (1 - |g|) for logistic loss.
    sizes = np.abs(gradients)
    filled = hessians > LEAST
    is_single = filled & (np.abs(hessians - sizes * (1 - sizes)) <= ROUNDING * sizes)
    columns = np.searchsorted(offsets, np.arange(len(histogram)), side="right") - 1
    singles, first_seen = np.unique(gradients[is_single].astype(np.float32), return_index=True)
    for cell in np.flatnonzero(is_single):
        key = float(np.float32(gradients[cell]))
        by_gradient[key].add((int(columns[cell]), int(cell - offsets[columns[cell]])))
    if not 1 < len(singles) <= MOST_ALONE:
        return
    single_sums = histogram[is_single][first_seen]
    first_ids, second_ids = np.triu_indices(len(singles), 1)
    pairs = single_sums[first_ids] + single_sums[second_ids]
    order = np.argsort(pairs[:, 0])
    # Of each cell, the pairs whose gradients are near: few, and mostly none.
    starts = np.searchsorted(pairs[order, 0], gradients - 2 * ROUNDING)
    ends = np.searchsorted(pairs[order, 0], gradients + 2 * ROUNDING)
    for cell in np.flatnonzero(filled & ~is_single & (starts < ends)):
        near = order[starts[cell] : ends[cell]]
        matches = near[(np.abs(pairs[near] - histogram[cell]) <= ROUNDING).all(axis=1)]
        if len(matches) == 1:
            for key in (singles[first_ids[matches[0]]], singles[second_ids[matches[0]]]):
                column = int(columns[cell])
                by_gradient[float(key)].add((column, int(cell - offsets[column])))


def common_sketch(cuts: Cuts) -> Sketch:
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
