"""The template of all pages, with the style sheet: wide and narrow, and print.

Their texts are in ``templates/page.toml``: a bundle takes no HTML. Jinja2 escapes every text that
is no markup already, so names from outside are always texts.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from fedapp.home import Kind, begins_with

TEMPLATES = Path(__file__).parent / "templates"
HTML = Kind("a page", (".html", ".htm"), begins_with(b'<meta name="generator" content="fedapp">'))


_environment = Environment(
    autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
)
_environment.filters["anchor"] = lambda title: "-".join(re.findall(r"[^\W_]+", title.lower()))
_environment.filters["sentence"] = lambda text: text[:1].upper() + text[1:]
_texts = tomllib.loads((TEMPLATES / "page.toml").read_text(encoding="utf-8"))
STYLE: str = _texts["style"]
page_template = _environment.from_string(_texts["page"])
elements: Any = _environment.from_string(_texts["elements"]).module
