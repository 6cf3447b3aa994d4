"""HybridTree: a host with labels and few columns, guests with more columns of some of its rows.

Source: Li et al. 2024, "Effective and Efficient Federated Tree Learning on Hybrid Data" (ICLR,
arXiv:2310.11865); see ``strategies.hybrid_tree`` for what is as there. The host is the active
party. Rows are matched pair by pair: see ``vertical``. Letters of gradients, sums and splits are
in ``encrypted_sums``; guests send none to each other.

Reveals: scores to the server, groups of its rows to each guest, sums of these to the host.

- The server learns sizes (rows, levels, blocks, bytes, and which guest has splits to make), the
  scores of every round, of two classes also a threshold, half way between the margins of two
  validation rows, with ``scale-pos-weight=balanced`` the factor, and at the end how many of the
  host's rows each guest has. It never learns the model.
- A guest learns which of its rows the host has, and which of these train, validate and test.
- For each tree a guest learns which of its rows share a leaf of the host's upper layers, also rows
  that are held back. The numbers of these leaves show which are near each other in the tree; the
  guest sees neither columns nor thresholds, and nothing of leaves that none of its rows is in. Of
  its own layers it knows all but the leaf values. It learns nothing of other guests but their
  names, numbers of rows, and keys.
- A guest learns neither labels, gradients nor leaf values. But rows that share a leaf tend to share
  a label, as in ``secureboost``: who knows some labels guesses others. With ``subsample`` a guest
  learns which of its rows a round draws; with the scores, as from a server that colludes with it,
  rounds of different draws are equations of the labels.
- For every node, column and bin of a guest the host learns the sums of gradients and hessians of
  the rows that both have, how many values are missing, and which rows a split sends left. Every sum
  is an equation about which rows are in a bin, as in ``secureboost``. Columns have numbers, unless
  ``share-column-names``; thresholds and names of categories stay with their owner.
- The host alone learns which of its rows several guests have.
- With ``label-epsilon`` at the host's site, all this is of labels that it has randomised once.
- A host that breaks the rules encrypts what it likes in place of gradients, and so reads bins of
  single rows, as in ``secureboost``; what it sends as leaves of its upper layers may be any groups.
  A site shows how many rows a round gives away (``fedapp site check``). It refuses more leaves than
  the upper layers can have, rounds that draw fewer than ``min-rows`` of a pair's rows, and slots
  wider than the run needs.
- A guest that breaks the rules may send false sums or sides. This changes the trees for the rows
  that it shares with the host, and from the next round on what all others are fitted to. Nothing
  detects it.
- A coordinator that breaks the rules cannot read or change letters. It may leave a guest out of a
  level, which ends the run with an error at the host; it can make no party answer more, or for
  other rows, than the opening allows.
"""

from __future__ import annotations

from typing import Annotated

# Letters of this method too.
from fedapp.messages.encrypted_sums import ColumnBins as ColumnBins
from fedapp.messages.encrypted_sums import EncryptedGradients as EncryptedGradients
from fedapp.messages.encrypted_sums import EncryptedSums as EncryptedSums
from fedapp.messages.encrypted_sums import MoreGradients as MoreGradients
from fedapp.messages.encrypted_sums import PartKept as PartKept
from fedapp.messages.encrypted_sums import PublicKey as PublicKey
from fedapp.messages.encrypted_sums import Splits as Splits
from fedapp.messages.encrypted_sums import TreeSetup
from fedapp.messages.fields import (
    AT_ANY_TIME,
    MOST_DEPTH,
    MOST_NODES,
    Array,
    Form,
    Letter,
    Range,
    Reply,
    Request,
    message,
    request,
)
from fedapp.messages.methods import Method
from fedapp.messages.vertical import FinalScores, RoundScores

GROUPS = {
    "hybrid_tree": Method(
        "vertical",
        {"": "sizes, scores, how many rows each guest shares with the host, which has labels"},
        holds_columns=True,
        takes_margins=True,
        sums_ciphertexts=True,
        hides_labels=True,
        pairs=True,
    ),
}
Guests = Annotated[tuple[str, ...], Range(0, 1000)]  # names
LEVELS = ("rounds", "levels")


@request("train.hybrid_tree_setup", "binning the columns, drawing the key")
class SetupRequest(TreeSetup, Request, letters=True):
    """Bin the columns; at the host also draw the key."""

    guest_depth: Annotated[int, Range(1, MOST_DEPTH)]  # of max_depth layers, those below the host's

    @property
    def host_depth(self) -> int:
        """Upper layers of a tree."""
        return self.max_depth - self.guest_depth


@request(
    "train.hybrid_tree_begin",
    "growing the upper layers",
    each_round=True,
    times=("rounds",),
    spare=1,
)
class BeginRequest(Request, letters=True):
    """To the host: finish the last round; grow the upper layers of another if one is wanted."""

    n_rounds: Annotated[int, Range(0, 10**6)]  # wanted in all


@request(
    "train.hybrid_tree_encrypt", "encrypting the gradients", each_round=True, times=AT_ANY_TIME
)
class EncryptRequest(Request, letters=True):
    """To the host: send the next block of the round's gradients."""


@request("train.hybrid_tree_take", "encrypting the gradients", each_round=True, times=AT_ANY_TIME)
class TakeRequest(Request, letters=True):
    """To a guest: store a block of the round's gradients; others follow."""


@request("train.hybrid_tree_sum", "summing encrypted gradients", each_round=True, times=LEVELS)
class SumRequest(Request, letters=True):
    """To a guest: apply the last level's splits, sum the wanted nodes."""


@request(
    "train.hybrid_tree_split", "decrypting sums, choosing splits", each_round=True, times=LEVELS
)
class SplitRequest(Request, letters=True):
    """To the host: choose the next level's splits of each guest."""


@request("train.hybrid_tree_partition", "splitting the rows", each_round=True, times=LEVELS)
class PartitionRequest(Request, letters=True):
    """To a guest: make the splits of its last level."""


@request("evaluate.hybrid_tree_handover", "storing the model")
class HandOverRequest(Request, letters=True):
    """To a guest: store its part of the model."""


@request("evaluate.hybrid_tree_finish", "scoring")
class FinishRequest(Request, letters=True):
    """To the host: store its part of the model, and score it."""

    best_round: Annotated[int, Range(0, 10**6)]  # rounds to keep


@message
class BeginReply(RoundScores, Reply, letters=True):
    """Scores of the round that was finished, if any, and which guests grow the next one."""

    begun: bool
    guests: Guests
    n_blocks: Annotated[int, Range(0, 2**31)]  # of the round's gradients, still to be requested
    n_trees: Annotated[int, Range(0, 10**9)]
    n_leaves: Annotated[int, Range(0, 10**9)]  # of the trees of the last finished round


@message
class SplitReply(Reply, letters=True):
    """State of the round."""

    growing: Guests  # those that have another level
    splitting: Guests  # those that have made their last one, but for its splits


@message
class FinishReply(FinalScores, Reply, letters=True):
    """Scores of the finished model."""

    n_trees: Annotated[int, Range(0, 10**9)]
    scale_pos_weight: Annotated[float, Range(0, 1e38)]  # what it is if the run had 0


@message
class Entries(Letter):
    """Host to guest: where the rows of both are in the upper layers, all of them in order."""

    n_nodes: Annotated[Array, Form("int64", "n_outputs", low=1, high=MOST_NODES)]  # of each tree
    nodes: Annotated[Array, Form("int32", "n_outputs", "n_rows", low=0, high=MOST_NODES)]
