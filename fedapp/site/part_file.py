"""A party's part of a model on its disk: for its owner alone, salted, known by its digest."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedapp.errors import DataError
from fedapp.home import PRIVATE, write_whole
from fedapp.trees.divided.lookup import FORMAT

SALT_BYTES = 32


PART_FILE = "part.json"


def write_part(folder: Path, document: Mapping[str, Any]) -> None:
    """Write a party's part of a model; nobody else on the machine may read it.

    Salt makes its digest say nothing: without it, who guessed a threshold could try the guess.
    """
    document = {**document, "salt": secrets.token_hex(SALT_BYTES)}
    write_whole(folder / PART_FILE, (json.dumps(document) + "\n").encode(), PRIVATE)


def read_part(folder: Path) -> dict[str, Any]:
    """Read what ``write_part`` wrote.

    Raises
    ------
    DataError : there is none, or it is of another format.
    """
    path = folder / PART_FILE
    if not path.is_file():
        raise DataError("model must have a part at this party, got none: was it trained here?")
    document: dict[str, Any] = json.loads(path.read_text())
    if document.get("format") != FORMAT:
        raise DataError(f"model must be of format {FORMAT}, got {document.get('format')!r}")
    return document


def part_digest(folder: Path) -> bytes:
    """32 bytes that change with a party's part of a model."""
    return hashlib.blake2b((folder / PART_FILE).read_bytes(), digest_size=32).digest()
