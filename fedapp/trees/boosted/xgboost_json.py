"""A model as XGBoost JSON, for prediction, SHAP and importance with stock XGBoost.

Source: the model schema of XGBoost 3.2 (doc/model.schema).
"""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np

from fedapp.trees.boosted.from_xgboost import feature_types
from fedapp.trees.custom import CUSTOM
from fedapp.trees.model import LEAF, Ensemble, Tree
from fedapp.trees.objective import REGRESSION
from fedapp.trees.sets import NO_SET, category_counts

VERSION = [3, 1, 0]  # the first version whose base_score is a vector
NO_PARENT = 2147483647
NO_THRESHOLD = np.finfo(np.float32).smallest_subnormal  # of a categorical split, as in XGBoost
# Objective: its block of parameters and the name in it; all others are as for logistic loss.
PARAMETER_BLOCKS = {
    "count:poisson": ("poisson_regression_param", "max_delta_step"),
    "reg:tweedie": ("tweedie_regression_param", "tweedie_variance_power"),
}


def to_xgboost_json(model: Ensemble) -> str:
    """The model as XGBoost would save it; a category is its code and has no name."""
    n_trees, width = len(model.trees), model.n_outputs
    booster = {
        "cats": {"enc": [], "feature_segments": [], "sorted_idx": []},
        "gbtree_model_param": {"num_parallel_tree": "1", "num_trees": str(n_trees)},
        "iteration_indptr": list(range(0, n_trees + 1, width)),
        "tree_info": [tree_id % width for tree_id in range(n_trees)],
        "trees": [_tree(tree_id, tree, model) for tree_id, tree in enumerate(model.trees)],
    }
    # For information only: the base-margin column, whose values XGBoost takes with the rows, and
    # whether the objective was a function.
    attributes = {"base_margin": model.margin_column} if model.margin_column else {}
    attributes |= {"objective": CUSTOM} if model.objective == CUSTOM else {}
    document = {
        "learner": {
            "attributes": attributes,
            # XGBoost allows no [, ] or < in a name.
            "feature_names": [re.sub(r"[\[\]<]", "_", name) for name in model.columns],
            "feature_types": feature_types(category_counts(model.categories, len(model.columns))),
            "gradient_booster": {"model": booster, "name": "gbtree"},
            "learner_model_param": {
                "base_score": "[" + ",".join(map(str, model.base_score)) + "]",
                "boost_from_average": "0",
                "num_class": str(width if width > 1 else 0),
                "num_feature": str(len(model.columns)),
                "num_target": "1",
            },
            "objective": _objective(model),
        },
        "version": VERSION,
    }
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False) + "\n"


def _objective(model: Ensemble) -> dict[str, Any]:
    """The loss with its parameters."""
    if model.objective == "multi:softprob":
        return {
            "name": model.objective,
            "softmax_multiclass_param": {"num_class": str(model.n_outputs)},
        }
    # XGBoost also saves its default objective for a function; predictions are margins.
    objective_name = REGRESSION if model.objective == CUSTOM else model.objective
    block, name = PARAMETER_BLOCKS.get(model.objective, ("reg_loss_param", "scale_pos_weight"))
    value = np.float32(getattr(model.parameters, name))
    return {"name": objective_name, block: {name: f"{value:.9g}"}}


def _tree(tree_id: int, tree: Tree, model: Ensemble) -> dict[str, Any]:
    """One tree; a leaf's value takes the place of a split's threshold."""
    is_leaf = tree["left"] == LEAF
    by_set = np.flatnonzero(tree["set"] != NO_SET) if len(model.sets) else np.empty(0, np.int64)
    codes_by_split = model.sets.take(tree["set"][by_set]).codes()
    sizes = [len(codes) for codes in codes_by_split]
    thresholds = tree["threshold"].copy()
    thresholds[by_set] = NO_THRESHOLD
    return {
        "base_weights": _floats(np.where(is_leaf, tree["value"], tree["weight"])),
        "categories": [code for codes in codes_by_split for code in codes],
        "categories_nodes": by_set.tolist(),
        "categories_segments": np.cumsum([0, *sizes])[:-1].tolist(),
        "categories_sizes": sizes,
        "default_left": tree["default_left"].astype(int).tolist(),
        "id": tree_id,
        "left_children": tree["left"].tolist(),
        "loss_changes": _floats(tree["gain"]),
        "parents": np.where(tree["parent"] < 0, NO_PARENT, tree["parent"]).tolist(),
        "right_children": np.where(is_leaf, LEAF, tree["left"] + 1).tolist(),
        "split_conditions": _floats(np.where(is_leaf, tree["value"], thresholds)),
        "split_indices": tree["column"].tolist(),
        "split_type": np.isin(np.arange(len(tree)), by_set).astype(int).tolist(),
        "sum_hessian": _floats(tree["hessian"]),
        "tree_param": {
            "num_deleted": "0",
            "num_feature": str(len(model.columns)),
            "num_nodes": str(len(tree)),
            "size_leaf_vector": "1",
        },
    }


def _floats(values: Any) -> list[float]:
    """Numbers that read back to the same float32."""
    return [float(str(value)) for value in values]
