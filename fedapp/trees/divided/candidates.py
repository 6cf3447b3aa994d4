"""Leaves of a tree that a row may reach, by the splits that one party knows.

A subtree without a passive party's split is one entry, because the active party knows where a row
ends in it::

          active                    active
         /      \\                  /      \\
     passive   active      ->   passive   entry 2
      /   \\     /   \\           /   \\
     a     b   c     d     entry 0  entry 1

Source: Chen et al. 2021, "Fed-EINI: An Efficient and Interpretable Inference Framework for Decision
Tree Ensembles in Federated Learning" (arXiv:2105.09540), section 3.1, Eq. 10 to 13. Departure: the
paper has an entry for every leaf.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedapp.trees.model import LEAF

Ints = npt.NDArray[np.int64]
Sides = npt.NDArray[np.bool_]  # shape (n_rows,): True goes left


@dataclass(frozen=True, slots=True, eq=False)
class Skeleton:
    """A tree cut at its entries; node 0 is the root, children come after their parents."""

    lefts: Ints  # (n_nodes,): left child, -1 at an entry; the right child is the next
    sources: Ints  # (n_nodes,): the node in the whole tree

    @property
    def entries(self) -> Ints:
        """Nodes that are entries, ascending."""
        return np.flatnonzero(self.lefts == LEAF)


def skeleton(lefts: npt.NDArray[np.int32], is_passive: npt.NDArray[np.bool_]) -> Skeleton:
    """A tree in which every subtree without a passive split becomes one entry.

    Parameters
    ----------
    lefts : int32, shape (n_nodes,): left child, -1 at a leaf; the right child is the next.
    is_passive : bool, shape (n_nodes,): splits of passive parties.
    """
    has_passive = is_passive.copy()
    for node in range(len(lefts) - 1, -1, -1):
        if lefts[node] != LEAF:
            has_passive[node] |= has_passive[lefts[node]] | has_passive[lefts[node] + 1]
    sources, new_lefts = [0], []
    for node in sources:  # the list grows in the loop
        new_lefts.append(len(sources) if has_passive[node] else LEAF)
        if has_passive[node]:
            sources += [int(lefts[node]), int(lefts[node]) + 1]
    return Skeleton(np.array(new_lefts, dtype=np.int64), np.array(sources, dtype=np.int64))


def candidates(lefts: Ints, sides: Mapping[int, Sides], n_rows: int) -> npt.NDArray[np.bool_]:
    """Entries that rows may reach by one party's splits; bool, shape (n_rows, n_entries).

    ``lefts`` is of a ``Skeleton``; ``sides`` has the party's splits by node. At others a row may go
    either way.
    """
    reached: dict[int, Sides] = {0: np.ones(n_rows, dtype=bool)}
    entries = []
    for node, left in enumerate(lefts.tolist()):
        inside = reached.pop(node)
        if left == LEAF:
            entries.append(inside)
            continue
        is_known = node in sides
        reached[left] = inside & sides[node] if is_known else inside
        reached[left + 1] = inside & ~sides[node] if is_known else inside
    return np.stack(entries, axis=1)
