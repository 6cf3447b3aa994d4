"""The best cuts from sums over another party's bins, at the party that can read the sums.

Scan, rules and ties are those of ``cart``, which searches where labels and columns are together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.kernels import frozen, kernel
from fedapp.trees.forest.cart import CRITERIA, EPSILON, NO_RANK, Ints, Rules, beats, fewest_rows
from fedapp.trees.forest.label_codes import RowFields
from fedapp.trees.forest.listing import Flags, Listing, Places
from fedapp.trees.forest.scan import scan, scan_categories

Sums = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class NodeTotals:
    """The nodes of one tree, at the party with the labels."""

    sizes: Ints  # (n_nodes,): distinct rows
    totals: Sums  # (n_nodes, n_fields): sums over the rows, integers
    large: Flags  # (n_nodes,): whether there are enough rows
    is_open: Flags  # (n_nodes,): and labels differ
    weight: float  # of all rows of the tree

    @classmethod
    def of(
        cls,
        fields: RowFields,
        targets: Sums,
        counts: npt.NDArray[np.uint8],
        inside: tuple[Places, Ints],
        fewest: tuple[int, int],
    ) -> NodeTotals:
        """Sum rows.

        ``targets`` (class ids or numbers) and ``counts`` (how often the tree draws each row) have
        shape (n_rows,); for ``inside`` and ``fewest`` see ``list_columns``.
        """
        rows, starts = inside
        sizes = np.diff(starts)
        nodes = np.repeat(np.arange(len(sizes)), sizes)
        terms = fields.numbers[rows] * counts[rows, None]
        # Integers, so the order of summation does not matter.
        totals = [np.bincount(nodes, field, minlength=len(sizes)) for field in terms.T]
        large = sizes >= fewest_rows(*fewest)
        is_pure, filled = np.ones(len(sizes), dtype=np.bool_), np.flatnonzero(sizes)
        if len(filled):
            begins = starts[filled]
            lowest = np.minimum.reduceat(targets[rows], begins)
            is_pure[filled] = np.maximum.reduceat(targets[rows], begins) == lowest
        weight = float(fields.weights @ counts)
        return cls(sizes, np.stack(totals, axis=1), large, large & ~is_pure, weight)


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

    @classmethod
    def joined(cls, pairs: Sequence[tuple[Listing, Choices]]) -> Choices:
        """Choices of several trees, one after the other, each with its listing."""
        widths = [len(listing.columns) for listing, _ in pairs]
        before = np.cumsum([0, *widths]).tolist()
        listed = [
            np.where(choices.listed < 0, -1, choices.listed + n)
            for (_, choices), n in zip(pairs, before, strict=False)
        ]
        arrays = {
            name: np.concatenate([getattr(choices, name) for _, choices in pairs])
            for name in cls.__slots__
            if name != "rights"
        }
        n_bytes = max(choices.rights.shape[1] for _, choices in pairs)
        rights = [
            np.pad(choices.rights, ((0, 0), (0, n_bytes - choices.rights.shape[1])))
            for _, choices in pairs
        ]
        return cls(**arrays | {"listed": np.concatenate(listed), "rights": np.concatenate(rights)})


def choose_cuts(
    listing: Listing, sums: Sums, nodes: NodeTotals, units: Sums, rules: Rules
) -> Choices:
    """The best cut of each node of a tree; ``sums``, (n_sums, n_fields), are in ``units``."""
    is_open, n_nodes = nodes.is_open, len(nodes.is_open)
    most = int((listing.n_bins * listing.unordered).max(initial=0))
    is_right = np.zeros((n_nodes, most), dtype=np.bool_)
    choices = Choices(
        np.full(n_nodes, np.nan),
        np.where(is_open, listing.ranks, NO_RANK),
        np.full(n_nodes, -1, dtype=np.int64),
        np.zeros(n_nodes, dtype=np.int64),
        np.zeros(n_nodes, dtype=np.uint8),
        np.empty((n_nodes, 0), dtype=np.uint8),
    )
    least = rules.min_decrease * nodes.weight if rules.min_decrease else -np.inf
    columns = listing.nodes, listing.columns, listing.ends, listing.missing, listing.unordered
    limits = CRITERIA[rules.criterion], rules.min_samples_leaf, least
    outputs = choices.improvements, choices.listed, choices.cuts, choices.defaults
    scaled = sums * units, nodes.totals * units
    _choose(*(*frozen(*columns, listing.sizes, *scaled, is_open), *limits, *outputs, is_right))
    return replace(choices, rights=np.packbits(is_right, axis=1))


@kernel
def _choose(
    nodes: Any,
    columns: Any,
    ends: Any,
    missing: Any,
    unordered: Any,
    sizes: Any,
    sums: Any,
    totals: Any,
    is_open: Any,
    criterion: int,
    min_leaf: int,
    least: float,
    improvements: Any,
    listed: Any,
    cuts: Any,
    defaults: Any,
    is_right: Any,
) -> None:
    widest = 0
    for place in range(len(nodes)):
        widest = max(widest, ends[place + 1] - ends[place])
    # Values 0, 1, 2 ..., one per bin, so that every cut is allowed.
    values = np.arange(widest + 1).astype(np.float32)
    lefts = np.zeros(widest + 1, np.bool_)
    inside = np.zeros((widest + 1, sums.shape[1]))
    counts = np.zeros(widest + 1, np.int64)
    for place in range(len(nodes)):
        node, start, end = nodes[place], ends[place], ends[place + 1]
        if not is_open[node]:
            continue
        n_bins = end - start - missing[place]
        inside[n_bins] = 0
        counts[n_bins] = 0
        # Element by element: slices take numba seconds to compile.
        for bin_id in range(end - start):
            counts[bin_id] = sizes[start + bin_id]
            for kind in range(sums.shape[1]):
                inside[bin_id, kind] = sums[start + bin_id, kind]
        last = n_bins - 1
        cut = 0
        if unordered[place]:
            gain, side = scan_categories(
                inside, counts, totals[node], 0, last, n_bins, criterion, min_leaf, lefts
            )
        else:
            gain, cut, _, side = scan(
                *(inside, counts, totals[node], 0, last, n_bins, 0, values, values),
                *(criterion, min_leaf),
            )
        best = improvements[node] if listed[node] >= 0 else -np.inf
        if beats(gain, columns[place], best, columns[listed[node]]):
            improvements[node] = gain
            listed[node], cuts[node], defaults[node] = place, cut, side
            for bin_id in range(n_bins if unordered[place] else 0):
                is_right[node, bin_id] = not lefts[bin_id]
    for node in range(len(listed)):
        if listed[node] >= 0 and improvements[node] + EPSILON < least:
            improvements[node] = np.nan
            listed[node] = -1
