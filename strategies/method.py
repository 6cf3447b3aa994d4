"""A method at the server: the settings that it reads, its state, and its conversation.

A subclass declares as data what it reads: ``method``, ``reads``, ``sections``, ``section_class``.
Its ``conversation`` is a generator that asks the parties, computes, and asks again.
"""

from __future__ import annotations

import logging
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, Generic, Self, TypeVar

from fedapp.conversation import Conversation, Parties, Saved
from fedapp.errors import ConfigError
from fedapp.messages.fields import Introduction, Request
from fedapp.messages.methods import all_methods
from fedapp.sections import flatten, setting_names
from fedapp.settings import (
    BoostingSettings,
    ConstraintSettings,
    GrowthSettings,
    RunSettings,
    Section,
    Settings,
    SplitSettings,
    TableSettings,
    TreeSettings,
    load_settings,
)
from fedapp.trees.custom import CUSTOM
from fedapp.trees.losses import LOSSES, Objective
from fedapp.trees.objective import AUTO, check_custom_is_set, has_quantile_leaves, is_of_rows

TREE_SETTINGS, BOOSTING_SETTINGS = setting_names(TreeSettings), setting_names(BoostingSettings)
# ``data`` of a strategy that names no table.
LOCAL_TABLES = "the parties' own tables"
# Settings of fedapp's ServerApp; a strategy in another app does not take them.
OF_APP = frozenset(("strategy", "run-dir", "resume", "log"))
SPLIT_SETTINGS, CONSTRAINTS = setting_names(SplitSettings), setting_names(ConstraintSettings)
GROWTH = setting_names(GrowthSettings)
LABEL_PRIVACY = frozenset(("label-epsilon", "label-range"))
ALL_OBJECTIVES = tuple(name for name in LOSSES if name != CUSTOM)
OF_ROWS = tuple(
    name for name in ALL_OBJECTIVES if is_of_rows(name) and not has_quantile_leaves(name)
)
log = logging.getLogger("fedapp")

Outcome = Mapping[str, Any]  # a method's part of summary.json
I = TypeVar("I", bound=Introduction)  # noqa: E741


def check_watched(settings: Settings, n_valid: int) -> None:
    """Check that early stopping has validation rows."""
    if settings.early_stopping_rounds and not n_valid:
        name, got = "valid-fraction", str(settings.valid_fraction)
        if settings.valid_from:
            name, got = "valid-from", settings.valid_from
        raise ConfigError(f"{name} must leave validation rows for early-stopping-rounds, got {got}")


class TreeStrategy(ABC, Generic[I]):
    """A method's side at the server, for one run.

    ``method`` is its name; ``reads`` are the general settings that a class reads beside those of
    its bases; ``section_class`` is its own table of the run config, and ``sections`` are tables
    that it shares with other methods; ``round_name`` is the term for a reported round;
    ``objectives`` are those that it can train; ``may_lose`` is whether a run can continue without
    a party; ``introduction`` is the class of the replies to ``greeting``, which opens every run.

    Attributes
    ----------
    settings : of the run; the number of parties and ``auto`` are resolved during it.
    section : the method's section of the settings, or None.
    model_id : drawn when the run begins; the same in all attempts.
    keys : fingerprints of the parties' keys by name, once they have been greeted.
    table_warnings : gives more warnings about tables, which are on this machine if simulated.
    """

    method: ClassVar[str] = ""
    reads: ClassVar[frozenset[str]] = setting_names(RunSettings, TableSettings)
    section_class: ClassVar[type[Section] | None] = None
    sections: ClassVar[frozenset[str]] = frozenset()
    round_name: ClassVar[str] = "boosting round"
    objectives: ClassVar[tuple[str, ...]] = ALL_OBJECTIVES
    may_lose: ClassVar[bool] = True
    introduction: type[I]
    section: Section | None

    def __init__(self, settings: Settings) -> None:
        self.check_settings(settings)
        self.settings = settings
        self.section = self.section_settings(settings)
        self.parties: Parties[I] = Parties({})
        self.model_id = secrets.token_hex(8)
        self.keys: Mapping[str, str] = {}
        self.warnings: tuple[str, ...] = ()
        self.facts: tuple[str, ...] = ()  # how the tables were read
        self.objective_reason = ""
        self.table_warnings: Callable[[bool], Iterable[str]] = lambda simulated: ()

    @classmethod
    def of_run(cls, settings: Settings) -> Self:
        """The method with those of the app's settings that it reads."""
        config = flatten(settings.as_config())
        read = {name: config[name] for name in config if name not in OF_APP and cls.takes(name)}
        return cls(load_settings({"strategy": cls.method, **read}))

    # Settings

    @classmethod
    def general_settings(cls) -> frozenset[str]:
        """Names of the settings outside sections that the method reads."""
        return frozenset().union(*(vars(base).get("reads", ()) for base in cls.__mro__))

    @classmethod
    def takes(cls, name: str) -> bool:
        """Whether the method reads a setting, by its full name."""
        section, dot, _ = name.partition(".")
        return section in {cls.method, *cls.sections} if dot else name in cls.general_settings()

    @classmethod
    def settings_read(cls, settings: Settings) -> tuple[str, ...]:
        """Names of the settings that this method reads: general ones and its section's."""
        of_sections = (
            f"{section}.{name}"
            for section in (settings.strategy, *sorted(cls.sections))
            for name in settings.sections.get(section, {})
        )
        return (*sorted(cls.general_settings()), *of_sections)

    @classmethod
    def check_settings(cls, settings: Settings) -> None:
        """Check that the method can serve a run's settings, its section included."""
        if settings.objective not in (AUTO, *cls.objectives):
            objectives = ", ".join((AUTO, *cls.objectives))
            rule = f"must be one of {objectives} for {settings.strategy}"
            got = "a function" if settings.objective == CUSTOM else settings.objective
            reason = "leaves are quantiles of residuals, which are single rows' values"
            reason = f": {reason}: pax and secureboost have it" if has_quantile_leaves(got) else ""
            raise ConfigError(f"objective {rule}, got {got}{reason}")
        try:
            check_custom_is_set(settings.objective)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        cls.section_settings(settings)

    @classmethod
    def section_settings(cls, settings: Settings) -> Any:
        """The method's section of the run config, checked; None where it has none."""
        return cls.section_class.of(settings) if cls.section_class else None

    @classmethod
    def exchanges_a_round(cls, settings: Settings) -> int:
        """Largest number of exchanges of one of ``most_rounds``."""
        return 1

    @classmethod
    def exchanges_around(cls, settings: Settings) -> int:
        """Largest number of exchanges before the first round and after the last."""
        return 20  # greetings, cuts under masks, the last round's scores and the final ones

    @classmethod
    def most_rounds(cls, settings: Settings) -> int:
        """Rounds of training unless something stops it early."""
        return 0 if all_methods()[cls.method].describes else settings.num_boost_round

    @classmethod
    def planned(cls, settings: Settings) -> dict[str, Any]:
        """Fields of the run's ``Plan`` that depend only on its settings."""
        read = set(cls.settings_read(settings))
        names = "max_depth", "subsample", "max_bin", "max_leaves"
        general = {
            name: getattr(settings, name) for name in names if name.replace("_", "-") in read
        }
        if "max-leaves" in read:
            general["levels"] = settings.n_levels
        if "num-parallel-tree" in read:
            general["trees"] = settings.num_parallel_tree
        return {"rounds": cls.most_rounds(settings), **general}

    # The run

    def plan(self) -> dict[str, Any]:
        """The fields of the run's ``Plan``."""
        names = tuple(self.keys)
        fingerprints = tuple(self.keys.values())
        return self.planned(self.settings) | {"parties": names, "fingerprints": fingerprints}

    @abstractmethod
    def greeting(self) -> Request:
        """The request that opens a run."""

    def greeting_again(self) -> Request | None:
        """A second opening request, once the parties' tables are known; None if not needed."""
        return None

    @abstractmethod
    def conversation(self, parties: Parties[I], saved: Saved | None) -> Conversation[Outcome]:
        """The protocol between known parties; ends with its part of the summary.

        ``saved`` is the state at the last checkpoint of an earlier attempt, or None.
        """

    @abstractmethod
    def suggested_objective(self) -> tuple[Objective, str]:
        """The objective that the parties' labels suggest, and why."""

    def resolve_objective(self) -> None:
        """Resolve ``objective=auto`` from the parties' labels; the section must fit it."""
        if self.settings.objective != AUTO or self.settings.model:
            return
        objective, why = self.suggested_objective()
        self.settings = self.settings.settled(objective)
        self.section = self.section_settings(self.settings)
        self.objective_reason = why
        log.info("objective %s: %s", objective, why)

    @property
    def simulated(self) -> bool:
        """Whether the parties have parts of the table that ``data`` names."""
        return any(hello.simulated for hello in self.parties.values())

    def check_held_out(self, n_test: int) -> None:
        """Check that there are test rows where groups or times decide; raises ConfigError."""
        holdout = self.settings.holdout
        holds_together = any(hello.together for hello in self.parties.values())
        if n_test or not holdout.holds_back or not (holdout.test_from or holds_together):
            return
        if holdout.test_from:
            rule = f"must leave test rows, got none of any party: {holdout.in_words()['test']}"
            raise ConfigError(f"test-from {rule}; name an earlier time")
        rule = "must have test rows, got none: the rows of a group are in one subset, and there are"
        way = "few groups. Another seed, more test rows or test-fraction=0 leave some"
        raise ConfigError(f"group {rule} {way}")

    def split_facts(self) -> dict[str, Any]:
        """The summary's part about which rows test and validate."""
        together = {name: hello.together for name, hello in self.parties.items() if hello.together}
        return {"split": self.settings.holdout.in_words() | {"together": together}}

    def row_counts(self) -> dict[str, int]:
        """Training, validation and test rows of all parties, where the hello reports them."""
        return {}

    def table_facts(self) -> Mapping[str, Any]:
        """The summary's part about the parties' columns."""
        return {}

    def warn(self, text: str) -> None:
        """Warn the user now, and again in the summary."""
        self.warnings = (*self.warnings, text)
        log.warning("%s", text)

    def warn_once(self, text: str) -> None:
        """Warn, unless this run has already, also before an interruption."""
        if text not in self.warnings:
            self.warn(text)
