"""Paths as they are printed."""

from __future__ import annotations

from pathlib import Path


def shown(path: Path) -> str:
    """The path from here where that is shorter, else the whole of it."""
    whole = path.absolute()
    here = Path.cwd()
    return str(whole.relative_to(here) if whole.is_relative_to(here) else whole)
