"""What a message is made of: frozen dataclasses of arrays and scalars with declared forms.

A field is annotated with its form; the codec checks it on both sides::

    histograms: Annotated[Array, Form("float64", "n_wanted", "n_bins", 2)]
    level: Annotated[int, Range(0, 64)]

A dimension written as a name has the same size wherever the name stands in the message.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

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


class Request:
    """Sent by the server; ``kind`` is its Flower message type, ``<category>.<module>_<name>``.

    ``doing`` tells whoever watches a run what the parties do meanwhile, such as "aligning rows";
    the exchanges that a training round consists of are marked with ``each_round``.
    """

    __slots__ = ()
    kind: ClassVar[str]
    doing: ClassVar[str]
    each_round: ClassVar[bool] = False


class Reply:
    """Sent back by a party."""

    __slots__ = ()


class Introduction(Reply, ABC):
    """A party's answer to the request that opens a run."""

    __slots__ = ()
    name: str
    simulated: bool  # the table is a share of the one that the run config names
    fingerprint: str  # of the table, in hex; means something to its owner alone

    @property
    @abstractmethod
    def n_rows(self) -> int:
        """Rows that the party brings."""


class Letter:
    """Passed from party to party in a sealed parcel, which the server cannot open."""

    __slots__ = ()
