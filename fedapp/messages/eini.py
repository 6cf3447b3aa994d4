"""Fed-EINI: encrypted inference in one round through the parties, whatever the depth of the trees.

Source: Chen et al. 2021, "Fed-EINI: An Efficient and Interpretable Inference Framework for Decision
Tree Ensembles in Federated Learning" (arXiv:2105.09540), Eq. 7 to 14 and Algorithm 1.

Reveals, in short:

- The label holder learns of each row the sum of its leaf values over all trees, which is the
  prediction.
- It can work out from that sum which way a row goes through dozens of trees, at the splits of the
  others too.
- A label holder that breaks the rules reads from one sum every leaf that a passive party leaves
  open to the row.
- A passive party learns the structure of the trees; no leaf value and no prediction.
- The server learns sizes: rows, trees and bytes.

In full: the sum of each row's leaf values, to the active party, and sizes and structure.

- The server learns sizes: rows, trees, entries of the trees and bytes.
- A passive party learns the structure of the trees down to the subtrees that no passive party
  splits (of a forest it knows all of it since the training), and which splits it made. Of the
  rows it learns nothing but its columns.
- A passive party learns neither which entries another party leaves open, nor leaf values, nor
  predictions.
- The active party learns for each row the sum of the leaf values over all trees, which is the
  margin of a boosted model and the mean of a forest times its trees.
- The active party knows the leaf values, and few ways through the trees give the same sum of 53
  bits, so it can work out a row's way through dozens of trees (a subset sum). The paper (4.3)
  considers that infeasible, and the guard does not prevent it.
- Letters between passive parties are sealed against the active party, because it could decrypt
  their ciphertexts.
- A passive party refuses a structure that was not trained: its splits must be those of whole trees,
  nested as it has kept them from the training. It cannot check the weights. An active party that
  breaks the rules encrypts powers of two, and reads from one sum which entries the passive parties
  leave open to the row in each tree: as much as by ``one_round``, and more than by ``interactive``
  (16,880 of the sides counted there).
- A passive party that breaks the rules chooses its answers: it can move a row's sum to any value
  between the least and the largest sum of leaves that the active party's splits leave open to the
  row. The active party refuses sums beyond, and cannot detect others.
- [share-column-names=true] With ``share-column-names`` all parties may know the names of the
  columns, as the paper intends.
"""

from __future__ import annotations

from typing import Annotated

from fedapp.messages.fields import (
    AT_ANY_TIME,
    Array,
    Ciphertexts,
    Form,
    Letter,
    OnlyInTrials,
    Range,
    Reply,
    Request,
    Suffix,
    message,
    request,
)
from fedapp.messages.methods import Method

GROUPS = {"eini": Method("inference", {"": "sizes"}, memory=None)}


@request("evaluate.eini_step", "predicting under encryption", times=AT_ANY_TIME)
class StepRequest(Request, letters=True):
    """Process every batch that has arrived; the active party also sends the next ones."""

    key_bits: Annotated[int, Range(64, 2**13)]
    insecure_small_key: Annotated[bool, OnlyInTrials()]
    batch_rows: Annotated[int, Range(0, 2**31)]  # 0: as many as fit into 64 MiB of ciphertexts
    least_possibilities: Annotated[float, Range(1, 1e300), OnlyInTrials(below=1000)]
    unguarded: Annotated[bool, OnlyInTrials()]
    suffix: Suffix


@message
class StepReply(Reply, letters=True):
    """Batches for the next party; the active party also sends sizes, others 0."""

    finished: bool
    n_trees: Annotated[int, Range(0, 10**9)]
    n_entries: Annotated[int, Range(0, 10**9)]  # ciphertexts a row
    n_batches: Annotated[int, Range(0, 10**9)]


@message
class Structure(Letter):
    """Active to passive: the key of this inference, and the trees down to their entries."""

    n: Annotated[Array, Form("uint8", "n_key_bytes")]  # big-endian
    n_terms: Annotated[int, Range(1, 10**9)]  # trees of a sum
    n_outputs: Annotated[int, Range(1, 1000)]
    # Where each tree's nodes end.
    ends: Annotated[Array, Form("int64", "n_terms", low=1, ends="n_nodes")]
    lefts: Annotated[Array, Form("int64", "n_nodes", low=-1)]  # within the tree; -1: entry
    records: Annotated[Array, Form("int64", "n_nodes", low=-1)]  # the receiver's, else -1


@message
class Ready(Letter):
    """Passive to active: digest of the sender's part of the model."""

    part: Annotated[Array, Form("uint8", 32)]


@message
class Elements(Letter):
    """Active to the first passive party, from each to the next: weights and zeros of a batch."""

    first_row: Annotated[int, Range(0, 2**40)]
    n_rows: Annotated[int, Range(1, 2**31)]
    ciphertexts: Ciphertexts  # rows in turn, entries of all trees in each


@message
class Totals(Letter):
    """Last passive party to active: the sum of each row's weights, several rows a ciphertext."""

    first_row: Annotated[int, Range(0, 2**40)]
    n_rows: Annotated[int, Range(1, 2**31)]
    ciphertexts: Ciphertexts
