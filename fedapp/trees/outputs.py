"""What every tree of an ensemble says of every row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from fedapp.trees.model import Tree, stack_trees
from fedapp.trees.predict import leaf_of

Floats = npt.NDArray[np.float32]


def tree_outputs(
    ensembles: Sequence[Sequence[Tree]], n_trees: int, values: npt.NDArray[np.float32]
) -> Floats:
    """Leaf value of every tree for every row, without the base score.

    ::

        columns   | ensemble 0                  | ensemble 1      ...
                  | round 0      | round 1 ...  |
                  | class 0, 1 . |              |

    Parameters
    ----------
    ensembles : trees of each party, as XGBoost builds them: one a class a round.
    n_trees : columns of each ensemble; one with fewer trees is padded with zeros at its end.
    values : float32, shape (n_rows, n_columns); NaN is missing.

    Returns
    -------
    float32, shape (n_rows, n_ensembles * n_trees).
    """
    outputs = np.zeros((len(values), len(ensembles) * n_trees), dtype=np.float32)
    trees = [tree for ensemble in ensembles for tree in ensemble]
    places = [
        place * n_trees + tree_id
        for place, ensemble in enumerate(ensembles)
        for tree_id in range(len(ensemble))
    ]
    nodes, offsets = stack_trees(trees)
    names = ("left", "column", "threshold", "default_left", "value")
    lefts, columns, thresholds, default_lefts, leaf_values = (
        np.ascontiguousarray(nodes[name]) for name in names
    )
    _fill(
        lefts,
        columns,
        thresholds,
        default_lefts,
        leaf_values,
        offsets,
        np.array(places, dtype=np.int64),
        values,
        outputs,
    )
    return outputs


@numba.njit(cache=True, nogil=True)
def _fill(
    lefts: Any,
    columns: Any,
    thresholds: Any,
    default_lefts: Any,
    leaf_values: Any,
    offsets: Any,
    places: Any,
    values: Any,
    outputs: Any,
) -> None:
    """Walk every row down every tree."""
    for row in range(values.shape[0]):
        for tree in range(places.shape[0]):
            first = offsets[tree]
            leaf = leaf_of(values[row], first, lefts, columns, thresholds, default_lefts)
            outputs[row, places[tree]] = leaf_values[leaf]
