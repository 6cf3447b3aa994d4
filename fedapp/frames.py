"""Frames in memory as a run's tables: through Arrow into Parquet files, read as any other table.

The files lie in the run's folder, for their owner alone, until the run has finished: a run that was
interrupted goes on from them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from fedapp.data.names import NAME, NAME_RULE
from fedapp.errors import ConfigError, DataError
from fedapp.home import open_private

PREFIX, SUFFIX = "frame-", ".parquet"
KINDS = (
    "a table's name or path, a DataFrame (pandas, polars, or anything with __arrow_c_stream__ or "
    "__dataframe__), a pyarrow Table, or a numpy array of two dimensions"
)


@runtime_checkable
class ArrowStream(Protocol):
    """A frame that Arrow reads: of pandas 2.2, polars, pyarrow and others."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object: ...


@runtime_checkable
class Interchange(Protocol):
    """A frame by the older exchange protocol."""

    def __dataframe__(self, nan_as_null: bool = False, allow_copy: bool = True) -> Any: ...


Frame: TypeAlias = ArrowStream | Interchange | np.ndarray[Any, Any]
Source: TypeAlias = str | os.PathLike[str] | Frame
Data: TypeAlias = Source | Sequence[Source] | Mapping[str, Source]


def as_arrow(frame: object) -> Any:
    """A frame as a pyarrow.Table; a pandas index is no column of it.

    Parameters
    ----------
    frame : an array's columns are called c0, c1, ...

    Raises
    ------
    DataError : it is no frame, or its columns are of no type that Arrow has.
    """
    import pyarrow as pa

    try:
        if isinstance(frame, np.ndarray):
            return _of_array(frame)
        if type(frame).__module__.partition(".")[0] == "pandas":
            table = pa.Table.from_pandas(frame, preserve_index=False)
            return _storable(table.replace_schema_metadata(None))
        if isinstance(frame, dict):
            return _storable(pa.table(frame))
        if isinstance(frame, ArrowStream):
            return _storable(pa.table(frame))
        if isinstance(frame, Interchange):
            import pyarrow.interchange

            return _storable(pyarrow.interchange.from_dataframe(frame))
    except (pa.ArrowException, TypeError, ValueError) as error:
        rule = "data must be a frame whose columns are of one type each, got one that Arrow refuses"
        told = f"{rule} ({type(error).__name__})"
        raise DataError(told, here=f"{told}: {error}") from None  # which may quote a value
    kind = f"{type(frame).__module__}.{type(frame).__qualname__}"
    raise DataError(f"data must be {KINDS}, got {kind}")


def _storable(table: Any) -> Any:
    """The table with categories as a Parquet file can have them."""
    import pyarrow as pa

    for place, field in enumerate(table.schema):
        if not pa.types.is_dictionary(field.type):
            continue
        values = field.type.value_type
        if pa.types.is_string_view(values):
            column = table.column(place).cast(pa.dictionary(pa.int32(), pa.string()))
            table = table.set_column(place, field.name, column)
        elif pa.types.is_nested(values) or isinstance(values, pa.BaseExtensionType):
            raise TypeError(f"categories of the type {values}")
    return table


def _of_array(array: np.ndarray[Any, Any]) -> Any:
    import pyarrow as pa

    if array.ndim != 2 or not array.shape[1]:
        raise DataError(f"data must be an array of rows and columns, got shape {array.shape}")
    columns = [pa.array(np.ascontiguousarray(column)) for column in array.T]
    return pa.Table.from_arrays(columns, names=array_names(array.shape[1]))


def array_names(n_columns: int) -> list[str]:
    """What the columns of an array are called."""
    return [f"c{place}" for place in range(n_columns)]


def holds_frames(data: Data) -> bool:
    """Whether any of the tables is not one that has a name or a path."""
    return not all(_is_text(source) for source in _sources(data).values())


def placed(data: Data, folder: Path) -> str:
    """What the setting ``data`` says of tables, once the frames among them lie in a folder.

    Parameters
    ----------
    data : one table, one a party, or these by the names of the parties.
    folder : exists where there are frames.

    Raises
    ------
    ConfigError : parties have no names that can be, or the folder's path cannot be said there.
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
    """Tables by the name of their party, or by their number."""
    if isinstance(data, Mapping):
        for name in data:
            if not isinstance(name, str) or not NAME.fullmatch(name):
                raise ConfigError(f"data must give parties names of {NAME_RULE}, got {name!r}")
        found: dict[str, Any] = dict(data)
    elif isinstance(data, Sequence) and not _is_text(data):
        found = {str(place): source for place, source in enumerate(data, start=1)}
    else:
        found = {"1": data}
    if not found:
        raise ConfigError(f"data must be {KINDS}, got none")
    return found


def _is_text(source: object) -> bool:
    return isinstance(source, str | os.PathLike)


def _written(name: str, frame: object, folder: Path) -> str:
    """The path of a frame's file."""
    from pyarrow import parquet

    if "," in str(folder):
        raise ConfigError(f"run_dir must have no comma where data are frames, got {folder}")
    path = folder.absolute() / f"{PREFIX}{name}{SUFFIX}"
    table = as_arrow(frame)
    with open_private(path, "wb") as file:
        parquet.write_table(table, file)
    return str(path)


def drop_frames(folder: Path) -> bool:
    """Delete the frames of a run's folder; whether there were any."""
    found = list(folder.glob(f"{PREFIX}*{SUFFIX}"))
    for path in found:
        path.unlink()
    return bool(found)


def named_frames(data: str, folder: Path) -> str:
    """What is said of tables whose files were frames: ``frame``, or ``bank=frame,shop=frame``."""
    words = []
    for entry in data.split(","):
        at = entry.find(f"{folder.absolute()}{os.sep}{PREFIX}")
        words.append(entry if at < 0 else f"{entry[:at]}frame")
    return ",".join(words)
