"""What every figure is drawn on, and the two forms it is written in: PNG, and SVG for a page."""

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

# Okabe and Ito's palette, which colour-blind readers tell apart; dashes tell it apart in print.
BLUE, VERMILION, GREEN, ORANGE = "#0072B2", "#D55E00", "#009E73", "#E69F00"
PINK, SKY, BLACK = "#CC79A7", "#56B4E9", "#222222"
PALETTE = (BLUE, VERMILION, GREEN, ORANGE, PINK, SKY, BLACK)
DASHES = ("-", "--", "-.", ":")
GREY, GRID, LINE, PAPER = "#555555", "#e4e4e4", "#aaaaaa", "#fefefe"
# The page's names of these colours; it gives them other values on a dark screen.
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

_WIDTH, _HEIGHT, _DPI = 5.2, 3.3, 180  # inches; at twice the pixels that the page shows
_LONGEST_NAME = 32
_LEGEND_LINE = 0.23  # inches


def new_canvas(
    width: float = _WIDTH, height: float = _HEIGHT, rows: int = 1
) -> tuple[Figure, Axes]:
    """A figure with a light grid; the first of its axes, which stand one above the other."""
    figure = Figure(figsize=(width, height), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    every = [figure.add_subplot(rows, 1, row + 1) for row in range(rows)]
    for ax in every:
        ax.grid(True, color=GRID, linewidth=0.8)
        ax.set_axisbelow(True)
        ax.spines[["top", "right"]].set_visible(False)
        ax.spines[["left", "bottom"]].set_color(LINE)
        ax.tick_params(colors=GREY, labelsize=10)
        ax.ticklabel_format(useOffset=False)
        for label in (ax.xaxis.label, ax.yaxis.label):
            label.set(fontsize=11, color=BLACK)
    return figure, every[0]


def to_png(figure: Figure) -> bytes:
    """The figure as a picture of its own."""
    buffer = io.BytesIO()
    _save(figure, buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def to_svg(figure: Figure, names: Sequence[str] = ()) -> str:
    """The figure as an element of a page, whose colours and font it takes.

    Texts stay texts. What is referred to by an id has one that no other figure of the page has.

    Parameters
    ----------
    names : what the figure names, in its order; those that ``plain`` has cut get a title.
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
    return re.sub(r"\n\s*", "\n", _titled(_with_own_ids(text), names))


def new_pens() -> Any:
    """Colour and dash of line after line: no two of the first 28 agree in both."""
    return zip(cycle(PALETTE), cycle(DASHES), strict=False)


def line_style(points: Sequence[Any]) -> dict[str, Any]:
    """A thick line, with a marker at each point where they are few."""
    return {"linewidth": 2, "marker": "o" if len(points) <= 30 else "", "markersize": 3.5}


def plain(name: str, longest: int = _LONGEST_NAME) -> str:
    """A name from outside on one line, cut to so many characters."""
    line = " ".join("".join(c if c.isprintable() else " " for c in name).split())
    return line if len(line) <= longest else line[: longest - 1] + "…"


def add_legend(ax: Axes, above: bool = False) -> None:
    """A legend where there is room for it, or above the axes, which bars fill."""
    if not ax.get_legend_handles_labels()[0]:
        return
    place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": 2}
    legend = ax.legend(frameon=False, fontsize=10, labelcolor=BLACK, **(place if above else {}))
    for text in legend.get_texts():
        text.set_parse_math(False)


def add_legend_below(figure: Figure) -> None:
    """A legend below the axes, a name a line, however many there are; the figure grows by it."""
    (ax,) = figure.axes
    handles, names = ax.get_legend_handles_labels()
    figure.set_figheight(figure.get_figheight() + _LEGEND_LINE * (len(names) + 1))
    ax.set_anchor("N")  # axes of equal scales would else stand in the middle of their place
    legend = figure.legend(
        handles, names, loc="outside lower left", frameon=False, fontsize=10, labelcolor=BLACK
    )
    for text in legend.get_texts():
        text.set_parse_math(False)


def _titled(text: str, names: Sequence[str]) -> str:
    """The drawing with the whole of a name behind each that was cut."""
    place = 0
    for name in names:
        shown = f">{html.escape(plain(name), quote=False)}</text>"
        found = text.find(shown, place)
        if found >= 0 and plain(name) != name:
            title = f"<title>{html.escape(''.join(filter(str.isprintable, name)))}</title>"
            text = text[: found + 1] + title + text[found + 1 :]
            place = found + len(title)
    return text


def _save(figure: Figure, buffer: Any, **how: Any) -> None:
    with warnings.catch_warnings():
        # A column's name may be in a script that the font lacks; the page has it in full.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(buffer, **how)


def _with_own_ids(text: str) -> str:
    """The ids that something refers to, after a digest of the figure; no others."""
    used = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', text))
    prefix = "f" + hashlib.blake2b(text.encode(), digest_size=4).hexdigest()

    def own(found: re.Match[str]) -> str:
        return f' id="{prefix}{found[1]}"' if found[1] in used else ""

    text = re.sub(r' id="([^"]+)"', own, text)
    return re.sub(r'(url\(#|href="#)', rf"\g<1>{prefix}", text)
