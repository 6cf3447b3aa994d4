"""The canvas of every figure, written as PNG or as SVG for a page."""

from __future__ import annotations

import hashlib
import html
import io
import re
import warnings
from collections.abc import Sequence
from itertools import cycle
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

# Okabe and Ito's palette, safe for colour-blind readers; dashes distinguish lines in print.
BLUE, VERMILION, GREEN, ORANGE = "#0072B2", "#D55E00", "#009E73", "#E69F00"
PINK, SKY, BLACK = "#CC79A7", "#56B4E9", "#222222"
PALETTE = (BLUE, VERMILION, GREEN, ORANGE, PINK, SKY, BLACK)
DASHES = ("-", "--", "-.", ":")
GREY, GRID, LINE, PAPER = "#555555", "#e4e4e4", "#aaaaaa", "#fefefe"
# CSS variables of the page, which have other values in dark mode.
VARIABLES = {
    BLUE: "blue",
    VERMILION: "vermilion",
    GREEN: "green",
    ORANGE: "orange",
    PINK: "pink",
    SKY: "sky",
    BLACK: "ink",
    GREY: "quiet",
    GRID: "grid",
    LINE: "line",
    PAPER: "paper",
}

_WIDTH, _HEIGHT, _DPI = 5.2, 3.3, 180  # inches; twice the page's resolution
_LONGEST_NAME = 32
_LEGEND_LINE = 0.23  # inches


def new_canvas(
    width: float = _WIDTH, height: float = _HEIGHT, rows: int = 1
) -> tuple[Figure, Axes]:
    """A figure with a light grid, and the topmost of its axes."""
    figure = Figure(figsize=(width, height), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    all_axes = [figure.add_subplot(rows, 1, row + 1) for row in range(rows)]
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


def to_png(figure: Figure) -> bytes:
    """The figure as a standalone PNG."""
    buffer = io.BytesIO()
    _save(figure, buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def to_svg(figure: Figure, names: Sequence[str] = ()) -> str:
    """The figure as an SVG element that takes colours and font from the page around it.

    Text stays text, and ids are unique on the page. `names` are the figure's names in order; those
    that ``plain`` has shortened get a title.
    """
    buffer = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "fedapp"}):
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        _save(figure, buffer, format="svg", transparent=True, metadata=nothing)
    text = buffer.getvalue()
    text = text[text.index("<svg") :].strip()
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"'DejaVu Sans'[^;\"]*", "system-ui, sans-serif", text)
    for color, name in VARIABLES.items():
        text = re.sub(color, f"var(--{name})", text, flags=re.IGNORECASE)
    return re.sub(r"\n\s*", "\n", _titled(_with_unique_ids(text), names))


def new_pens() -> Any:
    """Colours and dashes for lines; the first 28 pairs are distinct."""
    return zip(cycle(PALETTE), cycle(DASHES), strict=False)


def line_style(points: Sequence[Any]) -> dict[str, Any]:
    """A thick line, with markers if there are few points."""
    return {"linewidth": 2, "marker": "o" if len(points) <= 30 else "", "markersize": 3.5}


def plain(name: str, longest: int = _LONGEST_NAME) -> str:
    """A name on one line of printable characters, at most `longest`."""
    line = " ".join("".join(c if c.isprintable() else " " for c in name).split())
    return line if len(line) <= longest else line[: longest - 1] + "…"


def add_legend(ax: Axes, above: bool = False) -> None:
    """A legend inside the axes, or above axes that are filled with bars."""
    if not ax.get_legend_handles_labels()[0]:
        return
    location: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": 2}
    legend = ax.legend(frameon=False, fontsize=10, labelcolor=BLACK, **(location if above else {}))
    for text in legend.get_texts():
        text.set_parse_math(False)


def add_legend_below(figure: Figure) -> None:
    """A legend below the axes, one name per line; the figure grows to fit it."""
    (ax,) = figure.axes
    handles, names = ax.get_legend_handles_labels()
    figure.set_figheight(figure.get_figheight() + _LEGEND_LINE * (len(names) + 1))
    ax.set_anchor("N")  # axes of equal scales would be centred otherwise
    legend = figure.legend(
        handles, names, loc="outside lower left", frameon=False, fontsize=10, labelcolor=BLACK
    )
    for text in legend.get_texts():
        text.set_parse_math(False)


def _titled(text: str, names: Sequence[str]) -> str:
    """Add the full name as a title to each shortened one."""
    searched_to = 0
    for name in names:
        shown = f">{html.escape(plain(name), quote=False)}</text>"
        start = text.find(shown, searched_to)
        if start >= 0 and plain(name) != name:
            title = f"<title>{html.escape(''.join(filter(str.isprintable, name)))}</title>"
            text = text[: start + 1] + title + text[start + 1 :]
            searched_to = start + len(title)
    return text


def _save(figure: Figure, buffer: Any, **options: Any) -> None:
    with warnings.catch_warnings():
        # Column names may use a script that the font lacks; the page's font shows them.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(buffer, **options)


def _with_unique_ids(text: str) -> str:
    """Prefix referenced ids with a digest of the figure, and remove all others."""
    used = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', text))
    prefix = "f" + hashlib.blake2b(text.encode(), digest_size=4).hexdigest()

    def renamed(match: re.Match[str]) -> str:
        return f' id="{prefix}{match[1]}"' if match[1] in used else ""

    text = re.sub(r' id="([^"]+)"', renamed, text)
    return re.sub(r'(url\(#|href="#)', rf"\g<1>{prefix}", text)
