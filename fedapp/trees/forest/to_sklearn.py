"""A forest as a scikit-learn estimator with the same predictions.

scikit-learn sends ``x <= threshold`` left and fedapp ``x < threshold``, both with float32 values:
the next smaller float32 gives the same split. Missing values go to the forest's side, by
``missing_go_to_left``. Impurities and numbers of rows are unknown and stay 0, so
``feature_importances_`` is NaN; the run's summary has the importance of the columns.

Source: scikit-learn 1.6 to 1.9, ``sklearn/tree/_tree.pyx``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.data.labels import class_values
from fedapp.errors import ConfigError
from fedapp.trees.forest.model import BaggedForest, Branches
from fedapp.trees.model import LEAF

NO_SPLIT = -2  # scikit-learn's column and threshold of a leaf
Values = npt.NDArray[np.float64]


def to_sklearn(model: BaggedForest) -> Any:
    """A fitted random forest of scikit-learn; ConfigError for columns of categories."""
    from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
    from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor

    categorical = [
        name for name, names in zip(model.columns, model.categories, strict=False) if names
    ]
    if categorical:
        rule = "must be of a forest of numeric columns only, as scikit-learn's trees have no"
        raise ConfigError(
            f"to_sklearn {rule} splits by sets of categories, got categories in "
            f"{', '.join(categorical[:5])}"
        )
    forest_of, tree_of = RandomForestRegressor, DecisionTreeRegressor
    if model.classes:
        forest_of, tree_of = RandomForestClassifier, DecisionTreeClassifier
    trees = [
        _fitted(tree_of(), model, _tree(branches, _shares(model, values), len(model.columns)))
        for branches, values in zip(model.trees, model.values, strict=True)
    ]
    forest = _fitted(forest_of(n_estimators=len(trees)), model)
    forest.feature_names_in_ = np.array(model.columns, dtype=object)
    forest.estimator_, forest.estimators_ = tree_of(), trees
    if model.classes:
        forest.classes_ = class_values(model.classes)
    return forest


def _fitted(estimator: Any, model: BaggedForest, tree: Any = None) -> Any:
    """The estimator with the attributes that ``fit`` sets for columns and classes."""
    estimator.n_features_in_, estimator.n_outputs_ = len(model.columns), 1
    if model.classes:
        estimator.n_classes_ = len(model.classes)
        estimator.classes_ = np.arange(len(model.classes))  # trees of a forest use class ids
    if tree is not None:
        estimator.tree_ = tree
    return estimator


def _shares(model: BaggedForest, values: Values) -> Values:
    """One share per class at each node, also for two classes; or a number."""
    is_binary = model.classes and values.shape[1] == 1
    return np.hstack([1 - values, values]) if is_binary else values


def _tree(branches: Branches, values: Values, n_columns: int) -> Any:
    """One tree in scikit-learn's representation."""
    from sklearn.tree._tree import NODE_DTYPE, Tree

    is_leaf = branches["left"] == LEAF
    nodes = np.zeros(len(branches), dtype=NODE_DTYPE)
    nodes["left_child"] = branches["left"]
    nodes["right_child"] = np.where(is_leaf, LEAF, branches["left"] + 1)
    nodes["feature"] = np.where(is_leaf, NO_SPLIT, branches["column"])
    with np.errstate(over="ignore"):  # below the lowest number is no number, where missing go left
        below = np.nextafter(branches["threshold"], np.float32(-np.inf))
    nodes["threshold"] = np.where(is_leaf, NO_SPLIT, below.astype(np.float64))
    nodes["missing_go_to_left"] = branches["default_left"] & ~is_leaf
    width = values.shape[1]
    tree = Tree(n_columns, np.array([width], dtype=np.intp), 1)
    depths = np.zeros(len(branches), dtype=np.int64)
    for node, left in enumerate(branches["left"].tolist()):
        if left != LEAF:
            depths[left : left + 2] = depths[node] + 1
    state = {
        "max_depth": int(depths.max(initial=0)),
        "node_count": len(nodes),
        "nodes": nodes,
        "values": np.ascontiguousarray(values[:, None, :]),
    }
    tree.__setstate__(state)
    return tree
