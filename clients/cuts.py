"""Cuts of all parties' columns, at a party: a sketch of its table, or counts of values.

Counted digit by digit, quantiles are those of all parties' rows, so all parties have the same bins
from the first tree on. Rows keep their values, and no representative leaves the party.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar, cast

import numpy as np

from clients.handshake import Ints
from clients.scoring import Binned
from clients.secagg import Masked
from fedapp.errors import ConfigError, ProtocolError, as_protocol_error
from fedapp.histograms.bins import Codes, Cuts, digitise, with_categories
from fedapp.histograms.fixed_point import Whole, to_fixed
from fedapp.histograms.groups import merge_sketch_bins
from fedapp.histograms.sketch import (
    LARGEST_FLOAT,
    N_DIGITS,
    Descent,
    Sketch,
    digit_counts,
    sketch_and_code,
    sketch_cuts,
    surrogates,
    used_categories,
)
from fedapp.kernels import frozen
from fedapp.messages.cuts import CountOrder, Digits, SketchOrder, SplitRows
from fedapp.messages.fields import Array, Request, check_sizes, fields_of
from fedapp.messages.pax_secure import PrivateOpenRequest
from fedapp.messages.secagg import SharedCuts
from fedapp.site.account import check_within
from fedapp.site.roles import role
from fedapp.site.store import NoStateError
from fedapp.site.sums import Sums, bounds_of
from fedapp.trees.grow import ROUTE, Routes, first_bins
from fedapp.trees.objective import has_risk_sets, is_survival
from fedapp.trees.sets import CategorySets, set_numbers

R = TypeVar("R", bound=Request)


@role
class Counted(Masked):
    """State of a party whose columns are cut, by a sketch or by quantiles of all parties' rows."""

    category_widths: Ints  # categories of each column, 0 if numeric
    n_counted: int = 0  # digits by which rows have been counted
    count_bytes: int = 8  # width of a count

    def count_labels(self, opening: CountOrder | PrivateOpenRequest) -> tuple[Array, Whole, Whole]:
        """Join the run and code the rows: values the dictionary lacks, sums of labels, counts."""
        coded = self._code_columns(opening)
        bounds = self.join(opening)
        self.count_bytes = opening.count_bytes if isinstance(opening, CountOrder) else 8
        prefixes, offsets = Descent(self.category_widths == 0, n_bins=2).wanted()
        counts = self.digit_counts(prefixes, offsets, digit=0)
        is_private = isinstance(opening, PrivateOpenRequest)
        return coded["unseen"], self.label_sums(bounds, is_private), counts

    def _code_columns(self, opening: Any) -> dict[str, Any]:
        """Code labels and categories; times become a last column, which is never split."""
        coded = self.code(opening)
        self.category_widths = self.category_counts
        if has_risk_sets(self.objective) and not self.config.shares_risks:
            rule = f"must be another for {self.name}, whose node config has share-risk-sums "
            raise ConfigError(f"objective {rule}false, got {self.objective}")
        if is_survival(self.objective):
            times = np.abs(self.labels["train"])[:, None]
            self.values = {**self.values, "train": np.append(self.values["train"], times, axis=1)}
            self.category_widths = np.append(self.category_widths, 0)
        return coded

    def digit_counts(self, prefixes: Array, offsets: Array, digit: int) -> Whole:
        """Weights of the training rows by a digit of their values."""
        weights = self.weights["train"]
        exponent = bounds_of(self.site.store).exponent(0, self.count_bytes)
        whole = np.maximum(to_fixed(weights, exponent), weights > 0)  # at least 1 if above 0
        return digit_counts(self.values["train"], whole, prefixes, offsets, digit)

    def bins_of(self, asked: SharedCuts) -> Binned:
        """The rows by the joint bins of a request."""
        message = type(asked).__name__
        offsets = asked.edge_offsets
        categories = self.category_widths
        self._check_widths(asked, offsets)
        widths = np.diff(offsets)
        if np.where(categories > 0, widths > categories, widths < 1).any():
            rule = "must give a column of numbers a bin, and one of categories no more than it has"
            raise ProtocolError(self.name, message, "edge_offsets", rule)
        max_bins = int(widths[categories == 0].max(initial=0))
        check_within(self.config, self.site.store, message, "edge_offsets", max_bins, "max_bin")
        minima = np.full(len(widths), -np.float32(LARGEST_FLOAT), dtype=np.float32)
        numeric_cuts = Cuts(asked.edges, offsets, minima)
        cuts = with_categories(numeric_cuts, categories, np.where(categories > 0, widths, 0))
        # A bin's representative is its lower edge: the edge before it, or the column's minimum.
        lower_edges = np.roll(cuts.edges, 1)
        filled = cuts.widths > 0
        lower_edges[cuts.offsets[:-1][filled]] = cuts.minima[filled]
        return Binned(*digitise(self.values["train"], cuts), lower_edges, cuts.offsets)

    def read_bins(self, asked: R) -> R:
        """Replace values by the joint bins of a request, if it has them; the request without."""
        if not isinstance(asked, SharedCuts) or not len(asked.edges):
            return asked
        if self.binned is not None:
            raise ProtocolError(self.name, type(asked).__name__, "edges", "must be sent once")
        self.binned = self.bins_of(asked)
        return replace(asked, edges=asked.edges[:0], edge_offsets=asked.edge_offsets[:0])

    def check_prefixes(self, asked: Digits) -> None:
        """Check that only numeric columns are counted."""
        offsets = asked.offsets
        message = type(asked).__name__
        self._check_widths(asked, offsets)
        if np.diff(offsets)[self.category_widths > 0].any():
            rule = "must give columns of categories none"
            raise ProtocolError(self.name, message, "offsets", rule)

    def _check_widths(self, request: Digits | SharedCuts, offsets: Array) -> None:
        """Check that offsets are those of the table's columns, within the site's limit."""
        check_sizes(self.name, cast(Request, request), n_columns=len(self.category_widths))
        max_bins = self.config.limits["most-bins"]
        numbers = np.diff(offsets)[self.category_widths == 0]
        if not self.config.simulated and numbers.max(initial=0) > max_bins:
            rule = f"must be <= {max_bins} (most-bins in the node config of {self.name})"
            raise ConfigError(f"max-bin {rule}, got {numbers.max()}")

    def sketch_columns(self, asked: SketchOrder) -> dict[str, Any]:
        """Summarise the columns, and replace each value by its bin; fields of a ``SketchReply``."""
        coded = self._code_columns(asked)
        values = self.values["train"]
        weights = self.weights["train"]
        categories = self.category_widths
        summary, codes, missing_code = sketch_and_code(values, weights, asked.n_bins, categories)
        if least := self.config.least_bin_rows:
            summary, values = merge_sketch_bins(summary, values, weights, least)
        full = summary.with_categories(categories)
        if least or categories.any():
            used = used_categories([full], categories)
            codes, missing_code = digitise(
                values, with_categories(sketch_cuts(full), categories, used)
            )
        self.binned = Binned(codes, missing_code, full.representatives, full.offsets)
        return {**coded, **fields_of(summary, Sketch)}

    def open_counts(self, request: CountOrder) -> Sums:
        """Join the run, code labels and categories; sums of labels, counts of values."""
        unseen, sums, counts = self.count_labels(request)
        self._count_once(request, digit=0)
        values = self.values["train"]
        categories = self.category_widths.tolist()
        by_category = [
            np.bincount(codes[~np.isnan(codes)].astype(np.int64), minlength=width)
            for codes, width in zip(values.T, categories, strict=True)
            if width
        ]
        joined = np.concatenate([*by_category, np.empty(0, dtype=np.int64)]).astype(np.int64)
        return Sums([sums, unseen, joined, counts])

    def count_digit(self, request: Digits) -> Sums:
        """Weights of the rows by the next digit of their values; each digit once a run."""
        self.check_prefixes(request)
        self._count_once(request, request.digit)
        counts = self.digit_counts(request.prefixes, request.offsets, request.digit)
        return Sums([counts], n_bytes=self.count_bytes, follows=True)

    def _count_once(self, asked: CountOrder | Digits, digit: int) -> None:
        """Check that rows are counted digit by digit."""
        if digit != self.n_counted:
            rule = "none" if self.n_counted == N_DIGITS else self.n_counted
            reason = "rows are counted by each digit once a run, before the cuts are sent"
            rule = f"must be {rule}, got {digit}; {reason}"
            raise ProtocolError(self.name, type(asked).__name__, "digit", rule)
        self.n_counted = digit + 1

    def representatives(self) -> Array:
        """Training rows with the representative of each value's bin."""
        binned = self.bins
        return surrogates(binned.codes, binned.missing_code, binned.representatives, binned.offsets)

    @property
    def bins(self) -> Binned:
        """Bins of the training rows; an error until there are some."""
        if self.binned is None:
            raise NoStateError("bins")
        return self.binned

    def read_splits(self, asked: SplitRows) -> tuple[Routes, CategorySets]:
        """The splits of a request, and the sets of those by categories."""
        routes = np.empty(len(asked.split_trees), dtype=ROUTE)
        routes["tree"], routes["node"] = asked.split_trees, asked.split_nodes
        routes["left"], routes["column"] = asked.split_lefts, asked.split_columns
        routes["threshold"] = asked.split_thresholds
        routes["default_left"] = asked.split_defaults
        widths = self.category_widths[routes["column"]]
        routes["set"] = set_numbers(widths)
        with as_protocol_error(self.name, type(asked).__name__, "split_sets"):
            return routes, CategorySets(asked.split_sets, widths[widths > 0])

    def by_bins(self, routes: Routes, sets: CategorySets) -> tuple[Routes, Ints, Codes, int, Any]:
        """Arguments of ``route_codes`` that move training rows."""
        binned = self.bins
        firsts = first_bins(*frozen(binned.representatives, binned.offsets, routes))
        return routes, firsts, binned.codes, binned.missing_code, sets
