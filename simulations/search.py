"""Spaces of a search for settings, and how the next trial is drawn.

A draw depends only on the seed and on the trials so far, so that an interrupted search continues
as if it had not been interrupted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedapp.errors import ConfigError, did_you_mean, setting_of
from fedapp.packages import check_package
from fedapp.server_app import load_strategy
from fedapp.settings import Settings, Value, defaults, load_settings, parse_overrides
from strategies.settings import SPLIT_SETTINGS, ReadsSettings

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
}
FORMS = "log:LOW:HIGH, uniform:LOW:HIGH, int:LOW:HIGH, or values separated by commas"
# Settings of the rows, the scores or the run cannot be searched.
NOT_SEARCHED = (
    ReadsSettings.reads
    | SPLIT_SETTINGS
    | {"partition", "columns", "objective", "eval-metric", "init-model", "base-margin"}
)
SEARCHES = ("random", "optuna")
DIGITS = 4  # significant ones of a drawn number, so that the command to repeat it stays short


@dataclass(frozen=True, slots=True)
class Numbers:
    """Numbers from ``low`` to ``high``, both included; log-scaled, or integers."""

    low: float
    high: float
    is_log: bool = False
    is_whole: bool = False

    @property
    def ends(self) -> tuple[Value, ...]:
        """Smallest and largest number."""
        return self.at(0.0), self.at(1.0)

    def at(self, share: float) -> Value:
        """Map a share in [0, 1] to a number."""
        if self.is_whole:
            return int(min(self.low + math.floor(share * (self.high - self.low + 1)), self.high))
        if self.is_log:
            return self.rounded(self.low * (self.high / self.low) ** share)
        return self.rounded(self.low + share * (self.high - self.low))

    def rounded(self, number: float) -> Value:
        """Round to ``DIGITS`` digits, within the ends."""
        if self.is_whole:
            return int(number)
        return min(max(float(f"{number:.{DIGITS}g}"), self.low), self.high)


@dataclass(frozen=True, slots=True)
class Choices:
    """A list of values."""

    values: tuple[Value, ...]

    @property
    def ends(self) -> tuple[Value, ...]:
        """All values."""
        return self.values

    def at(self, share: float) -> Value:
        """Map a share in [0, 1] to a value."""
        return self.values[min(int(share * len(self.values)), len(self.values) - 1)]

    def rounded(self, value: Value) -> Value:
        """The same value."""
        return value


Domain = Numbers | Choices
Space = Mapping[str, Domain]


@dataclass(frozen=True, slots=True)
class Scored:
    """Settings and validation score of a finished trial."""

    settings: Mapping[str, Value]
    score: float


Draw = Callable[[Sequence[Scored]], dict[str, Value]]


def space_of(settings: Settings, given: Mapping[str, Value], asked: Mapping[str, str]) -> Space:
    """The space of a search: the method's default without given settings, and what is asked for.

    ``asked`` has domains in one of ``FORMS``; they replace default ones.

    Raises
    ------
    ConfigError : a setting is unknown or cannot be searched; a domain or a value in it is invalid.
    """
    read = load_strategy(settings.strategy).settings_read(settings)
    asked = {setting_of(name, defaults(), settings.strategy): asked[name] for name in asked}
    for name in asked:
        if name not in read or name in NOT_SEARCHED:
            searchable = [one for one in read if one not in NOT_SEARCHED]
            rule = f"space must name settings that {settings.strategy} reads and that decide on no "
            raise ConfigError(f"{rule}rows, got {name}{did_you_mean(name, searchable)}")
        if name in given:
            raise ConfigError(f"space must not name a setting that is given too, got {name}")
    default_space = {
        name: text for name, text in DEFAULT_SPACE.items() if name in read and name not in given
    }
    space = {name: _domain(name, text) for name, text in {**default_space, **asked}.items()}
    if not space:
        rule = "must name a setting, where all of the method's own are given"
        raise ConfigError(f"space {rule}, as in --space max-depth=int:3:8; got none")
    for name, domain in space.items():
        for value in domain.ends:
            tried = load_settings({**given, "strategy": settings.strategy, name: value})
            load_strategy(tried.strategy).check_settings(tried)
    return space


def _domain(name: str, text: str) -> Domain:
    kind, *bounds = text.split(":")
    if kind not in ("log", "uniform", "int") or not bounds:
        values = tuple(parse_overrides([f"{name}={one.strip()}"])[name] for one in text.split(","))
        if not text.strip() or len(set(values)) < len(values):
            raise ConfigError(f"space of {name} must be {FORMS}, got {text!r}")
        return Choices(values)
    try:
        low, high = map(int if kind == "int" else float, bounds)
    except ValueError:
        raise ConfigError(f"space of {name} must be {FORMS}, got {text!r}") from None
    if not (low < high < math.inf) or (kind == "log" and low <= 0):
        least = "0 < LOW < HIGH" if kind == "log" else "LOW < HIGH"
        raise ConfigError(f"space of {name} must have {least}, got {text!r}")
    return Numbers(low, high, is_log=kind == "log", is_whole=kind == "int")


def random_draw(space: Space, seed: int) -> Draw:
    """Draw each setting at random, independent of earlier trials."""

    def draw(scored: Sequence[Scored]) -> dict[str, Value]:
        rng = np.random.default_rng([seed, len(scored)])
        return {name: domain.at(float(rng.random())) for name, domain in space.items()}

    return draw


def check_search(search: str) -> None:
    """Raise ConfigError if a search is unknown, or its package is not installed."""
    if search not in SEARCHES:
        raise ConfigError(f"search must be one of {', '.join(SEARCHES)}, got {search!r}")
    if search == "optuna":
        check_package("optuna", "for --search optuna", "tune")


def optuna_draw(space: Space, seed: int, larger_is_better: bool) -> Draw:
    """Draw with Optuna's TPE sampler (Bergstra et al. 2011); the first ten trials are random."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    distributions = {name: _distribution(optuna, domain) for name, domain in space.items()}
    direction = optuna.study.StudyDirection(2 if larger_is_better else 1)

    def draw(scored: Sequence[Scored]) -> dict[str, Value]:
        sampler = optuna.samplers.TPESampler(seed=(seed + len(scored)) % 2**32)
        study = optuna.create_study(sampler=sampler, direction=direction)
        study.add_trials(
            [
                optuna.trial.create_trial(
                    params=dict(each.settings), distributions=distributions, value=each.score
                )
                for each in scored
            ]
        )
        drawn = study.ask(distributions).params
        return {name: domain.rounded(drawn[name]) for name, domain in space.items()}

    return draw


def _distribution(optuna: Any, domain: Domain) -> Any:
    if isinstance(domain, Choices):
        return optuna.distributions.CategoricalDistribution(domain.values)
    if domain.is_whole:
        return optuna.distributions.IntDistribution(int(domain.low), int(domain.high))
    return optuna.distributions.FloatDistribution(domain.low, domain.high, log=domain.is_log)


def drawing(search: str, space: Space, seed: int, larger_is_better: bool) -> Draw:
    """The function that draws the next trial."""
    if search == "random":
        return random_draw(space, seed)
    return optuna_draw(space, seed, larger_is_better)
