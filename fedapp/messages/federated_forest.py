"""Federated Forest: a random forest over the columns of several parties, grown level by level.

Source: Liu et al. 2019, "Federated Forest" (arXiv:1905.10053v1), Algorithms 1, 2, 5 and 6. The
server is the paper's master.

What parties tell each other goes in letters (the classes of ``Letter``), which the server passes on
sealed.

Reveals, with ``labels=encoded``:

- The server learns the structure of the trees, who made each split, for every open node how much
  each party's best split would improve it, the scores (of two classes with a threshold, half way
  between those of two validation rows) and the importance of the columns (under numbers, unless
  ``share-column-names`` of all parties). From improvements it can tell how impure nodes are. Of
  columns it knows how many each party has, and which it has drawn, under numbers. It learns no
  label, no row of a node, no threshold of a split and no leaf value; with ``master-keeps-model``,
  to which every party must agree by ``allow-export``, it gets the whole model at the end.
- Which rows a tree draws (``bootstrap``) follows from a seed of the server's, for all parties must
  draw the same. It knows them, and scores are exact: of a tree of one leaf, or of few, they are an
  equation of the labels of the rows drawn. A server that breaks the rules, and has many runs of
  such trees with other seeds, can solve for labels; fewer runs (``runs-per-day``, ``approve=ask``)
  tell fewer. A site refuses trees that draw or leave out fewer than its ``min-rows``.
- A passive party learns codes of the labels of the training rows: which rows share a class (so two
  classes up to a swap), or numbers up to an affine map (``fedapp.trees.forest.label_codes``);
  with sample weights also these, and with ``min-impurity-decrease`` above 0 the scale of the
  numbers. It learns which rows each tree draws, the structure of the trees, who made each split
  and which rows each sends left (in the level at ``max-depth`` its own splits alone), how many of
  its own columns are drawn for a node and which of them, and never how many are drawn in all. It
  learns no threshold of another, and no leaf value but what the codes tell.
- The active party learns the same, and the importance of the others' columns.

With ``labels=paillier``:

- The server learns the same but for the improvements: it is told the splits alone. Of the rows that
  trees draw and of exact scores the same holds as above. From how large
  the letters are it can tell about how many sums a party sends.
- A passive party is told nothing of labels but the number of classes; of weights which training
  rows have none, and how many bits the weights, or weights times numbers, take. It learns which
  rows each tree draws, the structure of the trees, who made each split, which rows each sends left
  and which of its own columns are drawn, as above. That a node is pure is not told: its sums are
  made in vain, and the node becomes a leaf like any other. It follows all the same: a node above
  ``max-depth`` with rows enough, which stays whole though a column of the party's differs in it, is
  pure, for else it would have been split (but for ``min-impurity-decrease``). Joined over the trees
  such nodes group the rows by label, with default settings most of them.
- The active party learns, for every open node with rows enough and every drawn column of another
  party that differs there (or the first other one that does): the number of the column, how many
  rows are in each of its bins, how many are missing, and what these rows' labels add up to, but not
  what the bins are; which of these columns and bins the split is made of; the importance of the
  columns. It is told no value and no threshold. But the bins stand in order, and rows can be told
  by what they add up to: of bins of few rows, as of a column with a bin a value, it learns which
  rows they are, and so the order of the rows in another's column. The bins of a column of
  categories, which is told to be one, have one each, in an order that its owner alone can tell.
- All are taken to follow the protocol, the active party not to work together with a passive one,
  which together can read all labels, and the server to ask for the form of labels agreed upon.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from fedapp.messages.dictionary import Counts, Names
from fedapp.messages.fields import (
    Array,
    Form,
    Letter,
    OnlyInTrials,
    Range,
    Reply,
    Request,
    SiteLimit,
)
from fedapp.messages.methods import Method
from fedapp.messages.vertical import FinalScores, RoundScores

GROUPS = {
    "federated_forest": Method(
        "vertical",
        {
            "": "sizes, scores, structure of trees, improvements of splits",
            "encrypted-labels": "sizes, scores, structure of trees",
        },
        codes_labels=True,
        baseline="forest",
    ),
}

ENCODED, PAILLIER = "encoded", "paillier"  # the forms in which labels leave their party

Places = Annotated[Array, Form("int32", "n_splits", low=0)]
Owners = Annotated[Array, Form("int64", "n_splits", low=0)]  # numbers of parties, by name
Count = Annotated[int, Range(1, 10**6)]
Ciphertexts = Annotated[Array, Form("uint8", "n_ciphertexts", "ciphertext_bytes")]


@dataclass(frozen=True, eq=False)
class LevelSplits:
    """Part of a message: splits of a level, by tree and node; nobody's thresholds."""

    __slots__ = ()
    trees: Places
    nodes: Places
    owners: Owners


@dataclass(frozen=True, eq=False)
class OpenNodes(LevelSplits):
    """Part of a request: the last level's splits, and how much is drawn for their children."""

    __slots__ = ()
    n_drawn: Annotated[Array, Form("int64", "n_open", low=0)]  # of the receiver's columns


@dataclass(frozen=True, eq=False)
class OwnSplits:
    """Part of a reply: the party's splits, for a server that keeps the model; else none."""

    __slots__ = ()
    columns: Annotated[Array, Form("int64", "n_records", low=0)]
    thresholds: Annotated[Array, Form("float32", "n_records")]
    defaults: Annotated[Array, Form("uint8", "n_records", high=1)]
    widths: Annotated[Array, Form("int64", "n_records", low=0)]  # categories; 0: a threshold
    set_bits: Annotated[Array, Form("uint8", "n_set_bytes")]  # categories that go right
    names: Annotated[tuple[str, ...], Range(0, 10**6)]
    category_counts: Counts
    categories: Names


@dataclass(frozen=True, slots=True, eq=False)
class SetupRequest(Request, letters=True):
    """Bin the columns; at the active party also check the order of rows and code the labels."""

    kind: ClassVar[str] = "train.federated_forest_setup"
    doing: ClassVar[str] = "binning the columns, coding the labels"
    objective: Annotated[str, Range(1, 64)]
    max_bin: Annotated[int, Range(2, 65535), SiteLimit("most-bins")]
    trees: Annotated[int, Range(1, 10**5)]
    criterion: Annotated[str, Range(1, 16)]
    min_samples_split: Count
    min_samples_leaf: Count
    # Told to the active party alone, because for numbers it would tell the scale.
    min_impurity_decrease: Annotated[float, Range(0, 1e38)]
    bootstrap: bool
    rows_seed: Annotated[int, Range(0, 2**63 - 1)]
    column_seeds: Annotated[Array, Form("int64", "n_columns", low=0)]  # of the receiver's columns
    master_keeps_model: bool
    labels: Annotated[str, Range(1, 16)]  # ENCODED or PAILLIER
    key_bits: Annotated[int, Range(64, 2**13)]
    insecure_small_key: Annotated[bool, OnlyInTrials()]


@dataclass(frozen=True, slots=True, eq=False)
class LevelRequest(OpenNodes, Request, letters=True):
    """The splits of the last level; say how well their children could be split."""

    kind: ClassVar[str] = "train.federated_forest_level"
    doing: ClassVar[str] = "searching for splits"
    each_round: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, eq=False)
class SumRequest(OpenNodes, Request, letters=True):
    """To a passive party: the splits of the last level; sum the labels of their children."""

    kind: ClassVar[str] = "train.federated_forest_sum"
    doing: ClassVar[str] = "summing encrypted labels"
    each_round: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, eq=False)
class SplitRequest(OpenNodes, Request, letters=True):
    """To the active party: the splits of the last level; choose how their children are split."""

    kind: ClassVar[str] = "train.federated_forest_split"
    doing: ClassVar[str] = "choosing splits"
    each_round: ClassVar[bool] = True
    last: bool  # no level follows, so nobody else need know which rows go left


@dataclass(frozen=True, slots=True, eq=False)
class PartitionRequest(LevelSplits, Request, letters=True):
    """To those who won: make the own ones of these splits, and tell the others.

    After the last level to all passive parties: also keep the own part of the model.
    """

    kind: ClassVar[str] = "train.federated_forest_partition"
    doing: ClassVar[str] = "splitting the rows"
    each_round: ClassVar[bool] = True
    last: bool


@dataclass(frozen=True, slots=True, eq=False)
class FinishRequest(LevelSplits, Request, letters=True):
    """To the active party: make the last splits, score the forest, keep the own part of it."""

    kind: ClassVar[str] = "evaluate.federated_forest_finish"
    doing: ClassVar[str] = "scoring"


@dataclass(frozen=True, slots=True, eq=False)
class LevelReply(RoundScores, Reply):
    """The best split of every open node: see ``fedapp.trees.forest.cart.Candidates``.

    The active party adds scores of the forest as it is.
    """

    improvements: Annotated[Array, Form("float64", "n_open", nan=True)]
    ranks: Annotated[Array, Form("int64", "n_open", low=0)]


@dataclass(frozen=True, slots=True, eq=False)
class SplitReply(LevelSplits, RoundScores, Reply, letters=True):
    """This level's splits, and scores of the forest as it is."""


@dataclass(frozen=True, slots=True, eq=False)
class PartitionReply(OwnSplits, Reply, letters=True):
    """Which rows go left, for the others; the own splits for the server if it keeps the model."""


@dataclass(frozen=True, slots=True, eq=False)
class FinishReply(OwnSplits, FinalScores, Reply, letters=True):
    """Scores of the finished forest, and importance; the rest for a server that keeps the model."""

    oob_scores: Annotated[Array, Form("float64", "n_oob_scores", nan=True)]  # with bootstrap
    classes: Annotated[tuple[str, ...], Range(0, 1000)]
    leaf_values: Annotated[Array, Form("float64", "n_nodes", "n_outputs")]  # trees in turn


@dataclass(frozen=True, slots=True, eq=False)
class Labels(Letter):
    """Active to passive, with ``labels=encoded``: codes of the training rows' labels."""

    n_classes: Annotated[int, Range(0, 1000)]  # 0 for numbers
    codes: Annotated[Array, Form("float64", "n_rows")]
    weights: Annotated[Array, Form("float32", "n_weighted", low=0)]  # none where all are 1
    least_decrease: Annotated[float, Range(0, 1e300)]  # in the unit of the codes


@dataclass(frozen=True, slots=True, eq=False)
class EncryptedLabels(Letter):
    """Active to passive, with ``labels=paillier``: a ciphertext of each row that has a weight."""

    n: Annotated[Array, Form("uint8", "n_key_bytes")]  # the key's, big-endian
    n_fields: Annotated[int, Range(1, 1000)]  # numbers of a row: see label_codes.RowFields
    bits: Annotated[int, Range(0, 53)]  # of the largest of them
    weighted: Annotated[Array, Form("uint8", "n_weighted_bytes")]  # bits, a training row each
    ciphertexts: Ciphertexts


@dataclass(frozen=True, slots=True, eq=False)
class ColumnSums(Letter):
    """Passive to active: sums of the open nodes; see ``fedapp.trees.forest.listing.Listing``."""

    level: Annotated[int, Range(0, 1000)]
    ranks: Annotated[Array, Form("int64", "n_open", low=0)]
    n_columns: Annotated[Array, Form("int64", "n_open", low=0)]
    columns: Annotated[Array, Form("int64", "n_listed", low=0)]
    n_bins: Annotated[Array, Form("int64", "n_listed", low=0)]
    missing: Annotated[Array, Form("uint8", "n_listed", high=1)]
    unordered: Annotated[Array, Form("uint8", "n_listed", high=1)]  # bins are categories
    sizes: Annotated[Array, Form("int32", "n_sums", low=1)]
    ciphertexts: Ciphertexts  # a tree's sums side by side, tree after tree


@dataclass(frozen=True, slots=True, eq=False)
class Won(Letter):
    """Active to passive: its splits of a level, in their order."""

    level: Annotated[int, Range(0, 1000)]
    listed: Annotated[Array, Form("int64", "n_won", low=0)]  # places in its ``ColumnSums``
    cuts: Annotated[Array, Form("int64", "n_won", low=0)]  # the last bin that goes left
    defaults: Annotated[Array, Form("uint8", "n_won", high=1)]  # 1 where missing goes left
    set_bits: Annotated[Array, Form("uint8", "n_set_bytes")]  # unordered bins that go right


@dataclass(frozen=True, slots=True, eq=False)
class Partition(Letter):
    """From who made some of a level's splits: which rows go left.

    A bit a row of the nodes: the splits in their order, rows ascending.
    """

    level: Annotated[int, Range(0, 1000)]
    bits: Annotated[Array, Form("uint8", "n_bytes")]


@dataclass(frozen=True, slots=True, eq=False)
class PartKept(Letter):
    """Passive to active: the own part of the model is kept; what the own columns were worth."""

    digest: Annotated[Array, Form("uint8", 32)]
    # Gains are 0 with ``labels=paillier``: only the active party knows them.
    gains: Annotated[Array, Form("float64", "n_columns", low=0)]
    counts: Annotated[Array, Form("int64", "n_columns", low=0)]
    names: Annotated[tuple[str, ...], Range(0, 10**6)]  # where they are shared
