"""Figures of a comparison: scores against costs, by round, and as a ranking."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator
from numpy.typing import NDArray

from fedapp.report.canvas import BLACK, BLUE, SKY, line_style, new_canvas, new_pens, plain, to_svg
from fedapp.report.plots import Rounds, label_rounds, round_values
from fedapp.report.summary import score_text

Array = NDArray[np.float64]

_LABEL_GAP = 0.085  # between the centres of two labels, as a share of the axes' height
_LONGEST_LABEL = 40
_MARGIN = 0.08
_FAR = 5.0  # a score this many times the others' range away from them is off the axis
_FEWEST_NEAR = 3


def tradeoff(
    points: Sequence[tuple[str, float, float]],
    cost: str,
    metric: str,
    in_words: Callable[[float], str],
) -> str:
    """A metric against a cost on a logarithmic scale; `points` are (name, cost, score)."""
    figure, ax = new_canvas()
    drawn = sorted((point for point in points if np.isfinite(point[2])), key=lambda point: point[2])
    low, high = near_range([score for *_, score in drawn])
    bottom, top = _limits(low, high)
    ax.set(xscale="log", xlabel=cost, ylabel=metric, ylim=(bottom, top))
    costs = [max(spent, 1e-3) for _, spent, _ in drawn]
    heights = [min(max(score, bottom), top) for *_, score in drawn]
    ends = []
    for (name, _, score), x, y, (color, _) in zip(drawn, costs, heights, new_pens(), strict=False):
        mark = _marker(score, bottom, top, "v^")
        ax.plot([x], [y], mark, color=color, markersize=8, clip_on=False)
        ends.append((name, x, score, color))
    _name_beside(ax, ends)
    ax.margins(x=0.1)
    decades = np.log10(max(costs, default=1) / min(costs, default=1))
    steps = (1, 2, 5) if decades < 1 else (1, 3) if decades < 2.5 else (1,)
    ax.xaxis.set_major_locator(LogLocator(subs=steps))
    ax.xaxis.set_major_formatter(lambda spent, _: in_words(spent))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.tick_params(axis="x", rotation=30)
    return to_svg(figure)


def compared_scores(runs: Mapping[str, Rounds], metric: str) -> str:
    """A metric of several runs by round, on validation rows or else on training rows."""
    figure, ax = new_canvas()
    drawn: dict[str, tuple[list[int], Array]] = {}
    for name, rounds in runs.items():
        splits = {split: round_values(rounds, split, metric) for split in ("valid", "train")}
        split = next((split for split, values in splits.items() if np.isfinite(values).any()), "")
        if split:
            is_finite = np.isfinite(splits[split])
            numbers = [
                entry["round"]
                for entry, is_known in zip(rounds, is_finite, strict=True)
                if is_known
            ]
            drawn[f"{name}, {split}"] = numbers, splits[split][is_finite]
    curves = [values for _, values in drawn.values()]
    # Only curves that end near most others set the axis.
    low, high = near_range([float(values[-1]) for values in curves])
    low, high = near_range([float(v) for c in curves if low <= c[-1] <= high for v in c])
    bottom, top = _limits(low, high)
    ends = []
    for (name, (numbers, values)), (color, dash) in zip(drawn.items(), new_pens(), strict=False):
        ax.plot(numbers, values, dash, color=color, **line_style(numbers))
        ends.append((name, float(numbers[-1]), float(values[-1]), color))
    label_rounds(ax, metric)
    ax.set(ylim=(bottom, top))
    _name_beside(ax, ends)
    return to_svg(figure)


def ranking(points: Sequence[tuple[str, float, float, bool]], metric: str) -> str:
    """A metric with its spread, one line per point; baselines are paler than strategies."""
    # points: (name, mean, spread or nan, whether it is a baseline), in order
    figure, ax = new_canvas(height=max(2.2, 0.27 * len(points) + 0.8))
    low, high = near_range([mean for _, mean, _, _ in points if np.isfinite(mean)])
    spreads = [(m, s if np.isfinite(s) else 0.0) for _, m, s, _ in points if low <= m <= high]
    left, right = _limits(
        min((mean - spread for mean, spread in spreads), default=low),
        max((mean + spread for mean, spread in spreads), default=high),
    )
    for place, (_, mean, spread, is_baseline) in enumerate(points):
        if not np.isfinite(mean):
            continue
        color, x = SKY if is_baseline else BLUE, min(max(mean, left), right)
        error = spread if np.isfinite(spread) and x == mean else None
        style: dict[str, Any] = {"color": color, "markersize": 7, "capsize": 3, "clip_on": False}
        ax.errorbar(x, place, xerr=error, fmt=_marker(mean, left, right, "<>"), **style)
        if x != mean:  # off the axis: write its score on the inner side of the arrow
            way, side = (-8, "right") if mean > high else (8, "left")
            style = {"textcoords": "offset points", "va": "center", "fontsize": 9, "color": BLACK}
            ax.annotate(score_text(mean), (x, place), xytext=(way, 0), ha=side, **style)
    names = [plain(name, _LONGEST_LABEL) for name, *_ in points]
    ax.set_yticks(np.arange(len(points)), names, parse_math=False)
    ax.invert_yaxis()
    ax.margins(y=0.04)
    ax.tick_params(axis="y", labelsize=9)
    ax.set(xlabel=metric, xlim=(left, right))
    ax.xaxis.set_major_locator(MaxNLocator(nbins=4))
    return to_svg(figure)


def _name_beside(ax: Axes, ends: Sequence[tuple[str, float, float, str]]) -> None:
    """Names beside the axes without overlap; `ends` are (name, x, score, colour)."""
    bottom, top = ax.get_ylim()
    heights = [min(max(score, bottom), top) for _, _, score, _ in ends]
    places = spread_out([(y - bottom) / (top - bottom) for y in heights])
    for (name, x, score, color), y, place in zip(ends, heights, places, strict=True):
        ax.annotate(
            plain(name) if y == score else f"{plain(name)}: {score_text(score)}",
            (x, y),
            xytext=(1.04, place),
            textcoords="axes fraction",
            va="center",
            fontsize=9,
            color=BLACK,
            parse_math=False,
            arrowprops={
                "arrowstyle": "-",
                "color": color,
                "linewidth": 0.8,
                "shrinkB": 5,
                "relpos": (0, 0.5),  # the line ends at the start of the name
            },
        )


def near_range(scores: Sequence[float]) -> tuple[float, float]:
    """Lowest and highest score to draw to scale: a few distant outliers are excluded.

    At least three quarters of the scores, and 3, are within the range.
    """
    near = sorted(scores)
    fewest = max(_FEWEST_NEAR, -(-3 * len(near) // 4))
    while len(near) > fewest:
        gaps = near[1] - near[0], near[-1] - near[-2]
        inner = near[1:] if gaps[0] > gaps[1] else near[:-1]
        if not max(gaps) > _FAR * (inner[-1] - inner[0]) > 0:
            break
        near = inner
    return (near[0], near[-1]) if near else (0.0, 1.0)


def spread_out(places: Sequence[float]) -> list[float]:
    """Move label positions in [0, 1] apart by `_LABEL_GAP`, as little as possible."""
    order = sorted(range(len(places)), key=lambda k: (places[k], k))
    gap = min(_LABEL_GAP, 1 / max(len(places) - 1, 1))
    positions = [places[k] for k in order]
    for k in range(1, len(positions)):
        positions[k] = max(positions[k], positions[k - 1] + gap)
    for k in reversed(range(len(positions))):
        positions[k] = min(positions[k], 1 - gap * (len(positions) - 1 - k))
    by_label = dict(zip(order, positions, strict=True))
    return [by_label[k] for k in range(len(places))]


def _limits(low: float, high: float) -> tuple[float, float]:
    """Axis limits, with a margin around the first and last mark."""
    margin = _MARGIN * ((high - low) or abs(high) or 1.0)
    return low - margin, high + margin


def _marker(score: float, low: float, high: float, beyond: str) -> str:
    """A dot, or an arrow for a score below or above the axis."""
    return beyond[0] if score < low else beyond[1] if score > high else "o"
