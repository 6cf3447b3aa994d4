"""SecureBoost at any party: the splits of a level, and where they send the rows.

A level's splits are made by those whose columns they are of, who tell which rows go left; after the
last level nobody is told but the active party.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fedapp.errors import ProtocolError
from fedapp.site.bits import sent_bits
from fedapp.site.store import Store
from fedapp.trees.divided.lookup import Lookup
from fedapp.trees.sets import CategorySets, set_numbers
from fedapp.trees.sides import Bits, Ints, Nodes, Places, moved, sides_of, slots_of

Sent = tuple[str, Ints, npt.NDArray[np.uint8]]  # who tells, places of the splits, their bits


def own_sides(
    store: Store,
    trees: Places,
    nodes: Places,
    columns: Ints,
    first_rights: Ints,
    defaults: npt.NDArray[np.uint8],
    sets: CategorySets,
) -> tuple[list[Bits], Ints]:
    """Note splits of own columns; which rows they send left, and their record ids.

    Parameters
    ----------
    trees, nodes : shape (n_splits,): what is split.
    columns : own numbers.
    first_rights : lowest bin that goes right; 0 sends missing rows alone to the left.
    defaults : 1 where missing goes left.
    sets : of the splits of columns of categories, in their order.
    """
    by_set = np.asarray(store["set_widths"])[columns] > 0
    # The active party knows the categories of training rows only; all others go left.
    widths = np.where(by_set, np.asarray(store["n_categories"])[columns], 0)
    sets = sets.widened(widths[by_set])
    edges, offsets = store["edges"], store["offsets"]
    thresholds = np.array(
        [
            edges[offsets[column] + n_left - 1] if n_left else store["minima"][column]
            for column, n_left in zip(columns, np.where(widths, 0, first_rights), strict=True)
        ],
        dtype=np.float32,
    )
    slots, sizes = slots_of(store["nodes"], trees, nodes)
    sides = sides_of(
        store["values"], columns, thresholds, defaults, slots, sizes, set_numbers(widths), sets
    )
    lookup = store.record(Lookup, "lookup")
    store.put("lookup", lookup.plus(Lookup.of(columns, thresholds, defaults, widths, sets)))
    first = len(lookup.columns)
    return np.split(sides, np.cumsum(sizes)[:-1]), np.arange(first, first + len(columns))


def nodes_after(
    nodes: Nodes, trees: Places, split: Places, lefts: Places, sent: Sequence[Sent]
) -> Nodes:
    """Rows at the children of a level's splits, whose sides are all known.

    Parameters
    ----------
    nodes : int32, shape (n_trees, n_rows): where each row is.
    trees, split, lefts : shape (n_splits,): what is split, and into which left child.
    sent : bits of all splits.

    Raises
    ------
    ProtocolError : bits do not fit, or a split is told of by nobody or by two.
    """
    slots, sizes = slots_of(nodes, trees, split)
    sides: dict[int, Bits] = {}
    for sender, places, bits in sent:
        known = places.tolist()
        if any(not 0 <= place < len(sizes) or place in sides for place in known):
            raise ProtocolError(sender, "Partition", "bits_of", "must be splits of its own")
        found = sent_bits(sender, "Partition", "bits", bits, sizes[places].tolist())
        sides |= dict(zip(known, found, strict=True))
    if len(sides) != len(sizes):
        raise ProtocolError(sent[0][0], "Partition", "bits_of", "must leave no split out")
    told = np.concatenate([np.empty(0, dtype=bool), *(sides[n] for n in range(len(sizes)))])
    return moved(nodes, lefts, slots, np.cumsum(sizes) - sizes, told)
