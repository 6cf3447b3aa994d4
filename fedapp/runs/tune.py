"""Search for the best settings of a method, by the scores of the validation rows.

Trials do not score the test rows (``score-test=false``). When the budget is spent, the best
settings are run once more, and only that run scores them. ``trials.jsonl`` has a line for each
trial; an interrupted search continues after the last one.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.data.datasets import drop_frames, named_frames
from fedapp.errors import ConfigError, StoppedError
from fedapp.home import open_private
from fedapp.metrics import larger_is_better
from fedapp.report.summary import Trial, metric_of
from fedapp.run_folder import OnRound, RoundInfo, RunFolder, Silent, Watcher
from fedapp.runs.clean import SEARCH, delete_run, forget_model, model_id_of
from fedapp.runs.cluster import carried_out, check_on
from fedapp.runs.run_groups import BEST, TRIALS, best_of, read_trials
from fedapp.runs.search_space import Draw, Space, check_search, space_of, trial_draw
from fedapp.runs.series import Series, default_folder
from fedapp.runs.session import Training, check_method, check_tables
from fedapp.runs.set_by_command import check_set_by_command
from fedapp.runs.superlinks import SIMULATED
from fedapp.runs.tables import resolve_objective, table_files
from fedapp.runs.tuned_baselines import tuned_baselines
from fedapp.settings import Settings, Value, defaults, load_settings, settings_named

USUAL_RUNS = 20
CURRENT = "trial"  # folder of the running trial
Cost = npt.NDArray[np.int64]  # exchanges, and bytes both ways


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of a search; None: no limit."""

    runs: int | None = None  # trials; the last run of the best settings is not counted
    exchanges: int | None = None  # of all trials and the last run
    bytes: int | None = None  # likewise

    def __post_init__(self) -> None:
        for name, most in self.limits.items():
            if most < 1:
                raise ConfigError(f"{name} must be >= 1, got {most}")

    @property
    def limits(self) -> dict[str, int]:
        """The limits that are set, by their names."""
        return {name: most for name, most in asdict(self).items() if most is not None}

    @property
    def most_runs(self) -> float:
        """Most trials; ``USUAL_RUNS`` if there is no limit at all."""
        return self.limits.get("runs", math.inf if self.limits else USUAL_RUNS)

    def allows(self, cost: Cost) -> bool:
        """Whether a cost is within the limits."""
        return bool((cost <= (self.exchanges or math.inf, self.bytes or math.inf)).all())


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
        check_set_by_command("tune", self.given)
        first = load_settings({**self.given, "strategy": self.strategy})
        _check(first, self.engine, self.given)
        check_search(self.search)
        check_on(self.on, self.engine)
        if self.on and (self.search != "random" or {*self.budget.limits} - {"runs"}):
            rule = "must be omitted with search=optuna or a budget of exchanges or bytes"
            raise ConfigError(f"on {rule}, where a trial follows from those before, got {self.on}")
        space = space_of(first, self.given, self.asked)
        first = resolve_objective(check_tables(first, self.engine, self.watcher))
        draw = trial_draw(self.search, space, first.seed, larger_is_better(first.watched_metric))
        folder = RunFolder(self._claimed(first, space))
        with folder.written():
            if (folder.path / SEARCH).is_file():
                rule = "finished before: its test rows have been looked at"
                self.watcher.tell(f"{rule}; --output FOLDER names another for a new search")
                return folder
            (self._try_all_on_ray if self.on else self._try_all)(folder.path, first, draw)
            self._finish(folder.path, first, space)
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

    def _try_all(self, path: Path, first: Settings, draw: Draw) -> None:
        _record_interrupted(path)
        while self._has_room(trials := read_trials(path)):
            number, drawn = len(trials) + 1, draw(_scored(trials))
            text = ", ".join(f"{name}={value}" for name, value in drawn.items())
            self.watcher.begin(f"trial {number}: {text}")
            trial = self._try(path / CURRENT, first, number, drawn, trials)
            _record(path, trial)
            score = "stopped by the budget" if trial.score is None else f"{trial.score:.4f}"
            self.watcher.tell(f"trial {number}: valid {first.watched_metric} {score}")

    def _try_all_on_ray(self, path: Path, first: Settings, draw: Draw) -> None:
        """The same trials as Ray tasks; recorded in their order, with those before."""
        trials, calls = read_trials(path), dict[str, Callable[[], Trial]]()
        planned = _scored(trials)  # a random draw follows from their number only
        while len(planned) < self.budget.most_runs:
            number = len(trials) + len(calls) + 1
            trial = Trial(number, "finished", draw(planned), 0.0, 0, 0, 0.0)
            planned.append(trial)
            training = _training(first, trial.settings, path / f"{CURRENT}-{number}")
            calls[f"trial {number}"] = partial(_trial, training, number, trial.settings)
        done = {}
        for trial in carried_out(calls, path, table_files(first), self.watcher):
            done[trial.number] = trial
            while (number := len(read_trials(path)) + 1) in done:
                _record(path, done[number], f"{CURRENT}-{number}")

    def _has_room(self, trials: list[Trial]) -> bool:
        """Whether the budget allows another trial, as cheap as the cheapest, and the last run."""
        scored = _scored(trials)
        is_stopped = any(trial.state == "stopped" for trial in trials)
        if is_stopped or len(scored) >= self.budget.most_runs:
            return False
        if not scored:
            return True  # the first shows what a trial costs
        cheapest = min(_costs(scored).tolist())
        return self.budget.allows(_spent(trials) + cheapest + _dearest(trials))

    def _try(
        self,
        path: Path,
        first: Settings,
        number: int,
        drawn: Mapping[str, Value],
        trials: list[Trial],
    ) -> Trial:
        """Run one trial; it is stopped before it uses what the last run needs."""
        how = {"engine": self.engine, "watcher": self.watcher, "on_round": self._guard(trials)}
        try:
            return _trial(_training(first, drawn, path, **how), number, drawn)
        except StoppedError:
            return Trial(number, "stopped", dict(drawn), None, *_ledger_cost(path))

    def _guard(self, trials: list[Trial]) -> OnRound | None:
        """A callback that stops a trial if the next round might exceed the budget."""
        if not {"exchanges", "bytes"} & {*self.budget.limits}:
            return None
        before, reserved = _spent(trials), _dearest(trials)
        now = step = _costs([]).sum(axis=0)

        def after(info: RoundInfo) -> bool:
            nonlocal now, step
            spent = np.array([info["exchanges"], now[1] + sum(info["bytes"].values())])
            now, step = spent, np.maximum(step, spent - now)
            # This trial may become the best one: the last run would then cost as much.
            most = before + now + step + np.maximum(reserved, now + step)
            return info["round"] >= info["rounds"] or self.budget.allows(most)

        return after

    def _finish(self, path: Path, first: Settings, space: Space) -> None:
        """Run the best settings once more, with test scores, and write the summary."""
        trials, metric = read_trials(path), first.watched_metric
        best = best_of(trials, metric)
        if best is None:
            got = ", ".join(f"{name}={most:,}" for name, most in self.budget.limits.items())
            rule = "must allow one trial and the last run of the best setting"
            way = "one trial was stopped; name another --output"
            raise ConfigError(f"budget {rule}, got {got}: {way}")
        self.watcher.begin(f"the best setting, trial {best.number}, with its test scores")
        if (folder := RunFolder(path / BEST)).path.exists():
            delete_run(folder.path)
        overrides = {**_trained(first), **best.settings, "run-dir": str(folder.path)}
        Training(self.strategy, overrides, self.engine, False, self.watcher).carry_out()
        if drop_frames(path):
            folder.add_to_summary({"data": named_frames(first.data, path)})
        summary = folder.summary
        last = summary["exchanges"], sum(summary["bytes"].values())
        exchanges, n_bytes = (_spent(trials) + last).tolist()
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
            "exchanges": exchanges,
            "bytes": n_bytes,
        }
        if self.baselines:
            n_trials = len(_scored(trials))
            self.watcher.begin(f"the baselines, {n_trials} trials each")
            content["baselines"] = tuned_baselines(
                first, self.given, space, self.search, n_trials, metric
            )
        RunFolder(path).write_json(SEARCH, content)


def _check(settings: Settings, engine: str, given: Collection[str]) -> None:
    check_method(settings, engine, given)
    if engine not in SIMULATED:
        raise ConfigError(f"--engine must be local or simulation to tune, got {engine}")
    if not settings.valid_fraction:
        raise ConfigError("valid-fraction must be > 0 to tune by the validation rows, got 0.0")


def _trained(first: Settings) -> dict[str, Value]:
    """Changed settings of a run, beside its method."""
    return {name: value for name, value in first.changed.items() if name != "strategy"}


def _training(first: Settings, drawn: Mapping[str, Value], path: Path, **how: Any) -> Training:
    """A run of drawn settings in the folder ``path``, without test scores and page."""
    settings = {**_trained(first), **drawn, "score-test": False, "run-dir": str(path)}
    return Training(first.strategy, settings, with_page=False, **how)


def _trial(training: Training, number: int, drawn: Mapping[str, Value]) -> Trial:
    """Run one trial."""
    folder = RunFolder(Path(training.given["run-dir"]))
    _drop(folder.path)  # of an attempt whose process died
    training.carry_out()
    summary = folder.summary
    metric = metric_of(summary)
    score = (summary["metrics"].get("valid") or {}).get(metric)
    if score is None:
        rule = f"must leave validation rows that have a {metric}, which decides on the best"
        name = "valid-from" if training.given.get("valid-from") else "valid-fraction"
        raise ConfigError(f"{name} {rule}, got {training.given.get(name, defaults()[name])}")
    return Trial(
        number,
        "finished",
        dict(drawn),
        score,
        summary["exchanges"],
        bytes=sum(summary["bytes"].values()),
        seconds=summary["seconds"]["train"],
    )


def _scored(trials: Sequence[Trial]) -> list[Trial]:
    return [trial for trial in trials if trial.score is not None]


def _costs(trials: Sequence[Trial]) -> Cost:
    """Cost of each trial, shape (n_trials, 2)."""
    return np.array([(trial.exchanges, trial.bytes) for trial in trials], np.int64).reshape(-1, 2)


def _spent(trials: Sequence[Trial]) -> Cost:
    return np.asarray(_costs(trials).sum(axis=0))


def _dearest(trials: Sequence[Trial]) -> Cost:
    """Most that the last run can cost: any of the finished trials may be the best."""
    return np.asarray(_costs(_scored(trials)).max(axis=0, initial=0))


def _ledger_cost(path: Path) -> tuple[int, int]:
    """Exchanges and bytes of an unfinished run."""
    ledger, entries = RunFolder(path).ledger, []
    for line in ledger.read_text().splitlines() if ledger.is_file() else ():
        with suppress(json.JSONDecodeError):  # the last line of a killed run may be incomplete
            entries.append(json.loads(line))
    return len({entry["step"] for entry in entries}), sum(entry["bytes"] for entry in entries)


def _record_interrupted(path: Path) -> None:
    """Record the cost of a trial of an interrupted command, and delete its folder."""
    current = path / CURRENT
    used = _ledger_cost(current)
    if used[0] and not (current / "summary.json").exists():
        _record(path, Trial(len(read_trials(path)) + 1, "interrupted", {}, None, *used))
    else:
        _drop(current)


def _record(path: Path, trial: Trial, folder: str = CURRENT) -> None:
    """Append a trial's line, and delete its folder."""
    with open_private(path / TRIALS, "a") as file:
        file.write(json.dumps(asdict(trial)) + "\n")
    _drop(path / folder)


def _drop(path: Path) -> None:
    """Delete a trial's folder, and the states of its model at simulated sites."""
    if path.exists():
        if model_id := model_id_of(path):
            forget_model(model_id)
        shutil.rmtree(path)
