"""The trees of one boosting round, grown level by level from summed histograms."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.histograms.bins import Cuts
from fedapp.histograms.build import Histogram
from fedapp.histograms.split import (
    NO_BOUNDS,
    NO_ROWS,
    CategoryRules,
    Penalties,
    best_splits,
    node_weight,
    right_categories,
)
from fedapp.trees.boosted.limits import WIDEST, Limits, NodeId
from fedapp.trees.boosted.routes import ROUTE, Routes
from fedapp.trees.model import LEAF, NODE, Grown, Tree, in_order, split_trees, stack_trees
from fedapp.trees.sets import NO_SET, NO_SETS, CategorySets

FREE = Limits()
Rows = npt.NDArray[np.int64]
# Per node: sums in each bin, missing rows by column, and rows in each bin if counted.
Summed = tuple[Histogram, npt.NDArray[np.int32], Rows]


@dataclass(frozen=True, slots=True)
class Shape:
    """Limits of tree size, and leaf weights; named as in XGBoost."""

    max_depth: int
    eta: float
    penalties: Penalties
    rules: CategoryRules

    @classmethod
    def of(cls, parameters: Mapping[str, Any]) -> Shape:
        """From a run's settings; XGBoost keeps penalties in float32."""
        names = [field.name for field in fields(Penalties)]
        penalties = {name: float(np.float32(parameters[name])) for name in names}
        rules = {field.name: parameters[field.name] for field in fields(CategoryRules)}
        return cls(
            parameters["max_depth"],
            parameters["eta"],
            Penalties(**penalties),
            CategoryRules(**rules),
        )


class Growth:
    """The trees of one boosting round, all grown together.

    ``wanted`` lists the nodes whose histograms are needed next: first the roots, then the smaller
    child of each pair, since its sibling is the parent minus it (or both, with
    ``limits.both_children``). ``split`` takes these histograms and returns the splits.

    Parameters
    ----------
    n_trees : trees of the round, one per output.
    cuts : layout of the histograms.
    allowed : bool, shape (n_trees, n_columns): columns each tree may split.
    shape : limits of the trees.
    limits : of the columns and weights of single nodes.
    """

    def __init__(
        self,
        n_trees: int,
        cuts: Cuts,
        allowed: npt.NDArray[np.bool_],
        shape: Shape,
        limits: Limits = FREE,
    ) -> None:
        self.cuts, self.allowed, self.shape, self.limits = cuts, allowed, shape, limits
        self.level = 0
        self.wanted: list[NodeId] = [(tree, 0) for tree in range(n_trees)]
        self._open = list(self.wanted)
        self._nodes = [_leaves(1, parent=-1) for _ in range(n_trees)]
        self._sets = NO_SETS  # of all splits, in the order in which they were made
        self._sums: dict[NodeId, npt.NDArray[np.float64]] = {}
        self._parents: dict[NodeId, Summed] = {}

    @property
    def wanted_pairs(self) -> npt.NDArray[np.int32]:
        """Tree and node of each wanted node: int32, shape (n_wanted, 2), trees ascending."""
        return np.array(self.wanted, dtype=np.int32).reshape(-1, 2)

    @property
    def growing(self) -> bool:
        """Whether any node may still be split."""
        return bool(self._open)

    def set_roots(self, sums: npt.NDArray[np.float64]) -> None:
        """Set the sums over all rows, float64, shape (n_trees, 2): gradients and hessians."""
        for tree, total in enumerate(sums):
            self._sums[tree, 0] = total
            self._weigh((tree, 0), (-WIDEST, WIDEST))

    def split(
        self, histograms: Histogram, missing: npt.NDArray[np.int32], rows: Rows = NO_ROWS
    ) -> tuple[Routes, CategorySets]:
        """Split the open nodes of this level.

        Parameters
        ----------
        histograms : float64, shape (n_wanted, n_bins, 2), in the order of ``wanted``.
        missing : int32, shape (n_wanted, n_columns).
        rows : int64, shape (n_wanted, n_bins): rows in each bin, if ``min_child_rows`` is set.

        Returns
        -------
        routes : ``ROUTE``, one per split.
        sets : of the categorical splits, in the order of the routes.
        """
        fewest = self.limits.min_child_rows
        counts = rows if fewest else np.broadcast_to(NO_ROWS, (len(self.wanted), 0))
        node_sums = self._complete(histograms, missing, counts)
        if self.limits.both_children and self.level:
            self._update_sums(node_sums)
        open_histograms = np.stack([node_sums[node][0] for node in self._open])
        splits = best_splits(
            open_histograms,
            np.stack([self._sums[node] for node in self._open]),
            np.stack([node_sums[node][1] for node in self._open]),
            self.limits.columns(self.level, self._open, self._nodes, self.allowed),
            self.cuts,
            self.shape.penalties,
            self.shape.rules,
            self.limits.monotone,
            self._bounds(),
            np.stack([node_sums[node][2] for node in self._open]),
            fewest,
        )
        node_splits = [(n, s) for n, s in zip(self._open, splits, strict=True) if s["column"] >= 0]
        members = [self._right_members(split, node_sums[node][0]) for node, split in node_splits]
        sets = CategorySets.of([right for right in members if right is not None])
        routes, n_sets = [], 0
        for (node, split), right in zip(node_splits, members, strict=True):
            routes.append(self._apply(node, split, NO_SET if right is None else n_sets))
            n_sets += right is not None
        self._sets = self._sets.plus(sets)
        self.level += 1
        self._advance([node for node, _ in node_splits], node_sums)
        return np.array(routes, dtype=ROUTE), sets

    def _bounds(self) -> npt.NDArray[np.float32]:
        """Lowest and highest leaf weight below each open node; empty without constraints."""
        if not len(self.limits.monotone):
            return NO_BOUNDS
        bounds = [self.limits.bounds(self._nodes[tree], node) for tree, node in self._open]
        return np.array(bounds, dtype=np.float32)

    def grown(self) -> Grown:
        """The trees so far."""
        return in_order([nodes.copy() for nodes in self._nodes], self._sets)

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """All that ``restored`` needs to resume from here."""
        nodes, offsets = stack_trees(self._nodes)
        parents = list(self._parents)
        histograms = [self._parents[parent][0] for parent in parents]
        missing = [self._parents[parent][1] for parent in parents]
        rows = [self._parents[parent][2] for parent in parents]
        n_bins, n_columns = len(self.cuts.edges), self.cuts.n_columns
        n_counted = n_bins if self.limits.min_child_rows else 0
        return {
            "level": np.array(self.level),
            "wanted": self.wanted_pairs,
            "open": np.array(self._open, dtype=np.int32).reshape(-1, 2),
            "nodes": nodes,
            "tree_offsets": offsets,
            "sets": self._sets.bits,
            "set_widths": self._sets.widths,
            "summed": np.array(list(self._sums), dtype=np.int32).reshape(-1, 2),
            "sums": np.array(list(self._sums.values())).reshape(-1, 2),
            "parents": np.array(parents, dtype=np.int32).reshape(-1, 2),
            "parent_histograms": np.array(histograms).reshape(-1, n_bins, 2),
            "parent_missing": np.array(missing, dtype=np.int32).reshape(-1, n_columns),
            "parent_rows": np.array(rows, dtype=np.int64).reshape(len(parents), n_counted),
        }

    @classmethod
    def restored(
        cls,
        read: Callable[[str], npt.NDArray[Any]],
        cuts: Cuts,
        allowed: npt.NDArray[np.bool_],
        shape: Shape,
        limits: Limits = FREE,
    ) -> Growth:
        """Undo ``arrays``, read by name; the other arguments as in the constructor."""
        growth = cls(0, cuts, allowed, shape, limits)
        growth.level = int(read("level"))
        growth.wanted, growth._open = _pairs(read("wanted")), _pairs(read("open"))
        trees = split_trees(read("nodes"), read("tree_offsets"))
        growth._nodes = [tree.copy() for tree in trees]
        growth._sets = CategorySets(read("sets"), read("set_widths"))
        growth._sums = dict(zip(_pairs(read("summed")), read("sums"), strict=True))
        kinds = ("histograms", "missing", "rows")
        sums = zip(*(read(f"parent_{kind}") for kind in kinds), strict=True)
        growth._parents = dict(zip(_pairs(read("parents")), sums, strict=True))
        return growth

    def _complete(
        self, histograms: Histogram, missing: npt.NDArray[np.int32], rows: Rows
    ) -> dict[NodeId, Summed]:
        """Histograms of all open nodes: those that came, and parents minus those."""
        node_sums: dict[NodeId, Summed] = dict(
            zip(self.wanted, zip(histograms, missing, rows, strict=True), strict=True)
        )
        for parent, (total, total_missing, total_rows) in self._parents.items():
            left, right = self._children(parent)
            if left in node_sums and right in node_sums:
                continue
            sent, other = (left, right) if left in node_sums else (right, left)
            sent_sums, sent_missing, sent_rows = node_sums[sent]
            node_sums[other] = (
                total - sent_sums,
                total_missing - sent_missing,
                total_rows - sent_rows,
            )
        return node_sums

    def _update_sums(self, node_sums: Mapping[NodeId, Summed]) -> None:
        """Use the open nodes' reported sums, not their parents': merged bins may differ."""
        for place, (histogram, missing, _) in node_sums.items():
            tree, node = place
            is_complete = self.allowed[tree] & (missing == 0) & (self.cuts.widths > 0)
            if is_complete.any():
                # Any column without missing rows adds up to the node's total.
                column = int(np.argmax(is_complete))
                bins = slice(self.cuts.offsets[column], self.cuts.offsets[column + 1])
                total = histogram[bins].sum(axis=0)
                if total[1] > 0:
                    self._sums[place] = total
                    self._weigh(place, self.limits.bounds(self._nodes[tree], node))

    def _advance(self, parents: Sequence[NodeId], node_sums: dict[NodeId, Summed]) -> None:
        """Open the children of the nodes just split, if the trees may grow deeper."""
        if self.level == self.shape.max_depth:
            parents = ()
        self._parents = {parent: node_sums[parent] for parent in parents}
        self._open, self.wanted = [], []
        for parent in parents:
            left, right = self._children(parent)
            self._open += [left, right]
            if self.limits.both_children:
                self.wanted += [left, right]
                continue
            # XGBoost's rule: sum over the child of smaller hessian, the left one if equal.
            fewer_right = self._sums[right][1] < self._sums[left][1]
            self.wanted.append(right if fewer_right else left)

    def _children(self, parent: NodeId) -> tuple[NodeId, NodeId]:
        """Both children of a node that was split."""
        tree, node = parent
        left = int(self._nodes[tree]["left"][node])
        return (tree, left), (tree, left + 1)

    def _right_members(self, split: np.void, histogram: Histogram) -> npt.NDArray[np.bool_] | None:
        """Which categories a split sends right; None for a threshold."""
        column = int(split["column"])
        if not self.cuts.by_category[column]:
            return None
        bins = slice(self.cuts.offsets[column], self.cuts.offsets[column + 1])
        used = right_categories(
            histogram[bins], int(split["cut"]), self.shape.penalties, self.shape.rules
        )
        right = np.zeros(self.cuts.categories[column], dtype=bool)
        right[: len(used)] = used
        return right

    def _apply(self, parent: NodeId, split: np.void, number: int) -> tuple[Any, ...]:
        """Split one node: write its children and return its route; ``number`` is its set's."""
        tree, node = parent
        nodes = self._nodes[tree]
        left, column = len(nodes), int(split["column"])
        edges, cut = self.cuts.column(column), split["cut"]
        threshold = edges[cut] if cut >= 0 else self.cuts.minima[column]
        if number != NO_SET:
            threshold = np.float32(0)
            nodes[node]["set"] = len(self._sets) + number
        nodes[node]["left"], nodes[node]["column"] = left, column
        nodes[node]["threshold"], nodes[node]["default_left"] = threshold, split["default_left"]
        nodes[node]["gain"], nodes[node]["value"] = split["gain"], 0
        self._nodes[tree] = np.concatenate((nodes, _leaves(2, parent=node)))
        self._sums[tree, left], self._sums[tree, left + 1] = split["left"], split["right"]
        # As in XGBoost, within the bounds of the parent.
        bounds = self.limits.bounds(self._nodes[tree], node)
        self._weigh((tree, left), bounds)
        self._weigh((tree, left + 1), bounds)
        return tree, node, left, column, threshold, bool(split["default_left"]), number

    def _weigh(self, place: NodeId, bounds: tuple[np.float32, np.float32]) -> None:
        """Set the weight of a node, within bounds, and its value as a leaf."""
        tree, node = place
        gradient, hessian = self._sums[place]
        with np.errstate(over="ignore"):  # ``check_range`` refuses infinite weights
            weight = node_weight(gradient, hessian, self.shape.penalties)
            weight = min(max(weight, bounds[0]), bounds[1])
            self._nodes[tree]["hessian"][node] = hessian
            self._nodes[tree]["weight"][node] = weight
            self._nodes[tree]["value"][node] = weight * np.float32(self.shape.eta)


def _leaves(n_nodes: int, parent: int) -> Tree:
    leaves = np.zeros(n_nodes, dtype=NODE)
    leaves["left"], leaves["parent"], leaves["set"] = LEAF, parent, NO_SET
    return leaves


def _pairs(array: npt.NDArray[Any]) -> list[NodeId]:
    return [(int(tree), int(node)) for tree, node in array]
