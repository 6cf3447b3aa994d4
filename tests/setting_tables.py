"""Tables of settings in the READMEs, made from the code: ``python -m tests.setting_tables``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields
from typing import Any

from fedapp.settings import app_folder, declared
from fedapp.site.settings import SiteConfig

BLOCK = re.compile(r"(?<=<!-- settings: )([\w-]+)( -->\n).*?(?=<!-- end -->)", re.DOTALL)
READMES = ("strategies/README.md", "fedapp/deploy/README.md")


def in_words(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:,}" if isinstance(value, int) else str(value or "none")


def node_lines() -> Iterator[str]:
    yield "| node config (`site.toml`) | default | what it does |"
    yield "|---|---|---|"
    values = {one.name: "" if one.default is MISSING else one.default for one in fields(SiteConfig)}
    for name, about in declared(SiteConfig).items():
        default = about.default or ("" if name in ("name", "data") else in_words(values[name]))
        yield f"| `{about.name}` | {default} | {about.text} |"


TABLES: dict[str, Callable[[], Iterator[str]]] = {"node": node_lines}


def with_tables(text: str) -> str:
    """The text of a README, its tables written anew."""
    return BLOCK.sub(
        lambda match: "\n".join([match[1] + match[2].rstrip(), *TABLES[match[1]](), ""]), text
    )


if __name__ == "__main__":
    for name in READMES:
        path = app_folder() / name
        path.write_text(with_tables(path.read_text()))
