"""Settings that a method reads: a class declares its additions to those of its bases."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import Parameter, Signature
from typing import Any, ClassVar, Self

from fedapp.errors import ConfigError
from fedapp.settings import (
    Section,
    Settings,
    Value,
    defaults,
    flatten,
    load_settings,
    naming_python_keywords,
    python_name,
    settings_of,
)
from fedapp.trees.objective import AUTO, CUSTOM, LOSSES, check_custom_is_set

# General settings of XGBoost's trees.
TREE_SETTINGS = frozenset(
    (
        *("max-depth", "eta", "lambda", "alpha", "gamma", "min-child-weight", "max-delta-step"),
        *("subsample", "colsample-bytree", "colsample-bylevel", "colsample-bynode"),
        *("max-bin", "tweedie-variance-power"),
        *("max-cat-to-onehot", "max-cat-threshold"),
    )
)
BOOSTING_SETTINGS = TREE_SETTINGS | {
    *("num-boost-round", "early-stopping-rounds", "eval-metric", "scale-pos-weight", "preset")
}
# ``data`` of a strategy that names no table.
LOCAL_TABLES = "the parties' own tables"
# Settings of fedapp's ServerApp; a strategy in another app does not take them.
OF_APP = frozenset(("strategy", "run-dir", "resume", "log"))
# Settings of the tables, which are set at the parties, where the tables are.
OF_TABLES = frozenset(
    (
        *("data", "label", "id", "weight", "drop-columns", "schema", "header", "decimal"),
        *("encoding", "missing-label", "base-margin", "partition", "columns", "least-bin-rows"),
        *("share-column-names", "allow-export"),
    )
)
SPLIT_SETTINGS = frozenset(("test-fraction", "valid-fraction", "fold", "folds", "score-test"))
INIT_MODEL = frozenset(("init-model",))
BASE_MARGIN = frozenset(("base-margin",))
CONSTRAINTS = frozenset(("monotone-constraints", "interaction-constraints"))
# Alternatives where a method does not read a setting.
REMEDIES = {"base-margin": "; else the column may be a feature, or excluded with drop-columns"}
ALL_OBJECTIVES = tuple(name for name in LOSSES if name != CUSTOM)
OBJECTIVES_OR_FUNCTION = (*ALL_OBJECTIVES, CUSTOM)


class ReadsSettings:
    """Base of strategies that declares what a method reads.

    ``method`` is its name; ``reads`` are the general settings that a class reads beside those of
    its bases; ``sections`` are tables of the run config that it shares with other methods;
    ``round_name`` is the term for a reported round; ``objectives`` are those that it can train.
    """

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
        """Declare the settings and their defaults as keyword arguments."""
        super().__init_subclass__()
        if cls.method:
            parameters = {}
            for name, value in defaults().items():
                if cls._reads(name) and name not in OF_APP | OF_TABLES:
                    keyword = cls._keyword(name)
                    parameters[keyword] = Parameter(keyword, Parameter.KEYWORD_ONLY, default=value)
            cls.__signature__ = Signature([*parameters.values()])  # type: ignore[attr-defined]

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
        config = flatten(settings.as_config())
        names = [name for name in config if name not in OF_APP and cls._reads(name)]
        return cls(**{name: config[name] for name in names})

    @classmethod
    def constructor_settings(cls, given: Mapping[str, Any]) -> Settings:
        """Settings from a constructor's arguments, see ``TreeStrategy``."""
        section_names = {
            cls._keyword(name): name for name in defaults() if "." in name and cls._reads(name)
        }
        with naming_python_keywords({name: keyword for keyword, name in section_names.items()}):
            # A name such as max_depth may be a setting of the method's section and a general one.
            named: dict[str, Value] = {}
            for name, value in flatten(given).items():
                general = name.replace("_", "-")
                if (keyword := name.replace("-", "_")) not in section_names or cls._reads(general):
                    named[name] = value
                elif section_names[keyword] not in given:
                    named[section_names[keyword]] = value
                elif value != defaults().get(general):  # a whole run config has both
                    named[name] = value
            named = settings_of(cls.method, named)
            if (method := named.setdefault("strategy", cls.method)) != cls.method:
                rule = f"must be {cls.method} for {cls.__name__}"
                raise ConfigError(f"strategy {rule}, got {method!r}")
            named.setdefault("data", LOCAL_TABLES)
            settings = load_settings(named)
            of_tables = OF_TABLES if settings.data == LOCAL_TABLES else frozenset()
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
        """Largest number of exchanges of one of ``most_rounds``."""
        return 1

    @classmethod
    def exchanges_around(cls, settings: Settings) -> int:
        """Largest number of exchanges before the first round and after the last."""
        return 20  # greetings, cuts under masks, the last round's scores and the final ones

    @classmethod
    def check_settings(cls, settings: Settings) -> None:
        """Check that the method can serve a run's settings, its section included."""
        if settings.objective not in (AUTO, *cls.objectives):
            objectives = ", ".join((AUTO, *cls.objectives))
            rule = f"must be one of {objectives} for {settings.strategy}"
            got = "a function" if settings.objective == CUSTOM else settings.objective
            raise ConfigError(f"objective {rule}, got {got}")
        try:
            check_custom_is_set(settings.objective)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        cls.section_settings(settings)

    @classmethod
    def section_settings(cls, settings: Settings) -> Section | None:
        """The method's section of the run config, checked; None where it has none."""
        return None

    @classmethod
    def most_rounds(cls, settings: Settings) -> int:
        """Rounds of training unless something stops it early."""
        return settings.num_boost_round

    @classmethod
    def planned(cls, settings: Settings) -> dict[str, Any]:
        """Fields of the run's ``Plan`` that depend only on its settings."""
        read = set(cls.settings_read(settings))
        names = {"max_depth", "subsample", "max_bin"}
        general = {one: getattr(settings, one) for one in names if one.replace("_", "-") in read}
        return {"rounds": cls.most_rounds(settings), **general}

    @classmethod
    def settings_read(cls, settings: Settings) -> tuple[str, ...]:
        """Names of the settings that this method reads: general ones and its section's."""
        general = frozenset().union(*(vars(base).get("reads", ()) for base in cls.__mro__))
        of_sections = (
            f"{section}.{name}"
            for section in (settings.strategy, *sorted(cls.sections))
            for name in settings.sections.get(section, {})
        )
        return (*sorted(general), *of_sections)
