"""Which settings a method reads; each declares its own beside what all like it read."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import Parameter, Signature
from typing import Any, ClassVar, Self

from fedapp.config import Section, Settings, Value, defaults, flatten, load_settings
from fedapp.errors import ConfigError
from fedapp.keywords import python_name, settings_of, told_in_python
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
# What a strategy's settings call the table where they name none.
OWN_TABLES = "the parties' own tables"
# Settings of the app, and of tables, which the parties read: not for a strategy in another app.
OF_APP = frozenset(("strategy", "run-dir", "resume", "log"))
OF_TABLES = frozenset(
    (
        *("data", "label", "id", "weight", "drop-columns", "schema", "header", "decimal"),
        *("encoding", "missing-label", "base-margin", "partition", "columns", "least-bin-rows"),
        *("share-column-names", "allow-export"),
    )
)
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
    """A base of strategies. ``method`` is its name, ``reads`` are the general settings that a class
    reads beside those of its bases, ``sections`` those tables of the run config that are not its
    own alone; ``round_name`` is what it calls the rounds that it reports; ``objectives`` are those
    that it can train."""

    method: ClassVar[str] = ""
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

    def __init_subclass__(cls) -> None:
        """Show the settings and their defaults as keyword arguments."""
        super().__init_subclass__()
        if cls.method:
            shown = {}
            for name, usual in defaults().items():
                if cls._reads(name) and name not in OF_APP | OF_TABLES:
                    word = cls._keyword(name)
                    shown[word] = Parameter(word, Parameter.KEYWORD_ONLY, default=usual)
            cls.__signature__ = Signature(list(shown.values()))  # type: ignore[attr-defined]

    @classmethod
    def _reads(cls, name: str) -> bool:
        section, dot, _ = name.partition(".")
        if dot:
            return section in {cls.method, *cls.sections}
        return any(name in vars(base).get("reads", ()) for base in cls.__mro__)

    @classmethod
    def _keyword(cls, name: str) -> str:
        return python_name(name.rpartition(".")[2])

    @classmethod
    def of_run(cls, settings: Settings) -> Self:
        """A strategy with those of the app's settings that it reads."""
        given = flatten(settings.as_config())
        return cls(
            **{name: given[name] for name in given if name not in OF_APP if cls._reads(name)}
        )

    @classmethod
    def constructor_settings(cls, given: Mapping[str, Any]) -> Settings:
        """Settings of a strategy in any ServerApp, see ``TreeStrategy``.

        Raises
        ------
        ConfigError : one breaks its rule, is not read, or is the app's or the parties'.
        """
        own = {cls._keyword(name): name for name in defaults() if "." in name and cls._reads(name)}
        with told_in_python({name: keyword for keyword, name in own.items()}):
            return cls._checked(given, own)

    @classmethod
    def _checked(cls, given: Mapping[str, Any], own: Mapping[str, str]) -> Settings:
        """The same; ``own`` are settings of its sections by argument."""
        named: dict[str, Value] = {}
        for name, value in flatten(given).items():
            general = name.replace("_", "-")
            if (keyword := name.replace("-", "_")) not in own or cls._reads(general):
                named[name] = value
            elif own[keyword] not in given:
                named[own[keyword]] = value
            elif value != defaults().get(general):  # a whole run config has both
                named[name] = value
        named = settings_of(cls.method, named)
        if (method := named.setdefault("strategy", cls.method)) != cls.method:
            raise ConfigError(f"strategy must be {cls.method} for {cls.__name__}, got {method!r}")
        named.setdefault("data", OWN_TABLES)
        settings = load_settings(named)
        of_tables = OF_TABLES if settings.data == OWN_TABLES else frozenset()
        for name, value in settings.changed.items():
            if name in of_tables - {"data"} and name in named:
                rule = "must be set where the tables are read, at the parties"
            elif name in OF_APP - {"strategy"}:
                rule = "must be omitted: fedapp's own ServerApp keeps run folders"
            elif not cls._reads(name):
                rule = f"must be omitted for {cls.method}, which does not read it"
            else:
                continue
            raise ConfigError(f"{name} {rule}, got {value!r}")
        cls.check_settings(settings)
        return settings

    @classmethod
    def exchanges_a_round(cls, settings: Settings) -> int:
        """Exchanges that one of ``most_rounds`` takes at most."""
        return 1

    @classmethod
    def exchanges_around(cls, settings: Settings) -> int:
        """Exchanges before the first round and after the last one at most."""
        return 20  # greetings, cuts under masks, the last round's scores and the final ones

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
