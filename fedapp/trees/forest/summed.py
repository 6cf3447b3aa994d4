"""A forest from sums over rows that several parties hold: by tree node, column and bin.

A *cell* is a bin of a column in a node, or its rows without a value. Each column of a node that is
asked for has its cells side by side, the missing values last; every party sums its rows, and sums
of all parties are added::

    node 0                                node 1
    column 2            column 5          column 0 ...
    bin bin bin missing bin bin missing   bin ...          one row of sums each

A row of sums has the weight by class, or the weight and weight times label; then the number of
distinct rows. All are whole numbers below 2^53, so sums do not depend on who holds which rows. The
search is that of ``encrypted``, which searches sums of another party too. Departures from
scikit-learn: a cut is allowed between any two bins, however close; a threshold is half way between
the edges of both; and a node of numbers is not split where no cut has an improvement above 0, as
sums do not show whether its labels are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.arrays import Doubles, Flags, Floats, Ints
from fedapp.histograms.bins import Codes, Cuts
from fedapp.histograms.build import inside_of
from fedapp.histograms.fixed_point import SPARE_BITS, Bounds, Whole, to_fixed
from fedapp.kernels import frozen, kernel
from fedapp.trees.categories import sets_of_rows
from fedapp.trees.forest.bagged import branches, by_tree
from fedapp.trees.forest.cart import LOWEST, Rules, fewest_rows
from fedapp.trees.forest.encrypted import Choices, Listing, NodeTotals, best_cuts
from fedapp.trees.model import Grown
from fedapp.trees.predict import Nodes, Places
from fedapp.trees.structure import Structure, joined, routes_of

EXACT_BITS = 53  # of a float64: sums of fewer are exact in any order


@dataclass(frozen=True, slots=True, eq=False)
class CellLayout:
    """Cells of some columns of some nodes."""

    columns: Places  # (n_nodes, n_asked)
    widths: Ints  # (n_columns,): bins of each column

    @property
    def sizes(self) -> Ints:
        """Cells of each column of each node, one after the other."""
        sizes: Ints = self.widths[self.columns.ravel()] + 1
        return sizes

    @property
    def starts(self) -> Ints:
        """First cell of each column of each node, and the end of the last."""
        return np.concatenate(([0], np.cumsum(self.sizes)))

    @property
    def n_cells(self) -> int:
        """All cells."""
        return int(self.sizes.sum())

    def moved(self, cells: Ints, joint: CellLayout, places: Ints) -> Ints:
        """Cells of this layout, a party's, in the joint one; ``places``: joint bin of each bin."""
        starts = self.starts
        pairs = np.searchsorted(starts, cells, side="right") - 1
        columns = self.columns.ravel()[pairs]
        bins = cells - starts[pairs]
        is_missing = bins == self.widths[columns]
        local = np.concatenate(([0], np.cumsum(self.widths)))[columns] + np.where(
            is_missing, 0, bins
        )
        firsts = np.concatenate(([0], np.cumsum(joint.widths)))[columns]
        of_bins = np.append(places, 0)[local] - firsts
        moved: Ints = joint.starts[pairs] + np.where(is_missing, joint.widths[columns], of_bins)
        return moved


# At a party


def exponents(n_classes: int, bounds: Bounds, is_weighted: bool) -> Ints:
    """Fractional bits of the sums of a cell; ``n_classes`` is 0 for numbers."""
    spare = 64 - SPARE_BITS - EXACT_BITS
    of_weights = bounds.exponent(0) - spare if is_weighted else 0
    if n_classes:
        return np.full(n_classes, of_weights)
    return np.array([of_weights, bounds.exponent(bounds.largest) - spare])


def row_terms(labels: Floats, weights: Floats, n_classes: int, powers: Ints) -> Whole:
    """What a row that is drawn once adds to the sums of a cell: int64, (n_rows, n_sums - 1)."""
    heavy = np.maximum(to_fixed(weights, int(powers[0])), weights > 0)
    if n_classes:
        return np.where(labels[:, None] == np.arange(n_classes), heavy[:, None], 0)
    return np.stack((heavy, to_fixed(weights.astype(np.float64) * labels, int(powers[1]))), axis=1)


def sum_cells(
    codes: Codes,
    missing_code: int,
    layout: CellLayout,
    terms: Whole,
    draws: npt.NDArray[np.uint8],
    nodes: Nodes,
    wanted: tuple[Places, Places],
) -> Whole:
    """Sums of a party's rows; int64, shape (n_cells, n_sums).

    Parameters
    ----------
    codes : shape (n_rows, n_columns): the bin of each value, or ``missing_code``.
    terms : see ``row_terms``; a row without weight has none.
    draws, nodes : shape (n_trees, n_rows): how often each tree draws a row, and where it is.
    wanted : trees and nodes of the layout, trees ascending.
    """
    starts, n_asked = layout.starts, layout.columns.shape[1]
    sums = np.zeros((starts[-1], terms.shape[1] + 1), dtype=np.int64)
    has_weight = terms.any(axis=1)
    for first, end in by_tree(wanted[0]):
        tree = int(wanted[0][first])
        is_drawn = (draws[tree] > 0) & has_weight
        rows, ends = inside_of(nodes[tree], is_drawn, wanted[1][first:end])
        cells = starts[first * n_asked : end * n_asked].reshape(-1, n_asked)
        columns, widths = layout.columns[first:end], layout.widths
        arrays = frozen(codes, rows, ends, columns, cells, widths, terms, draws[tree])
        _add(*(*arrays, missing_code, sums))
    return sums


@kernel
def _add(
    codes: Any,
    rows: Any,
    ends: Any,
    columns: Any,
    cells: Any,
    widths: Any,
    terms: Any,
    draws: Any,
    missing_code: int,
    sums: Any,
) -> None:
    n_terms = terms.shape[1]
    for node in range(len(ends) - 1):
        for asked in range(columns.shape[1]):
            column = columns[node, asked]
            for index in range(ends[node], ends[node + 1]):
                row = rows[index]
                code: Any = np.int64(codes[row, column])
                cell = cells[node, asked] + (widths[column] if code == missing_code else code)
                for kind in range(n_terms):
                    sums[cell, kind] += terms[row, kind] * draws[row]
                sums[cell, n_terms] += 1


# Where the sums of all parties are


@dataclass(frozen=True, slots=True, eq=False)
class Splits:
    """The best splits of some nodes; ``nodes`` are indices among those searched."""

    nodes: Ints  # (n_splits,)
    columns: Ints  # (n_splits,)
    thresholds: Floats  # (n_splits,)
    defaults: npt.NDArray[np.uint8]  # (n_splits,): 1 if missing goes left
    widths: Ints  # (n_splits,): categories of the column, 0 for a threshold
    rights: Flags  # (n_splits, most categories): which go right
    improvements: Doubles  # (n_splits,)
    sums: Whole  # (n_splits, 2, n_sums): of both children

    def of_nodes(self, nodes: Ints) -> Splits:
        """The same splits, with the searched nodes' indices in a longer list."""
        return replace(self, nodes=nodes[self.nodes])

    def in_order(self) -> Splits:
        """Sorted by node."""
        order = np.argsort(self.nodes)
        return Splits(*(getattr(self, name)[order] for name in self.__slots__))


@dataclass(frozen=True, slots=True, eq=False)
class Searched:
    """What a search of some nodes gives."""

    totals: Whole  # (n_nodes, n_sums)
    is_constant: Flags  # (n_nodes,): may be split, but by none of the columns
    splits: Splits

    @classmethod
    def joined(cls, parts: Sequence[Searched]) -> Searched:
        """Searches of some nodes, then of others."""
        ends = np.cumsum([len(part.totals) for part in parts])
        nodes = np.split(np.arange(ends[-1]), ends[:-1])
        pairs = zip(parts, nodes, strict=True)
        return cls(
            np.concatenate([part.totals for part in parts]),
            np.concatenate([part.is_constant for part in parts]),
            joined([part.splits.of_nodes(places) for part, places in pairs]),
        )


def may_split(sums: Whole, rules: Rules) -> Flags:
    """Which nodes have enough rows and, as far as the sums show it, labels that differ."""
    fewest = fewest_rows(rules.min_samples_split, rules.min_samples_leaf)
    n_kinds = (sums[..., :-1] > 0).sum(axis=-1) if rules.n_classes else 2
    is_open: Flags = (sums[..., -1] >= fewest) & (n_kinds > 1)
    return is_open


def search_sums(
    sums: Whole,
    layout: CellLayout,
    cuts: Cuts,
    powers: Ints,
    rules: Rules,
    root_sums: Whole | None,
    first_only: bool = False,
) -> Searched:
    """Search the best split of every node of a layout.

    Parameters
    ----------
    sums : shape (n_cells, n_sums).
    powers : see ``exponents``.
    root_sums : shape (n_nodes, n_sums): of each node's tree; None if the nodes are roots.
    first_only : whether only the first column that differs in the node is searched.
    """
    totals = np.add.reduceat(sums, layout.starts[:-1])[:: layout.columns.shape[1]]
    is_open = may_split(totals, rules)
    listed, n_sums, cells, codes = _listed(sums, layout, is_open, first_only)
    columns = layout.columns[listed].astype(np.int64)
    of_columns, owners = sums[cells], np.repeat(np.arange(len(columns)), n_sums)
    is_missing = codes == layout.widths[columns][owners]
    n_missing = np.bincount(owners[is_missing], minlength=len(columns))
    listing = Listing(
        np.zeros(len(totals), dtype=np.int64),
        listed.sum(axis=1),
        columns,
        n_sums - n_missing,
        n_missing.astype(np.uint8),
        cuts.by_category[columns].astype(np.uint8),
        of_columns[:, -1].astype(np.int32),
    )
    weights = node_weights(totals if root_sums is None else root_sums, powers, rules.n_classes)
    fields, of_nodes = (cell_sums[:, :-1].astype(np.float64) for cell_sums in (of_columns, totals))
    nodes = NodeTotals(totals[:, -1], of_nodes, is_open, is_open, weights)
    choices = best_cuts(listing, fields, nodes, np.ldexp(1.0, -powers), rules)
    # Where no cut improves a node of numbers, its labels may be equal.
    is_split = (choices.listed >= 0) & ((choices.improvements > 0) | (rules.n_classes > 0))
    chosen = _splits(np.flatnonzero(is_split), choices, listing, codes, of_columns, cuts)
    return Searched(totals, is_open & ~listed.any(axis=1), chosen)


def _listed(
    sums: Whole, layout: CellLayout, is_open: Flags, first_only: bool
) -> tuple[Flags, Ints, Ints, Ints]:
    """Which columns differ in each open node, and how many cells with rows each has of these;
    these cells, and the bin of each."""
    starts, shape = layout.starts[:-1], layout.columns.shape
    filled = np.flatnonzero(sums[:, -1])
    pairs = np.searchsorted(starts, filled, side="right") - 1
    n_filled = np.bincount(pairs, minlength=len(starts)).reshape(shape)
    listed = (n_filled > 1) & is_open[:, None]
    if first_only:
        listed &= np.cumsum(listed, axis=1) == 1
    chosen = listed.ravel()[pairs]
    return listed, n_filled[listed], filled[chosen], filled[chosen] - starts[pairs[chosen]]


def _splits(
    nodes: Ints, choices: Choices, listing: Listing, codes: Ints, sums: Whole, cuts: Cuts
) -> Splits:
    """The chosen cuts; ``codes`` and ``sums`` have a row for each sum of the listing."""
    listed, last = choices.listed[nodes], choices.cuts[nodes]
    defaults = choices.defaults[nodes]
    columns, starts = listing.columns[listed], listing.ends[listed]
    categories = cuts.categories if len(cuts.categories) else cuts.widths * 0
    widths = categories[columns]
    # A cut after the last bin is between present and missing values.
    is_cut = (last + 1 < listing.n_bins[listed]) & (widths == 0)
    thresholds = np.full(len(nodes), LOWEST, dtype=np.float32)
    firsts, lefts = cuts.offsets[columns[is_cut]], (starts + last)[is_cut]
    # Empty bins between both sides: any value in them divides the rows alike.
    below, above = cuts.edges[firsts + codes[lefts]], cuts.edges[firsts + codes[lefts + 1] - 1]
    thresholds[is_cut] = (below.astype(np.float64) + above) / 2
    splits, rows, is_right = listing.sides(choices, nodes)
    rights = listing.rights(choices, nodes, codes, categories)
    children = np.zeros((len(nodes), 2, sums.shape[1]), dtype=np.int64)
    np.add.at(children, (splits, is_right.astype(np.int64)), sums[rows])
    gains = choices.improvements[nodes]
    return Splits(nodes, columns, thresholds, defaults, widths, rights, gains, children)


def node_weights(sums: Whole, powers: Ints, n_classes: int) -> Doubles:
    """Weight of the rows of nodes of these sums; float64, of their shape without the last axis."""
    units: Doubles = np.ldexp(1.0, -powers)
    fields: Doubles = sums[..., :-1].astype(np.float64) * units
    weights: Doubles = fields[..., : n_classes or 1].sum(axis=-1)
    return weights


def node_values(sums: Whole, powers: Ints, n_classes: int, n_outputs: int) -> Doubles:
    """Values of nodes of these sums, float64, shape (..., n_outputs); see ``leaf_values``."""
    shares = sums[..., -1 - n_outputs : -1] * np.ldexp(1.0, -powers[-n_outputs:])
    totals = node_weights(sums, powers, n_classes)[..., None]
    values: Doubles = np.divide(shares, totals, where=totals > 0, out=shares * 0)
    return values


def forest_of(
    structure: Structure,
    levels: Sequence[Splits],
    root_sums: Whole,
    values_of: Callable[[Whole], Doubles],
) -> tuple[Grown, tuple[Doubles, ...]]:
    """Trees of all levels' splits, and the values of their nodes, 0 where one is split.

    ``values_of`` gives the values of nodes by their sums; those of the roots are ``root_sums``.
    """
    splits = joined(levels) if levels else None
    roots = values_of(root_sums)
    ends = np.cumsum(structure.n_nodes)
    starts = ends - structure.n_nodes
    values = np.zeros((ends[-1], roots.shape[1]))
    values[starts] = roots
    if splits is None:
        return branches(structure), tuple(np.split(values, ends[:-1]))
    where = structure.splits
    numbers, sets = sets_of_rows(splits.widths, np.packbits(splits.rights, axis=1))
    cuts = splits.columns, splits.thresholds, splits.defaults, numbers
    of_children = values_of(splits.sums)
    for side in range(2):
        values[starts[where.trees] + where.lefts + side] = of_children[:, side]
    values[starts[where.trees] + where.nodes] = 0
    routes = routes_of(where.trees, where.nodes, where.lefts, *cuts)
    return branches(structure, routes, sets), tuple(np.split(values, ends[:-1]))
