"""What a site remembers of the runs that have asked it, in one database.

``$FEDAPP_HOME/sites/NAME/register.db`` has a row for each run, from its opening on. A decision is
one transaction, and on the disk before the site answers. What no single run shows follows from the
rows of earlier ones on the same table:

- Runs that hold back other rows differ by the labels of those in which they differ. So the first
  run that trains fixes what is held back, and another split waits for a person.
- Sums with a party and without it, or with another in its place, differ by that party's. So a
  masked run between other parties than those of all earlier ones waits for a person.
- Promises of privacy add up: all together keep ``total-epsilon``.

A run that was admitted stays for ever; one that waits, ``KEEP_DAYS``. The ``runs.json`` of an older
version is not read: its runs do not count, and what waited in it asks again.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from fedapp.crypto.budget import Budget, composed
from fedapp.errors import ConfigError, DataError, FedappError, ProtocolError, WaitingError, blaming
from fedapp.home import home, sync_folder, write_new
from fedapp.messages.fields import Request
from fedapp.messages.methods import method_of
from fedapp.messages.plan import Plan
from fedapp.site.config import SiteConfig
from fedapp.site.plan import SPLIT
from fedapp.site.stores import KEEP_DAYS, SECONDS_A_DAY, locked
from fedapp.site.trust import trusted_keys

DATABASE = "register.db"
KEPT_SECONDS = KEEP_DAYS * SECONDS_A_DAY
BUSY_SECONDS = 60.0  # that another program may have the database to itself
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
    trusted: Mapping[str, str] = field(default_factory=dict)  # keys by party, at the site then
    total_epsilon: float = 0.0  # of the node config then
    approved: str = ""  # digest of what a person has approved
    admitted: bool = False  # whether its opening may be answered
    begun: bool = False  # whether it was, and the site has had a state of it
    number: int | None = None  # in the order in which runs first asked

    @property
    def digest(self) -> str:
        """SHA-256 of what a person approves: the method, its settings, and why it waits."""
        shown = json.dumps([self.method, self.settings, self.reasons])
        return hashlib.sha256(shown.encode()).hexdigest()

    @property
    def split(self) -> tuple[Any, ...]:
        """What decides on the rows held back; empty where the run does not train."""
        declared = method_of(self.method)
        return tuple(self.settings[name] for name in SPLIT) if declared and declared.trains else ()

    @property
    def roster(self) -> frozenset[str]:
        """Fingerprints of the parties whose sums are added up; empty where none are."""
        is_summed = self.settings["aggregation"] == "secure"
        return frozenset(self.settings["fingerprints"] if is_summed else ())

    @property
    def budget(self) -> Budget:
        """What a private run promises."""
        said = self.settings
        numbers = said["epsilon"], said["delta"], said["multiplier"], said["rounds"]
        return Budget(*numbers, max(len(said["parties"]), 2), said["levels"])


COLUMNS = tuple(each.name for each in fields(Run))
TEXTS = ("settings", "reasons", "trusted")  # as JSON
TABLE = f"CREATE TABLE IF NOT EXISTS runs ({', '.join(COLUMNS[:-1])}, number INTEGER PRIMARY KEY)"
DURABLY = "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL"


def admit(config: SiteConfig, model_id: str, method: str, request: Request) -> None:
    """Note a run whose opening has come, and check that it may begin.

    It is noted anew, so that it counts and waits again, where its state was deleted since, where
    it first asked too long ago, and where the site has another table by now.

    Raises
    ------
    ProtocolError : the message is no opening, or its noise does not keep what it promises.
    ConfigError : more runs have begun in a day than the site allows, the private ones would come to
        more than ``total-epsilon``, or the opening is another one than when it first came.
    WaitingError : the site's people have yet to approve it.
    """
    name, message = config.name, type(request).__name__
    if not isinstance(request, Plan):
        rule = "must be 1, which opens a run: the site has no state of this model, or has lost it"
        raise ProtocolError(name, message, "step", rule)
    said = {one: getattr(request, one) for one in type(request).forms}
    settings = {key: list(one) if isinstance(one, tuple) else one for key, one in said.items()}
    run = Run(model_id, method, config.data, time.time(), settings)
    if request.epsilon:
        with blaming(name, message, "multiplier"):
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
    """Admit a run while its opening is answered; one that the site refuses then, fixes nothing."""
    admit(config, model_id, method, request)
    try:
        yield
    except FedappError:
        _mark(config.name, model_id, "admitted = begun")
        raise


def note_begun(name: str, model_id: str) -> None:
    """Note that a site has a state of a run, unless its opening came twice and was refused."""
    if not _mark(name, model_id, "begun = admitted"):
        raise ConfigError(f"run must be admitted by {name}, got an opening that it has refused")


def _mark(name: str, model_id: str, change: str) -> bool:
    """Change the last row of a run; whether it is that of an admitted one then."""
    with _transaction(home() / "sites" / name) as register:
        newest = "number = (SELECT max(number) FROM runs WHERE model = ?)"
        register.execute(f"UPDATE runs SET {change} WHERE {newest}", (model_id,))
        found = register.execute(f"SELECT admitted FROM runs WHERE {newest}", (model_id,))
        return bool(found.fetchone()[0])


def approve(folder: Path, run: Run) -> None:
    """Let a run that waits begin as it is here: with these settings, and for these reasons."""
    values = run.digest, run.number
    with _transaction(folder) as register:
        register.execute("UPDATE runs SET approved = ? WHERE number = ?", values)


def runs_of(folder: Path) -> list[Run]:
    """All runs that a site remembers, in the order in which they first asked."""
    if not (folder / DATABASE).exists():
        return []
    with _transaction(folder) as register:
        return _runs(register)


def spent(runs: Iterable[Run]) -> tuple[float, float]:
    """The epsilon of all private runs among these together, and the delta that it is for.

    The accountant's epsilon of all runs holds for any single delta. With the least of theirs no
    promise becomes a weaker one, and a coordinator gets no smaller sum by a larger delta.
    """
    budgets = [run.budget for run in runs if run.settings["epsilon"]]
    delta = min((budget.delta for budget in budgets), default=1.0)
    return (composed(budgets, delta) if budgets else 0.0), delta


def spending(runs: Iterable[Run], most: float) -> str:
    """What private runs come to, in words: ``1.00 of 3 in 1 run, for delta 1e-05``."""
    private = [run for run in runs if run.settings["epsilon"]]
    epsilon, delta = spent(private)
    limit, number = f" of {most:g}" if most else "", len(private)
    words = f"{epsilon:.2f}{limit} in {number} run{'s' * (number != 1)}"
    return f"{words}, for delta {delta:g}" if private else words


def n_today(runs: Iterable[Run]) -> int:
    """Runs that first asked in the last 24 hours."""
    return sum(time.time() - run.asked < SECONDS_A_DAY for run in runs)


def _noted(config: SiteConfig, register: sqlite3.Connection, asked: Run) -> Run:
    """The run as the register has it from now on."""
    oldest = asked.asked - KEPT_SECONDS
    register.execute("DELETE FROM runs WHERE NOT admitted AND asked <= ?", (oldest,))
    earlier = [run for run in _runs(register) if run.data == config.data]
    again = [run for run in earlier if run.model == asked.model and run.asked > oldest][-1:]
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
    """Check that a run is what the site's people were shown."""
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
    """Why a person decides on a run after these others on the same table."""
    found, splits = [], [one.split for one in others if one.split]
    if splits and run.split and run.split not in splits:
        found += [
            f"{name.replace('_', '-')} must be {first}, as in the first run on the table, got {got}"
            for name, first, got in zip(SPLIT, splits[0], run.split, strict=True)
            if first != got
        ]
    summed = [one for one in others if one.roster]
    if summed and run.roster and all(one.roster != run.roster for one in summed):
        was, got = (", ".join(sorted(each.settings["parties"])) for each in (summed[0], run))
        found.append(f"parties must be {was}, as in an earlier masked run, got {got}")
    return found


def _runs(register: sqlite3.Connection) -> list[Run]:
    rows = register.execute(f"SELECT {', '.join(COLUMNS)} FROM runs ORDER BY number")
    found = [dict(zip(COLUMNS, row, strict=True)) for row in rows]
    return [Run(**one | {column: json.loads(one[column]) for column in TEXTS}) for one in found]


@contextmanager
def _transaction(folder: Path) -> Iterator[sqlite3.Connection]:
    """All that is done with a register: on the disk afterwards, and nothing of it if it fails."""
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
