"""The figures of a comparison: scores against costs, by round, and one below the other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator
from numpy.typing import NDArray

from fedapp.report.canvas import (
    BLACK,
    BLUE,
    SKY,
    line_style,
    new_canvas,
    new_pens,
    plain,
    to_svg,
)
from fedapp.report.plots import Rounds, label_rounds, round_values
from fedapp.report.summary import score_text

Array = NDArray[np.float64]

_LABEL_GAP = 0.085  # between the middles of two labels, share of the height of the axes
_LONGEST_LABEL = 40
_MARGIN = 0.08
# A score is off the axis where its distance from the others is so many times their range.
_FAR = 5.0
_FEWEST_NEAR = 3


def tradeoff(
    points: Sequence[tuple[str, float, float]],
    cost: str,
    metric: str,
    in_words: Callable[[float], str],
) -> str:
    """A metric against what it costs, a point a strategy; the cost on a logarithmic scale.

    Names stand beside the axes, each at the end of a line from its point.
    """
    figure, ax = new_canvas()
    known = sorted((one for one in points if np.isfinite(one[2])), key=lambda one: one[2])
    low, high = near_range([score for *_, score in known])
    bottom, top = _limits(low, high)
    ax.set(xscale="log", xlabel=cost, ylabel=metric, ylim=(bottom, top))
    costs = [max(spent, 1e-3) for _, spent, _ in known]
    heights = [min(max(score, bottom), top) for *_, score in known]
    ends = []
    for (name, _, score), x, y, (color, _) in zip(known, costs, heights, new_pens(), strict=False):
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
    """A metric of several runs: on validation rows, or on training rows where a run has none.

    Names stand beside the axes. A run whose last score is far from all others does not set the
    axis.
    """
    figure, ax = new_canvas()
    drawn: dict[str, tuple[list[int], Array]] = {}
    for name, rounds in runs.items():
        splits = {split: round_values(rounds, split, metric) for split in ("valid", "train")}
        split = next((split for split, found in splits.items() if np.isfinite(found).any()), "")
        if split:
            known = np.isfinite(splits[split])
            numbers = [
                entry["round"] for entry, is_known in zip(rounds, known, strict=True) if is_known
            ]
            drawn[f"{name}, {split}"] = numbers, splits[split][known]
    bottom, top = _limits(*_range_of([values for _, values in drawn.values()]))
    ends = []
    for (name, (numbers, values)), (color, dash) in zip(drawn.items(), new_pens(), strict=False):
        ax.plot(numbers, values, dash, color=color, **line_style(numbers))
        ends.append((name, float(numbers[-1]), float(values[-1]), color))
    label_rounds(ax, metric)
    ax.set(ylim=(bottom, top))
    _name_beside(ax, ends)
    return to_svg(figure)


def ranking(points: Sequence[tuple[str, float, float, bool]], metric: str) -> str:
    """A metric with its spread, a line a point; baselines paler than strategies.

    Parameters
    ----------
    points : name, mean, spread (nan for one seed), and whether it is a baseline; in order.
    """
    figure, ax = new_canvas(height=max(2.2, 0.27 * len(points) + 0.8))
    low, high = near_range([mean for _, mean, _, _ in points if np.isfinite(mean)])
    left, right = _limits(*_reach(points, low, high))
    for place, (_, mean, spread, is_baseline) in enumerate(points):
        if not np.isfinite(mean):
            continue
        color, x = SKY if is_baseline else BLUE, min(max(mean, left), right)
        error = spread if np.isfinite(spread) and x == mean else None
        given: dict[str, Any] = {"color": color, "markersize": 7, "capsize": 3, "clip_on": False}
        ax.errorbar(x, place, xerr=error, fmt=_marker(mean, left, right, "<>"), **given)
        if x != mean:
            _beside(ax, x, place, score_text(mean), is_left=mean > high)
    names = [plain(name, _LONGEST_LABEL) for name, *_ in points]
    ax.set_yticks(np.arange(len(points)), names, parse_math=False)
    ax.invert_yaxis()
    ax.margins(y=0.04)
    ax.tick_params(axis="y", labelsize=9)
    ax.set(xlabel=metric, xlim=(left, right))
    ax.xaxis.set_major_locator(MaxNLocator(nbins=4))
    return to_svg(figure)


def _range_of(curves: Sequence[Array]) -> tuple[float, float]:
    """Lowest and highest score of the curves that end near most others."""
    low, high = near_range([float(values[-1]) for values in curves])
    return near_range([float(v) for values in curves if low <= values[-1] <= high for v in values])


def _name_beside(ax: Axes, ends: Sequence[tuple[str, float, float, str]]) -> None:
    """Names beside the axes, none upon another: each one's name, x, score and colour."""
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
                "relpos": (0, 0.5),  # to where the name begins, and not through it
            },
        )


def near_range(scores: Sequence[float]) -> tuple[float, float]:
    """Lowest and highest score to draw to scale: a few that lie far from all others are excluded.

    Three quarters of the scores at least, and 3, are within the range.
    """
    rest = sorted(scores)
    fewest = max(_FEWEST_NEAR, -(-3 * len(rest) // 4))
    while len(rest) > fewest:
        gaps = rest[1] - rest[0], rest[-1] - rest[-2]
        inner = rest[1:] if gaps[0] > gaps[1] else rest[:-1]
        if not max(gaps) > _FAR * (inner[-1] - inner[0]) > 0:
            break
        rest = inner
    return (rest[0], rest[-1]) if rest else (0.0, 1.0)


def spread_out(places: Sequence[float]) -> list[float]:
    """Places of labels, as near to the given ones as their height and the axes allow.

    Parameters
    ----------
    places : within [0, 1], from the bottom up; need not be in order.
    """
    order = sorted(range(len(places)), key=lambda k: (places[k], k))
    gap = min(_LABEL_GAP, 1 / max(len(places) - 1, 1))
    found = [places[k] for k in order]
    for k in range(1, len(found)):
        found[k] = max(found[k], found[k - 1] + gap)
    for k in reversed(range(len(found))):
        found[k] = min(found[k], 1 - gap * (len(found) - 1 - k))
    apart = dict(zip(order, found, strict=True))
    return [apart[k] for k in range(len(places))]


def _limits(low: float, high: float) -> tuple[float, float]:
    """Ends of an axis, with room beside the first mark and the last."""
    margin = _MARGIN * ((high - low) or abs(high) or 1.0)
    return low - margin, high + margin


def _marker(score: float, low: float, high: float, beyond: str) -> str:
    """A dot, or the arrow of a score that is below or above the axis."""
    return beyond[0] if score < low else beyond[1] if score > high else "o"


def _beside(ax: Axes, x: float, y: float, text: str, is_left: bool) -> None:
    """The score of a mark at the edge, on its inner side."""
    way, side = (-8, "right") if is_left else (8, "left")
    given: dict[str, Any] = {"va": "center", "fontsize": 9, "color": BLACK}
    ax.annotate(text, (x, y), xytext=(way, 0), textcoords="offset points", ha=side, **given)


def _reach(
    points: Sequence[tuple[str, float, float, bool]], low: float, high: float
) -> tuple[float, float]:
    """The range of the scores on the axis, with their spreads."""
    drawn = [
        (mean, spread if np.isfinite(spread) else 0.0)
        for _, mean, spread, _ in points
        if low <= mean <= high
    ]
    lows, highs = [mean - spread for mean, spread in drawn], [sum(pair) for pair in drawn]
    return min(lows, default=low), max(highs, default=high)
