"""PAX: party-adaptive histogram boosting.

Source: Ong et al. 2020, "Adaptive Histogram-Based Gradient Boosted Trees for Federated Learning".

Reveals, in short:

- [aggregation=plain] The server can rebuild most rows of a small table, with their labels: each
  party's sums by tree node, column and bin are not encrypted.
- [aggregation=plain] It also learns values of each column of each party, its largest one, and how
  many rows each category has.
- [aggregation=secure, epsilon=0] The server learns only sums over all parties. A sum by tree node,
  column and bin may be of one row: some rows can be rebuilt, but not whose they are.
- [aggregation=secure, epsilon=0] A server that breaks the rules can learn all values of a column
  that begin with digits that it chooses, of all parties together.
- [aggregation=secure, epsilon=0, parties=2] With two parties, each can subtract its sums: the rest
  is the other's.
- [objective=reg:absoluteerror|reg:quantileerror] Of some rows the label is disclosed exactly.

[aggregation=plain] In full, with ``pax.aggregation=plain``: nothing is encrypted, and the server
can rebuild rows.

- The server learns of each party a representative and the weight of every bin of every column of
  numbers (so the values themselves of a column with fewer values than bins), each such column's
  largest value, and the sums of ``labels``.
- The server learns of each party, per tree node, column and bin, the sums of gradients and hessians
  and the number of missing values. A bin may contain a single row: the share rule gives a small
  party few bins, and nothing else hides its rows.
- Each category has a bin, so the server learns how many rows a party has of every category. Nothing
  hides a rare one.
- Before each round the server also learns each party's training and validation scores, as in
  ``scoring``.
- [objective=survival:aft|survival:cox] Where labels are times, it learns the same of them as of the
  values of a column, and a party the times at which scores divide them.
- [objective=survival:cox] With ``survival:cox`` the server also learns, before each round, each
  party's sum of hazard ratios and number of events in each bin of times.
- [objective=reg:absoluteerror|reg:quantileerror] To find the quantiles of leaves, the server learns
  of each party how many drawn rows of each leaf, and at first of all labels, have each first digit
  of a residual (of four in base 256: its sign, and its size to a factor of 4), and the further
  digits near the quantile: residuals that differ from it in the last digit only are disclosed
  exactly, and so are the labels of these rows.
- [min-parties!=0] Where the run may go on without a lost party (``min-parties``), a round may begin
  again, as often as the plan says: a server that breaks the rules gets as many rounds more.
- The server compares a party's sums with its sketch and with each other (see
  ``fedapp.trees.histogram_checks``), and excludes a party that sends sums that no such rows have.
  Sums of other rows within the same weights pass, as of flipped labels, and may ruin the model.

[aggregation=secure] In full, with ``pax.aggregation=secure``: everything except ``hello`` and keys
is masked (see ``secure``).

- [epsilon=0] The server learns only sums over all parties: of the labels, of the weights and of
  values that the dictionary lacks; how many rows have each category; the weights of rows by the
  first digits of their values, and around each quantile by all digits, down to values that only one
  row has.
- [epsilon=0] It learns, summed over all parties, per tree node, column and bin the sums of
  gradients and hessians and the number of missing values, and the scores of all rows; for leaves
  that are quantiles the rows of each leaf by the digits of their residuals, some of a single row.
- [objective=survival:aft|survival:cox, epsilon=0] Where labels are times, it learns the same of
  them as of a column's values; with ``survival:cox`` also the sums of hazard ratios and events by
  bin of times over all parties.
- [epsilon=0] A sum may still be of one row, and enough of them let an observer rebuild some rows,
  but not whose they are: see ``simulations attacks pax_rows``. Rows of a category that only one
  party has are that party's.
- A server that breaks the rules may make rounds draw few rows, where sites have neither
  ``min-rows`` nor ``least-bin-rows``; it chooses neither whose rows they are nor which.
- Rows are counted by each of four digits once a run, before the cuts are sent; a resumed run
  requests the same again. A server that breaks the rules chooses which first digits are counted
  further, at most ``most-bins`` of a column each time, and so can learn all values that begin with
  these: of a column with no more distinct ones than that, every value of every party. No minimum of
  a site's applies to counts. Noise does (see ``private``).
- A party learns the model as it grows, the cuts of all columns, and which first digits values near
  the quantiles have. With two parties, each knows that the rest is the other's.
- Nothing that a party sends is checked for plausibility: it may send sums of rows that it does not
  have.

With and without masks:

- A site with ``least-bin-rows`` merges bins of fewer of its rows in each node, and sends zeros for
  a node of fewer. This applies within a round. The sums and scores at the start of the next round
  are over all rows, and change by those of a leaf.
- [epsilon=0] A server that breaks the rules gives a value to one leaf only, and learns exactly how
  many rows of each class that leaf has, however few; or it splits in two rounds at neighbouring
  edges. So it can count and label the rows of any cell of bins, and ``min-bin-rows``, which merges
  bins of scores, does not prevent it. Masks hide whose rows these are. Only noise (see ``private``)
  bounds what is disclosed about a row.
- A secret of the party decides which rows it draws for a round (``subsample``), unless it is
  simulated, and the draw is not sent. A party refuses a round that draws fewer rows than
  ``min-rows``; it sends zeros if the round draws fewer than ``least-bin-rows``; and it draws all
  rows if the round would leave out fewer than either. This applies to the whole table, not to a
  tree node.
- [num-parallel-tree!=1, additive=false] With ``num-parallel-tree`` each of a round's trees draws
  its own rows and columns, so the server gets sums over as many draws of the same gradients; a
  site's ``most-trees`` limits them.
- [additive=true, pairs=0, epsilon=0] With ``pax.additive`` sums are by column and bin of all rows,
  once a round: a site refuses requests for tree nodes below the roots.
- [additive=true, pairs!=0, epsilon=0] With ``pax.pairs`` an honest server asks for sums below the
  roots from half of the rounds on: once on a side of a split of each column, then of the pairs. A
  site answers that in every round, for up to 1,000 trees, all of the same rows.
- [additive=true, epsilon=0] A server that breaks the rules sends any number of trees a round, grown
  from no sums, each of one column (with ``pax.pairs`` two) and of whole bins; so it gives a cell of
  bins of all columns a margin of its own, and learns the cell's rows and labels in one round.
- [epsilon=0] A server that breaks the rules and keeps the gradients constant, by trees whose leaves
  are 0, may solve for the rows from sums over many draws, with many times more rounds than rows.
- [objective=survival:cox] With ``survival:cox`` a party learns, at its bins of times, the sums over
  all events so far of 1/E and 1/E^2, E being the sum of ratios at risk, and so how many events and
  how large a sum all parties, or the other of two, have between these. A server that breaks the
  rules gives a value to one leaf, or sends other hazards, and learns how many of the leaf's rows
  each bin of times has. ``least-bin-rows`` merges bins of times too; a site with ``share-risk-sums
  = false`` refuses such runs.
- [objective=rank:ndcg|rank:pairwise] Where rows are ranked, gradients are of pairs of a query's
  rows. Queries have no names or sizes here, but a warning says how many queries have no pair. A
  server that breaks the rules gives a value to one leaf of few rows, and learns from the gradients
  which rows share a query with these, and how their labels are ordered.
- [objective=reg:absoluteerror|reg:quantileerror] With ``reg:absoluteerror`` and
  ``reg:quantileerror`` a leaf value over ``eta`` is the residual of one row, or between those of
  two, and the first prediction such a label; all parties learn that from the model.
- [objective=reg:absoluteerror|reg:quantileerror] A site counts by each digit once a tree, in turn,
  each row in the leaf where it is, and two prefixes a leaf at most. A server that breaks the rules
  chooses these prefixes, and by its splits the leaves, so it learns the label of a row that is
  alone in one; for squared errors gradients disclose the same. A site with ``least-bin-rows``
  refuses these objectives.
- [calibration!=none] With ``calibration`` the model has a curve of the validation rows of all
  parties, which follows from these scores: two numbers, or (``isotonic``) the share of positives by
  margin, of groups as small as one row. All parties see it. The server also learns the loss of rows
  without it.
- A party learns the trees as they grow, and of the other parties only what the trees contain. Where
  leaves are limited by gain (``grow-policy=lossguide`` with ``max-leaves``) it also learns splits
  that the model drops again, as deeper ones gain more; the server learns the sums below these. With
  ``init-model`` it also learns the trees of that model, without gains and hessians, whichever party
  grew them. Thresholds of that model that are no cuts divide the rows of a bin, so that sums follow
  from values within bins too.

[epsilon!=0] With ``privacy.epsilon`` noise is added before the masks: see ``private``.
"""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Any

import numpy as np

from fedapp.errors import ProtocolError
from fedapp.messages import cuts
from fedapp.messages.cuts import SketchOrder, SplitRows
from fedapp.messages.fields import (
    AT_ANY_TIME,
    EACH_LEVEL,
    EACH_ROUND,
    MOST_LEVELS,
    MOST_NODES,
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
    check_sizes,
    message,
    part,
    request,
)
from fedapp.messages.methods import Method
from fedapp.messages.scoring import Scores, Sums, TimeCells, Trees
from fedapp.messages.secagg import Among, SharedCuts


def _empty(*shape: int) -> Array:
    return field(default_factory=lambda: np.empty(shape))


@request("train.pax_sketch", "summarising the columns")
class SketchRequest(SketchOrder, Request):
    """Encode labels and categories, and summarise the columns."""


@message
class SketchReply(cuts.SketchReply):
    """Representatives of the bins of each column of numbers, columns one after the other."""


@request("train.pax_init", "adding the trees of the initial model", leaves="nothing")
class InitRequest(Trees, Request):
    """Start from the margins of a finished model with these trees, before the first round."""

    base_margin: BaseMargin
    at_cuts: bool  # its thresholds are cuts: rows go by bins, as in its training; else by values


@message
class InitReply(Reply):
    """The margins are set."""


@part
class Grown(SplitRows):
    """Part of a message: the last splits, and leaves of the last round's trees, if not yet sent."""

    n_trees: Annotated[int, Range(1, 10**6)]  # of a round: ``num_parallel_tree`` an output
    num_parallel_tree: Annotated[int, Range(1, 1000), PlanLimit("trees")]
    base_margin: BaseMargin
    leaf_values: Annotated[Array, Form("float32", "n_leaf_values")]  # a value a node, trees in turn
    leaf_offsets: Annotated[
        Array, Form("int64", "n_trees+1", empty=True, divides="n_leaf_values", ascending=True)
    ]


@request("train.pax_risks", "growing trees", leaves=OWN_OR_SUMS, **EACH_ROUND)
class RisksRequest(Among, SharedCuts, Grown, Request):
    """Add the last leaves, and sum hazard ratios and events by bin of times, before a round.

    Where there are cuts, those of the times are of a last column.
    """


@message
class RisksReply(Reply):
    """Sums over the party's bins of times, as of ``fedapp.trees.survival.risk_sums``."""

    risks: Annotated[Array, Form("int64", "n_time_bins", 4)]


@request("train.pax_grow", "growing trees", leaves=OWN_OR_SUMS, **EACH_LEVEL)
class GrowRequest(Among, SharedCuts, TimeCells, Grown, Request):
    """Apply the last splits to the rows, and sum the gradients of some nodes.

    ``level`` 0 starts a round: first the leaves of the last round's trees are added to the margins
    (none if there are no new leaves), then all rows return to the roots. Sums are the fields of a
    ``GrowReply``, under masks in all parties' bins.
    """

    round_id: Annotated[int, Range(0, 10**6), RoundId(begins="level")]
    level: Annotated[int, Range(0, MOST_LEVELS), PlanLimit("levels")]
    subsample: Annotated[float, Range(0, 1)]  # share of the rows a round draws
    seed: Annotated[int, Range(0, 2**63 - 1)]
    score_bins: Annotated[int, Range(2, 2**20), SiteLimit("score-bins")]
    # Of the party's bins of times, at level 0 where gradients depend on risk sets; else empty.
    hazards: Annotated[Array, Form("float64", "n_time_bins", 2, low=0, empty=True)]
    wanted_trees: Annotated[Array, Form("int32", "n_wanted", low=0, below="n_trees", in_order=True)]
    wanted_nodes: Annotated[Array, Form("int32", "n_wanted", low=0, high=MOST_NODES)]
    # To sum over.
    columns: Annotated[Array, Form("int32", "n_drawn", low=0, below="n_columns", ascending=True)]


# Fields of a ``GrowRequest`` that a ``TurnRequest`` has too.
SHARED = "round_id", "num_parallel_tree", "base_margin", "score_bins", "time_points", "score_edges"


@request(
    "train.pax_turn",
    "growing trees",
    leaves=OWN_OR_SUMS,
    each_round=True,
    times=("rounds", "additive"),
)
class TurnRequest(Among, SharedCuts, TimeCells, Trees, Request):
    """Add the last round's trees, and sum the gradients of all rows: a round of curves.

    A tree of one column consists of whole bins of it, so its nodes' sums follow from those of the
    roots. The sums are those of the ``GrowRequest`` that ``opened`` gives; of pairs further levels
    follow as after that. A tree that splits more columns than the plan has is refused.
    """

    round_id: Annotated[int, Range(0, 10**6), RoundId(begins=True)]
    num_parallel_tree: Annotated[int, Range(1, 1000), PlanLimit("trees")]  # that may go on
    base_margin: BaseMargin
    score_bins: Annotated[int, Range(2, 2**20), SiteLimit("score-bins")]

    def opened(self, n_columns: int) -> GrowRequest:
        """The same question as of trees that grow level by level, whose leaves have been added."""
        n_trees = self.num_parallel_tree * len(self.base_margin)
        forms = ((name, form) for name, (_, form) in GrowRequest.forms.items())
        empty: dict[str, Any] = {
            name: np.empty(0, form.dtype) for name, form in forms if isinstance(form, Form)
        }
        shared = {name: getattr(self, name) for name in SHARED}
        at_roots = {
            "wanted_trees": np.arange(len(self.base_margin), dtype=np.int32),
            "wanted_nodes": np.zeros(len(self.base_margin), dtype=np.int32),
            "columns": np.arange(n_columns, dtype=np.int32),
            "hazards": np.empty((0, 2)),
        }
        sums = empty | shared | at_roots
        return GrowRequest(**sums, level=0, n_trees=n_trees, subsample=1.0, seed=0)


@request("train.pax_open", "counting values", leaves="sums")
class OpenRequest(cuts.CountOrder):
    """Start with the roster; encode labels and categories; sum the labels, count first digits."""


@request("train.pax_count", "counting values", leaves="sums", times=3)
class CountRequest(cuts.Digits):
    """Count the weights of rows by the next digit of their values; see ``digit_counts``."""


@message
class GrowReply(Reply):
    """Sums over the party's bins of the wanted nodes, and at level 0 scores so far."""

    histograms: Annotated[Array, Form("float64", "n_wanted", "n_bins", 2)]
    missing: Annotated[Array, Form("int32", "n_wanted", "n_drawn", low=0)]
    # Empty below level 0
    root_sums: Annotated[Array, Form("float64", "n_roots", 2)] = _empty(0, 2)
    train_sums: Sums = _empty(0)
    train_scores: Scores = _empty(0, 0)
    valid_sums: Sums = _empty(0)
    valid_scores: Scores = _empty(0, 0)


# The party counts by each digit once a ``GrowRequest`` of level 0, whose times are limited.
@request(
    "train.pax_leaves", "fitting leaves", leaves=OWN_OR_SUMS, each_round=True, times=AT_ANY_TIME
)
class QuantilesRequest(SplitRows, Request):
    """Apply the last splits, and count the drawn rows of each leaf by a digit of their residuals.

    Before the first tree all rows are in one leaf, and the residuals are the labels. Each digit
    once a tree; see ``QuantileSearch``.
    """

    digit: Annotated[int, Range(0, 3)]
    n_trees: Annotated[int, Range(1, 10**6)]
    # The leaf of each node that has rows, trees in turn; of another node any.
    leaf_ids: Annotated[Array, Form("int32", "n_grown", low=0, below="n_leaves")]
    grown_offsets: Annotated[Array, Form("int64", "n_trees+1", divides="n_grown", ascending=True)]
    prefixes: Annotated[Array, Form("uint32", "n_prefixes", ascending="offsets")]
    offsets: Annotated[Array, Form("int64", "n_leaves+1", divides="n_prefixes")]


@message
class QuantilesReply(Reply):
    """Rows by the next digit, of those with each prefix."""

    counts: Annotated[Array, Form("int32", "n_prefixes", 256, low=0)]


def check_grow(party: str, reply: GrowReply, request: GrowRequest, n_bins: int) -> None:
    """Check sums against the request; the party's drawn columns have ``n_bins`` together."""
    sizes = {"n_wanted": len(request.wanted_nodes), "n_drawn": len(request.columns)}
    n_roots = 0 if request.level else request.n_trees
    check_sizes(party, reply, **sizes, n_bins=n_bins, n_roots=n_roots)
    if (reply.histograms[..., 1] < 0).any() or (reply.root_sums[:, 1] < 0).any():
        raise ProtocolError(party, "GrowReply", "histograms", "must have hessians >= 0")


GROUPS = {
    "pax": Method(
        "horizontal",
        {
            "": "each party's sums: most rows of a small table",
            "least-bin-rows": "each party's sums over bins of several rows",
            "least-parties": "sums over all parties: rows of a small table, not whose",
            "least-parties least-bin-rows": "sums over all parties over bins of several rows",
            "run-epsilon": "noised sums over all parties",
        },
        takes_margins=True,
        merges_bins=True,
        fits_leaves=True,
        memory=None,
    ),
}
