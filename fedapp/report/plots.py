"""Figures of a report: plain data in, a matplotlib figure out.

First the figures of a run by round and column, then those of its predictions, then those of a
comparison; at last the canvas that all share. Colours become CSS variables of the page.
"""

from __future__ import annotations

import hashlib
import io
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from typing import Any, TypeAlias

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullLocator
from numpy.typing import NDArray

Rounds: TypeAlias = Sequence[Mapping[str, Any]]
Array: TypeAlias = NDArray[np.float64]
Curves: TypeAlias = Mapping[str, Mapping[str, Sequence[float]]]  # model -> axis -> values

N_COLUMNS = 20
RATES = ("false positive rate", "true positive rate")

# Okabe and Ito's palette, safe for colour-blind readers; dashes distinguish lines in print.
BLUE, VERMILION, GREEN, ORANGE = "#0072B2", "#D55E00", "#009E73", "#E69F00"
PINK, SKY, BLACK = "#CC79A7", "#56B4E9", "#222222"
PALETTE = (BLUE, VERMILION, GREEN, ORANGE, PINK, SKY, BLACK)
DASHES = ("-", "--", "-.", ":")
SHAPES = ("o", "s", "D", "P")
GREY, GRID, LINE = "#555555", "#e4e4e4", "#aaaaaa"

# inches; twice the page's resolution
_WIDTH = 5.2
_HEIGHT = 3.3
_DPI = 180
_LONGEST_NAME = 32
_LEGEND_LINE = 0.23  # inches
_LEGEND: dict[str, Any] = {"frameon": False, "fontsize": 10, "labelcolor": BLACK}
_SQUARE, _N_BARS = (4.6, 4.4), 30
_LONGEST_LABEL = 40


def scores_by_round(
    rounds: Rounds, metric: str, best_round: int | None, round_name: str
) -> Drawing:
    """A metric of one run by round, on training and validation rows."""
    figure, ax = new_canvas("learning_curve")
    style: dict[str, Any] = {
        "linewidth": 2,
        "marker": "o" if len(rounds) <= 30 else "",
        "markersize": 3.5,
    }
    trees = [entry["round"] for entry in rounds]
    for split, color, dash in (("train", ORANGE, "--"), ("valid", BLUE, "-")):
        values = np.array([entry[split].get(metric) for entry in rounds], np.float64)
        if np.isfinite(values).any():
            ax.plot(trees, values, dash, color=color, label=split, **style)
    if best_round is not None:
        ax.axvline(best_round, color=GREY, linewidth=1, linestyle=":", label="best round")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
    ax.set(xlabel=round_name, ylabel=metric)
    low, high = ax.get_xlim()
    if high - low < 1:  # one round
        ax.set_xlim(low - 0.5, high + 0.5)
    add_legend(ax)
    return figure


def intervals(
    models: Mapping[str, Sequence[float]], differences: Mapping[str, Sequence[float]], metric: str
) -> Drawing:
    """Scores of models with their intervals, and how much the first one's is above each other's.

    Of each model the score and the ends of its interval, which may be absent, in order.
    """
    height = 1.1 + 0.3 * len(models)
    figure, left = new_canvas("intervals", height=height, columns=2)
    right = figure.axes[1]
    names = list(models)
    for ax, spans in ((left, models), (right, differences)):
        for y, name in enumerate(names):
            value, *ends = spans.get(name, ()) or (np.nan,)
            is_certain = ax is right and not ends[0] <= 0 <= ends[1] if ends else False
            stressed = is_certain or (ax is left and not y)
            style: dict[str, Any] = {"color": BLUE if stressed else GREY, "linewidth": 2}
            ax.plot(ends, [y] * len(ends), **style)
            ax.plot([value], [y], "o", markersize=6, **style)
        ax.margins(x=0.1)
        ax.xaxis.set_major_locator(MaxNLocator(nbins=3))
    name_bars(left, names)
    name_bars(right, [""] * len(names))
    for ax in (left, right):
        ax.set_ylim(len(names) - 0.5, -0.5)
    right.axvline(0, color=BLACK, linewidth=1, linestyle=":")
    left.set(xlabel=f"test {metric}")
    right.set(xlabel="federated less it")
    return figure


def importance(
    gains: Mapping[str, float], kind: str, baseline: Mapping[str, float] | None = None
) -> Drawing:
    """The 20 columns of the largest importance, as shares of its sum over all columns."""
    best = _largest(gains)
    figure, ax = new_canvas("importance", height=0.9 + (0.32 if baseline else 0.22) * len(best))
    models = {"federated": (gains, BLUE)} | ({"pooled": (baseline, ORANGE)} if baseline else {})
    height = 0.76 / len(models)
    for index, (name, (of_model, color)) in enumerate(models.items()):
        total = sum(of_model.values()) or 1.0
        at = np.arange(len(best)) + (index - (len(models) - 1) / 2) * height
        shares = [of_model.get(column, 0.0) / total for column in best]
        ax.barh(at, shares, color=color, height=height, label=name)
    ax.xaxis.set_major_formatter(_percent)
    name_bars(ax, best)
    ax.set(xlabel=f"{kind}, as a share of its sum")
    if baseline:
        add_legend(ax, above=True)
    return figure


def column_bars(name: str, values: Mapping[str, float], label: str) -> Drawing:
    """Values by column, for the 20 largest absolute values."""
    best = _largest(values)
    figure, ax = new_canvas(name, height=0.8 + 0.22 * len(best))
    ax.barh(range(len(best)), [values[name] for name in best], color=BLUE, height=0.7)
    if min(values.values()) < 0:
        ax.axvline(0, color=BLACK, linewidth=1)
    name_bars(ax, best)
    ax.set(xlabel=label)
    return figure


def learning_rates(rates: Mapping[str, Sequence[float]], weights: Mapping[str, float]) -> Drawing:
    """Learned rate of each tree, one line per party, labelled with the party's weight."""
    figure, ax = new_canvas("learning_rates")
    for (name, values), (color, dash) in zip(rates.items(), new_pens(), strict=False):
        label = f"{plain(name)}, Z {weights[name]:.3g}"
        trees = np.arange(1, len(values) + 1)
        ax.plot(trees, values, dash, color=color, label=label, linewidth=1)
    ax.axhline(0.0, color=GREY, linewidth=1)
    ax.set(xlabel="tree of the party", ylabel="learned rate")
    add_legend(ax)
    return figure


def traffic_by_party(sizes: Mapping[str, Sequence[int]]) -> Drawing:
    """Bytes of the whole run by party: (to the party, from the party)."""
    figure, ax = new_canvas("traffic_by_party", height=1.4 + 0.25 * len(sizes))
    ys = np.arange(len(sizes))
    down, up = np.asarray(list(sizes.values()), dtype=np.float64).reshape(-1, 2).T
    ax.barh(ys, down, color=ORANGE, height=0.7, label="to the party")
    ax.barh(ys, up, left=down, color=BLUE, height=0.7, label="from the party")
    name_bars(ax, list(sizes))
    ax.xaxis.set_major_locator(MaxNLocator(5))
    ax.xaxis.set_major_formatter(EngFormatter(unit="B"))
    ax.set(xlabel="size of messages")
    add_legend(ax, above=True)
    return figure


def _largest(values: Mapping[str, float]) -> list[str]:
    return sorted(values, key=lambda name: abs(values[name]), reverse=True)[:N_COLUMNS]


def name_bars(ax: Axes, names: Sequence[str]) -> None:
    shown = [plain(name) for name in names]
    ax.set_yticks(range(len(names)), shown, parse_math=False)
    ax.invert_yaxis()
    ax.grid(False, axis="y")
    ax.tick_params(axis="y", length=0)
    ax.margins(y=0.01)


def _percent(share: float, _: float) -> str:
    return f"{100 * share:.3g}%"


def curves(
    name: str,
    models: Curves,
    axes: tuple[str, str],
    labels: tuple[str, str],
    guess: tuple[float, float] = (0.0, 1.0),
    **style: Any,
) -> Drawing:
    """A line per model; `axes` are its keys of x and y, `guess` a guesser's y at x = 0 and 1."""
    figure, ax = new_canvas(name, *_SQUARE)
    ax.plot([0, 1], guess, color=GREY, linewidth=1, linestyle=":")
    pens = zip(models.items(), new_pens(), strict=False)
    for index, ((model, curve), (color, dash)) in enumerate(pens):
        width = 1.4 if index else 2.2  # the first model is the run's
        x, y = (curve[axis] for axis in axes)
        ax.plot(x, y, dash, color=color, linewidth=width, label=plain(model), **style)
    if len(models) > 1:
        add_legend(ax)
    ax.set(xlabel=labels[0], ylabel=labels[1], xlim=(-0.01, 1.01))
    if ax.get_ylim()[1] < 1.1:  # shares, unlike lifts
        ax.set(ylim=(-0.01, 1.01), aspect="equal")
    return figure


def score_histogram(histogram: Mapping[str, Sequence[float]], classes: Sequence[str]) -> Drawing:
    """Predicted probability of the second class, by true class; each adds up to 1."""
    figure, ax = new_canvas("probabilities", *_SQUARE)
    sides = zip(classes, ("negatives", "positives"), (BLUE, VERMILION), strict=True)
    for name, key, color in sides:
        weights = np.asarray(histogram[key], dtype=np.float64)
        shares = weights / max(weights.sum(), 1e-300)
        label, edges = plain(name), histogram["edges"]
        ax.stairs(shares, edges, fill=True, color=color, alpha=0.35)
        ax.stairs(shares, edges, color=color, linewidth=1.6, label=label)
    ax.yaxis.set_major_formatter(_percent)
    ax.set(xlim=(0, 1), xlabel="predicted probability", ylabel="share of the class's rows")
    add_legend(ax, above=True)
    return figure


def residuals(models: Curves) -> Drawing:
    """Histograms of label minus prediction over the non-empty bins, in 30 bars."""
    # Each model has edges and counts; the first model's histogram is filled.
    figure, ax = new_canvas("residuals")
    histograms = [
        (np.array([of["edges"][:-1], of["edges"][1:]], np.float64), np.array(of["counts"], float))
        for of in models.values()
    ]
    used = np.concatenate([ends[:, counts > 0] for ends, counts in histograms], axis=1)
    low, high = (used[0].min(), used[1].max()) if used.size else (-1.0, 1.0)
    bars = np.linspace(low, high, _N_BARS + 1)
    drawn = zip(models, histograms, new_pens(), strict=False)
    for index, (name, (ends, counts), (color, dash)) in enumerate(drawn):
        sums = np.histogram(ends.sum(axis=0) / 2, bars, weights=counts)[0]
        if not index:
            ax.stairs(sums, bars, fill=True, color=color, alpha=0.35)
        ax.stairs(sums, bars, color=color, linestyle=dash, linewidth=1.6, label=plain(name))
    ax.axvline(0, color=BLACK, linewidth=1, linestyle=":")
    ax.set(xlabel="residual: label - prediction (units of the label)", ylabel="rows (weighted)")
    if len(models) > 1:
        add_legend(ax, above=True)
    return figure


def tradeoff(
    points: Sequence[tuple[str, float, float, tuple[float, float]]],
    cost: str,
    metric: str,
    show: Callable[[float], str],
) -> Drawing:
    """A metric against a cost on a logarithmic scale; `points` are (name, cost, score, the ends of
    an interval, NaN if there is none)."""
    figure, ax = new_canvas("tradeoff")
    drawn = [point for point in points if np.isfinite(point[2])]
    ax.set(xscale="log", xlabel=cost, ylabel=metric)
    costs = [max(spent, 1e-3) for _, spent, *_ in drawn]
    marks = zip(drawn, costs, new_pens(SHAPES), strict=False)
    for (name, _, score, ends), x, (color, shape) in marks:
        if np.isfinite(ends).all():
            ax.plot([x, x], ends, color=color, linewidth=1.5)
        label = plain(name, _LONGEST_LABEL)
        ax.plot([x], [score], shape, label=label, color=color, markersize=8, clip_on=False)
    ax.margins(x=0.1)
    decades = np.log10(max(costs, default=1) / min(costs, default=1))
    steps = (1, 2, 5) if decades < 1 else (1, 3) if decades < 2.5 else (1,)
    ax.xaxis.set_major_locator(LogLocator(subs=steps))
    ax.xaxis.set_major_formatter(lambda spent, _: show(spent))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.tick_params(axis="x", rotation=30)
    # A legend below the axes, one name per line; the figure grows to fit it.
    handles, names = ax.get_legend_handles_labels()
    figure.set_figheight(figure.get_figheight() + _LEGEND_LINE * (len(names) + 1))
    ax.set_anchor("N")  # axes of equal scales would be centred otherwise
    _as_text(figure.legend(handles, names, loc="outside lower left", **_LEGEND))
    return figure


# The canvas of every figure, and how it becomes SVG.


class Drawing(Figure):
    """A figure that a notebook shows."""

    name: str

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=_DPI / 2)
        return buffer.getvalue()

    def to_svg(self) -> str:
        """An SVG element that takes its font from the page around it.

        Text stays text, and ids are unique on the page.
        """
        buffer = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        style = rc_context({"svg.fonttype": "none", "svg.hashsalt": "fedapp"})
        with style, warnings.catch_warnings():
            # Column names may use a script that the font lacks; the page's font shows them.
            warnings.filterwarnings("ignore", message="Glyph .* missing from font")
            self.savefig(buffer, format="svg", transparent=True, metadata=nothing)
        text = buffer.getvalue()
        text = text[text.index("<svg") :].strip()
        text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.DOTALL)
        text = re.sub(r"'DejaVu Sans'[^;\"]*", "system-ui, sans-serif", text)
        return re.sub(r"\n\s*", "\n", _with_unique_ids(text))


def new_canvas(
    name: str, width: float = _WIDTH, height: float = _HEIGHT, columns: int = 1
) -> tuple[Drawing, Axes]:
    """A figure with a light grid, and the first of its axes."""
    figure = Drawing(figsize=(width, height), dpi=_DPI, layout="constrained")
    figure.name = name
    FigureCanvasAgg(figure)
    all_axes = [figure.add_subplot(1, columns, at + 1) for at in range(columns)]
    for ax in all_axes:
        ax.grid(True, color=GRID, linewidth=0.8)
        ax.set_axisbelow(True)
        ax.spines[["top", "right"]].set_visible(False)
        ax.spines[["left", "bottom"]].set_color(LINE)
        ax.tick_params(colors=GREY, labelsize=10)
        ax.ticklabel_format(useOffset=False)
        for label in (ax.xaxis.label, ax.yaxis.label):
            label.set(fontsize=11, color=BLACK)
    return figure, all_axes[0]


def new_pens(styles: Sequence[str] = DASHES) -> Any:
    """Colours, and dashes of lines or shapes of marks; the first 28 pairs are distinct."""
    return zip(cycle(PALETTE), cycle(styles), strict=False)


def plain(name: str, longest: int = _LONGEST_NAME) -> str:
    """A name on one line of printable characters, at most `longest`."""
    line = " ".join("".join(c if c.isprintable() else " " for c in name).split())
    return line if len(line) <= longest else line[: longest - 1] + "…"


def add_legend(ax: Axes, above: bool = False) -> None:
    """A legend inside the axes, or above axes that are filled with bars."""
    if not ax.get_legend_handles_labels()[0]:
        return
    location: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": 2}
    _as_text(ax.legend(**_LEGEND, **(location if above else {})))


def _as_text(legend: Legend) -> None:
    """Show names as they are: matplotlib would read a dollar sign as mathematics."""
    for text in legend.get_texts():
        text.set_parse_math(False)


def _with_unique_ids(text: str) -> str:
    """Prefix referenced ids with a digest of the figure, and remove all others."""
    used = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', text))
    prefix = "f" + hashlib.blake2b(text.encode(), digest_size=4).hexdigest()

    def renamed(match: re.Match[str]) -> str:
        return f' id="{prefix}{match[1]}"' if match[1] in used else ""

    text = re.sub(r' id="([^"]+)"', renamed, text)
    return re.sub(r'(url\(#|href="#)', rf"\g<1>{prefix}", text)
