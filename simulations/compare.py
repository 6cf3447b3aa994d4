"""Strategies side by side: the same rows, several seeds or folds, one table.

Every cell is an ordinary run in a folder of its own, ``<output>/<strategy>-<seed>``, with
``-fold-<fold>`` where there are folds; a cell that is finished is not run again, and one that was
interrupted goes on from its last round, as ``simulations.kept`` says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedapp import session
from fedapp.config import Settings, Value
from fedapp.engines import SIMULATED
from fedapp.errors import ConfigError
from fedapp.frames import drop_frames, named_frames
from fedapp.home import private_folder
from fedapp.housekeeping import delete_run
from fedapp.metrics import larger_is_better
from fedapp.report.page import write_report
from fedapp.report.summary import read_run, score_names
from fedapp.report.tradeoff import N_ORDERS, Comparison, Line, tradeoff_page
from fedapp.run_folder import MADE_FROM, RunFolder, State
from fedapp.studies import COMPARISON, PAGE
from fedapp.watch import Watcher
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
    """Check what is asked for, `compare`, and write the page of every run and that of all.

    Parameters
    ----------
    output : by default a folder below runs/ that follows from table and settings; frames in it are
        deleted at the end.
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
    shown = watcher.tell, watcher.begin
    found = compare(strategies, overrides, n_seeds, folder, run, engine, *shown)
    watcher.begin("writing the pages")
    cells = [RunFolder(folder / name) for line in found.lines for name in line.runs]
    for cell in cells if drop_frames(folder) else []:
        cell.add_to_summary({"data": found.data})
    for path in (cell.path for cell in cells if not (cell.path / "report.html").is_file()):
        write_report([path])
    RunFolder(folder).write(PAGE, tradeoff_page(found))
    return folder, found


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
    strategies : names of methods, each once.
    overrides : settings of all runs; the seeds are ``seed``, ``seed`` + 1, ...; where there are
        ``folds``, every one of them is run.
    n_seeds : >= 1.
    output : folder of the cells; may hold finished ones.
    engine : runs one cell.
    engine_name : what it is called.
    tell : told of every cell.
    begin : told what is done next.

    Raises
    ------
    ConfigError : a setting breaks its rule, the methods cannot be scored on the same rows, or
        ``output`` holds cells of other settings.
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
    draws = [draw for seed in seeds for draw in drawn(first, seed)]
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
    found = Comparison(
        metric,
        tuple(sorted(lines, key=lambda line: _rank(line, metric))),
        named_frames(first.data, output),
        first.objective,
        engine_name,
        seeds,
        first.parties,
        n_rows,
        _by_split(strategies),
        changed,
        unread_settings(changed, runs),
        first.folds,
        orders,
    )
    RunFolder(output).write_json(COMPARISON, asdict(found) | {"table": found.records})
    return found


def drawn(settings: Settings, seed: int) -> list[Draw]:
    """What the runs of a seed differ in from these settings: one run a fold."""
    folds = range(1, settings.folds + 1) if settings.folds else [0]
    return [{"seed": seed, "fold": fold} for fold in folds]


def _in_words(draw: Draw) -> str:
    return ", ".join(f"{name} {value}" for name, value in draw.items() if value or name == "seed")


def _rank(line: Line, metric: str) -> tuple[bool, float]:
    """Best first; what has no score last."""
    return np.isnan(line.mean), -line.mean if larger_is_better(metric) else line.mean


def _by_split(strategies: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Methods by what their parties have of a table."""
    found: dict[str, tuple[str, ...]] = {}
    for strategy in strategies:
        split_by = baselines_of(strategy).split_by
        found[split_by] = (*found.get(split_by, ()), strategy)
    return found


def finished_cell(
    settings: Settings, output: Path, engine: Engine, tell: Callable[[str], None]
) -> dict[str, Any]:
    """The summary of one run, which is made, or gone on with, unless it is there.

    Raises
    ------
    ConfigError : a run of other settings or of another table is there.
    """
    name = _cell_name(settings.strategy, {"seed": settings.seed, "fold": settings.fold})
    folder = (output / name).resolve()
    asked, before = made_from(settings), read_made_from(folder / MADE_FROM)
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
                (folder / "summary.json").unlink(missing_ok=True)  # or it would be kept
            delete_run(folder)
        private_folder(folder)
        RunFolder(folder).write_json(MADE_FROM, {KEY: asked})
    engine(settings.model_copy(update=place))
    tell(f"{name}: done")
    return dict(read_run(folder).summary)


def _cell_name(begin: str, draw: Draw) -> str:
    """What a cell is called, after its strategy or its baselines."""
    return f"{begin}-{draw['seed']}" + (f"-fold-{draw['fold']}" if draw["fold"] else "")


def _line(name: str, cells: Sequence[Mapping[str, Any]], metric: str, runs: Sequence[str]) -> Line:
    """A strategy's runs as one line."""

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
    """Test scores as a line without costs; nan where one is absent or undefined."""
    found = {
        each: tuple(float("nan") if test.get(each) is None else test[each] for test in tests)
        for each in [metric, *score_names(tests)]
    }
    return Line(name, found[metric], others=found)


def _baselines(
    runs: Sequence[Settings],
    draws: Sequence[Draw],
    output: Path,
    metric: str,
    tell: Callable[[str], None],
    begin: Callable[[str], None],
) -> list[Line]:
    """What the methods are held against, on the same rows; equal names are one line."""
    kinds = {baselines_of(run.strategy): run for run in reversed(runs)}
    scores: dict[str, list[Mapping[str, Any]]] = {}
    for kind, run in sorted(kinds.items(), key=lambda item: item[0].name):
        found: dict[str, list[Mapping[str, Any]]] = {}
        for draw in draws:
            for line, values in _named(kind, _scored(kind, run, draw, output, tell, begin)).items():
                found.setdefault(line, []).append(values)
        scores |= found
    return [_scored_line(name, tests, metric) for name, tests in scores.items()]


def _scored(
    kind: BaselineKind,
    run: Settings,
    draw: Draw,
    output: Path,
    tell: Callable[[str], None],
    begin: Callable[[str], None],
) -> Mapping[str, Any]:
    """Scores of the baselines of a kind, which are trained unless they are there."""
    name, settings = _cell_name(f"baselines-{kind.name}", draw), run.model_copy(update=draw)

    def made() -> list[dict[str, Any]]:
        begin(f"training the baselines ({kind.model} by {kind.split_by}), {_in_words(draw)}")
        found = run_baselines(settings)
        tell(f"{name}: done")
        return [found]

    # All methods of a kind have the same ones.
    of_kind = settings.model_copy(update={"strategy": kind.name})
    (scored,) = kept(output / f"{name}.json", of_kind, made, tell)
    return scored


def _orders(
    settings: Settings,
    output: Path,
    metric: str,
    tell: Callable[[str], None],
    begin: Callable[[str], None],
) -> tuple[float, float]:
    """Range of pooled XGBoost's score over orders of the rows, which is made unless it is there."""
    kind = baselines_of(settings.strategy).name

    def made() -> list[dict[str, float]]:
        begin("training pooled XGBoost on the rows in other orders")
        low, high = order_range(settings, metric, N_ORDERS)
        return [{"low": low, "high": high}]

    of_kind = settings.model_copy(update={"strategy": kind})
    (found,) = kept(output / f"row-orders-{kind}.json", of_kind, made, tell)
    return found["low"], found["high"]


def _named(kind: BaselineKind, found: Mapping[str, Any]) -> dict[str, Mapping[str, float]]:
    """Scores of the baselines by the names of their lines."""
    alone = {
        f"{party}'s {kind.split_by} alone, {kind.short}": scores
        for party, scores in found["alone"].items()
    }
    return {f"pooled {kind.model}": found["pooled"], **alone}
