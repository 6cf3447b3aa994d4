"""What the setting ``data`` names: sets known by name, files, frames, the party of each.

Known sets are scikit-learn's, and public files verified by SHA-256. Files are searched in
$FEDAPP_DATA, then in the cache, $FEDAPP_HOME/data; plain or with .gz, as the checksum is that of
the content.

Frames in memory become tables of a run through Parquet files in its folder. These are readable by
their owner only, and stay until the run has finished, so that it can be resumed.
"""

from __future__ import annotations

import bz2
import functools
import glob
import hashlib
import io
import os
import re
import tempfile
import urllib.request
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from fedapp.data.convert import TYPE_WAY, decoded
from fedapp.data.csv_errors import TextFile, opened
from fedapp.data.read import FILE_OR_FOLDER, has_table, load_table, read_frame, text_file
from fedapp.data.schema import (
    NO_ROLES,
    PACKED,
    PLAIN,
    REGISTRY,
    DataFile,
    DataSet,
    Reader,
    Roles,
    listed,
)
from fedapp.data.table import Table, build_table
from fedapp.errors import ConfigError, DataError, did_you_mean, did_you_mean_path
from fedapp.home import home, open_private

Progress = Callable[[int, int], None]

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")  # of a party
NAME_RULE = "letters, digits, '.', '_' or '-'"
CHUNK_BYTES = 1 << 20
SECONDS_TO_CONNECT = 60
LEFT_BY_SHELL = re.compile(r"~|.*[*?$\[]")  # after `=`, in quotes and in files
WRITTEN_OUT = "; ~, $, * and ? must be written out, the tables of several parties as a.csv,b.csv"
NOT_PUBLIC = "no public copy of this exact file; put it into $FEDAPP_DATA"
PREFIX, SUFFIX = "frame-", ".parquet"
KINDS = (
    "a table's name or path, a DataFrame (pandas, polars, or anything with __arrow_c_stream__), a "
    "pyarrow Table, or a numpy array of two dimensions"
)


def find_dataset(name: str) -> DataSet:
    """Return the data set of this name; raises ConfigError if there is none."""
    if name not in REGISTRY:
        rule = "data set must be a built-in name or a registry name"
        raise ConfigError(f"{rule}, got '{name}'{did_you_mean(name, REGISTRY)}")
    return REGISTRY[name]


def read_source(data: str, roles: Roles = NO_ROLES, reader: Reader = PLAIN) -> Table:
    """Read what the setting `data` names: a built-in set, a registry set or a file, in that order.

    A named set keeps its label and dropped columns; `roles.drop` adds to them. It ignores `reader`.
    Raises ConfigError if `data` names nothing or `roles.label` is not that of the set, and
    DataError as `load_table`, or if a set's file is missing or has another checksum.
    """
    if data in REGISTRY:
        return build_table(*_set_frame(data, roles))
    _check_file(data)
    return load_table(Path(data), roles, reader)


def check_source(data: str) -> None:
    """Check that `data` names a table.

    For the owner of the folder only: the ConfigError suggests files of similar names.
    """
    if data not in REGISTRY:
        try:
            _check_file(data)
        except ConfigError as error:
            files = sorted(glob.glob(os.path.expandvars(os.path.expanduser(data))))
            meant = f": {','.join(files)}" if files else did_you_mean_path(Path(data))
            raise ConfigError(f"{error}{meant}") from None


def source_frame(
    data: str, roles: Roles = NO_ROLES, reader: Reader = PLAIN
) -> tuple[Any, Roles, TextFile | None, Reader]:
    """The columns of `data` as they are, roles, the CSV file, and the reader; see `read_source`."""
    if data in REGISTRY:
        return _set_frame(data, roles)
    _check_file(data)
    frame = read_frame(Path(data), roles, reader)
    return frame, roles, text_file(Path(data), reader), reader


def _check_file(data: str) -> None:
    if os.path.isdir(data) and not has_table(Path(data)):
        raise ConfigError(f"data must be {FILE_OR_FOLDER}, got the folder '{data}'")
    if not has_table(Path(data)):
        rule = "data must be a built-in name, a registry name or an existing file"
        hint = WRITTEN_OUT if LEFT_BY_SHELL.match(data) else did_you_mean(data, REGISTRY)
        raise ConfigError(f"{rule}, got '{data}'{hint}")


def cache_folder() -> Path:
    """Folder of downloaded files; it may not exist yet."""
    return home() / "data"


def locate(file: DataFile) -> Path | None:
    """Path of a file, or None if it is not here. Its content is not checked."""
    shared = os.environ.get("FEDAPP_DATA")
    folders = [Path(shared), cache_folder()] if shared else [cache_folder()]
    paths = (folder / name for folder in folders for name in file.names)
    return next((path for path in paths if path.is_file()), None)


def fetch(name: str, progress: Progress = lambda done, total: None) -> Path:
    """Download the files of a registry set into the cache, unless they are here.

    `progress` takes the bytes so far and the total, 0 if unknown. Returns the first file.

    Raises
    ------
    ConfigError : there is no such data set, or it has no file.
    DataError : the file is not public, the download fails, or the checksum differs.
    """
    dataset = find_dataset(name)
    if not dataset.files:
        raise ConfigError(f"data set must be one with files, got '{name}' (built-in)")
    paths = []
    for file in dataset.files:
        if path := locate(file):
            _check(path, file)
        paths.append(path or _download(name, file, progress))
    return paths[0]


def _set_frame(name: str, asked: Roles) -> tuple[Any, Roles, TextFile | None, Reader]:
    dataset = find_dataset(name)
    if asked.label not in ("", dataset.label):
        rule = f"label must be '{dataset.label}' or empty for the data set '{name}'"
        raise ConfigError(f"{rule}, got '{asked.label}'")
    roles = replace(asked, label=dataset.label, drop=(*dataset.drop, *asked.drop))
    if not dataset.files:
        import sklearn.datasets

        loader = (dataset.bunch or name).replace("-", "_")
        bunch = getattr(sklearn.datasets, f"load_{loader}")()
        columns = list(map(pa.array, (*bunch.data.T, bunch.target)))
        frame = pa.Table.from_arrays(columns, names=[*bunch.feature_names, "target"])
        frame = dataset.prepare(frame) if dataset.prepare else frame
        return frame, roles, None, dataset.reader
    file = dataset.files[0]
    path = locate(file)
    if path is None:
        rule = f"data set '{name}' must be in $FEDAPP_DATA or in the cache"
        hint = f"`fedapp data fetch {name}` downloads it" if file.url else NOT_PUBLIC
        raise DataError(f"{rule}, got no file '{file.name}'; {hint}")
    _check(path, file)
    frame = read_frame(path, roles, dataset.reader)
    frame = dataset.prepare(frame) if dataset.prepare else frame
    return frame, roles, text_file(path, dataset.reader), dataset.reader


def _check(path: Path, file: DataFile) -> None:
    """Check the SHA-256 of a file's content: another compressor gives other bytes of it."""
    try:
        with opened(path) as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()  # type: ignore[arg-type]
    except (OSError, EOFError) as error:
        raise DataError(f"'{path}' must unpack, got {type(error).__name__}") from None
    if digest != file.sha256:
        raise DataError(f"'{path}' must have content of sha256 {file.sha256}, got {digest}")


def _download(name: str, file: DataFile, progress: Progress) -> Path:
    if not file.url:
        raise DataError(
            f"data set '{name}' must be public to be fetched, got '{file.name}'; {NOT_PUBLIC}"
        )
    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    packing = PACKED if file.url.endswith(PACKED) else ""
    target = folder / (file.name.removesuffix(PACKED) + packing)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        path = Path(work) / target.name
        if not file.url.startswith("https://"):
            raise DataError(f"url must start with https://, got {file.url}")
        try:
            reply = urllib.request.urlopen(file.url, timeout=SECONDS_TO_CONNECT)
            unpacker = bz2.BZ2Decompressor() if file.url.endswith(".bz2") else None
            with reply, path.open("wb") as out:
                done = 0
                total = int(reply.headers.get("Content-Length") or 0)
                while chunk := reply.read(CHUNK_BYTES):
                    out.write(unpacker.decompress(chunk) if unpacker else chunk)
                    done += len(chunk)
                    progress(done, total)
        except (OSError, EOFError) as error:
            raise DataError(f"download of '{file.name}' must succeed, got {error}") from error
        _check(path, file)
        return path.replace(target)


@functools.lru_cache(8)  # else each of n parties would parse the n tables
def party_sources(data: str, n_parties: int) -> Mapping[str, str]:
    """Table of each party, by name and sorted by name; empty if there is one table to split.

    `data` is ``bank=a.csv,insurer=b.csv``, or ``a.csv,b.csv`` for party-1 and party-2; an entry is
    anything ``read_source`` reads. One entry without a name is one table to split. Raises
    ConfigError if an entry is empty, names are invalid, repeated or given to only some entries, or
    the number of entries is not `n_parties`.
    """
    named = _names_and_sources(data)
    if len(named) == 1 and named[0][0] is None:
        return {}
    _check_entries(data, named)
    if len(named) != n_parties:
        rule = f"data must be one table to split, or a table for each of parties={n_parties}"
        raise ConfigError(f"{rule}, got {len(named)}: set parties={len(named)}")
    if named[0][0] is None:
        return {party_name(share, n_parties): source for share, (_, source) in enumerate(named)}
    return dict(sorted((name, source) for name, source in named if name is not None))


def by_party(files: str) -> dict[str, str]:
    """Parse ``bank=a.toml,insurer=b.toml``; one file for all parties is under the empty name."""
    named = _names_and_sources(files)
    if any(name is None for name, _ in named):
        return {"": files} if files else {}
    return {name: file for name, file in named if name is not None}


def files_in(data: str) -> list[str]:
    """Names of all tables in the setting ``data``, without those of parties."""
    return [source for _, source in _names_and_sources(data)]


def absolute_paths(data: str) -> str:
    """The setting ``data`` or ``schema`` with absolute paths of its files."""
    return ",".join(
        (f"{name}=" if name else "") + (os.path.abspath(path) if has_table(Path(path)) else path)
        for name, path in _names_and_sources(data)
    )


def file_of_party(files: str, party: str) -> str:
    """The file of a party; empty if it has none."""
    by_name = by_party(files)
    return by_name.get(party, by_name.get("", ""))


def sources_to_predict(data: str, parties: Collection[str], may_be_one: bool) -> Mapping[str, str]:
    """Table of each party of a model, sorted by name; empty if there is one table.

    `data` is ``bank=a.csv,insurer=b.csv``; several tables must have names, as their order does not
    say whose they are. One table without a name must have all columns (`may_be_one`). Raises
    ConfigError if a table has no name, a party no table, or a name is not the model's.
    """
    entries = _names_and_sources(data)
    names = [name for name, _ in entries if name is not None]
    if not names and len(entries) == 1 and may_be_one:
        return {}
    example = ",".join(f"{name}=TABLE" for name in sorted(parties))
    if not names:
        raise ConfigError(f"--data must say which table is whose, as in {example}, got {data!r}")
    sources = party_sources(data, len(entries))
    allowed = ", ".join(sorted(parties))
    for name in names:
        if name not in parties:
            raise ConfigError(f"--data must name parties of the model ({allowed}), got {name!r}")
    if missing := sorted(set(parties) - set(names)):
        rule = f"--data must name a table for every party of the model ({allowed})"
        raise ConfigError(f"{rule}, got none for {', '.join(missing)}")
    repeated = [name for name, count in Counter(sources.values()).items() if count > 1]
    if repeated:
        owners = " and ".join(name for name, source in sources.items() if source == repeated[0])
        rule = "--data must name a different table for every party"
        raise ConfigError(f"{rule}, got {repeated[0]} for {owners}")
    return sources


def _names_and_sources(text: str) -> list[tuple[str | None, str]]:
    """Split ``bank=a.csv,...``; a name is None where there is none, as in ``folder/a=b.csv``."""
    parts = ((entry.strip(), *entry.partition("=")) for entry in text.split(","))
    return [
        (None, entry) if not equals or os.sep in name else (name.strip(), source.strip())
        for entry, name, equals, source in parts
    ]


def _check_entries(data: str, named: Sequence[tuple[str | None, str]]) -> None:
    """Check that no entry is empty, and that all have distinct names or none has."""
    example = "as in data=bank=a.csv,insurer=b.csv"
    if not all(source for _, source in named):
        raise ConfigError(f"data must name a table between any two commas, got {data!r}")
    names = [name for name, _ in named if name is not None]
    if names and len(names) < len(named):
        bare = next(source for name, source in named if name is None)
        raise ConfigError(f"data must name all parties or none, {example}; got {bare!r} unnamed")
    broken = [name for name in names if not NAME.fullmatch(name)]
    if broken:
        rule = f"data must give parties names of {NAME_RULE} that begin with a letter or digit"
        raise ConfigError(f"{rule}, {example}; got {broken[0]!r}")
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        rule = "data must give every party a different name"
        raise ConfigError(f"{rule}, {example}; got {repeated[0]!r} more than once")


def party_name(share: int, n_shares: int) -> str:
    """Name of a simulated party; names sort as their numbers do."""
    return f"party-{share + 1:0{len(str(n_shares))}d}"


@runtime_checkable
class ArrowStream(Protocol):
    """A frame that Arrow reads: pandas 2.2, polars, pyarrow and others."""

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object: ...


Frame: TypeAlias = ArrowStream | np.ndarray[Any, Any]
Source: TypeAlias = str | os.PathLike[str] | Frame
Data: TypeAlias = Source | Sequence[Source] | Mapping[str, Source]


def as_arrow(frame: object) -> Any:
    """Convert a frame to a pyarrow.Table, without a pandas index; DataError if Arrow refuses it."""
    kind = f"{type(frame).__module__}.{type(frame).__qualname__}"
    if hasattr(frame, "to_frame"):  # of pandas or polars
        rule = "data must be a table, which a column's to_frame() is"
        raise DataError(f"{rule}, got one column, {kind}")
    try:
        if isinstance(frame, np.ndarray):
            if frame.ndim != 2 or not frame.shape[1]:
                rule = "data must be an array of rows and columns"
                raise DataError(f"{rule}, got shape {frame.shape}")
            columns = [pa.array(np.ascontiguousarray(column)) for column in frame.T]
            return pa.Table.from_arrays(columns, names=array_names(frame.shape[1]))
        if type(frame).__module__.partition(".")[0] == "pandas":
            table = pa.Table.from_pandas(frame, preserve_index=False)
            return decoded(table.replace_schema_metadata(None))
        if isinstance(frame, dict | ArrowStream):
            return decoded(pa.table(frame))
    except (pa.ArrowException, TypeError, ValueError) as error:
        # Arrow's text may quote a value: only the column is taken from it.
        if column := re.search(r"column (.+?)(?: with type|\))", str(error.args[-1:])):
            rule = "column {} of a frame must be of one type that Arrow has, got another"
            raise DataError.naming(f"{rule}: {TYPE_WAY}", f"'{column[1]}'") from None
        rule = "data must be a frame whose columns are of one type each, got one that Arrow refuses"
        raise DataError(f"{rule} ({type(error).__name__})") from None
    raise DataError(f"data must be {KINDS}, got {kind}")


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
        for name, source in data.items():
            is_array = isinstance(source, np.ndarray) and source.ndim == 1
            if is_array or isinstance(source, list | tuple) or hasattr(source, "to_frame"):
                rule = "data must be a table, or a mapping with a table for each party"
                way = "pandas.DataFrame(data) is a table of a mapping of columns"
                raise ConfigError(f"{rule}, got a column named {name!r}: {way}")
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
    if "," in str(folder):
        raise ConfigError(f"run_dir must have no comma where data are frames, got {folder}")
    path = folder.absolute() / f"{PREFIX}{name}{SUFFIX}"
    table = as_arrow(frame)
    if not _fits_parquet(table):
        parts = ((name, table.select([at])) for at, name in enumerate(table.column_names))
        names = [name for name, part in parts if not _fits_parquet(part)]
        rule = "columns of a frame must be of types that Parquet files have, got others in {}: "
        raise DataError.naming(f"{rule}{TYPE_WAY}", listed(names))
    with open_private(path, "wb") as file:
        parquet.write_table(table, file)
    return str(path)


def _fits_parquet(table: Any) -> bool:
    """Whether a Parquet file can have the types of a table."""
    try:
        parquet.write_table(table.slice(0, 1), io.BytesIO())
    except (pa.ArrowException, OSError):
        return False
    return True


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
