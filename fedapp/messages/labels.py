"""Labels and categories as numbers that mean the same at all parties, and sums of the labels.

Reveals: sums of each party's labels, and the names of classes and categories.

- The server learns the weighted sum of each party's training labels (0 and 1 for two classes; with
  ``multi:softprob`` the weight of the training rows of each class), the sum of its weights, and how
  many of its values of each column are not in the common dictionary.
- A party learns the classes of all parties, and the names of all categories, but not whose they
  are; with two parties, names that it does not have are the other's.
- Where trees start from the mean label, or from the shares of the classes, a party learns these of
  the rows of all parties.
- Weights by class follow from the scores too (see ``scoring``), and no minimum of a site's applies
  to either: a class of a single row is sent as such.
- Two runs that hold out different rows differ by the classes of the rows in which they differ. So a
  site's first run on a table fixes the fractions, the seed and the fold, and a run with others
  starts only if a person at the site approves it.
- The server chooses the objective. With ``multi:softprob`` of numeric labels it learns by ``hello``
  every value that occurs, and here how many training rows have each. A site with ``least-parties``
  or ``run-epsilon`` refuses that, unless they are at most 20 whole numbers.
- The server chooses where each output starts (``base_margin`` of later requests). What other
  numbers would reveal to it, leaf values of its choice reveal too.
- Under masks (see ``secure``) the server learns these sums over all parties. A class that only one
  party has is that party's, and with two parties each can subtract its sums from the total to get
  the other's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from fedapp.errors import ProtocolError
from fedapp.messages.dictionary import JointCoding
from fedapp.messages.fields import Array, Form, Range, Reply, Request
from fedapp.messages.parameters import LossFields

GROUPS = {"labels": frozenset({"horizontal"})}
# Weights of a class are summed in float32, where rounding may at most double each.
CLASS_ROUNDING = 1.0


@dataclass(frozen=True, eq=False)
class Terms(JointCoding, LossFields):
    """Part of a message: settings that are the same at all parties for the whole run."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, eq=False)
class LabelsRequest(Terms, Request):
    """Replace the names of classes and categories by ids, and sum the labels."""

    kind: ClassVar[str] = "query.labels"
    doing: ClassVar[str] = "reading the labels"


@dataclass(frozen=True, slots=True, eq=False)
class LabelsReply(Reply):
    """Sums over the party's training rows, and how many values the dictionary lacks."""

    # Weighted sums of the labels (0 and 1 for two classes); for softmax weights of the classes.
    label_sums: Annotated[Array, Form("float64", "n_outputs")]
    weight_sum: Annotated[float, Range(0, 1e38)]
    unseen: Annotated[Array, Form("int64", "n_coded_columns", low=0)]  # values that became missing


def check_coded(
    party: str, reply: LabelsReply, n_classes: int, n_outputs: int, n_coded_columns: int
) -> None:
    """Check sums and counts against the classes (0 for regression) and columns of the run.

    A row has ``n_outputs`` margins; ``n_coded_columns`` is 0 if no column has categories.
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
