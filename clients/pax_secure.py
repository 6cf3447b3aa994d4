"""Party side of PAX with secure aggregation, and with differential privacy.

Cuts follow from counts by digit (``clients.cuts``). With differential privacy every sum leaves with
noise, under masks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from clients.cuts import Counted
from clients.secagg import ROW_BYTES
from fedapp.arrays import Floats
from fedapp.data.partition import HELD_OUT
from fedapp.data.scratch import batches, empty
from fedapp.errors import ConfigError
from fedapp.histograms.fixed_point import Bounds
from fedapp.messages.fields import check_fields, check_sizes
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
from fedapp.trees.predict import Places, find_leaves, predict_margins


@dataclass(frozen=True, slots=True, eq=False)
class Leaves:
    """Leaves of a round's trees, one tree after the other, and the rows in them."""

    n: int = 0
    # (n_train, n_trees): an index into the leaves of all trees
    places: Places = field(default_factory=lambda: np.empty((0, 0), dtype=np.int32))

    @classmethod
    def of(cls, grown: Grown, values: Floats) -> Leaves:
        """Leaves of some trees, which rows reach by their values."""
        places = empty((len(values), len(grown.trees)), np.int32)
        first = 0
        for number, tree in enumerate(grown.trees):
            (nodes,) = find_leaves([tree], values, grown.sets)
            leaves = np.flatnonzero(tree["left"] == LEAF)
            places[:, number] = first + np.searchsorted(leaves, nodes)
            first += len(leaves)
        return cls(first, places)


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
    leaves: Leaves = Leaves()  # of the last round's trees, whose values come next

    def open_sums(self, request: PrivateOpenRequest) -> Sums:
        """Join the run, code labels and categories; sums of labels, counts of values."""
        n_rows, threshold = request.n_rows, request.threshold
        most = f"must be <= {COUNTED_ROWS}, which units are fine enough for, got {n_rows}"
        rule = f"must be 0, for the noise of all parties is needed, got {threshold}"
        check_fields(
            self.name,
            request,
            ("n_rows", n_rows <= COUNTED_ROWS, most),
            ("threshold", not threshold, rule),
        )
        _, sums, counts = self.count_labels(request)
        store = self.site.store
        n_rows = len(self.labels["train"])
        check_budget(self.config, store, request, request, n_rows, len(request.names))
        self._gradient_bounds()
        sensitivity = math.sqrt(2) * heaviest_units(bounds_of(store))
        variance = store.get(Promised).budget.party_variance("labels", sensitivity)
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
        grown, n_leaves = self.read_trees(request), self.leaves.n
        check_sizes(self.name, request, n_trees=self.n_outputs, n_leaf_values=n_leaves)
        self.begin_margins(request)
        if n_leaves:
            margins = self.margins["train"] + request.leaf_values[self.leaves.places]
            self.margins = {**self.margins, "train": margins}
        margins, labels, weights = (
            rows["train"] for rows in (self.margins, self.labels, self.weights)
        )
        of_row, bounds = self._gradient_bounds(), bounds_of(self.site.store)
        self.leaves = Leaves.of(grown, self.values["train"])
        sums = np.zeros((self.leaves.n, 2), dtype=np.int64)
        for some in batches(len(labels), ROW_BYTES * self.n_outputs):
            pairs = row_pairs(self.objective, margins[some], labels[some], self.loss)
            whole = of_row.whole(pairs, weights[some], bounds)
            np.add.at(sums, self.leaves.places[some], whole)
        budget = self.site.store.get(Promised).budget
        variances = [budget.party_variance("tree", each) for each in of_row.sensitivities(bounds)]
        noise = Noise("tree", request.round_id, tuple(variances))
        return Sums([sums], noise=(noise,))

    def score(self, request: PrivateScoresRequest) -> Sums:
        """Clipped sums and score histograms of the held-back rows; then drops all rows."""
        store = self.site.store
        promised, bounds = store.get(Promised), bounds_of(store)
        arrays, noise = [], list[Noise]()
        for subset in HELD_OUT:
            adder = ClippedNumbers(bounds, promised.clip)
            # Merged bins depend on row counts, so one row could move more than its own cell.
            scores, _ = self.score_subsets(
                request, Ensemble, predict_margins, adder, (subset,), least_bin_rows=0
            )
            variance = promised.budget.party_variance("scores", adder.sensitivity)
            sums, histogram = scores.values()
            arrays += [sums[: adder.n_totals], sums[adder.n_totals :], histogram]
            cell_noise = Noise("scores", 0, (variance,))
            noise += [Noise("scores", 0, (variance * TOTALS_NOISE**2,)), cell_noise, cell_noise]
        self.end()
        return Sums(arrays, noise=tuple(noise))

    def _gradient_bounds(self) -> RowBounds:
        """Bounds on a row's gradients; a ConfigError if the clip does not fit the objective."""
        try:
            return row_bounds(self.objective, self.loss, self.site.store.get(Promised).clip)
        except ValueError as error:
            raise ConfigError(f"privacy.clip {error}") from None

    def _count_noise(self, digit: int) -> Noise:
        # A row is counted once per numeric column.
        n_columns = int((self.cutting.categories == 0).sum())
        store = self.site.store
        sensitivity = math.sqrt(max(n_columns, 1)) * heaviest_units(bounds_of(store))
        variance = store.get(Promised).budget.party_variance("counts", sensitivity)
        return Noise("counts", digit, (variance,))


def heaviest_units(bounds: Bounds) -> float:
    """Weight of the heaviest row, in units of counts."""
    return math.ldexp(1.0, bounds.exponent(0) + bounds.heaviest)


HANDLERS = handlers(Private)
