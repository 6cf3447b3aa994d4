"""Blocks of code and the commands that pages of the documentation show."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent

BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)


def blocks(page: Path) -> list[tuple[str, str]]:
    """Language and text of each block, also of those in a list."""
    return [(kind, dedent(text)) for _, kind, text in BLOCK.findall(page.read_text())]


def commands_in(text: str) -> list[str]:
    """The commands of a console's block, without what they print."""
    return re.findall(r"^\$ (.*)$", text.replace("\\\n", ""), re.MULTILINE)
