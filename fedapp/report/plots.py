"""Figures of a report: plain data in, an SVG element out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, MaxNLocator, PercentFormatter
from numpy.typing import NDArray

from fedapp.report.canvas import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    add_legend,
    line_style,
    new_canvas,
    new_pens,
    plain,
    to_svg,
)

Rounds: TypeAlias = Sequence[Mapping[str, Any]]
Array: TypeAlias = NDArray[np.float64]

ROUND = "boosting round"
N_COLUMNS = 20


def scores_by_round(
    rounds: Rounds, metric: str, best_round: int | None = None, round_name: str = ROUND
) -> str:
    """A metric of one run by round, on training and validation rows."""
    figure, ax = new_canvas()
    trees = [entry["round"] for entry in rounds]
    for split, color, dash in (("train", ORANGE, "--"), ("valid", BLUE, "-")):
        values = round_values(rounds, split, metric)
        if np.isfinite(values).any():
            ax.plot(trees, values, dash, color=color, label=split, **line_style(trees))
    if best_round is not None:
        ax.axvline(best_round, color=GREY, linewidth=1, linestyle=":", label="best round")
    label_rounds(ax, metric, round_name)
    add_legend(ax)
    return to_svg(figure)


def importance(gains: Mapping[str, float], baseline: Mapping[str, float] | None = None) -> str:
    """Shares of the total gain of the 20 columns with the largest; gains are by column."""
    best = _largest(gains)
    figure, ax = new_canvas(height=0.9 + (0.32 if baseline else 0.22) * len(best))
    models = {"federated": (gains, BLUE)} | ({"pooled": (baseline, ORANGE)} if baseline else {})
    height = 0.76 / len(models)
    for place, (name, (of_model, color)) in enumerate(models.items()):
        total = sum(of_model.values()) or 1.0
        at = np.arange(len(best)) + (place - (len(models) - 1) / 2) * height
        shares = [of_model.get(column, 0.0) / total for column in best]
        ax.barh(at, shares, color=color, height=height, label=name)
    ax.xaxis.set_major_formatter(PercentFormatter(1.0))
    _name_bars(ax, best)
    ax.set(xlabel="share of the total gain")
    if baseline:
        add_legend(ax, above=True)
    return to_svg(figure, best)


def column_bars(values: Mapping[str, float], label: str) -> str:
    """Values by column, for the 20 largest absolute values."""
    best = _largest(values)
    figure, ax = new_canvas(height=0.8 + 0.22 * len(best))
    ax.barh(range(len(best)), [values[name] for name in best], color=BLUE, height=0.7)
    if min(values.values()) < 0:
        ax.axvline(0, color=BLACK, linewidth=1)
    _name_bars(ax, best)
    ax.set(xlabel=label)
    return to_svg(figure, best)


def learning_rates(rates: Mapping[str, Sequence[float]], weights: Mapping[str, float]) -> str:
    """Learned rate of each tree, one line per party, labelled with the party's weight."""
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
    """Leaf purity by round, one line per view."""
    figure, ax = new_canvas()
    for (name, values), (color, dash) in zip(shares.items(), new_pens(), strict=False):
        trees = list(range(1, len(values) + 1))
        ax.plot(trees, values, dash, color=color, label=plain(name), **line_style(trees))
    label_rounds(ax, "purity")
    add_legend(ax)
    return to_svg(figure)


def traffic_by_round(rounds: Rounds, round_name: str = ROUND) -> str:
    """Bytes of each round, those to the server on top of those to the parties."""
    figure, ax = new_canvas()
    edges = _edges(rounds)
    ways = ("to_parties", "to_server")
    down, up = (np.array([entry["bytes"][way] for entry in rounds], np.float64) for way in ways)
    ax.stairs(down, edges, fill=True, color=ORANGE, label="to parties")
    ax.stairs(down + up, edges, baseline=down, fill=True, color=BLUE, label="to server")
    ax.yaxis.set_major_formatter(EngFormatter(unit="B"))
    label_rounds(ax, "size of messages", round_name)
    add_legend(ax, above=True)
    return to_svg(figure)


def traffic_by_party(sizes: Mapping[str, Sequence[int]]) -> str:
    """Bytes of the whole run by party: (to the party, from the party)."""
    figure, ax = new_canvas(height=1.4 + 0.25 * len(sizes))
    places = np.arange(len(sizes))
    down, up = np.asarray(list(sizes.values()), dtype=np.float64).reshape(-1, 2).T
    ax.barh(places, down, color=ORANGE, height=0.7, label="to the party")
    ax.barh(places, up, left=down, color=BLUE, height=0.7, label="from the party")
    _name_bars(ax, list(sizes))
    ax.xaxis.set_major_formatter(EngFormatter(unit="B"))
    ax.set(xlabel="size of messages")
    add_legend(ax, above=True)
    return to_svg(figure, list(sizes))


def effort_by_round(rounds: Rounds, round_name: str = ROUND) -> str:
    """Exchanges (above) and seconds (below) of each round."""
    figure, upper = new_canvas(rows=2)
    edges, lower = _edges(rounds), figure.axes[1]
    totals = np.asarray([entry["exchanges"] for entry in rounds], dtype=np.float64)
    upper.stairs(np.diff(totals, prepend=0.0), edges, fill=True, color=GREEN)
    seconds = np.asarray([entry["seconds"] for entry in rounds], dtype=np.float64)
    lower.stairs(seconds, edges, fill=True, color=PINK)
    upper.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=4))
    lower.yaxis.set_major_locator(MaxNLocator(nbins=4))
    upper.set_ylabel("exchanges")
    upper.tick_params(labelbottom=False)
    label_rounds(lower, "seconds", round_name)
    return to_svg(figure)


def _largest(values: Mapping[str, float]) -> list[str]:
    return sorted(values, key=lambda name: abs(values[name]), reverse=True)[:N_COLUMNS]


def _name_bars(ax: Axes, names: Sequence[str]) -> None:
    shown = [plain(name) for name in names]
    ax.set_yticks(range(len(names)), shown, parse_math=False)
    ax.invert_yaxis()
    ax.grid(False, axis="y")
    ax.tick_params(axis="y", length=0)
    ax.margins(y=0.01)


def label_rounds(ax: Axes, ylabel: str, round_name: str = ROUND) -> None:
    """Label the axes of a figure by round; ticks are whole numbers."""
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
    ax.set(xlabel=round_name, ylabel=ylabel)
    low, high = ax.get_xlim()
    if high - low < 1:  # one round
        ax.set_xlim(low - 0.5, high + 0.5)


def round_values(rounds: Rounds, split: str, metric: str) -> Array:
    """A metric in each round; nan where it is absent or undefined."""
    values = [entry[split].get(metric) for entry in rounds]
    return np.asarray([np.nan if v is None else v for v in values], dtype=np.float64)


def _edges(rounds: Rounds) -> Array:
    trees = np.asarray([entry["round"] for entry in rounds], dtype=np.float64)
    return np.append(trees - 0.5, trees[-1] + 0.5)
