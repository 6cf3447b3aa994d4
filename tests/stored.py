"""What a site's store has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedapp.messages.fields import Array
from fedapp.records.codec import codec_of
from fedapp.site.store import PART_FILE, STATE, Store, sealed


def by_subset(store: Store, name: str) -> Mapping[str, Array]:
    """A field of arrays by subset."""
    found: Mapping[str, Array] = store.read(name, codec_of(Mapping[str, Array]))
    return found


def with_arrays(store: Store) -> set[str]:
    """Names of the values that have arrays."""
    return {name for name, one in store._values.items() if one.has_arrays}


def seal(folder: Path, document: Mapping[str, Any]) -> None:
    """Write any document as a party's part."""
    (folder / PART_FILE).write_bytes(sealed(dict(document)))


def store_of(folder: Path, state: bytes) -> Store:
    """The store whose file has these bytes, in a folder of its own."""
    folder.mkdir(parents=True)
    (folder / STATE).write_bytes(state)
    return Store.open(folder)
