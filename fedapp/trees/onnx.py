"""A boosted model or a forest as ONNX, for runtimes without XGBoost.

The trees are one ``TreeEnsembleRegressor`` of the domain ``ai.onnx.ml`` (version 3): ``x < value``
goes left, a missing value to the default side, and leaves are summed to margins or means. A split
by a set of categories becomes a chain of nodes, each testing for one category. Source: the
operators' reference, onnx.ai/onnx/operators.

Input ``rows``: float32, shape (n_rows, n_columns), NaN for a missing value. A category is its code,
the index of its name in the property ``categories`` of the column. Outputs: for classes ``label``
(names) and ``probabilities``, float32, shape (n_rows, n_classes); else ``prediction``, float32,
shape (n_rows, 1).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.errors import ConfigError
from fedapp.trees.categories import NO_SET, CategorySets
from fedapp.trees.forest.bagged import BaggedForest
from fedapp.trees.losses import LOG, LOGIT, LOSSES, SOFTMAX, STEP
from fedapp.trees.model import LEAF, Ensemble

OPSET, ML_OPSET, IR = 17, 3, 8  # supported by runtimes of the last years
SUMS = "sums"
NODE_FIELDS = (
    *("treeids", "nodeids", "featureids", "values", "modes", "truenodeids", "falsenodeids"),
    "missing_value_tracks_true",
)
LEAF_FIELDS = "treeids", "nodeids", "ids", "weights"
NO_CATEGORY = -1  # not a category
LINKS = ((LOGIT, "Sigmoid"), (SOFTMAX, "Softmax"), (LOG, "Exp"), (STEP, "Sign"))


def to_onnx(model: Ensemble | BaggedForest, description: str = "") -> bytes:
    """The model as an ONNX file; raises ConfigError if it uses a base-margin column."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    if model.margin_column:
        rule = "must be of a model without base margins"
        raise ConfigError(f"ONNX {rule}, got margins of '{model.margin_column}'")
    trees = helper.make_node("TreeEnsembleRegressor", ["rows"], [SUMS], domain="ai.onnx.ml")
    attributes = _attributes(model).items()
    trees.attribute.extend(helper.make_attribute(name, value) for name, value in attributes)
    steps, constants, outputs = _outputs(model)
    graph = helper.make_graph(
        [
            trees,
            *(helper.make_node(name, inputs, [to], **how) for name, inputs, to, how in steps),
        ],
        "fedapp",
        [helper.make_tensor_value_info("rows", TensorProto.FLOAT, ["n", len(model.columns)])],
        [
            helper.make_tensor_value_info(
                name,
                TensorProto.STRING if name == "label" else TensorProto.FLOAT,
                ["n", *([width] if width else [])],
            )
            for name, width in outputs.items()
        ],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("ai.onnx.ml", ML_OPSET)]
    proto = helper.make_model(graph, opset_imports=opsets, ir_version=IR, producer_name="fedapp")
    proto.doc_string = description
    coded = zip(model.columns, model.categories, strict=False)
    categories = {column: list(names) for column, names in coded if names}
    properties = {"columns": ",".join(model.columns)}
    properties |= {"categories": json.dumps(categories, ensure_ascii=False)} if categories else {}
    helper.set_model_props(proto, properties)
    onnx.checker.check_model(proto)
    content: bytes = proto.SerializeToString()
    return content


def _attributes(model: Ensemble | BaggedForest) -> dict[str, Any]:
    """Attributes of the operator: every node of every tree, and every leaf's values."""
    nodes, targets = list[tuple[Any, ...]](), list[tuple[Any, ...]]()
    is_boosted = isinstance(model, Ensemble)
    for tree_id, tree in enumerate(model.trees):
        nodes += [(tree_id, *node) for node in _nodes(tree, model.sets)]
        leaves = np.flatnonzero(tree["left"] == LEAF)
        terms = model.leaf_terms(tree_id)[leaves] / (1 if is_boosted else len(model.trees))
        for target, weights in enumerate(terms.T):
            if weights.any() or target == tree_id % model.n_outputs:
                pairs = zip(leaves.tolist(), weights.tolist(), strict=True)
                targets += [(tree_id, leaf, target, weight) for leaf, weight in pairs]
    columns = zip(NODE_FIELDS, zip(*nodes, strict=True), strict=True)
    attributes: dict[str, Any] = {f"nodes_{name}": list(values) for name, values in columns}
    columns = zip(LEAF_FIELDS, zip(*targets, strict=True), strict=True)
    attributes |= {f"target_{name}": list(values) for name, values in columns}
    attributes |= {"base_values": model.base_margin.tolist()} if is_boosted else {}
    return {**attributes, "n_targets": model.n_outputs, "post_transform": "NONE"}


def _nodes(tree: npt.NDArray[Any], sets: CategorySets) -> list[tuple[Any, ...]]:
    """The nodes of a tree, ``NODE_FIELDS`` of each but for the tree."""
    nodes, links = list[tuple[Any, ...]](), list[tuple[Any, ...]]()
    names = "left", "column", "threshold", "default_left", "set"
    for node, split in enumerate(zip(*(tree[name].tolist() for name in names), strict=True)):
        left, column, threshold, to_left, number = split
        if left == LEAF:
            nodes.append((node, 0, 0.0, "LEAF", 0, 0, 0))
        elif number == NO_SET or not len(sets):
            nodes.append((node, column, threshold, "BRANCH_LT", left, left + 1, int(to_left)))
        else:
            # A chain of nodes that test for one category each; its end is the default side.
            goes_right = sets.members(number)
            codes = np.flatnonzero(goes_right if to_left else ~goes_right).tolist()
            child, default = (left + 1, left) if to_left else (left, left + 1)
            first_link = len(tree) + len(links)
            ids = [node, *range(first_link, first_link + len(codes) - 1)]
            chain = [
                (at, column, float(code), "BRANCH_EQ", child, after, 0)
                for at, code, after in zip(
                    ids, codes or [NO_CATEGORY], [*ids[1:], default], strict=True
                )
            ]
            nodes.append(chain[0])
            links += chain[1:]
    return nodes + links


Step = tuple[str, Sequence[str], str, dict[str, Any]]


def _outputs(
    model: Ensemble | BaggedForest,
) -> tuple[list[Step], dict[str, npt.NDArray[Any]], dict[str, int]]:
    """Operators from sums to outputs, their constants, and each output's width, 0 for a vector."""
    operator = "Identity"
    if isinstance(model, Ensemble):
        link = LOSSES[model.objective].link
        operator = next((name for inverse, name in LINKS if inverse is link), "Identity")
    if operator == "Sign":
        steps: list[Step] = [("Sign", [SUMS], "sign", {}), ("Relu", ["sign"], "prediction", {})]
        return steps, {}, {"prediction": 1}
    if not model.classes:
        return [(operator, [SUMS], "prediction", {})], {}, {"prediction": 1}
    constants = {"classes": np.array(model.classes, object)}
    if model.n_outputs > 1:
        attributes: dict[str, Any] = {"axis": 1} if operator == "Softmax" else {}
        steps = [(operator, [SUMS], "probabilities", attributes)]
    else:
        constants["one"] = np.ones(1, np.float32)
        steps = [
            (operator, [SUMS], "second", {}),
            ("Sub", ["one", "second"], "first", {}),
            ("Concat", ["first", "second"], "probabilities", {"axis": 1}),
        ]
    steps += [
        ("ArgMax", ["probabilities"], "chosen", {"axis": 1, "keepdims": 0}),
        ("Gather", ["classes", "chosen"], "label", {}),
    ]
    return steps, constants, {"label": 0, "probabilities": len(model.classes)}
