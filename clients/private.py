"""PAX at a party whose sums leave it with noise, and under masks, alone.

Rows walk down trees by their values: there are no bins that the party would need to know.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from clients.dictionary import kept_categories
from clients.labels import CLASSES, keep_coding, loss_parameters
from clients.margins import begin_margins, told_trees
from clients.pax_sums import COUNT_BYTES, check_offsets, whole_weights
from clients.scoring import score_subsets
from clients.secure import join, label_sums
from fedapp.crypto.fixed_point import power_above
from fedapp.data.partition import HELD_OUT
from fedapp.errors import ConfigError, ProtocolError
from fedapp.histograms.descent import Descent, digit_counts
from fedapp.messages.fields import Request
from fedapp.messages.private import (
    COUNTED_ROWS,
    PrivateCountRequest,
    PrivateOpenRequest,
    PrivateScoresRequest,
    PrivateTreesRequest,
)
from fedapp.metrics.noised import TOTALS_NOISE, ClippedNumbers
from fedapp.site.answer import Handler, Site
from fedapp.site.masks import Sums, bounds_of
from fedapp.site.noise import PROMISED, Noise, budget_of, promise
from fedapp.site.store import Store
from fedapp.trees.model import LEAF
from fedapp.trees.objective import n_outputs
from fedapp.trees.predict import find_leaves
from fedapp.trees.row_bounds import RowBounds, row_bounds, row_pairs
from fedapp.trees.sets import category_counts


def open_sums(site: Site, request: PrivateOpenRequest) -> Sums:
    """Keep the coding, the parties and the promise; noised sums of labels, counts of values."""
    keep_coding(site, request)
    bounds, store = join(site, request, request), site.store
    if request.n_rows > COUNTED_ROWS:
        rule = f"must be <= {COUNTED_ROWS}, which units are fine enough for, got {request.n_rows}"
        raise ProtocolError(site.name, "PrivateOpenRequest", "n_rows", rule)
    if request.threshold:
        rule = f"must be 0, for the noise of all parties is needed, got {request.threshold}"
        raise ProtocolError(site.name, "PrivateOpenRequest", "threshold", rule)
    promise(site.config, store, request, request, len(request.names))
    own_bounds(store)
    values = store["train.values"]
    categories = category_counts(kept_categories(store), values.shape[1])
    store["set_widths"], store.facts[COUNT_BYTES] = categories, 8
    prefixes, offsets = Descent(categories == 0, n_bins=2).wanted()
    counts = digit_counts(values, whole_weights(store, bounds), prefixes, offsets, digit=0)
    of_labels = budget_of(store).own_variance("labels", math.sqrt(2) * heaviest_units(store))
    noise = Noise("labels", 0, (of_labels,)), _of_counts(store, 0)
    return Sums([label_sums(store, bounds), counts], noise=noise)


def count(site: Site, request: PrivateCountRequest) -> Sums:
    """Weights of the rows by the next digit of their values."""
    store = site.store
    values, weights = store["train.values"], whole_weights(store, bounds_of(store))
    check_offsets(site, "PrivateCountRequest", "offsets", request.offsets, len(request.prefixes))
    counts = digit_counts(values, weights, request.prefixes, request.offsets, request.digit)
    return Sums([counts], noise=(_of_counts(store, request.digit),))


def trees(site: Site, request: PrivateTreesRequest) -> Sums:
    """Finish the last round's trees; sum gradients and hessians at the leaves of the next ones."""
    store, bounds = site.store, bounds_of(site.store)
    width = n_outputs(store.facts["objective"], len(store.facts[CLASSES]))
    grown = told_trees(site, request, np.asarray(store["set_widths"]))
    if len(grown.trees) != width:
        rule = f"must be {width}, got {len(grown.trees)}"
        raise ProtocolError(site.name, "PrivateTreesRequest", "trees", rule)
    _add_leaves(site, request, width)
    values, margins = store["train.values"], store["train.margins"]
    own, parameters = own_bounds(store), loss_parameters(store)
    pairs = row_pairs(store.facts["objective"], margins, store["train.labels"], parameters)
    whole = own.whole(pairs, store["train.weights"], bounds)
    places, sums, first = np.empty((len(values), width), dtype=np.int64), [], 0
    for number, tree in enumerate(grown.trees):
        leaves, found = np.flatnonzero(tree["left"] == LEAF), np.empty(len(values), dtype=np.int32)
        find_leaves(tree, values, found, grown.sets)
        own_places = np.searchsorted(leaves, found)
        of_leaves = np.zeros((len(leaves), 2), dtype=np.int64)
        np.add.at(of_leaves, own_places, whole[:, number])
        places[:, number] = first + own_places
        sums.append(of_leaves)
        first += len(leaves)
    store["places"], store.facts["n_leaves"] = places, first
    budget = budget_of(store)
    variances = (budget.own_variance("tree", most) for most in own.sensitivities(bounds))
    return Sums([np.concatenate(sums)], noise=(Noise("tree", request.round_id, tuple(variances)),))


def scores(site: Site, request: PrivateScoresRequest) -> Sums:
    """Clipped sums and score histograms of the rows that were held back; forgets all rows."""
    store = site.store
    bounds, budget, clip = bounds_of(store), budget_of(store), store.facts[PROMISED]["clip"]
    # Bins that depend on how many rows are in them would move by more than the row.
    unmerged = Site(replace(site.config, min_bin_rows=0), store)
    arrays, noise = [], []
    for subset in HELD_OUT:
        adder = ClippedNumbers(bounds, power_above(clip) if clip else 0)
        found = score_subsets(unmerged, request, (subset,), adder)
        variance = budget.own_variance("scores", adder.sensitivity)
        sums, histogram = found.values()
        arrays += [sums[: adder.n_totals], sums[adder.n_totals :], histogram]
        of_cells = Noise("scores", 0, (variance,))
        noise += [Noise("scores", 0, (variance * TOTALS_NOISE**2,)), of_cells, of_cells]
    store.forget()
    return Sums(arrays, noise=tuple(noise))


def own_bounds(store: Store) -> RowBounds:
    """What a row's gradients are held to.

    Raises
    ------
    ConfigError : the objective and the run's clip do not fit.
    """
    clip = store.facts[PROMISED]["clip"]
    try:
        return row_bounds(store.facts["objective"], loss_parameters(store), clip)
    except ValueError as error:
        raise ConfigError(f"privacy.clip {error}") from None


def heaviest_units(store: Store) -> float:
    """The weight of the heaviest row, in units of counts."""
    bounds = bounds_of(store)
    return math.ldexp(1.0, bounds.exponent(0) + bounds.heaviest)


def _of_counts(store: Store, digit: int) -> Noise:
    """Noise of counts: a row is counted once a column of numbers."""
    n_columns = int((np.asarray(store["set_widths"]) == 0).sum())
    most = math.sqrt(max(n_columns, 1)) * heaviest_units(store)
    return Noise("counts", digit, (budget_of(store).own_variance("counts", most),))


def _add_leaves(site: Site, request: PrivateTreesRequest, width: int) -> None:
    """Move the margins by the leaves of the last round."""
    store, n_told = site.store, len(request.leaf_values)
    wanted = store.facts["n_leaves"] if "train.margins" in store else 0
    if n_told != wanted:
        rule = f"must be {wanted}, those of the last round, got {n_told}"
        raise ProtocolError(site.name, type(request).__name__, "leaf_values", rule)
    if not n_told:
        begin_margins(store, width, request.base_margin)
        return
    store["train.margins"] = store["train.margins"] + request.leaf_values[store["places"]]


HANDLERS: Mapping[type[Request], Handler] = {
    PrivateOpenRequest: open_sums,
    PrivateCountRequest: count,
    PrivateTreesRequest: trees,
    PrivateScoresRequest: scores,
}
