"""Curves as a document that people read and edit, and the model of edited curves.

A curve becomes one tree: a balanced one over the places of its columns, whose first splits send
missing values aside.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Annotated, Any, Self

import numpy as np

from fedapp.trees.categories import NO_SETS, CategorySets, category_counts
from fedapp.trees.curves import (
    LOWEST,
    Curve,
    Doubles,
    base_of,
    curves_of,
    intercepts_of,
    name_of,
)
from fedapp.trees.model import LARGEST_LEAF, LEAF, NODE, Edit, Ensemble, Model, Tree

UNKNOWN = 1e-6  # weight of a place whose share is unknown: SHAP divides by the sums


@dataclass(frozen=True, slots=True, eq=False)
class Curves(Model):
    """Curves of an additive model, and what else its predictions need."""

    KIND = "curves"
    model_id: str  # of the run
    model: Ensemble  # without its trees
    intercepts: Annotated[Doubles, "model.n_outputs"]
    curves: tuple[Curve, ...]

    @classmethod
    def of(cls, model: Ensemble, model_id: str) -> Curves:
        """Those of a model; ConfigError if it is not additive."""
        return cls(model_id, bare(model), intercepts_of(model), tuple(curves_of(model)))

    def completed(self) -> Self:
        """The curves; ValueError with the place of the first that breaks a rule."""
        for number, curve in enumerate(self.curves):
            for name, is_kept, rule in _rules(curve, self.model):
                if not is_kept:
                    way = "fedapp export RUN --to curves writes them anew"
                    raise ValueError(f"curves[{number}].{name} must be {rule}: {way}")
        return self


def bare(model: Ensemble) -> Ensemble:
    """The model without trees, but with its calibration."""
    one_each = replace(model, num_parallel_tree=1, multi_strategy="one_output_per_tree")
    return replace(one_each, trees=(), sets=NO_SETS)


def _rules(curve: Curve, model: Ensemble) -> Iterator[tuple[str, bool, str]]:
    """Name of a field, whether it keeps its rule, and the rule; each assumes those before."""
    names, columns = model.columns, curve.columns
    are_columns = [*columns] == sorted({*columns} & {*range(len(names))})
    rule = f"one or two of 0 to {len(names) - 1}, ascending"
    yield "columns", are_columns and 1 <= len(columns) <= 2, rule
    rule = f"{name_of(model, columns)!r}, of its columns"
    yield "name", curve.name == name_of(model, columns), rule
    yield "output", 0 <= curve.output < model.n_outputs, f"0 to {model.n_outputs - 1}"
    widths = [category_counts(model.categories, len(names))[column] for column in columns]
    yield "is_coded", [*curve.is_coded] == [width > 0 for width in widths], "true for categories"
    yield "edges", len(curve.edges) == len(columns), "a list a column"
    for edges, width in zip(curve.edges, widths, strict=True):
        if width:
            yield "edges", np.array_equal(edges, np.arange(width)), f"0 to {width - 1}, all codes"
        else:
            is_ascending = (np.diff(edges) > 0).all() and (edges > LOWEST).all()
            yield "edges", bool(is_ascending), "ascending, and different as float32"
    shape = f"of shape {curve.shape}, a number an interval and at last for missing values"
    yield "values", curve.values.shape == curve.shape, shape
    is_small = bool((np.abs(curve.values) <= LARGEST_LEAF).all())
    yield "values", is_small, f"numbers from {-LARGEST_LEAF:.3g} to {LARGEST_LEAF:.3g}, not null"
    yield "weights", curve.weights.shape == curve.shape, f"{shape}, or null"
    yield "weights", not (curve.weights < 0).any(), ">= 0 or null"


def model_of_curves(document: Curves, edit: Edit) -> Ensemble:
    """The model of edited curves: a tree of each, and one leaf of each intercept."""
    model, every = document.model, range(document.model.n_outputs)
    constants = (document.intercepts - base_of(model)).tolist()
    leaves = [Curve("", (), k, (), (), np.array(constants[k]), np.array(1.0)) for k in every]
    zero = Curve("", (), 0, (), (), np.array(0.0), np.array(1.0))
    of_outputs = ([c for c in (*document.curves, *leaves) if c.output == k] for k in every)
    rounds = [*zip_longest(*of_outputs, fillvalue=zero)]
    grown = [_tree(curve) for of_round in rounds for curve in of_round]
    sets = CategorySets.of([members for _, of_tree in grown for members in of_tree])
    trees, edits = tuple(tree for tree, _ in grown), (*model.edits, edit)
    of_curves = replace(model, trees=trees, sets=sets, num_parallel_tree=len(rounds), edits=edits)
    return of_curves.completed()


def _tree(curve: Curve) -> tuple[Tree, list[Any]]:
    """A tree whose leaves are the places of a curve, and the sets of its splits."""
    weights = np.maximum(np.nan_to_num(curve.weights), UNKNOWN)
    boxes, parents = [tuple((0, size) for size in curve.values.shape)], [-1]
    nodes, sets = list[tuple[Any, ...]](), list[Any]()
    for number, box in enumerate(boxes):  # which grows: children come after their parents
        cells = tuple(slice(*ends) for ends in box)
        hessian = weights[cells].sum()
        axis = next((axis for axis, (a, b) in enumerate(box) if b - a > 1), None)
        if axis is None:
            value = curve.values[cells].item()
            nodes.append((LEAF, parents[number], 0, 0, False, 0, hessian, value, value, -1))
            continue
        (start, end), edges, coded = box[axis], curve.edges[axis], curve.is_coded[axis]
        missing = curve.values.shape[axis] - 1
        middle = missing if end > missing else (start + end) // 2
        halves = ((start, middle), (middle, end))
        if end > missing:  # which go left by default, all others right
            halves, middle = ((missing, end), (start, missing)), 0
        if coded:
            sets.append(np.arange(len(edges)) >= middle)
        cut = LOWEST if end > missing else 0 if coded else edges[middle - 1]
        column = curve.columns[axis]
        nodes.append((len(boxes), parents[number], column, cut, True, 0, hessian, 0, 0, -1))
        boxes += [(*box[:axis], half, *box[axis + 1 :]) for half in halves]
        parents += [number, number]
    return np.array(nodes, NODE), sets
