"""Which settings a search tries: spaces, and how the next trial is drawn from one.

A draw depends on the seed and on the trials so far alone, so that a search that was interrupted
goes on as if it had not been.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedapp.config import Settings, Value, defaults, load_settings, parse_overrides
from fedapp.errors import ConfigError
from fedapp.names import near, setting_of
from fedapp.packages import check_package
from fedapp.server_app import load_strategy
from strategies.settings import HELD_BACK, ReadsSettings

# What is searched by default, of the settings that a method reads and that are not given.
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
# Settings that name the rows, what they are scored by, or the run are no subject of a search.
NOT_SEARCHED = (
    ReadsSettings.reads
    | HELD_BACK
    | {"partition", "columns", "objective", "eval-metric", "init-model", "base-margin"}
)
SEARCHES = ("random", "optuna")
DIGITS = 4  # significant, of a number drawn: a command that repeats it stays short


@dataclass(frozen=True, slots=True)
class Numbers:
    """Numbers from ``low`` to ``high``, both included; on a logarithmic scale, or whole ones."""

    low: float
    high: float
    is_log: bool = False
    is_whole: bool = False

    @property
    def ends(self) -> tuple[Value, ...]:
        """The smallest and the largest."""
        return self.at(0.0), self.at(1.0)

    def at(self, share: float) -> Value:
        """The number at a share of the way from the lowest to the highest, in [0, 1]."""
        if self.is_whole:
            return int(min(self.low + math.floor(share * (self.high - self.low + 1)), self.high))
        if self.is_log:
            found = self.low * (self.high / self.low) ** share
        else:
            found = self.low + share * (self.high - self.low)
        return self.rounded(found)

    def rounded(self, number: float) -> Value:
        """The number with few digits, between the ends."""
        if self.is_whole:
            return int(number)
        return min(max(float(f"{number:.{DIGITS}g}"), self.low), self.high)


@dataclass(frozen=True, slots=True)
class Choices:
    """One of some values."""

    values: tuple[Value, ...]

    @property
    def ends(self) -> tuple[Value, ...]:
        """All of them."""
        return self.values

    def at(self, share: float) -> Value:
        """The value at a share of the way through them, in [0, 1]."""
        return self.values[min(int(share * len(self.values)), len(self.values) - 1)]

    def rounded(self, value: Value) -> Value:
        """As it is."""
        return value


Domain = Numbers | Choices
Space = Mapping[str, Domain]


@dataclass(frozen=True, slots=True)
class Scored:
    """A trial that counts: settings, and a validation score."""

    settings: Mapping[str, Value]
    score: float


Draw = Callable[[Sequence[Scored]], dict[str, Value]]


def space_of(settings: Settings, given: Mapping[str, Value], asked: Mapping[str, str]) -> Space:
    """What is searched: the method's defaults, without settings that are given, and what is asked.

    Parameters
    ----------
    settings : of the method, to which those of a trial are added.
    given : settings that were not left at their defaults.
    asked : domains by setting, in one of ``FORMS``; they replace default ones.

    Raises
    ------
    ConfigError : a setting that is none, is given too, or cannot be searched; a domain that cannot
        be read; a value in it that breaks the setting's rule.
    """
    read = load_strategy(settings.strategy).settings_read(settings)
    asked = {setting_of(name, defaults(), settings.strategy): asked[name] for name in asked}
    for name in asked:
        if name not in read or name in NOT_SEARCHED:
            known = [one for one in read if one not in NOT_SEARCHED]
            rule = f"space must name settings that {settings.strategy} reads and that decide on no "
            raise ConfigError(f"{rule}rows, got {name}{near(name, known)}")
        if name in given:
            raise ConfigError(f"space must not name a setting that is given too, got {name}")
    usual = {
        name: text for name, text in DEFAULT_SPACE.items() if name in read and name not in given
    }
    space = {name: _domain(name, text) for name, text in {**usual, **asked}.items()}
    if not space:
        rule = "must name a setting, where all of the method's own are given"
        raise ConfigError(f"space {rule}, as in --space max-depth=int:3:8; got none")
    for name, domain in space.items():
        for value in domain.ends:
            tried = load_settings({**given, "strategy": settings.strategy, name: value})
            load_strategy(tried.strategy).check_settings(tried)
    return space


def _domain(name: str, text: str) -> Domain:
    """A domain as it is written.

    Raises
    ------
    ConfigError : it cannot be read.
    """
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
    """Each setting by chance, whatever the trials so far have found."""

    def draw(scored: Sequence[Scored]) -> dict[str, Value]:
        rng = np.random.default_rng([seed, len(scored)])
        return {name: domain.at(float(rng.random())) for name, domain in space.items()}

    return draw


def check_search(search: str) -> None:
    """Hold that there is such a search, and that its package is installed.

    Raises
    ------
    ConfigError : there is none, or it is not; says what to install.
    """
    if search not in SEARCHES:
        raise ConfigError(f"search must be one of {', '.join(SEARCHES)}, got {search!r}")
    if search == "optuna":
        check_package("optuna", "for --search optuna", "tune")


def optuna_draw(space: Space, seed: int, larger_is_better: bool) -> Draw:
    """By Optuna's TPE sampler (Bergstra et al. 2011), whose first ten trials are by chance."""
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
        found = study.ask(distributions).params
        return {name: domain.rounded(found[name]) for name, domain in space.items()}

    return draw


def _distribution(optuna: Any, domain: Domain) -> Any:
    """A domain in Optuna's words."""
    if isinstance(domain, Choices):
        return optuna.distributions.CategoricalDistribution(domain.values)
    if domain.is_whole:
        return optuna.distributions.IntDistribution(int(domain.low), int(domain.high))
    return optuna.distributions.FloatDistribution(domain.low, domain.high, log=domain.is_log)


def drawing(search: str, space: Space, seed: int, larger_is_better: bool) -> Draw:
    """What draws the next trial."""
    if search == "random":
        return random_draw(space, seed)
    return optuna_draw(space, seed, larger_is_better)
