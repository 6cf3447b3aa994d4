"""The best splits of nodes, from sums over the rows in each bin.

Who has columns lists them and sums rows by bin (``list_columns``); who can read the sums searches
the best cut of each node (``best_cuts``). They may be two parties, with encrypted sums, or one
(``bagged.search_rows``). Bins too close to cut between (``CLOSE``) are merged, so a cut is allowed
between any two sums::

    node 0                               node 1
    column 2          column 5           column 2
    bin bin missing | bin bin bin bin  | bin bin     one sum each
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.arrays import Doubles, Flags, Floats, Ints
from fedapp.histograms.bins import spans
from fedapp.kernels import frozen, kernel
from fedapp.trees.forest.cart import (
    CLOSE,
    CRITERIA,
    DRAWN,
    EPSILON,
    LOWEST,
    NO_RANK,
    Bins,
    Candidates,
    Codes,
    RowFields,
    Rules,
    between,
    scan,
    scan_categories,
)
from fedapp.trees.structure import joined

Places = npt.NDArray[np.int32]
Sums = Doubles
Inside = tuple[Places, Ints]  # rows of some nodes, see ``inside_of``


@dataclass(frozen=True, slots=True, eq=False)
class Listing:
    """Columns of nodes that may be cut, and the number of sums of each."""

    ranks: Ints  # (n_nodes,): see ``cart.Candidates``
    n_columns: Ints  # (n_nodes,): listed columns; 0 if the node cannot be split
    columns: Ints  # (n_listed,): node by node, ascending within each
    n_bins: Ints  # (n_listed,): non-empty bins
    missing: npt.NDArray[np.uint8]  # (n_listed,): 1 with one more sum, of missing values
    unordered: npt.NDArray[np.uint8]  # (n_listed,): 1 for a column of categories
    sizes: Places  # (n_sums,): distinct rows of each sum

    @property
    def nodes(self) -> Ints:
        """Index of the node of each listed column."""
        return np.repeat(np.arange(len(self.n_columns)), self.n_columns)

    @property
    def ends(self) -> Ints:
        """Where the sums of each listed column end, starting with 0."""
        return np.concatenate(([0], np.cumsum(self.n_bins + self.missing)))

    def per_column(self, sums: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Total of the sums of each listed column."""
        totals: npt.NDArray[Any] = np.add.reduceat(sums, self.ends[:-1]) if len(sums) else sums
        return totals

    def rights(
        self, choices: Choices, nodes: Ints, codes: npt.NDArray[Any], n_categories: Ints
    ) -> Flags:
        """Which categories the cuts of some nodes send right; bool, (n, most categories).

        ``codes`` has the category of each sum, ``n_categories`` the number of each column, 0 if it
        is numeric. A category without rows in the node goes where missing values go.
        """
        listed, bits = choices.listed[nodes], np.unpackbits(choices.rights[nodes], axis=1)
        widths = n_categories[self.columns[listed]]
        is_category = np.arange(n_categories.max(initial=0)) < widths[:, None]
        rights: Flags = is_category & (choices.defaults[nodes] == 0)[:, None]
        cuts, places = spans(np.where(widths > 0, self.n_bins[listed], 0))
        rights[cuts, codes[self.ends[listed[cuts]] + places]] = bits[cuts, places]
        return rights

    def sides(self, choices: Choices, nodes: Ints) -> tuple[Ints, Ints, Flags]:
        """Of all sums of the columns that some nodes' cuts divide: the cut, the sum, and whether
        its rows go right."""
        listed, lasts = choices.listed[nodes], choices.cuts[nodes]
        starts = self.ends[listed]
        cuts, places = spans(self.ends[listed + 1] - starts)
        n_bins, is_coded = self.n_bins[listed], self.unordered[listed] > 0
        # A cut after the last bin is between present and missing values: the latter go left.
        is_right = places > np.where(lasts + 1 < n_bins, lasts, -1)[cuts]
        is_missing = places >= n_bins[cuts]
        is_right[is_missing] = choices.defaults[nodes[cuts[is_missing]]] == 0
        coded = np.flatnonzero(is_coded[cuts] & ~is_missing)
        bits = np.unpackbits(choices.rights[nodes], axis=1)
        is_right[coded] = bits[cuts[coded], places[coded]]
        return cuts, starts[cuts] + places, is_right

    def thresholds(self, listed: Ints, cuts: Ints, bounds: Places, bins: Bins) -> Floats:
        """Threshold of each cut of a listed column.

        ``LOWEST`` after a column's last bin, and for categories; for ``bounds`` see
        ``OwnerColumns``.
        """
        thresholds = np.full(len(listed), LOWEST, dtype=np.float32)
        is_number = (cuts + 1 < self.n_bins[listed]) & (self.unordered[listed] == 0)
        offsets = bins.offsets[self.columns[listed[is_number]]]
        lefts = (self.ends[listed] + cuts)[is_number]
        # Halfway from the last bin of a sum to the first of the next.
        below, above = offsets + bounds[1, lefts], offsets + bounds[0, lefts + 1]
        thresholds[is_number] = between(bins.highs[below], bins.lows[above])
        return thresholds


@dataclass(frozen=True, slots=True, eq=False)
class OwnerColumns:
    """What only the owner of listed columns knows."""

    bounds: Places  # (2, n_sums): first and last bin of each sum; of categories the code, twice
    # rows, places: (n_terms,): rows, and the index of the sum each is added to
    rows: Places
    places: Places
    sums: Sums  # (n_sums, n_fields): of the terms, where there are any; then no rows are listed

    def candidates(self, listing: Listing, choices: Choices, bins: Bins) -> Candidates:
        """The chosen cuts as splits of the owner's columns."""
        nodes = np.flatnonzero(choices.listed >= 0)
        listed, n_nodes = choices.listed[nodes], len(choices.listed)
        columns, thresholds = np.full(n_nodes, -1), np.full(n_nodes, LOWEST, dtype=np.float32)
        columns[nodes] = listing.columns[listed]
        widths = np.append(bins.n_categories, 0)[columns]  # of no column 0
        thresholds[nodes] = listing.thresholds(listed, choices.cuts[nodes], self.bounds, bins)
        rights = np.zeros((n_nodes, bins.n_categories.max(initial=0)), dtype=np.bool_)
        rights[nodes] = listing.rights(choices, nodes, self.bounds[0], bins.n_categories)
        return Candidates(
            choices.improvements,
            choices.ranks,
            columns,
            thresholds,
            choices.defaults,
            widths,
            np.packbits(rights, axis=1),
        )


def list_columns(
    codes: Codes,
    bins: Bins,
    inside: Inside,
    columns: Ints,
    keys: Ints,
    n_drawn: Ints,
    fewest: int,
    terms: RowFields | None = None,
) -> tuple[Listing, OwnerColumns]:
    """Columns to sum for the nodes of one tree, independent of labels.

    If all drawn columns are constant within a node, the first other column that is not takes their
    place, as in scikit-learn.

    Parameters
    ----------
    codes, bins : see ``cart``.
    columns, keys : shape (n_nodes, n_columns): see ``bagged.columns_of``.
    n_drawn : shape (n_nodes,): how many of the columns are drawn for each node.
    fewest : minimum number of rows of a node that is split, see ``cart.fewest_rows``.
    terms : of the rows of ``inside``, in their order; None where they are unknown.
    """
    table = tuple(frozen(codes, bins.lows, bins.highs, bins.offsets, *inside))
    ranks, is_listed = _list(*(table, *frozen(columns, keys, n_drawn), fewest))
    nodes, listed = frozen(*np.nonzero(is_listed))
    if terms is None:
        firsts, amounts, n_fields = np.empty(0, np.int64), np.empty((0, 0)), 0
    else:
        firsts, amounts, n_fields = terms.firsts, terms.amounts, len(terms.units)
    firsts, amounts = frozen(firsts, amounts)
    n_bins, missing, sizes, bounds, sums, rows, places = _fill(
        table, nodes, listed, firsts, amounts, n_fields, terms is None
    )
    unordered = (bins.n_categories[listed] > 0).astype(np.uint8)
    listing = Listing(ranks, is_listed.sum(axis=1), listed, n_bins, missing, unordered, sizes)
    return listing, OwnerColumns(bounds, rows, places, sums)


@kernel
def _list(table: Any, columns: Any, keys: Any, n_drawn: Any, fewest: int) -> Any:
    """The rank of each node, and which columns it lists; see ``Listing``."""
    codes, lows, highs, offsets, rows, starts = table
    no_code: Any = np.int64(-1)  # a literal would be a type of its own
    ranks = np.full(len(n_drawn), np.int64(NO_RANK))
    is_listed = np.zeros((len(n_drawn), len(codes)), np.bool_)
    for node in range(len(n_drawn)):
        start, end = starts[node], starts[node + 1]
        if end - start < fewest:
            continue
        for rank in range(columns.shape[1]):
            if rank >= n_drawn[node] and ranks[node] != NO_RANK:
                break
            column = columns[node, rank]
            first = offsets[column]
            missing = offsets[column + 1] - first
            low, high, n_missing = missing, no_code, 0
            for position in range(start, end):
                code: Any = np.int64(codes[column, rows[position]])
                if code == missing:
                    n_missing += 1
                else:
                    low, high = min(low, code), max(high, code)
            # The same throughout the node.
            if high < 0 or (n_missing == 0 and lows[first + high] <= highs[first + low] + CLOSE):
                continue
            if ranks[node] == NO_RANK:
                ranks[node] = DRAWN if rank < n_drawn[node] else keys[node, rank]
            is_listed[node, column] = True
    return ranks, is_listed


@kernel
def _fill(
    table: Any,
    nodes: Any,
    columns: Any,
    firsts: Any,
    amounts: Any,
    n_fields: int,
    with_rows: bool,
) -> Any:
    """Of listed columns the bins and whether values are missing; of their sums the rows, the first
    and last bin, and the sum; of each row in turn, with rows, the row and its sum."""
    codes, lows, highs, offsets, rows, starts = table
    no_code: Any = np.int64(-1)  # a literal would be a type of its own
    n_terms, most, widest, n_steps = 0, 0, 0, amounts.shape[1]
    for listed in range(len(columns)):
        width = offsets[columns[listed] + 1] - offsets[columns[listed]] + 1
        n_inside = starts[nodes[listed] + 1] - starts[nodes[listed]]
        most, widest = most + min(n_inside, width), max(widest, width)
        n_terms += n_inside
    n_bins, has_missing = np.zeros(len(columns), np.int64), np.zeros(len(columns), np.uint8)
    bounds, sizes = np.empty((2, most), np.int32), np.zeros(most, np.int32)
    sums = np.zeros((most, n_fields))
    listed_rows = np.empty((2, n_terms if with_rows else 0), np.int32)
    # Of each bin of a column: its sum, the number of its rows, and their total.
    numbers, counts = np.empty(widest, np.int32), np.zeros(widest, np.int32)
    totals = np.zeros((widest, n_fields))
    n_sums, term = 0, 0
    for listed in range(len(columns)):
        column = columns[listed]
        first = offsets[column]
        missing = offsets[column + 1] - first
        start, end = starts[nodes[listed]], starts[nodes[listed] + 1]
        low, high = missing, no_code
        for position in range(start, end):
            code: Any = np.int64(codes[column, rows[position]])
            counts[code] += 1
            for step in range(n_steps):
                totals[code, firsts[position] + step] += amounts[position, step]
            if code != missing:
                low, high = min(low, code), max(high, code)
        for step in range(low, high + 2):
            code = step if step <= high else missing
            if counts[code] == 0:
                continue
            is_first, is_bin = code == low, code != missing
            before = first + (0 if is_first else bounds[1, n_sums - 1])
            if is_bin and not is_first and lows[first + code] <= highs[before] + CLOSE:
                n_sums -= 1  # of the same sum
            else:
                bounds[0, n_sums] = code
                n_bins[listed] += is_bin
                has_missing[listed] = not is_bin
            bounds[1, n_sums], numbers[code] = code, n_sums
            sizes[n_sums] += counts[code]
            counts[code] = 0
            for field in range(n_fields):
                sums[n_sums, field] += totals[code, field]
                totals[code, field] = 0
            n_sums += 1
        for position in range(start, end if with_rows else start):
            listed_rows[0, term] = rows[position]
            listed_rows[1, term] = numbers[codes[column, rows[position]]]
            term += 1
    of_sums = sizes[:n_sums], bounds[:, :n_sums], sums[:n_sums]
    return n_bins, has_missing, *of_sums, listed_rows[0], listed_rows[1]


# At the party that can read the sums


@dataclass(frozen=True, slots=True, eq=False)
class NodeTotals:
    """Nodes that may be split, at the party with the labels."""

    sizes: Ints  # (n_nodes,): distinct rows
    totals: Sums  # (n_nodes, n_fields): sums over the rows, integers
    large: Flags  # (n_nodes,): whether there are enough rows
    is_open: Flags  # (n_nodes,): and labels differ
    weights: Sums  # (n_nodes,): of all rows of the node's tree

    @classmethod
    def of(
        cls,
        fields: RowFields,
        targets: Sums,
        counts: npt.NDArray[np.uint8],
        inside: Inside,
        fewest: int,
    ) -> NodeTotals:
        """Sum rows of the nodes of one tree.

        ``targets`` (class ids or numbers) and ``counts`` (how often the tree draws each row) have
        shape (n_rows,); for ``inside`` and ``fewest`` see ``list_columns``.
        """
        rows, starts = inside
        sizes = np.diff(starts)
        nodes = np.repeat(np.arange(len(sizes)), sizes)
        terms, shape = fields.of_rows(rows, counts), (len(sizes), len(fields.units))
        cells = np.ravel_multi_index((nodes[:, None], terms.fields), shape)
        # Integers, so the order of summation does not matter.
        totals = np.bincount(cells.ravel(), terms.amounts.ravel(), minlength=math.prod(shape))
        large = sizes >= fewest
        is_pure, filled = np.ones(len(sizes), dtype=np.bool_), np.flatnonzero(sizes)
        if len(filled):
            begins = starts[filled]
            lowest = np.minimum.reduceat(targets[rows], begins)
            is_pure[filled] = np.maximum.reduceat(targets[rows], begins) == lowest
        # Exact in any order, so no product of vectors, whose threads take longer to start.
        weights = np.full(len(sizes), (fields.weights * counts).sum(dtype=np.float64))
        sums = totals.reshape(shape).astype(np.float64)
        return cls(sizes, sums, large, large & ~is_pure, weights)


@dataclass(frozen=True, slots=True, eq=False)
class Choices:
    """The best cut of each node over listed columns."""

    # improvements, ranks: as in ``cart.Candidates``
    improvements: Sums
    ranks: Ints
    listed: Ints  # (n_nodes,): index of the listed column; -1 without a cut
    cuts: Ints  # (n_nodes,): the last bin that goes left
    defaults: npt.NDArray[np.uint8]  # (n_nodes,): 1 if missing goes left
    rights: npt.NDArray[np.uint8]  # (n_nodes, n_bytes): bits of the categories that go right


def best_cuts(
    listing: Listing, sums: Sums, nodes: NodeTotals, units: Sums, rules: Rules
) -> Choices:
    """The best cut of each node; ``sums``, (n_sums, n_fields), are in ``units``."""
    is_open = nodes.is_open
    least = rules.min_decrease * nodes.weights if rules.min_decrease else nodes.weights - np.inf
    columns = frozen(
        listing.nodes,
        listing.columns,
        listing.ends,
        listing.missing,
        listing.unordered,
        listing.sizes,
    )
    of_nodes = frozen(nodes.totals * units, is_open, least)
    how = CRITERIA[rules.criterion], rules.min_samples_leaf
    improvements, listed, cuts, defaults, is_right = _choose(
        *(columns, *frozen(sums, units), of_nodes, *how)
    )
    ranks, rights = np.where(is_open, listing.ranks, NO_RANK), np.packbits(is_right, axis=1)
    return Choices(improvements, ranks, listed, cuts, defaults, rights)


@kernel
def _choose(
    listing: Any, sums: Any, units: Any, of_nodes: Any, criterion: int, min_leaf: int
) -> Any:
    """Fields of ``Choices``, without ranks; the last is bool, (n_nodes, n_bins)."""
    nodes, columns, ends, missing, unordered, sizes = listing
    totals, is_open, least = of_nodes
    n_nodes, n_fields, widest, most = len(is_open), sums.shape[1], 0, 0
    for listed_id in range(len(nodes)):
        widest = max(widest, ends[listed_id + 1] - ends[listed_id])
        most = max(
            most,
            (ends[listed_id + 1] - ends[listed_id] - missing[listed_id]) * unordered[listed_id],
        )
    improvements, listed = np.full(n_nodes, np.nan), np.full(n_nodes, -1)
    cuts, defaults = np.zeros(n_nodes, np.int64), np.zeros(n_nodes, np.uint8)
    is_right, lefts = np.zeros((n_nodes, most), np.bool_), np.zeros(widest, np.bool_)
    # The bins of a column, and then its missing values.
    inside, counts = np.zeros((widest + 1, n_fields)), np.zeros(widest + 1, np.int64)
    for listed_id in range(len(nodes)):
        node, start, end = nodes[listed_id], ends[listed_id], ends[listed_id + 1]
        if not is_open[node]:
            continue
        # Element by element: slices take numba seconds to compile.
        for bin_id in range(end - start + 1):
            index, is_sum = start + bin_id, bin_id < end - start
            counts[bin_id] = sizes[index] if is_sum else 0
            for field in range(n_fields):
                inside[bin_id, field] = sums[index, field] * units[field] if is_sum else 0.0
        n_bins, total, cut = end - start - missing[listed_id], totals[node], 0
        if unordered[listed_id]:
            gain, side = scan_categories(inside, counts, total, n_bins, criterion, min_leaf, lefts)
        else:
            gain, cut, side = scan(inside, counts, total, n_bins, criterion, min_leaf)
        # Ties go to the lowest column, whatever the order of the draws.
        best = improvements[node] if listed[node] >= 0 else -np.inf
        is_tie = gain == best > -np.inf and columns[listed_id] < columns[listed[node]]
        if gain > best or is_tie:
            improvements[node], listed[node] = gain, listed_id
            cuts[node], defaults[node] = cut, side
            for bin_id in range(n_bins if unordered[listed_id] else 0):
                is_right[node, bin_id] = not lefts[bin_id]
    for node in range(n_nodes):
        if listed[node] >= 0 and improvements[node] + EPSILON < least[node]:
            improvements[node], listed[node] = np.nan, -1
    return improvements, listed, cuts, defaults, is_right


# Sums that another party claims, compared with the rows at the party with the labels; all exact


@dataclass(frozen=True, slots=True, eq=False)
class Extremes:
    """The least and most that a row of each node adds: to all fields if they are of classes, else
    to the weight and to weight times number; (n_nodes, 1 or 2)."""

    least: Sums
    most: Sums

    @classmethod
    def of(cls, terms: RowFields, inside: Inside) -> Extremes:
        """Of the nodes of one tree; ``terms`` are of the rows inside, in their order."""
        starts = inside[1]
        shape = len(starts) - 1, terms.amounts.shape[1]
        least, most, filled = np.zeros(shape), np.zeros(shape), np.flatnonzero(np.diff(starts))
        if len(filled):
            least[filled] = np.minimum.reduceat(terms.amounts, starts[filled])
            most[filled] = np.maximum.reduceat(terms.amounts, starts[filled])
        return cls(least, most)

    def fit(self, listing: Listing, sums: Sums) -> Flags:
        """Whether as many rows as each sum claims to have can have it; (n_sums,)."""
        nodes = np.repeat(listing.nodes, listing.n_bins + listing.missing)
        is_of_classes = self.least.shape[1] < sums.shape[1]
        amounts = sums.sum(axis=1, keepdims=True) if is_of_classes else sums
        sizes = listing.sizes[:, None]
        least, most = sizes * self.least[nodes], sizes * self.most[nodes]
        fits: Flags = np.all((least <= amounts) & (amounts <= most), axis=1)
        return fits


@dataclass(frozen=True, slots=True, eq=False)
class LeftClaims:
    """Sums behind the splits of a level, of the rows that these send left."""

    splits: Ints  # (n,): index among the level's splits, ascending
    columns: Ints  # (n,): number of the column at its owner
    sizes: Ints  # (n,): distinct rows
    sums: Sums  # (n, n_fields)

    @classmethod
    def none(cls) -> LeftClaims:
        """Of no splits."""
        nothing = np.empty(0, dtype=np.int64)
        return cls(nothing, nothing, nothing, np.empty((0, 0)))

    @classmethod
    def of(
        cls, splits: Ints, listing: Listing, sums: Sums, choices: Choices, nodes: Ints
    ) -> LeftClaims:
        """Of a party's chosen splits; ``nodes`` are those that they split."""
        sizes, totals = np.zeros(len(nodes), np.int64), np.zeros((len(nodes), sums.shape[1]))
        cuts, places, is_right = listing.sides(choices, nodes)
        lefts, is_left = cuts[~is_right], places[~is_right]
        np.add.at(sizes, lefts, listing.sizes[is_left])
        np.add.at(totals, lefts, sums[is_left])
        return cls(splits, listing.columns[choices.listed[nodes]], sizes, totals)

    @classmethod
    def joined(cls, parties: Sequence[LeftClaims]) -> LeftClaims:
        """Of several parties, in the order of the splits."""
        if not parties:
            return cls.none()
        every = joined(parties)
        order = np.argsort(every.splits)
        return cls(*(getattr(every, name)[order] for name in cls.__slots__))

    def first_false(self, lefts: NodeTotals) -> int | None:
        """Index of the first claim that is not that of its left child, or None."""
        false = (lefts.sizes != self.sizes) | (lefts.totals != self.sums).any(axis=1)
        return int(np.argmax(false)) if false.any() else None
