"""Letters by which one party sums in cells what another has encrypted, row by row.

Source: Cheng et al. 2019, "SecureBoost" (arXiv:1901.08755), Algorithms 1 and 2.

The active party sends gradients under its key; a passive one sends back their sums by node, column
and bin, and makes the splits that the active one chooses from these. The encrypted gradients of a
round take as many messages as they need: none has more of them than ``BLOCK_BYTES``.

Reveals: to a passive party, nodes of its rows; to the active party, sums by node, column and bin.
What follows from these is in the module of each method that sends such letters.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from fedapp.messages.fields import (
    MOST_LEVELS,
    MOST_NODES,
    Array,
    Form,
    Letter,
    LossFields,
    OnlyInTrials,
    PlanLimit,
    Range,
    TreeParameters,
    message,
    part,
)
from fedapp.messages.vertical import LevelSplits

LONGEST_CONSTRAINTS = 2**20  # characters
MOST_PAIRS = 1000  # of gradients and hessians of a row
# Of ciphertexts in one message, for all its receivers. A party and the server have some five copies
# of a message in memory at once, as it is sealed, laid out and opened.
BLOCK_BYTES = 2**25

Ciphertexts = Annotated[Array, Form("uint8", "n_ciphertexts", "ciphertext_bytes")]


def block_rows(ciphertext_bytes: int, n_receivers: int) -> int:
    """Most ciphertexts that each of ``n_receivers`` parties receives in one message."""
    return max(1, BLOCK_BYTES // (ciphertext_bytes * max(1, n_receivers)))


@part
class TreeSetup(TreeParameters, LossFields):
    """Part of a message: trees of a run whose gradients are encrypted."""

    objective: Annotated[str, Range(1, 64)]
    key_bits: Annotated[int, Range(64, 2**13)]
    insecure_small_key: Annotated[bool, OnlyInTrials()]
    monotone_constraints: Annotated[str, Range(0, LONGEST_CONSTRAINTS)]  # as in the run config
    interaction_constraints: Annotated[str, Range(0, LONGEST_CONSTRAINTS)]


@message
class PublicKey(Letter):
    """Active to passive: the key of this run, and how rows are packed under it."""

    n: Annotated[Array, Form("uint8", "n_key_bytes")]  # big-endian
    n_outputs: Annotated[
        int, Range(1, MOST_PAIRS)
    ]  # gradients of a row, one a class and parallel tree
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
