"""The space of a search for settings, and how trials are drawn from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedapp.arguments import parse_overrides
from fedapp.errors import ConfigError, check_package
from fedapp.known_names import setting_hint, setting_of
from fedapp.report.summary import Trial
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

# A draw depends only on the seed and on the trials so far, so that an interrupted search continues
# as if it had not been interrupted.
Space = Mapping[str, Any]  # a distribution of Optuna by setting
Draw = Callable[[Sequence[Trial]], dict[str, Value]]  # from the trials that have a score


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


def trial_draw(search: str, space: Space, seed: int, larger_is_better: bool) -> Draw:
    """Draw with Optuna, at random or by its TPE sampler (Bergstra et al. 2011).

    The sampler's first ten trials are random too.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = getattr(optuna.samplers, SEARCHES[search])
    direction = optuna.study.StudyDirection(2 if larger_is_better else 1)

    def draw(scored: Sequence[Trial]) -> dict[str, Value]:
        of_draw = sampler(seed=(seed + len(scored)) % 2**32)
        study = optuna.create_study(sampler=of_draw, direction=direction)
        for trial in scored:
            tried = optuna.trial.create_trial(
                params=trial.settings, distributions=dict(space), value=trial.score
            )
            study.add_trial(tried)
        drawn = study.ask(dict(space)).params
        return {name: _rounded(drawn[name], values) for name, values in space.items()}

    return draw


def _rounded(value: Value, domain: Any) -> Value:
    """A drawn float with ``DIGITS`` digits, within its domain; all others as they are."""
    if not isinstance(value, float) or hasattr(domain, "choices"):
        return value
    return float(min(max(float(f"{value:.{DIGITS}g}"), domain.low), domain.high))
