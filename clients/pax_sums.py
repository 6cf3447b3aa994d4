"""Party side of PAX with secure aggregation.

Quantiles of all parties' rows follow from counts by digit, so all parties have the same bins from
the first tree on. Rows keep their values, and no representative leaves the party.
"""

from __future__ import annotations

import numpy as np

from clients.dictionary import kept_categories
from clients.labels import keep_coding, loss_parameters
from clients.secure import join, label_sums
from fedapp.crypto.masking import SIZES
from fedapp.errors import ConfigError, DivergedError, ProtocolError
from fedapp.histograms.bins import Cuts, digitise, with_categories
from fedapp.histograms.fixed_point import Bounds, Whole, to_fixed
from fedapp.histograms.sketch import LARGEST, N_DIGITS, Descent, digit_counts
from fedapp.messages.fields import Array
from fedapp.messages.pax import CountRequest, OpenRequest, PrivateCountRequest
from fedapp.messages.secagg import SharedCuts
from fedapp.metrics.sums import DOUBLES, WholeNumbers
from fedapp.site.answer import Site
from fedapp.site.mail import hold_once
from fedapp.site.plan import check_within
from fedapp.site.store import Store
from fedapp.site.sums import Sums, bounds_of
from fedapp.trees.objective import whole_gradients
from fedapp.trees.sets import category_counts

# Facts of a store.
COUNT_BYTES = "count_bytes"  # width of a count
COUNTED = "counted"  # number of digits by which rows have been counted
MIN_CHILD_ROWS = "min_child_rows"  # in each child of a split, over all parties


class OwnTerms:
    """Terms of sums that each party sends in the clear: doubles."""

    adder = DOUBLES  # of scores

    def of_rows(self, pairs: Array) -> Array:  # float32, (n_trees, n_rows, 2)
        return pairs


class WholeTerms:
    """Terms of sums over all parties: whole numbers."""

    def __init__(self, site: Site) -> None:
        self._site, self._bounds = site, bounds_of(site.store)

    @property
    def adder(self) -> WholeNumbers:
        return WholeNumbers(self._bounds)

    def of_rows(self, pairs: Array) -> Array:
        store = self._site.store
        objective, loss = store.facts["objective"], loss_parameters(store)
        try:
            return whole_gradients(objective, pairs, self._bounds, loss)
        except ValueError as error:
            way = "a smaller eta or pax.aggregation=plain may help"
            raise DivergedError(f"{error}; {way}") from None


Terms = OwnTerms | WholeTerms


def open_sums(site: Site, request: OpenRequest) -> Sums:
    """Join the run, code labels and categories; sums of labels, counts of values."""
    if request.count_bytes not in SIZES:
        rule = f"must be one of {SIZES}, got {request.count_bytes}"
        raise ProtocolError(site.name, "OpenRequest", "count_bytes", rule)
    coded, store = keep_coding(site, request), site.store
    bounds = join(site, request, request)
    _count_once(site, request, digit=0)
    values = store["train.values"]
    categories = category_counts(kept_categories(store), values.shape[1])
    store["set_widths"] = categories
    prefixes, offsets = Descent(categories == 0, n_bins=2).wanted()
    store.facts[COUNT_BYTES] = request.count_bytes
    store.facts[MIN_CHILD_ROWS] = request.min_child_rows
    weights = whole_weights(store, bounds)
    counts = [
        np.bincount(codes[~np.isnan(codes)].astype(np.int64), minlength=width)
        for codes, width in zip(values.T, categories.tolist(), strict=True)
        if width
    ]
    return Sums(
        [
            label_sums(store, bounds),
            coded["unseen"],
            np.concatenate([*counts, np.empty(0, dtype=np.int64)]).astype(np.int64),
            digit_counts(values, weights, prefixes, offsets, digit=0),
        ]
    )


def count(site: Site, request: CountRequest) -> Sums:
    """Weights of the rows by the next digit of their values; each digit once a run."""
    store = site.store
    values, weights = store["train.values"], whole_weights(store, bounds_of(store))
    check_prefixes(site, request)
    _count_once(site, request, request.digit)
    counts = digit_counts(values, weights, request.prefixes, request.offsets, request.digit)
    return Sums([counts], store.facts[COUNT_BYTES], follows=True)


def take_cuts(site: Site, request: SharedCuts) -> None:
    """Take the joint bins, and code the rows by them."""
    store, message = site.store, type(request).__name__
    if "codes" in store:
        raise ProtocolError(site.name, message, "edges", "must be sent once")
    offsets, categories = request.edge_offsets, np.asarray(store["set_widths"])
    check_offsets(site, message, "edge_offsets", offsets, len(request.edges))
    widths = np.diff(offsets)
    if np.where(categories > 0, widths > categories, widths < 1).any():
        rule = "must give a column of numbers a bin, and one of categories no more than it has"
        raise ProtocolError(site.name, message, "edge_offsets", rule)
    max_bins = int(widths[categories == 0].max(initial=0))
    check_within(site.config, store, message, "edge_offsets", max_bins, "max_bin")
    if not _ascends(request.edges, offsets):
        raise ProtocolError(site.name, message, "edges", "must ascend in a column")
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
    """Check that only numeric columns are counted, with ascending prefixes."""
    offsets, message = request.offsets, type(request).__name__
    check_offsets(site, message, "offsets", offsets, len(request.prefixes))
    if np.diff(offsets)[np.asarray(site.store["set_widths"]) > 0].any():
        raise ProtocolError(site.name, message, "offsets", "must give columns of categories none")
    if not _ascends(request.prefixes, offsets):
        raise ProtocolError(site.name, message, "prefixes", "must ascend in a column")


def _ascends(numbers: Array, offsets: Array) -> bool:
    rises = numbers[1:] > numbers[:-1]
    # No rise is due where a column ends and the next begins.
    rises[offsets[1:-1][(offsets[1:-1] > 0) & (offsets[1:-1] < len(numbers))] - 1] = True
    return bool(rises.all())


def check_offsets(site: Site, message: str, field: str, offsets: Array, n_all: int) -> None:
    """Check that offsets divide ``n_all`` values among the columns, within the site's limit."""
    n_columns = len(site.store["set_widths"])
    widths = np.diff(offsets)
    fits = len(offsets) == n_columns + 1 and offsets[0] == 0 and offsets[-1] == n_all
    if not fits or (widths < 0).any():
        raise ProtocolError(site.name, message, field, f"must divide {n_all} among {n_columns}")
    max_bins = site.config.limits["most-bins"]
    numbers = widths[np.asarray(site.store["set_widths"]) == 0]
    if not site.config.simulated and numbers.max(initial=0) > max_bins:
        rule = f"must be <= {max_bins} (most-bins in the node config of {site.name})"
        raise ConfigError(f"max-bin {rule}, got {numbers.max()}")
