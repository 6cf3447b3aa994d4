"""The register's database: its tables, and transactions that survive a lost machine."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import secrets
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fedapp.crypto.noise import Budget
from fedapp.crypto.sealed import fingerprint_of, public_key
from fedapp.errors import DataError
from fedapp.home import secret_at, sync_folder, write_new
from fedapp.messages.methods import method_of
from fedapp.process import versions
from fedapp.site.store import locked
from fedapp.site.trust import IDENTITY, UNUSED, identity

# Fields of an opening that are settings of the run, besides those of ``Plan``.
SPLIT = (
    *("test_fraction", "valid_fraction", "seed", "fold", "folds"),
    *("group", "test_from", "valid_from"),
)
DATABASE = "register.db"
BUSY_SECONDS = 60.0  # to wait while another program locks the database
# Digests of the hashes of all runs; a column is empty where a run has none.
IN_USE = "SELECT contents FROM runs WHERE contents > '' UNION SELECT ids FROM runs WHERE ids > ''"
DURABLY = "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL"
ROWS_KEY = "rows.key"  # of a home: the key of the hashes of rows
KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class AskedRun:
    """A run as its opening describes it: a row of the database."""

    model: str  # its id
    method: str
    data: str  # the site's table
    asked: float  # first, in seconds of Unix time
    settings: Mapping[str, Any]  # all that the opening says
    reasons: Sequence[str] = ()  # why it waited when it last asked
    # Keys by party, at the site then.
    trusted: Mapping[str, str] = dataclasses.field(default_factory=dict)
    total_epsilon: float = 0.0  # of the node config then
    label_epsilon: float = 0.0  # the same, of a run that uses the site's labels
    approved: str = ""  # digest of what a person has approved
    admitted: bool = False  # whether its opening may be answered
    begun: bool = False  # whether it was, and the site has had a state of it
    # Of the table, when the run last asked; empty if it could not be read
    version: str = ""  # of its file
    n_rows: int = 0
    n_shared: int = 0  # of them, the most that are in the table of one earlier run
    contents: str = ""  # digest of the hashes, among the register's
    ids: str = ""  # the same; empty without an id column
    columns: str = ""  # digest of their names and roles
    # By other party, ids that were matched against the table, and when
    matched: Mapping[str, Sequence[float]] = dataclasses.field(default_factory=dict)
    charged: bool = False  # whether a noised sum has left the site
    number: int | None = None  # in the order in which runs first asked

    @property
    def digest(self) -> str:
        """SHA-256 of what is approved: the method, its settings, and why the run waits."""
        shown = json.dumps([self.method, self.settings, self.reasons])
        return hashlib.sha256(shown.encode()).hexdigest()

    @property
    def split(self) -> tuple[Any, ...]:
        """Settings that determine the rows held back; empty if the run uses a model."""
        declared = method_of(self.method)
        names = () if declared is None or declared.uses_model else SPLIT
        return tuple(self.settings.get(name, "") for name in names)

    @property
    def roster(self) -> frozenset[str]:
        """Fingerprints of the parties of masked sums; empty without masks."""
        is_summed = self.settings["aggregation"] == "secure"
        return frozenset(self.settings["fingerprints"] if is_summed else ())

    @property
    def budget(self) -> Budget:
        """Privacy budget of a private run."""
        settings = self.settings
        return Budget(
            epsilon=settings["epsilon"],
            delta=settings["delta"],
            multiplier=settings["multiplier"],
            n_rounds=settings["rounds"],
            n_parties=max(len(settings["parties"]), 2),
        )


COLUMNS = tuple(field.name for field in fields(AskedRun))
TABLES = (
    f"CREATE TABLE IF NOT EXISTS runs ({', '.join(COLUMNS[:-1])}, number INTEGER PRIMARY KEY)",
    "CREATE TABLE IF NOT EXISTS hashes (digest PRIMARY KEY, words)",
    "CREATE TABLE IF NOT EXISTS meta (name PRIMARY KEY, value)",
)


def _prepare(folder: Path, register: sqlite3.Connection, is_new: bool) -> None:
    for table in TABLES:
        register.execute(table)
    recorded = dict(register.execute("SELECT name, value FROM meta WHERE name <> 'log'"))
    key = identity(folder.name, folder.parent.parent)
    due = {"identity": fingerprint_of(public_key(key)), "rows": rows_key(folder, register).hex()}
    if not recorded and is_new:
        register.executemany("INSERT INTO meta VALUES (?, ?)", due.items())
    elif recorded.get("identity") != due["identity"]:
        raise _lost(folder, "one of another key" if recorded else "one without a key")
    elif recorded != due:
        rule = f"{ROWS_KEY} must be the key that {DATABASE} has, got another: delete {ROWS_KEY}"
        raise DataError(rule, folder.name)


def _lost(folder: Path, got: str) -> DataError:
    return DataError(
        f"{DATABASE} must be the register of the site's {IDENTITY}, got {got}: restore it from a "
        f"backup. To give up the site's history of runs, delete {DATABASE} and {IDENTITY}; others "
        "must then trust the site's new key",
        folder.name,
    )


@contextmanager
def transaction(folder: Path) -> Iterator[sqlite3.Connection]:
    """Open the register; changes are on disk afterwards, or undone if the block fails.

    The lock is the home's, as a decision also rests on the registers of its other sites.
    """
    path = folder / DATABASE
    identity(folder.name, folder.parent.parent)
    with locked(folder.parent):
        is_new = (folder / UNUSED).exists()
        if not path.exists() and is_new:
            write_new(path, b"")  # files that SQLite puts beside it get its mode
            sync_folder(folder)
        elif not is_new and not (path.exists() and path.stat().st_size):
            raise _lost(folder, "an empty file" if path.exists() else "none")
        with connected(folder) as register:
            register.executescript(DURABLY)
            register.execute("BEGIN IMMEDIATE")
            _prepare(folder, register, is_new)
            yield register
            register.execute("COMMIT")
        (folder / UNUSED).unlink(missing_ok=True)


@contextmanager
def connected(folder: Path) -> Iterator[sqlite3.Connection]:
    try:
        path = folder / DATABASE
        with closing(sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None)) as register:
            columns = {row[1] for row in register.execute("PRAGMA table_info(runs)")}
            if columns and not columns.issuperset(COLUMNS):
                raise _lost(folder, f"one of a version before {versions(['fedapp'])['fedapp']}")
            yield register
    except (sqlite3.Error, json.JSONDecodeError) as error:
        rule = f"{DATABASE} must be a database that the site can write, got: {error}"
        raise DataError(rule, folder.name) from error


def rows_key(folder: Path, register: sqlite3.Connection) -> bytes:
    """Key of the hashes of rows, which all sites of a home share; as in the register, if there."""
    query = register.execute("SELECT value FROM meta WHERE name = 'rows'").fetchone()
    recorded = bytes.fromhex(query[0]) if query else secrets.token_bytes(KEY_BYTES)
    return secret_at(folder.parent.parent / ROWS_KEY, lambda: recorded)
