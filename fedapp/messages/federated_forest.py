"""Federated Forest: a random forest over the columns of several parties, grown level by level.

Source: Liu et al. 2019, "Federated Forest" (arXiv:1905.10053v1), Algorithms 1, 2, 5 and 6. The
server is the paper's master. Parties write to each other in letters (the classes of ``Letter``),
which the server forwards sealed.

Reveals, in short:

- The server learns the scores, the structure of the trees and who made each split; no label and no
  row of a node.
- [labels=encoded] A passive party learns which rows each split sends left, and codes of the labels:
  who knows a few labels knows the others.
- [labels=paillier] A passive party learns which rows each split sends left, and no label; but nodes
  that stay whole are of one label, and made-up columns show labels.
- [labels=paillier] The label holder learns sums by bin of the others' columns, and of bins of few
  rows which rows these are; no value and no threshold.
- [labels=paillier] A label holder that breaks the rules reads the bins of all rows of most tables,
  unnoticed.
- [master-keeps-model=true] At the end the server gets the whole model.

In full:

- The server learns the structure of the trees, and who made each split.
- The server learns the scores (of two classes with a threshold, half way between those of two
  validation rows) and the importance of the columns (under numbers, unless all parties have
  ``share-column-names``).
- The server learns how many columns each party has, and which are drawn, under numbers. Drawn for
  each tree (``max-features-per=tree``, as in the paper), they are the same in all of its nodes.
- The server learns no label, no row of a node, no threshold of a split and no leaf value. With
  ``master-keeps-model``, to which every party must agree by ``allow-export``, it gets the whole
  model at the end, with the kinds of columns and the names of categories as an exported SecureBoost
  model has them.
- A seed of the server decides which rows a tree draws (``bootstrap``), because all parties must
  draw the same. The server knows them, and scores are exact: the scores of a tree of one leaf, or
  of few, are an equation of the labels of the rows drawn. A server that breaks the rules, and has
  many runs of such trees with other seeds, can solve for labels; fewer runs (``runs-per-day``,
  ``approve=ask``) reveal fewer. A site refuses trees that draw or leave out fewer rows than its
  ``min-rows``.
- A passive party learns which rows each tree draws, the structure of the trees, who made each split
  and which rows each split sends left (in the level at ``max-depth`` only of its splits).
- A passive party learns how many of its columns are drawn for a node and which, but never how many
  are drawn in all. It learns no threshold of another party.
- The active party learns the same, and the importance of the others' columns.
- [label-epsilon!=0] With ``label-epsilon`` at the active party's site, all this is of labels that
  it has randomised once for all runs, encoded or encrypted: see ``secureboost``, with the bound.
- No check compares where a passive party sends validation and test rows. Their scores are equations
  of labels that it so chooses; see ``secureboost``.
- All parties are assumed to follow the protocol, the active party not to collude with a passive one
  (together they can read all labels), and the server to request the agreed form of labels.

[labels=encoded] With ``labels=encoded``, besides:

- The server learns for every open node how much each party's best split would improve it.
  Improvements show how impure nodes are.
- A passive party learns codes of the labels of the training rows: which rows share a class (so two
  classes up to a swap), or numbers up to an affine map (``fedapp.trees.forest.bagged``). With
  sample weights it learns these too, and with ``min-impurity-decrease`` above 0 the scale of the
  numbers.
- A passive party learns of leaf values only what the codes show.

[labels=paillier] With ``labels=paillier``, besides:

- The sizes of letters show about how many sums a party sends.
- A passive party receives nothing about labels but the number of classes; about weights it learns
  which training rows have none, and how many bits the weights, or weights times numbers, take.
- A passive party is not notified that a node is pure: its sums are computed in vain, and the node
  becomes a leaf like any other. It can still infer it: a node above ``max-depth`` with enough rows,
  which is not split though a column of the party's differs in it, is pure, because else it would
  have been split (unless ``min-impurity-decrease`` prevents it). Joined over the trees such nodes
  group the rows by label, with default settings most of them.
- The active party learns, for every open node with enough rows and every drawn column of another
  party that differs there (or the first other one that does): the number of the column, how many
  rows are in each of its bins, how many are missing, and the sums of these rows' labels, but not
  what the bins are. It also learns which of these columns and bins the split uses, and the
  importance of the columns. It receives no value and no threshold.
- The bins are ordered, and the active party can recognise rows by their sums: of bins of few rows,
  as of a column with a bin a value, it learns which rows they are, and so the order of the rows in
  another party's column. A column of categories is marked as such; each category has a bin, in an
  order that only the column's owner can read.
- An active party that breaks the rules encrypts powers of 2 in place of labels, each row of a node
  another one. Then each sum lists its rows, up to one a bit of a plaintext: with keys of 2,048 bits
  2,047 rows of every node, in the columns drawn there. A tree has up to 2^(max-depth - 1) nodes
  whose sums are sent in one level, and the active party chooses their rows where it splits. So the
  first trees can show it all rows of most tables. A passive party cannot detect it.
- The active party checks the sums that it receives: they add up to those of the node, each is one
  that as many rows can have, and those of a split that it chose are, to the last bit, those of the
  rows that its owner then sends left. Otherwise the run ends by the owner's name.
- A passive party that breaks the rules claims two columns, of which one is chosen if a row has one
  label, and the other if it has another. Sums of no rows show it a label for each of its splits of
  a level, and the run ends. Columns that send the row left and right are refused by no check: of
  those that a table could have, it learns from each of its splits which is the best. With as many
  columns as 2^k a split shows k labels. Sums that are not chosen are not
  compared with rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from fedapp.messages.fields import (
    AT_ANY_TIME,
    Array,
    Ciphertexts,
    Form,
    Letter,
    Objective,
    OneOf,
    OnlyInTrials,
    Range,
    Reply,
    Request,
    SiteLimit,
    message,
    part,
    request,
)
from fedapp.messages.methods import Memory, Method
from fedapp.messages.vertical import FinalScores, LevelSplits, RoundScores, SplitTable
from fedapp.trees.forest.cart import MOST_BITS

GROUPS = {
    "federated_forest": Method(
        "vertical",
        {
            "": "sizes, scores, structure of trees, improvements of splits",
            "encrypted-labels": "sizes, scores, structure of trees",
        },
        codes_labels=True,
        baseline="forest",
        hides_labels=True,
        # Of codes; and of draws and nodes in 100 trees, or of ciphertexts.
        memory=Memory(value=2, row=1000),
    ),
}

ENCODED, PAILLIER = "encoded", "paillier"  # forms in which labels are sent

Count = Annotated[int, Range(1, 10**6)]
# Of a request of training: it comes once a level of all trees.
EACH_DEPTH: Mapping[str, Any] = {"each_round": True, "times": ("max_depth",)}


@part
class OpenNodes(LevelSplits):
    """Part of a request: the last level's splits, and the columns drawn for their children."""

    n_drawn: Annotated[Array, Form("int64", "n_open", low=0)]  # of the receiver's columns


@request("train.federated_forest_setup", "binning the columns, coding the labels")
class SetupRequest(Request, letters=True):
    """Bin the columns; at the active party also check the order of rows and encode the labels."""

    objective: Objective
    max_bin: Annotated[int, Range(2, 65535), SiteLimit("most-bins")]
    trees: Annotated[int, Range(1, 10**5)]
    criterion: Annotated[str, OneOf(("gini", "entropy", "variance"))]
    min_samples_split: Count
    min_samples_leaf: Count
    # Sent only to the active party, because for numbers it would reveal the scale.
    min_impurity_decrease: Annotated[float, Range(0, 1e38)]
    max_features_per: Annotated[str, OneOf(("node", "tree"))]  # what columns are drawn for
    bootstrap: bool
    rows_seed: Annotated[int, Range(0, 2**63 - 1)]
    column_seeds: Annotated[Array, Form("int64", "n_columns", low=0)]  # of the receiver's columns
    master_keeps_model: bool
    labels: Annotated[str, Range(1, 16)]  # ENCODED or PAILLIER
    key_bits: Annotated[int, Range(64, 2**13)]
    insecure_small_key: Annotated[bool, OnlyInTrials()]


@request("train.federated_forest_encrypt", "encrypting labels", times=AT_ANY_TIME)
class EncryptRequest(Request, letters=True):
    """To the active party, with ``labels=paillier``: send the next block of labels."""


@request("train.federated_forest_take", "encrypting labels", times=AT_ANY_TIME)
class TakeRequest(Request, letters=True):
    """To a passive party: store a block of labels; others follow."""


@request("train.federated_forest_level", "searching for splits", **EACH_DEPTH)
class LevelRequest(OpenNodes, Request, letters=True):
    """The splits of the last level; reply how well their children could be split."""


@request("train.federated_forest_sum", "summing encrypted labels", **EACH_DEPTH)
class SumRequest(OpenNodes, Request, letters=True):
    """To a passive party: the splits of the last level; sum the labels of their children."""


@request("train.federated_forest_split", "choosing splits", **EACH_DEPTH)
class SplitRequest(OpenNodes, Request, letters=True):
    """To the active party: the splits of the last level; choose how their children are split."""

    last: bool  # no level follows, so no other party needs to know which rows go left


@request("train.federated_forest_partition", "splitting the rows", **EACH_DEPTH)
class PartitionRequest(LevelSplits, Request, letters=True):
    """To parties whose splits were chosen: apply them and send the result to the others.

    After the last level to all passive parties: also store their part of the model.
    """

    last: bool


@request("evaluate.federated_forest_finish", "scoring")
class FinishRequest(LevelSplits, Request, letters=True):
    """To the active party: apply the last splits, score the forest, store its part of the model."""


@message
class LevelReply(RoundScores, Reply):
    """The best split of every open node: see ``fedapp.trees.forest.cart.Candidates``.

    The active party adds scores of the forest as it is.
    """

    improvements: Annotated[Array, Form("float64", "n_open", nan=True)]
    ranks: Annotated[Array, Form("int64", "n_open", low=0)]


@message
class SplitReply(LevelSplits, RoundScores, Reply, letters=True):
    """This level's splits, and scores of the forest as it is."""


@message
class PartitionReply(SplitTable, Reply, letters=True):
    """Which rows go left, for the others; the party's splits for a server that keeps the model."""


@message
class FinishReply(SplitTable, FinalScores, Reply, letters=True):
    """Scores of the finished forest, and importance; the model for a server that keeps it."""

    oob_scores: Annotated[Array, Form("float64", "n_oob_scores", nan=True)]  # with bootstrap
    classes: Annotated[tuple[str, ...], Range(0, 1000)]
    leaf_values: Annotated[Array, Form("float64", "n_nodes", "n_outputs")]  # trees in turn


@message
class Labels(Letter):
    """Active to passive, with ``labels=encoded``: codes of the training rows' labels."""

    n_classes: Annotated[int, Range(0, 1000)]  # 0 for numbers
    codes: Annotated[Array, Form("float64", "n_rows", low=-(2**MOST_BITS), high=2**MOST_BITS)]
    weights: Annotated[Array, Form("float32", "n_weighted", low=0)]  # none where all are 1
    least_decrease: Annotated[float, Range(0, 1e300)]  # in the unit of the codes


@message
class EncryptedLabels(Letter):
    """Active to passive, with ``labels=paillier``: a ciphertext of each row that has a weight."""

    n: Annotated[Array, Form("uint8", "n_key_bytes")]  # the key's, big-endian
    n_fields: Annotated[int, Range(1, 1000)]  # numbers of a row: see forest.cart.RowFields
    bits: Annotated[int, Range(0, 53)]  # of the largest of them
    weighted: Annotated[Array, Form("uint8", "n_weighted_bytes")]  # bits, a training row each
    ciphertexts: Ciphertexts  # of the first training rows


@message
class MoreLabels(Letter):
    """Active to passive: the same of the next training rows, where a message cannot have all."""

    ciphertexts: Ciphertexts


@message
class ColumnSums(Letter):
    """Passive to active: sums of the open nodes; see ``fedapp.trees.forest.encrypted.Listing``."""

    level: Annotated[int, Range(0, 1000)]
    ranks: Annotated[Array, Form("int64", "n_open", low=0)]
    n_columns: Annotated[Array, Form("int64", "n_open", low=0)]
    columns: Annotated[Array, Form("int64", "n_listed", low=0, high=10**6)]
    n_bins: Annotated[Array, Form("int64", "n_listed", low=0)]
    missing: Annotated[Array, Form("uint8", "n_listed", high=1)]
    unordered: Annotated[Array, Form("uint8", "n_listed", high=1)]  # bins are categories
    sizes: Annotated[Array, Form("int32", "n_sums", low=1)]
    ciphertexts: Ciphertexts  # a tree's sums side by side, tree after tree


@message
class Won(Letter):
    """Active to passive: its splits of a level, in their order."""

    level: Annotated[int, Range(0, 1000)]
    listed: Annotated[Array, Form("int64", "n_won", low=0)]  # places in its ``ColumnSums``
    cuts: Annotated[Array, Form("int64", "n_won", low=0)]  # the last bin that goes left
    defaults: Annotated[Array, Form("uint8", "n_won", high=1)]  # 1 where missing goes left
    set_bits: Annotated[Array, Form("uint8", "n_set_bytes")]  # unordered bins that go right


@message
class PartKept(Letter):
    """Passive to active: the sender's part of the model is stored; importance of its columns."""

    digest: Annotated[Array, Form("uint8", 32)]
    # Gains are 0 with ``labels=paillier``, where only the active party knows them.
    gains: Annotated[Array, Form("float64", "n_columns", low=0)]
    counts: Annotated[Array, Form("int64", "n_columns", low=0)]
    names: Annotated[tuple[str, ...], Range(0, 10**6)]  # where they are shared
