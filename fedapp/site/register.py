"""The register of runs that have asked a site to take part.

``$FEDAPP_HOME/sites/NAME/register.db`` has a row per run, from its opening on. A decision is one
transaction, on disk before the site answers. Some disclosures show only across runs on the same
data:

- Runs that hold back different rows differ by the labels of those rows. So the first run that
  trains fixes the split, and a run with another one waits for approval.
- Runs on tables that differ by few rows differ by the labels of those rows. So a run waits if its
  table differs by fewer rows than ``min-rows`` from that of an earlier run. Only pairs of tables
  are compared: three that differ by many rows each may still determine few.
- Sums with and without a party, or with another in its place, differ by that party's sum. So a
  masked run with other parties than all earlier ones waits for approval.
- The epsilons of private runs add up; their composition must not exceed ``total-epsilon``. A run
  is charged when its first noised sum leaves, so an opening without one costs nothing.

**The same data** are tables that have a row in common (``fedapp.site.rows``), wherever their files
are: in any register of this home by content, and by id in the register of the same name only, as
parties with different columns of the same rows may share a home. Where rows cannot be compared, as
with other columns and no ids, the file's path decides.

**A register belongs to the site's key.** It can be created only while ``identity.new`` is there,
which is written when the key is drawn and deleted with the register's first transaction. Its
fingerprint and the key of the hashes are in the register. So one that is missing, empty or another
site's is an error, not a new history; so is one of an earlier version.

The register also has the last line of the site's log (``fedapp.site.log``) that ended a run, so a
deleted log is missed. An admitted run is kept for ever; a waiting one, ``KEEP_DAYS``.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from fedapp.crypto.noise import composed_epsilon
from fedapp.crypto.sealed import fingerprint_of, new_private_key, public_key
from fedapp.data.partition import Holdout
from fedapp.data.read import file_version
from fedapp.data.scratch import batches, joined
from fedapp.errors import (
    ConfigError,
    DataError,
    FedappError,
    ProtocolError,
    WaitingError,
    as_protocol_error,
)
from fedapp.home import home, write_atomically
from fedapp.messages.fields import Request
from fedapp.messages.handshake import Plan
from fedapp.messages.methods import method_of
from fedapp.site.account import opening_of
from fedapp.site.clock import SECONDS_A_DAY, Time, read_clock
from fedapp.site.database import (
    COLUMNS,
    DATABASE,
    IN_USE,
    SPLIT,
    AskedRun,
    connected,
    rows_key,
    transaction,
)
from fedapp.site.log import append, line_digest, public_hex
from fedapp.site.rows import WORD_BYTES, Hashes, RowHashes, compare, digest_of, hash_rows
from fedapp.site.rows_to_predict import read_to_predict
from fedapp.site.settings import MIN_BIN_ROWS, SiteConfig
from fedapp.site.store import KEEP_DAYS
from fedapp.site.table import held_tables, read_table
from fedapp.site.trust import IDENTITY, UNUSED, signing_key, trusted_keys

IDS_A_ROW = 20  # default of align-ids-per-day, a row of the site's table
KEPT_SECONDS = KEEP_DAYS * SECONDS_A_DAY
MOST_ROWS = 125_000_000  # hashes of 8 bytes in a value of SQLite, of 10^9 bytes
ASKS = "approve is ask in the node config"


@dataclass(frozen=True, slots=True)
class Earlier:
    """Another run on the same data."""

    run: AskedRun
    n_shared: int  # rows that both tables have
    n_differing: int  # rows that only one of them has; 0 if none, or if rows cannot be compared
    is_elsewhere: bool  # in the register of another site of this home


OF_TABLE = ("data", "version", "n_rows", "contents", "ids", "columns")
TEXTS = ("settings", "reasons", "trusted", "matched")  # as JSON
# Of an opening, what a line of the log has otherwise or, as columns may be many, not at all.
NOT_LOGGED = {"parties", "fingerprints", "columns"}


def admit(
    config: SiteConfig,
    model_id: str,
    method: str,
    request: Request,
    rows: RowHashes | None = None,
    version: str = "",
) -> None:
    """Record a run that has sent its opening, and check that it may begin.

    It is recorded again, and so counts and waits again, if its state was deleted since, if it first
    asked too long ago, or if the site has another table now. Raises ConfigError if runs-per-day or
    total-epsilon would be exceeded or the opening has changed, and WaitingError if nobody at the
    site has approved it yet.

    `rows` are None if the table cannot be read, which is for the request's handler to report;
    `version` is that of its file.
    """
    name, message = config.name, type(request).__name__
    if not isinstance(request, Plan):
        rule = "must be 1, which opens a run: the site has no state of this model, or has lost it"
        raise ProtocolError(name, message, "step", rule)
    opening = opening_of(request)
    if "group" in opening and config.group:
        opening = {**opening, "group": config.group}  # the site's goes before the run's
    declared = method_of(method)
    if declared and declared.shows_label_figures and config.label:
        opening = {**opening, "share_label_figures": config.shares_label_figures}
    time = read_clock(home())
    run = AskedRun(model_id, method, _data_of(config, request), time.stamp, opening)
    if request.epsilon:
        with as_protocol_error(name, message, "multiplier"):
            run.budget.check()
    with transaction(_folder_of(config)) as register:
        run = _noted(config, register, _with_rows(run, rows, version), rows, time)
    if not run.admitted:
        reasons = "; ".join(reason for reason in run.reasons if reason != ASKS)
        way = f"fedapp site approve {model_id}; the run asks again until start-deadline"
        where = f"{name} ({reasons})" if reasons else name
        raise WaitingError(f"waits for approval at {where}: {way}")


@contextmanager
def opening(config: SiteConfig, model_id: str, method: str, request: Request) -> Iterator[None]:
    """Admit a run while its opening is answered; not if the site then refuses it."""
    if {"fold", "folds"} <= {*type(request).forms}:
        # A person reads which rows test before the table is split.
        Holdout.of(opening_of(request)).check()
    with held_tables():
        rows, version = _rows_of(config, model_id, request)
        admit(config, model_id, method, request, rows, version)
        try:
            yield
        except FedappError:
            _mark(config.name, model_id, "admitted = begun")
            raise


def record_opened(name: str, model_id: str) -> int:
    """Record that a site has a state of a run; returns the number of rows of its table.

    Raises ConfigError if its opening was refused.
    """
    run = _mark(name, model_id, "begun = admitted")
    if not run.admitted:
        raise ConfigError(f"run must be admitted by {name}, got an opening that it has refused")
    approved = {"digest": run.digest, "approved": run.approved == run.digest}
    about = {**_about(run), **approved, "rows": run.n_rows, "shared_rows": run.n_shared}
    plan = {key: value for key, value in run.settings.items() if key not in NOT_LOGGED}
    append(home() / "sites" / name, "opened", **about, plan=plan)
    return run.n_rows


def record_ended(name: str, model_id: str, n_questions: int) -> None:
    """Record that a site has answered a run's last question: by a signed line of the log."""
    folder = home() / "sites" / name
    with transaction(folder) as register:
        run = _newest(name, register, model_id)
        epsilon = run.budget.epsilon if run.charged else 0.0
        line = append(folder, "ended", run=model_id, questions=n_questions, epsilon=epsilon)
        head = json.dumps([DATABASE, json.loads(line)["number"], line_digest(line)])
        register.execute("REPLACE INTO meta VALUES ('log', ?)", (head,))


def logged_head(folder: Path) -> list[tuple[str, int, str]]:
    """The last line of the log that ended a run, as the register has it, for ``log.Audit``."""
    if _is_unused(folder):
        return []
    with transaction(folder) as register:
        query = register.execute("SELECT value FROM meta WHERE name = 'log'")
        return [json.loads(value) for (value,) in query]


def _about(run: AskedRun) -> dict[str, Any]:
    parties = dict(zip(run.settings["parties"], run.settings["fingerprints"], strict=True))
    return {"run": run.model, "method": run.method, "parties": parties}


def _mark(name: str, model_id: str, change: str) -> AskedRun:
    with transaction(home() / "sites" / name) as register:
        newest = "number = (SELECT max(number) FROM runs WHERE model = ?)"
        register.execute(f"UPDATE runs SET {change} WHERE {newest}", (model_id,))
        return _newest(name, register, model_id)


def charge(config: SiteConfig, model_id: str) -> None:
    """Charge a run with its epsilon, once, as the first noised sum is about to leave.

    Raises ConfigError if it would exceed ``total-epsilon``: another run may have been charged since
    this one was opened.
    """
    if config.simulated:
        return
    folder = _folder_of(config)
    with transaction(folder) as register:
        run = _newest(config.name, register, model_id)
        if not run.charged:
            # Its table is that of the opening: what has changed since then is not in the run.
            earlier = _earlier(folder, register, run)
            _check_total(config, earlier, run)
            register.execute("UPDATE runs SET charged = 1 WHERE number = ?", (run.number,))
            total, delta = spent([run, *(other.run for other in earlier if other.run.charged)])
            about = {"epsilon": run.budget.epsilon, "delta": delta, "spent": round(total, 4)}
            append(folder, "charged", run=model_id, **about)


def count_ids(config: SiteConfig, model_id: str, owner: str, n_ids: int, n_rows: int) -> None:
    """Count the ids of another party's list that are matched against `n_rows` rows of this site.

    A list that is sent again counts once. Raises ConfigError if they are more in 24 hours than
    ``align-ids-per-day``.
    """
    if config.simulated or owner == config.name:
        return
    folder, time = _folder_of(config), read_clock(home())
    most = config.align_ids_per_day or IDS_A_ROW * n_rows
    with transaction(folder) as register:
        run = _newest(config.name, register, model_id)
        most_ids = max(n_ids, int(run.matched.get(owner, (0,))[0]))
        run = replace(run, matched={**run.matched, owner: (most_ids, time.stamp)})
        runs = [run, *(other.run for other in _earlier(folder, register, run))]
        lists = [entry for other in runs for entry in other.matched.values()]
        total = sum(int(n) for n, matched in lists if time.is_within(matched, SECONDS_A_DAY))
        if total > most:
            raise ConfigError(
                f"align-ids-per-day must be >= the ids that others match with one table in 24 hours"
                f", {total} with the {n_ids} of {owner}, got {most} at {config.name}{time.hint}"
            )
        values = json.dumps(run.matched), run.number
        register.execute("UPDATE runs SET matched = ? WHERE number = ?", values)


def approve(folder: Path, run: AskedRun) -> None:
    """Let a waiting run begin with the settings and for the reasons in `run`."""
    values = run.digest, run.number
    about = {"by": psutil.Process().username(), "reasons": run.reasons, "digest": run.digest}
    with transaction(folder) as register:
        register.execute("UPDATE runs SET approved = ? WHERE number = ?", values)
        append(folder, "approved", **_about(run), **about)


def renew_identity(folder: Path) -> str:
    """Draw a new key for a site, which keeps its register; returns the key's fingerprint.

    The key before stays as ``identity.key.old``. Letters of runs under way can no longer be opened.
    """
    key = new_private_key()
    with transaction(folder) as register:
        path = folder / IDENTITY
        fingerprint = fingerprint_of(public_key(key))
        # Signed by the key before.
        append(folder, "rekeyed", next=public_hex(signing_key(key)), fingerprint=fingerprint)
        write_atomically(path.with_name(f"{IDENTITY}.old"), path.read_bytes(), lasting=True)
        write_atomically(path, key, lasting=True)
        register.execute("UPDATE meta SET value = ? WHERE name = 'identity'", (fingerprint,))
    return fingerprint


def runs_of(folder: Path) -> list[AskedRun]:
    """All recorded runs of a site, in the order in which they first asked."""
    if _is_unused(folder):
        return []
    with transaction(folder) as register:
        return _runs(register)


def runs_on_same_data(folder: Path, run: AskedRun) -> list[AskedRun]:
    """All other runs on the data of a recorded run, at any site of this home."""
    with transaction(folder) as register:
        return [other.run for other in _earlier(folder, register, run)]


def runs_on_table(folder: Path, config: SiteConfig) -> list[AskedRun]:
    """All runs on the site's table, at any site of this home."""
    if _is_unused(folder):
        return []
    with transaction(folder) as register:
        rows = hash_rows(read_table(config), rows_key(folder, register))
        run = _with_rows(AskedRun("", "", config.data, 0.0, {}), rows)
        return [other.run for other in _earlier(folder, register, run, rows)]


def spent(runs: Iterable[AskedRun]) -> tuple[float, float]:
    """Composed epsilon of all private runs, and its delta.

    The accountant's epsilon holds for any one delta. The smallest delta of the runs weakens no
    promise, and a coordinator cannot reduce the sum by a larger delta.
    """
    budgets = [run.budget for run in runs if run.settings["epsilon"]]
    delta = min((budget.delta for budget in budgets), default=1.0)
    return (composed_epsilon(budgets, delta) if budgets else 0.0), delta


def spending(runs: Iterable[AskedRun], most: float) -> str:
    """Describe the epsilon of private runs: ``1.00 of 3 in 1 run, for delta 1e-05``."""
    private = [run for run in runs if run.settings["epsilon"]]
    epsilon, delta = spent(private)
    limit = f" of {most:g}" if most else ""
    number = len(private)
    words = f"{epsilon:.2f}{limit} in {number} run{'s' * (number != 1)}"
    return f"{words}, for delta {delta:g}" if private else words


def n_today(runs: Iterable[AskedRun], time: Time) -> int:
    """Number of runs that first asked in the last 24 hours."""
    return sum(time.is_within(run.asked, SECONDS_A_DAY) for run in runs)


def _noted(
    config: SiteConfig,
    register: sqlite3.Connection,
    asked: AskedRun,
    rows: RowHashes | None,
    time: Time,
) -> AskedRun:
    """Record a run; returns it as recorded."""
    for run in _runs(register, "WHERE NOT admitted"):
        if not time.is_within(run.asked, KEPT_SECONDS):
            register.execute("DELETE FROM runs WHERE number = ?", (run.number,))
    register.execute(f"DELETE FROM hashes WHERE digest NOT IN ({IN_USE})")
    earlier = _earlier(_folder_of(config), register, asked, rows)
    runs = (other.run for other in earlier)
    again = [
        run for run in runs if run.model == asked.model and time.is_within(run.asked, KEPT_SECONDS)
    ][-1:]
    # A run that has begun and sends its opening again has lost its state here: it counts again.
    if again and not again[0].begun:
        run = again[0]
        _check_same(config.name, run, asked)
        if run.admitted and (run.contents, run.ids) == (asked.contents, asked.ids):
            return run
        run = replace(run, **{name: getattr(asked, name) for name in OF_TABLE})
        earlier = [
            other for other in earlier if other.run.number != run.number or other.is_elsewhere
        ]
    else:
        run, most = asked, config.runs_per_day
        if n_today((other.run for other in earlier), time) >= most:
            rule = f"must be <= {most} on one table in the node config of {config.name}"
            raise ConfigError(f"runs-per-day {rule}, got one more{time.hint}")
    others = [other for other in earlier if other.run.admitted]
    waited = list(run.reasons)
    _check_total(config, earlier, run)
    reasons = [ASKS] * config.asks + _reasons(others, run, max(config.min_rows, MIN_BIN_ROWS))
    pins = trusted_keys(config, run.settings["parties"])
    run = replace(run, reasons=reasons, trusted=pins, total_epsilon=config.total_epsilon)
    if config.label and (method := method_of(run.method)) and method.hides_labels:
        run = replace(run, label_epsilon=config.label_epsilon)
    run = replace(run, admitted=not reasons or run.approved == run.digest)
    run = replace(run, n_shared=max((other.n_shared for other in others), default=0))
    _write(register, run, rows)
    if not run.admitted and reasons != waited:  # it asks every few seconds
        append(_folder_of(config), "waits", **_about(run), reasons=reasons)
    return run


def _write(register: sqlite3.Connection, run: AskedRun, rows: RowHashes | None) -> None:
    values = {column: getattr(run, column) for column in COLUMNS}
    values |= {column: json.dumps(values[column]) for column in TEXTS}
    names = ", ".join(COLUMNS)
    placeholders = ", ".join(f":{column}" for column in COLUMNS)
    register.execute(f"REPLACE INTO runs ({names}) VALUES ({placeholders})", values)
    for hashes in filter(len, (rows.contents, rows.ids) if rows else ()):
        # By parts, of which SQLite makes copies.
        columns = digest_of(hashes), hashes.nbytes
        added = register.execute("INSERT OR IGNORE INTO hashes VALUES (?, zeroblob(?))", columns)
        if added.rowcount:
            with register.blobopen("hashes", "words", added.lastrowid or 0) as blob:
                for some in batches(len(hashes), WORD_BYTES):
                    blob.write(hashes[some].astype("<u8", copy=False).data)


def _check_same(site: str, run: AskedRun, asked: AskedRun) -> None:
    was, now = ({"strategy": record.method, **record.settings} for record in (run, asked))
    for name in {**was, **now}:
        if was.get(name) != now.get(name):
            rule = f"must be {was.get(name)}, as when the run first asked {site}"
            setting = name.replace("_", "-")
            raise ConfigError(f"{setting} {rule}, got {now.get(name)}; begin a new run")


def _check_total(config: SiteConfig, earlier: Iterable[Earlier], run: AskedRun) -> None:
    """Check that a private run and those that were charged keep to ``total-epsilon``."""
    if not run.settings["epsilon"] or not config.total_epsilon:
        return
    charged = [other.run for other in earlier if other.run.charged]
    total, delta = spent([*charged, run])
    if total > config.total_epsilon:
        raise ConfigError(
            f"privacy.epsilon must come to <= {config.total_epsilon:g} in all runs on one table "
            f"(total-epsilon in the node config of {config.name}), got {total:.4g} with this run "
            f"for delta {delta:g}; spent before: {spending(charged, config.total_epsilon)}. Ask "
            f"for a smaller epsilon, or {config.name} for a larger total-epsilon"
        )


def _shown(values: Iterable[object]) -> list[str]:
    return [str(value) if value != "" else "empty" for value in values]


def _reasons(others: Sequence[Earlier], run: AskedRun, fewest: int) -> list[str]:
    """Why a run after these others on the same data needs approval.

    Tables of two runs must differ by `fewest` rows, unless they are the same.
    """
    reasons = []
    splits = [other.run.split for other in others if other.run.split]
    if splits and run.split and run.split not in splits:
        reasons += [
            f"{name.replace('_', '-')} must be {due}, as in the first run on the table, got {got}"
            for name, due, got in zip(SPLIT, *map(_shown, (splits[0], run.split)), strict=True)
            if due != got
        ]
    trained = [other for other in others if other.run.split] if run.split else []
    close = [other for other in trained if 0 < other.n_differing < fewest]
    # If an earlier run had this table, a person has approved the difference already.
    if close and all(other.run.contents != run.contents for other in trained):
        closest = min(close, key=lambda other: other.n_differing)
        are_gone = closest.run.n_rows - run.n_rows == closest.n_differing
        erased = " that are gone, as after an erasure" if are_gone else ""
        reasons.append(
            f"table must not differ from that of run {closest.run.model} by fewer than {fewest} "
            f"rows (min-rows, at least {MIN_BIN_ROWS}), got {closest.n_differing}{erased}: what "
            "both runs disclose differs by these rows"
        )
    masked = [other.run for other in others if other.run.roster]
    if masked and run.roster and all(other.roster != run.roster for other in masked):
        was, got = (", ".join(sorted(other.settings["parties"])) for other in (masked[0], run))
        reasons.append(f"parties must be {was}, as in an earlier masked run, got {got}")
    return reasons


# Rows


def _folder_of(config: SiteConfig) -> Path:
    return home() / "sites" / config.name


def _data_of(config: SiteConfig, request: Request) -> str:
    """The table that an opening is about: to train on, or to predict."""
    return (request.read("model") and config.predict_data) or config.data


def _rows_of(config: SiteConfig, model_id: str, request: Request) -> tuple[RowHashes | None, str]:
    """Hashes of the rows that an opening is about, and the version of their file.

    A run that waits asks every few seconds: its hashes are kept until the file changes.
    """
    if not isinstance(request, Plan):
        return None, ""
    folder = _folder_of(config)
    data = _data_of(config, request)
    what = repr((data, file_version(Path(data)), config.roles, config.reader))
    version = hashlib.sha256(what.encode()).hexdigest()
    with transaction(folder) as register:
        key = rows_key(folder, register)
        before = _runs(register, "WHERE model = ? AND NOT admitted", model_id)[-1:]
        if before and before[0].version == version and before[0].contents:
            return _recorded_rows(register, before[0]), version
    try:
        model = request.read("model")
        table = read_to_predict(config, model)[1] if model else read_table(config)
        rows = hash_rows(table, key)
    except FedappError:
        return None, version  # the handler reads the table again, and knows what to withhold
    if rows.n_rows > MOST_ROWS:
        rule = f"table must have at most {MOST_ROWS:,} rows, whose hashes the register can store"
        raise DataError(f"{rule}, got {rows.n_rows:,}", config.name)
    return rows, version


def _with_rows(run: AskedRun, rows: RowHashes | None, version: str = "") -> AskedRun:
    if rows is None:
        return run
    return replace(
        run,
        version=version,
        n_rows=rows.n_rows,
        contents=digest_of(rows.contents),
        ids=digest_of(rows.ids),
        columns=rows.columns,
    )


def _recorded_rows(register: sqlite3.Connection, run: AskedRun) -> RowHashes:
    """The hashes of a recorded run's rows; none if its table could not be read."""

    def words(digest: str) -> Hashes:
        query = register.execute("SELECT rowid FROM hashes WHERE digest = ?", (digest,)).fetchone()
        if not query:
            return np.empty(0, np.uint64)
        with register.blobopen("hashes", "words", query[0], readonly=True) as blob:
            n_words = len(blob) // WORD_BYTES
            parts = (some.stop - some.start for some in batches(n_words, WORD_BYTES))
            read = (np.frombuffer(blob.read(n * WORD_BYTES), dtype="<u8") for n in parts)
            return joined(read, n_words, np.empty(0, np.uint64))

    return RowHashes(words(run.contents), words(run.ids), run.columns)


def _earlier(
    folder: Path, register: sqlite3.Connection, run: AskedRun, rows: RowHashes | None = None
) -> list[Earlier]:
    """All other runs on the data of a run, those of its own site first; no model twice.

    `folder` is the site's. `rows` are those of the run; by default, as recorded.
    """
    rows = rows or _recorded_rows(register, run)
    others = [
        other for other in _runs(register) if run.number is None or other.number != run.number
    ]
    earlier = _on_same_data(register, others, run, rows, is_elsewhere=False)
    models = {run.model, *(other.model for other in others)}
    for path in sorted(folder.parent.glob(f"*/{DATABASE}")):
        if path.parent != folder and not _is_unused(path.parent):
            with connected(path.parent) as elsewhere:
                others = [other for other in _runs(elsewhere) if other.model not in models]
                earlier += _on_same_data(elsewhere, others, run, rows, is_elsewhere=True)
            models |= {other.model for other in others}
    return earlier


def _on_same_data(
    register: sqlite3.Connection,
    others: Iterable[AskedRun],
    run: AskedRun,
    rows: RowHashes | None,
    is_elsewhere: bool,
) -> list[Earlier]:
    """Those of the runs of one register that are on the data of a run."""
    compared = {("", ""): (0, 0)}
    earlier = []
    for other in others:
        table = other.contents, other.ids
        if table not in compared and rows is not None:
            theirs = _recorded_rows(register, other)
            compared[table] = compare(rows, theirs, with_ids=not is_elsewhere)
        n_shared, n_differing = compared.get(table, (0, 0))
        has_ids = run.ids and other.ids
        has_columns = run.columns == other.columns
        is_comparable = run.contents and other.contents and (has_ids or has_columns)
        is_file = not is_elsewhere and run.data == other.data
        if n_shared or (is_file and not is_comparable):
            earlier.append(Earlier(other, n_shared, n_differing, is_elsewhere))
    return earlier


# The database


def _newest(name: str, register: sqlite3.Connection, model_id: str) -> AskedRun:
    """The last row of a run; raises ConfigError if there is none."""
    runs = _runs(register, "WHERE model = ?", model_id)
    if not runs:
        raise ConfigError(f"run must be one that {name} has recorded, got {model_id}")
    return runs[-1]


def _runs(register: sqlite3.Connection, where: str = "", *values: str) -> list[AskedRun]:
    names = ", ".join(COLUMNS)
    query = register.execute(f"SELECT {names} FROM runs {where} ORDER BY number", values)
    rows = [dict(zip(COLUMNS, row, strict=True)) for row in query]
    return [AskedRun(**row | {name: json.loads(row[name]) for name in TEXTS}) for row in rows]


def _is_unused(folder: Path) -> bool:
    """Whether a site has no register yet, and need not have one."""
    has_key, has_register = (folder / IDENTITY).exists(), (folder / DATABASE).exists()
    return (folder / UNUSED).exists() or not (has_key or has_register)
