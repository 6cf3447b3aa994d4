"""Trees that XGBoost itself grows, as arrays of ``NODE``, and its names of parameters.

Source: the model schema of XGBoost 3.2 (doc/model.schema).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.trees.custom import CUSTOM
from fedapp.trees.model import LEAF, NO_TREES, NODE, Grown, Tree, parents_of, with_sets
from fedapp.trees.objective import (
    LOSSES,
    PLAIN,
    REGRESSION,
    LossParameters,
    Objective,
    gradients,
    n_outputs,
)
from fedapp.trees.sets import Ints

Rows = npt.NDArray[np.float32]
XGBOOST_NAMES = {"reg_lambda": "lambda", "reg_alpha": "alpha"}  # all others are the same


def for_xgboost(
    objective: Objective,
    width: int,
    parameters: Mapping[str, float],
    loss: LossParameters = PLAIN,
) -> dict[str, Any]:
    """Parameters of trees as ``xgboost.train`` takes them.

    Parameters
    ----------
    objective : the loss.
    width : trees of a round, one an output.
    parameters : by their names in a run's settings.
    loss : of the objective.
    """
    read = {name: getattr(loss, name) for name in LOSSES[objective].reads}
    named = {XGBOOST_NAMES.get(name, name): value for name, value in parameters.items()}
    classes = {"num_class": width} if width > 1 else {}
    return {**named, **read, "objective": objective, "tree_method": "hist", **classes}


def grow_trees(
    objective: Objective,
    n_classes: int,
    parameters: Mapping[str, float],
    rows: tuple[Rows, Rows, Rows],
    margins: Rows,
    n_rounds: int,
    widths: Ints,
    loss: LossParameters = PLAIN,
) -> Grown:
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
    widths : int64, shape (n_columns,): categories of each column, 0 for one of numbers.
    loss : of the objective.

    Returns
    -------
    ``n_rounds * n_outputs`` trees; with k outputs, tree i adds to output ``i % k``.
    """
    import xgboost

    if not n_rounds:
        return NO_TREES
    values, labels, weights = rows
    width = n_outputs(objective, n_classes)
    matrix = xgboost.QuantileDMatrix(
        values,
        labels,
        weight=weights,
        base_margin=margins if width > 1 else margins[:, 0],
        max_bin=int(parameters["max_bin"]),
        **typed_columns(widths),
    )
    fixed = {"base_score": 0.5, "verbosity": 0}
    given = for_xgboost(objective, width, parameters, loss) | fixed
    own: dict[str, Any] = {}
    if objective == CUSTOM:
        given["objective"], own["obj"] = REGRESSION, _as_obj(labels, weights, loss)
    return trees_from_xgboost(xgboost.train(given, matrix, n_rounds, **own), widths)


def _as_obj(labels: Rows, weights: Rows, loss: LossParameters) -> Callable[[Rows, Any], Any]:
    """An objective that is a function, as ``xgboost.train`` takes it."""

    def pairs(margins: Rows, matrix: Any) -> tuple[Rows, Rows]:
        found = gradients(CUSTOM, margins.reshape(-1, 1), labels, weights, loss)
        return found[:, 0, 0], found[:, 0, 1]

    return pairs


def typed_columns(widths: Ints) -> dict[str, Any]:
    """What XGBoost's matrices take beside the values, so that codes are read as categories.

    Parameters
    ----------
    widths : int64, shape (n_columns,): categories of each column, 0 for one of numbers.
    """
    if not widths.any():
        return {}
    return {"feature_types": feature_types(widths), "enable_categorical": True}


def feature_types(widths: Ints) -> list[str]:
    """XGBoost's names of the types of columns; see ``typed_columns``."""
    return ["c" if width else "float" for width in widths.tolist()]


def trees_from_xgboost(booster: Any, widths: Ints) -> Grown:
    """The trees of an ``xgboost.Booster``, in its order, every float32 to the bit.

    Parameters
    ----------
    booster : of decision trees with one value a leaf, grown by ``tree_method="hist"``.
    widths : int64, shape (n_columns,): categories of each column, 0 for one of numbers.

    Returns
    -------
    Arrays of ``NODE``; with k outputs and no parallel trees, tree i adds to output ``i % k``.

    Raises
    ------
    ValueError : a tree has nodes that were pruned, or splits by categories a column that has none,
        or by others than it has.
    """
    document = json.loads(booster.save_raw("json"))
    trees = document["learner"]["gradient_booster"]["model"]["trees"]
    read = [_tree(fields, widths) for fields in trees]
    return with_sets(read, [codes for fields in trees for codes in _sets(fields)], widths)


def _sets(fields: Mapping[str, Any]) -> list[list[int]]:
    """The categories that each categorical split of a tree sends right, nodes ascending."""
    held = {}
    kept = zip(
        fields["categories_nodes"],
        fields["categories_segments"],
        fields["categories_sizes"],
        strict=True,
    )
    for node, start, size in kept:
        held[node] = fields["categories"][start : start + size]
    return [held[node] for node in sorted(held)]


def _tree(fields: Mapping[str, Any], widths: Ints) -> Tree:
    """One tree; where a split has its threshold, a leaf has its value."""
    lefts = np.array(fields["left_children"], dtype=np.int32)
    rights = np.array(fields["right_children"], dtype=np.int32)
    is_leaf = lefts == LEAF
    if (rights[~is_leaf] != lefts[~is_leaf] + 1).any():
        raise ValueError("a tree must have no pruned nodes")
    columns = np.array(fields["split_indices"], dtype=np.int32)
    by_set = np.array(fields["split_type"], dtype=bool)
    if ((widths[columns] > 0) != by_set)[~is_leaf].any():
        raise ValueError("a tree must split columns of categories by sets, and no others")
    conditions = np.array(fields["split_conditions"], dtype=np.float32)
    tree = np.zeros(len(lefts), dtype=NODE)
    tree["left"], tree["parent"] = lefts, parents_of(lefts, np.array([0, len(lefts)]))
    tree["column"] = columns
    tree["threshold"] = np.where(is_leaf | by_set, np.float32(0), conditions)
    tree["default_left"] = np.array(fields["default_left"], dtype=bool) & ~is_leaf
    tree["gain"], tree["hessian"] = fields["loss_changes"], fields["sum_hessian"]
    tree["weight"] = fields["base_weights"]
    tree["value"] = np.where(is_leaf, conditions, np.float32(0))
    return tree
