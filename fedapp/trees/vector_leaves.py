"""One tree for all outputs of a round, with a vector in each leaf: XGBoost's ``multi_output_tree``.

As in XGBoost 3.2, without constraints and columns of categories.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.histograms.bins import Cuts
from fedapp.histograms.build import Histogram
from fedapp.histograms.split import best_vector_splits, vector_weights
from fedapp.kernels import frozen
from fedapp.trees.grow import FREE, Bools, Growing, Growth, Limits, Shape
from fedapp.trees.model import LEAF, Grown, Tree, node_of


class VectorGrowth(Growth):
    """``Growth`` of a single tree whose sums are of ``n_outputs`` gradients and hessians."""

    def __init__(
        self,
        n_outputs: int,
        cuts: Cuts,
        allowed: Bools,
        shape: Shape,
        limits: Limits = FREE,
        state: Growing | None = None,
    ) -> None:
        self.node = node_of(n_outputs)
        self.cell = (n_outputs, 2)
        super().__init__(1, cuts, allowed, shape, limits, state)

    def _best(
        self,
        histograms: Histogram,
        missing: npt.NDArray[np.int32],
        allowed: Bools,
        bounds: npt.NDArray[np.float32],
    ) -> npt.NDArray[Any]:
        """The best split of each open node; ``bounds`` are none."""
        sums, penalties = self.state.sums, self.shape.penalties
        return best_vector_splits(histograms, sums, missing, allowed, self.cuts, penalties)

    def _weigh(
        self,
        trees: Sequence[Tree],
        places: npt.NDArray[np.int32],
        sums: npt.NDArray[np.float64],
        bounds: npt.NDArray[np.float32],
    ) -> None:
        """Set the weights of nodes, and their values as leaves."""
        (tree,) = trees
        nodes = places[:, 1]
        shape = self.shape
        weights, values = vector_weights(*(*frozen(sums), shape.penalties.of_leaves, shape.eta))
        tree["weight"][nodes] = weights
        tree["value"][nodes] = values
        # As XGBoost rounds: a root's value after its weight, and a sum after each output.
        roots = nodes == 0
        tree["value"][nodes[roots]] = weights[roots] * np.float32(shape.eta)
        hessians = np.zeros(len(nodes), dtype=np.float32)
        for of_output in sums[..., 1].T:
            of_output = np.where(roots, of_output.astype(np.float32), of_output)
            hessians = (hessians + of_output).astype(np.float32)
        tree["hessian"][nodes] = hessians

    def grown(self) -> Grown:
        """The tree so far."""
        grown = super().grown()
        return grown._replace(trees=tuple(map(_with_sums, grown.trees)))

    def padded(self) -> list[tuple[Tree, npt.NDArray[np.int64]]]:
        """See ``Queue.padded``."""
        return [(_with_sums(tree), numbers) for tree, numbers in super().padded()]


def _with_sums(tree: Tree) -> Tree:
    """The tree with sums of the children's float32 hessians at splits, as in XGBoost."""
    splits = np.flatnonzero((tree["left"] != LEAF) & (tree["gain"] > 0))
    lefts = tree["left"][splits]
    whole = tree.copy()
    whole["hessian"][splits] = tree["hessian"][lefts] + tree["hessian"][lefts + 1]
    return whole
