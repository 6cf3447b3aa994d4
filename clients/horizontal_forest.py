"""A random forest over rows at a party: draw rows for each tree, sum them, move them by splits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from clients.cuts import Counted, at_roots, read_splits
from clients.secagg import ROW_BYTES, weight_sizes
from fedapp.arrays import Floats, Ints
from fedapp.data.partition import WATCHED
from fedapp.data.scratch import batches, empty
from fedapp.histograms.fixed_point import Whole
from fedapp.messages.fields import Array, check_fields, check_sizes
from fedapp.messages.handshake import HelloRequest
from fedapp.messages.horizontal_forest import (
    CellsReply,
    CellsRequest,
    CountRequest,
    OpenRequest,
    SketchReply,
    SketchRequest,
    SplitReply,
    SplitRequest,
)
from fedapp.site.account import is_masked
from fedapp.site.policy import check_draws
from fedapp.site.roles import Order, handlers, role
from fedapp.site.sums import Sums, adder_of, bounds_of
from fedapp.trees.forest.bagged import row_counts
from fedapp.trees.forest.summed import CellLayout, exponents, row_terms
from fedapp.trees.losses import Objective
from fedapp.trees.objective import margins_of
from fedapp.trees.predict import Nodes
from fedapp.trees.structure import children_of, each_once_among, roots_of, route_rows

CENTER = 0.0  # of the histograms of scores; see ``BaggedForest.base_margin``


@dataclass(frozen=True, slots=True, eq=False)
class Growing:
    """Trees of a forest, and where the rows are in them."""

    draws: npt.NDArray[np.uint8]  # (n_trees, n_train): how often each tree draws each row
    terms: Whole  # (n_train, n_sums - 1): see ``summed.row_terms``
    nodes: Mapping[str, Nodes]  # (n_trees, n_rows) by subset: where each row is
    open_nodes: tuple[Ints, Ints]  # trees and nodes that may be split
    values: npt.NDArray[np.float64]  # (n_trees, n_nodes, n_outputs); no node before the first split
    level: int = 0  # of the open nodes

    def are_open(self, trees: Array, nodes: Array) -> bool:
        """Whether some nodes, one at least, are open, and none is named twice."""
        return len(nodes) > 0 and each_once_among((trees, nodes), self.open_nodes)

    def split(self, request: SplitRequest, nodes: Mapping[str, Nodes]) -> Growing:
        """With the rows at ``nodes``, the children of a level's splits, and their values."""
        trees, lefts = request.split_trees, request.split_lefts
        before = self.values if self.level else request.root_values[:, None]
        size = max(before.shape[1], int(lefts.max()) + 2)
        values = np.zeros((len(before), size, before.shape[2]))
        values[:, : before.shape[1]] = before
        for side in range(2):
            values[trees, lefts + side] = request.child_values[:, side]
        children = children_of(trees, lefts)
        return Growing(self.draws, self.terms, nodes, children, values, self.level + 1)

    def margins(self, subset: str, objective: Objective) -> Floats:
        """Margins of a subset's rows by the trees so far, (n_rows, n_outputs)."""
        nodes, n_outputs = self.nodes[subset], self.values.shape[2]
        margins = np.empty((nodes.shape[1], n_outputs), np.float32)
        for some in batches(len(margins), ROW_BYTES * n_outputs):
            sums = np.zeros(margins[some].shape)
            for tree_values, tree_nodes in zip(self.values, nodes[:, some], strict=True):
                sums += tree_values[tree_nodes]
            margins[some] = margins_of(objective, sums / len(self.values))
        return margins


@role
class Grower(Counted):
    """A party of a forest over rows."""

    title = "a party of a forest over rows"
    order = Order(
        {
            HelloRequest: {SketchRequest, OpenRequest},
            SketchRequest: {CellsRequest},
            CellsRequest: {CellsRequest, SplitRequest},
            SplitRequest: {CellsRequest},
            OpenRequest: {CountRequest, CellsRequest},
            CountRequest: {CountRequest, CellsRequest},
        }
    )
    growing: Growing

    def sketch(self, request: SketchRequest) -> SketchReply:
        """Summarise the columns, and replace each value by the number of its bin."""
        return SketchReply(**self.sketch_columns(request), **weight_sizes(self.weights))

    def sum_rows(self, request: CellsRequest) -> Sums:
        """Sums of the rows over the cells of columns; in joint bins if the first request has cuts.

        Under masks all cells leave, else those that have rows.
        """
        request = self.read_bins(request)
        bins = self.bins
        if not (self.follows(CellsRequest) or self.follows(SplitRequest)):
            self.growing = self._begun(request)
        growing, wanted = self.growing, (request.wanted_trees, request.wanted_nodes)
        check_sizes(self.name, request, n_columns=len(bins.widths), trees=len(growing.draws))
        is_asked = growing.are_open(*wanted) and request.columns.shape[1]
        rule = "must be open nodes, once, and one at least, with a column at least"
        check_fields(
            self.name,
            request,
            ("level", request.level == growing.level, f"must be {growing.level}"),
            ("wanted_nodes", is_asked, rule),
        )
        layout, nodes = CellLayout(request.columns, bins.widths), growing.nodes["train"]
        # All are parts of the sums of the first request.
        follows = not (self.follows(OpenRequest) or self.follows(CountRequest))
        sums = bins.cells(layout, growing.terms, growing.draws, nodes, wanted)
        return Sums([sums], CellsReply.of, request.sum_bytes, follows=follows)

    def _begun(self, request: CellsRequest) -> Growing:
        """Each tree's rows, drawn, all of them at the roots."""
        weights, labels, store = self.weights["train"], self.labels["train"], self.site.store
        bounds = self.bounds_in(request)
        is_theirs = not is_masked(store) or bounds == bounds_of(store)
        covers = request.weighted or not weight_sizes(self.weights)["weighted"]
        check_fields(
            self.name,
            request,
            ("n_rows", is_theirs, "must be as in the opening"),
            ("weighted", covers, "must be true: rows have weights"),
        )
        powers = exponents(len(self.classes), bounds, request.weighted)
        terms = row_terms(labels, weights, len(self.classes), powers)
        seed = int(self.site.random(request.seed, 0).integers(2**63))
        draws = row_counts(request.bootstrap, seed, request.trees, len(labels))
        if request.bootstrap:
            check_draws(self.config, "horizontal-forest", draws)
        nodes = at_roots(request.trees, {subset: self.labels[subset] for subset in WATCHED})
        no_values = np.empty((request.trees, 0, self.n_outputs))
        return Growing(draws, terms, nodes, roots_of(request.trees), no_values)

    def split(self, request: SplitRequest) -> Sums:
        """Move the rows by the splits of a level, and score the forest so far."""
        self._check_splits(request)
        routes, sets = read_splits(self.name, request, self.cutting.categories)
        nodes = self.growing.nodes
        self.growing = self.growing.split(
            request,
            {
                "train": self.bins.routed(nodes["train"], routes, sets),
                "valid": route_rows(
                    nodes["valid"], routes, self.values["valid"], sets, empty=empty
                ),
            },
        )
        margins = {subset: self.growing.margins(subset, self.objective) for subset in nodes}
        adder = adder_of(self.site.store)
        scores = self.score_fields(margins, request.score_bins, CENTER, adder=adder)
        return Sums([*scores.values()], SplitReply, follows=True)

    def _check_splits(self, request: SplitRequest) -> None:
        """Check that splits are of open nodes, so that no index is out of range."""
        growing, splits = self.growing, (request.split_trees, request.split_nodes)
        n_trees, sizes = len(growing.draws), {"n_outputs": self.n_outputs}
        sizes |= {"n_trees": n_trees, "n_roots": 0 if growing.level else n_trees}
        check_sizes(self.name, request, **sizes, n_columns=len(self.bins.widths))
        # A tree's next nodes have the next numbers.
        most = max(growing.values.shape[1], 1) + 2 * len(splits[0])
        check_fields(
            self.name,
            request,
            ("split_nodes", growing.are_open(*splits), "must be open nodes, once, and one"),
            ("split_lefts", request.split_lefts.max(initial=0) < most, f"must be below {most}"),
        )


HANDLERS = handlers(Grower)
