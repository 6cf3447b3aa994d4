"""Alignment: the parties find the rows that all of them have, and bring them into one order.

Source of the intersection: De Cristofaro and Tsudik 2010, "Practical Private Set Intersection
Protocols with Linear Complexity", section 4, in its form over a group of prime order (ECDH), for
two and more parties.

Reveals: no ids and no hashes of ids leave a party.

- The server learns how many rows each party has and how many rows all have in common.
- A passive party learns how many rows the parties have whose lists it masks.
- The active party is the only one to see lists under the masks of all. It learns for every subset
  of the parties how many rows they have in common, and which of its rows any other party has.
- A party masks one list of each other party in a run. A coordinator that goes back to an earlier
  step can have the same list masked again, and no other.
- A passive party learns which of its rows all parties have. It does not learn who has the others.
- With ``align=ordered`` a party learns whether its ids are the active party's, and how many rows
  the others have.
- Letters between parties are sealed under keys that are bound to all of ``OpenRequest`` and of the
  request before it: two parties that received different requests cannot read each other's letters.
- A thief of a site's disk can read a run's letters to and from the site only during the run;
  afterwards the keys are deleted, as far as the disk erases what is deleted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from fedapp.messages.fields import MOST_FOLDS, Array, Form, Letter, Range, Reply, Request

GROUPS = {"alignment": frozenset({"vertical", "inference"})}

Points = Annotated[Array, Form("uint8", "n_points", 32)]  # of ristretto255


@dataclass(frozen=True, slots=True, eq=False)
class OpenRequest(Request):
    """Start the alignment with the names and keys of all parties."""

    kind: ClassVar[str] = "query.alignment_open"
    doing: ClassVar[str] = "aligning the rows"
    names: Annotated[tuple[str, ...], Range(2, 1000)]  # of all parties, in order
    active: Annotated[str, Range(1, 64)]
    box_keys: Annotated[Array, Form("uint8", "n_parties", 32)]
    run_keys: Annotated[Array, Form("uint8", "n_parties", 32)]
    n_rows: Annotated[Array, Form("int64", "n_parties", low=1)]  # of their tables
    ordered: bool
    test_fraction: Annotated[float, Range(0, 1)]
    valid_fraction: Annotated[float, Range(0, 1)]
    seed: Annotated[int, Range(0, 2**63 - 1)]
    fold: Annotated[int, Range(0, MOST_FOLDS)] = 0  # test fold, from 1; 0: use test_fraction
    folds: Annotated[int, Range(0, MOST_FOLDS)] = 0
    score_test: bool = True  # False: test rows are left out, and nothing about them is sent


@dataclass(frozen=True, slots=True, eq=False)
class MaskRequest(Request, letters=True):
    """To a passive party: mask lists once more and pass them on."""

    kind: ClassVar[str] = "query.alignment_mask"
    doing: ClassVar[str] = "aligning the rows"


@dataclass(frozen=True, slots=True, eq=False)
class MatchRequest(Request, letters=True):
    """To the active party: find the common rows."""

    kind: ClassVar[str] = "query.alignment_match"
    doing: ClassVar[str] = "aligning the rows"


@dataclass(frozen=True, slots=True, eq=False)
class OrderRequest(Request, letters=True):
    """To a passive party: keep the common rows, in the common order."""

    kind: ClassVar[str] = "query.alignment_order"
    doing: ClassVar[str] = "aligning the rows"


@dataclass(frozen=True, slots=True, eq=False)
class MatchReply(Reply, letters=True):
    """Parcels for the passive parties, and how many rows there are."""

    n_train: Annotated[int, Range(0, 2**40)]
    n_valid: Annotated[int, Range(0, 2**40)]
    n_test: Annotated[int, Range(0, 2**40)]


@dataclass(frozen=True, slots=True, eq=False)
class MaskedList(Letter):
    """A party's ids as points, under the masks of all parties that have had the list."""

    owner: Annotated[str, Range(1, 64)]
    n_masks: Annotated[int, Range(1, 1000)]
    points: Points


@dataclass(frozen=True, slots=True, eq=False)
class CommonRows(Letter):
    """Active to passive: which entries of the receiver's list all parties have."""

    common: Annotated[Array, Form("uint8", "n_common_bytes")]  # bits; none where align=ordered
    key: Annotated[Array, Form("uint8", 32)]  # of the digest of the order


@dataclass(frozen=True, slots=True, eq=False)
class OrderDigest(Letter):
    """Keyed digest of the ids in the common order."""

    digest: Annotated[Array, Form("uint8", 32)]
