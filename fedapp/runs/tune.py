"""Search for the best settings of a method, by the scores of the validation rows.

Trials do not score the test rows (``score-test=false``). When the budget is spent, the best
settings are run once more, and only that run scores them. ``trials.jsonl`` has a line for each
trial; an interrupted search continues after the last one.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any

from fedapp.data.datasets import drop_frames, named_frames
from fedapp.errors import ConfigError, StoppedError
from fedapp.home import open_private
from fedapp.metrics import larger_is_better
from fedapp.report.summary import Trial
from fedapp.run_folder import OnRound, RoundInfo, RunFolder, Silent, Watcher
from fedapp.runs.clean import SEARCH, delete_run, forget_model, model_id_of
from fedapp.runs.cluster import carried_out, check_on
from fedapp.runs.run_groups import BEST, TRIALS, best_of, read_trials
from fedapp.runs.search_space import Draw, Space, check_search, space_of, trial_draw
from fedapp.runs.series import Series, default_folder
from fedapp.runs.session import Training, check_method, check_tables
from fedapp.runs.superlinks import SIMULATED
from fedapp.runs.tables import resolve_objective, table_files
from fedapp.runs.tuned_baselines import tuned_baselines
from fedapp.settings import Settings, Value, defaults, load_settings, settings_named

USUAL_RUNS = 20
CURRENT = "trial"  # folder of the running trial


@dataclass(frozen=True, slots=True)
class Cost:
    """Exchanges and bytes (both ways) of runs."""

    exchanges: int = 0
    n_bytes: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.exchanges + other.exchanges, self.n_bytes + other.n_bytes)

    def largest(self, other: Cost) -> Cost:
        """Elementwise maximum."""
        return Cost(max(self.exchanges, other.exchanges), max(self.n_bytes, other.n_bytes))


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of a search; None: no limit."""

    runs: int | None = None  # trials; the last run of the best settings is not counted
    exchanges: int | None = None  # of all trials and the last run
    n_bytes: int | None = None  # likewise

    def __post_init__(self) -> None:
        for name, most in self.limits.items():
            if most < 1:
                raise ConfigError(f"{name} must be >= 1, got {most}")

    @property
    def limits(self) -> dict[str, int]:
        """The limits that are set, by their names."""
        limits = {"runs": self.runs, "exchanges": self.exchanges, "bytes": self.n_bytes}
        return {name: most for name, most in limits.items() if most is not None}

    @property
    def most_runs(self) -> int | None:
        """Most trials; ``USUAL_RUNS`` if there is no limit at all."""
        is_open = self.exchanges is None and self.n_bytes is None
        return USUAL_RUNS if self.runs is None and is_open else self.runs

    def allows(self, cost: Cost) -> bool:
        """Whether a cost is within the limits."""
        pairs = ((self.exchanges, cost.exchanges), (self.n_bytes, cost.n_bytes))
        return all(most is None or spent <= most for most, spent in pairs)


@dataclass(slots=True)
class Tuning:
    """A search, from its settings to the last run of the best ones."""

    strategy: str
    given: Mapping[str, Value]
    asked: Mapping[str, str] = field(default_factory=dict)  # domains, see ``space_of``
    search: str = "random"  # or optuna
    budget: Budget = field(default_factory=Budget)
    engine: str = "local"
    watcher: Watcher = field(default_factory=Silent)
    output: Path | None = None  # None: a folder that follows from the table and the settings
    on: str = ""  # ray: trials are Ray tasks
    baselines: bool = False  # also search settings of the baselines, with as many trials

    def carry_out(self) -> RunFolder:
        """Run trials until the budget is spent, then the best settings with their test scores.

        ConfigError or DataError if a setting or a table is invalid, before anything is started;
        ConfigError if the budget is too small for one trial and the last run.
        """
        self.watcher.begin("reading the settings")
        self.given = settings_named(self.given, self.strategy)
        first = load_settings({**self.given, "strategy": self.strategy})
        _check(first, self.engine, self.given)
        check_search(self.search)
        check_on(self.on, self.engine)
        if self.on and (self.search != "random" or {*self.budget.limits} - {"runs"}):
            rule = "must be omitted with search=optuna or a budget of exchanges or bytes"
            raise ConfigError(f"on {rule}, where a trial follows from those before, got {self.on}")
        space = space_of(first, self.given, self.asked)
        first = resolve_objective(check_tables(first, self.engine, self.watcher))
        metric = first.watched_metric
        draw = trial_draw(self.search, space, first.seed, larger_is_better(metric))
        folder = RunFolder(self._claimed(first, space))
        with folder.written():
            if (folder.path / SEARCH).is_file():
                rule = "finished before: its test rows have been looked at"
                self.watcher.tell(f"{rule}; --output FOLDER names another for a new search")
                return folder
            try_all = self._try_all_on_ray if self.on else self._try_all
            try_all(folder.path, first, draw, metric)
            self._finish(folder.path, first, metric, space)
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

    def _try_all(self, path: Path, first: Settings, draw: Draw, metric: str) -> None:
        self._record_interrupted(path)
        while True:
            trials = read_trials(path)
            if any(one.state == "stopped" for one in trials) or not self._has_room(trials):
                return
            number = len(trials) + 1
            settings = draw(_scored(trials))
            text = ", ".join(f"{name}={value}" for name, value in settings.items())
            self.watcher.begin(f"trial {number}: {text}")
            trial = self._try(path / CURRENT, first, number, settings, metric, trials)
            _record(path, trial)
            score = "stopped by the budget" if trial.score is None else f"{trial.score:.4f}"
            self.watcher.tell(f"trial {number}: valid {metric} {score}")

    def _try_all_on_ray(self, path: Path, first: Settings, draw: Draw, metric: str) -> None:
        """The same trials as Ray tasks; recorded in their order, with those before."""
        trials = read_trials(path)
        calls = dict[str, Callable[[], Trial]]()
        planned = _scored(trials)
        most = self.budget.most_runs or 0
        for number in range(len(trials) + 1, len(trials) + 1 + most - len(planned)):
            settings = draw(planned)
            planned.append(Trial(number, "finished", settings, 0.0, 0, 0, 0.0))
            folder = path / f"{CURRENT}-{number}"
            training = Training(self.strategy, _of_trial(first, settings, folder), with_page=False)
            call = functools.partial(_trial, training, folder, number, settings, metric)
            calls[f"trial {number}"] = call
        done: dict[int, Trial] = {}
        for trial in carried_out(calls, path, table_files(first), self.watcher):
            done[trial.number] = trial
            while (number := len(read_trials(path)) + 1) in done:
                _record(path, done[number], f"{CURRENT}-{number}")

    def _has_room(self, trials: list[Trial]) -> bool:
        """Whether the budget allows another trial, as cheap as the cheapest, and the last run."""
        scored = _scored(trials)
        if self.budget.most_runs is not None and len(scored) >= self.budget.most_runs:
            return False
        if not scored:
            return True
        cheapest = min(scored, key=lambda one: (one.exchanges, one.bytes))
        next_cost = Cost(cheapest.exchanges, cheapest.bytes)
        return self.budget.allows(_spent(trials) + next_cost + _dearest(trials))

    def _try(
        self,
        path: Path,
        first: Settings,
        number: int,
        settings: Mapping[str, Value],
        metric: str,
        trials: list[Trial],
    ) -> Trial:
        """Run one trial; it is stopped before it uses what the last run needs."""
        options = self.engine, False, self.watcher, self._guard(trials)
        training = Training(
            self.strategy, _of_trial(first, settings, path), *options, with_page=False
        )
        try:
            return _trial(training, path, number, settings, metric)
        except StoppedError:
            used = _ledger_cost(path)
            return Trial(number, "stopped", dict(settings), None, *astuple(used))

    def _guard(self, trials: list[Trial]) -> OnRound | None:
        """A callback that stops a trial if the next round might exceed the budget."""
        if self.budget.exchanges is None and self.budget.n_bytes is None:
            return None
        before = _spent(trials)
        reserved = _dearest(trials)
        now, step = Cost(), Cost()

        def after(info: RoundInfo) -> bool:
            nonlocal now, step
            spent = Cost(info["exchanges"], now.n_bytes + sum(info["bytes"].values()))
            last = Cost(spent.exchanges - now.exchanges, spent.n_bytes - now.n_bytes)
            now, step = spent, step.largest(last)
            if info["round"] >= info["rounds"]:
                return True  # the trial ends anyway
            # This trial may become the best one: the last run would then cost as much.
            following = now + step
            return self.budget.allows(before + following + reserved.largest(following))

        return after

    def _record_interrupted(self, path: Path) -> None:
        """Record the cost of a trial of an interrupted command, and delete its folder."""
        current = path / CURRENT
        if not current.exists():
            return
        used = _ledger_cost(current)
        trials = read_trials(path)
        if used.exchanges and not (current / "summary.json").exists():
            _record(path, Trial(len(trials) + 1, "interrupted", {}, None, *astuple(used)))
        else:
            _drop(current)

    def _finish(self, path: Path, first: Settings, metric: str, space: Space) -> None:
        """Run the best settings once more, with test scores, and write the summary."""
        trials = read_trials(path)
        best = best_of(trials, metric)
        if best is None:
            got = ", ".join(f"{name}={most:,}" for name, most in self.budget.limits.items())
            raise ConfigError(
                f"budget must allow one trial and the last run of the best setting, got {got}: one "
                "trial was stopped; name another --output"
            )
        self.watcher.begin(f"the best setting, trial {best.number}, with its test scores")
        if (folder := path / BEST).exists():
            delete_run(folder)
        overrides = {**first.changed, **best.settings, "run-dir": str(folder)}
        Training(self.strategy, overrides, self.engine, False, self.watcher).carry_out()
        summary = RunFolder(folder).summary
        if drop_frames(path):
            named = named_frames(first.data, path)
            RunFolder(folder).add_to_summary({"data": named})
            summary["data"] = named
        last = Cost(summary["exchanges"], sum(summary["bytes"].values()))
        spent = _spent(trials) + last
        changed = {name: value for name, value in self.given.items() if name != "strategy"}
        content = {
            "strategy": self.strategy,
            "data": summary["data"],
            "metric": metric,
            "search": self.search,
            "engine": self.engine,
            "trials": len(trials),
            "best": best.number,
            "settings": {**changed, **best.settings},
            "valid": best.score,
            "test": summary["metrics"]["test"],
            "exchanges": spent.exchanges,
            "bytes": spent.n_bytes,
        }
        if self.baselines:
            n_trials = len(_scored(trials))
            self.watcher.begin(f"the baselines, {n_trials} trials each")
            how = self.search, n_trials, metric
            content["baselines"] = tuned_baselines(first, self.given, space, *how)
        RunFolder(path).write_json(SEARCH, content)


def _check(settings: Settings, engine: str, given: Collection[str]) -> None:
    check_method(settings, engine, given)
    if engine not in SIMULATED:
        raise ConfigError(f"--engine must be local or simulation to tune, got {engine}")
    if not settings.valid_fraction:
        raise ConfigError("valid-fraction must be > 0 to tune by the validation rows, got 0.0")
    if not settings.score_test:
        raise ConfigError("score-test must be omitted to tune: the last run alone scores test rows")
    for name, value in (("run-dir", settings.run_dir), ("resume", settings.resume)):
        if value:
            raise ConfigError(f"{name} must be omitted to tune, which has --output, got {value}")


def _of_trial(first: Settings, settings: Mapping[str, Value], path: Path) -> dict[str, Value]:
    return {**first.changed, **settings, "score-test": False, "run-dir": str(path)}


def _trial(
    training: Training, path: Path, number: int, settings: Mapping[str, Value], metric: str
) -> Trial:
    """Run one trial in the folder ``path``."""
    _drop(path)  # of an attempt whose process died
    training.carry_out()
    summary = RunFolder(path).summary
    score = (summary["metrics"].get("valid") or {}).get(metric)
    if score is None:
        rule = f"must leave validation rows that have a {metric}, which decides on the best"
        got = training.given.get("valid-fraction", defaults()["valid-fraction"])
        raise ConfigError(f"valid-fraction {rule}, got {got}")
    n_bytes = sum(summary["bytes"].values())
    cost = summary["exchanges"], n_bytes, summary["seconds"]["train"]
    return Trial(number, "finished", dict(settings), score, *cost)


def _scored(trials: Sequence[Trial]) -> list[Trial]:
    return [one for one in trials if one.score is not None]


def _spent(trials: list[Trial]) -> Cost:
    return sum((Cost(one.exchanges, one.bytes) for one in trials), Cost())


def _dearest(trials: list[Trial]) -> Cost:
    """Most that the last run can cost: any of the finished trials may be the best."""
    costs = (Cost(one.exchanges, one.bytes) for one in _scored(trials))
    return functools.reduce(Cost.largest, costs, Cost())


def _ledger_cost(path: Path) -> Cost:
    """Cost of an unfinished run."""
    ledger = RunFolder(path).ledger
    lines = ledger.read_text().splitlines() if ledger.is_file() else []
    entries = []
    for line in lines:
        with suppress(json.JSONDecodeError):  # the last line of a killed run may be incomplete
            entries.append(json.loads(line))
    steps = {entry["step"] for entry in entries}
    return Cost(len(steps), sum(entry["bytes"] for entry in entries))


def _record(path: Path, trial: Trial, folder: str = CURRENT) -> None:
    """Append a trial's line, and delete its folder."""
    with open_private(path / TRIALS, "a") as file:
        file.write(json.dumps(asdict(trial)) + "\n")
    _drop(path / folder)


def _drop(path: Path) -> None:
    """Delete a trial's folder, and the states of its model at simulated sites."""
    if model_id := model_id_of(path):
        forget_model(model_id)
    if path.exists():
        shutil.rmtree(path)
