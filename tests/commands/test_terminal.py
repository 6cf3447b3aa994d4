"""Texts of tables, sites and coordinators on a terminal: no control character reaches it raw."""

import io
import logging
import sys
import unicodedata
from contextlib import suppress

import click
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.markup import escape
from rich.table import Table
from typer.core import TyperCommand

from fedapp import commands
from fedapp.commands.common import console, print_json, say
from fedapp.errors import ConfigError, DataError, RunFailedError
from fedapp.report.progress import Follower
from fedapp.report.summary import print_notes, print_warning

BIDI = "\u2028\u2029\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
CONTROLS = "".join(map(chr, (*range(9), *range(11, 32), *range(127, 160)))) + BIDI
HOSTILE = st.text(st.sampled_from(CONTROLS + "[]2Jm;\\:/a ü"), min_size=1, max_size=30)


def _raised(error):
    def door(text):
        raise error(text)

    return door


def _logged(text):
    log = logging.Logger("fedapp")
    log.addHandler(logging.StreamHandler(sys.stderr))
    log.error("%s", text)


def _framed(text):
    grid = Table(escape(text), title=escape(text))
    grid.add_row(escape(text))
    console.print(grid)


def _followed(text):
    with Follower(console).alive() as follower:
        follower.begin(text)
        follower.tell(text)


# Whatever prints a text that somebody else wrote.
DOORS = {
    "say": say,
    "print": print,
    "markup": lambda text: console.print(f"[bold]{escape(text)}[/]"),
    "frame": _framed,
    "warning": lambda text: print_warning(console, text),
    "note": lambda text: print_notes(console, [text], []),
    "log": _logged,
    "progress": _followed,
    "json": lambda text: print_json("site log", lines=0, signed=0, key=text, faults=[], last=[]),
    "error": _raised(ConfigError),
    "error of a table": _raised(lambda text: DataError("rule", here=text)),
    "error of a run": _raised(lambda text: RunFailedError(text, [text])),
    "usage": _raised(click.UsageError),
    "traceback": lambda text: sys.excepthook(ValueError, ValueError(text), None),
}


def printed(monkeypatch, door, text):
    """What a command prints that passes a text to a door."""
    out = io.StringIO()
    with monkeypatch.context() as patch:
        for name in ("stdout", "stderr"):
            patch.setattr(sys, name, out)
        patch.setattr(commands, "handle_stopping", lambda handler: None)
        command = TyperCommand("fedapp", callback=lambda: door(text))
        patch.setattr(commands, "cli", lambda: command([]))
        with suppress(SystemExit):
            commands.main()
    logging.getLogger("fedapp.site").setLevel(logging.NOTSET)  # which a command silences
    return out.getvalue()


@pytest.mark.parametrize("door", DOORS)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(text=HOSTILE)
def test_no_control_character_reaches_a_terminal(monkeypatch, door, text):
    seen = printed(monkeypatch, DOORS[door], f"x{text}x")
    assert "x" in seen
    assert {letter for letter in seen if letter in CONTROLS} == set()


@pytest.mark.parametrize("door", ["say", "note", "warning", "progress", "error"])
def test_a_name_of_two_lines_begins_no_line_of_ours(monkeypatch, door):
    lines = printed(monkeypatch, DOORS[door], "income\ninterrupted: x").splitlines()
    assert not [line for line in lines if line.strip().startswith("interrupted")]


def test_a_text_without_them_is_shown_as_it_is(monkeypatch):
    text = "größe :heart: [b] \N{NO-BREAK SPACE}µg/l"
    assert all(unicodedata.category(letter) != "Cc" for letter in text)
    for door in ("say", "print", "error"):
        assert text in printed(monkeypatch, DOORS[door], text)
