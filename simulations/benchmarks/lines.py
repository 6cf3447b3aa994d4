"""A figure of a benchmark's page: a value over a few categories, one line a method."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from matplotlib.ticker import NullFormatter

from fedapp.report.plots import add_legend_below, line_style, new_canvas, new_pens, plain, to_svg

_LEVEL = 6  # longest category name that fits without rotation


def lines(
    values: Mapping[str, Sequence[float]],
    categories: Sequence[str],
    labels: tuple[str, str],
    in_words: Callable[[float], str] | None = None,
) -> str:
    """Draw an SVG element.

    Parameters
    ----------
    values : one number a category, by the name of the line; nan if missing.
    labels : of the axis of categories, and of the axis of values.
    in_words : formats a value; if given, the scale is logarithmic.
    """
    figure, ax = new_canvas()
    positions = range(len(categories))
    for (name, line_values), (color, dash) in zip(values.items(), new_pens(), strict=False):
        ax.plot(
            positions, line_values, dash, color=color, label=plain(name), **line_style(line_values)
        )
    names = [plain(name) for name in categories]
    ax.set_xticks(positions, names, parse_math=False)
    if max(map(len, names)) > _LEVEL:
        for text in ax.get_xticklabels():
            text.set(rotation=30, ha="right", rotation_mode="anchor")
    ax.set(xlabel=labels[0], ylabel=labels[1])
    if in_words:
        to_text = in_words
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter(lambda value, _: to_text(value))
        ax.yaxis.set_minor_formatter(NullFormatter())
    add_legend_below(figure)
    return to_svg(figure)
