"""Frames in memory as a run's tables: written through Arrow to Parquet files, read like any table.

The files are in the run's folder, readable by their owner only, until the run has finished, so that
an interrupted run can be resumed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from fedapp.data.datasets import NAME, NAME_RULE
from fedapp.errors import ConfigError, DataError
from fedapp.home import open_private

PREFIX, SUFFIX = "frame-", ".parquet"
KINDS = (
    "a table's name or path, a DataFrame (pandas, polars, or anything with __arrow_c_stream__ or "
    "__dataframe__), a pyarrow Table, or a numpy array of two dimensions"
)


@runtime_checkable
class ArrowStream(Protocol):
    """A frame that Arrow reads: pandas 2.2, polars, pyarrow and others."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object: ...


@runtime_checkable
class Interchange(Protocol):
    """A frame with the older dataframe interchange protocol."""

    def __dataframe__(self, nan_as_null: bool = False, allow_copy: bool = True) -> Any: ...


Frame: TypeAlias = ArrowStream | Interchange | np.ndarray[Any, Any]
Source: TypeAlias = str | os.PathLike[str] | Frame
Data: TypeAlias = Source | Sequence[Source] | Mapping[str, Source]


def as_arrow(frame: object) -> Any:
    """Convert a frame to a pyarrow.Table, without a pandas index; DataError if Arrow refuses it."""
    import pyarrow as pa

    try:
        if isinstance(frame, np.ndarray):
            if frame.ndim != 2 or not frame.shape[1]:
                rule = "data must be an array of rows and columns"
                raise DataError(f"{rule}, got shape {frame.shape}")
            columns = [pa.array(np.ascontiguousarray(column)) for column in frame.T]
            return pa.Table.from_arrays(columns, names=array_names(frame.shape[1]))
        if type(frame).__module__.partition(".")[0] == "pandas":
            table = pa.Table.from_pandas(frame, preserve_index=False)
            return _storable(table.replace_schema_metadata(None))
        if isinstance(frame, dict | ArrowStream):
            return _storable(pa.table(frame))
        if isinstance(frame, Interchange):
            import pyarrow.interchange

            return _storable(pyarrow.interchange.from_dataframe(frame))
    except (pa.ArrowException, TypeError, ValueError) as error:
        rule = "data must be a frame whose columns are of one type each, got one that Arrow refuses"
        text = f"{rule} ({type(error).__name__})"
        # Arrow's text may quote a value: it stays on this machine.
        raise DataError(text, here=f"{text}: {error}") from None
    kind = f"{type(frame).__module__}.{type(frame).__qualname__}"
    raise DataError(f"data must be {KINDS}, got {kind}")


def _storable(table: Any) -> Any:
    """Convert categories to a type that Parquet files can have."""
    import pyarrow as pa

    for at, field in enumerate(table.schema):
        if not pa.types.is_dictionary(field.type):
            continue
        values = field.type.value_type
        if pa.types.is_string_view(values):
            column = table.column(at).cast(pa.dictionary(pa.int32(), pa.string()))
            table = table.set_column(at, field.name, column)
        elif pa.types.is_nested(values) or isinstance(values, pa.BaseExtensionType):
            raise TypeError(f"categories of the type {values}")
    return table


def array_names(n_columns: int) -> list[str]:
    """Names of the columns of an array."""
    return [f"c{column}" for column in range(n_columns)]


def has_frames(data: Data) -> bool:
    """Whether any of the tables is a frame, not a name or a path."""
    return not all(_is_text(source) for source in _sources(data).values())


def write_tables(data: Data, folder: Path) -> str:
    """The value of the setting ``data``; frames are written to ``folder``, which exists then.

    Raises
    ------
    ConfigError : a party's name is invalid, or the folder's path has a comma.
    DataError : see ``as_arrow``.
    """
    sources = _sources(data)
    texts = {}
    for name, source in sources.items():
        texts[name] = os.fspath(source) if _is_text(source) else _written(name, source, folder)
    if not isinstance(data, Mapping):
        return ",".join(texts.values())
    return ",".join(f"{name}={text}" for name, text in texts.items())


def _sources(data: Data) -> dict[str, Any]:
    """Tables by the name of their party, or by their number from 1."""
    if isinstance(data, Mapping):
        for name in data:
            if not isinstance(name, str) or not NAME.fullmatch(name):
                raise ConfigError(f"data must give parties names of {NAME_RULE}, got {name!r}")
        sources: dict[str, Any] = dict(data)
    elif isinstance(data, Sequence) and not _is_text(data):
        sources = {str(number): source for number, source in enumerate(data, start=1)}
    else:
        sources = {"1": data}
    if not sources:
        raise ConfigError(f"data must be {KINDS}, got none")
    return sources


def _is_text(source: object) -> bool:
    return isinstance(source, str | os.PathLike)


def _written(name: str, frame: object, folder: Path) -> str:
    """Write a frame to a file and return its path."""
    from pyarrow import parquet

    if "," in str(folder):
        raise ConfigError(f"run_dir must have no comma where data are frames, got {folder}")
    path = folder.absolute() / f"{PREFIX}{name}{SUFFIX}"
    table = as_arrow(frame)
    with open_private(path, "wb") as file:
        parquet.write_table(table, file)
    return str(path)


def drop_frames(folder: Path) -> bool:
    """Delete the frames of a run's folder; returns whether there were any."""
    paths = list(folder.glob(f"{PREFIX}*{SUFFIX}"))
    for path in paths:
        path.unlink()
    return bool(paths)


def named_frames(data: str, folder: Path) -> str:
    """Replace paths of frames by ``frame``, as in ``bank=frame,shop=frame``."""
    entries = []
    for entry in data.split(","):
        at = entry.find(f"{folder.absolute()}{os.sep}{PREFIX}")
        entries.append(entry if at < 0 else f"{entry[:at]}frame")
    return ",".join(entries)
