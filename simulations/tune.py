"""The best settings of a method, by the scores of the validation rows.

Trials hold the test rows back and do not look at them (``score-test=false``). When the budget is
spent the best setting is run once more, and that run alone scores them. A line of
``trials.jsonl`` is a trial; a search that was interrupted goes on after the last one.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from fedapp.config import Settings, Value, load_settings, settings_named
from fedapp.engines import SIMULATED
from fedapp.errors import ConfigError, StoppedError
from fedapp.frames import drop_frames, named_frames
from fedapp.home import open_private
from fedapp.housekeeping import delete_run, forget_model
from fedapp.metrics import larger_is_better
from fedapp.run_folder import RunFolder
from fedapp.session import Training, check_method, check_tables
from fedapp.studies import BEST, SEARCH, TRIALS, Trial, best_of, read_trials
from fedapp.watch import OnRound, RoundInfo, Silent, Watcher
from simulations.comparable import claim_folder, comparison_folder
from simulations.rows import settled
from simulations.search import Draw, Scored, Space, check_search, drawing, space_of

USUAL_RUNS = 20
CURRENT = "trial"  # the folder of the trial that goes on


@dataclass(frozen=True, slots=True)
class Cost:
    """What runs have taken: exchanges, and bytes both ways."""

    exchanges: int = 0
    n_bytes: int = 0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.exchanges + other.exchanges, self.n_bytes + other.n_bytes)

    def largest(self, other: Cost) -> Cost:
        """The larger of each."""
        return Cost(max(self.exchanges, other.exchanges), max(self.n_bytes, other.n_bytes))


@dataclass(frozen=True, slots=True)
class Budget:
    """What a search may take.

    Parameters
    ----------
    runs : trials; the last run of the best setting comes on top.
    exchanges, n_bytes : of all trials and the last run; None: any number.
    """

    runs: int | None = None
    exchanges: int | None = None
    n_bytes: int | None = None

    def __post_init__(self) -> None:
        for name, most in (("runs", self.runs), ("exchanges", self.exchanges)):
            if most is not None and most < 1:
                raise ConfigError(f"{name} must be >= 1, got {most}")
        if self.n_bytes is not None and self.n_bytes < 1:
            raise ConfigError(f"bytes must be >= 1, got {self.n_bytes}")

    @property
    def most_runs(self) -> int | None:
        """Trials at most; a usual number where nothing is said of anything."""
        is_open = self.exchanges is None and self.n_bytes is None
        return USUAL_RUNS if self.runs is None and is_open else self.runs

    def holds(self, cost: Cost) -> bool:
        """Whether it is enough for that."""
        pairs = ((self.exchanges, cost.exchanges), (self.n_bytes, cost.n_bytes))
        return all(most is None or spent <= most for most, spent in pairs)


@dataclass(slots=True)
class Tuning:
    """A search from its settings to the last run of the best one.

    Parameters
    ----------
    strategy, given, engine, watcher : of each run, as for a ``Training``.
    asked : domains of settings by their names, see ``space_of``.
    search : random or optuna.
    budget : of all.
    output : folder of the search; None: one below runs/ that follows from the table and settings.
    folder : the same, once it is there.
    """

    strategy: str
    given: Mapping[str, Value]
    asked: Mapping[str, str] = field(default_factory=dict)
    search: str = "random"
    budget: Budget = field(default_factory=Budget)
    engine: str = "local"
    watcher: Watcher = field(default_factory=Silent)
    output: Path | None = None
    folder: RunFolder | None = None

    def carry_out(self) -> RunFolder:
        """Run trials until the budget is spent, then the best setting with its test scores.

        Raises
        ------
        ConfigError, DataError : a setting or a table breaks a rule; before anything is started.
            Or the budget is too small for one trial and the last run.
        FedappError : a run cannot go on.
        """
        self.watcher.begin("reading the settings")
        self.given = settings_named(self.given, self.strategy)
        first = load_settings({**self.given, "strategy": self.strategy})
        _check(first, self.engine, self.given)
        check_search(self.search)
        space = space_of(first, self.given, self.asked)
        check_tables(first, self.engine, self.watcher)
        first = settled(first)
        metric = first.watched_metric
        draw = drawing(self.search, space, first.seed, larger_is_better(metric))
        self.folder = RunFolder(self._claimed(first, space))
        with self.folder.written():
            if (self.folder.path / SEARCH).is_file():
                rule = "finished before: its test rows have been looked at"
                self.watcher.tell(f"{rule}; --output FOLDER names another for a new search")
                return self.folder
            self._try_all(first, draw, metric)
            self._finish(first, metric)
        return self.folder

    def _claimed(self, first: Settings, space: Space) -> Path:
        """The folder, which holds this search or none."""
        more = {
            "strategy": self.strategy,
            "seed": first.seed,
            "search": self.search,
            "space": {name: asdict(domain) for name, domain in sorted(space.items())},
        }
        more = json.loads(json.dumps(more))
        path = (self.output or comparison_folder(first, self.engine, "tune", more)).resolve()
        claim_folder(path, first, self.engine, more)
        return path

    def _try_all(self, first: Settings, draw: Draw, metric: str) -> None:
        """Trials, until the budget is spent."""
        assert self.folder is not None
        path = self.folder.path
        self._note_interrupted(path)
        while True:
            trials = read_trials(path)
            scored = [Scored(one.settings, one.score) for one in trials if one.score is not None]
            if any(one.state == "stopped" for one in trials) or not self._has_room(trials):
                return
            number = len(trials) + 1
            settings = draw(scored)
            told = ", ".join(f"{name}={value}" for name, value in settings.items())
            self.watcher.begin(f"trial {number}: {told}")
            trial = self._try(first, number, settings, metric, trials)
            with open_private(path / TRIALS, "a") as file:
                file.write(json.dumps(asdict(trial)) + "\n")
            _drop(path / CURRENT)
            score = "stopped by the budget" if trial.score is None else f"{trial.score:.4f}"
            self.watcher.tell(f"trial {number}: valid {metric} {score}")

    def _has_room(self, trials: list[Trial]) -> bool:
        """Whether another trial may begin: there is room for one as cheap as any, and the last."""
        scored = [one for one in trials if one.score is not None]
        if self.budget.most_runs is not None and len(scored) >= self.budget.most_runs:
            return False
        if not scored:
            return True
        cheapest = min(scored, key=lambda one: (one.exchanges, one.bytes))
        next_cost = Cost(cheapest.exchanges, cheapest.bytes)
        return self.budget.holds(_spent(trials) + next_cost + _dearest(scored))

    def _try(
        self,
        first: Settings,
        number: int,
        settings: Mapping[str, Value],
        metric: str,
        trials: list[Trial],
    ) -> Trial:
        """One trial, which is stopped before it would use what the last run needs."""
        assert self.folder is not None
        path = self.folder.path / CURRENT
        given = {**first.changed, **settings, "score-test": False, "run-dir": str(path)}
        how = self.engine, False, self.watcher, self._guard(trials)
        try:
            Training(self.strategy, given, *how, with_page=False).carry_out()
        except StoppedError:
            used = _ledger_cost(path)
            return Trial(number, "stopped", dict(settings), None, used.exchanges, used.n_bytes)
        summary = json.loads((path / "summary.json").read_text())
        score = (summary["metrics"].get("valid") or {}).get(metric)
        if score is None:
            rule = f"must leave validation rows that have a {metric}, which decides on the best"
            raise ConfigError(f"valid-fraction {rule}, got {first.valid_fraction}")
        n_bytes = sum(summary["bytes"].values())
        cost = summary["exchanges"], n_bytes, summary["seconds"]["train"]
        return Trial(number, "finished", dict(settings), score, *cost)

    def _guard(self, trials: list[Trial]) -> OnRound | None:
        """What stops a trial after a round, where the next one might pass the budget."""
        if self.budget.exchanges is None and self.budget.n_bytes is None:
            return None
        before = _spent(trials)
        kept = _dearest([one for one in trials if one.score is not None])
        now, step = Cost(), Cost()

        def after(info: RoundInfo) -> bool:
            nonlocal now, step
            found = Cost(info["exchanges"], now.n_bytes + sum(info["bytes"].values()))
            last = Cost(found.exchanges - now.exchanges, found.n_bytes - now.n_bytes)
            now, step = found, step.largest(last)
            if info["round"] >= info["rounds"]:
                return True  # nothing is left to be spared
            following = now + step
            return self.budget.holds(before + following + kept.largest(following))

        return after

    def _note_interrupted(self, path: Path) -> None:
        """Count what a trial has taken that another command began, and clear its folder."""
        current = path / CURRENT
        if not current.exists():
            return
        used, trials = _ledger_cost(current), read_trials(path)
        if used.exchanges and not (current / "summary.json").exists():
            trial = Trial(len(trials) + 1, "interrupted", {}, None, used.exchanges, used.n_bytes)
            with open_private(path / TRIALS, "a") as file:
                file.write(json.dumps(asdict(trial)) + "\n")
        _drop(current)

    def _finish(self, first: Settings, metric: str) -> None:
        """Run the best setting once more, with its test scores, and write what was found."""
        assert self.folder is not None
        path = self.folder.path
        trials = read_trials(path)
        best = best_of(trials, metric)
        if best is None:
            limits = {"runs": self.budget.runs, "exchanges": self.budget.exchanges}
            limits["bytes"] = self.budget.n_bytes
            got = ", ".join(f"{name}={most:,}" for name, most in limits.items() if most is not None)
            raise ConfigError(
                f"budget must allow one trial and the last run of the best setting, got {got}: one "
                "trial was stopped; name another --output"
            )
        self.watcher.begin(f"the best setting, trial {best.number}, with its test scores")
        if (folder := path / BEST).exists():
            delete_run(folder)
        given = {**first.changed, **best.settings, "run-dir": str(folder)}
        Training(self.strategy, given, self.engine, False, self.watcher).carry_out()
        summary = json.loads((folder / "summary.json").read_text())
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
        RunFolder(path).write_json(SEARCH, content)


def _check(settings: Settings, engine: str, given: Collection[str]) -> None:
    """Hold that a search makes sense, and that it can be made here.

    Raises
    ------
    ConfigError : it does not.
    """
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


def _spent(trials: list[Trial]) -> Cost:
    return sum((Cost(one.exchanges, one.bytes) for one in trials), Cost())


def _dearest(trials: list[Trial]) -> Cost:
    """What the last run takes at most: any of the trials may be the best."""
    found = Cost()
    for one in trials:
        found = found.largest(Cost(one.exchanges, one.bytes))
    return found


def _ledger_cost(path: Path) -> Cost:
    """What a run has taken that did not finish."""
    ledger = RunFolder(path).ledger
    lines = ledger.read_text().splitlines() if ledger.is_file() else []
    entries = []
    for line in lines:
        with suppress(json.JSONDecodeError):  # the last one, of a run that was killed
            entries.append(json.loads(line))
    steps = {entry["step"] for entry in entries}
    return Cost(len(steps), sum(entry["bytes"] for entry in entries))


def _drop(path: Path) -> None:
    """Delete a trial: its folder, and what simulated sites keep of its model."""
    model_id = ""
    for name in ("summary.json", "checkpoint.json"):
        if (path / name).is_file():
            model_id = model_id or json.loads((path / name).read_text()).get("model_id", "")
    if model_id:
        forget_model(model_id)
    if path.exists():
        shutil.rmtree(path)
