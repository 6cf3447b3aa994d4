"""SecureBoost at any party: a level's splits, and where they send the rows.

The owner of a column makes its splits and sends all parties the rows that go left; after the last
level, only the active party.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fedapp.errors import ProtocolError
from fedapp.site.store import Store, sent_bits
from fedapp.trees.divided import Lookup
from fedapp.trees.predict import Bits, Ints, Nodes, Places, move_rows, sides_of, slots_of
from fedapp.trees.sets import CategorySets, set_numbers

Sent = tuple[str, Ints, npt.NDArray[np.uint8]]  # sender, indices of the splits, their bits


def own_sides(
    store: Store,
    trees: Places,
    nodes: Places,
    columns: Ints,
    first_rights: Ints,  # lowest bin that goes right; 0 sends only missing values left
    defaults: npt.NDArray[np.uint8],  # 1 where missing values go left
    sets: CategorySets,  # one per split by categories, in order
) -> tuple[list[Bits], Ints]:
    """Store splits of local columns; returns the rows they send left, and their record ids."""
    is_categorical = np.asarray(store["set_widths"])[columns] > 0
    # The active party knows the categories of training rows only; all others go left.
    widths = np.where(is_categorical, np.asarray(store["n_categories"])[columns], 0)
    sets = sets.widened(widths[is_categorical])
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
    """Rows at the children of a level's splits; ``nodes`` is int32, shape (n_trees, n_rows)."""
    slots, sizes = slots_of(nodes, trees, split)
    sides: dict[int, Bits] = {}
    for sender, places, bits in sent:
        indices = places.tolist()
        if any(not 0 <= index < len(sizes) or index in sides for index in indices):
            raise ProtocolError(sender, "Partition", "bits_of", "must be its splits, each once")
        sent_sides = sent_bits(sender, "Partition", "bits", bits, sizes[places].tolist())
        sides |= dict(zip(indices, sent_sides, strict=True))
    if len(sides) != len(sizes):
        raise ProtocolError(sent[0][0], "Partition", "bits_of", "must leave no split out")
    went_left = np.concatenate([np.empty(0, dtype=bool), *(sides[n] for n in range(len(sizes)))])
    return move_rows(nodes, lefts, slots, np.cumsum(sizes) - sizes, went_left)
