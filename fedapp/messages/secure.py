"""Sums that the server sees of all parties together alone.

Reveals: the server learns each party's two public keys, one the same in every run and one of this
run, whether its rows have weights, and the largest of them, rounded up to a power of two. Of what a
request asks to be summed it learns the sum over all parties, and of a party's own share nothing:
that looks random to whoever has the key of no party. Numbers are whole multiples of a power of two;
which, follows from the number of all rows, and from the largest weight and the largest label, each
rounded up to a power of two.

- A server that asks two parties for different things, has them hold back rows by different
  fractions, folds or seeds, tells them of different parties or keys, or asks again in another
  attempt, gets noise, from there on: the masks follow from all that was asked, the hello included.
  One that asks all parties alike for sums that few rows enter gets these. A sum that one party
  alone has rows for, such as of a category that occurs there only, is that party's.
- Where a party may be lost (``min-parties`` above 0), each answer has one more mask, of a seed of
  which every party holds a sealed share; a second exchange tells the server the seeds of those that
  have answered, and, of the pairs with who has not, seeds of this answer alone. A late answer then
  tells nothing. Whatever a server tells whom of losses, it gets sums over 2 ``threshold`` - n of n
  parties at least, which each site holds against its ``least-parties``.
- A run has one opening, and who is lost in it stays so, however often a server goes back. Where
  no party may be lost, one that goes back gets the same sums again and no others.
- Sums before a loss less sums after it are the lost party's as far as nothing else has changed: its
  numbers of rows, labels and missing values, for squared errors also of rows in each bin, and, as
  one tree changes them little, nearly its gradients. A server that breaks the rules can say that a
  party is lost, send leaves of 0, and learn all sums of that party, once. So a site takes part in
  such runs only if its node config has ``least-parties``, and logs each loss.
- Runs add up: the sums of two runs over the same rows, one with a party and one without it, or with
  another in its place, differ by that party's. So a site takes part in a masked run between other
  parties than those of all earlier ones only if a person there approves it.
- A party that cannot write its gradients or its model within the bounds says so, and ends the run.
- The server and all parties but one together learn what that one sent. So a site takes part with
  so many others at least as its node config has it (``least-parties``), and each must be one whose
  key it has pinned.
- A party learns the names and public keys of the others, the number of all rows, the largest weight
  and the largest label, to a power of two.
- Parties are assumed to send sums of their rows: what one makes up cannot be told from rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from fedapp.messages.fields import Array, Form, Range, Reply, Request

GROUPS = {"secure": frozenset({"horizontal"})}

# Of a share, and of one that is sealed.
SHARE_BYTES = 32
SEALED_BYTES = SHARE_BYTES + 28

# In whose name a sum stands where else a party's does; no party may be called so.
EVERYONE = "all parties"


@dataclass(frozen=True, slots=True)
class KeysRequest(Request):
    """Draw a key of the run."""

    kind: ClassVar[str] = "query.secure_keys"
    doing: ClassVar[str] = "exchanging keys"
    leaves: ClassVar[str] = "nothing"


@dataclass(frozen=True, slots=True, eq=False)
class KeysReply(Reply):
    """A party's public keys, and how large its weights are."""

    box_key: Annotated[Array, Form("uint8", 32)]  # X25519, public; the same in every run
    run_key: Annotated[Array, Form("uint8", 32)]  # X25519, public; of this run alone
    heaviest: Annotated[int, Range(-149, 128)]  # no weight is beyond 2 to this power
    weighted: bool  # whether a weight is another than 1


@dataclass(frozen=True, eq=False)
class Roster:
    """Part of a message: between whom sums are masked, and how their terms are written."""

    __slots__ = ()
    names: Annotated[tuple[str, ...], Range(1, 1000)]  # of all parties, in order
    box_keys: Annotated[Array, Form("uint8", "n_parties", 32)]
    run_keys: Annotated[Array, Form("uint8", "n_parties", 32)]
    n_rows: Annotated[int, Range(1, 2**50)]  # of all parties; see ``Bounds``
    heaviest: Annotated[int, Range(-149, 128)]
    largest: Annotated[int, Range(-149, 128)]
    threshold: Annotated[int, Range(0, 1000)]  # parties without which no sum is; 0: all of them


AMONG = "among"  # the one field of a ``Among``


@dataclass(frozen=True, eq=False)
class Among:
    """Part of a message: which parties of the roster are left; none told where all must be."""

    __slots__ = ()
    among: Annotated[tuple[str, ...], Range(0, 1000)]


@dataclass(frozen=True, eq=False)
class ToldCuts:
    """Part of a message: the cuts that the bins of all parties lie between, in a run's first."""

    __slots__ = ()
    edges: Annotated[Array, Form("float32", "n_edges")]  # of ``Cuts``; none once they are told
    edge_offsets: Annotated[Array, Form("int64", "n_edge_offsets", low=0)]


@dataclass(frozen=True, slots=True, eq=False)
class MaskedReply(Reply):
    """A party's sums under its masks with all others, in Z/2^64.

    Where a party may be lost, also under a mask of its own, and shares of this mask's seed, which
    the server cannot read.
    """

    masked: Annotated[Array, Form("uint64", "n_values")]
    sealed: Annotated[Array, Form("uint8", "n_sealed", SEALED_BYTES)]  # by name of the holder


@dataclass(frozen=True, slots=True, eq=False)
class UnmaskRequest(Request):
    """Tell what takes the masks off the last answers of some parties together."""

    kind: ClassVar[str] = "query.secure_unmask"
    doing: ClassVar[str] = "unmasking sums"
    leaves: ClassVar[str] = "masks"
    names: Annotated[tuple[str, ...], Range(1, 1000)]  # whose answers there are
    sealed: Annotated[Array, Form("uint8", "n_sealed", SEALED_BYTES)]  # by the others of these


@dataclass(frozen=True, slots=True, eq=False)
class UnmaskReply(Reply):
    """Shares of the seeds of those that were named; seeds of the pairs with those that were not."""

    shares: Annotated[Array, Form("uint8", "n_names", SHARE_BYTES)]  # in the order of the names
    seeds: Annotated[Array, Form("uint8", "n_lost", SHARE_BYTES)]  # of this answer alone


@dataclass(frozen=True, slots=True, eq=False)
class LeftRequest(Request):
    """Say with whom the last sum was, to a server that was started anew."""

    kind: ClassVar[str] = "query.secure_left"
    doing: ClassVar[str] = "asking who is left"
    leaves: ClassVar[str] = "nothing"


@dataclass(frozen=True, slots=True, eq=False)
class LeftReply(Reply):
    """The parties that have not been lost, as far as a party knows."""

    names: Annotated[tuple[str, ...], Range(1, 1000)]
