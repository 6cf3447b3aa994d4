"""The curves of an additive model: the figures of a report, and their texts on pages and cards.

An axis has a step for each place of a column, so cuts at quantiles are evenly spaced. All curves of
single columns have one scale, so that they can be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle

import numpy as np
import numpy.typing as npt
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.axis import XAxis, YAxis
from matplotlib.colors import LinearSegmentedColormap

from fedapp.arrays import Doubles
from fedapp.crypto.noise import COUNTS, LABELS
from fedapp.report.plots import BLACK, GREY, PALETTE, Drawing, add_legend, new_canvas, plain
from fedapp.report.summary import percent_text
from fedapp.report.template import elements
from fedapp.report.tree import model_of, rule_text, scale_of, short
from fedapp.run_files import Summary
from fedapp.run_folder import RunFolder
from fedapp.trees.curves import Axis, Band, Curve, bands_of, columns_of, intercepts_of, is_additive
from fedapp.trees.model import Ensemble

Places = npt.NDArray[np.int64]
_MOST_DRAWN = 30  # curves of a model
_MOST_NAMES, _MOST_TICKS, _MOST_CELLS = 12, 5, 16  # along an axis
_LONGEST_TICK = 6  # letters, of a text that is not upright
_COLORS = LinearSegmentedColormap.from_list("", [PALETTE[1], "#ffffff", PALETTE[0]], 17)
_DRAWN = (
    "All columns have one scale, pairs one of colours; first those of the largest mean absolute "
    "value. All intervals between cuts have one width; of categories there are the 12 strongest. "
    "Grey: the rows, if the model has sums of them, by the column's first tree. Diamonds: missing."
)
_STEADY = 0.8  # share of the changes from which on a curve rises or falls


def additive_of(run: RunFolder) -> Ensemble | None:
    """The run's model if it is a sum of curves, few of them of pairs.

    Other models of shallow trees may have curves of most pairs, which nobody would read.
    """
    model = model_of(run)
    if not isinstance(model, Ensemble) or not is_additive(model):
        return None
    alone, paired = ([tree for tree in model.trees if len(columns_of(tree)) == n] for n in (1, 2))
    return model if len(alone) > len(paired) else None


def strongest(models: Sequence[Ensemble]) -> list[Band]:
    """Curves of the first model, strongest first, and their bands over all."""
    return sorted(bands_of(models), key=lambda band: -strengths(band[0]).max())


def strengths(curve: Curve) -> Doubles:
    """Mean absolute value over the rows, by output."""
    sizes: Doubles = np.abs(curve.values) @ _weights(curve)
    return sizes


def direction(curve: Curve, output: int) -> str:
    """Where a curve leads, in words; empty for a pair."""
    if len(curve.axes) > 1:
        return ""
    weights, values = _weights(curve)[:-1], curve.values[output, :-1]
    if names := curve.axes[0].categories:
        used = np.flatnonzero(weights)
        ends = used[values[used].argmin()], used[values[used].argmax()]
        return "lowest for {}, highest for {}".format(*(plain(names[code]) for code in ends))
    changes = np.triu(np.outer(weights, weights) * np.subtract.outer(-values, -values), 1)
    share = changes.sum() / (np.abs(changes).sum() or 1.0)
    return "rises" if share >= _STEADY else "falls" if share <= -_STEADY else "rises and falls"


def facts_of(model: Ensemble, curve: Curve) -> tuple[str, str, str, str]:
    """Name, mean absolute value, range and direction of a curve's strongest class."""
    sizes = strengths(curve)
    output = int(sizes.argmax())
    values = curve.values[output]
    of_class = f", class {plain(model.classes[output])}" if len(sizes) > 1 else ""
    ends = f"{values.min():+.3g} to {values.max():+.3g}"
    return curve.name + of_class, f"{sizes[output]:.3g}", ends, direction(curve, output)


def section(run: RunFolder) -> Markup:
    """The curves as a section of a page; empty if the model is no sum of them."""
    if not (model := additive_of(run)):
        return Markup("")
    bands, named = strongest([model]), {}
    drawn = bands[:_MOST_DRAWN]
    for (curve, *_), image in zip(drawn, figures_of(model, drawn), strict=True):
        name, size, _, leads = facts_of(model, curve)
        named[", ".join(filter(None, (f"{plain(name)}: {size} on average", leads)))] = image
    texts, n_more = [about(model, run.summary), _DRAWN], len(bands) - len(drawn)
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


def figures_of(model: Ensemble, bands: Sequence[Band]) -> list[Drawing]:
    """A figure of each curve; of a pair with several outputs the strongest one's."""
    figures, most = list[Drawing](), {1: [0.0], 2: [0.0]}
    for curve, *ends in bands:
        most[len(curve.axes)] += np.ravel([curve.values, *ends]).tolist()
    low, high = 1.08 * min(most[1]), 1.08 * max(most[1])
    for band in bands:
        curve = band[0]
        figure, ax = new_canvas(curve.name, 3.6, 2.8)
        figures.append(figure)
        ax.tick_params(labelsize=9)
        places = _places(curve)
        if len(places) == 2:
            _draw_pair(ax, curve, places, float(np.abs(most[2]).max()))
            _name_places(ax.yaxis, curve.axes[1], places[1], model)
        else:
            _draw_column(ax, band, places[0], model)
            ax.set_ylim(low - 0.25 * (high - low), high)
            add_legend(ax, above=True)
        _name_places(ax.xaxis, curve.axes[0], places[0], model)
        longest = max((len(text.get_text()) for text in ax.get_xticklabels()), default=0)
        is_upright = curve.axes[0].categories is not None or longest > _LONGEST_TICK
        ax.tick_params(axis="x", rotation=90 * is_upright)
    return figures


def _weights(curve: Curve) -> Doubles:
    """Shares of the rows by place, equal ones if the model has none."""
    weights = np.nan_to_num(curve.weights)
    return weights / weights.sum() if weights.any() else np.full(weights.shape, 1 / weights.size)


def _places(curve: Curve) -> list[Places]:
    """Places that are drawn, by axis: all of numbers, the strongest categories by what they add; of
    pairs the first of each group."""
    if len(curve.axes) == 2:
        return [np.arange(n)[:: -(-n // _MOST_CELLS)] for n in np.subtract(curve.shape, 1)]
    if curve.axes[0].categories is None:
        return [np.arange(curve.n_places - 1)]
    sizes = (_weights(curve) * np.abs(curve.values)).max(axis=0)[:-1]
    codes = np.argsort(-sizes, kind="stable")[:_MOST_NAMES]
    return [codes[np.argsort(-curve.values[0, codes], kind="stable")]]


def _draw_column(ax: Axes, band: Band, places: Places, model: Ensemble) -> None:
    """Step lines with their bands or bars, the rows below, and missing values at the right."""
    (curve, low, high), n, n_outputs = band, len(places), model.n_outputs
    shares = np.nan_to_num(curve.weights)[places]
    heights = 0.16 * shares / (shares.max() or 1.0)
    ax.stairs(heights, fill=True, color=GREY, alpha=0.3, transform=ax.get_xaxis_transform())
    for output, color in zip(range(n_outputs), cycle(PALETTE), strict=False):
        ends, values = (low[output, places], high[output, places]), curve.values[output]
        label = plain(model.classes[output], 12) if n_outputs > 1 else ""
        if curve.axes[0].categories is None:
            ax.stairs(values[places], baseline=None, color=color, linewidth=1.8, label=label)
            ax.stairs(ends[1], baseline=ends[0], fill=True, color=color, alpha=0.3)
        else:
            at = np.arange(n) + 0.1 + 0.8 * (output + 0.5) / n_outputs
            ax.bar(at, values[places], 0.75 / n_outputs, color=color, label=label)
            ax.vlines(at, *ends, color=BLACK, linewidth=1)
        ax.plot([1.06 * n], values[-1:], "D", color=color, markersize=5)
    ax.axhline(0, color=BLACK, linewidth=0.8)


def _draw_pair(ax: Axes, curve: Curve, groups: Sequence[Places], most: float) -> None:
    """A heat map of means over groups of places, without missing values."""
    values = curve.values[strengths(curve).argmax()].reshape(curve.shape)[:-1, :-1]
    sizes = [np.diff([*starts, n]) for starts, n in zip(groups, values.shape, strict=True)]
    for side, starts in enumerate(groups):
        values = np.add.reduceat(values, starts, axis=side)
    mesh = ax.pcolormesh((values / np.outer(*sizes)).T, cmap=_COLORS, vmin=-most, vmax=most)
    ax.figure.colorbar(mesh, ax=ax).ax.tick_params(labelsize=9, colors=GREY)
    ax.grid(False)


def _name_places(side: XAxis | YAxis, axis: Axis, places: Places, model: Ensemble) -> None:
    """Name an axis by its column, and some of its steps by cuts or categories."""
    names, kind = axis.categories, model.kinds[axis.column] if model.kinds else ""
    if kind == "boolean" and len(places) == 2:
        names, places = ("no", "yes"), np.arange(2)
    steps = np.arange(len(places))[:: -(-len(places) // (_MOST_NAMES if names else _MOST_TICKS))]
    if names is None:
        cuts = axis.edges[places[steps[1:]] - 1].tolist()
        side.set_ticks(steps[1:], [_tick(cut, kind) for cut in cuts])
    else:
        texts = [plain(names[place], 10) for place in places[steps]]
        side.set_ticks(steps + 0.5, texts, parse_math=False)
    side.set_label_text(plain(axis.name, 24), parse_math=False)


def _tick(value: float, kind: str) -> str:
    is_time = kind in ("date", "time")
    return rule_text(value, kind)[2:] if is_time else "-" * int(value < 0) + short(abs(value))
