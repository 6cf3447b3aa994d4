"""Party side of PAX with secure aggregation, and with differential privacy.

Quantiles of all parties' rows follow from counts by digit, so all parties have the same bins from
the first tree on. Rows keep their values, and no representative leaves the party. With differential
privacy every sum leaves with noise, under masks (``trees`` and below).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from clients.handshake import keep_coding, loss_parameters, run_outputs, stored_categories
from clients.scoring import begin_margins, check_outputs, read_trees, score_subsets
from clients.secagg import join, label_sums
from fedapp.data.partition import HELD_OUT
from fedapp.errors import ConfigError, DivergedError, ProtocolError
from fedapp.histograms.bins import Cuts, digitise, with_categories
from fedapp.histograms.fixed_point import Bounds, Whole, power_above, to_fixed
from fedapp.histograms.sketch import LARGEST, N_DIGITS, Descent, digit_counts
from fedapp.messages.fields import Array, Message, Request, check_sizes
from fedapp.messages.pax import CountRequest, GrowSumsRequest, OpenRequest
from fedapp.messages.pax_secure import (
    COUNTED_ROWS,
    PrivateCountRequest,
    PrivateOpenRequest,
    PrivateScoresRequest,
    PrivateTreesRequest,
)
from fedapp.metrics.sums import TOTALS_NOISE, ClippedNumbers
from fedapp.site.answer import Handler, Site
from fedapp.site.mail import hold_once
from fedapp.site.store import Store
from fedapp.site.sums import PROMISED, Noise, Sums, bounds_of, budget_of, check_budget
from fedapp.site.trust import check_within
from fedapp.trees.model import LEAF, Grown, Tree, from_json
from fedapp.trees.objective import RowBounds, row_bounds, row_pairs, whole_gradients
from fedapp.trees.predict import find_leaves, predict_margins
from fedapp.trees.sets import category_counts

# Facts of a store.
COUNT_BYTES = "count_bytes"  # width of a count
COUNTED = "counted"  # number of digits by which rows have been counted


def whole_terms(store: Store, pairs: Array) -> Whole:
    """Gradients and hessians of rows as whole numbers, of which all parties' sums are exact."""
    objective, loss = store.facts["objective"], loss_parameters(store)
    try:
        return whole_gradients(objective, pairs, bounds_of(store), loss)
    except ValueError as error:
        way = "a smaller eta or pax.aggregation=plain may help"
        raise DivergedError(f"{error}; {way}") from None


def open_sums(site: Site, request: OpenRequest | PrivateOpenRequest) -> Sums:
    """Join the run, code labels and categories; sums of labels, counts of values."""
    store = site.store
    n_bytes = 8 if isinstance(request, PrivateOpenRequest) else request.count_bytes
    coded, bounds = keep_coding(site, request), join(site, request, request)
    if isinstance(request, PrivateOpenRequest):
        _keep_promise(site, request)
    else:
        _count_once(site, request, digit=0)
    values = store["train.values"]
    categories = category_counts(stored_categories(store), values.shape[1])
    store["set_widths"], store.facts[COUNT_BYTES] = categories, n_bytes
    prefixes, offsets = Descent(categories == 0, n_bins=2).wanted()
    weights, sums = whole_weights(store, bounds), label_sums(store, bounds)
    counts = digit_counts(values, weights, prefixes, offsets, digit=0)
    if isinstance(request, PrivateOpenRequest):
        variance = budget_of(store).party_variance("labels", math.sqrt(2) * heaviest_units(store))
        noise = Noise("labels", 0, (variance,)), _count_noise(store, 0)
        # With several classes every margin starts at the same value: only the weight sum is sent.
        return Sums([sums if len(sums) == 2 else sums[-1:], counts], noise=noise)
    by_category = [
        np.bincount(codes[~np.isnan(codes)].astype(np.int64), minlength=width)
        for codes, width in zip(values.T, categories.tolist(), strict=True)
        if width
    ]
    joined = np.concatenate([*by_category, np.empty(0, dtype=np.int64)]).astype(np.int64)
    return Sums([sums, coded["unseen"], joined, counts])


def _keep_promise(site: Site, request: PrivateOpenRequest) -> None:
    """Check what a run with noise promises, and store its budget."""
    message = "PrivateOpenRequest"
    if request.n_rows > COUNTED_ROWS:
        rule = f"must be <= {COUNTED_ROWS}, which units are fine enough for, got {request.n_rows}"
        raise ProtocolError(site.name, message, "n_rows", rule)
    if request.threshold:
        rule = f"must be 0, for the noise of all parties is needed, got {request.threshold}"
        raise ProtocolError(site.name, message, "threshold", rule)
    check_budget(site.config, site.store, request, request, len(request.names))
    gradient_bounds(site.store)


def count(site: Site, request: CountRequest | PrivateCountRequest) -> Sums:
    """Weights of the rows by the next digit of their values; each digit once a run."""
    store, noise = site.store, tuple[Noise, ...]()
    values, weights = store["train.values"], whole_weights(store, bounds_of(store))
    check_prefixes(site, request)
    if isinstance(request, PrivateCountRequest):
        noise = (_count_noise(store, request.digit),)
    else:
        _count_once(site, request, request.digit)
    counts = digit_counts(values, weights, request.prefixes, request.offsets, request.digit)
    return Sums([counts], store.facts[COUNT_BYTES], noise, follows=True)


def take_cuts(site: Site, request: GrowSumsRequest) -> None:
    """Take the joint bins, and code the rows by them."""
    store, message = site.store, type(request).__name__
    if "codes" in store:
        raise ProtocolError(site.name, message, "edges", "must be sent once")
    offsets, categories = request.edge_offsets, np.asarray(store["set_widths"])
    _check_widths(site, request, offsets)
    widths = np.diff(offsets)
    if np.where(categories > 0, widths > categories, widths < 1).any():
        rule = "must give a column of numbers a bin, and one of categories no more than it has"
        raise ProtocolError(site.name, message, "edge_offsets", rule)
    max_bins = int(widths[categories == 0].max(initial=0))
    check_within(site.config, store, message, "edge_offsets", max_bins, "max_bin")
    minima = np.full(len(widths), -np.float32(LARGEST), dtype=np.float32)
    numeric_cuts = Cuts(request.edges, offsets, minima)
    cuts = with_categories(numeric_cuts, categories, np.where(categories > 0, widths, 0))
    store["codes"], store.facts["missing_code"] = digitise(store["train.values"], cuts)
    # A bin's representative is its lower edge: the edge before it, or the column's minimum.
    lower_edges, filled = np.roll(cuts.edges, 1), cuts.widths > 0
    lower_edges[cuts.offsets[:-1][filled]] = cuts.minima[filled]
    store["representatives"], store["offsets"] = lower_edges, cuts.offsets


def whole_weights(store: Store, bounds: Bounds) -> Whole:
    """Weights of the training rows in units of counts; at least 1 if above 0."""
    weights = store["train.weights"]
    exponent = bounds.exponent(0, store.facts[COUNT_BYTES])
    return np.maximum(to_fixed(weights, exponent), weights > 0)


def _count_once(site: Site, request: OpenRequest | CountRequest, digit: int) -> None:
    """Check that rows are counted digit by digit, before the cuts; a resumed run may repeat."""
    facts, message = site.store.facts, type(request).__name__
    next_digit = facts.get(COUNTED, 0)
    if digit != next_digit or "codes" in site.store:
        rule = "none" if "codes" in site.store or next_digit == N_DIGITS else next_digit
        reason = "rows are counted by each digit once a run, before the cuts are sent"
        raise ProtocolError(site.name, message, "digit", f"must be {rule}, got {digit}; {reason}")
    hold_once(site.name, site.store, request, f"counts of digit {digit} were sent")
    facts[COUNTED] = digit + 1


def check_prefixes(site: Site, request: CountRequest | PrivateCountRequest) -> None:
    """Check that only numeric columns are counted."""
    offsets, message = request.offsets, type(request).__name__
    _check_widths(site, request, offsets)
    if np.diff(offsets)[np.asarray(site.store["set_widths"]) > 0].any():
        raise ProtocolError(site.name, message, "offsets", "must give columns of categories none")


def _check_widths(site: Site, request: Message, offsets: Array) -> None:
    """Check that offsets are those of the table's columns, within the site's limit."""
    check_sizes(site.name, request, n_columns=len(site.store["set_widths"]))
    widths = np.diff(offsets)
    max_bins = site.config.limits["most-bins"]
    numbers = widths[np.asarray(site.store["set_widths"]) == 0]
    if not site.config.simulated and numbers.max(initial=0) > max_bins:
        rule = f"must be <= {max_bins} (most-bins in the node config of {site.name})"
        raise ConfigError(f"max-bin {rule}, got {numbers.max()}")


# With noise, rows are routed by value; there are no bins.
def trees(site: Site, request: PrivateTreesRequest) -> Sums:
    """Add the last round's leaves; sum gradients and hessians at the leaves of the next trees."""
    store = site.store
    grown, nodes, whole = _route_rows(site, request)
    places, sums, first = np.empty((len(nodes[0]), len(nodes)), dtype=np.int64), [], 0
    for number, (tree, tree_nodes) in enumerate(zip(grown.trees, nodes, strict=True)):
        leaves = np.flatnonzero(tree["left"] == LEAF)
        places[:, number] = first + np.searchsorted(leaves, tree_nodes)
        sums.append(_by_node(tree, tree_nodes, whole[number])[leaves])
        first += len(leaves)
    # places: (n_rows, n_trees), an index into the leaves of all trees
    store["places"], store.facts["n_leaves"] = places, first
    noise = Noise("tree", request.round_id, _variances(store))
    return Sums([np.concatenate(sums)], noise=(noise,))


def scores(site: Site, request: PrivateScoresRequest) -> Sums:
    """Clipped sums and score histograms of the held-back rows; then drops all rows."""
    store = site.store
    bounds, budget, clip = bounds_of(store), budget_of(store), store.facts[PROMISED]["clip"]
    # Merged bins depend on row counts, so one row could move more than its own cell.
    unmerged = Site(replace(site.config, min_bin_rows=0), store)
    arrays, noise = [], []
    for subset in HELD_OUT:
        adder = ClippedNumbers(bounds, power_above(clip) if clip else 0)
        fields = score_subsets(unmerged, request, from_json, predict_margins, adder, (subset,))
        variance = budget.party_variance("scores", adder.sensitivity)
        sums, histogram = fields.values()
        arrays += [sums[: adder.n_totals], sums[adder.n_totals :], histogram]
        cell_noise = Noise("scores", 0, (variance,))
        noise += [Noise("scores", 0, (variance * TOTALS_NOISE**2,)), cell_noise, cell_noise]
    store.forget()
    return Sums(arrays, noise=tuple(noise))


def gradient_bounds(store: Store) -> RowBounds:
    """Bounds on a row's gradients; raises a ConfigError if the clip does not fit the objective."""
    clip = store.facts[PROMISED]["clip"]
    try:
        return row_bounds(store.facts["objective"], loss_parameters(store), clip)
    except ValueError as error:
        raise ConfigError(f"privacy.clip {error}") from None


def heaviest_units(store: Store) -> float:
    """Weight of the heaviest row, in units of counts."""
    bounds = bounds_of(store)
    return math.ldexp(1.0, bounds.exponent(0) + bounds.heaviest)


def _count_noise(store: Store, digit: int) -> Noise:
    # A row is counted once per numeric column.
    n_columns = int((np.asarray(store["set_widths"]) == 0).sum())
    sensitivity = math.sqrt(max(n_columns, 1)) * heaviest_units(store)
    return Noise("counts", digit, (budget_of(store).party_variance("counts", sensitivity),))


def _route_rows(site: Site, request: PrivateTreesRequest) -> tuple[Grown, Array, Whole]:
    """Trees, each row's node in them, gradients (n_trees, n_rows, 2) as int64."""
    store = site.store
    width = run_outputs(store)
    grown = read_trees(site, request, np.asarray(store["set_widths"]))
    if len(grown.trees) != width:
        rule = f"must be {width}, got {len(grown.trees)}"
        raise ProtocolError(site.name, type(request).__name__, "trees", rule)
    n_values = len(request.leaf_values)
    n_leaves = store.facts["n_leaves"] if "train.margins" in store else 0
    if n_values != n_leaves:
        rule = f"must be {n_leaves}, those of the last round, got {n_values}"
        raise ProtocolError(site.name, type(request).__name__, "leaf_values", rule)
    if "train.margins" not in store:
        check_outputs(site, request, "base_margin")
        begin_margins(store, request.base_margin)
    elif n_values:
        store["train.margins"] = store["train.margins"] + request.leaf_values[store["places"]]
    store.facts["n_leaves"] = 0  # a round's leaves are added once
    values, margins = store["train.values"], store["train.margins"]
    pairs = row_pairs(
        store.facts["objective"], margins, store["train.labels"], loss_parameters(store)
    )
    whole = gradient_bounds(store).whole(pairs, store["train.weights"], bounds_of(store))
    nodes = np.empty((width, len(values)), dtype=np.int32)
    for tree, tree_nodes in zip(grown.trees, nodes, strict=True):
        find_leaves(tree, values, tree_nodes, grown.sets)
    return grown, nodes, np.ascontiguousarray(whole.transpose(1, 0, 2))


def _by_node(tree: Tree, nodes: Array, whole: Whole) -> Whole:
    sums = np.zeros((len(tree), 2), dtype=np.int64)
    np.add.at(sums, nodes, whole)
    return sums


def _variances(store: Store) -> tuple[int, int]:
    """Noise variances of gradient and hessian sums at leaves."""
    budget = budget_of(store)
    gradients, hessians = gradient_bounds(store).sensitivities(bounds_of(store))
    return budget.party_variance("tree", gradients), budget.party_variance("tree", hessians)


HANDLERS: Mapping[type[Request], Handler] = {
    PrivateOpenRequest: open_sums,
    PrivateCountRequest: count,
    PrivateTreesRequest: trees,
    PrivateScoresRequest: scores,
}
