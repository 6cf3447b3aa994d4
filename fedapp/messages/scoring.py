"""Scores of a finished model, boosted or linear.

Reveals: the model, and how its scores are distributed over each party's rows.

- A party gets the whole model.
- The server learns, for the train, validation and test rows of each party, the sums that its
  metrics are made of, and a histogram of its scores.
- For two classes this is the weight of each class per bin of the predicted probability.
- For several classes it is the confusion matrix, and for every class the weight of its rows and of
  all others per bin of its predicted probability.
- For regression it is the weight per bin of the residual.
- A metric of ``eval-metric`` may add one more sum.
- A bin may contain one row; rows with the same score cannot be distinguished.
- The run's summary contains the scores of each party that follow from these sums.
- Under masks (``SumScoresRequest``, see ``secure``) the server learns all of this only for all
  parties together, and no scores of single ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from fedapp.messages.fields import Array, Form, Range, Reply, Request, SiteLimit
from fedapp.messages.secagg import Among

GROUPS = {"scoring": frozenset({"horizontal"})}

Sums = Annotated[Array, Form("float64", "n_sums")]
Scores = Annotated[Array, Form("float64", "n_score_rows", "n_score_bins", low=0)]


@dataclass(frozen=True, slots=True, eq=False)
class EvaluateRequest(Request):
    """Score the model on all rows; the last message of a run."""

    kind: ClassVar[str] = "evaluate.scoring_scores"
    doing: ClassVar[str] = "scoring"
    model: Annotated[Array, Form("uint8", "n_bytes")]  # model.json, UTF-8
    score_bins: Annotated[int, Range(2, 2**20), SiteLimit("score-bins")]
    residual_range: Annotated[float, Range(0, 1e38)]  # of the residual bins, in the label's unit


@dataclass(frozen=True, slots=True, eq=False)
class SumScoresRequest(Among, EvaluateRequest):
    """As ``EvaluateRequest``, for ``sums``: the fields of an ``EvaluateReply``."""

    kind: ClassVar[str] = "evaluate.scoring_sums"
    leaves: ClassVar[str] = "sums"


@dataclass(frozen=True, slots=True, eq=False)
class EvaluateReply(Reply):
    """Sums for ``fedapp.metrics`` for each subset of a party's rows."""

    train_sums: Sums
    train_scores: Scores
    valid_sums: Sums
    valid_scores: Scores
    test_sums: Sums
    test_scores: Scores
