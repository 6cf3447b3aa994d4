"""Compare strategies on the same rows, over several seeds or folds.

Every cell is a run in a folder, ``<output>/<strategy>-<seed>``, followed by ``-fold-<fold>`` if
there are folds.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedapp.data.datasets import drop_frames, named_frames, party_sources
from fedapp.data.partition import SUBSETS
from fedapp.errors import ConfigError
from fedapp.report import write_report
from fedapp.report.comparison import (
    N_ORDERS,
    Comparison,
    Line,
    best_first,
    tradeoff_page,
)
from fedapp.report.progress import Silent, Watcher
from fedapp.report.summary import score_names
from fedapp.run_folder import RunFolder
from fedapp.runs import session
from fedapp.runs.baselines import (
    BY_COLUMNS,
    BY_ROWS,
    XGBOOST,
    BaselineKind,
    Pooled,
    baseline_rows,
    baselines_of,
    decoded,
    lacking_memory_of,
    order_range,
    run_baselines,
)
from fedapp.runs.clean import COMPARISON, folder_of_runs
from fedapp.runs.cluster import carried_out, check_on
from fedapp.runs.differences import ScoredRows, Span, scored_rows
from fedapp.runs.run_groups import PAGE
from fedapp.runs.series import VARIED, Series, check_series_folder, default_folder, name_of
from fedapp.runs.set_by_command import check_set_by_command
from fedapp.runs.tables import resolve_objective, table_files
from fedapp.settings import Settings, Value, load_settings, settings_named
from fedapp.superlinks import SIMULATED
from strategies.run import check_read, load_strategy

ScoredKinds = Mapping[BaselineKind, Sequence[Mapping[str, Any]]]  # ``_scored`` of every draw
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
    folds: int = 0,
) -> tuple[Path, Comparison]:
    """Run every method with every seed and fold, and the baselines, on the same rows; write pages.

    ``overrides`` are settings of all runs; the seeds are ``seed``, ``seed`` + 1, ...; with
    ``folds`` each fold of a cross-validation is held back in turn. ConfigError if a setting is
    invalid, the methods cannot be scored on the same rows, or ``output`` has runs of other
    settings; by default it is a folder below runs/ that follows from the table and the settings.
    With ``on="ray"`` every run of the local engine is a Ray task.
    """
    watcher.begin("reading the settings")
    if engine not in SIMULATED:
        raise ConfigError(f"--engine must be local or simulation to compare, got {engine}")
    check_on(on, engine)
    check_series_folder(output)
    check_set_by_command("compare", overrides)
    if folds:
        overrides = {**overrides, "folds": folds, "fold": 1}
    runs = settings_of_all(strategies, overrides)
    for settings in runs:
        session.check_method(without_unread(settings), engine)
    check_comparable(runs, n_seeds)
    shown = set[str]()  # by all methods, which read the same tables
    runs = [session.check_tables(settings, engine, watcher, shown) for settings in runs]
    folder = output or default_folder(runs[0], engine)
    series = Series(folder, watcher.tell)
    with folder_of_runs(folder):
        comparison = _compared(runs, n_seeds, series, engine, watcher, bool(on))
    watcher.begin("writing the pages")
    cells = [RunFolder(folder / name) for line in comparison.lines for name in line.runs]
    for cell in cells if drop_frames(folder) else []:
        cell.add_to_summary({"data": comparison.data})
    for path in (cell.path for cell in cells if not (cell.path / "report.html").is_file()):
        write_report(path)
    RunFolder(folder).write(PAGE, tradeoff_page(comparison))
    return folder, comparison


def _compared(
    runs: Sequence[Settings],
    n_seeds: int,
    series: Series,
    engine: str,
    watcher: Watcher,
    on_ray: bool,
) -> Comparison:
    """Make the runs and baselines that the series does not have, and set them side by side."""

    def run_cell(settings: Settings) -> RunFolder:
        folder = session.carry_out(settings, engine, watcher)
        assert folder is not None  # of a simulated run
        return folder

    watcher.begin("reading the table")
    n_rows = same_rows(runs)
    runs = [resolve_objective(run) for run in runs]
    if rule := lacking_memory_of(runs[0]):
        raise ConfigError(f"{rule}: run each method by itself")
    first = runs[0]
    series.claim(first, engine)
    seeds = tuple(range(first.seed, first.seed + n_seeds))
    draws = [draw for seed in seeds for draw in draws_of_seed(first, seed)]  # a run of each method
    metric, lines = first.watched_metric, []
    kinds = {baselines_of(run.strategy): run for run in reversed(runs)}
    if on_ray:
        series = _run_on_ray(runs, kinds, draws, series, watcher)
    for index, run in enumerate(runs):
        cells = [without_unread(run).model_copy(update=draw) for draw in draws]
        summaries = []
        for number, cell in enumerate(cells, start=index * len(draws) + 1):
            of_all = f"(run {number} of {len(runs) * len(draws)})"
            watcher.begin(f"{run.strategy}, {_in_words(cell)} {of_all}")
            summaries.append(series.run(cell, run_cell))
        lines.append(_line(run.strategy, summaries, metric, [name_of(cell) for cell in cells]))
    scored = {
        kind: [_scored(kind, run.model_copy(update=draw), series, watcher) for draw in draws]
        for kind, run in sorted(kinds.items(), key=lambda item: item[0].name)
    }
    paired = _differences(runs, draws, series.folder, metric, scored)
    lines += _baselines(scored, metric)
    boosted = [run for run in runs if baselines_of(run.strategy).model == XGBOOST]
    orders = None
    if boosted:
        orders = _orders(boosted[0].model_copy(update=draws[0]), series, metric, watcher)
    stated = VARIED | {"data", "fold", "folds"}
    changed = {name: value for name, value in first.changed.items() if name not in stated}
    read = {run.strategy: load_strategy(run.strategy).settings_read(run) for run in runs}
    unread = {name: tuple(each for each in changed if each not in read[name]) for name in read}
    methods: dict[str, tuple[str, ...]] = {}  # by what the parties share of a table
    for run in runs:
        split_by = baselines_of(run.strategy).split_by
        methods[split_by] = (*methods.get(split_by, ()), run.strategy)
    comparison = Comparison(
        metric,
        best_first(lines, metric),
        named_frames(first.data, series.folder),
        first.objective,
        engine,
        seeds,
        first.parties,
        n_rows,
        methods,
        changed,
        unread,
        first.folds,
        orders,
        paired,
    )
    RunFolder(series.folder).write_json(COMPARISON, comparison.document)
    return comparison


def draws_of_seed(settings: Settings, seed: int) -> list[dict[str, int]]:
    """Seed and fold of every run with a seed: one run for each fold."""
    folds = range(1, settings.folds + 1) if settings.folds else [0]
    return [{"seed": seed, "fold": fold} for fold in folds]


def _run_on_ray(
    runs: Sequence[Settings],
    kinds: Mapping[BaselineKind, Settings],
    draws: Sequence[Mapping[str, int]],
    series: Series,
    watcher: Watcher,
) -> Series:
    """Make all unfinished runs and baselines as Ray tasks; returns the series that reads them."""
    from fedapp.runs.local import run_local

    apart = Series(series.folder.resolve(), Silent().tell)
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


def _in_words(run: Settings) -> str:
    return f"seed {run.seed}" + (f", fold {run.fold}" if run.fold else "")


def _line(
    name: str, summaries: Sequence[Mapping[str, Any]], metric: str, runs: Sequence[str]
) -> Line:
    """The line of a strategy: means over its runs."""
    costs = [
        (summary["seconds"]["train"], summary["exchanges"], sum(summary["bytes"].values()))
        for summary in summaries
    ]
    seconds, exchanges, n_bytes = (float(np.mean(values)) for values in zip(*costs, strict=True))
    line = _scored_line(name, [summary["metrics"].get("test", {}) for summary in summaries], metric)
    return replace(line, seconds=seconds, exchanges=exchanges, n_bytes=n_bytes, runs=tuple(runs))


def _scored_line(name: str, tests: Sequence[Mapping[str, Any]], metric: str) -> Line:
    """A line of test scores without costs; NaN if one is absent or undefined."""
    scores = {
        key: tuple(float("nan") if test.get(key) is None else test[key] for test in tests)
        for key in [metric, *score_names(tests)]
    }
    return Line(name, scores[metric], others=scores)


def _baselines(scored: ScoredKinds, metric: str) -> list[Line]:
    """Baselines on the same rows; those with equal names share a line."""
    scores: dict[str, list[Mapping[str, Any]]] = {}
    alone: dict[str, str] = {}
    for kind, of_draws in scored.items():
        by_draw = [_by_line(kind, trained) for trained in of_draws]
        scores |= {name: [named[name] for named in by_draw] for name in by_draw[0]}
        alone |= {name: kind.alone for name in by_draw[0] if name != kind.pooled}
    lines = (_scored_line(name, tests, metric) for name, tests in scores.items())
    return [replace(line, alone=alone.get(line.name, "")) for line in lines]


def _by_line(kind: BaselineKind, trained: Mapping[str, Any]) -> dict[str, Any]:
    """What is of the pooled model and of each party alone, by the names of their lines."""
    alone = {f"{party}'s {kind.alone}": value for party, value in trained["alone"].items()}
    return {kind.pooled: trained["pooled"], **alone}


def _differences(
    runs: Sequence[Settings],
    draws: Sequence[Mapping[str, int]],
    output: Path,
    metric: str,
    scored: ScoredKinds,
) -> dict[str, dict[str, Span]]:
    """Score of each method less that of each other line, on the same rows of each draw.

    All models score one table's test rows in its order, so that any two of them are paired.
    """
    spans: dict[tuple[str, str], list[Span]] = defaultdict(list)
    for number, draw in enumerate(draws):
        cells = [run.model_copy(update=dict(draw)) for run in runs]
        rows_of, scored_cells = dict[BaselineKind, Pooled](), dict[str, ScoredRows | None]()
        for cell in cells:
            kind = baselines_of(cell.strategy)
            if kind not in rows_of:  # which the methods of a kind share
                rows_of[kind] = baseline_rows(cell)[0].in_table_order()
            folder = output / name_of(without_unread(cell))
            scored_cells[cell.strategy] = scored_rows(cell, folder, rows_of[kind])
        methods = {name: rows for name, rows in scored_cells.items() if rows is not None}
        for name, rows in methods.items():
            others = {other: of.margins for other, of in methods.items() if other != name}
            for kind, trained in scored.items():
                if margins := trained[number].get("test_margins"):
                    for line, text in _by_line(kind, margins).items():
                        others[line] = decoded(text, len(rows.labels))
            for other, theirs in others.items():
                if span := rows.less(theirs).get(metric):
                    spans[name, other].append(span)
    whole: dict[str, dict[str, Span]] = defaultdict(dict)
    for (name, other), of_pair in spans.items():
        if len(of_pair) == len(draws):
            # Seeds share rows and models share settings, so no interval is narrower than a run's.
            value, low, high = np.mean(of_pair, axis=0).tolist()
            whole[name][other] = value, low, high
    return dict(whole)


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
        rule = "must leave test rows to compare by"
        raise ConfigError(f"test-fraction {rule}, got {runs[0].test_fraction}")
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
