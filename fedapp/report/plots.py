"""The figures of a report: plain data in, an SVG element out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullLocator
from numpy.typing import ArrayLike, NDArray

from fedapp.report.canvas import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    SKY,
    add_legend,
    line_style,
    new_canvas,
    new_pens,
    plain,
    to_svg,
)

Rounds: TypeAlias = Sequence[Mapping[str, Any]]
Array: TypeAlias = NDArray[np.float64]

_N_NAMED_CLASSES = 12  # beyond, a confusion matrix has no room for numbers
_N_BARS = 60
_N_COLUMNS = 20


def scores_by_tree(rounds: Rounds, metric: str, best_round: int | None = None) -> str:
    """A metric of one run, on training and validation rows, tree by tree."""
    figure, ax = new_canvas()
    trees = [entry["round"] for entry in rounds]
    for split, color, dash in (("train", ORANGE, "--"), ("valid", BLUE, "-")):
        values = _values(rounds, split, metric)
        if np.isfinite(values).any():
            ax.plot(trees, values, dash, color=color, label=split, **line_style(trees))
    if best_round is not None:
        ax.axvline(best_round, color=GREY, linewidth=1, linestyle=":", label="best round")
    _label_trees(ax, metric)
    add_legend(ax)
    return to_svg(figure)


def compared_scores(runs: Mapping[str, Rounds], metric: str) -> str:
    """A metric of several runs: on validation rows, or on training rows where a run has none."""
    figure, ax = new_canvas()
    for (name, rounds), (color, dash) in zip(runs.items(), new_pens(), strict=False):
        trees, split = [entry["round"] for entry in rounds], "valid"
        if not np.isfinite(_values(rounds, split, metric)).any():
            split = "train"
        values = _values(rounds, split, metric)
        label = plain(f"{name}, {split}")
        ax.plot(trees, values, dash, color=color, label=label, **line_style(trees))
    _label_trees(ax, metric)
    add_legend(ax)
    return to_svg(figure)


def roc(runs: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """ROC curves, by the run's name: each with fpr and tpr."""
    figure, ax = new_canvas(width=4.6, height=4.4)
    ax.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle=":")
    for (name, curve), (color, dash) in zip(runs.items(), new_pens(), strict=False):
        ax.plot(curve["fpr"], curve["tpr"], dash, color=color, linewidth=2, label=plain(name))
    if len(runs) == 1:
        only = next(iter(runs.values()))
        ax.fill_between(only["fpr"], only["tpr"], color=BLUE, alpha=0.08, linewidth=0)
    else:
        add_legend(ax)
    ax.set(xlim=(-0.01, 1.01), ylim=(-0.01, 1.01), aspect="equal")
    ax.set(xlabel="false positive rate", ylabel="true positive rate")
    return to_svg(figure)


def confusion(counts: Sequence[Sequence[float]]) -> str:
    """Confusion matrix: rows true classes, columns predicted; shaded by the share of the row."""
    cells = np.asarray(counts, dtype=np.float64)
    totals = cells.sum(axis=1, keepdims=True)
    shares = np.divide(cells, totals, out=np.zeros_like(cells), where=totals > 0)
    figure, ax = new_canvas(width=5.2, height=4.4)
    ax.grid(False)
    image = ax.imshow(shares, cmap="Blues", vmin=0.0, vmax=1.0)
    if len(cells) <= _N_NAMED_CLASSES:
        for (row, column), count in np.ndenumerate(cells):
            color = "white" if shares[row, column] > 0.55 else (BLACK if count else "#b0b0b0")
            text = f"{count:,.0f}"
            ax.text(column, row, text, ha="center", va="center", color=color, fontsize=9)
        ax.set_xticks(range(len(cells)))
        ax.set_yticks(range(len(cells)))
    bar = figure.colorbar(image, ax=ax, shrink=0.8)
    bar.set_label("share of the true class", color=GREY)
    bar.outline.set_visible(False)
    bar.ax.tick_params(colors=GREY, labelsize=9)
    ax.set(xlabel="predicted class", ylabel="true class")
    return to_svg(figure)


def residuals(edges: Sequence[float], counts: Sequence[float]) -> str:
    """Histogram of label minus prediction, over the bins in use, in at most 60 bars."""
    cuts, weights = np.asarray(edges, dtype=np.float64), np.asarray(counts, dtype=np.float64)
    used = np.flatnonzero(weights)
    first, last = (used[0], used[-1] + 1) if used.size else (0, weights.size)
    starts = np.arange(first, last, -(-(last - first) // _N_BARS))
    sums = np.add.reduceat(weights[:last], starts)
    figure, ax = new_canvas()
    ax.stairs(sums, np.append(cuts[starts], cuts[last]), fill=True, color=BLUE)
    ax.axvline(0, color=BLACK, linewidth=1, linestyle=":")
    ax.set(xlabel="residual: label - prediction (units of the label)", ylabel="rows (weighted)")
    return to_svg(figure)


def importance(worth: Mapping[str, float], label: str = "sum of gains") -> str:
    """Total gain, or number of splits, of the 20 columns that have most of it."""
    best = sorted(worth.items(), key=lambda item: item[1], reverse=True)[:_N_COLUMNS]
    figure, ax = new_canvas(height=0.8 + 0.22 * len(best))
    places = range(len(best))
    ax.barh(places, [value for _, value in best], color=BLUE, height=0.7)
    ax.set_yticks(places, [plain(name) for name, _ in best], parse_math=False)
    ax.invert_yaxis()
    ax.grid(False, axis="y")
    ax.tick_params(axis="y", length=0)
    ax.xaxis.set_major_formatter(EngFormatter(sep=""))
    ax.margins(y=0.01)
    ax.set(xlabel=label)
    return to_svg(figure)


def learning_rates(rates: Mapping[str, Sequence[float]], weights: Mapping[str, float]) -> str:
    """Learned rate of each tree, a line a party; the party's weight stands beside its name."""
    figure, ax = new_canvas()
    for (name, values), (color, dash) in zip(rates.items(), new_pens(), strict=False):
        label = f"{plain(name)}, Z {weights[name]:.3g}"
        trees = np.arange(1, len(values) + 1)
        ax.plot(trees, values, dash, color=color, label=label, linewidth=1)
    ax.axhline(0.0, color=GREY, linewidth=1)
    ax.set(xlabel="tree of the party", ylabel="learned rate")
    add_legend(ax)
    return to_svg(figure)


def purity(shares: Mapping[str, Sequence[float]]) -> str:
    """Leaf purity round by round, a line a view."""
    figure, ax = new_canvas()
    for (name, values), (color, dash) in zip(shares.items(), new_pens(), strict=False):
        trees = list(range(1, len(values) + 1))
        ax.plot(trees, values, dash, color=color, label=plain(name), **line_style(trees))
    _label_trees(ax, "purity")
    add_legend(ax)
    return to_svg(figure)


def traffic_by_tree(rounds: Rounds) -> str:
    """Bytes of each tree, those to the server on top of those to the parties."""
    figure, ax = new_canvas()
    edges = _edges(rounds)
    down, up = (_of(rounds, "bytes", way) for way in ("to_parties", "to_server"))
    ax.stairs(down, edges, fill=True, color=ORANGE, label="to parties")
    ax.stairs(down + up, edges, baseline=down, fill=True, color=BLUE, label="to server")
    ax.yaxis.set_major_formatter(EngFormatter(unit="B"))
    _label_trees(ax, "size of messages")
    add_legend(ax, above=True)
    return to_svg(figure)


def traffic_by_party(sizes: Mapping[str, Sequence[int]]) -> str:
    """Bytes of the whole run, by party: (to the party, from the party)."""
    figure, ax = new_canvas(height=1.4 + 0.25 * len(sizes))
    places = np.arange(len(sizes))
    down, up = np.asarray(list(sizes.values()), dtype=np.float64).reshape(-1, 2).T
    ax.barh(places, down, color=ORANGE, height=0.7, label="to the party")
    ax.barh(places, up, left=down, color=BLUE, height=0.7, label="from the party")
    ax.set_yticks(places, [plain(name) for name in sizes], parse_math=False)
    ax.invert_yaxis()
    ax.grid(False, axis="y")
    ax.tick_params(axis="y", length=0)
    ax.xaxis.set_major_formatter(EngFormatter(unit="B"))
    ax.set(xlabel="size of messages")
    add_legend(ax, above=True)
    return to_svg(figure)


def effort_by_tree(rounds: Rounds) -> str:
    """Exchanges (above) and seconds (below) of each tree."""
    figure, upper = new_canvas(rows=2)
    edges, lower = _edges(rounds), figure.axes[1]
    totals = np.asarray([entry["exchanges"] for entry in rounds], dtype=np.float64)
    upper.stairs(np.diff(totals, prepend=0.0), edges, fill=True, color=GREEN)
    lower.stairs(_of(rounds, "seconds"), edges, fill=True, color=PINK)
    upper.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=4))
    lower.yaxis.set_major_locator(MaxNLocator(nbins=4))
    upper.set_ylabel("exchanges")
    upper.tick_params(labelbottom=False)
    _label_trees(lower, "seconds")
    return to_svg(figure)


def tradeoff(
    points: Sequence[tuple[str, float, float]],
    cost: str,
    metric: str,
    in_words: Callable[[float], str],
) -> str:
    """A metric against what it costs, a named point a strategy; the cost on a logarithmic scale."""
    figure, ax = new_canvas()
    for (name, spent, score), (color, _) in zip(points, new_pens(), strict=False):
        ax.plot([max(spent, 1e-3)], [score], "o", color=color, markersize=8)
        ax.annotate(
            plain(name),
            (max(spent, 1e-3), score),
            xytext=(6, 6),
            textcoords="offset points",
            fontsize=9,
            parse_math=False,
        )
    ax.set(xscale="log", xlabel=cost, ylabel=metric)
    ax.margins(x=0.25, y=0.2)
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.xaxis.set_major_formatter(lambda spent, _: in_words(spent))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.tick_params(axis="x", rotation=30)
    return to_svg(figure)


def ranking(points: Sequence[tuple[str, float, float, bool]], metric: str) -> str:
    """A metric with its spread, a point each; baselines paler than strategies."""
    figure, ax = new_canvas(height=max(2.2, 0.36 * len(points) + 0.8))
    for place, (_, mean, spread, is_baseline) in enumerate(points):
        color = SKY if is_baseline else BLUE
        ax.errorbar(mean, place, xerr=spread, fmt="o", color=color, markersize=8, capsize=3)
    names = [plain(name) for name, *_ in points]
    ax.set_yticks(np.arange(len(points)), names, parse_math=False)
    ax.invert_yaxis()
    ax.margins(y=0.1)
    ax.set_xlabel(metric)
    return to_svg(figure)


def _label_trees(ax: Axes, ylabel: str) -> None:
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
    ax.set(xlabel="boosting round", ylabel=ylabel)
    low, high = ax.get_xlim()
    if high - low < 1:  # one round
        ax.set_xlim(low - 0.5, high + 0.5)


def _values(rounds: Rounds, split: str, metric: str) -> Array:
    """A metric in each round, nan where it is absent or undefined."""
    values = [entry[split].get(metric) for entry in rounds]
    return np.asarray([np.nan if v is None else v for v in values], dtype=np.float64)


def _of(rounds: Rounds, *keys: str) -> Array:
    values: list[ArrayLike] = []
    for entry in rounds:
        value: Any = entry
        for key in keys:
            value = value[key]
        values.append(value)
    return np.asarray(values, dtype=np.float64)


def _edges(rounds: Rounds) -> Array:
    """Edges of one bar a round."""
    trees = np.asarray([entry["round"] for entry in rounds], dtype=np.float64)
    return np.append(trees - 0.5, trees[-1] + 0.5)
