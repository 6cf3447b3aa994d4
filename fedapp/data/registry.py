"""The registry: public data sets with their files, checksums, columns and labels.

The sets are in ``registry.toml``.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from fedapp.data.schema import PACKINGS, PLAIN, Reader


@dataclass(frozen=True, slots=True)
class DataFile:
    """One file of a data set."""

    name: str  # with .gz or .bz2 if it is stored packed
    stored_sha256: str
    content_sha256: str = ""  # of the unpacked content; empty if the file is not packed
    url: str = ""  # of the content, packed or not; empty if it is not public

    @property
    def names(self) -> tuple[str, ...]:
        """All names the file may have."""
        bare = bare_name(self.name)
        return tuple(dict.fromkeys((self.name, bare, *(bare + packing for packing in PACKINGS))))


@dataclass(frozen=True, slots=True)
class DataSet:
    """A table known by name."""

    task: str  # "binary", "multiclass" or "regression"
    shape: tuple[int, int]  # rows and features of the loaded table
    description: str  # what a row is, and how the columns were changed
    source: str  # publisher and licence
    files: tuple[DataFile, ...] = ()  # the first is the table; empty for scikit-learn's sets
    label: str = "label"
    drop: tuple[str, ...] = ()  # columns that are not features
    reader: Reader = PLAIN
    prepare: Callable[[Any], Any] | None = None  # from the file's pyarrow.Table to the table's


def bare_name(name: str) -> str:
    """A file's name without its packing."""
    return name.removesuffix(".gz").removesuffix(".bz2")


def _airline(frame: Any) -> Any:
    """Keep flights that arrived, and add the label."""
    frame = frame.filter(pc.is_valid(frame["ArrDelay"]))
    minutes = frame["ArrDelay"].cast(pa.int64())
    return frame.append_column("delayed", pc.greater(minutes, 15).cast(pa.float64()))


def _data_set(
    task: str,
    shape: list[int],
    files: tuple[dict[str, str], ...] = (),
    drop: str = "",
    reader: dict[str, Any] | None = None,
    prepare: str = "",
    **texts: str,
) -> DataSet:
    """A set from its section of ``registry.toml``; names of columns are separated by blanks."""
    options = reader or {}
    columns = tuple(options.pop("columns", "").split())
    return DataSet(
        task,
        (shape[0], shape[1]),
        files=tuple(DataFile(**file) for file in files),
        drop=tuple(drop.split()),
        reader=Reader(columns=columns, **options),
        prepare={"airline": _airline}[prepare] if prepare else None,
        **texts,
    )


_SETS = {
    name: _data_set(**section)
    for name, section in tomllib.loads(
        Path(__file__).with_name("registry.toml").read_text(encoding="utf-8")
    ).items()
}
BUILT_IN = {name: one for name, one in _SETS.items() if not one.files}  # scikit-learn has them
REGISTRY = {name: one for name, one in _SETS.items() if one.files}
