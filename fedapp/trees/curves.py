"""An additive model as curves: what each column, or pair of columns, adds to the margins.

A model is additive if no tree splits more than two columns. Its trees of the same columns add up to
one table, by the *places* of a value: the intervals between all their thresholds, or the categories
of a column, and at last the missing value. As path-dependent SHAP does, each tree counts less its
mean by its leaves' hessians; the means are in the intercepts. Edited curves stay as they were
written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from math import prod
from typing import Annotated, Any

import numpy as np

from fedapp.arrays import Doubles, Floats, Ints
from fedapp.errors import ConfigError
from fedapp.trees.categories import names_of
from fedapp.trees.model import LARGEST_LEAF, LEAF, Ensemble, Tree
from fedapp.trees.predict import find_leaves

Places = Ints

MOST_CELLS = 2**24  # of a pair
# A threshold that only separates missing values: no finite number is below it.
LOWEST = np.finfo(np.float32).min
MISSING = " (missing)"  # in the place of a category; no table has such a name
SMALL = f">= {-LARGEST_LEAF}", f"<= {LARGEST_LEAF}"


@dataclass(frozen=True, slots=True, eq=False)
class Axis:
    """The places of one column.

    Numbers have a place below the first edge, and one from each edge on (included) to the next;
    categories have one each. The last place is that of missing and unknown values.
    """

    name: str
    column: int
    edges: Annotated[Floats, ""]  # ascending; empty of categories
    categories: tuple[str, ...] | None = None

    @property
    def points(self) -> Floats:
        """A value at each place."""
        numbers = [LOWEST, *self.edges]
        inner = numbers if self.categories is None else range(len(self.categories))
        return np.array([*inner, np.nan], np.float32)

    def places(self, values: Floats) -> Places:
        """Places of values of the column."""
        if self.categories is not None:
            n_codes = len(self.categories)
            is_code = (values >= 0) & (values < n_codes)
            return np.where(is_code, values, n_codes).astype(np.int64)
        places = np.searchsorted(self.edges, values, side="right")
        return np.where(np.isnan(values), len(self.edges) + 1, places)

    def sides(self) -> list[dict[str, Any]]:
        """What its places are: intervals, or categories."""
        bounds = [-np.inf, *(float(str(edge)) for edge in self.edges), np.inf]
        intervals = [(*ends, None) for ends in pairwise(bounds)]
        names = [(None, None, name) for name in (*(self.categories or ()), MISSING)]
        places = [*(intervals if self.categories is None else ()), *names]
        return [dict(zip(("from", "to", "category"), place, strict=True)) for place in places]


@dataclass(frozen=True, slots=True, eq=False)
class Curve:
    """What one column, or a pair, adds to each output, by place: of a pair row by row."""

    axes: tuple[Axis, ...]  # one, or two
    values: Annotated[Doubles, "", "n_places", *SMALL]  # by output
    weights: Annotated[Doubles, "n_places", None]  # shares of the training weight; NaN: unknown

    @property
    def name(self) -> str:
        """Of the column, or "a & b"."""
        return " & ".join(axis.name for axis in self.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        """Places by axis."""
        return tuple(len(axis.points) for axis in self.axes)

    @property
    def n_places(self) -> int:
        """Places of all axes together."""
        return prod(self.shape)

    def of(self, values: Floats) -> Doubles:
        """What rows, (n_rows, n_columns of the model), get: shape (n_rows, n_outputs)."""
        cells = tuple(axis.places(values[:, axis.column]) for axis in self.axes)
        added: Doubles = self.values[:, np.ravel_multi_index(cells, self.shape)].T
        return added

    def on(self, axes: tuple[Axis, ...]) -> Curve:
        """The curve on finer places, which share a weight evenly."""
        pairs = zip(self.axes, axes, strict=True)
        cells = np.ix_(*(axis.places(finer.points) for axis, finer in pairs))
        flat = np.ravel_multi_index(cells, self.shape).ravel()
        return Curve(axes, self.values[:, flat], self.weights[flat] / np.bincount(flat)[flat])


Band = tuple[Curve, Doubles, Doubles]  # a curve, and 5 % and 95 % of it over several models


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


def intercepts_of(model: Ensemble) -> Doubles:
    """What every row gets, shape (n_outputs,): the base margin, but that of rows with a
    ``margin_column``, and the means of the trees."""
    means = [_mean(model, number) for number in range(len(model.trees))]
    return sum(means, base_of(model).astype(np.float64))


def base_of(model: Ensemble) -> Floats:
    """Margins of all rows before the first tree; 0 with a ``margin_column``."""
    return model.base_margin * np.float32(not model.margin_column)


def curves_of(model: Ensemble) -> list[Curve]:
    """The curves of an additive model: of single columns, then of pairs.

    A row's values and the intercepts add up to its margins, up to the rounding of float64.

    Raises
    ------
    ConfigError : a tree splits more than two columns, or a pair has too many cells.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for number, tree in enumerate(model.trees):
        columns = columns_of(tree)
        if len(columns) > 2:
            rule = "must split one column or two, as with pax.additive=true, to have curves"
            raise ConfigError(f"every tree {rule}, got one of {len(columns)}")
        if columns:
            groups.setdefault(columns, []).append(number)
    keys = sorted(groups, key=lambda columns: (len(columns), columns))
    return [_curve(model, columns, groups[columns]) for columns in keys]


def explained(
    classes: Sequence[str],
    intercepts: Doubles,
    curves: Sequence[Curve],
    values: Floats,
    base_margins: Floats | None = None,
) -> list[dict[str, Any]]:
    """Intercept and contributions of each row, which add up to its margin; of several outputs by
    class. ``base_margins``, shape (n_rows,), as in ``Ensemble.starts``."""
    starts = np.tile(intercepts, (len(values), 1))
    starts += 0 if base_margins is None else base_margins[:, None]
    names, by_curve = [curve.name for curve in curves], [curve.of(values) for curve in curves]
    added = np.reshape(by_curve, (len(curves), *starts.shape)).transpose(1, 2, 0)
    rows = list[dict[str, Any]]()
    for start, by_output in zip(starts.tolist(), added.tolist(), strict=True):
        sums = [dict(zip(names, of_output, strict=True)) for of_output in by_output]
        facts: dict[str, list[Any]] = {"intercept": start, "contributions": sums}
        if len(start) == 1:
            rows.append({name: value for name, (value,) in facts.items()})
        else:
            by_class = {k: dict(zip(classes, v, strict=True)) for k, v in facts.items()}
            rows.append(by_class)
    return rows


def bands_of(models: Sequence[Ensemble]) -> Iterator[Band]:
    """The first model's curves and their bands, on places between the edges of all models."""
    if len({(model.columns, model.categories, model.classes) for model in models}) > 1:
        raise ConfigError("runs must have the same columns, categories and classes, got others")
    by_model = [
        {tuple(axis.column for axis in curve.axes): curve for curve in curves_of(model)}
        for model in models
    ]
    for key in sorted(set().union(*by_model), key=lambda columns: (len(columns), columns)):
        curves = [of_model[key] for of_model in by_model if key in of_model]
        axes = tuple(
            replace(same[0], edges=np.unique(np.concatenate([axis.edges for axis in same])))
            for same in zip(*(curve.axes for curve in curves), strict=True)
        )
        zero = replace(curves[0], values=0 * curves[0].values, weights=np.nan * curves[0].weights)
        every = [of_model.get(key, zero).on(axes) for of_model in by_model]
        low, high = np.quantile([curve.values for curve in every], (0.05, 0.95), axis=0)
        yield every[0], low, high


def curve_records(models: Sequence[Ensemble]) -> Iterator[dict[str, Any]]:
    """Curves of the first model as records, a place each; see ``Run.curves``."""
    bands, classes = list(bands_of(models)), models[0].classes
    has_pairs = any(len(curve.axes) > 1 for curve, *_ in bands)
    for curve, low, high in bands:
        sides = [axis.sides() for axis in curve.axes]
        if has_pairs and len(sides) == 1:
            sides.append([dict.fromkeys(sides[0][0])])
        places = list(product(*sides))
        for output, place in np.ndindex(curve.values.shape):
            record: dict[str, Any] = {"column": curve.name}
            record |= {"class": classes[output]} if len(curve.values) > 1 else {}
            first, *second = places[place]
            record |= first | {f"{name}_2": value for of in second for name, value in of.items()}
            record |= {"margin": curve.values[output, place], "weight": curve.weights[place]}
            ends = {"low": low[output, place], "high": high[output, place]}
            yield record | (ends if len(models) > 1 else {})


def _mean(model: Ensemble, number: int) -> Doubles:
    """Mean of a tree's leaves by their hessians, of equal ones if there are none.

    An edited curve stays as it was written, so the mean of its tree is none.
    """
    tree = model.trees[number]
    if model.edits and len(tree) > 1:
        return np.zeros(model.n_outputs)
    is_leaf = tree["left"] == LEAF
    hessians = np.where(is_leaf, np.maximum(tree["hessian"], 0.0), 0.0)
    weights = hessians if hessians.any() else is_leaf
    mean: Doubles = np.average(model.leaf_terms(number), axis=0, weights=weights)
    return mean


def _curve(model: Ensemble, columns: tuple[int, ...], numbers: list[int]) -> Curve:
    """The sum of some trees, which split these columns."""
    trees, axes = [model.trees[number] for number in numbers], list[Axis]()
    for column in columns:
        names = names_of(model.categories, column)
        splits = [tree[(tree["left"] != LEAF) & (tree["column"] == column)] for tree in trees]
        cuts = np.unique(np.concatenate([of_tree["threshold"] for of_tree in splits]))
        edges = cuts[(cuts > LOWEST) & (names is None)]
        axes.append(Axis(model.columns[column], column, edges, names))
    points = [axis.points for axis in axes]
    if (n := prod(map(len, points))) > MOST_CELLS:
        name = " & ".join(axis.name for axis in axes)
        raise ConfigError(f"a pair must have <= {MOST_CELLS} cells, got {n} of {name}")
    rows: Floats = np.stack([axis.ravel() for axis in np.meshgrid(*points, indexing="ij")], axis=1)
    values, weights = np.zeros((n, model.n_outputs)), np.zeros(0)
    for number in numbers:
        tree = model.trees[number].copy()
        tree["column"] = np.searchsorted(columns, tree["column"])
        (leaves,) = find_leaves([tree], rows, model.sets)
        values += (model.leaf_terms(number) - _mean(model, number))[leaves]
        if number == numbers[0]:
            # The model has sums of leaves only: each is divided evenly among its places; those of
            # missing values count only in a leaf without others.
            is_present = ~np.isnan(rows).any(axis=1)
            is_counted = is_present | ~np.isin(leaves, leaves[is_present])
            counts = np.bincount(leaves[is_counted], minlength=len(tree))
            weights = np.maximum(tree["hessian"], 0.0)[leaves] / np.maximum(counts, 1.0)[leaves]
            weights[~is_counted] = np.nan
    return Curve(tuple(axes), values.T, weights / (np.nansum(weights) or np.nan))
