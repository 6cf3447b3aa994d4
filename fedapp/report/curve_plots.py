"""Figures of a model's predictions: its curves from the summary, beside its baselines'."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from matplotlib.ticker import PercentFormatter
from numpy.typing import NDArray

from fedapp.report.canvas import (
    BLACK,
    BLUE,
    GREY,
    VERMILION,
    add_legend,
    add_legend_below,
    new_canvas,
    new_pens,
    plain,
    to_svg,
)

Curves = Mapping[str, Mapping[str, Sequence[float]]]  # model -> axis -> values

Array: TypeAlias = NDArray[np.float64]

_SQUARE = 4.6, 4.4
_N_BARS = 30


def roc(models: Curves, legend_below: bool = False) -> str:
    """ROC curves: each with fpr and tpr."""
    figure, ax = new_canvas(*_SQUARE)
    ax.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle=":")
    _draw(ax, models, "fpr", "tpr", with_legend=not legend_below)
    if legend_below:
        add_legend_below(figure)
    ax.set(xlabel="false positive rate", ylabel="true positive rate")
    return to_svg(figure)


def precision_recall(models: Curves, positive_share: float) -> str:
    """Precision by recall; the share of positives is what guessing achieves."""
    figure, ax = new_canvas(*_SQUARE)
    ax.axhline(positive_share, color=GREY, linewidth=1, linestyle=":")
    _draw(ax, models, "recall", "precision")
    ax.set(xlabel="recall", ylabel="precision")
    return to_svg(figure)


def calibration(models: Curves) -> str:
    """Share of positives by predicted probability; the diagonal is perfect calibration."""
    figure, ax = new_canvas(*_SQUARE)
    ax.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle=":")
    _draw(ax, models, "predicted", "observed", marker="o", markersize=4)
    ax.set(xlabel="predicted probability, mean of a group", ylabel="share of positives")
    return to_svg(figure)


def score_histogram(histogram: Mapping[str, Sequence[float]], classes: Sequence[str]) -> str:
    """Predicted probability of the second class, by true class; each adds up to 1."""
    figure, ax = new_canvas(*_SQUARE)
    for name, key, color in zip(
        classes, ("negatives", "positives"), (BLUE, VERMILION), strict=True
    ):
        weights = np.asarray(histogram[key], dtype=np.float64)
        shares = weights / max(weights.sum(), 1e-300)
        label, edges = plain(name), histogram["edges"]
        ax.stairs(shares, edges, fill=True, color=color, alpha=0.35)
        ax.stairs(shares, edges, color=color, linewidth=1.6, label=label)
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    ax.set(xlim=(0, 1), xlabel="predicted probability", ylabel="share of the class's rows")
    add_legend(ax, above=True)
    return to_svg(figure, classes)


def residuals(models: Curves) -> str:
    """Histograms of label minus prediction over the non-empty bins, in 30 bars."""
    # Each model has edges and counts; the first model's histogram is filled.
    figure, ax = new_canvas()
    edges = [np.asarray(histogram["edges"], dtype=np.float64) for histogram in models.values()]
    weights = [np.asarray(histogram["counts"], dtype=np.float64) for histogram in models.values()]
    used = [
        (bin_edges[:-1][counts > 0], bin_edges[1:][counts > 0])
        for bin_edges, counts in zip(edges, weights, strict=True)
    ]
    lows, highs = (np.concatenate(each) for each in zip(*used, strict=True))
    low, high = (float(lows.min()), float(highs.max())) if lows.size else (-1.0, 1.0)
    bars = np.linspace(low, high, _N_BARS + 1)
    for place, (name, (color, dash)) in enumerate(zip(models, new_pens(), strict=False)):
        middles = (edges[place][1:] + edges[place][:-1]) / 2
        sums = np.histogram(middles, bars, weights=weights[place])[0]
        if not place:
            ax.stairs(sums, bars, fill=True, color=color, alpha=0.35)
        ax.stairs(sums, bars, color=color, linestyle=dash, linewidth=1.6, label=plain(name))
    ax.axvline(0, color=BLACK, linewidth=1, linestyle=":")
    ax.set(xlabel="residual: label - prediction (units of the label)", ylabel="rows (weighted)")
    if len(models) > 1:
        add_legend(ax, above=True)
    return to_svg(figure)


def _draw(ax: Any, models: Curves, x: str, y: str, with_legend: bool = True, **style: Any) -> None:
    """A line per model; the first is the run's and is thicker."""
    for place, ((name, curve), (color, dash)) in enumerate(
        zip(models.items(), new_pens(), strict=False)
    ):
        width = 1.4 if place else 2.2
        label = plain(name)
        ax.plot(curve[x], curve[y], dash, color=color, linewidth=width, label=label, **style)
    if with_legend and len(models) > 1:
        add_legend(ax)
    ax.set(xlim=(-0.01, 1.01), ylim=(-0.01, 1.01), aspect="equal")
