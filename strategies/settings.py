"""Which settings a method reads; each declares its own beside what all like it read."""

from __future__ import annotations

from typing import ClassVar

from fedapp.config import Section, Settings

# General settings by which XGBoost's trees are grown, round after round.
TREE_SETTINGS = frozenset(
    (
        *("max-depth", "eta", "lambda", "alpha", "gamma", "min-child-weight"),
        *("subsample", "colsample-bytree", "max-bin"),
        *("max-cat-to-onehot", "max-cat-threshold"),
    )
)
BOOSTING_SETTINGS = TREE_SETTINGS | {"num-boost-round", "early-stopping-rounds"}


class ReadsSettings:
    """A base of strategies. ``reads`` are the general settings that a class reads beside those of
    its bases; ``round_name`` is what it calls the rounds that it reports."""

    reads: ClassVar[frozenset[str]] = frozenset(
        (
            *("strategy", "data", "label", "id", "weight", "drop-columns", "parties", "seed"),
            *("schema", "header", "decimal", "encoding"),
            *("run-dir", "resume", "start-deadline", "exchange-deadline", "resend-after"),
        )
    )
    round_name: ClassVar[str] = "boosting round"

    @classmethod
    def own_settings(cls, settings: Settings) -> Section | None:
        """The method's own section of the run config, checked; None where it has none."""
        return None

    @classmethod
    def most_rounds(cls, settings: Settings) -> int:
        """Rounds that training takes if nothing stops it early."""
        return settings.num_boost_round

    @classmethod
    def settings_read(cls, settings: Settings) -> tuple[str, ...]:
        """Names of the settings that decide on a run of this method: general ones and its own."""
        general = frozenset().union(*(vars(base).get("reads", ()) for base in cls.__mro__))
        own = settings.sections.get(settings.strategy, {})
        return (*sorted(general), *(f"{settings.strategy}.{name}" for name in own))
