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
from fedapp.trees.limits import ONE_TREE
from fedapp.trees.losses import LOG, LOGIT, LOSSES, SOFTMAX, STEP
from fedapp.trees.model import LEAF, Ensemble

OPSET, ML_OPSET, IR = 17, 3, 8  # supported by runtimes of the last years
SUMS = "sums"
NODE_FIELDS = (
    *("treeids", "nodeids", "featureids", "values", "modes", "truenodeids", "falsenodeids"),
    "missing_value_tracks_true",
)
NO_CATEGORY = -1  # not a category
LINKS = ((LOGIT, "Sigmoid"), (SOFTMAX, "Softmax"), (LOG, "Exp"), (STEP, "Sign"))


def to_onnx(model: Ensemble | BaggedForest, description: str = "") -> bytes:
    """The model as an ONNX file; raises ConfigError if it uses a base-margin column."""
    import onnx
    from onnx import TensorProto, helper

    if model.margin_column:
        rule = "must be of a model without base margins"
        raise ConfigError(f"ONNX {rule}, got margins of '{model.margin_column}'")
    trees = _trees(model)
    nodes = [helper.make_node("TreeEnsembleRegressor", ["rows"], [SUMS], domain="ai.onnx.ml")]
    nodes[0].attribute.extend(helper.make_attribute(name, value) for name, value in trees.items())
    constants: dict[str, npt.NDArray[Any]] = {}
    steps, outputs = _outputs(model, constants)
    nodes += [
        helper.make_node(name, inputs, [output], **attributes)
        for name, inputs, output, attributes in steps
    ]
    graph = helper.make_graph(
        nodes,
        "fedapp",
        [helper.make_tensor_value_info("rows", TensorProto.FLOAT, ["n", len(model.columns)])],
        [
            helper.make_tensor_value_info(
                name,
                TensorProto.STRING if name == "label" else TensorProto.FLOAT,
                ["n"] if width == 0 else ["n", width],
            )
            for name, width in outputs.items()
        ],
        [_tensor(name, array) for name, array in constants.items()],
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


def _trees(model: Ensemble | BaggedForest) -> dict[str, Any]:
    """Attributes of the operator: every node of every tree, and every leaf's values."""
    width = model.n_outputs
    fields: dict[str, list[Any]] = {f"nodes_{name}": [] for name in NODE_FIELDS}
    fields |= {f"target_{name}": [] for name in ("treeids", "nodeids", "ids", "weights")}
    for tree_id, tree in enumerate(model.trees):
        nodes = _with_chains(tree, _nodes(tree), model.sets)
        nodes["treeids"] = [tree_id] * len(nodes["nodeids"])
        for name, values in nodes.items():
            fields[f"nodes_{name}"] += values
        leaves = np.flatnonzero(tree["left"] == LEAF)
        for target, weights in _leaf_weights(model, tree_id, leaves):
            fields["target_treeids"] += [tree_id] * len(leaves)
            fields["target_nodeids"] += leaves.tolist()
            fields["target_ids"] += [target] * len(leaves)
            fields["target_weights"] += weights.astype(float).tolist()
    attributes: dict[str, Any] = {**fields, "n_targets": width, "post_transform": "NONE"}
    if isinstance(model, Ensemble):
        attributes["base_values"] = model.base_margin.tolist()
    return attributes


def _nodes(tree: npt.NDArray[Any]) -> dict[str, list[Any]]:
    """The nodes of a tree, by the operator's field names."""
    is_leaf = tree["left"] == LEAF
    lefts = np.where(is_leaf, 0, tree["left"])
    columns = {
        "nodeids": np.arange(len(tree)),
        "featureids": np.where(is_leaf, 0, tree["column"]),
        "values": np.where(is_leaf, 0, tree["threshold"]),
        "modes": np.where(is_leaf, "LEAF", "BRANCH_LT"),
        "truenodeids": lefts,
        "falsenodeids": np.where(is_leaf, 0, lefts + 1),
        "missing_value_tracks_true": np.where(is_leaf, False, tree["default_left"]).astype(int),
    }
    return {name: values.tolist() for name, values in columns.items()}


def _with_chains(
    tree: npt.NDArray[Any], nodes: dict[str, list[Any]], sets: CategorySets
) -> dict[str, list[Any]]:
    """Replace each split by a set with a chain of ``BRANCH_EQ``; its end is the default side."""
    by_set = (tree["set"] != NO_SET) & (tree["left"] != LEAF) & (len(sets) > 0)
    for node in np.flatnonzero(by_set).tolist():
        left = int(tree["left"][node])
        to_left = bool(tree["default_left"][node])
        goes_right = sets.members(int(tree["set"][node]))
        codes = np.flatnonzero(goes_right if to_left else ~goes_right).tolist() or [NO_CATEGORY]
        member_child, default = (left + 1, left) if to_left else (left, left + 1)
        at_node = node
        for position, code in enumerate(codes):
            next_node = len(nodes["nodeids"]) + (position > 0)
            is_last = position == len(codes) - 1
            fields = {
                "nodeids": at_node,
                "featureids": int(tree["column"][node]),
                "values": float(code),
                "modes": "BRANCH_EQ",
                "truenodeids": member_child,
                "falsenodeids": default if is_last else next_node,
                "missing_value_tracks_true": 0,
            }
            for name, value in fields.items():
                if position == 0:
                    nodes[name][node] = value
                else:
                    nodes[name].append(value)
            at_node = next_node
    return nodes


def _leaf_weights(
    model: Ensemble | BaggedForest, tree_id: int, leaves: npt.NDArray[Any]
) -> list[tuple[int, npt.NDArray[Any]]]:
    """What a tree's leaves add to each output."""
    if isinstance(model, Ensemble) and model.multi_strategy != ONE_TREE:
        return [(tree_id % model.n_outputs, model.trees[tree_id]["value"][leaves])]
    if isinstance(model, Ensemble):
        values = model.trees[tree_id]["value"][leaves]
    else:
        values = model.values[tree_id][leaves] / len(model.trees)
    return [(target, values[:, target]) for target in range(model.n_outputs)]


Step = tuple[str, Sequence[str], str, dict[str, Any]]


def _outputs(
    model: Ensemble | BaggedForest, constants: dict[str, npt.NDArray[Any]]
) -> tuple[list[Step], dict[str, int]]:
    """Operators from sums to outputs, and the width of each output, 0 for a vector."""
    operator = "Identity"
    steps: list[Step]
    if isinstance(model, Ensemble):
        link = LOSSES[model.objective].link
        operator = next((name for inverse, name in LINKS if inverse is link), "Identity")
    if operator == "Sign":
        steps = [("Sign", [SUMS], "sign", {}), ("Relu", ["sign"], "prediction", {})]
        return steps, {"prediction": 1}
    if not model.classes:
        return [(operator, [SUMS], "prediction", {})], {"prediction": 1}
    is_multi = model.n_outputs > 1
    attributes: dict[str, Any] = {"axis": 1} if operator == "Softmax" else {}
    steps = [(operator, [SUMS], "probabilities" if is_multi else "second", attributes)]
    if not is_multi:
        constants["one"] = np.ones(1, np.float32)
        steps += [
            ("Sub", ["one", "second"], "first", {}),
            ("Concat", ["first", "second"], "probabilities", {"axis": 1}),
        ]
    constants["classes"] = np.array(model.classes, object)
    steps += [
        ("ArgMax", ["probabilities"], "chosen", {"axis": 1, "keepdims": 0}),
        ("Gather", ["classes", "chosen"], "label", {}),
    ]
    return steps, {"label": 0, "probabilities": len(model.classes)}


def _tensor(name: str, array: npt.NDArray[Any]) -> Any:
    from onnx import TensorProto, helper

    if array.dtype == object:
        texts = [text.encode() for text in array]
        return helper.make_tensor(name, TensorProto.STRING, array.shape, texts)
    return helper.make_tensor(name, TensorProto.FLOAT, array.shape, array.tolist())
