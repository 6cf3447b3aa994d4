"""Where fedapp keeps things on this machine, and how it writes them."""

from __future__ import annotations

import os
from pathlib import Path


def home() -> Path:
    """``$FEDAPP_HOME``, by default ``~/.fedapp``: sites' state, Flower's files, data."""
    return Path(os.environ.get("FEDAPP_HOME") or Path.home() / ".fedapp").expanduser()


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that it is there whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(content)
    temporary.replace(path)
