"""Blocks of code and the commands that pages of the documentation show."""

import re
from textwrap import dedent

BLOCK = re.compile(r"^( *)```(\w+)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)


def blocks(page):
    """Language and text of each block, also of those in a list."""
    return [(kind, dedent(text)) for _, kind, text in BLOCK.findall(page.read_text())]


def commands_in(text):
    """The commands of a console's block, without what they print."""
    return re.findall(r"^\$ (.*)$", text.replace("\\\n", ""), re.MULTILINE)


def files_in(page):
    """The Python files that a page shows, each by the path that the paragraph before it names."""
    parts = re.split(r"^```python\n(.*?)^```$", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    paragraphs = [text.strip().rpartition("\n\n")[2] for text in parts[:-1:2]]
    named = [re.findall(r"`([\w/]+/\w+\.py)`", text) for text in paragraphs]
    return {paths[0]: code for paths, code in zip(named, parts[1::2], strict=True) if paths}
