"""The building blocks of messages: frozen dataclasses of arrays and scalars with declared forms.

A field is annotated with its form; the codec checks it on both sides::

    histograms: Annotated[Array, Form("float64", "n_wanted", "n_bins", 2)]
    level: Annotated[int, Range(0, 64)]

A named dimension has the same size wherever the name occurs in the message. A second annotation
limits the values that a site accepts::

    insecure_small_key: Annotated[bool, OnlyInTrials()]
    max_bin: Annotated[int, Range(2, 65535), SiteLimit("most-bins")]
    min_child_rows: Annotated[int, Range(0, 2**40), SiteFloor("min-child-rows")]
    level: Annotated[int, Range(0, 64), PlanLimit("max_depth")]
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, get_args, get_origin, get_type_hints

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
MOST_FOLDS = 1000  # of cross-validation


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
class SiteFloor:
    """The node config has the smallest value that a site accepts, under this key."""

    setting: str


@dataclass(frozen=True, slots=True)
class PlanLimit:
    """The field of ``fedapp.messages.plan.Plan`` of this name is the largest value."""

    name: str


class Message:
    """Base of all messages; its class knows the fields and their rules.

    A class declared with ``letters=True`` also carries letters between parties: sealed parcels
    beside its fields (see ``fedapp.messages.parcels``).
    """

    __slots__ = ()
    forms: ClassVar[Mapping[str, tuple[Any, Form | Range | None]]]  # plain type and declared form
    for_trials: ClassVar[Mapping[str, OnlyInTrials]]
    limits: ClassVar[Mapping[str, SiteLimit]]
    floors: ClassVar[Mapping[str, SiteFloor]]
    planned: ClassVar[Mapping[str, PlanLimit]]
    carries_letters: ClassVar[bool] = False
    wire_name: ClassVar[
        str
    ]  # that a message says it is: the class name, unless the class gives one

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
        cls.floors = {name: rule for name, rule in rules if isinstance(rule, SiteFloor)}
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
    ``fedapp.messages.secure``); or ``nothing`` but what opens every run. A request that is not a
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
