"""Labels as numbers, and their mean.

Reveals: the server learns the weighted sum of each party's training labels (class ids for
classification) and the sum of its weights; a party learns the classes of all parties.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from fedapp.errors import ProtocolError
from fedapp.messages.fields import Range, Reply, Request

SHARED_BY = frozenset({"horizontal"})


@dataclass(frozen=True, slots=True)
class LabelsRequest(Request):
    """Put class ids in place of class names, and sum the labels."""

    kind: ClassVar[str] = "query.labels"
    doing: ClassVar[str] = "reading the labels"
    classes: Annotated[tuple[str, ...], Range(0, 1000)]  # of all parties, in the order of their ids


@dataclass(frozen=True, slots=True)
class LabelsReply(Reply):
    """Sums over the party's training rows."""

    label_sum: float  # weighted; of class ids for classification
    weight_sum: Annotated[float, Range(0, 1e38)]


def check_label_sum(party: str, reply: LabelsReply, n_classes: int) -> None:
    """Hold a sum of labels against the number of classes (0 for regression).

    Raises
    ------
    ProtocolError : no labels have this sum.
    """
    highest = (n_classes - 1) * reply.weight_sum
    if n_classes and not 0 <= reply.label_sum <= highest * (1 + 1e-6):
        message = type(reply).__name__
        raise ProtocolError(party, message, "label_sum", f"must be 0 to {highest:g}")
