"""Secure aggregation: the server sees only sums over all parties.

Reveals, in short:

- [aggregation=secure] A party's share looks random to anyone without a party's key; the server and
  all other parties together can compute it.
- [aggregation=secure, min-parties!=0] A server that breaks the rules can claim that a party is
  lost, and learn all sums of that party, once.

[aggregation=secure] In full: sums over all parties. A party's share looks random to anyone without
a party's key.

- The server learns each party's two public keys, one the same in every run and one of this run.
- The server learns whether a party's rows have weights, and the largest of them, rounded up to a
  power of two.
- Of what a request asks to be summed the server learns the sum over all parties, and nothing of a
  party's share.
- Numbers are whole multiples of a power of two, which follows from the number of all rows, and from
  the largest weight and the largest label, each rounded up to a power of two.
- Masks depend on all requests so far, including the hello. A server gets noise, from there on, if
  it asks two parties for different things, has them hold out rows by different fractions, folds or
  seeds, sends them different parties or keys, or asks again in another attempt.
- A server that asks all parties alike for sums that few rows enter gets these sums. A sum for which
  only one party has rows, such as of a category that occurs there only, is that party's.
- [min-parties!=0] Where a party may be lost (``min-parties`` above 0), each answer has one more
  mask, and every party has a sealed share of its seed. A second exchange discloses to the server
  the seeds of the parties that have answered and, of their pairs with those that have not, seeds of
  this answer only. A late answer then reveals nothing.
- [min-parties!=0] Whatever losses a server claims, and to whichever party, it gets sums over at
  least 2 ``threshold`` - n of n parties. Each site compares that number with its ``least-parties``.
- [min-parties!=0] A run has one opening, and a party lost in it stays lost, however often a server
  goes back. A server that goes back gets the same sums again and no others.
- [min-parties!=0] Sums before a loss minus sums after it are the lost party's as far as nothing
  else has changed: its numbers of rows, labels and missing values, for squared errors also of rows
  in each bin, and, as one tree changes them little, nearly its gradients.
- [min-parties!=0] A server that breaks the rules can claim that a party is lost, send leaves of 0,
  and learn all sums of that party, once. So a site takes part in such runs only if its node config
  has ``least-parties``, and logs each loss.
- Runs add up: the sums of two runs over the same rows, one with a party and one without it, or with
  another in its place, differ by that party's. So a site takes part in a masked run between other
  parties than those of all earlier ones only if a person there approves it.
- A party that cannot represent its gradients or its model within the bounds reports that, and ends
  the run.
- The server and all parties but one together learn what that one sent. So a site requires at least
  ``least-parties`` others by its node config, and each must be one whose key it has pinned.
- A party learns the names and public keys of the others, the number of all rows, the largest weight
  and the largest label, to a power of two.
- Parties are assumed to send sums of their rows: invented sums cannot be distinguished from real
  ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

import numpy as np

from fedapp.messages.fields import Array, Form, Range, Reply, Request, message, part, request

GROUPS = {"secure": frozenset({"horizontal"})}

SHARE_BYTES = 32
SEALED_BYTES = SHARE_BYTES + 28  # with nonce and tag, see fedapp.crypto.sealed

EVERYONE = "all parties"  # in place of a party's name, for a sum; no party may have this name


@request("query.secure_keys", "exchanging keys", leaves="nothing")
class KeysRequest(Request):
    """Draw a key of the run."""


@part
class WeightSizes:
    """Part of a message: how large a party's weights are."""

    heaviest: Annotated[int, Range(-149, 128)]  # no weight exceeds 2 to this power
    weighted: bool  # whether a weight differs from 1


@message
class KeysReply(WeightSizes, Reply):
    """A party's public keys, and how large its weights are."""

    box_key: Annotated[Array, Form("uint8", 32)]  # X25519, public; the same in every run
    run_key: Annotated[Array, Form("uint8", 32)]  # X25519, public; of this run only


@part
class RowSizes:
    """Part of a message: bounds on the rows of all parties; see ``Bounds``."""

    n_rows: Annotated[int, Range(1, 2**50)]
    heaviest: Annotated[int, Range(-149, 128)]
    largest: Annotated[int, Range(-149, 128)]


# What follows is empty in a plain run.
NO_KEYS = partial(np.empty, (0, 32), np.uint8)


@dataclass(frozen=True, eq=False, kw_only=True)
class Roster(RowSizes):
    """Part of a message: between which parties sums are masked, and bounds on their terms."""

    names: Annotated[tuple[str, ...], Range(0, 1000)] = ()  # of all parties, in order
    box_keys: Annotated[Array, Form("uint8", "n_parties", 32)] = field(default_factory=NO_KEYS)
    run_keys: Annotated[Array, Form("uint8", "n_parties", 32)] = field(default_factory=NO_KEYS)
    threshold: Annotated[int, Range(0, 1000)] = 0  # parties that a sum needs; 0: all of them


AMONG = "among"  # the one field of a ``Among``


@dataclass(frozen=True, eq=False, kw_only=True)
class Among:
    """Part of a message: which parties of the roster remain; empty where all must."""

    among: Annotated[tuple[str, ...], Range(0, 1000)] = ()


@dataclass(frozen=True, eq=False, kw_only=True)
class SharedCuts:
    """Part of a message: the cuts between the bins of all parties, in the first masked one."""

    # Of ``Cuts``; empty once sent.
    edges: Annotated[Array, Form("float32", "n_edges", ascending="edge_offsets")] = field(
        default_factory=partial(np.empty, 0, np.float32)
    )
    edge_offsets: Annotated[Array, Form("int64", "n_columns+1", empty=True, divides="n_edges")] = (
        field(default_factory=partial(np.empty, 0, np.int64))
    )


@message
class MaskedReply(Reply):
    """A party's sums under its masks with all others, in Z/2^64.

    Where a party may be lost, also under a self-mask, with sealed shares of its seed for the
    others.
    """

    masked: Annotated[Array, Form("uint64", "n_values")]
    sealed: Annotated[Array, Form("uint8", "n_sealed", SEALED_BYTES)]  # by name of the holder


@request("query.secure_unmask", "unmasking sums", leaves="masks")
class UnmaskRequest(Request):
    """Ask for what removes the masks from the last answers of some parties."""

    names: Annotated[tuple[str, ...], Range(1, 1000)]  # of the parties that answered
    sealed: Annotated[Array, Form("uint8", "n_sealed", SEALED_BYTES)]  # by the others among these


@message
class UnmaskReply(Reply):
    """Shares of the seeds of the parties named; seeds of the pairs with the others."""

    shares: Annotated[Array, Form("uint8", "n_names", SHARE_BYTES)]  # in the order of the names
    seeds: Annotated[Array, Form("uint8", "n_lost", SHARE_BYTES)]  # of this answer only


@request("query.secure_left", "asking who is left", leaves="nothing")
class LeftRequest(Request):
    """Ask a party for the parties of its last sum, after a restart of the server."""


@message
class LeftReply(Reply):
    """The parties that have not been lost, as far as a party knows."""

    names: Annotated[tuple[str, ...], Range(1, 1000)]
