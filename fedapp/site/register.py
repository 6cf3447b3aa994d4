"""The register of runs that have asked a site to take part.

``$FEDAPP_HOME/sites/NAME/register.db`` has a row per run, from its opening on. A decision is one
transaction, on disk before the site answers. Some disclosures show only across runs on the same
table:

- Runs that hold back different rows differ by the labels of those rows. So the first run that
  trains fixes the split, and a run with another one waits for approval.
- Sums with and without a party, or with another in its place, differ by that party's sum. So a
  masked run with other parties than all earlier ones waits for approval.
- The epsilons of private runs add up; their composition must not exceed ``total-epsilon``.

An admitted run is kept for ever; a waiting one, ``KEEP_DAYS``. The ``runs.json`` of an older
version is not read: its runs do not count, and those that waited ask again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from fedapp.crypto.noise import Budget, composed_epsilon
from fedapp.errors import (
    ConfigError,
    DataError,
    FedappError,
    ProtocolError,
    WaitingError,
    as_protocol_error,
)
from fedapp.home import home, sync_folder, write_new
from fedapp.messages.fields import Request, method_of
from fedapp.messages.handshake import Plan
from fedapp.site.settings import SiteConfig
from fedapp.site.store import KEEP_DAYS, SECONDS_A_DAY, locked
from fedapp.site.trust import trusted_keys

# Fields of an opening that are settings of the run, besides those of ``Plan``.
SPLIT = ("test_fraction", "valid_fraction", "seed", "fold", "folds")
DATABASE = "register.db"
KEPT_SECONDS = KEEP_DAYS * SECONDS_A_DAY
BUSY_SECONDS = 60.0  # to wait while another program locks the database
ASKS = "approve is ask in the node config"


@dataclass(frozen=True, slots=True)
class Run:
    """A run as its opening describes it: a row of the database."""

    model: str  # its id
    method: str
    data: str  # the site's table
    asked: float  # first, in seconds of Unix time
    settings: Mapping[str, Any]  # all that the opening says
    reasons: Sequence[str] = ()  # why it waited when it last asked
    trusted: Mapping[str, str] = dataclasses.field(
        default_factory=dict
    )  # keys by party, at the site then
    total_epsilon: float = 0.0  # of the node config then
    approved: str = ""  # digest of what a person has approved
    admitted: bool = False  # whether its opening may be answered
    begun: bool = False  # whether it was, and the site has had a state of it
    number: int | None = None  # in the order in which runs first asked

    @property
    def digest(self) -> str:
        """SHA-256 of what is approved: the method, its settings, and why the run waits."""
        shown = json.dumps([self.method, self.settings, self.reasons])
        return hashlib.sha256(shown.encode()).hexdigest()

    @property
    def split(self) -> tuple[Any, ...]:
        """Settings that determine the rows held back; empty if the run does not train."""
        declared = method_of(self.method)
        return tuple(self.settings[name] for name in SPLIT) if declared and declared.trains else ()

    @property
    def roster(self) -> frozenset[str]:
        """Fingerprints of the parties of masked sums; empty without masks."""
        is_summed = self.settings["aggregation"] == "secure"
        return frozenset(self.settings["fingerprints"] if is_summed else ())

    @property
    def budget(self) -> Budget:
        """Privacy budget of a private run."""
        settings = self.settings
        numbers = settings["epsilon"], settings["delta"], settings["multiplier"], settings["rounds"]
        return Budget(*numbers, max(len(settings["parties"]), 2))


COLUMNS = tuple(each.name for each in fields(Run))
TEXTS = ("settings", "reasons", "trusted")  # as JSON
TABLE = f"CREATE TABLE IF NOT EXISTS runs ({', '.join(COLUMNS[:-1])}, number INTEGER PRIMARY KEY)"
DURABLY = "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL"


def admit(config: SiteConfig, model_id: str, method: str, request: Request) -> None:
    """Record a run that has sent its opening, and check that it may begin.

    It is recorded again, and so counts and waits again, if its state was deleted since, if it first
    asked too long ago, or if the site has another table now. Raises ConfigError if runs-per-day or
    total-epsilon would be exceeded or the opening has changed, and WaitingError if nobody at the
    site has approved it yet.
    """
    name, message = config.name, type(request).__name__
    if not isinstance(request, Plan):
        rule = "must be 1, which opens a run: the site has no state of this model, or has lost it"
        raise ProtocolError(name, message, "step", rule)
    values = {one: getattr(request, one) for one in type(request).forms}
    settings = {key: list(one) if isinstance(one, tuple) else one for key, one in values.items()}
    run = Run(model_id, method, config.data, time.time(), settings)
    if request.epsilon:
        with as_protocol_error(name, message, "multiplier"):
            run.budget.check()
    with _transaction(home() / "sites" / name) as register:
        run = _noted(config, register, run)
    if not run.admitted:
        reasons = "; ".join(one for one in run.reasons if one != ASKS)
        way = f"fedapp site approve {model_id}; the run asks again until start-deadline"
        where = f"{name} ({reasons})" if reasons else name
        raise WaitingError(f"waits for approval at {where}: {way}")


@contextmanager
def opening(config: SiteConfig, model_id: str, method: str, request: Request) -> Iterator[None]:
    """Admit a run while its opening is answered; not if the site then refuses it."""
    admit(config, model_id, method, request)
    try:
        yield
    except FedappError:
        _mark(config.name, model_id, "admitted = begun")
        raise


def record_opened(name: str, model_id: str) -> None:
    """Record that a site has a state of a run; raises ConfigError if its opening was refused."""
    if not _mark(name, model_id, "begun = admitted"):
        raise ConfigError(f"run must be admitted by {name}, got an opening that it has refused")


def _mark(name: str, model_id: str, change: str) -> bool:
    """Update the last row of a run; returns whether it is admitted then."""
    with _transaction(home() / "sites" / name) as register:
        newest = "number = (SELECT max(number) FROM runs WHERE model = ?)"
        register.execute(f"UPDATE runs SET {change} WHERE {newest}", (model_id,))
        row = register.execute(f"SELECT admitted FROM runs WHERE {newest}", (model_id,))
        return bool(row.fetchone()[0])


def approve(folder: Path, run: Run) -> None:
    """Let a waiting run begin with the settings and for the reasons in `run`."""
    values = run.digest, run.number
    with _transaction(folder) as register:
        register.execute("UPDATE runs SET approved = ? WHERE number = ?", values)


def runs_of(folder: Path) -> list[Run]:
    """All recorded runs of a site, in the order in which they first asked."""
    if not (folder / DATABASE).exists():
        return []
    with _transaction(folder) as register:
        return _runs(register)


def spent(runs: Iterable[Run]) -> tuple[float, float]:
    """Composed epsilon of all private runs, and its delta.

    The accountant's epsilon holds for any one delta. The smallest delta of the runs weakens no
    promise, and a coordinator cannot reduce the sum by a larger delta.
    """
    budgets = [run.budget for run in runs if run.settings["epsilon"]]
    delta = min((budget.delta for budget in budgets), default=1.0)
    return (composed_epsilon(budgets, delta) if budgets else 0.0), delta


def spending(runs: Iterable[Run], most: float) -> str:
    """Describe the epsilon of private runs: ``1.00 of 3 in 1 run, for delta 1e-05``."""
    private = [run for run in runs if run.settings["epsilon"]]
    epsilon, delta = spent(private)
    limit, number = f" of {most:g}" if most else "", len(private)
    words = f"{epsilon:.2f}{limit} in {number} run{'s' * (number != 1)}"
    return f"{words}, for delta {delta:g}" if private else words


def n_today(runs: Iterable[Run]) -> int:
    """Number of runs that first asked in the last 24 hours."""
    return sum(time.time() - run.asked < SECONDS_A_DAY for run in runs)


def _noted(config: SiteConfig, register: sqlite3.Connection, asked: Run) -> Run:
    """Record a run; returns it as recorded."""
    oldest = asked.asked - KEPT_SECONDS
    register.execute("DELETE FROM runs WHERE NOT admitted AND asked <= ?", (oldest,))
    earlier = [run for run in _runs(register) if run.data == config.data]
    again = [run for run in earlier if run.model == asked.model and run.asked > oldest][-1:]
    # A run that has begun and sends its opening again has lost its state here: it counts again.
    if again and not again[0].begun:
        run = again[0]
        _check_same(config.name, run, asked)
        if run.admitted:
            return run
    else:
        run, most = asked, config.limits["runs-per-day"]
        if n_today(earlier) >= most:
            rule = f"must be <= {most} on one table in the node config of {config.name}"
            raise ConfigError(f"runs-per-day {rule}, got one more")
    others = [run for run in earlier if run.admitted]
    if run.settings["epsilon"] and config.total_epsilon:
        _check_total(config, others, run)
    reasons = [ASKS] * config.asks + _reasons(others, run)
    pins = trusted_keys(config, run.settings["parties"])
    run = replace(run, reasons=reasons, trusted=pins, total_epsilon=config.total_epsilon)
    run = replace(run, admitted=not reasons or run.approved == run.digest)
    values = {column: getattr(run, column) for column in COLUMNS}
    values |= {column: json.dumps(values[column]) for column in TEXTS}
    names, places = ", ".join(COLUMNS), ", ".join(f":{column}" for column in COLUMNS)
    register.execute(f"REPLACE INTO runs ({names}) VALUES ({places})", values)
    return run


def _check_same(site: str, run: Run, asked: Run) -> None:
    """Check that a run is the one that was shown for approval."""
    was, now = ({"strategy": one.method, **one.settings} for one in (run, asked))
    for name in {**was, **now}:
        if was.get(name) != now.get(name):
            rule = f"must be {was.get(name)}, as when the run first asked {site}"
            setting = name.replace("_", "-")
            raise ConfigError(f"{setting} {rule}, got {now.get(name)}; begin a new run")


def _check_total(config: SiteConfig, others: Sequence[Run], run: Run) -> None:
    total, delta = spent([*others, run])
    if total > config.total_epsilon:
        raise ConfigError(
            f"privacy.epsilon must come to <= {config.total_epsilon:g} in all runs on one table "
            f"(total-epsilon in the node config of {config.name}), got {total:.4g} with this run "
            f"for delta {delta:g}; spent before: {spending(others, config.total_epsilon)}. Ask for "
            f"a smaller epsilon, or {config.name} for a larger total-epsilon"
        )


def _reasons(others: Sequence[Run], run: Run) -> list[str]:
    """Why a run after these others on the same table needs approval."""
    reasons, splits = [], [one.split for one in others if one.split]
    if splits and run.split and run.split not in splits:
        reasons += [
            f"{name.replace('_', '-')} must be {first}, as in the first run on the table, got {got}"
            for name, first, got in zip(SPLIT, splits[0], run.split, strict=True)
            if first != got
        ]
    masked = [one for one in others if one.roster]
    if masked and run.roster and all(one.roster != run.roster for one in masked):
        was, got = (", ".join(sorted(each.settings["parties"])) for each in (masked[0], run))
        reasons.append(f"parties must be {was}, as in an earlier masked run, got {got}")
    return reasons


def _runs(register: sqlite3.Connection) -> list[Run]:
    rows = register.execute(f"SELECT {', '.join(COLUMNS)} FROM runs ORDER BY number")
    records = [dict(zip(COLUMNS, row, strict=True)) for row in rows]
    return [Run(**one | {column: json.loads(one[column]) for column in TEXTS}) for one in records]


@contextmanager
def _transaction(folder: Path) -> Iterator[sqlite3.Connection]:
    """Open the register; changes are on disk afterwards, or undone if the block fails."""
    path = folder / DATABASE
    try:
        with locked(folder):
            if not path.exists():
                write_new(path, b"")  # files that SQLite puts beside it get its mode
                sync_folder(folder)
            with closing(sqlite3.connect(path, BUSY_SECONDS, isolation_level=None)) as register:
                register.executescript(f"{DURABLY}; {TABLE}")
                register.execute("BEGIN IMMEDIATE")
                yield register
                register.execute("COMMIT")
    except (sqlite3.Error, json.JSONDecodeError) as error:
        rule = f"{DATABASE} must be a database that the site can write, got: {error}"
        raise DataError(rule, folder.name) from error
