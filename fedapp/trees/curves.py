"""An additive model as curves: what each column, or pair of columns, adds to the margin.

A model is additive if no tree splits more than two columns. Its trees of the same columns add up to
one table, by the *places* of a value: the intervals between all their thresholds, the codes of a
column of categories, and at last the missing value. As path-dependent SHAP does, each tree counts
less its mean by its leaves' hessians; the means are in the intercepts. Edited curves stay as they
were written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt

from fedapp.errors import ConfigError
from fedapp.trees.categories import category_counts, entries_of
from fedapp.trees.model import LEAF, Ensemble, Tree
from fedapp.trees.predict import find_leaves

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Places = npt.NDArray[np.int64]

MOST_CELLS = 2**24  # of a pair
# A threshold that only separates missing values: no finite number is below it.
LOWEST = np.finfo(np.float32).min
MISSING = " (missing)"  # in the place of a category; no table has such a name


def as_rows(values: Doubles) -> list[Doubles]:
    """Values by place in a document: a row, or of a pair a row a place of its first column."""
    return list(np.atleast_2d(values))


def of_rows(rows: tuple[Annotated[Doubles, "", None], ...]) -> Doubles:
    """Undo ``as_rows``; ValueError if rows differ in length."""
    if len({len(row) for row in rows}) != 1:
        raise ValueError("values and weights must be rows of one length")
    return rows[0] if len(rows) == 1 else np.stack(rows)


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """What one column, or a pair, adds to one output.

    An axis of numbers has a place below its first edge, one from each edge on (included) to the
    next, and one for missing. An axis of categories has a place for each code, and one for missing
    and unknown.
    """

    name: str  # of the column, or "a & b"
    columns: tuple[int, ...]  # one, or two ascending
    output: int
    edges: tuple[Annotated[Floats, ""], ...]  # by column: ascending thresholds, or all codes
    is_coded: tuple[bool, ...]  # by column: whether it has categories
    values: Annotated[Doubles, as_rows, of_rows]  # by place, an axis a column
    # Of the same shape: shares of the training weight; NaN where unknown.
    weights: Annotated[Doubles, as_rows, of_rows]

    @property
    def shape(self) -> tuple[int, ...]:
        """Places by axis."""
        return tuple(map(len, points_of(self.edges, self.is_coded)))

    def places(self, axis: int, values: Floats) -> Places:
        """Places of values of one column."""
        edges = self.edges[axis]
        if self.is_coded[axis]:
            is_code = (values >= 0) & (values < len(edges))
            return np.where(is_code, np.nan_to_num(values), len(edges)).astype(np.int64)
        places = np.searchsorted(edges, values, side="right")
        return np.where(np.isnan(values), len(edges) + 1, places)

    def on(self, points: Sequence[Floats]) -> tuple[Doubles, Doubles]:
        """Values and weights at finer places, which share a weight evenly."""
        cells = [self.places(axis, of_axis) for axis, of_axis in enumerate(points)]
        counts = np.ix_(*(np.bincount(of_axis)[of_axis] for of_axis in cells))
        grid = np.ix_(*cells)
        return self.values[grid], self.weights[grid] / prod(counts)

    def of(self, values: Floats) -> Doubles:
        """What rows, (n_rows, n_columns of the model), get: float64, shape (n_rows,)."""
        cells = [self.places(axis, values[:, column]) for axis, column in enumerate(self.columns)]
        added: Doubles = self.values[tuple(cells)]
        return added


def columns_of(tree: Tree) -> tuple[int, ...]:
    """The columns that a tree splits, ascending."""
    return tuple(np.unique(tree["column"][tree["left"] != LEAF]).tolist())


def is_additive(model: object) -> bool:
    """Whether a model is a sum of curves."""
    return isinstance(model, Ensemble) and all(len(columns_of(tree)) <= 2 for tree in model.trees)


def boosted(model: object) -> Ensemble:
    """A model that may have curves; ConfigError if it is of another kind."""
    if not isinstance(model, Ensemble):
        rule = "must be of a boosted model that is whole in the run's folder"
        raise ConfigError(f"curves {rule}, got a {type(model).__name__}")
    return model


def points_of(edges: Sequence[Floats], is_coded: Sequence[bool]) -> list[Floats]:
    """A value at each place of each axis."""
    return [
        np.array([*([] if coded else [LOWEST]), *of_axis, np.nan], np.float32)
        for of_axis, coded in zip(edges, is_coded, strict=True)
    ]


def name_of(model: Ensemble, columns: Sequence[int]) -> str:
    """Name of a curve of some columns."""
    return " & ".join(model.columns[column] for column in columns)


def intercepts_of(model: Ensemble) -> Doubles:
    """What every row gets, shape (n_outputs,): the base margin, but that of rows with a
    ``margin_column``, and the means of the trees."""
    means = [_mean(model, number) for number in range(len(model.trees))]
    return sum(means, base_of(model).astype(np.float64))


def base_of(model: Ensemble) -> Floats:
    """Margins of all rows before the first tree; 0 with a ``margin_column``."""
    return model.base_margin * np.float32(not model.margin_column)


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


def explained(
    model: Ensemble, curves: Sequence[Curve], values: Floats, base_margins: Floats | None = None
) -> list[dict[str, Any]]:
    """Intercept and contributions of each row, which add up to its margin; of several outputs by
    class. ``base_margins``, shape (n_rows,), as in ``Ensemble.starts``."""
    added = contributions(curves, values)
    starts = np.full((len(added), model.n_outputs), intercepts_of(model))
    starts += 0 if base_margins is None else base_margins[:, None]
    rows = list[dict[str, Any]]()
    for start, of_row in zip(starts.tolist(), added.tolist(), strict=True):
        by_output: list[dict[str, float]] = [{} for _ in start]
        for curve, value in zip(curves, of_row, strict=True):
            by_output[curve.output][curve.name] = value
        if len(start) == 1:
            rows.append({"intercept": start[0], "contributions": by_output[0]})
        else:
            by_class = (dict(zip(model.classes, each, strict=True)) for each in (start, by_output))
            rows.append(dict(zip(("intercept", "contributions"), by_class, strict=True)))
    return rows


def check_same(models: Sequence[Ensemble]) -> None:
    """Raise ConfigError unless curves of the models are of the same columns and classes."""
    if len({(model.columns, model.categories, model.classes) for model in models}) > 1:
        raise ConfigError("runs must have the same columns, categories and classes, got others")


def curve_records(models: Sequence[Ensemble]) -> Iterator[dict[str, Any]]:
    """Curves of the first model as records, a place each; see ``Run.curves``.

    With several models, of the same columns and classes, places are between the edges of all.
    """
    check_same(models)
    model, *others = models
    by_model = [{(c.columns, c.output): c for c in curves_of(each)} for each in models]
    has_pairs = any(len(columns) > 1 for curves in by_model for columns, _ in curves)
    keys = sorted(set().union(*by_model), key=lambda key: (len(key[0]), *key))
    for key in keys:
        present = [curves[key] for curves in by_model if key in curves]
        first, coded = by_model[0].get(key, _zero(present[0])), present[0].is_coded
        of_axes = zip(*(curve.edges for curve in present), strict=True)
        edges = [np.unique(np.concatenate(of_axis)) for of_axis in of_axes]
        points = points_of(edges, coded)
        values, weights = first.on(points)
        every = [curves.get(key, _zero(first)).on(points)[0] for curves in by_model]
        ends = np.quantile(every, (0.05, 0.95), axis=0)
        sides = [_sides(model, *axis) for axis in zip(key[0], edges, coded, strict=True)]
        for cell in np.ndindex(values.shape):
            places = [side[at] for side, at in zip(sides, cell, strict=True)]
            record: dict[str, Any] = {"column": first.name}
            if model.n_outputs > 1:
                record["class"] = model.classes[key[1]]
            record |= places[0]
            if has_pairs:
                second = places[1] if len(places) > 1 else dict.fromkeys(places[0])
                record |= {f"{name}_2": value for name, value in second.items()}
            record |= {"margin": values[cell], "weight": weights[cell]}
            yield record | ({"low": ends[0][cell], "high": ends[1][cell]} if others else {})


def _zero(curve: Curve) -> Curve:
    return replace(curve, values=0 * curve.values, weights=np.nan * curve.weights)


def _sides(model: Ensemble, column: int, edges: Floats, coded: bool) -> list[dict[str, Any]]:
    """What the places of a column are: ends of an interval, or a category."""
    names = entries_of(model.categories, len(model.columns))[column] or () if coded else ()
    bounds = [-np.inf, *(float(str(edge)) for edge in edges), np.inf]
    numbers = [] if coded else [(*ends, None) for ends in pairwise(bounds)]
    places = [*numbers, *((None, None, name) for name in (*names, MISSING))]
    return [dict(zip(("from", "to", "category"), place, strict=True)) for place in places]


def _mean(model: Ensemble, number: int) -> Doubles:
    """Mean of a tree's leaves by their hessians, of equal ones if there are none.

    An edited curve stays as it was written, so the mean of its tree is none.
    """
    tree, terms = model.trees[number], model.leaf_terms(number)
    if model.edits and len(tree) > 1:
        return np.zeros(model.n_outputs)
    is_leaf = tree["left"] == LEAF
    hessians = np.maximum(tree["hessian"][is_leaf].astype(np.float64), 0.0)
    mean: Doubles = np.average(terms[is_leaf], axis=0, weights=hessians if hessians.any() else None)
    return mean


def _curve(model: Ensemble, columns: tuple[int, ...], output: int, numbers: list[int]) -> Curve:
    """The sum of some trees, which split these columns."""
    widths = category_counts(model.categories, len(model.columns))
    splits = np.concatenate([model.trees[number] for number in numbers])
    splits = splits[splits["left"] != LEAF]
    edges = []
    for column in columns:
        codes = np.arange(widths[column], dtype=np.float32)
        cuts = np.unique(splits["threshold"][splits["column"] == column])
        edges.append(codes if widths[column] else cuts[cuts > LOWEST])
    coded = tuple(bool(widths[column]) for column in columns)
    points, name = points_of(edges, coded), name_of(model, columns)
    shape = tuple(map(len, points))
    if np.prod(shape, dtype=float) > MOST_CELLS:
        raise ConfigError(f"a pair must have <= {MOST_CELLS} cells, got {shape} of {name}")
    rows: Floats = np.stack([axis.ravel() for axis in np.meshgrid(*points, indexing="ij")], axis=1)
    values, weights = np.zeros(len(rows)), np.zeros(0)
    is_missing: npt.NDArray[np.bool_] = np.logical_or.reduce(np.isnan(rows), axis=1)
    leaves = np.empty(len(rows), np.int32)
    for number in numbers:
        tree, terms = model.trees[number].copy(), model.leaf_terms(number)
        tree["column"] = np.searchsorted(columns, tree["column"])
        find_leaves(tree, rows, leaves, model.sets)
        values += (terms - _mean(model, number))[leaves, output]
        if number == numbers[0]:
            weights = _weights(tree, leaves, is_missing)
    of_places = values.reshape(shape), weights.reshape(shape)
    return Curve(name, columns, output, tuple(edges), coded, *of_places)


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
