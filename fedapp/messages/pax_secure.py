"""Differentially private PAX: what a run discloses of a row is bounded by its epsilon.

Reveals, in short:

- [epsilon!=0] Every party adds noise to each sum: what the sums and the model disclose of a row,
  also to the other parties, is bounded by the epsilon.
- [epsilon!=0] The bound is for a row, not for all rows of a person, and not if all other parties
  collude with the server.
- [epsilon!=0] Not bounded: numbers of rows, names of columns, classes and categories, the range of
  labels and the largest weight, to a power of two.

[epsilon!=0] In full: as ``secure``, but no sum is exact. Every party adds discrete Gaussian noise
to each sum before it masks it.

- The server learns noised sums over all parties of the labels and the weights (with
  ``multi:softprob`` of the weights only: every class starts at 0.5), and of the weights of rows by
  the digits of their values.
- The server learns noised sums of gradients and hessians at the leaves of trees whose structure it
  draws without looking at rows.
- The server learns noised sums of the scores of validation and test rows of the finished model,
  with no scores before and none of training rows.
- These sums, and the model, which follows from them, are (epsilon, delta)-differentially private:
  they are almost as likely if one row of one party had weight 0.
- Each party's noise is large enough that this holds against the other parties too, each of which
  knows its noise, but not if all of them but one collude with the server. It holds for each row,
  not for all rows of a person together.
- A party draws its noise from its operating system, once for each sum of the schedule, and draws
  the same again if a restarted server asks the same again. It refuses another request in its place,
  and one beyond the schedule.
- A party refuses, by the accountant, a run whose noise does not keep the promise of its opening,
  and a promise above the node config's ``run-epsilon``.
- Runs add up: before a site answers an opening, and again before the first noised sum leaves, it
  composes all private runs on tables that share a row with its own, by the same accountant and for
  the smallest of their deltas, and refuses a run that would exceed its ``total-epsilon``. An
  opening that gets no noised sum is not charged.
- A site refuses an opening whose delta is not below one over its number of training rows.
- A thief of a site's disk during a run can remove that site's noise; when the run ends, the key of
  the noise is deleted.
- Not covered is what ``hello`` and ``secure`` disclose, among it the numbers of rows, the names of
  columns, of classes and, unless a schema gives them or few rows have them (``share-categories``),
  of categories, the range of numeric labels, to powers of two, and the largest weight, to a power
  of two.
- Not covered are whether a party fails, and settings that were chosen by looking at the same rows.
- Held-out rows have a budget to themselves, of the same size, because each is in one subset only
  and only their scores depend on them. Over several runs a row may be in both, so each run counts
  in full.
"""

from __future__ import annotations

from typing import Annotated

from fedapp.messages import cuts
from fedapp.messages.fields import (
    EACH_ROUND,
    Array,
    BaseMargin,
    Form,
    PlanLimit,
    Range,
    Request,
    RoundId,
    part,
    request,
)
from fedapp.messages.handshake import RunCoding
from fedapp.messages.scoring import ScoreOrder, Trees
from fedapp.messages.secagg import Roster

GROUPS = {"private": frozenset({"horizontal"})}

# Sent as the number of all rows. Units follow from it: noise has room beside the sums, and a row of
# the largest weight counts 2^22 units.
COUNTED_ROWS = 2**40


@part
class Promise:
    """Part of a message: what a run may disclose about a row; see ``fedapp.crypto.noise``."""

    epsilon: Annotated[float, Range(0, 1e6)]
    delta: Annotated[float, Range(0, 1)]
    multiplier: Annotated[float, Range(0, 1e9)]  # of noise, for the whole budget
    n_rounds: Annotated[int, Range(1, 10**6), PlanLimit("rounds")]
    clip: Annotated[float, Range(0, 1e30)]  # largest absolute gradient; 0: bounded by the objective


@request("train.private_open", "counting values", leaves="noised")
class PrivateOpenRequest(RunCoding, Roster, Promise, Request):
    """Start with the roster; encode labels and categories; sum the labels, count first digits.

    Asks for noised sums: of the labels (except for several outputs), of the weights, and
    ``digit_counts`` of all columns of numbers.
    """


@request("train.private_count", "counting values", leaves="noised", times=3)
class PrivateCountRequest(cuts.Digits):
    """Count the weights of rows by the next digit of their values; see ``digit_counts``."""


@request("train.private_trees", "growing trees", leaves="noised", **EACH_ROUND)
class PrivateTreesRequest(Trees, Request):
    """Add the last round's leaves to the margins; sum gradients at the leaves of new trees.

    The leaves of the trees sent have the value 0.
    """

    round_id: Annotated[int, Range(0, 10**6), RoundId(begins=True)]
    base_margin: BaseMargin
    # Of the last round's leaves; empty once they have been sent.
    leaf_values: Annotated[Array, Form("float32", "n_leaf_values")]


@request("evaluate.private_scores", "scoring", leaves="noised")
class PrivateScoresRequest(ScoreOrder, Request):
    """As ``EvaluateRequest``, for noised sums of validation and test rows."""
