"""Which settings a method reads; each declares its own beside what all like it read."""

from __future__ import annotations

from typing import Any, ClassVar

from fedapp.config import Section, Settings
from fedapp.errors import ConfigError
from fedapp.trees.custom import CUSTOM
from fedapp.trees.objective import AUTO, LOSSES, check_held

# General settings by which XGBoost's trees are grown, round after round.
TREE_SETTINGS = frozenset(
    (
        *("max-depth", "eta", "lambda", "alpha", "gamma", "min-child-weight", "max-delta-step"),
        *("subsample", "colsample-bytree", "colsample-bylevel", "colsample-bynode"),
        *("max-bin", "tweedie-variance-power"),
        *("max-cat-to-onehot", "max-cat-threshold"),
    )
)
BOOSTING_SETTINGS = TREE_SETTINGS | {
    *("num-boost-round", "early-stopping-rounds", "eval-metric", "scale-pos-weight", "preset"),
}
# Those by which rows are held back.
HELD_BACK = frozenset(("test-fraction", "valid-fraction", "fold", "folds", "score-test"))
INIT_MODEL = frozenset(("init-model",))
BASE_MARGIN = frozenset(("base-margin",))
CONSTRAINTS = frozenset(("monotone-constraints", "interaction-constraints"))
# What else can be done, where a method does not read a setting.
WAYS_OUT = {
    "base-margin": "; else the column may be a feature, or excluded with drop-columns",
}
ALL_OBJECTIVES = tuple(name for name in LOSSES if name != CUSTOM)
OR_FUNCTION = (*ALL_OBJECTIVES, CUSTOM)


class ReadsSettings:
    """A base of strategies. ``reads`` are the general settings that a class reads beside those of
    its bases, ``sections`` those tables of the run config that are not its own alone;
    ``round_name`` is what it calls the rounds that it reports; ``objectives`` are those that it can
    train."""

    reads: ClassVar[frozenset[str]] = frozenset(
        (
            *("strategy", "data", "label", "id", "weight", "drop-columns", "parties", "seed"),
            *("schema", "header", "decimal", "encoding", "positive-label", "missing-label"),
            *("run-dir", "resume", "log", "start-deadline", "exchange-deadline", "resend-after"),
        )
    )
    round_name: ClassVar[str] = "boosting round"
    objectives: ClassVar[tuple[str, ...]] = ALL_OBJECTIVES
    sections: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def check_settings(cls, settings: Settings) -> None:
        """Hold a run's settings against what the method can do, its own section too.

        Raises
        ------
        ConfigError : an objective that it cannot train, or a setting of its own that breaks its
            rule.
        """
        if settings.objective not in (AUTO, *cls.objectives):
            known = ", ".join((AUTO, *cls.objectives))
            rule = f"must be one of {known} for {settings.strategy}"
            got = "a function" if settings.objective == CUSTOM else settings.objective
            raise ConfigError(f"objective {rule}, got {got}")
        try:
            check_held(settings.objective)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        cls.own_settings(settings)

    @classmethod
    def own_settings(cls, settings: Settings) -> Section | None:
        """The method's own section of the run config, checked; None where it has none."""
        return None

    @classmethod
    def most_rounds(cls, settings: Settings) -> int:
        """Rounds that training takes if nothing stops it early."""
        return settings.num_boost_round

    @classmethod
    def planned(cls, settings: Settings) -> dict[str, Any]:
        """Fields of the run's ``Plan`` that follow from its settings alone."""
        read = set(cls.settings_read(settings))
        names = {"max_depth", "subsample", "max_bin"}
        general = {one: getattr(settings, one) for one in names if one.replace("_", "-") in read}
        return {"rounds": cls.most_rounds(settings), **general}

    @classmethod
    def settings_read(cls, settings: Settings) -> tuple[str, ...]:
        """Names of the settings that decide on a run of this method: general ones and its own."""
        general = frozenset().union(*(vars(base).get("reads", ()) for base in cls.__mro__))
        return (
            *sorted(general),
            *(
                f"{section}.{name}"
                for section in (settings.strategy, *sorted(cls.sections))
                for name in settings.sections.get(section, {})
            ),
        )
