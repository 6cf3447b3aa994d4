"""The building blocks of messages: declared forms of fields, and what a method declares of itself.

Messages are frozen dataclasses. A field is annotated with its form; both sides check it::

    @request("train.pax_grow", "growing trees", each_round=True)
    class GrowRequest(Request):
        n_trees: Annotated[int, Range(1, 1000)]
        split_trees: Annotated[Array, Form("int32", "n_splits", low=0, below="n_trees")]
        columns: Annotated[Array, Form("int32", "n_drawn", low=0, ascending=True)]

A second annotation limits the values that a site accepts::

    insecure_small_key: Annotated[bool, OnlyInTrials()]
    max_bin: Annotated[int, Range(2, 65535), SiteLimit("most-bins")]
    level: Annotated[int, Range(0, 64), PlanLimit("max_depth")]

What a site reads of a request, whatever the method, is declared too; and texts that are called
``objective``, or ``model``, are the run's objective, and the model to predict with::

    round_id: Annotated[int, Range(0, 10**6), RoundId(begins="level")]
    objective: Objective

A module of messages lists its groups of kinds in ``GROUPS``: a method by its ``Method``, shared
messages by the families of the methods that send them.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import (
    Annotated,
    Any,
    ClassVar,
    TypeVar,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

import numpy as np
import numpy.typing as npt

from fedapp.errors import ProtocolError
from fedapp.records.codec import once, origin_of
from fedapp.trees.categories import MOST_CATEGORIES
from fedapp.trees.limits import DISTRIBUTIONS, GrowPolicy

Array = npt.NDArray[Any]
ITSELF = "itself"  # what an array relates to that is in order
LONGEST = 1000  # characters of a text
# Control characters, marks that change the direction of writing, and lone surrogates.
UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
AT_ANY_TIME = math.inf  # as often as it is asked
# What leaves is a sum over rows: under masks where the plan of the run says so, else as it is.
OWN_OR_SUMS = "own or sums"
# Of a request of training rounds: it comes once a round, or once a level of each.
EACH_ROUND: Mapping[str, Any] = {"each_round": True, "times": ("rounds",)}
EACH_LEVEL: Mapping[str, Any] = {"each_round": True, "times": ("rounds", "levels")}
MOST_FOLDS = 1000  # of cross-validation
MOST_DEPTH = 15
MOST_LEAVES = 2**MOST_DEPTH
MOST_LEVELS = 255  # of a tree whose leaves are limited, and not its depth
MOST_NODES = 2 ** (MOST_DEPTH + 1)  # of a tree
Sizes = dict[str, int]  # of dimensions


class Form:
    """Dtype, shape and range of an array, and how its values relate to the rest of the message.

    A dimension is a size, or the name of one: it is the same wherever the message has the name,
    as a dimension or as a whole number. "name+1" is one more.

    Parameters
    ----------
    low, high : smallest and largest value; infinity is never allowed.
    nan : whether values may be missing.
    empty : whether the array may be empty, whatever the other fields are.
    ascending : whether each value exceeds the one before; or the name of offsets, between which
        they do.
    below : what all values are less than: a name as of a dimension.
    divides : the dimension that offsets divide; from 0 to its size, never falling.
    ends : as ``divides``, for offsets without the first 0.
    adds_up : the dimension whose size the values add up to.
    in_order : whether no value is less than the one before.
    """

    __slots__ = ("_dimensions", "dtype", "empty", "high", "low", "nan", "relations", "shape")

    def __init__(
        self,
        dtype: str,
        *shape: int | str,
        low: float | None = None,
        high: float | None = None,
        nan: bool = False,
        empty: bool = False,
        ascending: bool | str = False,
        below: str = "",
        divides: str = "",
        ends: str = "",
        adds_up: str = "",
        in_order: bool = False,
    ) -> None:
        self.dtype, self.shape = np.dtype(dtype), shape
        self.low, self.high, self.nan, self.empty = low, high, nan, empty
        relations = {"divides": divides, "ends": ends, "adds_up": adds_up, "below": below}
        relations["ascending"] = ITSELF if ascending is True else ascending or ""
        relations["in_order"] = ITSELF if in_order else ""
        self.relations = {rule: other for rule, other in relations.items() if other}
        # Of each dimension its name, or "", and how much it is more than the size of that name.
        self._dimensions = [
            ("", size) if isinstance(size, int) else (name, int(more or 0))
            for size in shape
            for name, _, more in [str(size).partition("+")]
        ]

    @property
    def dimensions(self) -> set[str]:
        """Names of sizes."""
        return {name for name, _ in self._dimensions}

    def broken(self, value: Any, sizes: Sizes) -> str:
        """The rule that a value breaks, or ""; notes its sizes."""
        if not isinstance(value, np.ndarray) or value.dtype != self.dtype:
            return f"must be {self.dtype}, got {getattr(value, 'dtype', type(value).__name__)}"
        if value.ndim != len(self.shape):
            return f"must have {len(self.shape)} dimensions, got {value.ndim}"
        if (broken := self.broken_size(value, sizes)) or not value.size:
            return broken
        # fmin and fmax ignore NaN; minimum and maximum return it.
        least, largest = (np.fmin, np.fmax) if self.nan else (np.minimum, np.maximum)
        low, high, is_float = self.low, self.high, self.dtype.kind == "f"
        lowest = least.reduce(value, axis=None) if is_float or low is not None else 0
        highest = largest.reduce(value, axis=None) if is_float or high is not None else 0
        is_missing = self.nan and lowest != lowest  # all of it
        if is_float and not (is_missing or (math.isfinite(lowest) and math.isfinite(highest))):
            return "must be finite"
        if low is not None and lowest < low:
            return f"must be >= {low}, got {lowest}"
        if high is not None and highest > high:
            return f"must be <= {high}, got {highest}"
        return ""

    def broken_size(self, value: Array, sizes: Sizes) -> str:
        """The same of its dimensions only; the first array with a named one fixes its size."""
        dimensions = self._dimensions if value.size or not self.empty else []
        for axis, (name, more) in enumerate(dimensions):
            size = value.shape[axis]
            expected = sizes.setdefault(name, size - more) + more if name else more
            if size != expected:
                label = f" ({self.shape[axis]})" if name else ""
                return f"must have size {expected}{label} in dimension {axis + 1}, got {size}"
        return ""

    def broken_relation(self, rule: str, value: Array, other: Any) -> str:
        """The same of one of ``RELATIONS``; offsets may be missing with nothing to divide."""
        is_nothing = self.empty and rule == "divides" and not (value.size or other)
        return "" if is_nothing else RELATIONS[rule](value, other)


@dataclass(frozen=True, slots=True)
class Range:
    """Smallest and largest value of a number, or of the length of a text or list."""

    low: float
    high: float

    def broken(self, value: Any, sizes: Sizes) -> str:
        """The rule that a value breaks, or ""."""
        has_length = isinstance(value, str | tuple)
        measured = len(value) if has_length else value
        if not self.low <= measured <= self.high:
            what = "length must" if has_length else "must"
            return f"{what} be {self.low} to {self.high}, got {measured}"
        return ""


@dataclass(frozen=True, slots=True)
class OneOf:
    """All values that a text or whole number may have."""

    values: tuple[int | str, ...]

    def broken(self, value: Any, sizes: Sizes) -> str:
        """The rule that a value breaks, or ""."""
        if value in self.values:
            return ""
        return f"must be one of {', '.join(map(str, self.values))}, got {value}"


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


@dataclass(frozen=True, slots=True)
class RoundId:
    """The field is the round that a request is of, which a site compares with the run's plan.

    Parameters
    ----------
    begins : whether the request begins its round; a name: where the field of this name is 0. Each
        round may begin once, and once more for each of the plan's ``restarts``.
    trains : the field that is 0 where the request only scores, as it may after the last round;
        empty if it always trains.
    """

    begins: bool | str
    trains: str = ""


@dataclass(frozen=True, slots=True)
class Round:
    """What a site reads of a request of a round; see ``RoundId``."""

    id: int
    begins: bool
    trains: bool


Declared = Form | Range | OneOf | None
Suffix = Annotated[str, OneOf((".csv", ".parquet"))]  # of a file of predictions to write


class Message:
    """Base of all messages; its class knows the fields and their rules.

    A class declared with ``letters=True`` also carries letters between parties: sealed parcels
    beside its fields (see ``fedapp.messages.vertical``).
    """

    __slots__ = ()
    forms: ClassVar[Mapping[str, tuple[Any, Declared]]]  # plain type and declared form
    for_trials: ClassVar[Mapping[str, OnlyInTrials]]
    limits: ClassVar[Mapping[str, SiteLimit]]
    planned: ClassVar[Mapping[str, PlanLimit]]
    rounds: ClassVar[Mapping[str, RoundId]]
    # Field and its form, rule, and what it relates to.
    relations: ClassVar[Sequence[tuple[str, Form, str, str]]]
    numbers: ClassVar[tuple[str, ...]]  # whole numbers that are dimensions too
    times: ClassVar[float | tuple[str, ...]] = math.inf  # see ``Request``
    spare: ClassVar[int] = 0
    carries_letters: ClassVar[bool] = False
    wire_name: ClassVar[str]  # sent with a message: the class name, unless the class sets one

    def __init_subclass__(cls, letters: bool | None = None) -> None:
        # ``dataclass(slots=True)`` makes a class twice, the second time without the keyword.
        if letters is not None:
            cls.carries_letters = letters
        cls.wire_name = vars(cls).get("wire_name", cls.__name__)

    def read(self, name: str) -> str:
        """The text of this name; empty if there is none."""
        base, _ = self.forms.get(name, (None, None))
        return str(getattr(self, name)) if base is str else ""


class Request(Message):
    """Sent by the server; ``kind`` is its Flower message type, ``<category>.<group>_<name>``.

    ``doing`` describes to someone who watches a run what the parties do, such as "aligning rows".
    ``each_round`` marks the exchanges of a training round.

    ``leaves`` classifies what the reply discloses of a party's rows: its ``own`` results; its share
    of ``sums``, under masks, or ``masks`` to be removed from the sum of all (see
    ``fedapp.messages.secagg``); ``OWN_OR_SUMS``, as the plan of the run says; or ``nothing`` but
    what opens every run. A request that is not a step (``is_step``) is answered at any time, and
    changes nothing.

    ``times`` is how often a site answers it in a run: a number, or fields of the plan whose product
    it is, and ``spare`` is added. Letters may have it too.
    """

    __slots__ = ()
    kind: ClassVar[str]
    doing: ClassVar[str]
    each_round: ClassVar[bool] = False
    leaves: ClassVar[str] = "own"
    is_step: ClassVar[bool] = True
    times: ClassVar[float | tuple[str, ...]] = 1

    @property
    def round(self) -> Round | None:
        """The training round that it is of; None if of none."""
        for field, rule in self.rounds.items():
            begins = rule.begins
            if isinstance(begins, str):
                begins = getattr(self, begins) == 0
            trains = not rule.trains or getattr(self, rule.trains) > 0
            return Round(getattr(self, field), begins, trains)
        return None


class Reply(Message):
    """Sent back by a party."""

    __slots__ = ()


@dataclass(frozen=True, eq=False, kw_only=True)
class Introduction(Reply, ABC):
    """A party's answer to the request that opens a run."""

    name: Annotated[str, Range(1, 64)]
    simulated: bool  # the table is a share of the one that the run config names
    fingerprint: Annotated[str, Range(32, 32)]  # of the table, in hex; only its owner can read it
    notes: Annotated[tuple[str, ...], Range(0, 100)]  # warnings about the table, in words
    facts: Annotated[tuple[str, ...], Range(0, 100)] = ()  # how the table was read, in words
    versions: Annotated[tuple[str, ...], Range(0, 20)]  # "fedapp 0.2.0", "xgboost 3.2.0", ...
    # Column whose rows are in one subset; empty: none, or not shared.
    together: Annotated[str, Range(0, 10**4)] = ""
    # The last step that the party answered; 0 in a new run, and in a finished one.
    since: Annotated[int, Range(0, 2**40)] = 0

    @property
    @abstractmethod
    def n_rows(self) -> int:
        """Rows that the party contributes."""


class Letter(Message):
    """Sent from party to party in a sealed parcel, which the server cannot open."""

    __slots__ = ()


M = TypeVar("M", bound=Message)
T = TypeVar("T")


@dataclass_transform(frozen_default=True, eq_default=False)
def part(cls: type[T]) -> type[T]:
    """Declare fields that several messages share: a base beside ``Request`` or ``Reply``."""
    return dataclass(frozen=True, eq=False)(cls)


@dataclass_transform(frozen_default=True, eq_default=False)
def request(
    kind: str, doing: str = "", **more: bool | float | str | tuple[str, ...]
) -> Callable[[type[M]], type[M]]:
    """Declare a request; what is not given of ``Request`` is as in its base."""

    def declare(cls: type[M]) -> type[M]:
        for name, value in {
            "kind": kind,
            "doing": doing or getattr(cls, "doing", ""),
            **more,
        }.items():
            setattr(cls, name, value)
        return message(cls)

    return declare


@dataclass_transform(frozen_default=True, eq_default=False)
def message(cls: type[M]) -> type[M]:
    """Declare a reply or a letter."""
    declared = dataclass(frozen=True, slots=True, eq=False)(cls)
    hints = get_type_hints(declared, include_extras=True)
    declared.forms, rules = {}, list[tuple[str, Any]]()
    for name, hint in hints.items():
        if get_origin(hint) is not ClassVar:
            base, *of_field = get_args(hint) if get_origin(hint) is Annotated else (hint,)
            form = next((rule for rule in of_field if isinstance(rule, Form | Range | OneOf)), None)
            declared.forms = {**declared.forms, name: (origin_of(base) or base, form)}
            rules += [(name, rule) for rule in of_field]
    declared.for_trials = {name: rule for name, rule in rules if isinstance(rule, OnlyInTrials)}
    declared.limits = {name: rule for name, rule in rules if isinstance(rule, SiteLimit)}
    declared.planned = {name: rule for name, rule in rules if isinstance(rule, PlanLimit)}
    declared.rounds = {name: rule for name, rule in rules if isinstance(rule, RoundId)}
    if issubclass(declared, Request) and "round_id" in declared.forms.keys() - declared.rounds:
        rule = "must be declared RoundId, as sites read it, or have another name"
        raise TypeError(f"{declared.__name__}.round_id {rule}")
    arrays = {name: form for name, form in rules if isinstance(form, Form)}
    declared.relations = [
        (name, form, rule, form.relations[rule])
        for rule in RELATIONS
        for name, form in arrays.items()
        if rule in form.relations
    ]
    named = {dimension for form in arrays.values() for dimension in form.dimensions}
    named |= {other for *_, other in declared.relations}
    numbers = (name for name, (base, _) in declared.forms.items() if base is int and name in named)
    declared.numbers = tuple(numbers)
    return declared


def check_values(
    kind: type[Message], values: Mapping[str, Any], party: str, name: str = ""
) -> None:
    """Check the fields of a message, called ``name`` in errors; raises a ProtocolError."""
    sizes = {number: values[number] for number in kind.numbers if type(values[number]) is int}
    for field, (base, form) in kind.forms.items():
        broken = "" if isinstance(form, Form) else _broken_type(base, values[field])
        if broken or (form is not None and (broken := form.broken(values[field], sizes))):
            raise ProtocolError(party, name or kind.__name__, field, broken)
    for field, form, rule, other in kind.relations:
        related = sizes.get(other, values.get(other))
        is_here = related is not None or other == ITSELF  # else its receiver knows it
        if is_here and (broken := form.broken_relation(rule, values[field], related)):
            raise ProtocolError(party, name or kind.__name__, field, broken)


def check_sizes(party: str, received: Message, **sizes: int) -> None:
    """Check a message by dimensions and bounds that only its receiver knows."""
    kind = type(received)
    for field, form in _sized(kind, *sizes):
        value = getattr(received, field)
        broken = form.broken_size(value, sizes) if form else ""
        if not form and value != sizes[field]:
            broken = f"must be {sizes[field]}, got {value}"
        if broken:
            raise ProtocolError(party, kind.__name__, field, broken)
    for field, form, rule, other in kind.relations:
        value = getattr(received, field)
        if other in sizes and (broken := form.broken_relation(rule, value, sizes[other])):
            raise ProtocolError(party, kind.__name__, field, broken)


FieldRule = tuple[str, object, str]  # field, whether the rule holds, and the rule: "must be ..."


def check_fields(party: str, received: object, *rules: FieldRule) -> None:
    """Check what only its receiver knows of a message; a ProtocolError of the first broken rule.

    `received` is a message, its class, or a name that no class has, as that of a parcel.
    """
    for field, holds, rule in rules:
        if not holds:
            kind = received if isinstance(received, type | str) else type(received)
            name = kind if isinstance(kind, str) else kind.__name__
            raise ProtocolError(party, name, field, rule)


@once
def _sized(kind: type[Message], *sizes: str) -> list[tuple[str, Form | None]]:
    """Fields that have one of some dimensions, with their forms, or None for one that is it."""
    forms = [(name, form) for name, (_, form) in kind.forms.items()]
    return [
        (name, form if isinstance(form, Form) else None)
        for name, form in forms
        if (name in kind.numbers and name in sizes)
        or (isinstance(form, Form) and not form.dimensions.isdisjoint(sizes))
    ]


def _broken_type(base: Any, value: Any) -> str:
    """The rule of its type, without a declared form, that a value breaks."""
    if base is tuple:
        if not isinstance(value, tuple):
            return f"must be a list of texts, got {type(value).__name__}"
        if not all(isinstance(text, str) for text in value):
            return "must be a list of texts, got another element in it"
    elif type(value) is not base:
        return f"must be {base.__name__}, got {type(value).__name__}"
    if base is float:
        return "" if math.isfinite(value) else f"must be finite, got {value}"
    if base in (str, tuple):  # shown in terminals, logs and pages of other parties
        texts = (value,) if base is str else value
        if UNPRINTABLE.search("".join(texts)):
            return "must have no control characters but tab and line feed"
        if (longest := max(map(len, texts), default=0)) > LONGEST:
            return f"must be of at most {LONGEST} letters, got {longest}"
    return ""


# Relations: what an array must be by the other value; "" if it is.


def _divides(offsets: Array, size: int) -> str:
    starts = len(offsets) and offsets[0] == 0
    return "" if starts and not _ends(offsets, size) else f"must rise from 0 to {size}"


def _ends(ends: Array, size: int) -> str:
    rises = bool((ends[1:] >= ends[:-1]).all())
    return "" if rises and (ends[-1] if len(ends) else 0) == size else f"must rise to {size}"


def _adds_up(sizes: Array, size: int) -> str:
    # None may exceed the sum, which so cannot overflow.
    fits = sizes.max(initial=0) <= size and int(sizes.sum(dtype=np.int64)) == size
    return "" if fits else f"must add up to {size}"


def _below(values: Array, size: int) -> str:
    highest = values.max(initial=-1)
    return "" if highest < size else f"must be < {size}, got {highest}"


def _ascending(values: Array, offsets: Array | None) -> str:
    rises = values[1:] > values[:-1]
    if offsets is None:
        return "" if rises.all() else "must ascend"
    rises[offsets[(offsets > 0) & (offsets < len(values))] - 1] = True  # between two columns
    return "" if rises.all() else "must ascend in a column"


def _in_order(values: Array, _: None) -> str:
    return "" if (values[1:] >= values[:-1]).all() else "must be in order"


RELATIONS: Mapping[str, Callable[[Array, Any], str]] = {
    "divides": _divides,
    "ends": _ends,
    "adds_up": _adds_up,
    "below": _below,
    "ascending": _ascending,
    "in_order": _in_order,
}


def fields_of(source: Any, kind: type[Any] | None = None) -> dict[str, Any]:
    """A dataclass' fields by name, or only those of ``kind``."""
    return {field.name: getattr(source, field.name) for field in fields(kind or source)}


Objective = Annotated[str, Range(1, 64)]
NotNegative = Annotated[float, Range(0, 1e38)]
BaseMargin = Annotated[Array, Form("float32", "n_outputs")]  # of a row before its first tree
Ciphertexts = Annotated[Array, Form("uint8", "n_ciphertexts", "ciphertext_bytes")]


@part
class TreeParameters:
    """Part of a message: how trees are grown, named as in the run config."""

    max_depth: Annotated[int, Range(0, MOST_DEPTH)]
    grow_policy: Annotated[str, OneOf(get_args(GrowPolicy))]
    max_leaves: Annotated[int, Range(0, MOST_LEAVES)]
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


@part
class LossFields:
    """Part of a message: parameters of the objective, and additional metrics."""

    scale_pos_weight: Annotated[float, Range(0, 1e38)]
    max_delta_step: NotNegative
    tweedie_variance_power: Annotated[float, Range(1, 2)]
    huber_slope: NotNegative
    aft_loss_distribution: Annotated[str, OneOf(DISTRIBUTIONS)]
    aft_loss_distribution_scale: NotNegative
    quantile_alpha: Annotated[float, Range(0, 1)]
    eval_metrics: Annotated[tuple[str, ...], Range(0, 20)]


def parameters_of(source: Any) -> dict[str, Any]:
    """The fields of ``TreeParameters`` of the run's settings or of a message."""
    return fields_of(source, TreeParameters)


def loss_fields(source: Any) -> dict[str, Any]:
    """The fields of ``LossFields`` of the run's settings or of a message."""
    return fields_of(source, LossFields)
