"""Search for the best settings of a method, by the scores of the validation rows.

Trials do not score the test rows (``score-test=false``). After the last one the best settings are
run once more, and only that run scores them. The trials are a study of Optuna in the search's
folder; the same command continues an interrupted search.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from fedapp.data.datasets import drop_frames, named_frames
from fedapp.errors import ConfigError
from fedapp.metrics import larger_is_better
from fedapp.report.summary import metric_of, ranked
from fedapp.run_folder import RunFolder, Silent, Watcher
from fedapp.runs.baselines import XGBOOST, Pooled, baseline_rows, baselines_of, train_of
from fedapp.runs.clean import SEARCH, delete_run, forget_model, model_id_of
from fedapp.runs.cluster import carried_out, check_on
from fedapp.runs.run_groups import BEST, trials_of
from fedapp.runs.search_space import (
    DEFAULT_SPACE,
    NUMBER,
    Space,
    check_search,
    domain,
    finished_trials,
    new_study,
    new_trial,
    settings_of_trial,
    space_of,
)
from fedapp.runs.series import Series, check_series_folder, default_folder
from fedapp.runs.session import Training, check_method, check_tables
from fedapp.runs.set_by_command import check_set_by_command
from fedapp.runs.tables import resolve_objective, table_files
from fedapp.settings import Settings, Value, defaults, load_settings, settings_named
from fedapp.superlinks import SIMULATED

USUAL_RUNS = 20
TRIAL = "trial-"  # and its number: the folder of a running trial


@dataclass(slots=True)
class Tuning:
    """A search, from its settings to the last run of the best ones."""

    strategy: str
    given: Mapping[str, Value]
    asked: Mapping[str, str] = field(default_factory=dict)  # domains, see ``space_of``
    search: str = "random"  # or optuna
    runs: int = USUAL_RUNS  # trials; the last run of the best settings is not counted
    engine: str = "local"
    watcher: Watcher = field(default_factory=Silent)
    output: Path | None = None  # None: a folder that follows from the table and the settings
    on: str = ""  # ray: trials are Ray tasks
    baselines: bool = False  # also search settings of the baselines, with as many trials

    def carry_out(self) -> RunFolder:
        """Run the trials, then the best settings with their test scores.

        ConfigError or DataError if a setting or a table is invalid, before anything is started.
        """
        if self.runs < 1:
            raise ConfigError(f"runs must be >= 1, got {self.runs}")
        self.watcher.begin("reading the settings")
        check_series_folder(self.output)
        self.given = settings_named(self.given, self.strategy)
        check_set_by_command("tune", self.given)
        first = load_settings({**self.given, "strategy": self.strategy})
        check_method(first, self.engine, self.given)
        if self.engine not in SIMULATED:
            raise ConfigError(f"--engine must be local or simulation to tune, got {self.engine}")
        if not first.valid_fraction:
            raise ConfigError("valid-fraction must be > 0 to tune by the validation rows, got 0.0")
        check_search(self.search)
        check_on(self.on, self.engine)
        if self.on and self.search != "random":
            rule = f"must be omitted with search={self.search}"
            raise ConfigError(f"on {rule}, where a trial follows from those before, got {self.on}")
        space = space_of(first, self.given, self.asked)
        first = resolve_objective(check_tables(first, self.engine, self.watcher))
        folder = RunFolder(self._claimed(first, space))
        with folder.written():
            if (folder.path / SEARCH).is_file():
                rule = "finished before: its test rows have been looked at"
                self.watcher.tell(f"{rule}; --output FOLDER names another for a new search")
                drop_frames(folder.path)
                return folder
            study = new_study(larger_is_better(first.watched_metric), folder.path)
            self._try_all(study, folder.path, first, space)
            self._finish(study, folder.path, first, space)
        return folder

    def _claimed(self, first: Settings, space: Space) -> Path:
        from optuna.distributions import distribution_to_json

        more: dict[str, Any] = {
            "strategy": self.strategy,
            "seed": first.seed,
            "search": self.search,
            "space": {name: distribution_to_json(space[name]) for name in sorted(space)},
        }
        more |= {"baselines": True} if self.baselines else {}
        path = (self.output or default_folder(first, self.engine, "tune", more)).resolve()
        Series(path, self.watcher.tell).claim(first, self.engine, more)
        return path

    def _try_all(self, study: Any, path: Path, first: Settings, space: Space) -> None:
        finished = {trial.user_attrs[NUMBER] for trial in finished_trials(study)}
        calls, running = {}, {}
        for number in sorted({*range(1, self.runs + 1)} - finished):
            trial = new_trial(study, self.search, space, first.seed, number)
            settings, folder = settings_of_trial(trial), path / f"{TRIAL}{number}"
            if self.on:
                training = _training(first, settings, folder)
                calls[f"trial {number}"], running[number] = partial(_trial, training), trial
                continue
            text = ", ".join(f"{name}={value}" for name, value in settings.items())
            self.watcher.begin(f"trial {number}: {text}")
            how = {"engine": self.engine, "watcher": self.watcher}
            folder = _trial(_training(first, settings, folder, **how))
            score = _record(study, trial, folder, first.changed)
            self.watcher.tell(f"trial {number}: valid {first.watched_metric} {score:.4f}")
        if calls:
            for folder in carried_out(calls, path, table_files(first), self.watcher):
                trial = running[int(folder.name.removeprefix(TRIAL))]
                _record(study, trial, folder, first.changed)

    def _finish(self, study: Any, path: Path, first: Settings, space: Space) -> None:
        """Run the best settings once more, with test scores, and write the summary."""
        trials, metric = trials_of(study), first.watched_metric
        best = ranked(trials, metric)[0]
        self.watcher.begin(f"the best setting, trial {best.number}, with its test scores")
        if (folder := RunFolder(path / BEST)).path.exists():
            delete_run(folder.path)
        overrides = {**_trained(first), **best.settings, "run-dir": str(folder.path)}
        Training(self.strategy, overrides, self.engine, False, self.watcher).carry_out()
        if drop_frames(path):
            folder.add_to_summary({"data": named_frames(first.data, path)})
        summary = folder.summary
        content = {
            "strategy": self.strategy,
            "data": summary["data"],
            "metric": metric,
            "search": self.search,
            "engine": self.engine,
            "trials": len(trials),
            "best": best.number,
            "settings": {**self.given, **best.settings},
            "valid": best.score,
            "test": summary["metrics"]["test"],
            "exchanges": summary["exchanges"] + sum(trial.exchanges for trial in trials),
            "bytes": sum(summary["bytes"].values()) + sum(trial.bytes for trial in trials),
        }
        if self.baselines:
            self.watcher.begin(f"the baselines, {len(trials)} trials each")
            content["baselines"] = self._tuned_baselines(first, space, len(trials))
        RunFolder(path).write_json(SEARCH, content)

    def _tuned_baselines(self, first: Settings, space: Space, n_trials: int) -> dict[str, Any]:
        """Search settings of the pooled rows' baseline and of each party's by validation rows.

        Each has as many trials as the federated search, from the same domains or, where it has
        none, XGBoost's usual ones: else a tuned model would be compared with XGBoost at settings
        that nobody chose for it. Returns ``{"pooled": result, "alone": {party: result}}``; a result
        is the best trial's settings, its score of the validation rows, and all scores of the test
        rows.
        """
        kind, metric = baselines_of(first.strategy), first.watched_metric
        if kind.model == XGBOOST:
            usual = {name: DEFAULT_SPACE[name] for name in DEFAULT_SPACE if name not in self.given}
            space = {name: domain(name, text) for name, text in usual.items()} | {**space}
            space = {name: space[name] for name in space if "." not in name}

        def tuned(rows: Pooled) -> dict[str, Any]:
            study, results = new_study(larger_is_better(metric)), list[dict[str, Any]]()
            for number in range(1, n_trials + 1):
                trial = new_trial(study, self.search, space, first.seed, number)
                settings = settings_of_trial(trial)
                model = train_of(kind)(load_settings({**first.changed, **settings}), rows)
                valid = replace(rows, split=replace(rows.split, test=rows.split.valid))
                score = replace(model, rows=valid).scores().get(metric)
                results.append({"settings": settings, "valid": score, "test": model.scores()})
                if score is not None:  # a party may be without validation rows
                    study.tell(trial, score)
            return results[study.best_trial.number if finished_trials(study) else 0]

        pooled, alone = baseline_rows(first)
        of_all = tuned(pooled)
        return {"pooled": of_all, "alone": {name: tuned(rows) for name, rows in alone.items()}}


def _trained(first: Settings) -> dict[str, Value]:
    """Changed settings of a run, beside its method."""
    return {name: value for name, value in first.changed.items() if name != "strategy"}


def _training(first: Settings, drawn: Mapping[str, Value], path: Path, **how: Any) -> Training:
    """A run of drawn settings in the folder ``path``, without test scores and page."""
    settings = {**_trained(first), **drawn, "score-test": False, "run-dir": str(path)}
    return Training(first.strategy, settings, with_page=False, **how)


def _trial(training: Training) -> Path:
    """Run one trial; return its folder."""
    folder = Path(training.given["run-dir"])
    _drop(folder)  # of an attempt whose process died
    training.carry_out()
    return folder


def _record(study: Any, trial: Any, path: Path, given: Mapping[str, Value]) -> float:
    """Record a trial in the study, and delete its folder; return its score."""
    summary = RunFolder(path).summary
    metric = metric_of(summary)
    score = (summary["metrics"].get("valid") or {}).get(metric)
    if score is None:
        rule = f"must leave validation rows that have a {metric}, which decides on the best"
        name = "valid-from" if given.get("valid-from") else "valid-fraction"
        raise ConfigError(f"{name} {rule}, got {given.get(name, defaults()[name])}")
    trial.set_user_attr("exchanges", summary["exchanges"])
    trial.set_user_attr("bytes", sum(summary["bytes"].values()))
    trial.set_user_attr("seconds", summary["seconds"]["train"])
    study.tell(trial, score)
    _drop(path)
    return float(score)


def _drop(path: Path) -> None:
    """Delete a trial's folder, and the states of its model at simulated sites."""
    if path.exists():
        if model_id := model_id_of(path):
            forget_model(model_id)
        shutil.rmtree(path)
