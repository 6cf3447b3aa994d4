"""A figure of a benchmark's page: a number over a few categories, a line a method."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from matplotlib.ticker import NullFormatter

from fedapp.report.canvas import add_legend_below, line_style, new_canvas, new_pens, plain, to_svg

_LEVEL = 6  # characters of a category's name that fit beside its neighbours'


def lines(
    values: Mapping[str, Sequence[float]],
    categories: Sequence[str],
    labels: tuple[str, str],
    in_words: Callable[[float], str] | None = None,
) -> str:
    """An SVG element.

    Parameters
    ----------
    values : a number a category, by the name of the line; nan where there is none.
    categories : names, in the order of the axis.
    labels : of the axis of categories, and of that of values.
    in_words : how a value is written; given, the scale is logarithmic.
    """
    figure, ax = new_canvas()
    places = range(len(categories))
    for (name, found), (color, dash) in zip(values.items(), new_pens(), strict=False):
        ax.plot(places, found, dash, color=color, label=plain(name), **line_style(found))
    names = [plain(name) for name in categories]
    ax.set_xticks(places, names, parse_math=False)
    if max(map(len, names)) > _LEVEL:
        for text in ax.get_xticklabels():
            text.set(rotation=30, ha="right", rotation_mode="anchor")
    ax.set(xlabel=labels[0], ylabel=labels[1])
    if in_words:
        shown = in_words
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter(lambda value, _: shown(value))
        ax.yaxis.set_minor_formatter(NullFormatter())
    add_legend_below(figure)
    return to_svg(figure)
