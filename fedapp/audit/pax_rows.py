"""Rows rebuilt from PAX's sums by bin, by a curious coordinator."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from pathlib import Path

import numpy as np

from clients.cuts import Binned, Cutting
from clients.pax import Party
from fedapp.arrays import Doubles, Ints
from fedapp.conversation import Conversation, Exchange, Parties, Saved
from fedapp.data.labels import class_ids
from fedapp.histograms.bins import Cuts, digitise, with_categories
from fedapp.histograms.groups import cell_starts
from fedapp.histograms.sketch import Sketch, sketch_cuts, used_categories
from fedapp.messages.fields import Reply, Request
from fedapp.messages.handshake import HelloReply
from fedapp.messages.pax import GrowReply, GrowRequest, SketchReply, SketchRequest, TurnRequest
from fedapp.messages.secagg import EVERYONE
from fedapp.runs.tables import stacked_tables
from fedapp.settings import Settings
from fedapp.site.account import note
from fedapp.site.answer import Site
from fedapp.site.settings import SiteConfig
from fedapp.site.store import Store
from fedapp.trees.categories import recoded
from fedapp.trees.losses import LossParameters
from fedapp.trees.rounds import Boosting
from strategies.method import Outcome
from strategies.pax import PAX

Sums = Doubles
Place = tuple[int, int]  # a tree of a round, and a node
Row = tuple[int, ...]  # a bin a column, ``MISSING`` for a missing value; then the label
MISSING, MISSING_CODE = -1, 2**16 - 1
ROUNDING = 2.0**-22  # rounding of h, in units of g
LEAST = 1e-9  # a smaller hessian may be a rounding error
MOST_ALONE = 100  # rows of a node whose pairs are tried
PLANTED = 0.123  # margin above those of other rows, so that no other row has the same gradients


@dataclass(frozen=True, slots=True, eq=False)
class Level:
    """Request and reply of one level of a tree."""

    request: GrowRequest
    histograms: Sums  # (n_wanted, n_bins, 2)
    missing: Ints  # (n_wanted, n_columns): rows without a value
    roots: Sums  # (n_trees, 2): sums over all rows, of the first level of a tree
    turn: TurnRequest | None = None  # what was sent, if not the request itself

    @classmethod
    def of(cls, request: GrowRequest, reply: GrowReply, turn: TurnRequest | None = None) -> Level:
        """What a reply has of a level."""
        missing = reply.missing.astype(np.int64)
        return cls(request, reply.histograms, missing, reply.root_sums, turn)

    def less(self, known: Level) -> Level:
        """The sums without those of some rows."""
        return replace(
            self,
            histograms=self.histograms - known.histograms,
            missing=self.missing - known.missing,
            roots=self.roots - known.roots,
        )


class CuriousPAX(PAX):
    """The server's side of PAX, which sends honest requests and records the replies."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
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

    def ask_to_grow(
        self,
        parties: Parties[HelloReply],
        request: GrowRequest,
        boosting: Boosting,
        sent: TurnRequest | None = None,
    ) -> Conversation[dict[str, GrowReply]]:
        replies = yield from super().ask_to_grow(parties, request, boosting, sent)
        self.cuts = boosting.cuts
        for party, reply in replies.items():
            self.levels[party].append(Level.of(request, reply, sent))
        return replies


@dataclass(frozen=True, slots=True, eq=False)
class Sender:
    """Sums of one sender: of a party, over its bins, or of all parties, over the common ones."""

    levels: Sequence[Level]
    sketch: Sketch  # of all its bins, also those of categories
    categories: Ints  # of each column, 0 if numeric
    loss: LossParameters
    merged: bool  # whether parties merge bins of few rows

    @classmethod
    def of(cls, coordinator: CuriousPAX, levels: Sequence[Level], sketch: Sketch) -> Sender:
        """Sums that the coordinator has of a sketch's bins, which may lack those of categories."""
        settings, categories = coordinator.settings, coordinator.table.category_counts
        loss = LossParameters.of(settings)
        whole = sketch.with_categories(categories)
        return cls(levels, whole, categories, loss, settings.least_bin_rows > 0)

    @property
    def cuts(self) -> Cuts:
        """The cuts between its bins."""
        used = used_categories([self.sketch], self.categories)
        return with_categories(sketch_cuts(self.sketch), self.categories, used)

    def rebuilt(self) -> set[Row]:
        """Rows that the sums reveal, each isolated by those that are known."""
        recovered: set[Row] = set()
        remaining = self.levels
        while new := self._alone_in(remaining) - recovered:
            recovered |= new
            pairs = zip(self.levels, self.sums_of(sorted(recovered)), strict=True)
            remaining = [level.less(recovered_part) for level, recovered_part in pairs]
        return recovered

    def _alone_in(self, levels: Sequence[Level]) -> set[Row]:
        offsets, scale = self.sketch.offsets, self.loss.scale_pos_weight
        ways = (False, True) if self.merged else (False,)
        return {row for way in ways for row in rebuilt(levels, offsets, way, scale)}

    def finds_planted(self, weight: float = 1.0) -> bool:
        """Whether a row is found that is added to the sums, in a bin of its own in every column.

        It has its own margin too, and the weight of the run's rows: no row is easier to find.
        """
        offsets, n_columns = self.sketch.offsets, len(self.sketch.maxima)
        row = (*np.where(np.diff(offsets), 0, MISSING).tolist(), 1)
        first = int(offsets[np.flatnonzero(np.diff(offsets))[0]])  # its bin in some column
        ends, widened = offsets[1:], offsets + np.arange(n_columns + 1)
        planted = []
        for level, of_row in zip(self.levels, self.sums_of([row], weight, PLANTED), strict=True):
            histograms = np.insert(level.histograms, ends, 0.0, axis=1)
            histograms[:, widened[1:] - 1] = of_row.histograms[:, [first]]
            roots = level.roots + of_row.roots
            planted.append(replace(level, histograms=histograms, roots=roots))
        scale = self.loss.scale_pos_weight
        return (*np.diff(offsets).tolist(), 1) in set(rebuilt(planted, widened, False, scale))

    def sums_of(
        self, rows: Sequence[Row], weight: float = 1.0, margin: float | None = None
    ) -> Iterator[Level]:
        """Contribution of rows to each level: the reply of a party that has only these rows.

        They start from ``margin``, or from that of the run.
        """
        store, table = Store(Path()), np.array(rows)
        note(store, opening={"aggregation": "plain", "pairs": 1})
        party = Party.load(Site(SiteConfig("known", data=""), store))
        codes = np.where(table[:, :-1] == MISSING, MISSING_CODE, table[:, :-1]).astype(np.uint16)
        sketch, n_columns = self.sketch, codes.shape[1]
        party.bins = Binned(codes, MISSING_CODE, sketch.representatives, sketch.offsets)
        party.columns, party.cutting = ("",) * n_columns, Cutting(self.categories)
        party.categories = tuple(("",) * n or None for n in self.categories.tolist())
        n_rows = {"train": len(rows), "valid": 0}
        party.labels = {name: table[:n, -1].astype(np.float32) for name, n in n_rows.items()}
        party.weights = {name: np.full(n, weight, np.float32) for name, n in n_rows.items()}
        party.values = {"valid": np.empty((0, n_columns), np.float32)}
        if margin is not None:
            starts = {name: np.full(n, margin, np.float32) for name, n in n_rows.items()}
            party.base_margins = starts
        party.objective, party.classes = "binary:logistic", ("0", "1")
        party.eval_metrics, party.loss = (), self.loss
        for level in self.levels:
            turn = level.turn
            sums = party.turn(turn) if turn else party.grow(level.request)
            yield Level.of(level.request, GrowReply(*sums.arrays), turn)


def senders_of(coordinator: CuriousPAX) -> dict[str, Sender]:
    """The senders of a run's sums by name: under masks only ``EVERYONE``."""
    sketches = coordinator.sketches
    if list(coordinator.levels) == [EVERYONE]:
        assert coordinator.cuts is not None
        sketches = {EVERYONE: common_sketch(coordinator.cuts)}
    return {
        name: Sender.of(coordinator, coordinator.levels[name], sketch)
        for name, sketch in sketches.items()
    }


def true_rows(coordinator: CuriousPAX, senders: dict[str, Sender]) -> dict[str, list[Row]]:
    """Each sender's training rows as bins between its cuts, with their labels."""
    common = coordinator.table
    table, parts = stacked_tables(coordinator.settings)
    table = table.in_order(common.columns)
    assert table.labels is not None
    values = recoded(table.values, table.categories, common.categories, common.columns)[0]
    labels, rows_of = class_ids(table.labels, common.classes), {}
    for name, sender in senders.items():
        names = sorted(parts) if name == EVERYONE else [name]
        train_rows = np.concatenate([parts[party]["train"] for party in names])
        codes, missing_code = digitise(values[train_rows], sender.cuts)
        bins = np.where(codes == missing_code, MISSING, codes.astype(np.int64))
        pairs = zip(bins.tolist(), labels[train_rows].tolist(), strict=True)
        rows_of[name] = [(*row, int(label)) for row, label in pairs]
    return rows_of


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """Sums of a node by cell, (n_cells, 2): in each column first missing values, then the bins."""

    cells: Sums
    missing: Ints  # (n_columns,): rows without a value
    total: Sums | None  # (2,): over all rows, if known

    @classmethod
    def of(cls, cells: Sums, missing: Ints, starts: Ints, total: Sums | None = None) -> Node:
        """Fill in sums of missing values: the rest of the total, which a full column adds up to."""
        cells = cells.copy()
        cells[starts[:-1]] = 0
        below = np.concatenate((np.zeros((1, 2)), np.cumsum(cells, axis=0)))
        sums = below[starts[1:]] - below[starts[:-1]]
        if total is None and (missing == 0).any():
            total = sums[missing == 0][0]
        if total is not None:
            cells[starts[:-1]] = np.where(missing[:, None] > 0, total - sums, 0)
        return cls(cells, missing, total)

    def less(self, child: Node, starts: Ints) -> Node:
        """The other child."""
        other = Node.of(self.cells - child.cells, self.missing - child.missing, starts)
        if other.total is not None or self.total is None or child.total is None:
            return other
        return Node.of(other.cells, other.missing, starts, self.total - child.total)


def rebuilt(
    levels: Iterable[Level], offsets: Ints, merged: bool = False, scale: float = 1.0
) -> Iterator[Row]:
    """Yield rows that are the only one in a bin of every column, in some node of the same round.

    The missing values of a column are a cell before its bins, whose sums are the rest of the node.

    Parameters
    ----------
    levels : in the order in which they were sent.
    offsets : shape (n_columns + 1,): the bins of each column.
    merged : whether nodes that are not sent are read between the bins of their siblings.
    scale : factor of the weight of rows of the second class.
    """
    starts = cell_starts(np.diff(offsets))
    is_bin = np.ones(starts[-1], dtype=bool)
    is_bin[starts[:-1]] = False
    for _, of_round in groupby(levels, lambda level: level.request.round_id):
        by_gradient: dict[float, set[tuple[int, int]]] = defaultdict(set)  # columns and bins
        earlier: dict[Place, Node] = {}
        for level in of_round:
            request, fresh = level.request, dict[Place, Node]()
            wanted = zip(request.wanted_trees.tolist(), request.wanted_nodes.tolist(), strict=True)
            for index, place in enumerate(wanted):
                cells = np.zeros((len(is_bin), 2))
                cells[is_bin] = level.histograms[index]
                total = level.roots[place[0]] if request.level == 0 else None
                fresh[place] = Node.of(cells, level.missing[index], starts, total)
            splits = request.split_trees, request.split_nodes, request.split_lefts
            for tree, parent_id, left in zip(*(ids.tolist() for ids in splits), strict=True):
                pair = [(tree, left), (tree, left + 1)]
                for child, sibling in (pair, pair[::-1]):
                    if (tree, parent_id) not in earlier or sibling not in fresh:
                        continue
                    parent, node = earlier[tree, parent_id], fresh[sibling]
                    other = parent.less(node, starts)
                    if node.total is None and other.total is not None:
                        fresh[sibling] = node = parent.less(other, starts)
                    if merged:
                        cells = _between(parent.cells - node.cells, node.cells, starts)
                        other = replace(other, cells=cells)
                    fresh.setdefault(child, other)
            for node in fresh.values():
                _note(by_gradient, node.cells, starts, scale)
            earlier |= fresh
        n_columns = len(offsets) - 1
        for gradient, pairs in by_gradient.items():
            bins = dict(pairs)
            if len(pairs) == len(bins) == n_columns:  # exactly one cell in every column
                yield (*(bins[column] for column in range(n_columns)), int(gradient < 0))


def _between(difference: Sums, sibling: Sums, starts: Ints) -> Sums:
    """Sums from one cell sent by the sibling to the next; unchanged after a column's last."""
    is_sent = sibling[:, 1] > LEAST
    between = np.zeros_like(difference)
    for begin, end in pairwise(starts.tolist()):
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


def _note(
    by_gradient: dict[float, set[tuple[int, int]]], cells: Sums, starts: Ints, scale: float
) -> None:
    """Add cells of one row, or of two rows that are single elsewhere, by the rows' gradients."""
    gradients, hessians = cells.T
    # One row: h = |g| (1 - |g|) for logistic loss, and with weight w: h = |g| (1 - |g| / w).
    sizes = np.abs(gradients)
    weights = np.where(gradients < 0, scale, 1.0)
    filled = hessians > LEAST
    is_single = filled & (np.abs(hessians - sizes * (1 - sizes / weights)) <= ROUNDING * sizes)
    columns = np.searchsorted(starts, np.arange(len(cells)), side="right") - 1
    codes = np.arange(len(cells)) - starts[columns] - 1  # a missing value's is -1
    singles, first_seen = np.unique(gradients[is_single].astype(np.float32), return_index=True)
    for cell in np.flatnonzero(is_single):
        key = float(np.float32(gradients[cell]))
        by_gradient[key].add((int(columns[cell]), int(codes[cell])))
    if not 1 < len(singles) <= MOST_ALONE:
        return
    single_sums = cells[is_single][first_seen]
    first_ids, second_ids = np.triu_indices(len(singles), 1)
    pairs = single_sums[first_ids] + single_sums[second_ids]
    order = np.argsort(pairs[:, 0])
    # Of each cell, the pairs whose gradients are near: few, and mostly none.
    starts = np.searchsorted(pairs[order, 0], gradients - 2 * ROUNDING)
    ends = np.searchsorted(pairs[order, 0], gradients + 2 * ROUNDING)
    for cell in np.flatnonzero(filled & ~is_single & (starts < ends)):
        near = order[starts[cell] : ends[cell]]
        matches = near[(np.abs(pairs[near] - cells[cell]) <= ROUNDING).all(axis=1)]
        if len(matches) == 1:
            for key in (singles[first_ids[matches[0]]], singles[second_ids[matches[0]]]):
                by_gradient[float(key)].add((int(columns[cell]), int(codes[cell])))


def common_sketch(cuts: Cuts) -> Sketch:
    """The common bins as a sketch of one party: each starts at its representative."""
    starts = [
        np.concatenate([cuts.minima[[column]], cuts.column(column)[:-1]])[: cuts.widths[column]]
        for column in range(cuts.n_columns)
    ]
    points = np.concatenate(starts)
    # Of a column of categories the maximum is the highest code.
    tops = np.where(cuts.by_category, cuts.widths - 1, cuts.edges[cuts.offsets[1:] - 1])
    maxima = tops.astype(np.float32)
    return Sketch(points, np.ones_like(points), cuts.offsets, maxima)
