"""A random forest over rows at a party: draw rows for each tree, sum them, move them by splits."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from clients.cuts import Counted
from fedapp.data.partition import WATCHED
from fedapp.errors import ConfigError
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
from fedapp.site.roles import Order, handlers, role
from fedapp.site.sums import Sums, adder_of, bounds_of
from fedapp.trees.forest.levels import row_counts
from fedapp.trees.forest.summed import CellLayout, exponents, row_terms, sum_cells
from fedapp.trees.grow import children_of, each_once_among, roots_of, route_codes, route_values
from fedapp.trees.objective import margins_of
from fedapp.trees.predict import Nodes

CENTER = 0.0  # of the histograms of scores; see ``BaggedForest.base_margin``


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
    draws: npt.NDArray[np.uint8]  # (n_trees, n_train): how often each tree draws each row
    terms: Whole  # (n_train, n_sums - 1): see ``summed.row_terms``
    nodes: Mapping[str, Nodes] = {}  # (n_trees, n_rows) by subset: where each row is
    node_values: npt.NDArray[np.float64]  # (n_trees, n_nodes, n_outputs)
    # trees, nodes: (n_open,): that may be split
    open_trees: npt.NDArray[np.int64]
    open_nodes: npt.NDArray[np.int64]
    level: int = 0  # of the open nodes

    def sketch(self, request: SketchRequest) -> SketchReply:
        """Summarise the columns, and replace each value by the number of its bin."""
        return SketchReply(**self.sketch_columns(request), **self.sizes_of_weights())

    def sum_rows(self, request: CellsRequest) -> Sums:
        """Sums of the rows over the cells of columns; in joint bins if the first request has cuts.

        Under masks all cells leave, else those that have rows.
        """
        request = self.read_bins(request)
        # All are parts of the sums of the first request.
        follows = not (self.follows(OpenRequest) or self.follows(CountRequest))
        return Sums([self._sums(request)], CellsReply.of, request.sum_bytes, follows=follows)

    def _sums(self, request: CellsRequest) -> Whole:
        binned = self.bins
        if not self.nodes:
            self._begin(request)
        wanted = request.wanted_trees, request.wanted_nodes
        is_open = each_once_among(wanted, (self.open_trees, self.open_nodes))
        check_sizes(self.name, request, n_columns=len(binned.widths), trees=len(self.draws))
        is_asked = is_open and len(request.wanted_nodes) and request.columns.shape[1]
        rule = "must be open nodes, once, and one at least, with a column at least"
        check_fields(
            self.name,
            request,
            ("level", request.level == self.level, f"must be {self.level}"),
            ("wanted_nodes", is_asked, rule),
        )
        layout = CellLayout(request.columns, binned.widths)
        return sum_cells(
            binned.codes,
            binned.missing_code,
            layout,
            self.terms,
            self.draws,
            self.nodes["train"],
            wanted,
        )

    def _begin(self, request: CellsRequest) -> None:
        """Draw each tree's rows, and put all rows at the roots."""
        weights, labels, store = self.weights["train"], self.labels["train"], self.site.store
        bounds = self.bounds_in(request)
        is_theirs = not is_masked(store) or bounds == bounds_of(store)
        covers = request.weighted or not self.sizes_of_weights()["weighted"]
        check_fields(
            self.name,
            request,
            ("n_rows", is_theirs, "must be as in the opening"),
            ("weighted", covers, "must be true: rows have weights"),
        )
        powers = exponents(len(self.classes), bounds, request.weighted)
        self.terms = row_terms(labels, weights, len(self.classes), powers)
        seed = int(self.site.random(request.seed, 0).integers(2**63))
        self.draws = row_counts(request.bootstrap, seed, request.trees, len(labels))
        drawn = np.count_nonzero(self.draws, axis=1)
        fewest = min(drawn.min(), len(labels) - drawn.max())
        if request.bootstrap and fewest < self.config.min_rows:
            rule = "must be false where a tree draws or leaves out fewer than "
            rule += f"{self.config.min_rows} training rows (min-rows of {self.name})"
            raise ConfigError(f"horizontal-forest.bootstrap {rule}, got true and {fewest}")
        self.nodes = {
            subset: np.zeros((request.trees, len(self.labels[subset])), dtype=np.int32)
            for subset in WATCHED
        }
        self.open_trees, self.open_nodes = roots_of(request.trees)

    def split(self, request: SplitRequest) -> Sums:
        """Move the rows by the splits of a level, and score the forest so far."""
        self._check_splits(request)
        routes, sets = self.read_splits(request)
        self.nodes = {
            "train": route_codes(self.nodes["train"], *self.by_bins(routes, sets)),
            "valid": route_values(self.nodes["valid"], routes, self.values["valid"], sets),
        }
        trees, lefts = request.split_trees, request.split_lefts
        before = self.node_values if self.level else request.root_values[:, None]
        size = max(before.shape[1], int(lefts.max()) + 2)
        values = np.zeros((len(before), size, before.shape[2]))
        values[:, : before.shape[1]] = before
        for side in range(2):
            values[trees, lefts + side] = request.child_values[:, side]
        self.node_values = values
        self.open_trees, self.open_nodes = children_of(trees, lefts)
        self.level += 1
        margins = dict[str, Array]()
        for subset, nodes in self.nodes.items():
            sums = np.zeros((len(self.labels[subset]), self.n_outputs))
            for tree_values, tree_nodes in zip(self.node_values, nodes, strict=True):
                sums += tree_values[tree_nodes]
            margins[subset] = margins_of(self.objective, sums / len(self.node_values))
        adder = adder_of(self.site.store)
        scores = self.score_fields(margins, request.score_bins, CENTER, adder=adder)
        return Sums([*scores.values()], SplitReply, follows=True)

    def _check_splits(self, request: SplitRequest) -> None:
        """Check that splits are of open nodes, so that no index is out of range."""
        sizes = {"n_trees": len(self.draws), "n_outputs": self.n_outputs}
        check_sizes(self.name, request, **sizes, n_columns=len(self.bins.widths))
        n_roots = 0 if self.level else len(self.draws)
        splits = request.split_trees, request.split_nodes
        is_open = each_once_among(splits, (self.open_trees, self.open_nodes))
        n_nodes = self.node_values.shape[1] if self.level else 1
        # A tree's next nodes have the next numbers.
        most = n_nodes + 2 * len(splits[0])
        check_fields(
            self.name,
            request,
            ("split_nodes", is_open and len(splits[0]), "must be open nodes, once, and one"),
            ("split_lefts", request.split_lefts.max(initial=0) < most, f"must be below {most}"),
            ("root_values", len(request.root_values) == n_roots, f"must be {n_roots}"),
        )


HANDLERS = handlers(Grower)
