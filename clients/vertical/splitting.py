"""A party while trees grow over the columns of all: it makes its splits, and moves the rows.

The owner of a column makes its splits: it stores them in its lookup table, and sends the others
which rows go left. Then every party knows where each row is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from clients.vertical.aligned import Aligned
from fedapp.errors import ProtocolError
from fedapp.messages.fields import Array, Letter
from fedapp.messages.handshake import pack_categories
from fedapp.site.mail import Letters
from fedapp.site.roles import role
from fedapp.site.store import part_digest, sent_bits, write_part
from fedapp.trees.divided import ActivePart, Lookup, Part
from fedapp.trees.forest.model import BaggedForest
from fedapp.trees.model import Ensemble
from fedapp.trees.predict import Bits, Nodes, Places, move_rows, sides_of, slots_of

Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
Sent = tuple[str, Ints, Bytes]  # sender, indices of its splits, bits of the rows that go left


@role
class Splitting(Aligned):
    """State of any party while trees grow."""

    lookup: Lookup  # the local splits
    nodes: Nodes  # (n_trees, n_rows): held-back rows move too, they are scored by leaves

    def store_splits(self, trees: Places, nodes: Places, splits: Lookup) -> tuple[Bits, Ints]:
        """Store local splits; returns which rows of their nodes go left, and how many each has."""
        slots, sizes = slots_of(self.nodes, trees, nodes)
        cuts = splits.columns, splits.thresholds, splits.defaults
        sides = sides_of(self.values, *cuts, slots, sizes, splits.numbers, splits.sets)
        self.lookup = self.lookup.plus(splits)
        return sides, sizes

    def to_others(self, letter: Letter) -> Letters:
        """The same letter for every other party."""
        return [(name, letter) for name in self.others]

    def split_table(self, shared: bool = True) -> dict[str, Any]:
        """Local splits and columns as fields of a ``SplitTable``; empty unless ``shared``."""
        lookup = self.lookup if shared else Lookup.empty()
        return {
            **{name: getattr(lookup, name) for name in Lookup.__slots__},
            "names": self.columns if shared else (),
            "kinds": self.kinds if shared else (),
            **pack_categories(self.categories if shared else ()),
        }

    def store_part(self, part: Part) -> Array:
        """Store the party's part of the model; returns its digest, uint8, shape (32,)."""
        write_part(self.folder, part)
        return np.frombuffer(part_digest(self.folder), dtype=np.uint8)

    def store_active_part(
        self,
        model: Ensemble | BaggedForest,
        records: Sequence[Ints],
        n_columns: Mapping[str, int],
        digests: Mapping[str, Array],
        threshold: float | None,
    ) -> None:
        """Store the active party's part; ``digests`` are of the others' parts."""
        part = ActivePart(
            **self.part_fields(),
            lookup=self.lookup,
            name=self.name,
            digests={name: digest.tobytes() for name, digest in digests.items()},
            model=model,
            records=tuple(records),
            n_columns=n_columns,
            threshold=threshold or None,  # 0 is no proposal
        )
        write_part(self.folder, part)


def rows_after(
    nodes: Nodes,
    trees: Places,
    split: Places,
    lefts: Places,
    sent: Sequence[Sent],
    padded: bool,
    letter: str = "Partition",
) -> Nodes:
    """Rows at the children of some splits, once the owners have sent which go left.

    Parameters
    ----------
    nodes : int32, shape (n_trees, n_rows).
    trees, split, lefts : shape (n_splits,): nodes that are split, and their left children.
    sent : bits of a sender's splits, one after the other: each in whole bytes if ``padded``.
    letter : class of the letters, for the ProtocolError if they do not have each split once.
    """
    slots, sizes = slots_of(nodes, trees, split)
    firsts = np.full(len(sizes), -1, dtype=np.int64)  # where each split's bits begin
    went_left, n_bits = [np.empty(0, dtype=bool)], 0
    for sender, places, bits in sent:
        is_new = ((places >= 0) & (places < len(sizes))).all() and (firsts[places] < 0).all()
        if not is_new or len(np.unique(places)) < len(places):
            raise ProtocolError(sender, letter, "bits_of", "must be its splits, each once")
        n_rows = sizes[places]
        went_left += sent_bits(
            sender, letter, "bits", bits, n_rows.tolist() if padded else [int(n_rows.sum())]
        )
        firsts[places] = n_bits + np.cumsum(n_rows) - n_rows
        n_bits += int(n_rows.sum())
    if (firsts < 0).any():
        raise ProtocolError(sent[0][0], letter, "bits_of", "must leave no split out")
    return move_rows(nodes, lefts, slots, firsts, np.concatenate(went_left))
