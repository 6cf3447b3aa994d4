"""Trees as plain arrays, one after the other, and what they add to margins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.trees.model import LEAF, NODE, Tree, split_trees, stack_trees
from fedapp.trees.predict import add_outputs

Array = npt.NDArray[Any]

# What prediction needs, and what explanations need beside it; array -> field of NODE.
WALKED = {
    "lefts": "left",
    "columns": "column",
    "thresholds": "threshold",
    "defaults": "default_left",
    "values": "value",
}
EXPLAINED = {"gains": "gain", "hessians": "hessian", "weights": "weight"}
_DTYPES = {"defaults": np.uint8}


def forest_arrays(trees: Sequence[Tree], explained: bool = False) -> dict[str, Array]:
    """Arrays of a value a node, trees in turn, and ``offsets``, int64: where each tree begins.

    Parameters
    ----------
    explained : whether gains, hessians and weights are among them.
    """
    nodes, offsets = stack_trees(trees)
    names = {**WALKED, **(EXPLAINED if explained else {})}
    arrays = {
        name: nodes[field].astype(_DTYPES.get(name, NODE[field])) for name, field in names.items()
    }
    return {**arrays, "offsets": offsets}


def forest_trees(arrays: Mapping[str, Array]) -> tuple[Tree, ...]:
    """Undo ``forest_arrays``; what explanations need is 0 where it is not given."""
    offsets, lefts = arrays["offsets"], arrays["lefts"]
    nodes = np.zeros(len(lefts), dtype=NODE)
    for name, field in {**WALKED, **EXPLAINED}.items():
        if name in arrays:
            nodes[field] = arrays[name]
    starts = np.repeat(offsets[:-1], np.diff(offsets))
    inner = np.flatnonzero(lefts != LEAF)
    nodes["parent"] = -1
    for side in (0, 1):
        nodes["parent"][starts[inner] + lefts[inner] + side] = inner - starts[inner]
    return split_trees(nodes, offsets)


def scaled(tree: Tree, factor: float) -> Tree:
    """The tree with its values times a factor; gains and hessians stay those of the rows."""
    copy = tree.copy()
    for field in ("value", "weight"):
        copy[field] *= np.float32(factor)
    return copy


def add_trees(
    margins: npt.NDArray[np.float32], trees: Sequence[Tree], values: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """Margins with the trees' leaf values added, in float32 in the order of the trees.

    Parameters
    ----------
    margins : float32, shape (n_rows, n_outputs); tree i adds to output ``i % n_outputs``.
    values : float32, shape (n_rows, n_columns); NaN is missing.
    """
    moved = margins.copy()
    add_outputs(trees, np.arange(len(trees)) % margins.shape[1], values, moved)
    return moved
