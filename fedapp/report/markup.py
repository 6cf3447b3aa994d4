"""The HTML of a report: one page template and the few elements it is filled with.

Whatever comes from outside (names of columns, parties, data, settings) passes ``escaped`` here.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from string import Template

from fedapp.metrics import BETTER

_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root { color-scheme: light dark; --paper: #fff; --ink: #222; --quiet: #5a5a5a; --line: #aaa;
  --grid: #e4e4e4; --blue: #0072b2; --vermilion: #d55e00; --green: #009e73; --orange: #e69f00;
  --pink: #cc79a7; --sky: #56b4e9; --warm: #fdf3ec; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #15171b; --ink: #e4e6ea; --quiet: #a3a9b3; --line: #6b7280; --grid: #2d3138;
    --blue: #3f9be0; --vermilion: #f2783a; --green: #2bbf93; --orange: #f0b13c; --pink: #e09cc3;
    --sky: #a5d8f7; --warm: #2b1f18; }
}
@media print {
  :root { --paper: #fff; --ink: #222; --quiet: #5a5a5a; --line: #aaa; --grid: #e4e4e4;
    --blue: #0072b2; --vermilion: #d55e00; --green: #009e73; --orange: #e69f00; --pink: #cc79a7;
    --sky: #56b4e9; --warm: #fdf3ec; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 1.5rem 1rem 4rem; color: var(--ink);
  background: var(--paper); font: 16px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .25rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.25rem 0 .75rem; padding-bottom: .3rem;
  border-bottom: 1px solid var(--grid); }
h3 { font-size: 1rem; margin: 1.5rem 0 .5rem; }
p { margin: .5rem 0; }
.quiet, figcaption { color: var(--quiet); font-size: .875rem; }
.quiet, td, th { overflow-wrap: break-word; }
.warning { border-left: 4px solid var(--vermilion); background: var(--warm);
  padding: .5rem .9rem; overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(7.4rem, 1fr)); gap: .6rem;
  margin: 1.25rem 0 0; }
dl div { border: 1px solid var(--grid); border-radius: 6px; padding: .5rem .8rem; }
dt { color: var(--quiet); font-size: .8rem; }
dd { margin: 0; font-size: 1.3rem; font-weight: 600; }
.wide { overflow-x: auto; margin: .75rem 0; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .9rem .35rem 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--grid); min-width: 4rem; }
th { color: var(--quiet); font-weight: 500; border-bottom-color: var(--line); }
.n { text-align: right; white-space: nowrap; }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 27rem), 1fr));
  gap: 1.25rem; align-items: start; }
figure { margin: 0; break-inside: avoid; min-width: 0; }
figure > svg { width: 100%; height: auto; display: block; }
summary { cursor: pointer; margin-top: .75rem; }
@media print {
  body { max-width: none; padding: 0; font-size: 11pt; }
  h2 { break-after: avoid; }
  tr, dl div, .warning { break-inside: avoid; }
  .figures { grid-template-columns: 1fr 1fr; }
  .wide { overflow: visible; }
  table { font-size: 8.5pt; }
}
</style>
</head>
<body>
<h1>$title</h1>
<p class="quiet">$subtitle</p>
$body
</body>
</html>
""")


class Strong(str):
    """A table's cell to be set in bold."""

    __slots__ = ()


def page(title: str, subtitle: str, parts: Sequence[str]) -> str:
    """The whole page; title and subtitle are plain text, parts are HTML."""
    return _PAGE.substitute(
        title=escaped(title), subtitle=escaped(subtitle), body="\n".join(filter(None, parts))
    )


def escaped(text: object) -> str:
    """Plain text as HTML, safe in an attribute too."""
    return html.escape(str(text))


def section(title: str, body: str) -> str:
    """A headed part of the page; nothing where the body is empty."""
    return f"<section>\n<h2>{escaped(title)}</h2>\n{body}\n</section>" if body else ""


def table(header: Sequence[str], rows: Sequence[Sequence[str]], n_texts: int = 1) -> str:
    """A table whose first n_texts columns are text, the others numbers."""
    lines = [_row("th", header, n_texts), *(_row("td", row, n_texts) for row in rows)]
    head, *body = lines
    return (
        f'<div class="wide"><table>\n<thead>{head}</thead>\n<tbody>\n'
        + "\n".join(body)
        + "\n</tbody></table></div>"
    )


def figures(images: Mapping[str, str]) -> str:
    """SVG images inside the page, by caption."""
    if not images:
        return ""
    return f'<div class="figures">\n{"".join(_figure(*item) for item in images.items())}</div>'


def folded(title: str, body: str) -> str:
    """A part that opens when its title is clicked."""
    return f"<details><summary>{escaped(title)}</summary>\n{body}\n</details>"


def arrow(metric: str) -> str:
    """A metric's name with the direction in which it gets better."""
    return f"{metric} {'↑' if BETTER[metric] else '↓'}" if metric in BETTER else metric


def _row(tag: str, cells: Sequence[str], n_texts: int) -> str:
    return f"<tr>{''.join(_cell(tag, cell, i >= n_texts) for i, cell in enumerate(cells))}</tr>"


def _cell(tag: str, text: str, is_number: bool) -> str:
    inner = f"<strong>{escaped(text)}</strong>" if isinstance(text, Strong) else escaped(text)
    return f'<{tag} class="n">{inner}</{tag}>' if is_number else f"<{tag}>{inner}</{tag}>"


def _figure(caption: str, svg: str) -> str:
    alt = f'<svg role="img" aria-label="{escaped(caption)}"'
    return (
        f"<figure>{svg.replace('<svg', alt, 1)}"
        f"<figcaption>{escaped(caption)}</figcaption></figure>\n"
    )
