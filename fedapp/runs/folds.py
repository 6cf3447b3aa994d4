"""Cross-validation: a run for each fold, and the means of their scores."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedapp.data.datasets import drop_frames, named_frames
from fedapp.errors import ConfigError
from fedapp.home import RUNS
from fedapp.report.summary import score_names, score_rows
from fedapp.run_folder import OnRound, RunFolder, Silent, Watcher, new_run_dir
from fedapp.runs.clean import FOLDS
from fedapp.runs.series import Series, name_of
from fedapp.runs.session import Training, check_method, check_tables
from fedapp.runs.superlinks import SIMULATED
from fedapp.runs.tables import resolve_objective
from fedapp.settings import Settings, Value, load_settings, settings_named


def draws_of_seed(settings: Settings, seed: int) -> list[dict[str, int]]:
    """Seed and fold of every run with a seed: one run for each fold."""
    folds = range(1, settings.folds + 1) if settings.folds else [0]
    return [{"seed": seed, "fold": fold} for fold in folds]


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
