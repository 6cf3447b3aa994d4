"""Compare strategies on the same rows, over several seeds or folds; and cross-validate one.

A `Series` keeps the runs and other results of a comparison, of folds, of a search or of a study in
one folder: what has finished with the same settings and data is read again.

Every cell is a run in a folder, ``<output>/<strategy>-<seed>``, followed by ``-fold-<fold>`` if
there are folds.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedapp.data.datasets import drop_frames, named_frames, party_sources
from fedapp.data.partition import SUBSETS
from fedapp.errors import ConfigError
from fedapp.home import RUNS, private_folder
from fedapp.process import versions
from fedapp.report import write_report
from fedapp.report.comparison import (
    CSV,
    LATEX,
    N_ORDERS,
    Comparison,
    Line,
    as_csv,
    as_latex,
    best_first,
    tradeoff_page,
)
from fedapp.report.summary import read_run, score_names, score_rows
from fedapp.run_folder import INPUTS_FILE, OnRound, RunFolder, Silent, State, Watcher, new_run_dir
from fedapp.runs import session
from fedapp.runs.baselines import (
    BY_COLUMNS,
    BY_ROWS,
    XGBOOST,
    BaselineKind,
    baseline_rows,
    baselines_of,
    order_range,
    run_baselines,
)
from fedapp.runs.clean import CLAIM, COMPARISON, FOLDS, delete_run
from fedapp.runs.cluster import carried_out, check_on
from fedapp.runs.run import PAGE
from fedapp.runs.session import Training, check_method, check_tables
from fedapp.runs.superlinks import SIMULATED
from fedapp.runs.tables import resolve_objective, table_files
from fedapp.settings import (
    Settings,
    Value,
    app_files,
    defaults,
    flatten,
    load_settings,
    settings_named,
)
from strategies.run import check_read, load_strategy

Engine = Callable[[Settings], RunFolder]
Inputs = Mapping[str, Any]
# Settings that runs of one folder may differ in, or that do not affect a result.
VARIED = {"strategy", "seed", "parties", "objective", "run-dir", "resume"}
NO_MATTER = {"run-dir", "resume"}
TABLE, CODE = "table", "code"
KEY = "made_from"  # first key of a file with inputs
PACKAGES = ("fedapp", "strategies", "clients", "simulations")
LIBRARIES = ("flwr", "numpy", "scikit-learn", "torch", "xgboost")
MOST_NAMED = 6  # results of other code
NO_INPUTS = "made again, as what is there does not say what it was made from"
# Settings that every method of a comparison must read: they affect columns and scores.
ALL_READ = ("eval-metric", "base-margin")


def carry_out(
    strategies: Sequence[str],
    overrides: Mapping[str, Value],
    n_seeds: int,
    engine: str,
    watcher: Watcher,
    output: Path | None = None,
    on: str = "",
) -> tuple[Path, Comparison]:
    """Check the settings, `compare`, and write the reports of all runs and the comparison's page.

    ``output`` is by default a folder below runs/ that follows from the table and the settings.
    With ``on="ray"`` every run of the local engine is a Ray task.
    """

    def run(settings: Settings) -> RunFolder:
        folder = session.carry_out(settings, engine, watcher)
        assert folder is not None  # of a simulated run
        return folder

    watcher.begin("reading the settings")
    if engine not in SIMULATED:
        raise ConfigError(f"--engine must be local or simulation to compare, got {engine}")
    check_on(on, engine)
    runs = settings_of_all(strategies, overrides)
    for settings in runs:
        session.check_method(without_unread(settings), engine)
    check_comparable(runs, n_seeds)
    runs = [session.check_tables(settings, engine, watcher) for settings in runs]
    overrides = {**overrides, "parties": runs[0].asked_parties}
    folder = output or default_folder(runs[0], engine)
    comparison = compare(strategies, overrides, n_seeds, folder, run, engine, watcher, bool(on))
    watcher.begin("writing the pages")
    cells = [RunFolder(folder / name) for line in comparison.lines for name in line.runs]
    for cell in cells if drop_frames(folder) else []:
        cell.add_to_summary({"data": comparison.data})
    for path in (cell.path for cell in cells if not (cell.path / "report.html").is_file()):
        write_report([path])
    for name, write in ((PAGE, tradeoff_page), (CSV, as_csv), (LATEX, as_latex)):
        RunFolder(folder).write(name, write(comparison))
    return folder, comparison


def compare(
    strategies: Sequence[str],
    overrides: Mapping[str, Value],
    n_seeds: int,
    output: Path,
    engine: Engine,
    engine_name: str = "local",
    watcher: Watcher | None = None,
    on_ray: bool = False,
) -> Comparison:
    """Run every strategy with every seed and fold, and the baselines, on the same rows.

    ``overrides`` are settings of all runs; the seeds are ``seed``, ``seed`` + 1, ...; with
    ``folds`` each of them is run. ConfigError if a setting is invalid, the methods cannot be scored
    on the same rows, or ``output``, the folder of the cells, has cells of other settings.
    """
    watcher = watcher or Silent()
    runs = settings_of_all(strategies, overrides)
    check_comparable(runs, n_seeds)
    watcher.begin("reading the table")
    n_rows = same_rows(runs)
    runs = [resolve_objective(run) for run in runs]
    first = runs[0]
    series = Series(output, watcher.tell)
    series.claim(first, engine_name)
    seeds = tuple(range(first.seed, first.seed + n_seeds))
    draws = [draw for seed in seeds for draw in draws_of_seed(first, seed)]  # a run of each method
    metric, lines = first.watched_metric, []
    if on_ray:
        series = _run_on_ray(runs, draws, series, watcher)
    for place, run in enumerate(runs):
        cells = [without_unread(run).model_copy(update=draw) for draw in draws]
        summaries = []
        for number, cell in enumerate(cells, start=place * len(draws) + 1):
            of_all = f"(run {number} of {len(runs) * len(draws)})"
            watcher.begin(f"{run.strategy}, {_in_words(cell)} {of_all}")
            summaries.append(series.run(cell, engine))
        lines.append(_line(run.strategy, summaries, metric, [name_of(cell) for cell in cells]))
    lines += _baselines(runs, draws, series, metric, watcher)
    boosted = [run for run in runs if baselines_of(run.strategy).model == XGBOOST]
    orders = None
    if boosted:
        orders = _orders(boosted[0].model_copy(update=draws[0]), series, metric, watcher)
    stated = VARIED | {"data", "fold", "folds"}
    changed = {name: value for name, value in first.changed.items() if name not in stated}
    methods: dict[str, tuple[str, ...]] = {}  # by what the parties share of a table
    for strategy in strategies:
        split_by = baselines_of(strategy).split_by
        methods[split_by] = (*methods.get(split_by, ()), strategy)
    comparison = Comparison(
        metric,
        best_first(lines, metric),
        named_frames(first.data, output),
        first.objective,
        engine_name,
        seeds,
        first.parties,
        n_rows,
        methods,
        changed,
        unread_settings(changed, runs),
        first.folds,
        orders,
    )
    RunFolder(output).write_json(COMPARISON, asdict(comparison) | {"table": comparison.records})
    return comparison


def _run_on_ray(
    runs: Sequence[Settings], draws: Sequence[Mapping[str, int]], series: Series, watcher: Watcher
) -> Series:
    """Make all unfinished runs and baselines as Ray tasks; returns the series that reads them."""
    from fedapp.runs.local import run_local

    apart = Series(series.folder.resolve(), Silent().tell)
    kinds = {baselines_of(run.strategy): run for run in reversed(runs)}
    calls: dict[str, Callable[[], Any]] = {}
    for draw in map(dict, draws):
        for run in runs:
            cell = without_unread(run).model_copy(update=draw)
            calls[name_of(cell)] = functools.partial(apart.run, cell, run_local)
        for kind, run in kinds.items():
            cell = run.model_copy(update=draw)
            name = name_of(cell, f"baselines-{kind.name}")
            calls[name] = functools.partial(_scored, kind, cell, apart, Silent())
    for _ in carried_out(calls, apart.folder, table_files(runs[0]), watcher):
        pass
    return apart


def draws_of_seed(settings: Settings, seed: int) -> list[dict[str, int]]:
    """Seed and fold of every run with a seed: one run for each fold."""
    folds = range(1, settings.folds + 1) if settings.folds else [0]
    return [{"seed": seed, "fold": fold} for fold in folds]


def _in_words(run: Settings) -> str:
    return f"seed {run.seed}" + (f", fold {run.fold}" if run.fold else "")


def _line(
    name: str, summaries: Sequence[Mapping[str, Any]], metric: str, runs: Sequence[str]
) -> Line:
    """The line of a strategy: means over its runs."""
    costs = [
        (each["seconds"]["train"], each["exchanges"], sum(each["bytes"].values()))
        for each in summaries
    ]
    seconds, exchanges, n_bytes = (float(np.mean(each)) for each in zip(*costs, strict=True))
    line = _scored_line(name, [each["metrics"].get("test", {}) for each in summaries], metric)
    return replace(line, seconds=seconds, exchanges=exchanges, n_bytes=n_bytes, runs=tuple(runs))


def _scored_line(name: str, tests: Sequence[Mapping[str, Any]], metric: str) -> Line:
    """A line of test scores without costs; NaN if one is absent or undefined."""
    scores = {
        each: tuple(float("nan") if test.get(each) is None else test[each] for test in tests)
        for each in [metric, *score_names(tests)]
    }
    return Line(name, scores[metric], others=scores)


def _baselines(
    runs: Sequence[Settings],
    draws: Sequence[Mapping[str, int]],
    series: Series,
    metric: str,
    watcher: Watcher,
) -> list[Line]:
    """Baselines on the same rows; those with equal names share a line."""
    kinds = {baselines_of(run.strategy): run for run in reversed(runs)}
    scores: dict[str, list[Mapping[str, Any]]] = {}
    alone: dict[str, str] = {}
    for kind, run in sorted(kinds.items(), key=lambda item: item[0].name):
        of_kind: dict[str, list[Mapping[str, Any]]] = {}
        what = f"{kind.split_by} alone, {kind.short}"
        for draw in draws:
            trained = _scored(kind, run.model_copy(update=dict(draw)), series, watcher)
            of_kind.setdefault(f"pooled {kind.model}", []).append(trained["pooled"])
            for party, values in trained["alone"].items():
                alone[line := f"{party}'s {what}"] = what
                of_kind.setdefault(line, []).append(values)
        scores |= of_kind
    lines = (_scored_line(name, tests, metric) for name, tests in scores.items())
    return [replace(line, alone=alone.get(line.name, "")) for line in lines]


def _scored(kind: BaselineKind, run: Settings, series: Series, watcher: Watcher) -> dict[str, Any]:
    """Scores of the baselines of a kind, which all its methods share."""
    name = name_of(run, f"baselines-{kind.name}")

    def train() -> list[dict[str, Any]]:
        watcher.begin(f"training the baselines ({kind.model} by {kind.split_by}), {_in_words(run)}")
        scores = run_baselines(run)
        watcher.tell(f"{name}: done")
        return [scores]

    return series.rows(name, run.model_copy(update={"strategy": kind.name}), train)[0]


def _orders(run: Settings, series: Series, metric: str, watcher: Watcher) -> tuple[float, float]:
    """Range of pooled XGBoost's score over orders of the rows."""
    kind = baselines_of(run.strategy).name

    def train() -> list[dict[str, float]]:
        watcher.begin("training pooled XGBoost on the rows in other orders")
        return [dict(zip(("low", "high"), order_range(run, metric, N_ORDERS), strict=True))]

    of_kind = run.model_copy(update={"strategy": kind})
    (scores,) = series.rows(f"row-orders-{kind}", of_kind, train)
    return scores["low"], scores["high"]


def check_comparable(runs: Sequence[Settings], n_seeds: int) -> None:
    """Raise ConfigError if methods cannot be compared; no table is read yet."""
    if n_seeds < 1:
        raise ConfigError(f"seeds must be >= 1, got {n_seeds}")
    if model := next((run.init_model for run in runs if run.init_model), ""):
        rule = "must be empty in a comparison, whose baselines begin without a model"
        raise ConfigError(f"init-model {rule}, got {model}")
    if runs[0].log:
        rule = "must be empty in a comparison (fedapp run logs its run)"
        raise ConfigError(f"log {rule}, got {runs[0].log}")
    for name, count in Counter(run.strategy for run in runs).items():
        if count > 1:
            raise ConfigError(
                f"strategies must be named once each, got {name} {count} times; "
                f"--seeds {count} makes {count} runs of every method"
            )
    kinds = _kinds(runs)
    if len(kinds) > 1 and party_sources(runs[0].data, runs[0].parties):
        raise ConfigError(
            f"data must be one table to split, because {_beside(kinds)} cannot hold back the same "
            f"rows of tables of their own; got {runs[0].data!r}"
        )


def same_rows(runs: Sequence[Settings]) -> dict[str, int]:
    """Check that all runs have the same rows, and return the size of each subset; ConfigError if
    the rows differ, or there are no test rows."""
    kinds = _kinds(runs)
    splits = {kind: baseline_rows(run)[0].in_table_order().split for kind, run in kinds.items()}
    first = next(iter(splits.values()))
    if not len(first.test):
        raise ConfigError(
            f"test-fraction must leave test rows to compare by, got {runs[0].test_fraction}"
        )
    for subset in SUBSETS:
        n_rows = sorted(len(getattr(split, subset)) for split in splits.values())
        if n_rows[0] != n_rows[-1]:
            rule = f"must deal out all {n_rows[-1]} rows that {subset}, because {_beside(kinds)}"
            unused = f"{n_rows[-1] - n_rows[0]} of them are left over"
            raise ConfigError(f"partition {rule} has them all, got '{runs[0].partition}': {unused}")
    assert all(np.array_equal(split.test, first.test) for split in splits.values())
    return {subset: len(getattr(first, subset)) for subset in SUBSETS}


def _kinds(runs: Sequence[Settings]) -> dict[str, Settings]:
    """The first run whose parties share rows, and the first whose parties share columns."""
    return {baselines_of(run.strategy).split_by: run for run in reversed(runs)}


def _beside(kinds: Mapping[str, Settings]) -> str:
    """A method of each kind, for error texts."""
    return f"{kinds[BY_ROWS].strategy} beside {kinds[BY_COLUMNS].strategy}"


def settings_of_all(strategies: Sequence[str], overrides: Mapping[str, Value]) -> list[Settings]:
    """Settings of every method, with all overrides; ConfigError if no method reads one."""
    named: dict[str, Value] = {}
    for strategy in strategies:
        named |= settings_named(overrides, strategy)
    runs = [load_settings({**named, "strategy": strategy}) for strategy in strategies]
    read = {name for run in runs for name in load_strategy(run.strategy).settings_read(run)}
    for name in sorted(set(named) - read):
        check_read(load_settings({"strategy": strategies[0], name: named[name]}), [name])
    return runs


def without_unread(run: Settings) -> Settings:
    """Reset the settings that the method does not read to their defaults."""
    read = {*load_strategy(run.strategy).settings_read(run), *ALL_READ}
    return load_settings({name: value for name, value in run.changed.items() if name in read})


def unread_settings(
    changed: Mapping[str, Value], runs: Sequence[Settings]
) -> dict[str, tuple[str, ...]]:
    """Changed settings that each method does not read, by method."""
    read = {run.strategy: load_strategy(run.strategy).settings_read(run) for run in runs}
    return {one: tuple(name for name in changed if name not in read[one]) for one in read}


# A result is written with its inputs: settings, tables and code. One with other settings or another
# table is never reused. One of other code is, so that a changed comment does not cost hours.
@dataclass(frozen=True, slots=True)
class Series:
    """Runs and other results in a folder; `tell` is called with a line about each."""

    folder: Path
    tell: Callable[[str], None]

    def claim(self, settings: Settings, engine: str, more: Inputs | None = None) -> None:
        """Make the folder; ConfigError if it is of another series."""
        inputs = identity(settings, engine, more)
        path = self.folder / CLAIM
        check_same(inputs, json.loads(path.read_text()) if path.exists() else inputs, self.folder)
        private_folder(self.folder)
        RunFolder(self.folder).write_json(CLAIM, inputs)

    def run(self, settings: Settings, engine: Engine) -> dict[str, Any]:
        """The summary of a run, which is run or resumed unless it has finished; ConfigError if the
        run in its folder has other settings or another table."""
        folder = (self.folder / (name := name_of(settings))).resolve()
        asked = inputs_of(settings)
        before = read_inputs(folder / INPUTS_FILE)
        is_finished = (folder / "summary.json").exists()
        place = {"run_dir": str(folder)}
        if before and (is_finished or RunFolder(folder).state is State.RESUMABLE):
            check_same(asked, before, folder)
            code = "" if before[CODE] == asked[CODE] else ", by other code"
            self.tell(f"{name}: {'finished before' if is_finished else 'goes on'}{code}")
            if is_finished:
                return dict(read_run(folder).summary)
            place["resume"] = str(folder)
        else:
            if folder.exists():
                if before is None:
                    self.tell(f"{name}: {NO_INPUTS}")
                    (folder / "summary.json").unlink(missing_ok=True)  # finished: not deleted
                delete_run(folder)
            private_folder(folder)
            RunFolder(folder).write_json(INPUTS_FILE, {KEY: asked})
        engine(settings.model_copy(update=place))
        self.tell(f"{name}: done")
        return dict(read_run(folder).summary)

    def rows(
        self, name: str, settings: Settings, make: Callable[[], Sequence[Mapping[str, Any]]]
    ) -> list[dict[str, Any]]:
        """Rows of the file ``name.json``, made and written unless those in it have the same
        inputs."""
        path = self.folder / f"{name}.json"
        asked = inputs_of(settings)
        before = read_inputs(path)
        differs = before is not None and first_difference(asked, before)
        if before is None or differs:
            if path.exists():
                why = NO_INPUTS if before is None else f"made again, as {differs} differs"
                self.tell(f"{path.name}: {why}")
            private_folder(path.parent)
            RunFolder(path.parent).write_json(path.name, {KEY: asked, "rows": list(make())})
        elif before[CODE] != asked[CODE]:
            self.tell(f"{path.name}: made before, by other code")
        return list(json.loads(path.read_text())["rows"])


def name_of(settings: Settings, name: str = "") -> str:
    """Name of a result: by default the method, with seed and fold."""
    fold = f"-fold-{settings.fold}" if settings.fold else ""
    return f"{name or settings.strategy}-{settings.seed}{fold}"


def default_folder(
    settings: Settings, engine: str, kind: str = "compare", more: Inputs | None = None
) -> Path:
    """Default folder of a series: a digest of the table, the settings and ``more``.

    Methods and seeds are not part of it, so that a comparison with more of them reuses its runs.
    """
    text = json.dumps(identity(settings, engine, more), sort_keys=True)
    digest = hashlib.blake2b(text.encode(), digest_size=4).hexdigest()
    name = Path(settings.data.split(",")[0].rpartition("=")[2]).stem
    return Path("runs") / f"{kind}-{re.sub(r'[^A-Za-z0-9._-]+', '-', name)}-{digest}"


def identity(settings: Settings, engine: str, more: Inputs | None = None) -> dict[str, Any]:
    """Inputs that all runs of a series share: all but methods and seeds, and ``more``."""
    config = flatten(settings.as_config())
    inputs = {name: config[name] for name in config if name not in VARIED}
    resolved = {"parties": settings.parties, "objective": settings.objective, "engine": engine}
    return {**inputs, **resolved, TABLE: table_digest(settings), **(more or {})}


def inputs_of(settings: Settings) -> dict[str, Any]:
    """Inputs of a result: settings, and digests of tables and code."""
    config = flatten(settings.as_config())
    inputs = {name: value for name, value in config.items() if name not in NO_MATTER}
    return {**inputs, TABLE: table_digest(settings), CODE: code_digest()}


def read_inputs(path: Path) -> dict[str, Any] | None:
    """Inputs in a result's file; None if there is no file, or it has none."""
    if not path.is_file():
        return None
    inputs: dict[str, Any] | None = json.loads(path.read_text()).get(KEY)
    return inputs


def first_difference(asked: Inputs, before: Inputs) -> str:
    """Name of the first setting that differs, ``table`` coming last; empty if none does."""
    names = sorted({*asked, *before} - {CODE}, key=lambda name: (name == TABLE, name))
    cached = {**defaults(), **before}  # a setting added since then had its default
    return next((name for name in names if asked.get(name) != cached.get(name)), "")


def check_same(asked: Inputs, before: Inputs, folder: Path) -> None:
    """Raise ConfigError if the runs in a folder have other settings or another table."""
    if name := first_difference(asked, before):
        values = f"{before.get(name, defaults().get(name))!r} as in {folder}, got "
        values += repr(asked.get(name))
        if name == TABLE:
            values = f"that of the runs in {folder}, got one with another content"
        way = "delete that folder, or name another"
        raise ConfigError(f"{name} must be {values}; {way}")


def other_code(folder: Path) -> str:
    """A line that names results below a folder by other code than today's; empty if none is."""
    names = []
    for path in sorted(folder.rglob("*.json")):
        with path.open() as file:
            has_inputs = KEY in file.read(len(KEY) + 8)  # it is the first key
        if has_inputs and (read_inputs(path) or {}).get(CODE) != code_digest():
            result = path.parent if path.name == INPUTS_FILE else path
            names.append(result.relative_to(folder).as_posix())
    if not names:
        return ""
    more = len(names) - MOST_NAMED
    shown = ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
    count = f"{len(names)} result{'s' if len(names) > 1 else ''} in {folder}"
    return f"of other code than today's: {count} ({shown}); what is deleted there is made again"


def table_digest(settings: Settings) -> str:
    """Digests of the files that ``data`` and ``schema`` name; empty for a data set's name."""
    stats = [(file, file.stat()) for file in table_files(settings)]
    return "".join(_content_digest(file, stat.st_size, stat.st_mtime_ns) for file, stat in stats)


@functools.cache
def _content_digest(path: Path, size: int, changed: int) -> str:
    """Digest of a file; cached while its size and modification time stay the same."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()[:32]


@functools.cache
def code_digest() -> str:
    """Digest of all sources, and of the versions of the numerical libraries."""
    digest = hashlib.blake2b(json.dumps(versions(LIBRARIES)).encode(), digest_size=16)
    for pattern in (*(f"{package}/**/*.py" for package in sorted(PACKAGES)), "fedapp/**/*.toml"):
        for _, path in sorted(app_files(pattern).items()):
            digest.update(hashlib.blake2b(path.read_bytes()).digest())
    return digest.hexdigest()


# The runs are in subfolders, like the cells of a comparison; finished ones are reused.
# ``folds.json`` has mean and standard deviation of each score.
@dataclass(slots=True)
class CrossValidation:
    """A run for each fold, and the means of their scores; fields are those of a ``Training``."""

    strategy: str
    given: Mapping[str, Value]  # with ``folds``, without ``fold``; ``run-dir`` is the common folder
    engine: str = "local"
    baselines: bool = False
    watcher: Watcher = field(default_factory=Silent)
    on_round: OnRound | None = None
    folder: RunFolder | None = None

    def carry_out(self) -> RunFolder:
        """Check settings and tables, run every unfinished fold, and write the summary."""
        self.watcher.begin("reading the settings")
        named = settings_named(self.given, self.strategy)
        first = load_settings({**named, "strategy": self.strategy, "fold": 1})
        _check(first, self.engine, named)
        first = resolve_objective(check_tables(first, self.engine, self.watcher))
        path = Path(first.run_dir or new_run_dir(f"{self.strategy}-folds", RUNS)).resolve()
        self.folder = RunFolder(path)
        self.folder.check_new()
        series = Series(path, self.watcher.tell)
        series.claim(first, self.engine)
        summaries = {}
        for draw in draws_of_seed(first, first.seed):
            self.watcher.begin(f"fold {draw['fold']} of {first.folds}")
            run = first.model_copy(update={**draw, "run_dir": ""})
            summaries[name_of(run)] = series.run(run, self._train)
        if drop_frames(path):
            data = {"data": named_frames(first.data, path)}
            for name in summaries:
                RunFolder(path / name).add_to_summary(data)
                summaries[name] |= data
        self.folder.write_json(FOLDS, summarise(first, self.engine, summaries))
        return self.folder

    def _train(self, settings: Settings) -> RunFolder:
        """One run, without a report; ``fedapp report`` can write it."""
        options = self.engine, self.baselines, self.watcher, self.on_round
        folder = Training(
            settings.strategy, settings.changed, *options, with_page=False
        ).carry_out()
        assert folder is not None  # the run is simulated
        return folder


def _check(settings: Settings, engine: str, given: Collection[str]) -> None:
    check_method(settings, engine, given)
    if engine not in SIMULATED:
        way = "there each fold is a run of its own, as by -c folds=5 -c fold=1"
        raise ConfigError(f"--engine must be local or simulation with --folds, got {engine}: {way}")
    if settings.resume:
        rule = "must be omitted with --folds: -c run-dir=FOLDER goes on with the folds in a folder"
        raise ConfigError(f"resume {rule}, got {settings.resume}")
    if settings.init_model:
        rule = "must be empty with --folds, as it may have seen the rows that are held back"
        raise ConfigError(f"init-model {rule}, got {settings.init_model}")


def summarise(
    settings: Settings, engine: str, by_run: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Mean and standard deviation of every score over the folds, by model and rows.

    ``scores`` has, for ``federated test``, ``pooled test`` and so on, each score's ``mean``, ``sd``
    (of the sample, with n - 1) and ``values`` by fold; mean and sd are None if a fold has no such
    score. ``exchanges``, ``bytes`` and ``seconds`` are sums over the folds.
    """
    summaries = list(by_run.values())
    folds = [
        {(model, rows): values for model, rows, values in score_rows(dict(summary))}
        for summary in summaries
    ]
    scores: dict[str, Any] = {}
    for key in folds[0]:
        by_fold = [fold.get(key, {}) for fold in folds]
        scores[" ".join(key)] = {
            name: _spread([values.get(name) for values in by_fold]) for name in score_names(by_fold)
        }
    return {
        "strategy": settings.strategy,
        "engine": engine,
        "data": summaries[0]["data"],
        "objective": settings.objective,
        "metric": settings.watched_metric,
        "seed": settings.seed,
        "folds": settings.folds,
        "runs": list(by_run),
        "scores": scores,
        "exchanges": sum(summary["exchanges"] for summary in summaries),
        "bytes": _sums([summary["bytes"] for summary in summaries]),
        "seconds": _sums([summary["seconds"] for summary in summaries]),
    }


def _spread(values: Sequence[float | None]) -> dict[str, Any]:
    defined = [value for value in values if value is not None]
    if len(defined) < len(values):
        return {"mean": None, "sd": None, "values": list(values)}
    mean = float(np.mean(defined))
    sd = float(np.std(defined, ddof=1))
    return {"mean": mean, "sd": sd, "values": list(values)}


def _sums(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: sum(part[name] for part in parts) for name in parts[0]}
