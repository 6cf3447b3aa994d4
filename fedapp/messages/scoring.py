"""Scores of a finished model, boosted or linear.

Reveals, in short:

- [trains=true, aggregation=plain] The server learns the scores of each party's training, validation
  and test rows, as histograms in which a bin may be of one row.
- [trains=true, aggregation=secure, epsilon=0] Of scores the server learns histograms over all
  parties, in which a bin may be of one row.
- [trains=true] Every party gets the whole model, in which names, cut points and leaves may be of
  few rows.

[trains=true] In full: the model, and how its scores are distributed over each party's rows.

- A party gets the whole model.
- The server learns, for the train, validation and test rows of each party, the sums that its
  metrics are made of, and a histogram of its scores.
- [objective=binary:logistic|binary:hinge|custom] For two classes this is the weight of each class
  per bin of the predicted probability.
- [objective=multi:softprob] For several classes it is the confusion matrix, and for every class the
  weight of its rows and of all others per bin of its predicted probability.
- For regression it is the weight per bin of the residual.
- [objective=survival:aft|survival:cox] For times (``survival:aft``, ``survival:cox``) it is the
  weight of events, and of censored rows, at up to 127 times and between these, per column of the
  prediction: of a row that is alone in its cell, both within some percent. The server chooses these
  times and columns: it knows times from the cuts (see ``pax``), and where predictions are from the
  scores of the round before. A server that breaks the rules chooses others, and learns the time of
  one row more exactly, once a round.
- [objective=rank:ndcg|rank:pairwise] Of ranked rows (``rank:ndcg``, ``rank:pairwise``) it is
  neither: only the number of queries, and the sum of their NDCG. Of a single query this is its
  NDCG, which may tell how its rows are ranked.
- A metric of ``eval-metric`` may add one more sum.
- A bin may contain one row; rows with the same score cannot be distinguished.
- The run's summary contains the scores and the class weights of each party that follow from these
  sums.
- [aggregation=secure] Under masks (see ``secure``) the server learns all of
  this only for all parties together, and no scores of single ones.
- The server learns how many of the model's names of categories, cut points and ends of columns
  belong to fewer rows of a party than ``least-rows-per-name``, or 10 (``fedapp.trees.shown``).
- [scale-pos-weight=balanced] With ``scale-pos-weight=balanced`` a party gets, before the first
  tree, the weight of all parties' negative training rows over that of the positive ones.

Trees in a message have the layout of ``fedapp.trees.model``: 6 bytes a node and 5 a split, and one
bit a category where a split is by categories. What they reveal is said by the methods whose
messages contain them.
"""

from __future__ import annotations

from typing import Annotated

from fedapp.messages.fields import (
    OWN_OR_SUMS,
    Array,
    BaseMargin,
    Form,
    PlanLimit,
    Range,
    Reply,
    Request,
    RoundId,
    SiteLimit,
    TreeParameters,
    fields_of,
    message,
    part,
    request,
)
from fedapp.messages.handshake import Few
from fedapp.messages.secagg import Among

GROUPS = {"scoring": frozenset({"horizontal"})}

Sums = Annotated[Array, Form("float64", "n_sums")]
Scores = Annotated[Array, Form("float64", "n_score_rows", "n_score_bins", low=0)]
GETS = {"": "each party's trees; a leaf may be a single row"}


@request("train.scoring_balance", "balancing the classes", leaves="nothing")
class BalanceRequest(Request):
    """Set the ``scale_pos_weight``, which was 0 until the labels were summed."""

    scale_pos_weight: Annotated[float, Range(0, 1e38)]


@message
class BalanceReply(Reply):
    """It is set."""


@part
class TimeCells:
    """Part of a message: where the table of times and margins is divided; else empty."""

    # See ``fedapp.metrics.survival.Cells``.
    time_points: Annotated[Array, Form("float64", "n_time_points", low=0, ascending=True)]
    score_edges: Annotated[Array, Form("float64", "n_score_edges", ascending=True)]


@part
class ScoreOrder(TimeCells):
    """Part of a message: score the model on all rows; the last message of a run."""

    model: Annotated[Array, Form("uint8", "n_bytes")]  # model.json, UTF-8
    score_bins: Annotated[int, Range(2, 2**20), SiteLimit("score-bins")]
    residual_range: Annotated[float, Range(0, 1e38)]  # of the residual bins, in the label's unit


@request("evaluate.scoring_scores", "scoring", leaves=OWN_OR_SUMS)
class EvaluateRequest(Among, ScoreOrder, Request):
    """Score the model; sums are the fields of an ``EvaluateReply``."""


@part
class RoundSums:
    """Part of a message: sums for ``fedapp.metrics`` of the model so far."""

    train_sums: Sums
    train_scores: Scores
    valid_sums: Sums
    valid_scores: Scores


@message
class EvaluateReply(RoundSums, Reply):
    """Sums for ``fedapp.metrics`` for each subset of a party's rows."""

    test_sums: Sums
    test_scores: Scores
    few: Few  # with noise not counted


@part
class Trees:
    """Part of a message: trees, one after the other."""

    # Nodes of each tree.
    sizes: Annotated[Array, Form("int32", "n_trees", low=1, adds_up="n_nodes")]
    lefts: Annotated[Array, Form("uint16", "n_nodes")]  # left child, 0 at a leaf
    values: Annotated[Array, Form("float32", "n_nodes")]  # threshold or leaf value
    columns: Annotated[Array, Form("int32", "n_splits", low=0)]
    defaults: Annotated[Array, Form("uint8", "n_splits", low=0, high=1)]  # 1: missing goes left
    sets: Annotated[Array, Form("uint8", "n_set_bytes")]  # bits of categories that go right


@part
class RatedTrees(Trees):
    """Trees with the gain of each split."""

    gains: Annotated[Array, Form("float32", "n_splits")]


@part
class GrownTrees(RatedTrees):
    """Trees with all that importance and SHAP values need."""

    hessians: Annotated[Array, Form("float32", "n_nodes", low=0)]
    weights: Annotated[Array, Form("float32", "n_nodes")]


@part
class BoostOrder(Trees, TreeParameters):
    """The trees that a party does not have yet, and how to boost from there."""

    round_id: Annotated[int, Range(0, 10**6), RoundId(begins=True, trains="n_rounds")]
    # 0: only score the model so far.
    n_rounds: Annotated[int, Range(0, 10**6), PlanLimit("trees")]
    n_classes: Annotated[int, Range(0, 1000)]
    base_margin: BaseMargin
    score_bins: Annotated[int, Range(2, 2**20), SiteLimit("score-bins")]


@message
class BoostReport(RoundSums, GrownTrees, Reply):
    """The trees a party has grown, and scores of the model before them."""


def arrays_of(message: Trees) -> dict[str, Array]:
    """The arrays of a message's trees."""
    kind = next(kind for kind in (GrownTrees, RatedTrees, Trees) if isinstance(message, kind))
    return fields_of(message, kind)
