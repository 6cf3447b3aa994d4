"""Trees grown by XGBoost, as arrays of ``NODE``, and its parameter names.

Source: the model schema of XGBoost 3.2 (doc/model.schema).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
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
XGBOOST_NAMES = {"reg_lambda": "lambda", "reg_alpha": "alpha"}  # all others are equal


def for_xgboost(
    objective: Objective,
    width: int,
    parameters: Mapping[str, float],
    loss: LossParameters = PLAIN,
) -> dict[str, Any]:
    """Parameters for ``xgboost.train``, from a run's settings; ``width`` is the trees per round."""
    loss_parameters = {name: getattr(loss, name) for name in LOSSES[objective].reads}
    renamed = {XGBOOST_NAMES.get(name, name): value for name, value in parameters.items()}
    classes = {"num_class": width} if width > 1 else {}
    return {**renamed, **loss_parameters, "objective": objective, "tree_method": "hist", **classes}


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
    """Boost some rounds on one party's rows, from given margins.

    The margins are XGBoost's ``base_margin``, so the trees are bit for bit those of a booster that
    continues from there, and no base score is estimated.

    Parameters
    ----------
    n_classes : 0 for regression.
    parameters : a run's settings, with ``max_bin``.
    rows : values, float32, shape (n_rows, n_columns), NaN where missing; labels and weights,
        float32, shape (n_rows,).
    margins : float32, shape (n_rows, n_outputs).
    widths : int64, shape (n_columns,): number of categories of each column, 0 for a numeric one.

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
    settings = for_xgboost(objective, width, parameters, loss) | fixed

    def custom_objective(margins: Rows, matrix: Any) -> tuple[Rows, Rows]:
        pairs = gradients(CUSTOM, margins.reshape(-1, 1), labels, weights, loss)
        return pairs[:, 0, 0], pairs[:, 0, 1]

    if objective == CUSTOM:
        settings["objective"] = REGRESSION
    custom = custom_objective if objective == CUSTOM else None
    return trees_from_xgboost(xgboost.train(settings, matrix, n_rounds, obj=custom), widths)


def typed_columns(widths: Ints) -> dict[str, Any]:
    """Arguments of XGBoost's matrices so that codes are read as categories."""
    if not widths.any():
        return {}
    return {"feature_types": feature_types(widths), "enable_categorical": True}


def feature_types(widths: Ints) -> list[str]:
    """XGBoost's column types, from the number of categories of each column."""
    return ["c" if width else "float" for width in widths.tolist()]


def trees_from_xgboost(booster: Any, widths: Ints) -> Grown:
    """The trees of an ``xgboost.Booster`` in its order, every float32 to the bit.

    ``booster`` has trees with one value per leaf, grown by ``tree_method="hist"``. Raises
    ValueError for pruned nodes, or categorical splits that do not match ``widths``.
    """
    document = json.loads(booster.save_raw("json"))
    trees = document["learner"]["gradient_booster"]["model"]["trees"]
    parsed = [_tree(fields, widths) for fields in trees]
    return with_sets(parsed, [codes for fields in trees for codes in _sets(fields)], widths)


def _sets(fields: Mapping[str, Any]) -> list[list[int]]:
    """The categories that each categorical split of a tree sends right, nodes ascending."""
    codes_by_node = {}
    segments = zip(
        fields["categories_nodes"],
        fields["categories_segments"],
        fields["categories_sizes"],
        strict=True,
    )
    for node, start, size in segments:
        codes_by_node[node] = fields["categories"][start : start + size]
    return [codes_by_node[node] for node in sorted(codes_by_node)]


def _tree(fields: Mapping[str, Any], widths: Ints) -> Tree:
    """One tree. XGBoost has a leaf's value in place of a split's threshold."""
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
