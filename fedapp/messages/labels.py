"""Labels and categories as numbers that mean the same at all parties, and sums of the labels.

Reveals: the server learns the weighted sum of each party's training labels (0 and 1 for two
classes; with ``multi:softprob`` the weight of the training rows of each class), the sum of its
weights, and how many of its values of each column are no names of the common dictionary. A party
learns the classes of all parties, and the names of all categories, though not whose they are; with
two parties, what it does not have is the other's. Where trees start from the mean label, or from
the shares of the classes, it learns these of the rows of all parties.

- Weights by class follow from the scores too (see ``scoring``), and no floor of a site's holds for
  either: a class of a single row is told as such. Two runs that hold back other rows differ by the
  classes of the rows in which they differ; so a site's first run on a table fixes the fractions,
  the seed and the fold, and a run with others begins only if a person at the site approves it.
- A server chooses the objective. With ``multi:softprob`` of labels that are numbers it learns by
  ``hello`` every value that occurs, and here how many training rows have each. A site with
  ``least-parties`` or ``run-epsilon`` refuses that, unless they are at most 20 whole numbers.
- Where each output starts is the server's to say (``base_margin`` of later requests). What it
  learns by other numbers it learns by leaf values of its choice too.
- Under masks (see ``secure``) it learns these sums over all parties; a class that one party alone
  has is that party's, and with two parties each is the rest of the sum to whoever has the other's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from fedapp.errors import ProtocolError
from fedapp.messages.dictionary import JointCoding
from fedapp.messages.fields import Array, Form, Range, Reply, Request
from fedapp.messages.parameters import LossFields

GROUPS = {"labels": frozenset({"horizontal"})}
# Weights of a class' rows are added up in float32, where each may be rounded to twice its size.
CLASS_ROUNDING = 1.0


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

    # Weighted: of the labels, 0 and 1 for two classes; for softmax of the rows of each class.
    label_sums: Annotated[Array, Form("float64", "n_outputs")]
    weight_sum: Annotated[float, Range(0, 1e38)]
    unseen: Annotated[Array, Form("int64", "n_coded_columns", low=0)]  # values that became missing


def check_coded(
    party: str, reply: LabelsReply, n_classes: int, n_outputs: int, n_coded_columns: int
) -> None:
    """Hold sums and counts against the classes (0 for regression) and the coded columns of the run.

    Parameters
    ----------
    n_outputs : margins of a row.
    n_coded_columns : columns of the table, 0 where none has categories.

    Raises
    ------
    ProtocolError : no labels have these sums, or the counts are of other columns.
    """
    message, sums = type(reply).__name__, reply.label_sums
    if len(reply.unseen) != n_coded_columns:
        rule = f"must be one a column of {n_coded_columns}, got {len(reply.unseen)}"
        raise ProtocolError(party, message, "unseen", rule)
    if len(sums) != n_outputs:
        rule = f"must be {n_outputs}, one an output, got {len(sums)}"
        raise ProtocolError(party, message, "label_sums", rule)
    highest = reply.weight_sum * (1 + (1e-6 if n_outputs == 1 else CLASS_ROUNDING))
    if n_classes and not ((sums >= 0) & (sums <= highest)).all():
        raise ProtocolError(party, message, "label_sums", f"must be 0 to {reply.weight_sum:g}")
