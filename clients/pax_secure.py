"""Party side of PAX with secure aggregation, and with differential privacy.

Quantiles of all parties' rows follow from counts by digit, so all parties have the same bins from
the first tree on. Rows keep their values, and no representative leaves the party. With differential
privacy every sum leaves with noise, under masks (``trees`` and below).
"""

from __future__ import annotations

import math

import numpy as np

from clients.cuts import Counted
from clients.handshake import Ints
from fedapp.data.partition import HELD_OUT
from fedapp.errors import ConfigError, ProtocolError
from fedapp.histograms.fixed_point import Whole
from fedapp.messages.fields import Array
from fedapp.messages.handshake import HelloRequest
from fedapp.messages.pax_secure import (
    COUNTED_ROWS,
    PrivateCountRequest,
    PrivateOpenRequest,
    PrivateScoresRequest,
    PrivateTreesRequest,
)
from fedapp.metrics.adders import TOTALS_NOISE, ClippedNumbers
from fedapp.site.roles import Order, handlers, role
from fedapp.site.sums import Noise, Promised, Sums, bounds_of, check_budget
from fedapp.trees.model import LEAF, Ensemble, Grown
from fedapp.trees.objective import RowBounds, row_bounds, row_pairs
from fedapp.trees.predict import find_leaves, predict_margins


@role
class Private(Counted):
    """A party of PAX with differential privacy: rows are routed by value, there are no bins."""

    title = "a party of PAX with an epsilon"
    order = Order(
        {
            HelloRequest: {PrivateOpenRequest},
            PrivateOpenRequest: {PrivateCountRequest, PrivateTreesRequest},
            PrivateCountRequest: {PrivateCountRequest, PrivateTreesRequest},
            PrivateTreesRequest: {PrivateTreesRequest, PrivateScoresRequest},
        }
    )
    n_leaves: int = 0  # of the last round's trees, until their values are added
    places: Ints  # (n_train, n_trees): an index into the leaves of all of them

    def open_sums(self, request: PrivateOpenRequest) -> Sums:
        """Join the run, code labels and categories; sums of labels, counts of values."""
        if request.n_rows > COUNTED_ROWS:
            rule = "must be <= {}, which units are fine enough for, got {}"
            rule = rule.format(COUNTED_ROWS, request.n_rows)
            raise ProtocolError(self.name, "PrivateOpenRequest", "n_rows", rule)
        if request.threshold:
            rule = f"must be 0, for the noise of all parties is needed, got {request.threshold}"
            raise ProtocolError(self.name, "PrivateOpenRequest", "threshold", rule)
        _, sums, counts = self.count_labels(request)
        store = self.site.store
        n_rows = len(self.labels["train"])
        check_budget(self.config, store, request, request, n_rows, len(request.names))
        self._gradient_bounds()
        sensitivity = math.sqrt(2) * self._heaviest_units()
        variance = self._promised.budget.party_variance("labels", sensitivity)
        noise = Noise("labels", 0, (variance,)), self._count_noise(0)
        # With several classes every margin starts at the same value: only the weight sum is sent.
        return Sums([sums if len(sums) == 2 else sums[-1:], counts], noise=noise)

    def count(self, request: PrivateCountRequest) -> Sums:
        """Weights of the rows by the next digit of their values; each digit once a run."""
        self.cutting.check_prefixes(self.config, request)
        counts = self.cutting.counts(self, request.prefixes, request.offsets, request.digit)
        noise = (self._count_noise(request.digit),)
        return Sums([counts], noise=noise, follows=True)

    def grow(self, request: PrivateTreesRequest) -> Sums:
        """Add the last round's leaves; sum gradients and hessians at leaves of the next trees."""
        grown, nodes, whole = self._route_rows(request)
        places = np.empty((len(nodes[0]), len(nodes)), dtype=np.int64)
        sums = []
        first = 0
        for number, (tree, tree_nodes) in enumerate(zip(grown.trees, nodes, strict=True)):
            leaves = np.flatnonzero(tree["left"] == LEAF)
            places[:, number] = first + np.searchsorted(leaves, tree_nodes)
            by_node = np.zeros((len(tree), 2), dtype=np.int64)
            np.add.at(by_node, tree_nodes, whole[number])
            sums.append(by_node[leaves])
            first += len(leaves)
        self.places, self.n_leaves = places, first
        store = self.site.store
        sensitivities = self._gradient_bounds().sensitivities(bounds_of(store))
        variances = [self._promised.budget.party_variance("tree", each) for each in sensitivities]
        noise = Noise("tree", request.round_id, tuple(variances))
        return Sums([np.concatenate(sums)], noise=(noise,))

    def score(self, request: PrivateScoresRequest) -> Sums:
        """Clipped sums and score histograms of the held-back rows; then drops all rows."""
        store = self.site.store
        bounds = bounds_of(store)
        budget = self._promised.budget
        arrays, noise = [], list[Noise]()
        for subset in HELD_OUT:
            adder = ClippedNumbers(bounds, self._promised.clip)
            # Merged bins depend on row counts, so one row could move more than its own cell.
            scores, _ = self.score_subsets(
                request, Ensemble, predict_margins, adder, (subset,), least_bin_rows=0
            )
            variance = budget.party_variance("scores", adder.sensitivity)
            sums, histogram = scores.values()
            arrays += [sums[: adder.n_totals], sums[adder.n_totals :], histogram]
            cell_noise = Noise("scores", 0, (variance,))
            noise += [Noise("scores", 0, (variance * TOTALS_NOISE**2,)), cell_noise, cell_noise]
        self.end()
        return Sums(arrays, noise=tuple(noise))

    @property
    def _promised(self) -> Promised:
        return self.site.store.get(Promised)

    def _gradient_bounds(self) -> RowBounds:
        """Bounds on a row's gradients; a ConfigError if the clip does not fit the objective."""
        try:
            return row_bounds(self.objective, self.loss, self._promised.clip)
        except ValueError as error:
            raise ConfigError(f"privacy.clip {error}") from None

    def _heaviest_units(self) -> float:
        """Weight of the heaviest row, in units of counts."""
        bounds = bounds_of(self.site.store)
        return math.ldexp(1.0, bounds.exponent(0) + bounds.heaviest)

    def _count_noise(self, digit: int) -> Noise:
        # A row is counted once per numeric column.
        n_columns = int((self.cutting.categories == 0).sum())
        sensitivity = math.sqrt(max(n_columns, 1)) * self._heaviest_units()
        variance = self._promised.budget.party_variance("counts", sensitivity)
        return Noise("counts", digit, (variance,))

    def _route_rows(self, request: PrivateTreesRequest) -> tuple[Grown, Array, Whole]:
        """Trees, each row's node in them, gradients (n_trees, n_rows, 2) as int64."""
        grown = self.read_trees(request)
        if len(grown.trees) != self.n_outputs:
            rule = f"must be {self.n_outputs}, got {len(grown.trees)}"
            raise ProtocolError(self.name, type(request).__name__, "trees", rule)
        if (n_values := len(request.leaf_values)) != self.n_leaves:
            rule = f"must be {self.n_leaves}, those of the last round, got {n_values}"
            raise ProtocolError(self.name, type(request).__name__, "leaf_values", rule)
        if not self.margins:
            self.check_outputs(request, "base_margin")
            self.begin_margins(request.base_margin)
        elif n_values:
            margins = self.margins["train"] + request.leaf_values[self.places]
            self.margins = {**self.margins, "train": margins}
        self.n_leaves = 0  # a round's leaves are added once
        values = self.values["train"]
        labels = self.labels["train"]
        pairs = row_pairs(self.objective, self.margins["train"], labels, self.loss)
        bounds = bounds_of(self.site.store)
        whole = self._gradient_bounds().whole(pairs, self.weights["train"], bounds)
        nodes = np.empty((self.n_outputs, len(values)), dtype=np.int32)
        for tree, tree_nodes in zip(grown.trees, nodes, strict=True):
            find_leaves(tree, values, tree_nodes, grown.sets)
        return grown, nodes, np.ascontiguousarray(whole.transpose(1, 0, 2))


HANDLERS = handlers(Private)
