"""The space of a search for settings, its study in Optuna, and how trials are drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedapp.arguments import parse_overrides
from fedapp.errors import ConfigError, check_package
from fedapp.home import open_private, write_atomically
from fedapp.known_names import setting_hint, setting_of
from fedapp.settings import Settings, Value, defaults, load_settings
from strategies.method import SPLIT_SETTINGS, TreeStrategy
from strategies.run import load_strategy

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
DIGITS = 4  # significant ones of a drawn number, so that the command to repeat it stays short

STUDY = "study.log"  # the trials of a search, in Optuna's journal
NUMBER = "number"  # attribute of a trial: its number in the search, from 1
Space = Mapping[str, Any]  # a distribution of Optuna by setting


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


def finished_trials(study: Any) -> list[Any]:
    """Trials that have a score, by their numbers in the search."""
    from optuna.trial import TrialState

    trials = study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])
    return sorted(trials, key=lambda trial: int(trial.user_attrs[NUMBER]))


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


def settings_of_trial(trial: Any) -> dict[str, Value]:
    """A trial's settings; floats have ``DIGITS`` digits and are within their domains."""
    return {name: _rounded(trial.params[name], trial.distributions[name]) for name in trial.params}


def _rounded(value: Value, domain: Any) -> Value:
    """A drawn float with ``DIGITS`` digits, within its domain; all others as they are."""
    if not isinstance(value, float) or hasattr(domain, "choices"):
        return value
    return float(min(max(float(f"{value:.{DIGITS}g}"), domain.low), domain.high))
