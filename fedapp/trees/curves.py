"""An additive model as curves: what each column, or pair of columns, adds to the margin.

A model is additive if no tree splits more than two columns. Its trees of the same columns add up to
one table, by the *places* of a value: the intervals between all their thresholds, the codes of a
column of categories, and at last the missing value. As path-dependent SHAP does, each tree counts
less its mean by its leaves' hessians; the means are in the intercepts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedapp.errors import ConfigError
from fedapp.trees.categories import category_counts
from fedapp.trees.model import LEAF, Ensemble, Tree
from fedapp.trees.predict import find_leaves

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Places = npt.NDArray[np.int64]

MOST_CELLS = 2**24  # of a pair


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """What one column, or a pair, adds to one output.

    An axis of numbers has a place below its first edge, one from each edge on (included) to the
    next, and one for missing. An axis of categories has a place for each code, and one for missing
    and unknown.
    """

    columns: tuple[int, ...]  # one, or two ascending
    output: int
    edges: tuple[Floats, ...]  # by column: ascending thresholds, or the codes of its categories
    is_coded: tuple[bool, ...]  # by column: whether it has categories
    values: Doubles  # by place, an axis a column
    weights: Doubles  # of the same shape: shares of the training weight; NaN where unknown

    def places(self, axis: int, values: Floats) -> Places:
        """Places of values of one column."""
        edges = self.edges[axis]
        if self.is_coded[axis]:
            is_code = (values >= 0) & (values < len(edges))
            return np.where(is_code, np.nan_to_num(values), len(edges)).astype(np.int64)
        places = np.searchsorted(edges, values, side="right")
        return np.where(np.isnan(values), len(edges) + 1, places)

    def of(self, values: Floats) -> Doubles:
        """What rows, (n_rows, n_columns of the model), get: float64, shape (n_rows,)."""
        cells = [self.places(axis, values[:, column]) for axis, column in enumerate(self.columns)]
        added: Doubles = self.values[tuple(cells)]
        return added


def columns_of(tree: Tree) -> tuple[int, ...]:
    """The columns that a tree splits, ascending."""
    return tuple(np.unique(tree["column"][tree["left"] != LEAF]).tolist())


def is_additive(model: Ensemble) -> bool:
    """Whether the model is a sum of curves."""
    return all(len(columns_of(tree)) <= 2 for tree in model.trees)


def intercepts_of(model: Ensemble) -> Doubles:
    """What every row gets, shape (n_outputs,): the base margin, but that of rows with a
    ``margin_column``, and the means of the trees."""
    means = [_mean(tree, model.leaf_terms(number)) for number, tree in enumerate(model.trees)]
    base = np.zeros(model.n_outputs) if model.margin_column else model.base_margin
    total: Doubles = np.sum([base, *means], axis=0, dtype=np.float64)
    return total


def curves_of(model: Ensemble) -> list[Curve]:
    """The curves of an additive model: of single columns, then of pairs, each by output.

    A row's values and the intercepts add up to its margins, up to the rounding of float64.

    Raises
    ------
    ConfigError : a tree splits more than two columns, or a pair has too many cells.
    """
    groups: dict[tuple[int, tuple[int, ...], int], list[int]] = {}
    for number, tree in enumerate(model.trees):
        columns = columns_of(tree)
        if len(columns) > 2:
            rule = "must split one column or two, as with pax.additive=true, to have curves"
            raise ConfigError(f"every tree {rule}, got one of {len(columns)}")
        for output in np.arange(model.n_outputs)[model.outputs_of(number)].ravel().tolist():
            if columns:
                groups.setdefault((len(columns), columns, output), []).append(number)
    return [_curve(model, *key[1:], groups[key]) for key in sorted(groups)]


def contributions(curves: Sequence[Curve], values: Floats) -> Doubles:
    """What each curve adds to rows' margins; float64, shape (n_rows, n_curves)."""
    added = np.empty((len(values), len(curves)))
    for number, curve in enumerate(curves):
        added[:, number] = curve.of(values)
    return added


def _mean(tree: Tree, terms: Doubles) -> Doubles:
    """Mean of the leaves' terms by their hessians, of equal ones if there are none."""
    is_leaf = tree["left"] == LEAF
    hessians = np.maximum(tree["hessian"][is_leaf].astype(np.float64), 0.0)
    mean: Doubles = np.average(terms[is_leaf], axis=0, weights=hessians if hessians.any() else None)
    return mean


def _curve(model: Ensemble, columns: tuple[int, ...], output: int, numbers: list[int]) -> Curve:
    """The sum of some trees, which split these columns."""
    widths = category_counts(model.categories, len(model.columns))
    splits = np.concatenate([model.trees[number] for number in numbers])
    splits = splits[splits["left"] != LEAF]
    edges, points = [], []
    for column in columns:
        codes = np.arange(widths[column], dtype=np.float32)
        cuts = np.unique(splits["threshold"][splits["column"] == column])
        edges.append(codes if widths[column] else cuts)
        first = [] if widths[column] else [-np.inf]
        points.append(np.array([*first, *edges[-1], np.nan], np.float32))  # a value a place
    shape = tuple(map(len, points))
    if np.prod(shape, dtype=float) > MOST_CELLS:
        names = " & ".join(model.columns[column] for column in columns)
        raise ConfigError(f"a pair must have <= {MOST_CELLS} cells, got {shape} of {names}")
    rows: Floats = np.stack([axis.ravel() for axis in np.meshgrid(*points, indexing="ij")], axis=1)
    values, weights = np.zeros(len(rows)), np.zeros(0)
    is_missing: npt.NDArray[np.bool_] = np.logical_or.reduce(np.isnan(rows), axis=1)
    leaves = np.empty(len(rows), np.int32)
    for number in numbers:
        tree, terms = model.trees[number].copy(), model.leaf_terms(number)
        tree["column"] = np.searchsorted(columns, tree["column"])
        find_leaves(tree, rows, leaves, model.sets)
        values += (terms - _mean(tree, terms))[leaves, output]
        if number == numbers[0]:
            weights = _weights(tree, leaves, is_missing)
    coded = tuple(bool(widths[column]) for column in columns)
    return Curve(
        columns, output, tuple(edges), coded, values.reshape(shape), weights.reshape(shape)
    )


def _weights(
    tree: Tree, leaves: npt.NDArray[np.int32], is_missing: npt.NDArray[np.bool_]
) -> Doubles:
    """Shares of the leaves' hessians, each divided evenly among its places.

    The model tells no more. Places of missing values count only in a leaf without others.
    """
    hessians = np.where(tree["left"] == LEAF, np.maximum(tree["hessian"], 0), 0).astype(np.float64)
    present = np.bincount(leaves[~is_missing], minlength=len(tree))
    counts = np.where(present > 0, present, np.bincount(leaves, minlength=len(tree)))
    is_known = (~is_missing | (present[leaves] == 0)) & (hessians.sum() > 0)
    shares: Doubles = np.full(len(leaves), np.nan)
    shares[is_known] = (hessians / np.maximum(counts, 1))[leaves[is_known]] / hessians.sum()
    return shares
