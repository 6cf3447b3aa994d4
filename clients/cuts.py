"""Cuts of all parties' columns, at a party: a sketch of its table, or counts of values.

Counted digit by digit, quantiles are those of all parties' rows, so all parties have the same bins
from the first tree on. Rows keep their values, and no representative leaves the party.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import numpy as np

from clients.handshake import Coded
from clients.secagg import ROW_BYTES, Masked, label_sums
from clients.shards import Shards, shards_of
from fedapp.arrays import Floats, Ints
from fedapp.data.scratch import batches, empty, side_by_side
from fedapp.errors import ConfigError, as_protocol_error
from fedapp.histograms.bins import Codes, Cuts, digitise, with_categories
from fedapp.histograms.build import build_all_histograms
from fedapp.histograms.fixed_point import Whole, to_fixed
from fedapp.histograms.groups import merge_sketch_bins
from fedapp.histograms.sketch import (
    BASE,
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
from fedapp.messages.fields import Array, Request, check_fields, check_sizes, fields_of
from fedapp.messages.pax_secure import PrivateOpenRequest
from fedapp.messages.secagg import SharedCuts
from fedapp.site.account import check_within
from fedapp.site.roles import role
from fedapp.site.settings import SiteConfig
from fedapp.site.store import Store
from fedapp.site.sums import Sums, bounds_of
from fedapp.trees.categories import CategorySets, set_numbers
from fedapp.trees.forest.summed import CellLayout, sum_cells
from fedapp.trees.objective import has_risk_sets, is_survival
from fedapp.trees.predict import Nodes
from fedapp.trees.structure import ROUTE, NodeList, Routes, first_bins, route_rows

R = TypeVar("R", bound=Request)


@dataclass(frozen=True, slots=True, eq=False)
class Binned:
    """Training rows as bins of their values."""

    codes: Codes  # (n_rows, n_columns)
    missing_code: int
    representatives: Floats  # (n_bins,): a value of each bin
    offsets: Ints  # (n_columns + 1,): the bins of each column
    _shards: list[Shards] = field(default_factory=list, init=False, repr=False)

    @classmethod
    def between(cls, values: Floats, cuts: Cuts) -> Binned:
        """Rows by the bins between cuts.

        A bin's representative is its lower edge: the edge before it, or the column's minimum.
        """
        lower_edges = np.roll(cuts.edges, 1)
        filled = cuts.widths > 0
        lower_edges[cuts.offsets[:-1][filled]] = cuts.minima[filled]
        return cls(*digitise(values, cuts, empty), lower_edges, cuts.offsets)

    @property
    def widths(self) -> Ints:
        """Number of bins of each column."""
        return np.diff(self.offsets)

    def surrogates(self, rows: slice) -> Floats:
        """Some rows, with the representative of each value's bin."""
        return surrogates(self.codes[rows], self.missing_code, self.representatives, self.offsets)

    def routed(self, nodes: Nodes, routes: Routes, sets: CategorySets) -> Nodes:
        """Nodes of the rows, (n_trees, n_rows), after some splits."""
        firsts = first_bins(*frozen(self.representatives, self.offsets, routes))
        if shards := shards_of(self.codes, self.missing_code, self._shards):
            return shards.routed(nodes, routes, sets, firsts)
        return route_rows(nodes, routes, self.codes, sets, firsts, self.missing_code, empty)

    def sums(
        self, columns: Array, terms: Array, nodes: Nodes, wanted: NodeList
    ) -> tuple[Array, Array]:
        """Histograms of the wanted nodes, and how many values are missing in each."""
        widths = self.widths[columns]
        if shards := shards_of(self.codes, self.missing_code, self._shards):
            return shards.sums(columns, widths, wanted, terms, nodes)
        return build_all_histograms(
            self.codes, self.missing_code, columns, widths, terms, nodes, *wanted
        )

    def cells(
        self, layout: CellLayout, terms: Whole, draws: Array, nodes: Nodes, wanted: NodeList
    ) -> Whole:
        """Sums of rows by cell, see ``summed``."""
        if shards := shards_of(self.codes, self.missing_code, self._shards):
            return shards.cells(layout, wanted, terms, draws, nodes)
        return sum_cells(self.codes, self.missing_code, layout, terms, draws, nodes, wanted)


@dataclass(frozen=True, slots=True, eq=False)
class Cutting:
    """Columns that get the cuts of all parties' rows, whose values are counted digit by digit."""

    categories: Ints  # of each column, 0 if numeric
    count_bytes: int = 8  # width of a count
    n_counted: int = 0  # digits by which rows have been counted

    def check(self, config: SiteConfig, request: Request, offsets: Array) -> None:
        """Check that offsets are those of the table's columns, within the site's limit."""
        check_sizes(config.name, request, n_columns=len(self.categories))
        max_bins = config.most_bins
        numbers = np.diff(offsets)[self.categories == 0]
        if not config.simulated and numbers.max(initial=0) > max_bins:
            rule = f"must be <= {max_bins} (most-bins in the node config of {config.name})"
            raise ConfigError(f"max-bin {rule}, got {numbers.max()}")

    def check_prefixes(self, config: SiteConfig, asked: Digits) -> None:
        """Check that only numeric columns are counted."""
        self.check(config, asked, asked.offsets)
        has_none = not np.diff(asked.offsets)[self.categories > 0].any()
        rule = "must give columns of categories none"
        check_fields(config.name, asked, ("offsets", has_none, rule))

    def after(self, party: str, asked: CountOrder | Digits, digit: int) -> Cutting:
        """With one more digit; a ProtocolError if rows are not counted digit by digit."""
        due = "none" if self.n_counted == N_DIGITS else self.n_counted
        reason = "rows are counted by each digit once a run, before the cuts are sent"
        rule = f"must be {due}, got {digit}; {reason}"
        check_fields(party, asked, ("digit", digit == self.n_counted, rule))
        return replace(self, n_counted=digit + 1)

    def counts(self, rows: Coded, prefixes: Array, offsets: Array, digit: int) -> Whole:
        """Weights of the training rows by a digit of their values."""
        weights, values = rows.weights["train"], rows.values["train"]
        exponent = bounds_of(rows.site.store).exponent(0, self.count_bytes)
        counts = np.zeros((len(prefixes), BASE), dtype=np.int64)
        for some in batches(len(weights), ROW_BYTES):
            of_rows = weights[some]
            whole = np.maximum(to_fixed(of_rows, exponent), of_rows > 0)  # at least 1 if above 0
            counts += digit_counts(values[some], whole, prefixes, offsets, digit)
        return counts

    def cuts(self, config: SiteConfig, store: Store, asked: SharedCuts) -> Cuts:
        """The joint cuts of a request, checked."""
        message, offsets = type(asked).__name__, asked.edge_offsets
        categories, widths = self.categories, np.diff(asked.edge_offsets)
        self.check(config, cast(Request, asked), offsets)
        fits = not np.where(categories > 0, widths > categories, widths < 1).any()
        rule = "must give a column of numbers a bin, and one of categories no more than it has"
        check_fields(config.name, asked, ("edge_offsets", fits, rule))
        max_bins = int(widths[categories == 0].max(initial=0))
        check_within(config, store, message, "edge_offsets", max_bins, "max_bin")
        minima = np.full(len(widths), -np.float32(LARGEST_FLOAT), dtype=np.float32)
        numeric_cuts = Cuts(asked.edges, offsets, minima)
        return with_categories(numeric_cuts, categories, np.where(categories > 0, widths, 0))


@role
class Counted(Masked):
    """State of a party whose columns are cut, by a sketch or by quantiles of all parties' rows."""

    cutting: Cutting
    bins: Binned  # once the training rows have bins

    def count_labels(self, opening: CountOrder | PrivateOpenRequest) -> tuple[Array, Whole, Whole]:
        """Join the run and code the rows: values the dictionary lacks, sums of labels, counts."""
        coded = self._code_columns(opening)
        bounds = self.join(opening)
        if isinstance(opening, CountOrder):
            self.cutting = replace(self.cutting, count_bytes=opening.count_bytes)
        is_private = isinstance(opening, PrivateOpenRequest)
        wanted = Descent(self.cutting.categories == 0, n_bins=2).wanted()
        counts = self.cutting.counts(self, *wanted, digit=0)
        return coded["unseen"], label_sums(self, bounds, is_private), counts

    def _code_columns(self, opening: Any) -> dict[str, Any]:
        """Code labels and categories; times become a last column, which is never split."""
        coded = self.code(opening)
        categories = self.category_counts
        if has_risk_sets(self.objective) and not self.config.shares_risks:
            rule = f"must be another for {self.name}, whose node config has share-risk-sums "
            raise ConfigError(f"objective {rule}false, got {self.objective}")
        if is_survival(self.objective):
            times, train = np.abs(self.labels["train"]), self.values["train"]
            train = side_by_side([*train.T, times], (len(train), train.shape[1] + 1))
            self.values = {**self.values, "train": train}
            categories = np.append(categories, 0)
        self.cutting = Cutting(categories)
        return coded

    def read_bins(self, asked: R) -> R:
        """Replace values by the joint bins of a request, if it has them; the request without."""
        if not isinstance(asked, SharedCuts) or not len(asked.edges):
            return asked
        is_first = "bins" not in self.site.store
        check_fields(self.name, asked, ("edges", is_first, "must be sent once"))
        cuts = self.cutting.cuts(self.config, self.site.store, asked)
        self.bins = Binned.between(self.values["train"], cuts)
        return replace(asked, edges=asked.edges[:0], edge_offsets=asked.edge_offsets[:0])

    def sketch_columns(self, asked: SketchOrder) -> dict[str, Any]:
        """Summarise the columns, and replace each value by its bin; fields of a ``SketchReply``."""
        coded = self._code_columns(asked)
        values = self.values["train"]
        weights = self.weights["train"]
        categories = self.cutting.categories
        sketched = sketch_and_code(values, weights, asked.n_bins, categories, empty)
        summary, codes, missing_code = sketched
        if least := self.config.least_bin_rows:
            summary = merge_sketch_bins(summary, values, weights, least)
        full = summary.with_categories(categories)
        if least or categories.any():
            used = used_categories([full], categories)
            cuts = with_categories(sketch_cuts(full), categories, used)
            codes, missing_code = digitise(values, cuts, empty)
        self.bins = Binned(codes, missing_code, full.representatives, full.offsets)
        return {**coded, **fields_of(summary, Sketch)}

    def open_counts(self, request: CountOrder) -> Sums:
        """Join the run, code labels and categories; sums of labels, counts of values."""
        unseen, sums, counts = self.count_labels(request)
        self.cutting = self.cutting.after(self.name, request, digit=0)
        values = self.values["train"]
        categories = self.cutting.categories.tolist()
        by_category = [
            np.bincount(codes[~np.isnan(codes)].astype(np.int64), minlength=width)
            for codes, width in zip(values.T, categories, strict=True)
            if width
        ]
        joined = np.concatenate([*by_category, np.empty(0, dtype=np.int64)]).astype(np.int64)
        return Sums([sums, unseen, joined, counts])

    def count_digit(self, request: Digits) -> Sums:
        """Weights of the rows by the next digit of their values; each digit once a run."""
        self.cutting.check_prefixes(self.config, request)
        self.cutting = self.cutting.after(self.name, request, request.digit)
        counts = self.cutting.counts(self, request.prefixes, request.offsets, request.digit)
        return Sums([counts], n_bytes=self.cutting.count_bytes, follows=True)


def at_roots(n_trees: int, margins: Mapping[str, Floats]) -> dict[str, Nodes]:
    """Nodes of all rows that have margins, at the roots of new trees."""
    nodes = {subset: empty((n_trees, len(rows)), np.int32) for subset, rows in margins.items()}
    for of_subset in nodes.values():
        of_subset[:] = 0
    return nodes


def read_splits(party: str, asked: SplitRows, categories: Ints) -> tuple[Routes, CategorySets]:
    """The splits of a request, and the sets of those by categories, given these of each column."""
    routes = np.empty(len(asked.split_trees), dtype=ROUTE)
    routes["tree"], routes["node"] = asked.split_trees, asked.split_nodes
    routes["left"], routes["column"] = asked.split_lefts, asked.split_columns
    routes["threshold"] = asked.split_thresholds
    routes["default_left"] = asked.split_defaults
    widths = categories[routes["column"]]
    routes["set"] = set_numbers(widths)
    with as_protocol_error(party, type(asked).__name__, "split_sets"):
        return routes, CategorySets(asked.split_sets, widths[widths > 0])
