"""Which nodes of a tree XGBoost splits, and in which order, where its leaves are limited.

XGBoost takes one node after the other from a queue until the tree has ``max_leaves``. With
``depthwise`` it takes the lowest number, with ``lossguide`` the largest gain, and of equal gains
the lowest number; children get the next two numbers.

Parties are asked level by level all the same. Nodes whose children are not evaluated yet can only
be passed by these, never the other way round: what is not among the first ``max_leaves - 1`` of the
evaluated nodes never will be. So each level splits those that are, and asks for their children. In
the end some of these splits have been passed by deeper ones; ``in_queue_order`` drops them::

    gains      a 5 -> b 4, c 3      max_leaves = 3: a and one more
    level 1    b 4 is first, c 3 is out      only b is split
    level 2    children of b: d 9, e 1       d and e are out: a and b make three leaves

Source: src/tree/driver.h of XGBoost 3.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np
import numpy.typing as npt

from fedapp.trees.model import LEAF, Tree
from fedapp.trees.sets import NO_SET
from fedapp.trees.size import GrowPolicy

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Queue:
    """The order of splits, and how many a tree may have; named as in XGBoost."""

    grow_policy: GrowPolicy = "depthwise"
    max_leaves: int = 0  # 0: no limit

    @property
    def is_by_level(self) -> bool:
        """Whether trees are split in the order of their nodes."""
        return self.grow_policy == "depthwise"

    def chosen(
        self, tree: Tree, nodes: Ints, gains: npt.NDArray[np.float32]
    ) -> tuple[Bools, Bools]:
        """Which open nodes of a level are split, and which of them so that children may be too.

        ``nodes`` ascend, and have splits of these ``gains``.
        """
        most = self.max_leaves - 1
        if not self.max_leaves:
            every = np.ones(len(nodes), dtype=bool)
            return every, every
        if self.is_by_level:
            n_left = most - int((tree["left"] != LEAF).sum())
            return np.arange(len(nodes)) < n_left, np.full(len(nodes), len(nodes) < n_left)
        all_gains = tree["gain"].copy()
        all_gains[nodes] = gains
        first = _by_gain(tree["left"], all_gains, most)
        # A child comes after its parent, so not if that is the last.
        return np.isin(nodes, first), np.isin(nodes, first[: most - 1] if most else first)

    def finished(self, tree: Tree) -> tuple[Tree, Ints, Ints]:
        """A grown tree in XGBoost's order, without splits that the queue never reached.

        ``tree`` has the values of its splits as leaves, too.

        Returns
        -------
        tree : the tree.
        nodes : int64, shape (n_nodes,): what number each of its nodes had as it grew.
        places : int64: the node that each node of the tree that grew is now, or is below.
        """
        every = np.arange(len(tree))
        if self.is_by_level:
            whole = tree.copy()
            whole["value"][whole["left"] != LEAF] = 0
            return whole, every, every
        most = self.max_leaves - 1 if self.max_leaves else len(tree)
        order = _by_gain(tree["left"], tree["gain"], most)
        lefts = tree["left"][order].astype(np.int64)
        nodes = np.concatenate(([0], np.stack((lefts, lefts + 1), axis=1).ravel()))
        places = np.full(len(tree), -1)
        places[nodes] = np.arange(len(nodes))
        for node in np.flatnonzero(places < 0):  # parents come first
            places[node] = places[tree["parent"][node]]
        ordered = tree[nodes]
        ordered["parent"][1:] = places[ordered["parent"][1:]]
        is_split = np.isin(nodes, order)
        ordered["left"] = np.where(is_split, places[np.maximum(ordered["left"], 0)], LEAF)
        dropped = ~is_split
        for name in ("column", "threshold", "default_left", "gain"):
            ordered[name][dropped] = 0
        ordered["set"][dropped] = NO_SET
        ordered["value"][is_split] = 0
        return ordered, nodes, places

    def padded(self, tree: Tree) -> tuple[Tree, Ints]:
        """As ``finished``, followed by the nodes that it drops, whose splits now gain nothing.

        All parties have these splits in their parts of a divided model, so rows go down them too;
        all leaves below one have the value that it has as a leaf. The second is as of ``finished``.
        """
        ordered, nodes, places = self.finished(tree)
        dropped = np.setdiff1d(np.arange(len(tree)), nodes)  # siblings stay side by side
        numbers = np.concatenate((nodes, dropped))
        now = np.argsort(numbers)
        whole = tree[numbers]
        whole["parent"][1:] = now[whole["parent"][1:]]
        is_leaf = whole["left"] == LEAF
        whole["left"] = np.where(is_leaf, LEAF, now[np.maximum(whole["left"], 0)])
        whole["value"] = ordered["value"][places[numbers]]
        whole["value"][~is_leaf] = 0
        whole["gain"][: len(nodes)] = ordered["gain"]
        whole["gain"][len(nodes) :] = 0
        return whole, numbers


def without_padding(tree: Tree) -> Tree:
    """A tree of ``Queue.padded`` without the nodes that were dropped."""
    is_split = (tree["left"] != LEAF) & (tree["gain"] > 0)
    first_nodes = tree[: 2 * int(is_split.sum()) + 1].copy()
    ends = (first_nodes["left"] != LEAF) & (first_nodes["gain"] == 0)
    for node in np.flatnonzero(ends):
        below = int(tree["left"][node])
        while tree["left"][below] != LEAF:
            below = int(tree["left"][below])
        first_nodes["value"][node] = tree["value"][below]
    for name in ("column", "threshold", "default_left"):
        first_nodes[name][ends] = 0
    first_nodes["left"][ends], first_nodes["set"][ends] = LEAF, NO_SET
    return first_nodes


BY_LEVEL = Queue()


def _by_gain(lefts: npt.NDArray[np.int32], gains: npt.NDArray[np.float32], most: int) -> Ints:
    """The first nodes that a queue by gain takes; nodes without a split have gain 0.

    ``lefts`` is ``LEAF`` where children are not evaluated.
    """
    order: list[int] = []
    queue = [(-float(gains[0]), 0, 0)] if gains[0] > 0 else []  # gain, final number, node
    while queue and len(order) < most:
        _, _, node = heappop(queue)
        if lefts[node] != LEAF:
            for side in (0, 1):
                child = int(lefts[node]) + side
                if gains[child] > 0:
                    heappush(queue, (-float(gains[child]), 2 * len(order) + 1 + side, child))
        order.append(node)
    return np.array(order, dtype=np.int64)
