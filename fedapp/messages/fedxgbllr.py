"""FedXGBllr: every party's XGBoost trees under a network that all parties train.

Source: Ma et al. 2023, "Gradient-less Federated Gradient Boosting Trees with Learnable Learning
Rates", Algorithm 1.

Reveals, in short:

- The server learns each party's trees, unencrypted: thresholds are between the party's values, and
  a leaf may describe a single row.
- It learns in every round what each party's training makes of the network's weights, and their mean
  loss.
- A party learns the trees of all other parties, but not their names.

In full: no row, label or gradient of a row leaves a party, and nothing is encrypted.

- The server learns each party's trees as XGBoost fitted them, with the gain of every split:
  thresholds are between the party's values, and a leaf may describe a single row.
- The server learns each party's number of training rows and, for regression, the sum of the squared
  distances of its labels from the mean.
- In every round the server learns the head's weights after each party's training and their mean
  loss, and at the end by how much on average over the party's training rows the head scales each
  tree.
- Before each round the server also learns scores as in ``scoring``, and the sums of ``labels``.
- A secret of the party decides which rows and columns it draws, and the order of its batches,
  unless it is simulated. A party refuses a run that would draw fewer rows than ``min-rows``.
- A party learns the trees of all other parties, without gains, in the order of the parties' names,
  but not the names.
- A party learns the head after each round, and the mean of all parties' labels, with their standard
  deviation for regression.
"""

from __future__ import annotations

from typing import Annotated

from fedapp.messages.fields import (
    EACH_ROUND,
    Array,
    Form,
    OneOf,
    PlanLimit,
    Range,
    Reply,
    Request,
    RoundId,
    SiteLimit,
    TreeParameters,
    message,
    request,
)
from fedapp.messages.methods import Memory, Method
from fedapp.messages.scoring import GETS, EvaluateReply, RatedTrees, RoundSums, Trees

# Of XGBoost's matrix; and of the trees' outputs, on which the head is trained.
MEMORY = Memory(value=5, tree=4)
GROUPS = {"fedxgbllr": Method("horizontal", GETS, package="torch", memory=MEMORY)}

Weights = Annotated[Array, Form("float32", "n_weights")]


@request("train.fedxgbllr_fit", "growing trees")
class FitRequest(TreeParameters, Request):
    """Fit XGBoost once on the training rows."""

    n_outputs: Annotated[int, Range(1, 1000)]
    base_score: Annotated[Array, Form("float32", "n_outputs")]
    n_rounds: Annotated[int, Range(1, 10**5), PlanLimit("trees")]
    early_stopping_rounds: Annotated[int, Range(0, 10**6)]  # on the party's validation rows


@message
class FitReply(RatedTrees, Reply):
    """The party's trees in XGBoost's order: one an output a round."""

    square_sum: Annotated[float, Range(0, 1e300)]  # weighted, of label - base score; regression


@request("train.fedxgbllr_share", "applying the trees to the rows")
class ShareRequest(Trees, Request):
    """All parties' trees, one party after the other in the order of their names."""

    # Trees; missing ones output zeros.
    counts: Annotated[Array, Form("int32", "n_parties", low=0, adds_up="n_trees")]
    n_outputs: Annotated[int, Range(1, 1000)]
    head: Annotated[str, OneOf(("cnn", "cnn3", "fcnn"))]
    channels: Annotated[int, Range(1, 10**5)]
    classes: Annotated[tuple[str, ...], Range(0, 1000)]
    base_score: Annotated[Array, Form("float32", "n_outputs")]
    unit: Annotated[float, Range(1e-37, 1e38)]  # of the head's margins


@message
class ShareReply(Reply):
    """The outputs of all trees are stored on the party's disk."""

    n_rows: Annotated[int, Range(1, 2**40)]  # training rows


@request("train.fedxgbllr_average", "training the head", **EACH_ROUND, spare=1)
class AverageRequest(Request):
    """Score the head, then train it; with 0 epochs only score it."""

    round_id: Annotated[int, Range(0, 10**6), RoundId(begins=True, trains="epochs")]
    weights: Weights
    epochs: Annotated[int, Range(0, 10**6), PlanLimit("epochs")]
    batch_size: Annotated[int, Range(1, 2**20)]
    learning_rate: Annotated[float, Range(0, 1e6)]
    beta1: Annotated[float, Range(0, 1)]
    beta2: Annotated[float, Range(0, 1)]
    patience: Annotated[int, Range(0, 10**6)]  # epochs, by the party's validation rows
    device: Annotated[str, Range(1, 16)]
    seed: Annotated[int, Range(0, 2**63 - 1)]
    score_bins: Annotated[int, Range(2, 2**20), SiteLimit("score-bins")]


@message
class AverageReply(RoundSums, Reply):
    """The party's trained head, and the scores of the one it received."""

    weights: Weights
    n_rows: Annotated[int, Range(1, 2**40)]
    loss: float  # mean of the last epoch; 0 without one


@request("evaluate.fedxgbllr_final", "scoring")
class FinalRequest(Request):
    """Score the finished head on all rows, store the model, delete the rows."""

    weights: Weights
    score_bins: Annotated[int, Range(2, 2**20), SiteLimit("score-bins")]
    residual_range: Annotated[float, Range(0, 1e38)]  # of the residual bins, in the label's unit


@message
class FinalReply(EvaluateReply):
    """Scores, and the learned rate of every tree, mean over the party's training rows."""

    rates: Annotated[Array, Form("float64", "n_parties", "n_trees")]
