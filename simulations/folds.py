"""Cross-validation: each fold of the rows is held back by a run of its own.

The runs lie in a folder below the one that is named, as cells of a comparison do; one that is
finished is not run again. ``folds.json`` has mean and standard deviation of each score.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedapp.config import Settings, Value, load_settings, settings_named
from fedapp.engines import SIMULATED
from fedapp.errors import ConfigError
from fedapp.frames import drop_frames, named_frames
from fedapp.home import RUNS
from fedapp.report.summary import score_names, score_rows
from fedapp.run_folder import RunFolder, new_run_dir
from fedapp.session import Training, check_method, check_tables
from fedapp.studies import FOLDS
from fedapp.watch import OnRound, Silent, Watcher
from simulations.comparable import claim_folder
from simulations.compare import drawn, finished_cell
from simulations.rows import settled


@dataclass(slots=True)
class CrossValidation:
    """A run for each fold, from their settings to the means of their scores.

    Parameters
    ----------
    strategy, given, engine, baselines, watcher, on_round : of each run, as for a ``Training``;
        ``given`` has ``folds`` and no ``fold``; its ``run-dir`` is the folder of all.
    folder : of all runs; None before there is one.
    """

    strategy: str
    given: Mapping[str, Value]
    engine: str = "local"
    baselines: bool = False
    watcher: Watcher = field(default_factory=Silent)
    on_round: OnRound | None = None
    folder: RunFolder | None = None

    def carry_out(self) -> RunFolder:
        """Run every fold that is not finished, and write the summary of all.

        Raises
        ------
        ConfigError, DataError : a setting or a table breaks a rule; before anything is started.
        FedappError : a run cannot go on.
        """
        self.watcher.begin("reading the settings")
        given = settings_named(self.given, self.strategy)
        first = load_settings({**given, "strategy": self.strategy, "fold": 1})
        _check(first, self.engine, given)
        check_tables(first, self.engine, self.watcher)
        first = settled(first)
        path = Path(first.run_dir or new_run_dir(f"{self.strategy}-folds", RUNS)).resolve()
        self.folder = RunFolder(path)
        self.folder.check_new()
        claim_folder(path, first, self.engine)
        summaries = []
        for draw in drawn(first, first.seed):
            self.watcher.begin(f"fold {draw['fold']} of {first.folds}")
            run = first.model_copy(update={**draw, "run_dir": ""})
            summaries.append(finished_cell(run, path, self._train, self.watcher.tell))
        if drop_frames(path):
            named = named_frames(first.data, path)
            for name in _cells(path, first):
                RunFolder(path / name).add_to_summary({"data": named})
            summaries = [{**each, "data": named} for each in summaries]
        self.folder.write_json(
            FOLDS, summarised(first, self.engine, _cells(path, first), summaries)
        )
        return self.folder

    def _train(self, settings: Settings) -> RunFolder:
        """One run, without a page, which ``fedapp report`` writes."""
        how = self.engine, self.baselines, self.watcher, self.on_round
        folder = Training(settings.strategy, settings.changed, *how, with_page=False).carry_out()
        assert folder is not None  # of a simulated run
        return folder


def _check(settings: Settings, engine: str, given: Collection[str]) -> None:
    """Hold that a run for each fold makes sense, and that it can be made here.

    Raises
    ------
    ConfigError : it does not.
    """
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


def _cells(folder: Path, settings: Settings) -> list[str]:
    """Names of the runs, in the order of the folds."""
    form = f"{settings.strategy}-{settings.seed}-fold-*/summary.json"
    found = (path.parent.name for path in folder.glob(form))
    return sorted(found, key=lambda name: int(name.rpartition("-")[2]))


def summarised(
    settings: Settings, engine: str, names: Sequence[str], summaries: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Mean and standard deviation of every score over the folds, by model and rows.

    Parameters
    ----------
    names, summaries : of the runs, in the order of the folds.

    Returns
    -------
    ``scores`` has, for ``federated test``, ``pooled test`` and so on, each score's ``mean``, ``sd``
    (of the sample, so with n - 1) and ``values`` by fold; these are None where it is undefined in
    some fold. ``exchanges``, ``bytes`` and ``seconds`` are sums over the folds.
    """
    rows = [
        {(model, of): found for model, of, found in score_rows(summary)} for summary in summaries
    ]
    scores: dict[str, Any] = {}
    for key in rows[0]:
        each = [found.get(key, {}) for found in rows]
        scores[" ".join(key)] = {
            name: _spread([found.get(name) for found in each]) for name in score_names(each)
        }
    return {
        "strategy": settings.strategy,
        "engine": engine,
        "data": summaries[0]["data"],
        "objective": settings.objective,
        "metric": settings.watched_metric,
        "seed": settings.seed,
        "folds": settings.folds,
        "runs": list(names),
        "scores": scores,
        "exchanges": sum(summary["exchanges"] for summary in summaries),
        "bytes": _sums([summary["bytes"] for summary in summaries]),
        "seconds": _sums([summary["seconds"] for summary in summaries]),
    }


def _spread(values: Sequence[float | None]) -> dict[str, Any]:
    known = [value for value in values if value is not None]
    is_known = len(known) == len(values)
    return {
        "mean": float(np.mean(known)) if is_known else None,
        "sd": float(np.std(known, ddof=1)) if is_known else None,
        "values": list(values),
    }


def _sums(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: sum(part[name] for part in parts) for name in parts[0]}
