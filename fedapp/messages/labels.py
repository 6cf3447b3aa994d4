"""Labels and categories as numbers that mean the same at all parties, and the mean of the labels.

Reveals: the server learns the weighted sum of each party's training labels (class ids for
classification), the sum of its weights, and how many of its values of each column are no names of
the common dictionary. A party learns the classes of all parties, and the names of all categories,
though not whose they are; with two parties, what it does not have is the other's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from fedapp.errors import ProtocolError
from fedapp.messages.dictionary import JointCoding, check_unseen
from fedapp.messages.fields import Array, Form, Range, Reply, Request
from fedapp.messages.parameters import LossFields

SHARED_BY = frozenset({"horizontal"})


@dataclass(frozen=True, eq=False)
class Terms(JointCoding, LossFields):
    """Part of a message: what is the same at all parties to the end of a run."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, eq=False)
class LabelsRequest(Terms, Request):
    """Put ids in place of the names of classes and categories, and sum the labels."""

    kind: ClassVar[str] = "query.labels"
    doing: ClassVar[str] = "reading the labels"


@dataclass(frozen=True, slots=True, eq=False)
class LabelsReply(Reply):
    """Sums over the party's training rows, and what of all its rows the dictionary lacks."""

    label_sum: float  # weighted; of class ids for classification
    weight_sum: Annotated[float, Range(0, 1e38)]
    unseen: Annotated[Array, Form("int64", "n_coded_columns", low=0)]  # values that became missing


def check_coded(party: str, reply: LabelsReply, n_classes: int, n_coded_columns: int) -> None:
    """Hold sums and counts against the classes (0 for regression) and the coded columns of the run.

    Parameters
    ----------
    n_coded_columns : columns of the table, 0 where none has categories.

    Raises
    ------
    ProtocolError : no labels have this sum, or the counts are of other columns.
    """
    check_unseen(party, type(reply).__name__, reply.unseen, n_coded_columns)
    highest = (n_classes - 1) * reply.weight_sum
    if n_classes and not 0 <= reply.label_sum <= highest * (1 + 1e-6):
        message = type(reply).__name__
        raise ProtocolError(party, message, "label_sum", f"must be 0 to {highest:g}")
