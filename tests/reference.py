"""Slow and obvious forms of what the app does fast, and XGBoost as the judge."""

import json
from dataclasses import dataclass

import numpy as np

from fedapp.trees.categories import NO_SET
from fedapp.trees.model import LEAF
from fedapp.trees.xgboost import in_xgboosts_order


def xgboost_trees(booster):
    """The trees of a booster as its JSON has them."""
    document = json.loads(booster.save_raw("json"))
    return document["learner"]["gradient_booster"]["model"]["trees"]


def xgboost_sets(tree):
    """The categories that each categorical split of a tree of ``xgboost_trees`` sends right."""
    kept = ("categories_nodes", "categories_segments", "categories_sizes")
    return {
        node: tree["categories"][start : start + size]
        for node, start, size in zip(*(tree[name] for name in kept), strict=True)
    }


@dataclass(frozen=True)
class Agreement:
    """How far two models agree.

    ``differing`` are nodes that differ in feature, threshold or set of categories, default side,
    children, or any bit of their gain;
    ``leaf_error`` is the largest difference of leaf values, relative to the value or to 1e-3,
    whichever is larger: where gradients cancel, or L1 leaves next to nothing of them, the digits
    of a leaf near 0 are rounding noise of the float32 gradients.
    """

    n_trees: int
    n_nodes: int
    differing: int
    leaf_error: float


def compare_trees(model, booster):
    """Hold a model against XGBoost's, node for node."""
    others = xgboost_trees(booster)
    assert len(model.trees) == len(others)
    differing, n_nodes, leaf_error = 0, 0, 0.0
    for place, other in zip(in_xgboosts_order(model), others, strict=True):
        tree = model.trees[place]
        lefts = np.array(other["left_children"])
        n_nodes += len(lefts)
        if len(lefts) != len(tree):
            differing += abs(len(lefts) - len(tree))
            continue
        inner = lefts != LEAF
        same = lefts == tree["left"]
        same &= ~inner | (np.array(other["split_indices"]) == tree["column"])
        conditions = np.array(other["split_conditions"], dtype=np.float32)
        by_set = np.array(other["split_type"], dtype=bool)
        same &= by_set == (tree["set"] != NO_SET)
        same &= ~inner | by_set | (conditions == tree["threshold"])
        for node, codes in xgboost_sets(other).items():
            same[node] &= codes == model.sets.codes()[tree["set"][node]]
        same &= ~inner | (np.array(other["default_left"], dtype=bool) == tree["default_left"])
        same &= ~inner | (np.array(other["loss_changes"], dtype=np.float32) == tree["gain"])
        differing += int((~same).sum())
        values = tree["value"][~inner].astype(np.float64)
        leaves = conditions[~inner]
        if values.ndim > 1:
            vectors = np.array(other["leaf_weights"], np.float32).reshape(values.shape)
            leaves = vectors[np.array(other["right_children"])[~inner]]
            weights = np.array(other["base_weights"], np.float32).reshape(tree["weight"].shape)
            inner_errors = np.abs(weights - tree["weight"])[inner]
            assert inner_errors.max(initial=0) <= 1e-5
            np.testing.assert_allclose(other["sum_hessian"], tree["hessian"], rtol=1e-6)
        errors = np.abs(leaves - values) / np.maximum(np.abs(values), 1e-3)
        leaf_error = max(leaf_error, float(errors.max(initial=0)))
    return Agreement(len(others), n_nodes, differing, leaf_error)
