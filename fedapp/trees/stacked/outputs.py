"""The output of every tree of several ensembles for every row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from fedapp.trees.model import Tree
from fedapp.trees.predict import add_outputs
from fedapp.trees.sets import NO_SETS, CategorySets

Floats = npt.NDArray[np.float32]


def tree_outputs(
    ensembles: Sequence[Sequence[Tree]],
    n_trees: int,
    values: npt.NDArray[np.float32],
    sets: CategorySets = NO_SETS,
) -> Floats:
    """Leaf value of every tree for every row; float32, shape (n_rows, n_ensembles * n_trees).

    ::

        columns   | ensemble 0                  | ensemble 1      ...
                  | round 0      | round 1 ...  |
                  | class 0, 1 . |              |

    Parameters
    ----------
    ensembles : trees of each party, as XGBoost orders them: one per class per round.
    n_trees : columns of each ensemble; one with fewer trees is padded with zeros.
    values : float32, shape (n_rows, n_columns); NaN is missing.
    """
    outputs = np.zeros((len(values), len(ensembles) * n_trees), dtype=np.float32)
    trees = [tree for ensemble in ensembles for tree in ensemble]
    places = [
        place * n_trees + tree_id
        for place, ensemble in enumerate(ensembles)
        for tree_id in range(len(ensemble))
    ]
    add_outputs(trees, np.array(places, dtype=np.int64), values, outputs, sets)
    return outputs
