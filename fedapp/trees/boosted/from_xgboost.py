"""Trees that XGBoost itself grows, as arrays of ``NODE``, and its names of parameters.

Source: the model schema of XGBoost 3.2 (doc/model.schema).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.trees.model import LEAF, NODE, Tree, parents_of
from fedapp.trees.objective import Objective, n_outputs

Rows = npt.NDArray[np.float32]
XGBOOST_NAMES = {"reg_lambda": "lambda", "reg_alpha": "alpha"}  # all others are the same


def for_xgboost(
    objective: Objective, width: int, parameters: Mapping[str, float]
) -> dict[str, Any]:
    """Parameters of trees as ``xgboost.train`` takes them.

    Parameters
    ----------
    objective : the loss.
    width : trees of a round, one an output.
    parameters : by their names in a run's settings.
    """
    named = {XGBOOST_NAMES.get(name, name): value for name, value in parameters.items()}
    classes = {"num_class": width} if width > 1 else {}
    return {**named, "objective": objective, "tree_method": "hist", **classes}


def grow_trees(
    objective: Objective,
    n_classes: int,
    parameters: Mapping[str, float],
    rows: tuple[Rows, Rows, Rows],
    margins: Rows,
    n_rounds: int,
) -> tuple[Tree, ...]:
    """Boost some rounds on one party's rows, from margins that may come from anywhere.

    The margins are XGBoost's ``base_margin``. So the trees are those of a booster that had gone on
    from there, bit for bit, and no base score is estimated from the rows.

    Parameters
    ----------
    objective : the loss.
    n_classes : of all parties; 0 for regression.
    parameters : by their names in a run's settings; ``max_bin`` among them.
    rows : values, float32, shape (n_rows, n_columns), NaN where missing; labels and weights,
        float32, shape (n_rows,).
    margins : float32, shape (n_rows, n_outputs).
    n_rounds : >= 0.

    Returns
    -------
    ``n_rounds * n_outputs`` trees; with k outputs, tree i adds to output ``i % k``.
    """
    import xgboost

    if not n_rounds:
        return ()
    values, labels, weights = rows
    width = n_outputs(objective, n_classes)
    matrix = xgboost.QuantileDMatrix(
        values,
        labels,
        weight=weights,
        base_margin=margins if width > 1 else margins[:, 0],
        max_bin=int(parameters["max_bin"]),
    )
    fixed = {"base_score": 0.5, "verbosity": 0}
    given = for_xgboost(objective, width, parameters) | fixed
    return trees_from_xgboost(xgboost.train(given, matrix, n_rounds))


def trees_from_xgboost(booster: Any) -> tuple[Tree, ...]:
    """The trees of an ``xgboost.Booster``, in its order, every float32 to the bit.

    Parameters
    ----------
    booster : of decision trees with one value a leaf, grown by ``tree_method="hist"``.

    Returns
    -------
    Arrays of ``NODE``; with k outputs and no parallel trees, tree i adds to output ``i % k``.

    Raises
    ------
    ValueError : a tree splits by categories, or has nodes that were pruned.
    """
    document = json.loads(booster.save_raw("json"))
    model = document["learner"]["gradient_booster"]["model"]
    return tuple(_tree(tree) for tree in model["trees"])


def _tree(fields: Mapping[str, Any]) -> Tree:
    """One tree; where a split has its threshold, a leaf has its value."""
    lefts = np.array(fields["left_children"], dtype=np.int32)
    rights = np.array(fields["right_children"], dtype=np.int32)
    is_leaf = lefts == LEAF
    if any(fields["split_type"]) or (rights[~is_leaf] != lefts[~is_leaf] + 1).any():
        raise ValueError("a tree must have numeric splits and no pruned nodes")
    conditions = np.array(fields["split_conditions"], dtype=np.float32)
    tree = np.zeros(len(lefts), dtype=NODE)
    tree["left"], tree["parent"] = lefts, parents_of(lefts, np.array([0, len(lefts)]))
    tree["column"] = fields["split_indices"]
    tree["threshold"] = np.where(is_leaf, np.float32(0), conditions)
    tree["default_left"] = np.array(fields["default_left"], dtype=bool) & ~is_leaf
    tree["gain"], tree["hessian"] = fields["loss_changes"], fields["sum_hessian"]
    tree["weight"] = fields["base_weights"]
    tree["value"] = np.where(is_leaf, conditions, np.float32(0))
    return tree
