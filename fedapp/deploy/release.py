"""Signed releases: a site answers every bundle (FAB) signed by a key that it pins.

``fedapp/signature.py`` in the app holds an Ed25519 signature over the paths and SHA-256 of all
other files; it is read as TOML and never imported. Like a bundle's hash, it identifies the
coordinator's fedapp. It does not decide what runs: a site runs its installed fedapp.
"""

from __future__ import annotations

import hashlib
import io
import tomllib
import zipfile
import zlib
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from fedapp.errors import ConfigError

# A .py file that pyproject.toml lists, so Flower requires it in unsigned bundles too.
SIGNATURE = "fedapp/signature.py"
CONTENT = ".info/CONTENT"  # Flower's list of what is in the bundle
MOST_BYTES, MOST_FILES = 20_000_000, 2_000  # twice what Flower takes
# Errors for a zip that is truncated, encrypted or uses an unknown compression.
_BROKEN = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError)


def load_key(path: Path) -> Ed25519PrivateKey:
    """Read a release key; ConfigError if the file has no Ed25519 key."""
    try:
        key = load_pem_private_key(path.read_bytes(), None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if isinstance(key, Ed25519PrivateKey):
        return key
    way = f"openssl genpkey -algorithm ed25519 -out {path.name}"
    raise ConfigError(f"key must be an Ed25519 key, PEM without a password ({way}), got {path}")


def signature_file(bundle: bytes, key: Ed25519PrivateKey) -> str:
    """Content of ``SIGNATURE`` for a bundle; an existing signature is not signed over."""
    return f'SIGNATURE = "{key.sign(_signed(_files(bundle))).hex()}"  # noqa: E501\n'


@lru_cache(maxsize=4)  # called for every message of a run
def is_signed(bundle: bytes, keys: frozenset[str]) -> bool:
    """Whether one of the public keys, 64 hex digits each, has signed a bundle."""
    for key in keys:
        with suppress(InvalidSignature, KeyError, TypeError, ValueError, *_BROKEN):
            files = _files(bundle)
            signature = bytes.fromhex(tomllib.loads(files[SIGNATURE].decode())["SIGNATURE"])
            Ed25519PublicKey.from_public_bytes(bytes.fromhex(key)).verify(signature, _signed(files))
            return True
    return False


def _files(bundle: bytes) -> dict[str, bytes]:
    """Contents of a bundle by path; ValueError if it is too large or repeats a path."""
    with zipfile.ZipFile(io.BytesIO(bundle)) as archive:
        entries = archive.infolist()
        if len(entries) > MOST_FILES or sum(entry.file_size for entry in entries) > MOST_BYTES:
            raise ValueError("too large")
        if len({entry.filename for entry in entries}) < len(entries):
            raise ValueError("a path twice")
        return {entry.filename: archive.read(entry) for entry in entries}


def _signed(files: dict[str, bytes]) -> bytes:
    """The bytes that are signed: path and hash of each file, unless it depends on the signature."""
    names = sorted(files.keys() - {SIGNATURE, CONTENT})
    lines = (f"{hashlib.sha256(files[name]).hexdigest()} {name!r}" for name in names)
    return "\n".join(["fedapp release", *lines]).encode()
