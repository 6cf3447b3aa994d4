"""Which leaves of a tree a row may reach, as far as one party can tell from its own splits.

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
    """A tree down to its entries; node 0 is the root, children stand behind their parents.

    Parameters
    ----------
    lefts : int64, shape (n_nodes,): left child, -1 at an entry; the right child is the next.
    sources : int64, shape (n_nodes,): the node of the whole tree.
    """

    lefts: Ints
    sources: Ints

    @property
    def entries(self) -> Ints:
        """Nodes that are entries, ascending."""
        return np.flatnonzero(self.lefts == LEAF)


def skeleton(lefts: npt.NDArray[np.int32], is_passive: npt.NDArray[np.bool_]) -> Skeleton:
    """A tree with every subtree that has no passive split made one entry.

    Parameters
    ----------
    lefts : int32, shape (n_nodes,): left child, -1 at a leaf; the right child is the next.
    is_passive : bool, shape (n_nodes,): nodes that passive parties split; no leaf among them.
    """
    within = is_passive.copy()
    for node in range(len(lefts) - 1, -1, -1):
        if lefts[node] != LEAF:
            within[node] |= within[lefts[node]] | within[lefts[node] + 1]
    sources, found = [0], []
    for node in sources:  # grows while it is walked
        found.append(len(sources) if within[node] else LEAF)
        if within[node]:
            sources += [int(lefts[node]), int(lefts[node]) + 1]
    return Skeleton(np.array(found, dtype=np.int64), np.array(sources, dtype=np.int64))


def candidates(lefts: Ints, sides: Mapping[int, Sides], n_rows: int) -> npt.NDArray[np.bool_]:
    """Entries that rows may reach by the splits one party knows.

    Parameters
    ----------
    lefts : of a ``Skeleton``.
    sides : of the party's own splits, by node; elsewhere a row may go either way.

    Returns
    -------
    bool, shape (n_rows, n_entries), entries in the order of their nodes.
    """
    reached: dict[int, Sides] = {0: np.ones(n_rows, dtype=bool)}
    entries = []
    for node, left in enumerate(lefts.tolist()):
        here = reached.pop(node)
        if left == LEAF:
            entries.append(here)
            continue
        known = node in sides
        reached[left] = here & sides[node] if known else here
        reached[left + 1] = here & ~sides[node] if known else here
    return np.stack(entries, axis=1)
