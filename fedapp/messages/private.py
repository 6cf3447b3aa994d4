"""Sums with noise, that tell of no row what is more than a run's epsilon allows.

Reveals: as ``secure``, but no sum is exact. The server learns sums over all parties to each of
which every party has added discrete Gaussian noise before it masked them: of the labels and the
weights (with ``multi:softprob`` of the weights alone: every class starts at 0.5); of the weights of
rows by the digits of their values; of gradients and hessians at the leaves of trees whose structure
it draws without looking at rows or, with ``privacy.trees=greedy``, grows from such sums by node,
column and bin; and of the scores of validation and test rows of the finished model, with no scores
before and none of training rows. What it learns so, and the model, which follows from it, is
(epsilon, delta)-differentially private: it is almost as likely if one row of one party counts for
nothing. Each party's noise is large enough that this holds against the other parties too, each of
which knows its own noise, but not against all of them but one together with the server; and it
holds of each row, not of all rows of a person together.

- A party draws its noise from its operating system, once for each sum of the schedule, and draws
  the same again where a server that was started anew asks the same again. It refuses another
  request in its place, one beyond the schedule, and, by the accountant, a run whose noise does not
  keep what its opening promises. What it promises is at most what the node config has
  (``run-epsilon``). Runs add up: before a site answers an opening, it composes all private runs
  that it has ever admitted on its table, by the same accountant and for the least of their deltas,
  and refuses what would come to more than its ``total-epsilon``.
- Who steals a site's disk during a run can take that site's noise off; when the run ends, the key
  of the noise is deleted.
- Not covered are: what ``hello`` and ``secure`` tell, among it the numbers of rows, the names of
  columns, of classes and, unless a schema gives them (``share-categories = false``), of categories,
  the range of labels that are numbers, to powers of two, and the largest weight, to a power of two;
  whether a party fails; and settings that were chosen by looking at the same rows.
- Held-out rows have a budget of their own, as large, for each is in one subset alone: only their
  scores depend on them. Over several runs a row may be in both, so each counts in full.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from fedapp.messages import scoring
from fedapp.messages.fields import Array, Form, PlanLimit, Range, Request
from fedapp.messages.labels import Terms
from fedapp.messages.parameters import MOST_DEPTH, BaseMargin
from fedapp.messages.secure import Roster, ToldCuts
from fedapp.messages.trees import Trees

GROUPS = {"private": frozenset({"horizontal"})}

# What is told as the number of all rows: units follow from it, so that noise has room beside the
# sums, and a row of the largest weight has 2^22 of them.
COUNTED_ROWS = 2**40


@dataclass(frozen=True, eq=False)
class Promise:
    """Part of a message: what a run may tell of a row; see ``fedapp.crypto.budget``."""

    __slots__ = ()
    epsilon: Annotated[float, Range(0, 1e6)]
    delta: Annotated[float, Range(0, 1)]
    multiplier: Annotated[float, Range(0, 1e9)]  # of noise, of the whole budget
    n_rounds: Annotated[int, Range(1, 10**6), PlanLimit("rounds")]
    levels: Annotated[int, Range(0, MOST_DEPTH)]  # of a tree that are split by sums; 0: drawn
    clip: Annotated[float, Range(0, 1e30)]  # size of the largest gradient; 0: has a bound


@dataclass(frozen=True, slots=True, eq=False)
class PrivateOpenRequest(Terms, Roster, Promise, Request):
    """Meet the others, code labels and categories; sum the labels, count what columns begin with.

    Asks for noised sums: of the labels, but for several outputs, and of the weights; and
    ``digit_counts`` of all columns of numbers.
    """

    kind: ClassVar[str] = "train.private_open"
    doing: ClassVar[str] = "counting values"
    leaves: ClassVar[str] = "noised"


@dataclass(frozen=True, slots=True, eq=False)
class PrivateCountRequest(Request):
    """Count the weights of rows by the next digit of their values; see ``digit_counts``."""

    kind: ClassVar[str] = "train.private_count"
    doing: ClassVar[str] = "counting values"
    leaves: ClassVar[str] = "noised"
    digit: Annotated[int, Range(1, 3)]
    prefixes: Annotated[Array, Form("uint32", "n_prefixes")]  # ascending in a column
    offsets: Annotated[Array, Form("int64", "n_column_offsets", low=0)]  # n_columns + 1


@dataclass(frozen=True, slots=True, eq=False)
class PrivateTreesRequest(Trees, Request):
    """Add the leaves of the last round to the margins; sum gradients and hessians at the leaves of
    this round's trees, whose own values are 0."""

    kind: ClassVar[str] = "train.private_trees"
    doing: ClassVar[str] = "growing trees"
    each_round: ClassVar[bool] = True
    leaves: ClassVar[str] = "noised"
    round_id: Annotated[int, Range(0, 10**6)]
    base_margin: BaseMargin
    # Of the last round's leaves; none once they are told.
    leaf_values: Annotated[Array, Form("float32", "n_leaf_values")]


@dataclass(frozen=True, slots=True, eq=False)
class PrivateSplitsRequest(ToldCuts, PrivateTreesRequest):
    """As ``PrivateTreesRequest``, of trees that grow: sum gradients and hessians of the rows at
    their leaves of one level by bin, and of those without a value by column.

    The first one of a round has the leaves of the last one; those after it, none.
    """

    kind: ClassVar[str] = "train.private_splits"
    level: Annotated[int, Range(0, MOST_DEPTH), PlanLimit("max_depth")]
    drawn: Annotated[Array, Form("int32", "n_drawn", low=0)]  # columns to sum over, ascending


@dataclass(frozen=True, slots=True, eq=False)
class PrivateScoresRequest(scoring.EvaluateRequest):
    """As ``EvaluateRequest``, for noised sums of validation and test rows."""

    kind: ClassVar[str] = "evaluate.private_scores"
    leaves: ClassVar[str] = "noised"
