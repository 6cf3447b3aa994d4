"""A random forest over parties with the same columns and different rows, grown level by level.

The rules are scikit-learn's, as in Federated Forest (Liu et al. 2019, arXiv:1905.10053v1).

Reveals, in short:

- [aggregation=plain] The server can rebuild most rows of a small table, with their labels: each
  party's rows by tree node, column and bin are not encrypted.
- [aggregation=plain] It also learns values of each column of each party, and its largest one.
- [aggregation=secure] The server learns only sums over all parties. A sum by tree node, column and
  bin may be of one row: rows can be rebuilt, but not whose they are.
- [aggregation=secure, parties=2] With two parties, each can subtract its sums: the rest is the
  other's.
- A party learns the trees as they grow; a node's value is exact, also of few rows.

[aggregation=plain] In full, with ``horizontal-forest.aggregation=plain``: nothing is encrypted, and
the server can rebuild rows.

- The server learns of each party the sketch of its columns and the sums of its labels, as of PAX: a
  representative and the weight of every bin of every column of numbers, each such column's largest
  value, and the largest category in use. It learns whether rows have weights, and the largest, to a
  power of two.
- The server learns of each party, of every tree node that may be split and every column that is
  drawn for it, the rows in each bin and without a value: how many distinct ones the tree has drawn,
  and their weight by class (for numbers their weight, and weighted sum of labels), each row counted
  as often as it is drawn. A bin may contain a single row. Most nodes deep in a tree are of few
  rows, so joined over the columns of a node, most rows of a small table can be read, to their bins,
  with their labels.
- After each level the server also learns each party's training and validation scores, as in
  ``scoring``.
- The sums of a party that it invents are not noticed if each column of a node has the same total.

[aggregation=secure] In full, with ``horizontal-forest.aggregation=secure``: everything except
``hello`` and keys is masked (see ``secure``).

- The server learns these sums only over all parties: labels, weights, values by digits as of PAX;
  rows by node, column and bin; scores. A sum may still be of one row, and enough of them let an
  observer rebuild rows, but not whose they are. Rows of a category that only one party has are that
  party's. With two parties, each knows that the rest is the other's.
- A party learns the cuts of all columns, and which first digits values near the quantiles have.
- [min-parties!=0] A level's sums are parts of the sums of the level above. If a party is lost
  (``min-parties``), the trees end at the depth that they have.
- Nothing that a party sends is checked for plausibility.

With and without masks:

- Which rows a tree draws (``bootstrap``) a secret of the party decides, unless it is simulated, and
  is not sent. Were it known, the sums of the roots of many trees would be equations of the labels.
  Sums over bins of one row show how often that row is drawn. A site refuses trees that draw or
  leave out fewer rows than its ``min-rows``.
- A site with ``least-bin-rows`` refuses these runs, as no bins are merged.
- A server that breaks the rules chooses splits and columns: it can ask all columns of every node,
  and split off a row. It asks only of nodes of the last level, and each level once, so it gets the
  sums of as many nodes as the trees of the plan have.
- A party learns the trees as they grow, with the value of each node; of the others only what these
  contain. A node's value is exact: of few rows, the share of each class, or the mean label.

No noise is added: a run with ``privacy.epsilon`` is refused. Bins of every node would need noise of
their own, for each of many trees, and labels choose the splits.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np

from fedapp.messages import cuts
from fedapp.messages.cuts import SketchOrder, SplitRows
from fedapp.messages.fields import (
    MOST_DEPTH,
    MOST_NODES,
    OWN_OR_SUMS,
    Array,
    Form,
    OneOf,
    PlanLimit,
    Range,
    Reply,
    Request,
    SiteLimit,
    message,
    request,
)
from fedapp.messages.methods import Method
from fedapp.messages.scoring import RoundSums
from fedapp.messages.secagg import Among, RowSizes, SharedCuts, WeightSizes

GROUPS = {
    "horizontal_forest": Method(
        "horizontal",
        {
            "": "each party's sums: most rows of a small table",
            "least-parties": "sums over all parties: rows of a small table, not whose",
        },
        baseline="forest",
        memory=None,
    ),
}


@request("train.horizontal_forest_sketch", "summarising the columns")
class SketchRequest(SketchOrder, Request):
    """Encode labels and categories, and summarise the columns."""


@message
class SketchReply(WeightSizes, cuts.SketchReply):
    """Representatives of the bins of each column of numbers, and how large weights are."""


@request("train.horizontal_forest_open", "counting values", leaves="sums")
class OpenRequest(cuts.CountOrder):
    """Start with the roster; encode labels and categories; sum the labels, count first digits."""


@request("train.horizontal_forest_count", "counting values", leaves="sums", times=3)
class CountRequest(cuts.Digits):
    """Count the weights of rows by the next digit of their values; see ``digit_counts``."""


@request(
    "train.horizontal_forest_cells",
    "summing rows by bin",
    leaves=OWN_OR_SUMS,
    each_round=True,
    times=("trees", "max_depth"),
    spare=MOST_DEPTH,
)
class CellsRequest(Among, SharedCuts, RowSizes, Request):
    """Sum the rows of some open nodes over bins of columns; see ``fedapp.trees.forest.summed``.

    A level is asked for in parts of two trees or more, and some nodes again, for other columns.
    Under masks all cells are summed, in all parties' bins.
    """

    level: Annotated[int, Range(0, MOST_DEPTH), PlanLimit("max_depth")]
    trees: Annotated[int, Range(1, 10**5)]
    bootstrap: bool
    seed: Annotated[int, Range(0, 2**63 - 1)]
    weighted: bool  # whether any row of any party has a weight other than 1
    wanted_trees: Annotated[Array, Form("int32", "n_wanted", low=0, below="trees", in_order=True)]
    wanted_nodes: Annotated[Array, Form("int32", "n_wanted", low=0, high=MOST_NODES)]
    columns: Annotated[Array, Form("int32", "n_wanted", "n_asked", low=0, below="n_columns")]
    sum_bytes: Annotated[int, OneOf((2, 4, 8))] = 8  # that a sum over all parties fits in


@message
class CellsReply(Reply):
    """Sums of the cells that have rows, over the party's bins."""

    cells: Annotated[Array, Form("int64", "n_filled", low=0, below="n_cells", ascending=True)]
    sums: Annotated[Array, Form("int64", "n_filled", "n_sums")]  # the last: distinct rows

    @classmethod
    def of(cls, sums: Array) -> CellsReply:
        """The reply, given the sums of all cells."""
        cells = np.flatnonzero(sums[:, -1])
        return cls(cells, sums[cells])


@request(
    "train.horizontal_forest_split",
    "splitting the rows",
    leaves=OWN_OR_SUMS,
    each_round=True,
    times=("max_depth",),
)
class SplitRequest(Among, SplitRows, Request):
    """Apply a level's splits to the rows; score the forest so far."""

    n_trees: Annotated[int, Range(1, 10**5)]
    # values of the roots, with the first splits; of both children of each split
    root_values: Annotated[Array, Form("float64", "n_roots", "n_outputs")]
    child_values: Annotated[Array, Form("float64", "n_splits", 2, "n_outputs")]
    score_bins: Annotated[int, Range(2, 2**20), SiteLimit("score-bins")]


@message
class SplitReply(RoundSums, Reply):
    """Sums for the scores of the forest so far."""
