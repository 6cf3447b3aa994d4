"""The curves of an additive model: the figures of a report, and their texts on pages and cards.

Figures of single columns have one scale, so that they can be compared. Below a line are the rows,
by the sums that grew the column's first tree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any

import numpy as np
import numpy.typing as npt
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.ticker import AsinhLocator, MaxNLocator

from fedapp.crypto.noise import COUNTS, LABELS
from fedapp.report.plots import (
    BLACK,
    GREY,
    PALETTE,
    Drawing,
    add_legend,
    name_bars,
    new_canvas,
    plain,
)
from fedapp.report.summary import percent_text
from fedapp.report.template import elements
from fedapp.report.tree import model_of, rule_text, scale_of, short
from fedapp.run_files import RunFiles, Summary
from fedapp.trees.categories import names_of
from fedapp.trees.curves import Curve, columns_of, curves_of, intercepts_of, is_additive
from fedapp.trees.model import Ensemble

Doubles = npt.NDArray[np.float64]
Pen = dict[str, Any]
Same = Sequence[Sequence[Curve]]  # of one column, by output: the model's curve, others' after it
_MOST_DRAWN, _MOST_NAMES = 30, 12  # curves of a model, categories of a column
_MOST_CELLS = 16  # along a side of a pair
_COLORS = LinearSegmentedColormap.from_list("", [PALETTE[1], "#ffffff", PALETTE[0]], 17)
_DRAWN = (
    "All columns have one scale, pairs one of colours; first those of the largest mean absolute "
    "value. Grey below a line: the rows, where the model has sums of them, by the column's first "
    "tree. Diamonds: missing values, hollow where no row is known to have one."
)
_STEADY = 0.8  # share of the changes from which on a curve rises or falls


def additive_of(run: RunFiles) -> Ensemble | None:
    """The run's model if it is a sum of curves, few of them of pairs.

    Other models of shallow trees may have curves of most pairs, which nobody would read.
    """
    model = model_of(run)
    if not isinstance(model, Ensemble) or not is_additive(model):
        return None
    alone, paired = ([tree for tree in model.trees if len(columns_of(tree)) == n] for n in (1, 2))
    return model if len(alone) > len(paired) else None


def groups_of(model: Ensemble) -> list[list[Curve]]:
    """The curves of each column or pair, one an output; strongest first."""
    groups: dict[tuple[int, ...], list[Curve]] = {}
    for curve in curves_of(model):
        groups.setdefault(curve.columns, []).append(curve)
    return sorted(groups.values(), key=lambda curves: -max(map(strength, curves)))


def strength(curve: Curve) -> float:
    """Mean absolute value over the rows."""
    return float((_weights(curve) * np.abs(curve.values)).sum())


def direction(model: Ensemble, curve: Curve) -> str:
    """Where a curve leads, in words."""
    if len(curve.columns) > 1:
        return ""
    weights, values = _weights(curve)[:-1], curve.values[:-1]
    if curve.is_coded[0]:
        names, used = names_of(model.categories, curve.columns[0]) or (), np.flatnonzero(weights)
        ends = used[values[used].argmin()], used[values[used].argmax()]
        return "lowest for {}, highest for {}".format(*(plain(names[code]) for code in ends))
    changes = np.triu(np.outer(weights, weights) * np.subtract.outer(-values, -values), 1)
    share = changes.sum() / (np.abs(changes).sum() or 1.0)
    return "rises" if share >= _STEADY else "falls" if share <= -_STEADY else "rises and falls"


def facts_of(model: Ensemble, curves: Sequence[Curve]) -> tuple[str, str, str, str]:
    """Name, mean absolute value, range and direction of a column's or pair's strongest class."""
    curve = max(curves, key=strength)
    ends = f"{curve.values.min():+.3g} to {curve.values.max():+.3g}"
    of_class = f", class {plain(model.classes[curve.output])}" if len(curves) > 1 else ""
    return curve.name + of_class, f"{strength(curve):.3g}", ends, direction(model, curve)


def section(run: RunFiles) -> Markup:
    """The curves as a section of a page; empty if the model is no sum of them."""
    if not (model := additive_of(run)):
        return Markup("")
    every, images = groups_of(model), figures_of(model, most=_MOST_DRAWN)
    named = {}
    for curves, image in zip(every, images, strict=False):
        name, size, _, leads = facts_of(model, curves)
        named[", ".join(filter(None, (f"{plain(name)}: {size} on average", leads)))] = image
    n_more = len(every) - len(images)
    texts = [about(model, run.summary), _DRAWN]
    texts += [f"{n_more} columns and pairs that add less are not drawn."] if n_more else []
    shown = Markup('<div class="small">{}</div>').format(elements.figures(named))
    return Markup("").join([*map(elements.quiet, texts), shown])


def about(model: Ensemble, summary: Summary) -> str:
    """What the model is, and what was spent on it, in sentences."""
    starts = ", ".join(f"{value:+.4g}" for value in intercepts_of(model))
    text = f"The model is a sum: every row starts from {starts}, and each curve adds what it shows "
    text = " ".join([f"{text}to {scale_of(model)}.", *(f"Edited: {edit}." for edit in model.edits)])
    if privacy := summary.get("privacy"):
        label, cuts, trees = map(percent_text, (LABELS, COUNTS, 1 - LABELS - COUNTS))
        text += (
            " The curves are the release: reading and editing them costs no further budget. Of "
            f"epsilon {privacy['epsilon']:g} the mean label took {label}, the cuts {cuts}, the "
            f"curves {trees}; scores, of rows that did not train, have another of the same size."
        )
    return text


def figures_of(
    model: Ensemble, others: Sequence[Ensemble] = (), most: int | None = None
) -> list[Drawing]:
    """A figure of each column and pair, strongest first.

    Single columns have the band from the 5th to the 95th percentile of this and other models, whose
    columns are the same. Of a pair with several outputs the strongest is drawn.
    """
    drawn, figures = groups_of(model)[:most], list[Drawing]()
    all_curves = [curve for curves in drawn for curve in curves]
    alone, paired = (
        np.concatenate([[0.0], *(of.values.ravel() for of in all_curves if of.values.ndim == n)])
        for n in (1, 2)
    )
    by_model = [{(of.columns, of.output): of for of in curves_of(other)} for other in others]
    for curves in drawn:
        figure, ax = new_canvas(curves[0].name, 3.6, 2.8)
        figures.append(figure)
        ax.tick_params(labelsize=9)
        if curves[0].values.ndim == 2:
            _draw_pair(ax, model, max(curves, key=strength), float(np.abs(paired).max()))
            continue
        zeros = [replace(curve, values=np.zeros_like(curve.values)) for curve in curves]
        same = [
            [curve, *(of.get((curve.columns, curve.output), zero) for of in by_model)]
            for curve, zero in zip(curves, zeros, strict=True)
        ]
        draw = _draw_bars if curves[0].is_coded[0] else _draw_lines
        draw(ax, model, same, 1.08 * alone.min(), 1.08 * alone.max())
        add_legend(ax, above=True)
    return figures


def _pens(model: Ensemble, same: Same) -> Iterator[tuple[Sequence[Curve], Pen]]:
    for each, color in zip(same, cycle(PALETTE), strict=False):
        label = plain(model.classes[each[0].output], 12) if len(same) > 1 else ""
        yield each, {"color": color, "label": label}


def _weights(curve: Curve) -> Doubles:
    """Shares of the rows by place, equal ones if the model has none."""
    weights = np.nan_to_num(curve.weights)
    return weights / weights.sum() if weights.any() else np.full(weights.shape, 1 / weights.size)


def _draw_lines(ax: Axes, model: Ensemble, same: Same, low: float, high: float) -> None:
    """Step lines with their bands, the rows below, and missing values at the right."""
    first, (column,) = same[0][0], same[0][0].columns
    shares, bounds = _weights(first)[:-1], _bounds(first.edges[0])
    half = float(np.median(bounds - bounds[0]))  # cuts are where rows are
    if abs(bounds[0]) / 5 < half < 0.15 * (bounds[-1] - bounds[0]):
        ax.set_xscale("asinh", linear_width=half)
        ax.xaxis.set_major_locator(AsinhLocator(half, numticks=4))
    else:
        ax.xaxis.set_major_locator(MaxNLocator(4))
    heights = shares / np.diff(ax.xaxis.get_transform().transform(bounds))
    heights *= 0.16 / heights.max() * bool(np.nansum(first.weights))
    across, style = ax.get_xaxis_transform(), Pen(fill=True, alpha=0.3)
    ax.stairs(heights, bounds, color=GREY, transform=across, **style)
    for each, pen in _pens(model, same):
        edges = np.unique(np.concatenate([of.edges[0] for of in each]))
        points = np.append(np.float32(-np.inf), edges)
        values = np.array([of.values[of.places(0, points)] for of in each])
        ax.stairs(values[0], _bounds(edges), baseline=None, linewidth=1.8, **pen)
        ends = np.percentile(values, (5, 95), axis=0)
        ax.stairs(ends[1], _bounds(edges), baseline=ends[0], color=pen["color"], **style)
        ax.plot([1.05], each[0].values[-1:], transform=ax.get_yaxis_transform(), **_mark(each, pen))
    ax.axhline(0, color=BLACK, linewidth=0.8)
    ax.set(ylim=(low - 0.25 * (high - low), high), xlabel=plain(model.columns[column]))
    ax.set_yticks([tick for tick in MaxNLocator(5).tick_values(low, high) if low <= tick <= high])
    kind = model.kinds[column] if model.kinds else ""
    ax.xaxis.set_major_formatter(lambda value, _: _tick(value, kind))


def _draw_bars(ax: Axes, model: Ensemble, same: Same, low: float, high: float) -> None:
    """Bars of the categories that add most, and at last missing values."""
    first = same[0][0]
    names = [plain(name, 18) for name in names_of(model.categories, first.columns[0]) or ()]
    codes = np.argsort(-(_weights(first) * np.abs(first.values))[:-1], kind="stable")[:_MOST_NAMES]
    codes = np.append(codes[np.argsort(-first.values[codes], kind="stable")], -1)
    rest = len(names) + 1 - len(codes)
    name_bars(
        ax, [*(names[code] for code in codes[:-1]), f"missing, +{rest}" if rest else "missing"]
    )
    for number, (each, pen) in enumerate(_pens(model, same)):
        at = np.arange(len(codes)) + 0.8 * ((number + 0.5) / len(same) - 0.5)
        values = np.array([of.values[codes] for of in each])
        ax.barh(at[:-1], values[0, :-1], 0.75 / len(same), **pen)
        ax.hlines(at, *np.percentile(values, (5, 95), axis=0), color=BLACK, linewidth=1)
        ax.plot(values[0, -1:], at[-1:], **_mark(each, pen))
    ax.axvline(0, color=BLACK, linewidth=0.8)
    ax.set(xlim=(low, high), xlabel=plain(model.columns[first.columns[0]]))


def _bounds(edges: npt.NDArray[np.float32]) -> Doubles:
    """Edges of all places, of which the outer ones are as wide as those beside them."""
    if not len(edges):
        return np.array([0.0, 1.0])
    widths = np.diff(edges)[[0, -1]] if len(edges) > 1 else (1.0, 1.0)
    return np.array([edges[0] - widths[0], *edges, edges[-1] + widths[1]], np.float64)


def _mark(same: Sequence[Curve], pen: Pen) -> Pen:
    """A mark of missing values, hollow where no rows of them are known."""
    color = pen["color"]
    face = color if same[0].weights[-1] > 0 else "none"
    return {"marker": "D", "color": color, "mfc": face, "ms": 5, "clip_on": False}


def _tick(value: float, kind: str) -> str:
    is_time = kind in ("date", "time")
    return rule_text(value, kind)[2:] if is_time else "-" * int(value < 0) + short(abs(value))


def _draw_pair(ax: Axes, model: Ensemble, curve: Curve, most: float) -> None:
    """A heat map of means over groups of places, without missing values."""
    values, axes = curve.values[:-1, :-1], (ax.xaxis, ax.yaxis)
    for side, (column, axis) in enumerate(zip(curve.columns, axes, strict=True)):
        n = values.shape[side]
        starts = np.unique(np.linspace(0, n, min(n, _MOST_CELLS), endpoint=False).astype(int))
        sizes = np.diff([*starts, n]).reshape((-1, 1) if side == 0 else (1, -1))
        values = np.add.reduceat(values, starts, axis=side) / sizes
        ticks = np.arange(1, len(starts), max(1, len(starts) // 4))
        if names := names_of(model.categories, column):
            texts = [plain(name, 10) for name in names]
            axis.set_ticks(np.arange(len(starts)) + 0.5, [texts[start] for start in starts])
            axis.set_tick_params(rotation=90 * (side == 0))
        else:
            kind, cuts = model.kinds[column] if model.kinds else "", curve.edges[side]
            axis.set_ticks(ticks, [_tick(cuts[starts[tick] - 1], kind) for tick in ticks])
        axis.set_label_text(plain(model.columns[column], 24))
    mesh = ax.pcolormesh(values.T, cmap=_COLORS, vmin=-most, vmax=most)
    ax.figure.colorbar(mesh, ax=ax).ax.tick_params(labelsize=9, colors=GREY)
    ax.grid(False)
