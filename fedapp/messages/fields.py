"""The building blocks of messages: declared forms of fields, and what a method declares of itself.

Messages are frozen dataclasses. A field is annotated with its form; both sides check it::

    histograms: Annotated[Array, Form("float64", "n_wanted", "n_bins", 2)]
    level: Annotated[int, Range(0, 64)]

A named dimension has the same size wherever the name occurs in the message. A second annotation
limits the values that a site accepts::

    insecure_small_key: Annotated[bool, OnlyInTrials()]
    max_bin: Annotated[int, Range(2, 65535), SiteLimit("most-bins")]
    level: Annotated[int, Range(0, 64), PlanLimit("max_depth")]

A module of messages lists its groups of kinds in ``GROUPS``: a method by its ``Method``, shared
messages by the families of the methods that send them.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib.util import find_spec
from pkgutil import iter_modules
from types import ModuleType
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin, get_type_hints

import numpy as np
import numpy.typing as npt

from fedapp import messages
from fedapp.errors import check_package
from fedapp.trees.categories import MOST_CATEGORIES

Array = npt.NDArray[Any]
MOST_FOLDS = 1000  # of cross-validation
MOST_DEPTH = 15
MOST_NODES = 2 ** (MOST_DEPTH + 1)  # of a tree


class Form:
    """Dtype, shape (sizes, or names of sizes) and range of an array; infinity is never allowed."""

    __slots__ = ("dtype", "high", "low", "nan", "shape")

    def __init__(
        self,
        dtype: str,
        *shape: int | str,
        low: float | None = None,
        high: float | None = None,
        nan: bool = False,
    ) -> None:
        self.dtype, self.shape = np.dtype(dtype), shape
        self.low, self.high, self.nan = low, high, nan


@dataclass(frozen=True, slots=True)
class Range:
    """Smallest and largest value of a number, or of the length of a text or list."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class OnlyInTrials:
    """Values that a site accepts only if its node config has ``allow-insecure``.

    ``below`` marks numbers below it; None marks a boolean that is True.
    """

    below: float | None = None

    @property
    def safe(self) -> str:
        """The other values, in words."""
        return "false" if self.below is None else f">= {self.below:g}"

    def covers(self, value: float) -> bool:
        """Whether a value is accepted only in trials."""
        return bool(value) if self.below is None else value < self.below


@dataclass(frozen=True, slots=True)
class SiteLimit:
    """The node config has the largest value that a site accepts, under this key."""

    setting: str


@dataclass(frozen=True, slots=True)
class PlanLimit:
    """The field of ``fedapp.messages.handshake.Plan`` of this name is the largest value."""

    name: str


class Message:
    """Base of all messages; its class knows the fields and their rules.

    A class declared with ``letters=True`` also carries letters between parties: sealed parcels
    beside its fields (see ``fedapp.messages.vertical``).
    """

    __slots__ = ()
    forms: ClassVar[Mapping[str, tuple[Any, Form | Range | None]]]  # plain type and declared form
    for_trials: ClassVar[Mapping[str, OnlyInTrials]]
    limits: ClassVar[Mapping[str, SiteLimit]]
    planned: ClassVar[Mapping[str, PlanLimit]]
    carries_letters: ClassVar[bool] = False
    wire_name: ClassVar[str]  # sent with a message: the class name, unless the class sets one

    def __init_subclass__(cls, letters: bool | None = None) -> None:
        # ``dataclass(slots=True)`` makes a class twice, the second time without the keyword.
        if letters is not None:
            cls.carries_letters = letters
        cls.wire_name = vars(cls).get("wire_name", cls.__name__)
        # Once, at import: hints are strings, and evaluating them takes longer than a check.
        hints = get_type_hints(cls, include_extras=True)
        fields = {name: hint for name, hint in hints.items() if get_origin(hint) is not ClassVar}
        cls.forms = {name: _form_of(hint) for name, hint in fields.items()}
        rules = [(name, rule) for name, hint in fields.items() for rule in _rules_of(hint)]
        cls.for_trials = {name: rule for name, rule in rules if isinstance(rule, OnlyInTrials)}
        cls.limits = {name: rule for name, rule in rules if isinstance(rule, SiteLimit)}
        cls.planned = {name: rule for name, rule in rules if isinstance(rule, PlanLimit)}


def _form_of(hint: Any) -> tuple[Any, Form | Range | None]:
    """Plain type and declared form of a field."""
    base = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    forms = [rule for rule in _rules_of(hint) if isinstance(rule, Form | Range)]
    return get_origin(base) or base, forms[0] if forms else None


def _rules_of(hint: Any) -> tuple[Any, ...]:
    """Annotations of a field beside its type."""
    return get_args(hint)[1:] if get_origin(hint) is Annotated else ()


class Request(Message):
    """Sent by the server; ``kind`` is its Flower message type, ``<category>.<group>_<name>``.

    ``doing`` describes to someone who watches a run what the parties do, such as "aligning rows".
    ``each_round`` marks the exchanges of a training round.

    ``leaves`` classifies what the reply discloses of a party's rows: its ``own`` results; its share
    of ``sums``, under masks, or ``masks`` to be removed from the sum of all (see
    ``fedapp.messages.secagg``); or ``nothing`` but what opens every run. A request that is not a
    step (``is_step``) is answered at any time, and changes nothing.
    """

    __slots__ = ()
    kind: ClassVar[str]
    doing: ClassVar[str]
    each_round: ClassVar[bool] = False
    leaves: ClassVar[str] = "own"
    is_step: ClassVar[bool] = True


class Reply(Message):
    """Sent back by a party."""

    __slots__ = ()


class Introduction(Reply, ABC):
    """A party's answer to the request that opens a run."""

    __slots__ = ()
    name: str
    simulated: bool  # the table is a share of the one that the run config names
    fingerprint: str  # of the table, in hex; only its owner can interpret it
    notes: tuple[str, ...]  # warnings about the table, in words
    since: int  # the last step that the party answered; 0 in a new run, and in a finished one

    @property
    @abstractmethod
    def n_rows(self) -> int:
        """Rows that the party contributes."""


class Letter(Message):
    """Sent from party to party in a sealed parcel, which the server cannot open."""

    __slots__ = ()


def fields_of(source: Any, kind: type[Any] | None = None) -> dict[str, Any]:
    """A dataclass' fields by name, or only those of ``kind``."""
    return {field.name: getattr(source, field.name) for field in fields(kind or source)}


# Parties share columns; parties share rows; parties predict with a vertical model.
Family = Literal["horizontal", "vertical", "inference"]


@dataclass(frozen=True, slots=True)
class Method:
    """A way to train or to predict.

    Parameters
    ----------
    gets : what the coordinator gets from a site, in a few words, by the settings of the node config
        that change it: "" for none, and later entries replace earlier ones.
    codes_labels : whether labels are encoded when they leave the active party, unless a run
        overrides it.
    baseline : the model on pooled rows to compare with.
    package : that only this method needs; an extra of the method's name installs it.
    holds_columns : whether its trees obey column constraints of a site's node config.
    takes_margins : whether rows may start from a base margin.
    merges_bins : whether it applies a site's minimum of rows per bin to gradient sums.
    """

    family: Family
    gets: Mapping[str, str]
    codes_labels: bool = False
    baseline: Literal["boosted", "forest"] = "boosted"
    package: str = ""
    title: str = ""  # of a method whose files have others too; else the strategy's first line
    holds_columns: bool = False
    takes_margins: bool = False
    merges_bins: bool = False

    @property
    def trains(self) -> bool:
        """Whether it trains a model, rather than predicts with one."""
        return self.family != "inference"

    @property
    def needs_label(self) -> bool:
        """Whether every party must have labels; otherwise one has, and rows are matched by id."""
        return self.family == "horizontal"


def all_methods() -> dict[str, Method]:
    """Every method by its name."""
    methods = {name: one for name, (_, one) in _groups().items() if isinstance(one, Method)}
    return {name.replace("_", "-"): methods[name] for name in sorted(methods)}


def method_of(name: str) -> Method | None:
    """What a method declares; None if there is no method of this name."""
    _, declared = _groups().get(name.replace("-", "_"), (None, None))
    return declared if isinstance(declared, Method) else None


def missing_extra(method: str) -> str:
    """The command that installs a method's missing package; empty if nothing is missing."""
    package = _package_of(method)
    if not package or find_spec(package) is not None:
        return ""
    return f"pip install 'fedapp[{method}]'"


def check_extra(method: str) -> None:
    """Raise ConfigError if a method needs a package that is not installed."""
    if package := _package_of(method):
        check_package(package, f"for {method}", method)


def _package_of(method: str) -> str:
    """The optional package of a method, or empty."""
    declared = method_of(method)
    return declared.package if declared else ""


def senders_of(group: str) -> frozenset[Family]:
    """Families of the methods that share a group of messages; none if it is one method's."""
    _, declared = _groups().get(group, (None, None))
    return declared if isinstance(declared, frozenset) else frozenset()


def module_of_group(group: str) -> ModuleType | None:
    """The module that declares a group of messages; None if there is no such group."""
    module, _ = _groups().get(group, (None, None))
    return module


def modules_of_method(name: str) -> list[ModuleType]:
    """Modules of all messages that a method sends, first the one that declares it."""
    if (method := method_of(name)) is None:
        return []
    declaring = module_of_group(name.replace("-", "_"))
    shared = [
        module
        for module, by in _groups().values()
        if isinstance(by, frozenset) and method.family in by
    ]
    return list(dict.fromkeys(module for module in (declaring, *shared) if module))


def message_kinds() -> list[str]:
    """The kinds of all requests, of whatever method."""
    return sorted({kind for module, _ in _groups().values() for kind in kinds_of(module)})


def kinds_of(module: ModuleType) -> set[str]:
    """The kinds of the requests in a module."""
    classes = (one for one in vars(module).values() if isinstance(one, type))
    return {str(one.kind) for one in classes if issubclass(one, Request) and hasattr(one, "kind")}


@cache
def _groups() -> dict[str, tuple[ModuleType, Method | frozenset[Family]]]:
    """The module of each group of messages, and who sends it."""
    names = (module.name for module in iter_modules(messages.__path__))
    modules = [importlib.import_module(f"{messages.__name__}.{name}") for name in names]
    return {
        group: (module, declared)
        for module in modules
        for group, declared in getattr(module, "GROUPS", {}).items()
    }


NotNegative = Annotated[float, Range(0, 1e38)]
BaseMargin = Annotated[Array, Form("float32", "n_outputs")]  # of a row before its first tree


@dataclass(frozen=True, eq=False)
class TreeParameters:
    """Part of a message: how trees are grown, named as in the run config."""

    __slots__ = ()  # its fields are slots of the message, which may have another base with slots

    max_depth: Annotated[int, Range(1, MOST_DEPTH)]
    eta: NotNegative
    reg_lambda: NotNegative
    reg_alpha: NotNegative
    gamma: NotNegative
    min_child_weight: NotNegative
    max_cat_to_onehot: Annotated[int, Range(1, MOST_CATEGORIES)]
    max_cat_threshold: Annotated[int, Range(1, MOST_CATEGORIES)]
    max_delta_step: NotNegative
    subsample: Annotated[float, Range(0, 1)]
    colsample_bytree: Annotated[float, Range(0, 1)]
    colsample_bylevel: Annotated[float, Range(0, 1)]
    colsample_bynode: Annotated[float, Range(0, 1)]
    max_bin: Annotated[int, Range(2, 65535), SiteLimit("most-bins")]
    seed: Annotated[int, Range(0, 2**63 - 1)]


@dataclass(frozen=True, eq=False)
class LossFields:
    """Part of a message: parameters of the objective, and additional metrics."""

    __slots__ = ()

    scale_pos_weight: Annotated[float, Range(0, 1e38)]
    max_delta_step: NotNegative
    tweedie_variance_power: Annotated[float, Range(1, 2)]
    eval_metrics: Annotated[tuple[str, ...], Range(0, 20)]


def parameters_of(source: Any) -> dict[str, Any]:
    """The fields of ``TreeParameters`` of the run's settings or of a message."""
    return fields_of(source, TreeParameters)


def loss_fields(source: Any) -> dict[str, Any]:
    """The fields of ``LossFields`` of the run's settings or of a message."""
    return fields_of(source, LossFields)
