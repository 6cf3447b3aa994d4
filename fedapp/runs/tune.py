"""Search for the best settings of a method, by the scores of the validation rows.

Trials do not score the test rows (``score-test=false``). After the last one the best settings are
run once more, and only that run scores them. The trials are a study of Optuna in the search's
folder; the same command continues an interrupted search.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from fedapp.arguments import parse_overrides
from fedapp.data.datasets import drop_frames, named_frames
from fedapp.errors import ConfigError, check_package
from fedapp.home import open_private, write_atomically
from fedapp.known_names import setting_hint, setting_of
from fedapp.metrics import larger_is_better
from fedapp.report.progress import Silent, Watcher
from fedapp.report.summary import metric_of
from fedapp.run_folder import RunFolder
from fedapp.runs.baselines import XGBOOST, Pooled, baseline_rows, baselines_of, train_of
from fedapp.runs.clean import SEARCH, delete_run, folder_of_runs, forget_model
from fedapp.runs.cluster import carried_out, check_on
from fedapp.runs.run_groups import (
    BEST,
    NUMBER,
    STUDY,
    finished_trials,
    ranked,
    read_trials,
    settings_of_trial,
    trials_of,
)
from fedapp.runs.series import Series, check_series_folder, default_folder
from fedapp.runs.session import Training, check_method, check_tables
from fedapp.runs.set_by_command import check_set_by_command
from fedapp.runs.tables import resolve_objective, table_files
from fedapp.settings import Settings, Value, defaults, load_settings, settings_named
from fedapp.superlinks import SIMULATED
from strategies.method import SPLIT_SETTINGS, TreeStrategy
from strategies.run import load_strategy

USUAL_RUNS = 20
Space = Mapping[str, Any]  # a distribution of Optuna by setting
TRIAL = "trial-"  # and its number: the folder of a running trial
# Searched by default, if a method reads the setting and it is not given.
DEFAULT_SPACE: Mapping[str, str] = {
    "eta": "log:0.01:0.5",
    "max-depth": "int:3:10",
    "lambda": "log:0.1:10",
    "min-child-weight": "log:0.5:20",
    "subsample": "uniform:0.5:1",
    "colsample-bytree": "uniform:0.5:1",
    "fedxgbllr.eta": "log:0.03:0.3",
    "fedxgbllr.max-depth": "int:4:10",
    "fedxgbllr.learning-rate": "log:0.0003:0.01",
    "fedavg-linear.learning-rate": "log:0.1:3",
    "fedavg-linear.local-epochs": "int:1:10",
    "fedavg-linear.l2": "log:1e-6:0.1",
    "federated-forest.max-depth": "int:4:16",
    "federated-forest.min-samples-leaf": "int:1:20",
    "federated-forest.max-features": "sqrt,log2,all",
    "horizontal-forest.max-depth": "int:4:15",
    "horizontal-forest.min-samples-leaf": "int:1:20",
    "horizontal-forest.max-features": "sqrt,log2,all",
}
FORMS = "log:LOW:HIGH, uniform:LOW:HIGH, int:LOW:HIGH, or values separated by commas"
# Settings of the rows, the scores or the run cannot be searched.
NOT_SEARCHED = (
    TreeStrategy.reads
    | SPLIT_SETTINGS
    | {"partition", "columns", "objective", "eval-metric", "init-model", "base-margin"}
)
SEARCHES = {"random": "RandomSampler", "optuna": "TPESampler"}  # and Optuna's samplers


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
        first = resolve_objective(check_tables(first, self.engine, self.watcher, set()))
        series, inputs = self._series(first, space)
        folder = RunFolder(series.folder)
        with folder_of_runs(folder.path, lambda: read_trials(folder.path)), folder.written():
            series.claim(first, self.engine, inputs)
            if (folder.path / SEARCH).is_file():
                rule = "finished before: its test rows have been looked at"
                self.watcher.tell(f"{rule}; --output FOLDER names another for a new search")
                drop_frames(folder.path)
                return folder
            study = new_study(larger_is_better(first.watched_metric), folder.path)
            self._try_all(study, folder.path, first, space)
            self._finish(study, folder.path, first, space)
        return folder

    def _series(self, first: Settings, space: Space) -> tuple[Series, Mapping[str, Any]]:
        from optuna.distributions import distribution_to_json

        more: dict[str, Any] = {
            "strategy": self.strategy,
            "seed": first.seed,
            "search": self.search,
            "space": {name: distribution_to_json(space[name]) for name in sorted(space)},
        }
        more |= {"baselines": True} if self.baselines else {}
        path = (self.output or default_folder(first, self.engine, "tune", more)).resolve()
        return Series(path, self.watcher.tell), more

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
        if model_id := RunFolder(path).model_id:
            forget_model(model_id)
        shutil.rmtree(path)


def space_of(settings: Settings, given: Mapping[str, Value], asked: Mapping[str, str]) -> Space:
    """The space of a search: the method's default without given settings, and what is asked for.

    ``asked`` has domains in one of ``FORMS``, which replace default ones. ConfigError if a setting
    is unknown or cannot be searched, or a domain or a value in it is invalid.
    """
    method = settings.strategy
    read = load_strategy(method).settings_read(settings)
    asked = {setting_of(name, defaults(), method): asked[name] for name in asked}
    for name in asked:
        if name not in read or name in NOT_SEARCHED:
            searchable = [setting for setting in read if setting not in NOT_SEARCHED]
            rule = f"space must name settings that {method} reads and that decide on no rows"
            hint = setting_hint(name, searchable, method, asked[name])
            raise ConfigError(f"{rule}, got {name}{hint}")
        if name in given:
            raise ConfigError(f"space must not name a setting that is given too, got {name}")
    usual = {name: DEFAULT_SPACE[name] for name in DEFAULT_SPACE if name in {*read} - {*given}}
    space = {name: domain(name, text) for name, text in {**usual, **asked}.items()}
    if not space:
        rule = "must name a setting, where all of the method's own are given"
        raise ConfigError(f"space {rule}, as in --space max-depth=int:3:8; got none")
    for name, values in space.items():
        for value in getattr(values, "choices", None) or (values.low, values.high):
            tried = load_settings({**given, "strategy": method, name: value})
            load_strategy(method).check_settings(tried)
    return space


def domain(name: str, text: str) -> Any:
    """A setting's domain, written in one of ``FORMS``, as a distribution of Optuna."""
    from optuna import distributions

    kind, *bounds = text.split(":")
    if kind not in ("log", "uniform", "int") or not bounds:
        texts = (part.strip() for part in text.split(","))
        values = tuple(parse_overrides([f"{name}={part}"])[name] for part in texts)
        if not text.strip() or len(set(values)) < len(values):
            raise ConfigError(f"space of {name} must be {FORMS}, got {text!r}")
        return distributions.CategoricalDistribution(values)
    try:
        low, high = map(int if kind == "int" else float, bounds)
    except ValueError:
        raise ConfigError(f"space of {name} must be {FORMS}, got {text!r}") from None
    least = "0 < LOW < HIGH" if kind == "log" else "LOW < HIGH"
    if not (low < high < math.inf) or (kind == "log" and low <= 0):
        raise ConfigError(f"space of {name} must have {least}, got {text!r}")
    if kind == "int":
        return distributions.IntDistribution(int(low), int(high))
    return distributions.FloatDistribution(low, high, log=kind == "log")


def check_search(search: str) -> None:
    """Raise ConfigError if a search is unknown, or its package is not installed."""
    if search not in SEARCHES:
        raise ConfigError(f"search must be one of {', '.join(SEARCHES)}, got {search!r}")
    check_package("optuna", "to search", "tune")


def new_study(larger_is_better: bool, folder: Path | None = None) -> Any:
    """A study of Optuna: in memory, or the one in a search's folder.

    There, a trial whose command was interrupted has failed. It does not count and is repeated.
    """
    import optuna
    from optuna.storages import JournalStorage, journal

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    storage = None
    if folder is not None:
        path = folder / STUDY
        with open_private(path, "a"):
            pass
        if not (text := path.read_bytes()).endswith(b"\n"):  # a line that was not written whole
            write_atomically(path, text[: text.rfind(b"\n") + 1])
        # The search is the only writer: Optuna's lock is of one that was killed, and waits 30 s.
        path.with_name(f"{STUDY}.lock").unlink(missing_ok=True)
        storage = JournalStorage(journal.JournalFileBackend(str(path)))
    study = optuna.create_study(
        study_name="tune",
        storage=storage,
        load_if_exists=True,
        direction="maximize" if larger_is_better else "minimize",
    )
    for trial in study.get_trials(states=[optuna.trial.TrialState.RUNNING]):
        study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
    return study


def new_trial(study: Any, search: str, space: Space, seed: int, number: int) -> Any:
    """Draw at random or by the TPE sampler (Bergstra et al. 2011), at first at random too.

    The sampler's seed follows from the trial's number, so that a search that is resumed draws as
    one that was never interrupted.
    """
    import optuna

    sampler = getattr(optuna.samplers, SEARCHES[search])
    study.sampler = sampler(seed=(seed + number - 1) % 2**32)
    trial = study.ask(dict(space))
    trial.set_user_attr(NUMBER, number)
    return trial
