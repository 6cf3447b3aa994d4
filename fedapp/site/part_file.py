"""A party's part of a model on its disk: private to its owner, salted, identified by its digest."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedapp.errors import DataError
from fedapp.home import PRIVATE, write_atomically
from fedapp.trees.divided import PART_FORMAT
from fedapp.trees.model import UNREADABLE

PART_FILE = "part.json"
SALT_BYTES = CHECK_BYTES = 16


def write_part(folder: Path, document: Mapping[str, Any]) -> None:
    """Write a party's part of a model, readable only by its owner.

    The salt keeps the digest from confirming a guessed threshold. A checksum over the whole part
    detects changes to the file.
    """
    salt = secrets.token_bytes(SALT_BYTES)
    document = {**document, "salt": (salt + _check(salt, document)).hex()}
    write_atomically(folder / PART_FILE, (json.dumps(document) + "\n").encode(), PRIVATE)


def read_part(folder: Path) -> dict[str, Any]:
    """Read what ``write_part`` wrote; raises DataError if it is absent, outdated or changed."""
    path = folder / PART_FILE
    if not path.is_file():
        raise DataError("model must have a part at this party, got none: was it trained here?")
    try:
        document: dict[str, Any] = json.loads(path.read_text())
        salt_and_check = bytes.fromhex(document["salt"])
        is_whole = salt_and_check[SALT_BYTES:] == _check(salt_and_check[:SALT_BYTES], document)
    except UNREADABLE:
        is_whole = False
    if not is_whole:
        rule = "model's part must be as fedapp wrote it, got a file that was changed or is older"
        raise DataError(f"{rule}: restore {PART_FILE}, or train the model again")
    if document.get("format") != PART_FORMAT:
        raise DataError(f"model must be of format {PART_FORMAT}, got {document.get('format')!r}")
    return document


def _check(salt: bytes, document: Mapping[str, Any]) -> bytes:
    """Checksum of a part without its salt."""
    content = {name: value for name, value in document.items() if name != "salt"}
    text = json.dumps(content, sort_keys=True).encode()
    return hashlib.blake2b(text, key=salt, digest_size=CHECK_BYTES).digest()


def part_digest(folder: Path) -> bytes:
    """Digest of a party's part of a model, 32 bytes."""
    return hashlib.blake2b((folder / PART_FILE).read_bytes(), digest_size=32).digest()
