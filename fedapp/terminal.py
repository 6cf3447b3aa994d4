"""Texts on a terminal: what tables, sites and coordinators write there cannot control it.

Rich writes styles and the cursor's moves itself, so a ``Terminal`` cleans the texts that it is
given. Everything else that is written to the standard streams is cleaned there (``clean_streams``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import IO, Any, cast

from rich.console import Console
from rich.segment import Segment
from rich.text import Text

from fedapp.errors import CONTROL

Tell = Callable[[str], None]  # prints a line


def clean(text: str) -> str:
    """A text whose control characters, other than ends of lines and tabs, are question marks."""
    return CONTROL.sub(lambda found: found[0] if found[0] in "\n\t" else "?", text)


def one_line(text: str) -> str:
    """A text whose names and values, as of a table, cannot begin a line that looks like ours."""
    return text.replace("\n", " ")


class Terminal(Console):
    """A console that shows no control character of a text, and no emoji for a word in colons."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"emoji": False, **options})

    def render_str(self, text: str, **options: Any) -> Text:
        """Clean a text before its width is measured."""
        return super().render_str(clean(text), **options)

    def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
        """Clean what other objects made of texts; rich's own controls are no texts."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(clean(segment.text), segment.style)

    @property
    def file(self) -> IO[str]:
        """The stream below all that clean it."""
        stream: IO[str] = super().file
        return cast(IO[str], getattr(stream, "rich_proxied_file", stream))

    @file.setter
    def file(self, stream: IO[str]) -> None:
        self._file = stream


class _CleanStream:
    """A stream that cleans what is written; rich writes past it."""

    def __init__(self, stream: IO[str]) -> None:
        self.rich_proxied_file = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)

    def write(self, text: str) -> int:
        return self.rich_proxied_file.write(clean(text))

    def writelines(self, lines: Iterable[str]) -> None:
        self.rich_proxied_file.writelines(map(clean, lines))


def clean_streams() -> None:
    """Clean what this process writes to its standard streams from now on, by whatever means."""
    from typer import rich_utils

    setattr(rich_utils, "Console", Terminal)  # noqa: B010 - errors of usage quote what was typed
    for name in ("stdout", "stderr"):
        if not isinstance(stream := getattr(sys, name), _CleanStream):
            setattr(sys, name, _CleanStream(stream))
