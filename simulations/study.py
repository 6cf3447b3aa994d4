"""The one harness of all studies: how they measure, keep, print, draw and attack.

Benches compare a result with its reference first, then time it: warm-up, median of at least five,
and one JSON line (``print_line``). Papers keep every finished run and write ``tables.json``.
Attacks listen to runs of honest parties (``trained``). ``computed`` digests what every method
computes, so that two commits can be compared. A ``Deployment`` has real processes on the loopback,
started by the scripts that fedapp writes.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import inspect
import itertools
import json
import math
import multiprocessing
import os
import resource
import secrets
import shlex
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import psutil
import pyarrow as pa
import pyarrow.parquet
from rich.console import Console
from rich.table import Table as Grid

from fedapp import client_app, metrics
from fedapp.crypto.sealed import fingerprint_of, public_key
from fedapp.data.table import Table
from fedapp.deploy.folders import write_federation, write_site
from fedapp.deploy.targets import Federation
from fedapp.errors import ConfigError
from fedapp.home import home
from fedapp.messages.fields import Request, all_methods
from fedapp.messages.wire import Content, Envelope, from_content, parcels_of
from fedapp.process import versions
from fedapp.report.progress import Follower
from fedapp.run_folder import RunFolder
from fedapp.runs.baselines import same_nodes, temporary_run
from fedapp.runs.clean import forget_model
from fedapp.runs.cluster import carried_out, check_on
from fedapp.runs.flower import free_ports
from fedapp.runs.local import run_local, site_contexts
from fedapp.settings import Settings, app_folder, defaults, load_settings
from fedapp.site.answer import Site, answered, find_handler
from fedapp.site.mail import Mail, open_mail
from fedapp.site.settings import SiteConfig, parse_node_config, site_config
from fedapp.site.store import PART_FILE, Stores
from fedapp.site.trust import identity, pin
from fedapp.trees.categories import Categories
from fedapp.trees.forest import levels
from fedapp.trees.forest.cart import Rules, bin_columns, code_columns
from fedapp.trees.forest.model import BaggedForest, grow, leaf_values
from fedapp.trees.objective import REGRESSION, n_outputs
from fedapp.trees.predict import Nodes
from fedapp.trees.sets import category_counts
from strategies.run import load_strategy

if TYPE_CHECKING:  # it loads matplotlib, which a bench of memory must not
    from fedapp.runs.compare import Engine, Series

STATUS = "/proc/{process}/status"
PACKAGES = ("fedapp", "flwr", "numpy", "numba", "xgboost", "scikit-learn", "torch", "gmpy2", "phe")
SEED = 42
# Settings that all measured runs share.
BINARY = {"objective": "binary:logistic", "valid-fraction": 0.0, "seed": SEED}
T = TypeVar("T")
Row = dict[str, Any]
console = Console() if sys.stdout.isatty() else Console(width=160)
OBJECTIVES = dict(zip(("binary", "multiclass", "regression"), metrics.OBJECTIVES[:3], strict=True))
# Figures count as different above these: of shares, percents, and ratios of errors.
SHARE, PERCENT, TIMES = 0.01, 1.0, 1.1
# Timeouts, long enough for a busy machine.
START_SECONDS, RUN_SECONDS, STOP_SECONDS = 300, 900, 60
# Shared by the sites and the local engine, which else would draw other rows.
DRAWS = {"draws-secret": secrets.token_hex(16)}
# Processes of a coordinator and of a site, by the module that Python runs.
SUPERLINK = "fedapp.deploy.superlink"
SUPERNODE, SUPEREXEC = "fedapp.deploy.supernode", "fedapp.deploy.superexec"
WORKER = "fedapp.deploy.warm.executor"


def peak_bytes(process: int | str = "self") -> int:
    """Peak memory of this process, in bytes, including shared libraries; on Linux also of another.

    On Linux, ``getrusage`` would report the peak inherited from the parent process.
    """
    status = Path(STATUS.format(process=process))
    if status.exists() or process != "self":
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(lines["VmHWM"].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def cpu_seconds() -> float:
    """CPU seconds of all threads and of the child processes that have ended."""
    return time.process_time() + children_seconds()


def children_seconds() -> float:
    """CPU seconds of the child processes that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return children.ru_utime + children.ru_stime


def apart(function: Callable[..., T], *arguments: Any) -> T:
    """Call a function in a new process, so that its peak memory is its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


@contextmanager
def looking(look: Callable[[], None], seconds: float) -> Iterator[None]:
    """Call ``look`` every ``seconds`` while the block runs, and once at its end."""
    ended = threading.Event()

    def run() -> None:
        has_ended = False
        while not has_ended:
            has_ended = ended.wait(seconds)
            look()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def growth(before: Row, row: Row, size: str, figures: Iterable[str]) -> Row:
    """Exponents with which figures grow from one row to the next: 1 if they double with the size.

    A figure that one of the rows lacks is omitted.
    """
    numbers = [
        name
        for name in figures
        if all(isinstance(each.get(name), int | float) for each in (before, row))
    ]
    return {
        f"growth of {name}": math.log(row[name] / before[name]) / math.log(row[size] / before[size])
        for name in numbers
    }


def command(function: Callable[..., Any], words: Sequence[str] | None = None) -> Any:
    """Call a study's function with the options of a command line, which its signature declares.

    A default gives an option its type: False is a switch, a tuple takes several values, a whole
    number must be >= 1 (or >= 0 if the default is 0). ``*names`` are words without an option.
    """
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=inspect.getdoc(function), formatter_class=raw)
    several = ""
    for name, parameter in inspect.signature(function).parameters.items():
        flag, default = f"--{name.replace('_', '-')}", parameter.default
        if parameter.kind is parameter.VAR_POSITIONAL:
            several = name
            parser.add_argument(name, nargs="*")
        elif isinstance(default, bool):
            parser.add_argument(flag, action="store_true")
        else:
            values = default if isinstance(default, tuple) else (default,)
            one, nargs = next(iter(values), ""), "+" if values is default else None
            kind = partial(whole, int(one != 0)) if isinstance(one, int) else type(one)
            shown = f"by default {shlex.join(map(str, values))}" if default else None
            parser.add_argument(flag, type=kind, nargs=nargs, default=default, help=shown)
    parsed = vars(parser.parse_args(words)).items()
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in parsed}
    return function(*options.pop(several, ()), **options)


def whole(least: int, text: str) -> int:
    """Parse a whole number."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"must be a whole number >= {least}, got {text}")
    return int(text)


def check_names(what: str, names: Iterable[str], allowed: Iterable[str]) -> None:
    """Raise ConfigError if a name is not among those allowed."""
    for name in names:
        if name not in (choices := list(allowed)):
            raise ConfigError(f"{what} must be of {', '.join(choices)}, got {name!r}")


def repeated(functions: Sequence[Callable[[], T]], repeats: int = 5) -> list[list[T]]:
    """Results of each function over ``repeats``, in which all take turns, after a warm-up."""
    turns = [[function() for function in functions] for _ in range(repeats + 1)]
    return [list(results) for results in zip(*turns[1:], strict=True)]


def show(title: str, rows: Iterable[Row], columns: str, n_texts: int = 1) -> None:
    """Print a table; the first ``n_texts`` columns are texts, the others numbers.

    ``columns`` is like ``data; PAX=auc:.4f; MB=mb:.1f``: a heading, the field if it has another
    name, and its format. A row without the field has an empty cell; ``mb`` are its ``bytes`` in MB.
    """
    console.print(title, style="italic", soft_wrap=True)
    grid = Grid(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    fields = []
    for place, text in enumerate(columns.split("; ")):
        heading, is_named, field_text = text.partition("=")
        name, _, form = (field_text if is_named else heading).partition(":")
        fields.append((name, form))
        heading = heading if is_named else name
        grid.add_column(heading, justify="left" if place < n_texts else "right", no_wrap=True)
    for row in rows:
        values = {**row, "mb": row["bytes"] / 1e6} if row.get("bytes") is not None else row
        cells = ((values.get(name), form) for name, form in fields)
        grid.add_row(*("" if value is None else format(value, form) for value, form in cells))
    console.print(grid)


def print_line(bench: str, **figures: Any) -> None:
    """Print a bench's JSON line, with when, where and of which code and packages it is."""
    line = {"bench": bench, **figures, **provenance(), "versions": versions(PACKAGES)}
    print(json.dumps(line), flush=True)


def provenance() -> Row:
    """Date, commit and machine of a result, to be kept with it.

    A load above the number of cores: other programs used them as well.
    """
    today, load = datetime.now(UTC).date().isoformat(), round(os.getloadavg()[0], 2)
    return {"date": today, "commit": commit(), "cores": os.cpu_count(), "load": load}


@functools.cache
def commit() -> str:
    """The commit of the code that this process began with."""
    git = ["git", "-C", str(app_folder()), "describe", "--always", "--dirty", "--exclude=*"]
    with suppress(OSError):  # no git
        done = subprocess.run(git, capture_output=True, text=True, check=False)
        return done.stdout.strip() or "unknown"
    return "unknown"


# Papers: rows of results, and tables that are printed and written


def mean_of(rows: Sequence[Row], name: str) -> float:
    """Mean of a field, usually over the seeds."""
    return float(np.mean([row[name] for row in rows]))


def averaged(rows: Iterable[Row], *names: str) -> list[Row]:
    """A row for each combination of some fields: the first one, with the means of its numbers."""
    means = []
    for group in grouped(rows, *names).values():
        floats = [name for name, value in group[0].items() if isinstance(value, float | int)]
        others = [name for name in floats if name not in names]
        means.append({**group[0], **{name: mean_of(group, name) for name in others}})
    return means


def costs(summary: Mapping[str, Any]) -> Row:
    """Seconds of training, bytes both ways, and exchanges."""
    return {
        "seconds": summary["seconds"]["train"],
        "bytes": sum(summary["bytes"].values()),
        "exchanges": summary["exchanges"],
    }


def grouped(rows: Iterable[Row], *names: str) -> dict[tuple[Any, ...], list[Row]]:
    """Group rows by the values of some fields, in order of appearance."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return groups


def write_tables(
    output: Path, name: str, start: float, tables: Mapping[str, Any], runs: Path | None = None
) -> None:
    """Print the notes; write ``tables.json`` with the command, ``provenance`` and versions.

    Also prints where it is, and which cached results are of other code. ``name`` is of the study,
    ``start`` a value of ``time.monotonic``; ``runs`` is the folder of the runs, if it is another.
    """
    from fedapp.runs.compare import other_code

    command = " ".join([f"python -m simulations papers {name}", *sys.argv[1:]])
    document = {**tables, "command": command, **provenance(), "versions": versions(PACKAGES)}
    console.print(tables["notes"], soft_wrap=True)
    RunFolder(output).write_json("tables.json", document)
    spent = f"{time.monotonic() - start:.0f} seconds"
    console.print(f"{spent}; written to {output / 'tables.json'}", soft_wrap=True)
    if warning := other_code(runs or output):
        console.print(warning, soft_wrap=True)


def series(folder: Path, what: str = "") -> Series:
    """Runs and results in a folder; printed lines about them begin with ``what``."""
    from fedapp.runs.compare import Series

    return Series(folder, partial(_say, what))


def _say(what: str, text: str) -> None:  # by name, so that a Series can be sent to another process
    console.print(f"{what}: {text}" if what else text)


def all_made(parts: Sequence[Callable[[], Sequence[Row]]], on: str, folder: Path) -> list[Row]:
    """The rows of a study's parts, in order.

    Where ``on`` is ray, the parts are made as Ray tasks before; each keeps its results in the
    ``folder``, and finds them there.
    """
    check_on(on, "local")
    if on:
        tasks = {f"part {n} of {len(parts)}": part for n, part in enumerate(parts, 1)}
        with Follower(console).alive() as follower:
            for _ in carried_out(tasks, folder, [], follower):
                pass
    return [row for part in parts for row in part()]


def run_and_tidy(settings: Settings) -> RunFolder:
    """Train in this process; delete the sites' parts of the model."""
    folder = run_local(settings)
    forget_model(folder.summary["model_id"])
    return folder


def run_and_keep(engine: Engine, settings: Settings) -> RunFolder:
    """Predict; move the predictions to the run's folder and delete the sites' files."""
    summary = (folder := engine(settings)).summary
    site = home() / "sites" / summary["active"] / summary["model_id"]
    shutil.copy(site / "predictions.parquet", folder.path)
    forget_model(summary["model_id"])
    return folder


def spent(ledger: Sequence[Row]) -> Row:
    """Seconds, bytes and exchanges of the inference; seconds of each idle exchange."""
    messages = [line for line in ledger if line["type"].startswith("evaluate.")]
    idle = grouped((line for line in ledger if ".alignment_" in line["type"]), "step").values()
    costs = {"seconds": messages[-1]["seconds"] - messages[0]["seconds"]}
    costs |= {"bytes": sum(line["bytes"] for line in messages)}
    costs |= {"exchanges": len({line["step"] for line in messages})}
    return {**costs, "idle": [lines[-1]["seconds"] - lines[0]["seconds"] for lines in idle]}


def write_rows(
    path: Path,
    table: Table,
    rows: npt.NDArray[Any],
    labelled: bool = True,
    ids: Sequence[str] = (),
) -> str:
    """Write some rows of a table as Parquet, with the label y, and ids of the rows as id.

    Returns the setting ``data``.
    """
    columns = zip(table.columns, table.values[rows].T, strict=True)
    arrays: Row = {"id": ids} if ids else {}
    arrays |= {name: np.ascontiguousarray(column) for name, column in columns}
    if labelled:
        assert table.labels is not None
        arrays["y"] = table.labels[rows]
    pa.parquet.write_table(pa.table(arrays), path)
    return str(path.resolve())


@dataclass(frozen=True, slots=True)
class Compared:
    """A figure of a paper beside ours."""

    what: str  # set, setting and score
    paper: float | None
    ours: float  # mean over the seeds
    pooled: float | None
    far: float = SHARE  # difference from which figures differ; of errors, the ratio
    is_error: bool = False  # whether less is better

    @property
    def differs(self) -> bool:
        if self.paper is None:
            return False
        if self.is_error:
            return max(self.ours / self.paper, self.paper / self.ours) > self.far
        return abs(self.ours - self.paper) > self.far

    @property
    def cells(self) -> list[str]:
        texts = ["" if value is None else f"{value:.4g}" for value in (self.paper, self.ours)]
        texts.append("" if self.pooled is None else f"{self.pooled:.4g}")
        if self.paper is None:
            return [self.what, *texts, ""]
        comparison = self.ours / self.paper if self.is_error else self.ours - self.paper
        return [self.what, *texts, f"x {comparison:.2f}" if self.is_error else f"{comparison:+.4f}"]


# Models that are compared with a run's


def pooled_forest(
    settings: Settings,
    columns: Sequence[str],
    values: npt.NDArray[np.float32],
    labels: npt.NDArray[np.float32],
    weights: npt.NDArray[np.float32],
    categories: Categories = (),
) -> tuple[BaggedForest, levels.Rows, Nodes]:
    """Grow the forest of a run, with the same random draws, from all columns in one place.

    ``values``, ``labels`` and ``weights`` are of the training rows, in the run's order. Returns the
    forest, the rows it grew from, and the leaf of each row in each tree.
    """
    section: Any = load_strategy(settings.strategy).section_settings(settings)
    is_numbers = settings.objective == REGRESSION
    n_rows, n_columns = values.shape
    codes, unit = levels.number_codes(labels) if is_numbers else (levels.class_codes(labels), 1.0)
    widths = category_counts(categories, n_columns)
    bins = bin_columns(values, settings.max_bin, widths)
    counts = levels.row_counts(section.bootstrap, settings.seed, section.trees, n_rows)
    exact_weights = weights.astype(np.float64)
    rows = levels.Rows(code_columns(values, bins), bins, codes, exact_weights, counts)
    n_classes = 0 if is_numbers else int(labels.max()) + 1
    rules = Rules(
        section.criterion_for(settings.objective),
        n_classes,
        section.min_samples_split,
        section.min_samples_leaf,
        section.min_impurity_decrease / unit**2,
    )
    seeds = levels.column_seeds(settings.seed, n_columns)
    n_drawn = levels.n_features(section.max_features, n_columns)
    trees, sets, nodes = grow(rows, values, seeds, n_drawn, section.max_depth, rules)
    sizes, width = np.array([len(tree) for tree in trees]), n_outputs(settings.objective, n_classes)
    leaves = leaf_values(nodes, counts, exact_weights, labels, sizes, n_classes, width)
    classes = tuple(map(str, range(n_classes)))
    model = BaggedForest(
        settings.objective, tuple(columns), classes, trees, leaves, sets, categories
    )
    return model, rows, nodes


def count_same_nodes(ours: Row, theirs: Row) -> int:
    """Number of nodes of two equal models; ValueError if they differ."""
    n_same, n_nodes = same_nodes(ours, theirs)
    if n_same < n_nodes:
        raise ValueError(f"nodes must be the same, got {n_same} of {n_nodes} equal")
    return n_nodes


# Attacks

Overrides = Mapping[str, Any]
ATTACK_OUTPUT = Path("runs/attacks")
PLAIN = "default"  # the setting that changes nothing


@dataclass(frozen=True, slots=True)
class Outcome:
    """How far an attack got on one run."""

    success: float  # in the attack's measure
    chance: float  # the same without the messages
    score: float  # test AUC of the model
    unfinished: float = 0.0  # share of the targets whose search ended without an answer


@dataclass(frozen=True, slots=True)
class Attack:
    """An attack, with the runs that it is tried on."""

    name: str  # of the command
    holder: str  # who attacks, and from what
    measure: str  # what ``success`` counts
    data: Mapping[str, Overrides]  # settings of each data set
    ways: Mapping[str, Overrides]  # settings that might stop the attack
    run: Callable[[Overrides], Outcome]
    quick: Overrides = field(default_factory=dict)  # further settings of ``--quick``


def attack_results(
    attack: Attack,
    seeds: int,
    quick: bool = False,
    data: Sequence[str] = (),
    output: Path = ATTACK_OUTPUT,
    report: Callable[[str], None] = print,
) -> Iterator[Row]:
    """Run an attack on each data set with each setting; ``quick``: the first set and two settings.

    Yields the means over the seeds of each ``Outcome`` and of the seconds of a run and its attack.

    Parameters
    ----------
    seeds : runs of each; every seed holds out other rows.
    data : names of the sets; empty: all.
    output : folder of the results, a file for each run.
    report : called with a line about each file that cannot be reused or is of other code.
    """
    sets = list(data or attack.data)[: 1 if quick else None]
    ways = list(attack.ways)[: 2 if quick else None]
    for name in sets:
        for way in ways:
            overrides = {**attack.data[name], **attack.ways[way]}
            overrides |= attack.quick if quick else {}
            line = f"{name}, {way}, quick" if quick else f"{name}, {way}"
            outcomes = []
            for seed in range(seeds):
                path = output / attack.name / f"{line}, seed {seed}.json"
                outcomes.append(_outcome(attack, {**overrides, "seed": seed}, path, report))
            means = {part: statistics.mean(one[part] for one in outcomes) for part in outcomes[0]}
            yield {"attack": attack.name, "data": name, "setting": way, **means}


def _outcome(
    attack: Attack, overrides: Overrides, path: Path, report: Callable[[str], None]
) -> dict[str, float]:
    """The outcome of one run, with its seconds, cached in a file."""

    def run() -> list[dict[str, float]]:
        start = time.perf_counter()
        outcome = asdict(attack.run(overrides))
        return [{**outcome, "seconds": time.perf_counter() - start}]

    # Other keys are options of the attack, and part of the file's name.
    settings = load_settings({key: overrides[key] for key in overrides if key in defaults()})
    from fedapp.runs.compare import Series

    (outcome,) = Series(path.parent, report).rows(path.stem, settings, run)
    return outcome


def attacks_table(lines: Iterable[Row]) -> str:
    """Format results as a Markdown table."""
    cells = "| {attack} | {data} | {setting} | {success:.3f}{rest} | {chance:.3f} | {score:.3f} "
    rows = []
    for line in lines:
        rest = f", {line['unfinished']:.3f} unfinished" if line["unfinished"] else ""
        rows.append(f"{cells}| {{seconds:.1f}} |".format(**line, rest=rest))
    head = "| attack | data | setting | success | chance | test AUC | seconds |"
    return "\n".join([head, "|---|---|---|---|---|---|---|", *rows])


def attack_main(*attacks: Attack) -> None:
    """Attacks on runs of honest parties: a line of JSON for each result, then the table."""
    from fedapp.runs.compare import other_code

    names = tuple(attack.name for attack in attacks)

    def run(
        only: tuple[str, ...] = names,
        data: tuple[str, ...] = (),
        seeds: int = 1,
        quick: bool = False,
    ) -> None:
        start = time.perf_counter()
        check_names("only", only, names)
        chosen, results = [attack for attack in attacks if attack.name in only], []
        for attack in chosen:
            check_names("data", data, attack.data)
        for attack in chosen:
            for result in attack_results(attack, seeds, quick, data):
                print(json.dumps(result), flush=True)
                results.append(result)
        print()
        for attack in chosen:
            print(f"{attack.name}: {attack.holder}. Success: {attack.measure}.")
        print(f"\n{attacks_table(results)}")
        folders = [ATTACK_OUTPUT / attack.name for attack in chosen]
        where = ", ".join(map(str, folders))
        print(f"\n{time.perf_counter() - start:.0f} seconds; each run is kept in {where}")
        for warning in filter(None, map(other_code, folders)):
            print(warning)

    # A single attack has no ``--only``.
    function: Any = partial(run, names) if len(attacks) == 1 else run
    function.__doc__ = (attacks[0].run if len(attacks) == 1 else attack_main).__doc__
    command(function)


Note = Callable[["Transcript"], None]


@dataclass(frozen=True, slots=True, eq=False)
class Transcript:
    """One message to a recording party.

    ``site`` has the state from before the answer (an answer that ends a run deletes it); ``mail``
    are the letters that came with the request, opened.
    """

    site: Site
    request: Request
    mail: Mail


@contextmanager
def listening(listeners: Collection[str], note: Note) -> Iterator[None]:
    """Call ``note`` with every message to the parties in ``listeners``, before they answer it."""

    def answering(
        config: SiteConfig, kind: str, envelope: Envelope, content: Content, stores: Stores
    ) -> bytes:
        if config.name in listeners:
            request_class, _ = find_handler(kind, config.name)
            request = from_content(request_class, content, config.name)
            folder = home() / "sites" / config.name / envelope.model_id
            site = Site(config, stores.open(folder, lasting=False).copy())
            parcels = parcels_of(content) if request.carries_letters else []
            mail = (
                open_mail(config.name, site.store, envelope, parcels) if parcels else Mail("", [])
            )
            note(Transcript(site, request, mail))
        return answered(config, kind, envelope, content, stores)

    with patch.object(client_app, "answered", answering):
        yield


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """A finished run."""

    settings: Settings
    summary: dict[str, Any]
    model: str  # text of model.json

    @property
    def score(self) -> float:  # test AUC
        return float(self.summary["metrics"]["test"]["auc"])


@contextmanager
def trained(overrides: Overrides, listeners: Collection[str], note: Note) -> Iterator[Trained]:
    """Train while parties record their messages; delete the run's files at the end."""
    settings = load_settings(dict(overrides))
    with listening(listeners, note), temporary_run(settings) as run:
        yield Trained(settings, run.summary, (run.path / "model.json").read_text())


# Digests of what every method computes

DIGEST_BYTES = 16
RANDOM_FIELDS = {"model_id", "salt", "digests"}  # of salted files
BOOSTED = {"num-boost-round": 4, "eta": 0.3, "max-depth": 4, "max-bin": 32}
SMALL_KEY = {"key-bits": 512, "insecure-small-key": True}
HEAD = {"trees": 30, "max-depth": 3, "rounds": 2, "epochs": 3}


@dataclass(frozen=True, slots=True)
class Plan:
    """A training with settings other than the defaults, and ways to predict by a divided model."""

    settings: Mapping[str, Any]
    inferences: Sequence[str] = ()


def _boosted(strategy: str, **more: Any) -> dict[str, Any]:
    return {"strategy": strategy, **BOOSTED, **more}


def _secureboost(parties: int) -> dict[str, Any]:
    return _boosted("secureboost", parties=parties, secureboost=SMALL_KEY)


def _forest(**more: Any) -> dict[str, Any]:
    forest = {**SMALL_KEY, "max-depth": 4, **more}
    return {"strategy": "federated-forest", "parties": 2, "federated-forest": forest}


PLANS: Mapping[str, Plan] = {
    "pax": Plan(_boosted("pax", **{"subsample": 0.8, "colsample-bytree": 0.8})),
    "pax, classes": Plan(_boosted("pax", data="wine", objective="multi:softprob")),
    "pax, regression": Plan(_boosted("pax", data="diabetes", objective="reg:squarederror")),
    "fedxgbllr": Plan({"strategy": "fedxgbllr", "fedxgbllr": HEAD}),
    "bagging": Plan(_boosted("bagging")),
    "cyclic": Plan(_boosted("cyclic")),
    "fedavg-linear": Plan({"strategy": "fedavg-linear", "fedavg-linear": {"rounds": 4}}),
    "secureboost": Plan(_secureboost(parties=2), ("interactive", "eini")),
    "secureboost, 3 parties": Plan(_secureboost(parties=3), ("interactive",)),
    "federated-forest, encoded": Plan(_forest(trees=6), ("interactive", "one-round", "eini")),
    "federated-forest, paillier": Plan(_forest(trees=3, labels="paillier"), ("one-round",)),
}


def reference(only: tuple[str, ...] = tuple(PLANS), write: str = "", check: str = "") -> None:
    """What every method computes, as digests: two commits that compute the same have the same ones.

    ``python -m simulations reference --write FILE`` trains every method in this process, with
    a fixed seed, on built-in tables and with small keys, and predicts in every way. ``--check
    FILE`` repeats this, prints what differs, and exits with status 1 if anything does.

    Digests are valid for one machine and one set of library versions. They exclude the sizes of
    messages, which may change, and the names and salts that a run draws at random.
    """
    check_names("only", only, PLANS)
    if bool(write) == bool(check):
        raise SystemExit("reference must be called with --write FILE or --check FILE")
    results = {}
    for name in only:
        for key, value in computed(name):
            print(f"{key}: {value}", flush=True)
            results[key] = value
    if write:
        Path(write).write_text(json.dumps(results, indent=2) + "\n")
        return
    digests = json.loads(Path(check).read_text())
    expected = {key: digests[key] for key in digests if key.partition(":")[0] in only}
    if mismatches := differences(expected, results):
        raise SystemExit("\n".join(mismatches))
    print(f"{len(results)} as in {check}")


def differences(expected: Mapping[str, Any], results: Mapping[str, Any]) -> list[str]:
    """One line for each value that differs."""
    return [
        f"{what} must be {expected.get(what)}, got {results.get(what)}"
        for what in sorted({*expected, *results})
        if expected.get(what) != results.get(what)
    ]


def computed(name: str) -> Iterator[tuple[str, Any]]:
    """Execute a plan; yield what was computed, and its digest or number."""
    from fedapp.runs.predict import parts_of, predict_table

    plan = PLANS[name]
    with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, FEDAPP_HOME=folder):
        settings = load_settings({**plan.settings, "run-dir": f"{folder}/run"})
        run = run_local(settings)
        yield f"{name}: model", digest_of(run.path / "model.json")
        yield f"{name}: exchanges", run.summary["exchanges"]
        if not (parts := parts_of(run.path)):
            predict_table(run.path, settings.data, "", run.path / "predictions.csv")
            yield f"{name}: predictions", digest_of(run.path / "predictions.csv")
            return
        for party in (parts.active, *parts.passive):
            path = home() / "sites" / party / parts.model_id / PART_FILE
            yield f"{name}: part of {party}", digest_of(path)
        for inference in plan.inferences:
            yield from _predicted_together(name, settings, parts.model_id, inference)


def _predicted_together(
    name: str, trained: Settings, model_id: str, inference: str
) -> Iterator[tuple[str, Any]]:
    config = {key: getattr(trained, key) for key in ("data", "parties", "columns", "align", "seed")}
    config |= {"model": model_id, "strategy": inference, "eini": {**SMALL_KEY, "unguarded": True}}
    run = run_local(load_settings({**config, "run-dir": f"{trained.run_dir}-{inference}"}))
    summary = run.summary
    site = home() / "sites" / summary["active"] / summary["model_id"]
    yield f"{name}: exchanges, {inference}", summary["exchanges"]
    yield f"{name}: predictions, {inference}", digest_of(site / "predictions.csv")


def digest_of(path: Path) -> str:
    """Digest of a file; of a JSON object, without what the run drew at random."""
    content = path.read_bytes()
    if path.suffix == ".json":
        fields = {
            key: value for key, value in json.loads(content).items() if key not in RANDOM_FIELDS
        }
        content = json.dumps(fields, sort_keys=True).encode()
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).hexdigest()


class Deployment:
    """A coordinator and sites that trust each other's keys, in subfolders of a new folder.

    ``nodes`` are the node configs of the sites, by name; ``host`` is a name of the SuperLink.
    """

    def __init__(
        self, folder: Path, nodes: Mapping[str, Mapping[str, Any]], host: str = "localhost"
    ) -> None:
        self.folder, self.coordinator = folder, folder / "coordinator"
        port, *ports = free_ports(1 + len(nodes))
        self.superlink = f"localhost:{port}"
        write_federation(
            self.coordinator, Federation("federation", host, 9092, 9093, port, list(nodes))
        )
        self.ports = dict(zip(nodes, ports, strict=True))
        self._scripts: dict[str, subprocess.Popen[bytes]] = {}
        for name, node in nodes.items():
            self.add_site(name, node)
            public = (folder / name / f"{name}.pub").read_bytes()
            (self.coordinator / "sites" / f"{name}.pub").write_bytes(public)
        for name, other in itertools.permutations(nodes, 2):
            key = public_key(identity(other, self.home(other)))
            pin(self.home(name), other, fingerprint_of(key))

    def add_site(self, name: str, node: Mapping[str, Any]) -> None:
        """Write the folder of a site."""
        site, ca = site_config({"name": name, **node}, {}), str(self.coordinator / "ca.crt")
        write_site(self.folder / name, site, self.superlink, ca, self.ports[name])
        self.change_site(name, node)

    def change_site(self, name: str, node: Mapping[str, Any]) -> None:
        """Replace the node config of a site that is not running."""
        lines = [f"{key} = {json.dumps(value)}" for key, value in {"name": name, **node}.items()]
        (self.folder / name / "site.toml").write_text("\n".join(lines) + "\n")

    def home(self, name: str) -> Path:
        """Folder of a site's keys and states."""
        return self.folder / name / "home"

    def node_config(self, name: str) -> Mapping[str, Any]:
        return parse_node_config(str(self.folder / name / "site.toml"))

    def locally(self, run_dir: Path, settings: Mapping[str, Any]) -> RunFolder:
        """Run by the local engine, with the sites' node configs."""
        contexts = site_contexts(self.node_config(name) for name in self.ports)
        return run_local(load_settings({**settings, "run-dir": str(run_dir)}), contexts)

    def train(self, run_dir: Path, settings: Mapping[str, Any]) -> RunFolder:
        """Run across the sites."""
        run = ("run", settings["strategy"], "--engine", "federation")
        self.fedapp(*run, *settings_of({**settings, "run-dir": run_dir}))
        return RunFolder(run_dir)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Start everything and register the sites; all processes end with the block."""
        try:
            self.start("coordinator", *self.ports)
            self.register()
            yield
        finally:
            self.close()

    def start(self, *names: str) -> None:
        """Start the script of the coordinator, or of sites."""
        for name in names:
            script = "start-superlink.sh" if name == "coordinator" else "start-supernode.sh"
            with self.log(name).open("ab") as log:
                command = [str(self.folder / name / script)]
                self._scripts[name] = subprocess.Popen(
                    command, stdout=log, stderr=log, start_new_session=True
                )

    def register(self) -> None:
        """Register the sites as soon as the SuperLink answers."""
        deadline = time.monotonic() + START_SECONDS
        self.wait_until_listening()
        command = [str(self.coordinator / "register-sites.sh")]
        while (done := subprocess.run(command, capture_output=True, check=False)).returncode:
            if time.monotonic() > deadline:
                raise AssertionError(done.stdout.decode() + done.stderr.decode())

    def wait_until_listening(self) -> None:
        """Wait until the SuperLink accepts connections; asking Flower would cost a process."""
        deadline = time.monotonic() + START_SECONDS
        while not self._is_listening() and time.monotonic() < deadline:
            time.sleep(0.1)

    def _is_listening(self) -> bool:
        host, _, port = self.superlink.rpartition(":")
        with suppress(OSError), socket.create_connection((host, int(port)), timeout=1):
            return True
        return False

    def stop(self, *names: str) -> None:
        """Stop scripts; raise if they fail or leave processes behind."""
        families = {name: self.family(name) for name in names}
        for name in names:
            self._scripts[name].send_signal(signal.SIGTERM)
        for name in names:
            status = self._scripts.pop(name).wait(STOP_SECONDS)
            _, alive = psutil.wait_procs(families[name], timeout=STOP_SECONDS)
            if status or alive:
                got = f"status {status}, {len(alive)} processes left"
                raise AssertionError(f"{name} must stop on SIGTERM, got {got}")

    def close(self) -> None:
        """End all processes, in whatever state they are."""
        family = [process for name in self._scripts for process in self.family(name)]
        for script in self._scripts.values():
            script.terminate()
        _, alive = psutil.wait_procs(family, timeout=STOP_SECONDS)
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        for script in self._scripts.values():
            script.wait()

    def family(self, name: str) -> list[psutil.Process]:
        """A script's process and its descendants."""
        with suppress(psutil.NoSuchProcess):
            script = psutil.Process(self._scripts[name].pid)
            return [script, *script.children(recursive=True)]
        return []

    def process(self, name: str, program: str) -> psutil.Process | None:
        """The process of a command or Python module that a script has started, or None."""
        for process in self.family(name):
            with suppress(psutil.NoSuchProcess):
                if any(Path(word).name == program for word in process.cmdline()[:4]):
                    return process
        return None

    def kill(self, name: str, program: str) -> bool:
        """Wait for a process of a script and SIGKILL it; returns whether it was found in time."""
        if process := self.caught(name, program):
            process.kill()
            process.wait(STOP_SECONDS)  # until its ports are free
        return process is not None

    def caught(self, name: str, program: str) -> psutil.Process | None:
        """Wait for a process of a script; None if it does not start in time."""
        deadline = time.monotonic() + START_SECONDS
        while (process := self.process(name, program)) is None:
            if time.monotonic() > deadline:
                return None
            time.sleep(0.02)
        return process

    def wait_for(self, name: str, text: str, since: int) -> None:
        """Wait until a script's log has a text after byte ``since``."""
        log, deadline = self.log(name), time.monotonic() + START_SECONDS
        while text.encode() not in log.read_bytes()[since:]:
            assert time.monotonic() < deadline, log.read_text()[-2000:]
            time.sleep(0.1)

    def size_of_log(self, name: str) -> int:
        """Current size of a script's log in bytes."""
        return self.log(name).stat().st_size

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def begin(
        self, *words: str, app: Path | None = None, output: int | IO[str] = subprocess.PIPE
    ) -> subprocess.Popen[str]:
        """Start a ``fedapp`` command at the coordinator; ``app`` is another fedapp's folder."""
        command = shlex.join([f"{Path(sys.executable).parent}/fedapp", *words])
        return subprocess.Popen(
            ["bash", "-c", f". {self.coordinator}/env.sh; exec {command}"],
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "COLUMNS": "200", **({"PYTHONPATH": str(app)} if app else {})},
        )

    def fedapp(self, *words: str) -> str:
        """Run a ``fedapp`` command at the coordinator to its end."""
        return wait_for_output(self.begin(*words))

    def coordinators_files(self) -> Iterator[tuple[Path, bytes]]:
        """Files at the coordinator: logs, state of the SuperLink, runs; without its keys."""
        keys = {"ca.key", "server.key", "superexec.secret"}
        for path in [self.log("coordinator"), *self.coordinator.rglob("*")]:
            if path.is_file() and path.name not in keys and "apps" not in path.parts:
                yield path, path.read_bytes()


def example_nodes(folder: Path, names: Sequence[str], n_rows: int) -> dict[str, dict[str, str]]:
    """Node configs of sites with the same columns and random rows."""
    nodes = {}
    for seed, name in enumerate(names):
        a, b, c = np.random.default_rng(seed).normal(size=(3, n_rows)).round(3)
        table = np.column_stack([a, b, c, a + b * c > 0])
        path = folder / f"{name}.csv"
        np.savetxt(path, table, delimiter=",", header="a,b,c,y", comments="", fmt="%g")
        nodes[name] = {"data": str(path), "label": "y", **DRAWS}
        nodes[name]["allow"] = ",".join(all_methods())
    return nodes


def wait_for_output(command: subprocess.Popen[str]) -> str:
    """Wait for a command to succeed and return its output."""
    try:
        printed, _ = command.communicate(timeout=RUN_SECONDS)
    finally:
        command.kill()
    assert command.returncode == 0, printed
    return printed


def settings_of(values: Mapping[str, object]) -> list[str]:
    """``-c key=value`` for each setting."""
    return [word for key, value in values.items() for word in ("-c", f"{key}={value}")]
