"""The HTML of a report: a page template and its few elements.

Every text from outside (names of columns, parties, data, settings) passes through ``escaped``.
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from string import Template

from fedapp.metrics import is_metric, larger_is_better
from fedapp.report.canvas import plain
from fedapp.report.style import STYLE

_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
$style</style>
</head>
<body>
<h1>$title</h1>
<p class="quiet">$subtitle</p>
$contents
$body
</body>
</html>
""")


class Strong(str):
    """A table cell in bold."""

    __slots__ = ()


class Name(str):
    """A table cell with a name from outside: shortened if long, with the full name as title."""

    __slots__ = ()


class Run(str):
    """A table cell with the name of a run in a folder beside the page, linked to its page."""

    __slots__ = ()


def page(title: str, subtitle: str, sections: Sequence[str]) -> str:
    """The whole page; title and subtitle are plain text, sections are HTML."""
    body = "\n".join(filter(None, sections))
    heads = re.findall(r'<section id="(.*?)">\n<h2>(.*?)</h2>', body)
    links = " · ".join(f'<a href="#{anchor}">{head}</a>' for anchor, head in heads)
    return _PAGE.substitute(
        style=STYLE,
        title=escaped(title),
        subtitle=escaped(subtitle),
        contents=f"<nav>{links}</nav>" if links else "",
        body=body,
    )


def escaped(text: object) -> str:
    """Plain text as HTML, safe in attributes too."""
    return html.escape(str(text))


def titled(name: str, longest: int = 40) -> str:
    """A name as HTML, at most `longest` characters; a shortened one has a title."""
    shown = plain(name, longest)
    if shown == name:
        return escaped(name)
    return f'<span title="{escaped(name)}">{escaped(shown)}</span>'


def quiet(text: str) -> str:
    """A small paragraph; empty for an empty text."""
    return f'<p class="quiet">{escaped(text)}</p>' if text else ""


def section(title: str, body: str) -> str:
    """A section with a heading; empty for an empty body."""
    anchor = re.sub(r"\W+", "-", title.lower())
    head = f'<section id="{anchor}">\n<h2>{escaped(title)}</h2>'
    return f"{head}\n{body}\n</section>" if body else ""


def table(header: Sequence[str], rows: Sequence[Sequence[str]], n_texts: int = 1) -> str:
    """A table whose first `n_texts` columns are text and the others numbers."""
    lines = [_row("th", header, n_texts), *(_row("td", row, n_texts) for row in rows)]
    head, *body = lines
    return (
        f'<div class="wide"><table>\n<thead>{head}</thead>\n<tbody>\n'
        + "\n".join(body)
        + "\n</tbody></table></div>"
    )


def figures(images: Mapping[str, str]) -> str:
    """SVG images with captions."""
    if not images:
        return ""
    parts = []
    for caption, svg in images.items():
        text = escaped(caption)
        labelled = svg.replace("<svg", f'<svg role="img" aria-label="{text}"', 1)
        parts.append(f"<figure>{labelled}<figcaption>{text}</figcaption></figure>\n")
    return f'<div class="figures">\n{"".join(parts)}</div>'


def folded(title: str, body: str) -> str:
    """A part that opens when its title is clicked."""
    return f"<details><summary>{escaped(title)}</summary>\n{body}\n</details>"


def arrow(metric: str) -> str:
    """A metric's name with the direction in which it improves."""
    return f"{metric} {'↑' if larger_is_better(metric) else '↓'}" if is_metric(metric) else metric


def _row(tag: str, cells: Sequence[str], n_texts: int) -> str:
    return f"<tr>{''.join(_cell(tag, cell, i >= n_texts) for i, cell in enumerate(cells))}</tr>"


def _cell(tag: str, text: str, is_number: bool) -> str:
    kind = "n" if is_number else "name" if isinstance(text, Name) else ""
    inner = titled(text) if isinstance(text, Name) else escaped(text)
    if isinstance(text, Run):
        inner = f'<a href="{inner}/report.html">{inner}</a>'
    if isinstance(text, Strong):
        inner = f"<strong>{inner}</strong>"
    return f'<{tag} class="{kind}">{inner}</{tag}>' if kind else f"<{tag}>{inner}</{tag}>"
