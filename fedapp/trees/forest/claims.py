"""Sums that another party claims of nodes, compared with their rows, at the party with the labels.

Fields of rows are integers whose float64 sums are exact (``label_codes``), so all comparisons are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedapp.trees.forest.cart import Ints
from fedapp.trees.forest.encrypted import Choices, Flags, Inside, Listing, NodeTotals, Sums
from fedapp.trees.forest.label_codes import RowFields
from fedapp.trees.structure import joined


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
        sizes, totals = list[int](), list[Sums]()
        rights = np.unpackbits(choices.rights[nodes], axis=1).astype(np.bool_)
        ends, listed = listing.ends, choices.listed[nodes]
        for one, cut, is_left, is_right in zip(
            listed, choices.cuts[nodes], choices.defaults[nodes], rights, strict=True
        ):
            n_bins = listing.n_bins[one]
            # After the last bin only missing values are left: see ``Listing.thresholds``.
            last = cut if cut + 1 < n_bins else -1
            goes_left = np.full(ends[one + 1] - ends[one], is_left == 1)  # missing values
            goes_left[:n_bins] = (
                ~is_right[:n_bins] if listing.unordered[one] else np.arange(n_bins) <= last
            )
            inside = slice(ends[one], ends[one + 1])
            sizes.append(int(listing.sizes[inside][goes_left].sum()))
            totals.append(sums[inside][goes_left].sum(axis=0))
        return cls(splits, listing.columns[listed], np.array(sizes), np.array(totals))

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
