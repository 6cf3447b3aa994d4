"""PAX at a party: sketch the table once, then route rows and sum gradients, level by level.

Source: Ong et al. 2020, Algorithm 1, lines 7 and 12 to 16. Departure: the paper sends the model
in each round; here the party keeps its margins, and receives only new splits and leaves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np
import numpy.typing as npt

from clients.cuts import Binned, Counted, at_roots, read_splits
from clients.secagg import ROW_BYTES
from fedapp.arrays import Flags, Floats, Ints
from fedapp.data.scratch import batches, empty
from fedapp.errors import DivergedError, as_protocol_error
from fedapp.histograms.build import slots_by_node
from fedapp.histograms.groups import (
    cell_starts,
    group,
    join_counts,
    merge_group_sums,
)
from fedapp.histograms.sketch import BASE, N_DIGITS
from fedapp.messages.cuts import SplitRows
from fedapp.messages.fields import Array, FieldRule, Request, check_fields, check_sizes
from fedapp.messages.handshake import HelloRequest
from fedapp.messages.pax import (
    CountRequest,
    Grown,
    GrowReply,
    GrowRequest,
    InitReply,
    InitRequest,
    OpenRequest,
    QuantilesReply,
    QuantilesRequest,
    RisksReply,
    RisksRequest,
    SketchReply,
    SketchRequest,
    TurnRequest,
)
from fedapp.metrics.survival import Cells
from fedapp.site.account import is_masked, planned
from fedapp.site.policy import check_sample_size
from fedapp.site.roles import Order, handlers, role
from fedapp.site.sums import Sums, adder_of, bounds_of
from fedapp.trees import model
from fedapp.trees.custom import CUSTOM
from fedapp.trees.objective import (
    gradients,
    has_quantile_leaves,
    has_risk_sets,
    is_ranking,
    whole_gradients,
)
from fedapp.trees.predict import Nodes, add_trees
from fedapp.trees.quantiles import leaf_digit_counts
from fedapp.trees.structure import children_of, each_once_among, roots_of, route_rows
from fedapp.trees.survival import binned_pairs, risk_sums

# What may begin a round.
ROUNDS = {RisksRequest, GrowRequest, TurnRequest}
Terms = npt.NDArray[np.float32] | npt.NDArray[np.int64]  # (n_trees, n_rows, 2)


@dataclass(frozen=True, slots=True)
class Floor:
    """Where rows are summed with ``least-bin-rows``: no bin has fewer of the party's rows.

    Small nodes are summed with their siblings, and a column's cells (missing values, then its bins)
    are merged to groups. Rows of a node that has too few are summed as if they were in its sibling,
    and stay there; so a node of few rows reports nothing in its round, not even its total. A row
    therefore has two places: where it is summed, and where it is, which leaves and the next splits
    use.

    Limit: the next round's sums and scores depend on every leaf, however few rows it has. A server
    that gives such a leaf a value of its own learns its rows, and two rounds that split next to
    each other reveal the rows in between. Margins by where rows are summed would prevent this, but
    change the model.
    """

    least: int  # rows of a bin
    nodes: Nodes  # (n_trees, n_rows): in which each row is summed
    open_nodes: npt.NDArray[np.int32]  # (n_open, 2): tree and node
    ends: Ints  # (n_open, n_cells): the last cell of each cell's group

    @classmethod
    def at_roots(cls, least: int, binned: Binned, drawn: Flags) -> Floor:
        """All rows are summed at the roots."""
        nodes = np.zeros(drawn.shape, dtype=np.int32)
        roots = np.stack(roots_of(len(drawn)), axis=1).astype(np.int32)
        starts = cell_starts(binned.widths)
        cells = np.arange(starts[-1], dtype=np.int64)
        counts = cell_counts(binned, drawn, nodes, roots)
        ends = np.stack([group(cells, count[None], starts, least) for count in counts])
        return cls(least, nodes, roots, ends)

    def rows_of(self, trees: Array, nodes: Array) -> list[int]:
        """Index of each of some open nodes; ValueError if one is not open."""
        rows = {(tree, node): row for row, (tree, node) in enumerate(self.open_nodes.tolist())}
        wanted = [*zip(trees.tolist(), nodes.tolist(), strict=True)]
        if not rows.keys() >= {*wanted}:
            raise ValueError("must be nodes that were open")
        return [rows[pair] for pair in wanted]

    def split(
        self, request: SplitRows, parents: list[int], moved: Nodes, binned: Binned, drawn: Flags
    ) -> Floor:
        """Sum rows of small nodes with those of their siblings, and group the cells of both.

        ``parents`` are as from ``rows_of``; ``moved`` is where the splits send the rows from where
        they are summed.
        """
        trees, lefts, summed_in = request.split_trees, request.split_lefts, moved.copy()
        for tree, left in zip(trees.tolist(), lefts.tolist(), strict=True):
            tree_nodes = summed_in[tree]
            sides = [tree_nodes == left, tree_nodes == left + 1]
            sizes = [int(drawn[tree, side].sum()) for side in sides]
            if 0 < sizes[0] < self.least:
                tree_nodes[sides[0]] = left + 1
            elif 0 < sizes[1] < self.least:
                tree_nodes[sides[1]] = left
        starts = cell_starts(binned.widths)
        children = np.stack([np.tile(trees, 2), np.concatenate((lefts, lefts + 1))], axis=1)
        both = np.stack(np.split(cell_counts(binned, drawn, summed_in, children), 2), axis=1)
        pairs = zip(self.ends[parents], both, strict=True)
        ends = [group(parent, counts, starts, self.least) for parent, counts in pairs]
        groups = np.array(ends, dtype=np.int64).reshape(-1, starts[-1])
        return Floor(self.least, summed_in, children, np.concatenate((groups, groups)))

    def merge(
        self, sums: tuple[Array, Array], terms: Terms, request: GrowRequest, widths: Ints
    ) -> None:
        """Move the sums of each group of cells into its last bin."""
        trees, nodes = request.wanted_trees, request.wanted_nodes
        totals = _node_totals(self.nodes, terms, trees, nodes)
        ends = self.ends[self.rows_of(trees, nodes)]
        columns = request.columns.astype(np.int64)
        merge_group_sums(*sums, totals, ends, columns, cell_starts(widths))


@dataclass(frozen=True, slots=True, eq=False)
class Round:
    """The rows in the trees of a round, and which of their nodes are open."""

    nodes: Mapping[str, Nodes]  # (n_trees, n_rows) by subset: where each row is
    # (n_trees, n_train, 2): of the drawn rows; (0, 0) for others
    gradients: Terms = field(default_factory=lambda: np.empty((0, 0, 2), np.float32))
    floor: Floor | None = None  # with least-bin-rows
    level: int = -1  # the last one
    n_open: int = 0  # nodes that it may split: the roots, then both children of every split
    n_fitted: int = 0  # digits by which residuals have been counted since then

    @property
    def drawn(self) -> Flags:
        """Which rows each tree draws, (n_trees, n_train)."""
        return np.asarray(self.gradients.any(axis=2))

    def routed(self, party: Party, request: SplitRows, level: int = 0) -> Round:
        """Route training rows by their bins, validation rows by their values."""
        routes, sets = read_splits(party.name, request, party.cutting.categories)
        if not len(routes):
            return self
        bins, floor = party.bins, self.floor
        nodes = {**self.nodes, "train": bins.routed(self.nodes["train"], routes, sets)}
        if floor is not None and level:
            moved = bins.routed(floor.nodes, routes, sets)
            with as_protocol_error(party.name, "GrowRequest", "split_nodes"):
                parents = floor.rows_of(request.split_trees, request.split_nodes)
            floor = floor.split(request, parents, moved, bins, self.drawn)
        if len(party.values["valid"]):
            valid = party.values["valid"]
            nodes["valid"] = route_rows(nodes["valid"], routes, valid, sets, empty=empty)
        return replace(self, nodes=nodes, floor=floor)

    def check_entries(self, party: str, request: SplitRows, field: str, offsets: Ints) -> None:
        """Check that every node with rows has an entry of a field, divided by these offsets."""
        most = (nodes.max(axis=1, initial=0) for nodes in self.nodes.values())
        has_entries = all((numbers < np.diff(offsets)).all() for numbers in most)
        check_fields(party, request, (field, has_entries, "must be one a node"))

    def add_leaves(self, margins: Mapping[str, Floats], request: Grown) -> Mapping[str, Floats]:
        """Margins by subset plus the leaves of each row, parallel trees in order."""
        starts, sums = request.leaf_offsets[:-1, None], dict[str, Floats]()
        for subset, before in margins.items():
            nodes = self.nodes[subset]
            sums[subset] = after = np.array(before, order="C")
            for some in batches(len(after), ROW_BYTES * len(nodes)):
                steps = request.leaf_values[starts + nodes[:, some]]
                for of_outputs in np.split(steps, request.num_parallel_tree):
                    after[some] += of_outputs.T
        return sums

    def sums(self, request: GrowRequest, bins: Binned) -> tuple[Array, Array]:
        """Histograms of the wanted nodes, and how many values are missing in each."""
        nodes = self.nodes["train"] if self.floor is None else self.floor.nodes
        wanted = request.wanted_trees, request.wanted_nodes
        sums = bins.sums(request.columns.astype(np.int64), self.gradients, nodes, wanted)
        if self.floor is not None:
            self.floor.merge(sums, self.gradients, request, bins.widths)
        return sums


@role
class Party(Counted):
    """A party of PAX."""

    title = "a party of PAX"
    order = Order(
        {
            HelloRequest: {SketchRequest, OpenRequest},
            SketchRequest: {InitRequest, QuantilesRequest, *ROUNDS},
            InitRequest: ROUNDS,
            GrowRequest: {QuantilesRequest, *ROUNDS},
            TurnRequest: {GrowRequest, TurnRequest},
            RisksRequest: {GrowRequest},
            QuantilesRequest: {QuantilesRequest, GrowRequest},
            OpenRequest: {CountRequest, InitRequest, *ROUNDS},
            CountRequest: {CountRequest, InitRequest, QuantilesRequest, *ROUNDS},
        }
    )
    round: Round = Round({})  # the last one

    def sketch(self, request: SketchRequest) -> SketchReply:
        """Line 7: summarise the columns, and replace each value by the number of its bin."""
        return SketchReply(**self.sketch_columns(request))

    def begin_from(self, request: InitRequest) -> InitReply:
        """Start from the margins of a finished model."""
        self.begin_margins(request)
        by_bins = request.at_cuts or bool(self.config.least_bin_rows)
        self._add_trees(self.read_trees(request), by_bins and not self.cutting.n_counted)
        return InitReply()

    def _add_trees(self, grown: model.Grown, by_bins: bool) -> None:
        """Add whole trees to the margins; training rows reach leaves by their bins, or values."""
        sums = dict[str, Floats]()
        for subset, before in self.margins.items():
            has_bins = by_bins and subset == "train"
            sums[subset] = np.empty(before.shape, np.float32)
            for some in batches(len(before), ROW_BYTES * len(self.columns)):
                rows = self.bins.surrogates(some) if has_bins else self.values[subset][some]
                rows = np.ascontiguousarray(rows)
                sums[subset][some] = add_trees(before[some], grown.trees, rows, grown.sets)
        self.margins = sums

    def turn(self, request: TurnRequest) -> Sums:
        """Add the last round's trees, and sum over the bins of every column at the roots."""
        request = self.read_bins(request)
        grown, most = self.read_trees(request), 1 + bool(planned(self.site.store)["pairs"])
        splits = (tree["column"][tree["left"] != model.LEAF] for tree in grown.trees)
        is_curve = all(len(np.unique(columns)) <= most for columns in splits)
        check_fields(self.name, request, ("columns", is_curve, f"must be {most} a tree at most"))
        self.begin_margins(request)
        self._add_trees(grown, by_bins=True)  # a threshold within a bin divides no rows
        self.round = Round({})  # no splits or leaves of the last round follow
        return self.grow(request.opened(len(self.columns)))

    def risks(self, request: RisksRequest) -> Sums:
        """Add the last round's trees, and sum hazard ratios and events by bin of times."""
        rule = f"must not come with {self.objective}, whose gradients need no such sums"
        check_fields(self.name, request, ("class", has_risk_sets(self.objective), rule))
        request = self.read_bins(request)
        self._move(request)
        times, n_bins = self.bins.codes[:, -1], self.bins.widths[-1]  # of the last column
        margins, labels = self.margins["train"], self.labels["train"]
        sums = risk_sums(margins, labels, bins=times, n_bins=n_bins)
        return Sums([sums], RisksReply)

    def _move(self, request: Grown, level: int = 0) -> None:
        """Route the rows by the last splits, and add the last leaf values."""
        check_grown(self, request, level)
        self.begin_margins(request)
        if not self.round.nodes:
            self.round = replace(self.round, nodes=at_roots(self.n_outputs, self.margins))
        n_open = 2 * len(request.split_trees) if level else request.n_trees
        routed = self.round.routed(self, request, level)
        self.round = replace(routed, level=level, n_open=n_open, n_fitted=0)
        if not len(request.leaf_values):
            return
        routed.check_entries(self.name, request, "leaf_values", request.leaf_offsets)
        if level == 0:
            self.margins = routed.add_leaves(self.margins, request)

    def grow(self, request: GrowRequest) -> Sums:
        """Lines 12 to 16: route the rows, start a round at level 0, sum the wanted nodes."""
        request = self.read_bins(request)  # bins of times are a column more than the table has
        self._move(request, request.level)
        if request.level:  # its sums are parts of those of the level above
            return Sums([*self.round.sums(request, self.bins)], GrowReply, follows=True)
        scores = self.score_fields(
            self.margins,
            request.score_bins,
            center=float(request.base_margin[0]),
            adder=adder_of(self.site.store),
            cells=Cells(request.time_points, request.score_edges),
        )
        self._start_round(request)
        histograms, missing = self.round.sums(request, self.bins)
        root_sums = self.round.gradients.sum(axis=1, dtype=histograms.dtype)
        return Sums([histograms, missing, root_sums, *scores.values()], GrowReply)

    def _start_round(self, request: GrowRequest) -> None:
        """Compute gradients of the drawn rows, all of which return to the roots."""
        n_rows, n_outputs = self.margins["train"].shape
        every = self.objective == CUSTOM or is_ranking(self.objective)  # rows have gradients
        parts = [slice(n_rows)] if every else batches(n_rows, ROW_BYTES * n_outputs)
        pairs: Floats = empty((n_outputs, n_rows, 2), np.float32)
        for some in parts:
            pairs[:, some] = self._pairs(request, some).transpose(1, 0, 2)
        pairs = drawn_terms(self, request, pairs)
        terms: Terms = pairs
        if is_masked(self.site.store):
            bounds, terms = bounds_of(self.site.store), empty(pairs.shape, np.int64)
            try:
                for some in batches(n_rows, ROW_BYTES * len(pairs)):
                    of_rows = pairs[:, some]
                    terms[:, some] = whole_gradients(self.objective, of_rows, bounds, self.loss)
            except ValueError as error:
                way = "a smaller eta or pax.aggregation=plain may help"
                raise DivergedError(f"{error}; {way}") from None
        nodes = at_roots(request.n_trees, self.margins)
        begun = replace(self.round, nodes=nodes, gradients=terms, floor=None)
        if least := self.config.least_bin_rows:
            if begun.drawn.sum(axis=1).min() < least:  # nothing leaves in such a round
                begun = replace(begun, gradients=np.zeros_like(terms))
            begun = replace(begun, floor=Floor.at_roots(least, self.bins, begun.drawn))
        self.round = begun

    def _pairs(self, request: GrowRequest, rows: slice) -> Floats:
        """Gradients and hessians of some rows, (n_rows, n_outputs, 2)."""
        margins, labels = self.margins["train"][rows], self.labels["train"][rows]
        if has_risk_sets(self.objective):
            return binned_pairs(margins, labels, request.hazards[self.bins.codes[rows, -1]])
        return gradients(self.objective, margins, labels, self.weights["train"][rows], self.loss)

    def fit_leaves(self, request: QuantilesRequest) -> Sums:
        """Count the rows of each leaf by a digit of their residuals, at first of all labels."""
        check_quantiles(self, request)
        n_fitted = self.round.n_fitted + 1
        self.round = replace(self.round, level=-1, n_open=0, n_fitted=n_fitted)  # it has grown
        labels = self.labels["train"]  # of all rows in one leaf, before the first tree
        nodes, drawn = np.zeros((1, len(labels)), np.int32), np.ones((1, len(labels)), np.bool_)
        if self.margins:
            self.round = self.round.routed(self, request)
            self.round.check_entries(self.name, request, "leaf_ids", request.grown_offsets)
            nodes, drawn = self.round.nodes["train"], self.round.drawn
        starts, asked = request.grown_offsets[:-1, None], (request.prefixes, request.offsets)
        counts = np.zeros((len(request.prefixes), BASE), dtype=np.int32)
        for some in batches(len(labels), ROW_BYTES * len(nodes)):
            residuals, is_drawn = labels[some], drawn[:, some]
            if self.margins:
                residuals = residuals - self.margins["train"][some, 0]
            leaves = request.leaf_ids[starts + nodes[:, some]][is_drawn]
            of_drawn = np.broadcast_to(residuals, is_drawn.shape)[is_drawn]
            counts += leaf_digit_counts(leaves, of_drawn, *asked, request.digit).astype(np.int32)
        return Sums([counts], QuantilesReply, self.cutting.count_bytes, follows=True)


def check_grown(party: Party, request: Grown, level: int) -> None:
    """Check the request against the party's table, so that no index is out of range."""
    width = party.n_outputs * request.num_parallel_tree
    last_level, n_open = party.round.level, party.round.n_open
    n_splits, at_root = len(request.split_trees), level == 0
    check_sizes(party.name, cast(Request, request), n_trees=width, n_columns=len(party.columns))
    rules: list[FieldRule] = [
        ("level", at_root or level == last_level + 1, f"must be 0 or {last_level + 1}"),
        ("split_nodes", n_splits <= n_open, f"must be {n_open} at most"),
    ]
    if isinstance(request, GrowRequest):
        open_nodes = roots_of(request.n_trees)
        if level:
            open_nodes = children_of(request.split_trees, request.split_lefts)
        wanted = request.wanted_trees, request.wanted_nodes
        is_open = len(wanted[1]) and each_once_among(wanted, open_nodes)
        has_hazards = at_root and has_risk_sets(party.objective)
        n_hazards = party.bins.widths[-1] if has_hazards else 0
        n_sums = request.hazards.shape[1] if n_hazards else 2
        rises = n_sums == 2 and (np.diff(request.hazards, axis=0) >= 0).all()
        of_times = f"must be {n_hazards}, one a bin of times before the first level, and rising"
        one_each = "must be roots, or children of the splits, once, and one at least"
        rules += [
            ("wanted_nodes", is_open, one_each),
            ("hazards", len(request.hazards) == n_hazards and rises, of_times),
        ]
    check_fields(party.name, cast(Request, request), *rules)


def check_quantiles(party: Party, request: QuantilesRequest) -> None:
    """Check that each leaf of a tree, or once all labels, are counted by each digit once."""
    rule = f"must be for leaves that are quantiles, got {party.objective}"
    check_fields(party.name, request, ("class", has_quantile_leaves(party.objective), rule))
    n_trees = len(party.round.nodes["train"]) if party.margins else 1
    check_sizes(party.name, request, n_trees=n_trees, n_columns=len(party.cutting.categories))
    n_open, n_fitted = party.round.n_open, party.round.n_fitted
    due = n_fitted if n_fitted < N_DIGITS else "none"
    once = f"must be {due}: a tree's rows are counted by each digit once"
    most = np.diff(request.offsets).max(initial=0)
    check_fields(
        party.name,
        request,
        ("split_nodes", len(request.split_nodes) <= n_open, f"must be {n_open} at most"),
        ("digit", request.digit == n_fitted, once),
        ("offsets", most <= 2, "must give a leaf two prefixes at most"),
    )


def drawn_terms(party: Party, request: GrowRequest, terms: Array) -> Array:
    """Gradients and hessians of each tree, (n_trees, n_rows, 2); 0 for rows it does not draw.

    ``terms``, shape (n_outputs, n_rows, 2), are those of all rows, and may be changed.
    """
    if request.num_parallel_tree > 1:
        terms = np.tile(terms, (request.num_parallel_tree, 1, 1))
    if request.subsample < 1:
        weighted = np.asarray(terms.any(axis=(0, 2)))
        # Each row with probability subsample, as in XGBoost; rows of weight 0 do not count.
        rng = party.site.random(request.seed, request.round_id, request.subsample)
        drawn = np.empty((request.num_parallel_tree, len(weighted)), dtype=np.bool_)
        for rows in drawn:
            for some in batches(len(rows), ROW_BYTES):
                rows[some] = rng.random(len(rows[some])) < request.subsample
        n_rows = int(np.sum(weighted))
        for rows in drawn:
            n_drawn = int(np.sum(weighted & rows))
            if check_sample_size(party.config, n_rows, n_drawn) > n_drawn:
                rows[:] = True
        terms[~np.repeat(drawn, party.n_outputs, axis=0)] = 0
    return terms


def cell_counts(binned: Binned, drawn: Flags, summed_in: Nodes, nodes: Array) -> Ints:
    """Drawn rows in each cell of some nodes: int64, shape (n_nodes, n_cells)."""
    starts = cell_starts(binned.widths)
    order = np.argsort(nodes[:, 0], kind="stable")
    counts = np.empty((len(nodes), int(starts[-1])), dtype=np.int64)
    if len(nodes):
        ones = np.stack([drawn, np.zeros_like(drawn)], axis=2).astype(np.float32)  # 1 a drawn row
        trees, of_trees = nodes[order].T.astype(np.int32)
        columns = np.arange(len(binned.widths))
        histograms, missing = binned.sums(columns, ones, summed_in, (trees, of_trees))
        counts[order] = join_counts(histograms[..., 0], missing, starts)
    return counts


def _node_totals(summed_in: Nodes, terms: Terms, trees: Array, nodes: Array) -> Array:
    """Sums over all rows of each wanted node, as int64 or float64 like the histograms."""
    kind = np.int64 if terms.dtype == np.int64 else np.float64
    sums = [np.empty((0, 2), kind)]
    for tree in np.unique(trees):
        of_tree = nodes[trees == tree]
        by_node = slots_by_node(summed_in[tree], of_tree)
        sums.append(np.zeros((len(of_tree), 2), dtype=kind))
        for some in batches(summed_in.shape[1], ROW_BYTES):
            slots = by_node[summed_in[tree, some]]
            np.add.at(sums[-1], slots[slots >= 0], terms[tree, some][slots >= 0])
    return np.concatenate(sums)


HANDLERS = handlers(Party)
