"""Federated averaging of a logistic, softmax or linear regression.

Source: McMahan et al. 2017, "Communication-Efficient Learning of Deep Networks from Decentralized
Data" (arXiv:1602.05629v4), Algorithm 1.

Reveals, in short:

- The server learns each party's model after every round, unencrypted: of one row in a batch and one
  epoch, its difference to the one sent is that row.
- It learns of each party, once, the mean and spread of every column, and the weight of each
  category's rows.
- A party learns means and spreads over all parties, and the model after each round.

In full: no row, label or gradient of a row leaves a party, and nothing is encrypted.

- With the sums of ``labels`` the server learns of each party, once, for every column the weight,
  the mean and the sum of squared deviations of the non-missing values. For a category this is the
  weight of its rows.
- In every round the server learns each party's trained model. Its difference to the model sent is a
  sum of gradients: a party of one row, or of one row in a batch and one epoch, reveals that row.
- With one row in a batch and a large ``l2`` the model is about the gradient of the last row. A
  secret of the party decides which row that is, unless it is simulated.
- Before each round the server learns each party's training and validation scores, and at the end
  those of the finished model, as in ``scoring``.
- A party learns means and spreads of the columns over all parties, of a column of categories the
  share of each, and the model after each round.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np

from fedapp.messages import scoring
from fedapp.messages.fields import (
    EACH_ROUND,
    Array,
    Form,
    PlanLimit,
    Range,
    Reply,
    Request,
    RoundId,
    SiteLimit,
    check_fields,
    check_sizes,
    message,
    request,
)
from fedapp.messages.handshake import LabelsReply, RunCoding, check_coded
from fedapp.messages.methods import Method

GROUPS = {
    "fedavg_linear": Method(
        "horizontal",
        {"": "each party's columns' means and spreads; its model each round"},
        memory=None,
    ),
}

# An input is a column of numbers, or a category of another column: 1 where a row has it, else 0.
Inputs = Annotated[Array, Form("float64", "n_inputs")]
NotNegative = Annotated[Array, Form("float64", "n_inputs", low=0)]
Weights = Annotated[Array, Form("float64", "n_inputs", "n_outputs")]
Bias = Annotated[Array, Form("float64", "n_outputs")]


@request("train.fedavg_linear_moments", "summing the columns")
class MomentsRequest(RunCoding, Request):
    """Encode labels and categories, and sum labels and columns."""


@message
class MomentsReply(LabelsReply):
    """Weighted sums of the training rows."""

    counts: NotNegative  # weight of the non-missing rows; of a category: of all
    means: Inputs
    squares: NotNegative  # sum of squared deviations from the party's mean


@request("train.fedavg_linear_average", "training", **EACH_ROUND, spare=1)
class AverageRequest(Request):
    """Score the model, then train it; with 0 epochs only score it."""

    round_id: Annotated[int, Range(0, 10**6), RoundId(begins=True, trains="epochs")]
    classes: Annotated[tuple[str, ...], Range(0, 1000)]
    means: Inputs
    scales: NotNegative
    weights: Weights
    bias: Bias
    epochs: Annotated[int, Range(0, 10**6), PlanLimit("epochs")]
    batch_size: Annotated[int, Range(1, 2**31)]
    learning_rate: Annotated[float, Range(0, 1e6)]
    decay: Annotated[float, Range(0, 1)]  # factor of every step of this round
    l2: Annotated[float, Range(0, 1e38)]
    seed: Annotated[int, Range(0, 2**63 - 1)]
    score_bins: Annotated[int, Range(2, 2**20), SiteLimit("score-bins")]


@message
class AverageReply(scoring.RoundSums, Reply):
    """The party's trained model, and the scores of the one it received."""

    weights: Weights
    bias: Bias


@request("evaluate.fedavg_linear_scores", "scoring")
class ScoreRequest(scoring.ScoreOrder, Request):
    """Score the finished model on all rows; the reply is ``scoring``'s."""


def check_moments(
    party: str,
    reply: MomentsReply,
    n_inputs: int,
    n_classes: int,
    n_outputs: int,
    n_coded_columns: int,
) -> None:
    """Check moments: a ProtocolError for other inputs or classes, or impossible means or sums.

    ``n_inputs`` are columns of numbers, and categories of all others.
    """
    check_sizes(party, reply, n_inputs=n_inputs)
    fits = (np.abs(reply.means) <= np.finfo(np.float32).max).all()
    check_fields(party, reply, ("means", fits, "must be within float32, as columns are"))
    check_coded(party, reply, n_classes, n_outputs, n_coded_columns)
