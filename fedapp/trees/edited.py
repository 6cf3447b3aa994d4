"""Curves as a document that people read and edit, and the model of edited curves.

A curve becomes a tree of each output: a balanced one over the places of its columns, whose first
splits send missing values aside.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any

import numpy as np

from fedapp.arrays import Doubles
from fedapp.trees.categories import CategorySets
from fedapp.trees.curves import SMALL, Curve, base_of, curves_of, intercepts_of
from fedapp.trees.model import LEAF, NODE, Edit, Ensemble, Model, Tree

UNKNOWN = 1e-6  # weight of a place whose share is unknown: SHAP divides by the sums


@dataclass(frozen=True, slots=True, eq=False)
class Curves(Model):
    """Curves of an additive model. Only intercepts and values may be edited."""

    KIND = "curves"
    model_id: str  # of the run
    intercepts: Annotated[Doubles, "", *SMALL]  # by output
    curves: tuple[Curve, ...]

    @classmethod
    def of(cls, model: Ensemble, model_id: str) -> Curves:
        """Those of a model; ConfigError if it is not additive."""
        return cls(model_id, intercepts_of(model), tuple(curves_of(model)))

    def without_numbers(self) -> Curves:
        """The curves with zeros as intercepts and values: what must stay when they are edited."""
        zeros = (replace(curve, values=np.zeros_like(curve.values)) for curve in self.curves)
        intercepts = np.zeros_like(self.intercepts)
        return replace(self, intercepts=intercepts, curves=tuple(zeros))


def model_of_curves(model: Ensemble, document: Curves, edit: Edit) -> Ensemble:
    """A model with edited curves: trees of each, and at last a leaf of each intercept."""
    constants = document.intercepts - base_of(model)
    curves = (*document.curves, Curve((), constants[:, None], np.ones(1)))
    grown = [_tree(curve, output) for curve in curves for output in range(model.n_outputs)]
    return replace(
        model,
        trees=tuple(tree for tree, _ in grown),
        sets=CategorySets.of([members for _, of_tree in grown for members in of_tree]),
        num_parallel_tree=len(curves),
        multi_strategy="one_output_per_tree",
        edits=(*model.edits, edit),
    ).completed()


def _tree(curve: Curve, output: int) -> tuple[Tree, list[Any]]:
    """A tree whose leaves are the places of a curve, and the sets of its splits."""
    weights = np.maximum(np.nan_to_num(curve.weights), UNKNOWN).reshape(curve.shape)
    values = curve.values[output].reshape(curve.shape)
    boxes, parents = [tuple((0, size) for size in curve.shape)], [-1]
    nodes, sets = list[tuple[Any, ...]](), list[Any]()
    for number, box in enumerate(boxes):  # which grows: children come after their parents
        cells = tuple(slice(*ends) for ends in box)
        hessian = weights[cells].sum()
        side = next((side for side, (a, b) in enumerate(box) if b - a > 1), None)
        if side is None:
            value = values[cells].item()
            nodes.append((LEAF, parents[number], 0, 0, False, 0, hessian, value, value, -1))
            continue
        (start, end), axis, missing = box[side], curve.axes[side], curve.shape[side] - 1
        middle = (start + end) // 2
        halves = ((start, middle), (middle, end))
        if end > missing:  # which go left by default, all others right
            halves, middle = ((missing, end), (start, missing)), 0
        cut = axis.points[middle]
        if axis.categories is not None:
            sets.append(np.arange(missing) >= middle)
            cut = 0
        nodes.append((len(boxes), parents[number], axis.column, cut, True, 0, hessian, 0, 0, -1))
        boxes += [(*box[:side], half, *box[side + 1 :]) for half in halves]
        parents += [number, number]
    return np.array(nodes, NODE), sets
