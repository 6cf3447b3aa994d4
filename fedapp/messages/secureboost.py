"""SecureBoost: boosted trees over the columns of several parties, gradients under Paillier.

Source: Cheng et al. 2019, "SecureBoost: A Lossless Federated Learning Framework"
(arXiv:1901.08755), Algorithms 1 and 2.

Parties write to each other in letters (the classes of ``Letter``), which the server forwards
sealed. The active party sends gradients under its key; a passive one sends back their sums by node,
column and bin, and makes the splits that the active one chooses from these. The encrypted gradients
of a round take as many messages as they need: none has more of them than ``vertical.BLOCK_BYTES``.

Reveals, in short:

- The server learns the scores of every round, and sizes; no row, label or gradient, and splits only
  where all parties have ``allow-export``.
- From sums by tree node, column and bin, the label holder can solve for the bins of rows in the
  others' columns; it learns no value and no name.
- A label holder that breaks the rules encrypts what it likes, and reads the bins of many rows a
  round, unnoticed.
- A passive party learns which rows share a node, and no label; but from labels that it knows others
  follow with a good chance.
- A passive party that breaks the rules can learn every label, by which of made-up columns are
  chosen; only ``label-epsilon`` of the label holder bounds that.

In full: scores to the server, the structure of trees to passive parties, sums to the active party.

- The server learns sizes (rows, trees, levels, blocks, bytes, and from these which passive party
  had splits to make), and the scores of every round. Of two classes it learns at the end also a
  threshold, half way between the margins of two validation rows, and the scores at it. It learns
  nothing else, except as follows.
- [scale-pos-weight=balanced] With ``scale-pos-weight=balanced`` the server also learns the weight
  of negative training rows over that of positive ones, which follows from their scores, too.
- [min-child-weight=auto] With ``min-child-weight=auto`` it also learns whether a column has 100
  categories or more.
- [calibration!=none] With ``calibration`` the model has a curve of the validation rows, in the
  active party's part: two numbers, or (``isotonic``) shares of positives by margin, of groups of
  the active party's ``min-bin-rows`` or more. The server learns the losses without it, and the
  curve only with the whole model.
- [share-column-names=true] With ``share-column-names`` of all parties the server also learns the
  importance of the columns.
- [allow-export=true] With ``allow-export`` of all parties the server also learns the whole model
  with the kinds of its columns and the names of all their categories, including those that only
  held-out rows have (of a party with ``share-categories = n`` those that n rows or more of its
  table have; of one with ``false`` those that its schema gives), the mean label of the training
  rows or the share of each class, and the name of the column of base margins if there is one. Base
  margins themselves never leave the active party.
- Scores are exact. Where trees move all rows alike (a large ``gamma``), the loss after a round
  shows how many of the rows that it has drawn have a label, an equation of the labels. The active
  party draws these rows, with ``subsample`` and ``goss``, by a secret of that party, unless it
  is simulated. It sends neither the secret nor the rows to the server, which so does not know which
  rows they are.
- A passive party receives which rows are drawn. With the scores, as from a server that colludes
  with it, about as many rounds as rows reveal every label of two classes. Without draws all rounds
  are the same equation. A round that would leave out fewer than ``min-rows`` draws all rows.
- A passive party that breaks the rules sends validation and test rows where it likes: there is
  nothing to compare their sides with. So scores become equations of labels that it chooses, and
  show it at most as many labels as they have bits: after each round of validation rows, at the end
  of test rows. In trees of one split, which it makes, each round shows a label. With
  ``valid-fraction=0`` only the scores at the end show any.
- [objective=reg:absoluteerror|reg:quantileerror] With ``reg:absoluteerror`` and
  ``reg:quantileerror`` a leaf value over ``eta`` is the residual of one row, or between those of
  two, and the first prediction is a label. Only the active party computes them. Whoever gets the
  model (``allow-export``) or predictions of training rows learns the labels of some rows exactly.
- A passive party learns the structure of the trees down to the last level but one, who made each
  split, which rows are in which of their nodes, and which rows a round has drawn. It
  receives no labels, gradients or leaf weights. In the last level it sees only its splits. Where
  leaves are limited by gain (``grow-policy=lossguide`` with ``max-leaves``) it also learns splits
  that the model drops again, as deeper ones gain more; the active party learns the sums below.
- [multi-strategy=multi_output_tree] With ``multi-strategy=multi_output_tree`` all parties learn of
  one tree a round, in place of one a class: a passive party sees rows divided once a round, and the
  active party the sums of all classes, but of the nodes of that tree only.
- [num-parallel-tree!=1] With ``num-parallel-tree`` a passive party receives which rows each tree of
  a round has drawn; the active party learns the sums of each tree's nodes.
- Rows without weight are never drawn; ranked rows without a pair are drawn as others. With
  ``goss`` the rows drawn are mostly those of large gradients, which is evidence about labels.
- A passive party receives no label, but rows that share nodes tend to share one: if some labels are
  known, others follow with a good chance, from any rounds (``simulations attacks shared_nodes``).
- A passive party that breaks the rules makes up columns, and learns labels from which of them are
  chosen. The active party checks its sums to the last bit: rows of the node can have them, and the
  rows that it then sends left have those that the split was chosen by. A lie that is chosen ends
  the run by the party's name, the round and the column's number, after the choices of one level;
  another is not seen. Where rows move as the sums say nothing is false: a table may have any
  columns, and nobody sees that they are others in each round (``simulations attacks
  crafted_sums``). A choice among n cuts answers about log2(n) questions about labels, so a round
  shows up to ``fedapp.histograms.claimed.disclosed_labels`` of them: 1,260 at depth 6 with as many
  bins as a site allows; ``fedapp site check`` and ``fedapp site approve`` show the figure. A
  category shows a label where those of few rows have weights, as with a ``min-child-weight`` of 0.
  So a run can show every label; only ``label-epsilon`` bounds that. Training rows that a round does
  not draw are in no sum, so they may go either way.
- [label-epsilon!=0] With ``label-epsilon`` at the active party's site, all this is of labels that
  it has randomised once for all runs. Whoever sees them, all other parties together, tells two
  labels of a row apart with an advantage of tanh(epsilon / 2) at most, also if the label was
  changed in between. The list of classes is not hidden; what columns and other rows' labels show
  has no bound. A row that gets another id is drawn again, and so is a site's table at a site of
  another name or home: both draws add up (``fedapp.site.labels``).
- [init-model!=none] With ``init-model`` the rows first traverse the trees of that model, as in
  predictions (see ``interactive``): of rows that were not trained on then, a passive party learns
  which reach its splits, and the active party which of these go left.
- All parties learn the constraints of the run config, with the columns named there. The active
  party learns which columns these are of owners with ``share-column-names``. A party without does
  not disclose whether it has a column of such a name.
- The active party learns the numbers of columns and bins of the others, under numbers in place of
  names, and which columns are categorical. A bin of such a column is a category that occurs in
  training rows, and their owner draws the order of the bins at random for the run: neither names
  nor their order are sent.
- The active party learns the column constraints of every node config, under the same numbers: which
  columns are constrained in which direction, and which may occur together on a path.
- For every node, column and bin of theirs the active party learns the sums of gradients and
  hessians, and how many values are missing; which rows a split of theirs sends left, and how many
  of the categories it sends which way, by bin. Thresholds and names stay with their owner.
- Every sum is an equation about which rows are in a bin, with coefficients that the active party
  knows: it can solve for the bins of rows, with half as many equations as rows for nearly all of
  them (``simulations attacks solved_bins``).
- A bin of a node may hold a single row. No minimum of rows a bin would change what sums can be
  solved for, so a site with ``least-bin-rows`` refuses these runs.
- An active party that breaks the rules encrypts what it likes in place of gradients. If each row of
  a node is another power of 2, each sum lists its rows. So in one round it reads the bins, in every
  column, of at least ``fedapp.crypto.packing.readable_rows`` rows: with 1,000 rows, depth 6 and one
  output 4,096, of n rows all in about n / 4,096 rounds. ``fedapp site check`` and ``fedapp site
  approve`` show the figure. A passive party cannot detect it, and no minimum of rows prevents it:
  other rows can be encrypted as 0. A site refuses rounds that draw fewer rows than its
  ``min-rows``, slots wider than the run needs, sums below the last level, and more splits in a
  level than the plan's ``max-leaves`` allow, which bounds the figure. Classes multiply the
  figure, and only the active party knows how many there are: k classes by k squared where they
  share a ciphertext, as each tree's sums are of all of these; with one tree for all, by k. Trees
  of ``num-parallel-tree`` multiply it as classes do, and the figure that is shown includes them.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, get_args

from fedapp.messages.fields import (
    AT_ANY_TIME,
    EACH_LEVEL,
    EACH_ROUND,
    MOST_LEVELS,
    MOST_NODES,
    Array,
    Ciphertexts,
    Form,
    Letter,
    LossFields,
    NotNegative,
    Objective,
    OneOf,
    OnlyInTrials,
    PlanLimit,
    Range,
    Reply,
    Request,
    TreeParameters,
    message,
    request,
)
from fedapp.messages.handshake import Few

# Letters of this method too, where rows walk down an initial model.
from fedapp.messages.inference import Answers as Answers
from fedapp.messages.inference import Questions as Questions
from fedapp.messages.methods import Memory, Method
from fedapp.messages.vertical import FinalScores, LevelSplits, SplitTable
from fedapp.trees.calibration import Calibration
from fedapp.trees.categories import MOST_CATEGORIES
from fedapp.trees.limits import MultiStrategy

GROUPS = {
    "secureboost": Method(
        "vertical",
        {"": "sizes, scores, which party has labels"},
        holds_columns=True,
        takes_margins=True,
        sums_ciphertexts=True,
        hides_labels=True,
        fits_leaves=True,
        # Of codes; and of letters of ciphertexts at 2048 bits, measured.
        memory=Memory(value=1, row=2500),
    ),
}
LONGEST_CONSTRAINTS = 2**20  # characters
MOST_PAIRS = 1000  # of gradients and hessians of a row
Scores = Annotated[Array, Form("float64", "n_rounds", "n_scores", nan=True)]
ValidScores = Annotated[Array, Form("float64", "n_rounds", "n_valid_scores", nan=True)]


@request("train.secureboost_setup", "binning the columns, drawing the key")
class SetupRequest(TreeParameters, LossFields, Request, letters=True):
    """Bin the columns; at the active party also check the order of rows and draw the key."""

    objective: Objective
    key_bits: Annotated[int, Range(64, 2**13)]
    insecure_small_key: Annotated[bool, OnlyInTrials()]
    monotone_constraints: Annotated[str, Range(0, LONGEST_CONSTRAINTS)]  # as in the run config
    interaction_constraints: Annotated[str, Range(0, LONGEST_CONSTRAINTS)]
    first_trees: Annotated[int, Range(0, 10**6)]
    goss: bool
    top_rate: Annotated[float, Range(0, 1)]
    other_rate: Annotated[float, Range(0, 1)]
    init_model: Annotated[str, Range(0, 16)]  # id of the model to resume from; empty: none
    multi_strategy: Annotated[str, OneOf(get_args(MultiStrategy))]  # trees of several classes
    num_parallel_tree: Annotated[int, Range(1, 1000), PlanLimit("trees")]  # a round and output
    calibration: Annotated[str, OneOf(get_args(Calibration))]  # which the active party fits
    auto_child_weight: bool  # whether min_child_weight follows from the columns of all parties


@request("train.secureboost_walk", "walking the trees of the initial model", times=AT_ANY_TIME)
class WalkRequest(Request, letters=True):
    """To the active party: apply the answers to rows that traverse the initial model."""


@request("train.secureboost_answer", "walking the trees of the initial model", times=AT_ANY_TIME)
class AnswerRequest(Request, letters=True):
    """To a passive party: answer which of the rows in question go left."""


@request("train.secureboost_begin", "encrypting the gradients", **EACH_ROUND, spare=1)
class BeginRequest(Request, letters=True):
    """To the active party: finish the last round, and start another if one is wanted."""

    n_rounds: Annotated[int, Range(0, 10**6)]  # wanted in all


@request(
    "train.secureboost_encrypt", "encrypting the gradients", each_round=True, times=AT_ANY_TIME
)
class EncryptRequest(Request, letters=True):
    """To the active party: send the next block of the round's gradients."""


@request("train.secureboost_take", "encrypting the gradients", each_round=True, times=AT_ANY_TIME)
class TakeRequest(Request, letters=True):
    """To a passive party: store a block of the round's gradients; others follow."""


@request("train.secureboost_sum", "summing encrypted gradients", **EACH_LEVEL)
class SumRequest(Request, letters=True):
    """To a passive party: apply the last level's splits, sum the wanted nodes."""


@request("train.secureboost_split", "decrypting sums, choosing splits", **EACH_LEVEL)
class SplitRequest(Request, letters=True):
    """To the active party: choose this level's splits."""


@request("train.secureboost_partition", "splitting the rows", **EACH_LEVEL)
class PartitionRequest(Request, letters=True):
    """To a passive party: apply its splits that were chosen, and send the result to the others."""


@request("evaluate.secureboost_handover", "storing the model")
class HandOverRequest(Request, letters=True):
    """To a passive party: store its part of the model; hand it over where that is allowed."""


@request("evaluate.secureboost_finish", "scoring")
class FinishRequest(Request, letters=True):
    """To the active party: store its part of the model, score it, join the parts if allowed."""

    best_round: Annotated[int, Range(0, 10**6)]  # rounds to keep


@message
class WalkReply(Reply, letters=True):
    """Questions for other parties, none when finished; the size of the model."""

    finished: bool
    n_rounds: Annotated[int, Range(1, 10**6)]
    n_trees: Annotated[int, Range(1, 10**9)]


@message
class BeginReply(Reply, letters=True):
    """Scores of the rounds finished since the last reply, and whether another was started."""

    begun: bool
    n_blocks: Annotated[int, Range(0, 2**31)]  # of the round's gradients, still to be requested
    n_trees: Annotated[int, Range(0, 10**9)]
    n_leaves: Annotated[int, Range(0, 10**9)]  # of the trees of the last finished round
    score_names: Annotated[tuple[str, ...], Range(0, 20)]
    train_scores: Scores
    valid_scores: ValidScores  # no columns without validation rows


@message
class SplitReply(Reply, letters=True):
    """State of the round."""

    growing: bool  # another level follows
    passive_splits: bool  # some passive party has splits to make


@message
class FinishReply(FinalScores, Reply, letters=True):
    """Scores of the finished model; importance and the model itself where all allow it."""

    n_trees: Annotated[int, Range(0, 10**9)]
    model: Annotated[Array, Form("uint8", "n_model_bytes")]  # JSON of fedapp's format, or nothing
    few: Few  # of all parties, counted with a model
    scale_pos_weight: Annotated[float, Range(0, 1e38)]  # what it is if the run had 0
    min_child_weight: NotNegative  # what it is if the run had auto


@message
class PublicKey(Letter):
    """Active to passive: the key of this run, and how rows are packed under it."""

    n: Annotated[Array, Form("uint8", "n_key_bytes")]  # big-endian
    # Gradients of a row, one a class and parallel tree
    n_outputs: Annotated[int, Range(1, MOST_PAIRS)]
    most_rows: Annotated[int, Range(1, 2**40)]
    precision: Annotated[int, Range(1, 62)]


@message
class ColumnBins(Letter):
    """Passive to active: bins, constraints and, if shared, names of the columns."""

    widths: Annotated[Array, Form("int64", "n_columns", low=0, high=65535)]
    categorical: Annotated[Array, Form("uint8", "n_flags", low=0, high=1)]  # 1: of categories
    names: Annotated[tuple[str, ...], Range(0, 10**6)]
    allows_export: bool
    part: Annotated[Array, Form("uint8", "n_digest_bytes")]  # digest of that of the initial model
    n_records: Annotated[int, Range(0, 10**9)]  # splits in it, also those of trees left out since
    # The sender's column of each name in the run's constraints; -1 if another's or not shared.
    named: Annotated[Array, Form("int64", "n_names", low=-1)]
    # Of the sender's node config: a direction a column, or none; groups of columns, concatenated.
    directions: Annotated[Array, Form("int8", "n_directions", low=-1, high=1)]
    group_columns: Annotated[Array, Form("int64", "n_members", low=0)]
    group_sizes: Annotated[Array, Form("int64", "n_groups", low=1, high=10**6)]


@message
class EncryptedGradients(Letter):
    """Active to passive: the first block of gradients of the rows that a round draws."""

    times: ClassVar[tuple[str, ...]] = ("rounds",)

    round_id: Annotated[int, Range(0, 10**6)]
    drawn: Annotated[Array, Form("uint8", "n_drawn_bytes")]  # bits, by parallel tree and row
    columns: Annotated[Array, Form("int64", "n_columns", low=0)]  # of the receiver
    ciphertexts: Ciphertexts  # rows of the first group of trees, then of the next


@message
class MoreGradients(Letter):
    """Active to passive: a later block."""

    round_id: Annotated[int, Range(0, 10**6)]
    start: Annotated[int, Range(1, 2**40)]  # ciphertexts in the blocks before
    ciphertexts: Ciphertexts


@message
class Splits(LevelSplits, Letter):
    """Active to passive: a level's splits, how to make the receiver's, and the nodes to sum next.

    Of the last level only the receiver's.
    """

    level: Annotated[int, Range(0, MOST_LEVELS), PlanLimit("levels")]  # 1 for splits of roots
    # Of the receiver's splits, in their order
    columns: Annotated[Array, Form("int64", "n_local", low=0)]
    first_rights: Annotated[Array, Form("int64", "n_local", low=0)]
    defaults: Annotated[Array, Form("uint8", "n_local", high=1)]
    # Bits of the bins that go right, of splits by categories, each in whole bytes.
    set_bits: Annotated[Array, Form("uint8", "n_set_bytes")]
    wanted_trees: Annotated[Array, Form("int32", "n_wanted", low=0)]
    wanted_nodes: Annotated[Array, Form("int32", "n_wanted", low=0, high=MOST_NODES)]


@message
class EncryptedSums(Letter):
    """Passive to active: sums of gradients and hessians of the wanted nodes, packed."""

    round_id: Annotated[int, Range(0, 10**6)]
    level: Annotated[int, Range(0, MOST_LEVELS)]
    missing: Annotated[Array, Form("int32", "n_wanted", "n_columns", low=0)]
    ciphertexts: Ciphertexts


@message
class PartKept(Letter):
    """Passive to active: the sender's part of the model is stored."""

    digest: Annotated[Array, Form("uint8", 32)]


@message
class Records(SplitTable, Letter):
    """Passive to active, where both allow the export: splits and columns of the sender."""

    widths: Annotated[Array, Form("int64", "n_widths", low=0, high=MOST_CATEGORIES)]
