"""Compare strategies on the same rows, over several seeds or folds.

Every cell is a run in its own folder, ``<output>/<strategy>-<seed>``, followed by ``-fold-<fold>``
if there are folds. Finished cells are reused and interrupted ones resumed, see
``simulations.kept``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedapp import session
from fedapp.data.frames import drop_frames, named_frames
from fedapp.engines import SIMULATED
from fedapp.errors import ConfigError
from fedapp.home import private_folder
from fedapp.housekeeping import delete_run
from fedapp.metrics import larger_is_better
from fedapp.report.comparison import N_ORDERS, Comparison, Line, tradeoff_page
from fedapp.report.page import write_report
from fedapp.report.summary import read_run, score_names
from fedapp.run_folder import INPUTS_FILE, RunFolder, State, Watcher
from fedapp.settings import Settings, Value
from fedapp.studies import COMPARISON, PAGE
from simulations.baselines import XGBOOST, BaselineKind, baselines_of, order_range, run_baselines
from simulations.comparable import (
    STATED,
    check_comparable,
    claim_folder,
    comparison_folder,
    read_alone,
    same_rows,
    settings_of_all,
    unread_settings,
)
from simulations.kept import CODE, KEY, UNTOLD, check_same, kept, made_from, read_made_from
from simulations.rows import settled

Engine = Callable[[Settings], RunFolder]
Draw = Mapping[str, int]  # seed and fold


def carry_out(
    strategies: Sequence[str],
    overrides: Mapping[str, Value],
    n_seeds: int,
    engine: str,
    watcher: Watcher,
    output: Path | None = None,
) -> tuple[Path, Comparison]:
    """Check the settings, `compare`, and write the reports of all runs and the comparison's page.

    ``output`` is by default a folder below runs/ that follows from the table and the settings.
    """

    def run(settings: Settings) -> RunFolder:
        folder = session.carry_out(settings, engine, watcher)
        assert folder is not None  # of a simulated run
        return folder

    watcher.begin("reading the settings")
    if engine not in SIMULATED:
        raise ConfigError(f"--engine must be local or simulation to compare, got {engine}")
    runs = settings_of_all(strategies, overrides)
    for settings in runs:
        session.check_method(read_alone(settings), engine)
    check_comparable(runs, n_seeds)
    for settings in runs:
        session.check_tables(settings, engine, watcher)
    folder = output or comparison_folder(runs[0], engine)
    comparison = compare(
        strategies, overrides, n_seeds, folder, run, engine, watcher.tell, watcher.begin
    )
    watcher.begin("writing the pages")
    cells = [RunFolder(folder / name) for line in comparison.lines for name in line.runs]
    for cell in cells if drop_frames(folder) else []:
        cell.add_to_summary({"data": comparison.data})
    for path in (cell.path for cell in cells if not (cell.path / "report.html").is_file()):
        write_report([path])
    RunFolder(folder).write(PAGE, tradeoff_page(comparison))
    return folder, comparison


def compare(
    strategies: Sequence[str],
    overrides: Mapping[str, Value],
    n_seeds: int,
    output: Path,
    engine: Engine,
    engine_name: str = "local",
    tell: Callable[[str], None] = lambda text: None,
    begin: Callable[[str], None] = lambda doing: None,
) -> Comparison:
    """Run every strategy with every seed and fold, and the baselines, on the same rows.

    Parameters
    ----------
    overrides : settings of all runs; the seeds are ``seed``, ``seed`` + 1, ...; with ``folds`` each
        of them is run.
    output : folder of the cells; may have finished ones.
    tell : called with each cell.
    begin : called with what is done next.

    Raises
    ------
    ConfigError : a setting is invalid, the methods cannot be scored on the same rows, or ``output``
        has cells of other settings.
    """
    runs = settings_of_all(strategies, overrides)
    check_comparable(runs, n_seeds)
    first = runs[0]
    begin("reading the table")
    n_rows = same_rows(runs)
    runs = [settled(run) for run in runs]
    first = runs[0]
    claim_folder(output, first, engine_name)
    seeds = tuple(range(first.seed, first.seed + n_seeds))
    metric = first.watched_metric
    lines = []
    draws = [draw for seed in seeds for draw in drawn(first, seed)]  # a run of each method
    for place, run in enumerate(runs):
        cells = []
        for number, draw in enumerate(draws, start=place * len(draws) + 1):
            begin(f"{run.strategy}, {_in_words(draw)} (run {number} of {len(runs) * len(draws)})")
            cell = read_alone(run).model_copy(update=draw)
            cells.append(finished_cell(cell, output, engine, tell))
        named = [_cell_name(run.strategy, draw) for draw in draws]
        lines.append(_line(run.strategy, cells, metric, named))
    lines += _baselines(runs, draws, output, metric, tell, begin)
    boosted = next((run for run in runs if baselines_of(run.strategy).model == XGBOOST), None)
    orders = None
    if boosted is not None:
        orders = _orders(boosted.model_copy(update=draws[0]), output, metric, tell, begin)
    stated = STATED | {"fold", "folds"}
    changed = {name: value for name, value in first.changed.items() if name not in stated}
    methods: dict[str, tuple[str, ...]] = {}  # by what the parties share of a table
    for strategy in strategies:
        split_by = baselines_of(strategy).split_by
        methods[split_by] = (*methods.get(split_by, ()), strategy)
    # Best first, lines without a score last.
    sign = -1 if larger_is_better(metric) else 1
    comparison = Comparison(
        metric,
        tuple(sorted(lines, key=lambda line: (np.isnan(line.mean), sign * line.mean))),
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
    record = asdict(comparison) | {"table": comparison.records}
    RunFolder(output).write_json(COMPARISON, record)
    return comparison


def drawn(settings: Settings, seed: int) -> list[Draw]:
    """Seed and fold of every run with a seed: one run for each fold."""
    folds = range(1, settings.folds + 1) if settings.folds else [0]
    return [{"seed": seed, "fold": fold} for fold in folds]


def _in_words(draw: Draw) -> str:
    return ", ".join(f"{name} {value}" for name, value in draw.items() if value or name == "seed")


def finished_cell(
    settings: Settings, output: Path, engine: Engine, tell: Callable[[str], None]
) -> dict[str, Any]:
    """The summary of a run, which is run or resumed unless it has finished.

    Raises
    ------
    ConfigError : the folder has a run of other settings or another table.
    """
    name = _cell_name(settings.strategy, {"seed": settings.seed, "fold": settings.fold})
    folder = (output / name).resolve()
    asked, before = made_from(settings), read_made_from(folder / INPUTS_FILE)
    is_finished, place = (folder / "summary.json").exists(), {"run_dir": str(folder)}
    if before and (is_finished or RunFolder(folder).state is State.RESUMABLE):
        check_same(asked, before, folder)
        code = "" if before[CODE] == asked[CODE] else ", by other code"
        tell(f"{name}: {'finished before' if is_finished else 'goes on'}{code}")
        if is_finished:
            return dict(read_run(folder).summary)
        place["resume"] = str(folder)
    else:
        if folder.exists():
            if before is None:
                tell(f"{name}: {UNTOLD}")
                (folder / "summary.json").unlink(missing_ok=True)  # finished runs are not deleted
            delete_run(folder)
        private_folder(folder)
        RunFolder(folder).write_json(INPUTS_FILE, {KEY: asked})
    engine(settings.model_copy(update=place))
    tell(f"{name}: done")
    return dict(read_run(folder).summary)


def _cell_name(begin: str, draw: Draw) -> str:
    return f"{begin}-{draw['seed']}" + (f"-fold-{draw['fold']}" if draw["fold"] else "")


def _line(name: str, cells: Sequence[Mapping[str, Any]], metric: str, runs: Sequence[str]) -> Line:
    """The line of a strategy: means over its runs."""

    def mean(of: Callable[[Mapping[str, Any]], float]) -> float:
        return float(np.mean([of(cell) for cell in cells]))

    return replace(
        _scored_line(name, [cell["metrics"].get("test", {}) for cell in cells], metric),
        seconds=mean(lambda cell: cell["seconds"]["train"]),
        exchanges=mean(lambda cell: cell["exchanges"]),
        n_bytes=mean(lambda cell: sum(cell["bytes"].values())),
        runs=tuple(runs),
    )


def _scored_line(name: str, tests: Sequence[Mapping[str, Any]], metric: str) -> Line:
    """A line of test scores without costs; NaN if one is absent or undefined."""
    scores = {
        each: tuple(float("nan") if test.get(each) is None else test[each] for test in tests)
        for each in [metric, *score_names(tests)]
    }
    return Line(name, scores[metric], others=scores)


def _baselines(
    runs: Sequence[Settings],
    draws: Sequence[Draw],
    output: Path,
    metric: str,
    tell: Callable[[str], None],
    begin: Callable[[str], None],
) -> list[Line]:
    """Baselines on the same rows; those with equal names share a line."""
    kinds = {baselines_of(run.strategy): run for run in reversed(runs)}
    scores: dict[str, list[Mapping[str, Any]]] = {}
    for kind, run in sorted(kinds.items(), key=lambda item: item[0].name):
        of_kind: dict[str, list[Mapping[str, Any]]] = {}
        for draw in draws:
            trained = _scored(kind, run, draw, output, tell, begin)
            named = {f"pooled {kind.model}": trained["pooled"]} | {
                f"{party}'s {kind.split_by} alone, {kind.short}": values
                for party, values in trained["alone"].items()
            }
            for line, values in named.items():
                of_kind.setdefault(line, []).append(values)
        scores |= of_kind
    return [_scored_line(name, tests, metric) for name, tests in scores.items()]


def _scored(
    kind: BaselineKind,
    run: Settings,
    draw: Draw,
    output: Path,
    tell: Callable[[str], None],
    begin: Callable[[str], None],
) -> Mapping[str, Any]:
    """Scores of the baselines of a kind; trained, or read if their file is valid."""
    name, settings = _cell_name(f"baselines-{kind.name}", draw), run.model_copy(update=draw)

    def train() -> list[dict[str, Any]]:
        begin(f"training the baselines ({kind.model} by {kind.split_by}), {_in_words(draw)}")
        scores = run_baselines(settings)
        tell(f"{name}: done")
        return [scores]

    # All methods of a kind share their baselines.
    of_kind = settings.model_copy(update={"strategy": kind.name})
    (scores,) = kept(output / f"{name}.json", of_kind, train, tell)
    return scores


def _orders(
    settings: Settings,
    output: Path,
    metric: str,
    tell: Callable[[str], None],
    begin: Callable[[str], None],
) -> tuple[float, float]:
    """Range of pooled XGBoost's score over row orders; computed, or read if the file is valid."""
    kind = baselines_of(settings.strategy).name

    def train() -> list[dict[str, float]]:
        begin("training pooled XGBoost on the rows in other orders")
        low, high = order_range(settings, metric, N_ORDERS)
        return [{"low": low, "high": high}]

    of_kind = settings.model_copy(update={"strategy": kind})
    (scores,) = kept(output / f"row-orders-{kind}.json", of_kind, train, tell)
    return scores["low"], scores["high"]
