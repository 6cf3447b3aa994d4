"""PAX with ``privacy.trees=greedy``: trees whose splits are chosen by noised sums.

A level takes one exchange: sums of gradients and hessians by node, column and bin. A row is in one
node of a tree and in one bin of every column, so that m columns take sqrt(m) times the noise of
one. The leaves are summed again, with less noise (see ``strategies.pax_private``).

Source: Maddock, Cormode, Wang, Maple and Jha 2022, "Federated Boosted Decision Trees with
Differential Privacy" (arXiv:2210.02910): splits by histograms. Departures: sums are made consistent
(see ``fedapp.histograms.build``), a side of a split must stand out from noise, and leaves do
not follow from the histograms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from fedapp.conversation import Conversation, Parties
from fedapp.histograms.build import make_sums_consistent
from fedapp.histograms.fixed_point import Whole, from_fixed
from fedapp.histograms.split import Penalties
from fedapp.messages.handshake import HelloReply
from fedapp.messages.pax import PrivateSplitsRequest
from fedapp.trees.grow import Growth, Limits
from fedapp.trees.model import Grown, pack_trees
from fedapp.trees.rounds import SHRINKING, Boosting
from strategies.secure import MaskedSums

# Most bins of a column: with more, a side of a split has more noise. At an epsilon of 1, 16 and 32
# bins were better than 8, and all of them much better than 256.
SPLIT_BINS = 32
LEAST_SIDE = 2.0  # smallest hessian of a side of a split, in standard deviations of its noise


def grow_greedily(
    parties: Parties[HelloReply],
    boosting: Boosting,
    fields: Mapping[str, Any],
    exponents: Whole,
    deviation_of: Callable[[int], float],
) -> Conversation[Grown]:
    """Structures of one round's trees.

    Parameters
    ----------
    fields : of a ``PrivateTreesRequest`` except its trees.
    exponents : int64, shape (2,), of gradients and hessians as whole numbers.
    deviation_of : number of columns -> standard deviation of the noise of a bin's hessians.
    """
    allowed, cuts = boosting.growth().allowed, boosting.cuts
    columns = np.flatnonzero(allowed.any(axis=0))
    widths, deviation = cuts.widths[columns], deviation_of(len(columns))
    penalties = held_back(boosting.shape.penalties, side_deviation(deviation, int(widths.max())))
    shape = replace(boosting.shape, penalties=penalties)
    growth = Growth(boosting.width, cuts, allowed, shape, Limits(both_children=True))
    no_values = np.empty(0, dtype=np.float32)
    while growth.growing:
        first, n_wanted, structure = growth.level == 0, len(growth.wanted), _structure(growth)
        sends_cuts = first and not boosting.n_rounds
        packed = {**fields, **pack_trees(structure.trees, sets=structure.sets)}
        if not first:
            packed["leaf_values"] = no_values
        request = PrivateSplitsRequest(
            **packed,
            level=growth.level,
            drawn=columns.astype(np.int32),
            edges=cuts.edges if sends_cuts else no_values,
            edge_offsets=cuts.offsets if sends_cuts else np.empty(0, dtype=np.int64),
        )
        shapes = (n_wanted, int(widths.sum()), 2), (n_wanted, len(columns), 2)
        summed = yield from MaskedSums().ask(parties, request, *shapes)
        histograms, missing = (from_fixed(sums, exponents) for sums in summed)
        agreed = make_sums_consistent(histograms, missing, widths, deviation)
        if first:
            growth.set_roots(agreed.totals)
        # Back to the layout of all columns: 0 in those that were not drawn.
        is_drawn = np.isin(np.repeat(np.arange(cuts.n_columns), cuts.widths), columns)
        histograms = np.zeros((n_wanted, len(cuts.edges), 2))
        histograms[:, is_drawn] = agreed.histograms
        has_missing = np.zeros((n_wanted, cuts.n_columns), dtype=np.int32)
        has_missing[:, columns] = agreed.has_missing
        growth.split(histograms, has_missing)
    return _structure(growth)


def side_deviation(deviation: float, n_bins: int) -> float:
    """Standard deviation of the noise of one side's hessians, at most, from that of a bin's."""
    # Half of the bins on each side, of sums that are consistent: var = n/2 - (n/2)^2 / n.
    return deviation * math.sqrt(n_bins) / 2


def held_back(penalties: Penalties, deviation: float) -> Penalties:
    """The penalties, raised so that no split is chosen for noise; ``deviation`` is of a side."""
    return replace(
        penalties,
        reg_lambda=penalties.reg_lambda + SHRINKING * deviation,
        min_child_weight=max(penalties.min_child_weight, LEAST_SIDE * deviation),
    )


def _structure(growth: Growth) -> Grown:
    """The trees so far, without values of leaves."""
    grown = growth.grown()
    for tree in grown.trees:
        tree["value"] = 0
    return grown
