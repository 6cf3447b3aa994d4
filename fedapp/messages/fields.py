"""What a message is made of: frozen dataclasses of arrays and scalars with declared forms.

A field is annotated with its form; the codec checks it on both sides::

    histograms: Annotated[Array, Form("float64", "n_wanted", "n_bins", 2)]
    level: Annotated[int, Range(0, 64)]

A dimension written as a name has the same size wherever the name stands in the message.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, get_args, get_origin, get_type_hints

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class Form:
    """Dtype, shape and range of an array field.

    Parameters
    ----------
    dtype : name of a numpy dtype of fixed size.
    *shape : sizes, or names of sizes.
    low, high : smallest and largest value allowed, if any.
    nan : whether NaN is allowed; infinity never is.
    """

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


class Message:
    """What a message of any direction is; its class knows the fields and their forms."""

    __slots__ = ()
    forms: ClassVar[Mapping[str, tuple[Any, Form | Range | None]]]

    def __init_subclass__(cls) -> None:
        # Once, at import: hints are texts, and to evaluate them for every message takes longer than
        # to check it.
        hints = get_type_hints(cls, include_extras=True)
        cls.forms = {
            name: _form_of(hint) for name, hint in hints.items() if get_origin(hint) is not ClassVar
        }


def _form_of(hint: Any) -> tuple[Any, Form | Range | None]:
    """Plain type and declared form of a field."""
    base, form = get_args(hint)[:2] if get_origin(hint) is Annotated else (hint, None)
    return get_origin(base) or base, form


class Request(Message):
    """Sent by the server; ``kind`` is its Flower message type, ``<category>.<module>_<name>``.

    ``doing`` tells whoever watches a run what the parties do meanwhile, such as "aligning rows";
    the exchanges that a training round consists of are marked with ``each_round``.
    """

    __slots__ = ()
    kind: ClassVar[str]
    doing: ClassVar[str]
    each_round: ClassVar[bool] = False


class Reply(Message):
    """Sent back by a party."""

    __slots__ = ()


class Introduction(Reply, ABC):
    """A party's answer to the request that opens a run."""

    __slots__ = ()
    name: str
    simulated: bool  # the table is a share of the one that the run config names
    fingerprint: str  # of the table, in hex; means something to its owner alone
    notes: tuple[str, ...]  # what is odd about the table, in words

    @property
    @abstractmethod
    def n_rows(self) -> int:
        """Rows that the party brings."""


class Letter(Message):
    """Passed from party to party in a sealed parcel, which the server cannot open."""

    __slots__ = ()
