"""Alignment: the parties find the rows that all of them have, and bring them into one order.

Source of the intersection: De Cristofaro and Tsudik 2010, "Practical Private Set Intersection
Protocols with Linear Complexity", section 4, in its form over a group of prime order (ECDH), for
two and more parties.

Reveals: ids leave no party, nor hashes of them.

- The server learns how many rows each party has and how many all have in common.
- A passive party learns how many rows the others have whose lists it masks. The active party, which
  alone sees lists under the masks of all, learns for every subset of the parties how many rows they
  have in common, and which of its own rows any other party has.
- A party masks one list of each other party in a run. A coordinator that goes back may have the
  same list masked again, and no other.
- A passive party learns which of its own rows all parties have, and nothing of who has the others.
- With ``align=ordered`` a party learns whether its ids are the active party's, and how many rows
  the others have.
- What parties write is sealed under keys that are bound to all of ``OpenRequest`` and of the
  request before it: two parties that were told different things read nothing of each other. Who
  steals a site's disk during a run reads that run's letters to and from the site; afterwards none,
  as far as the disk forgets what is deleted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from fedapp.messages.fields import MOST_FOLDS, Array, Form, Letter, Range, Reply, Request

GROUPS = {"alignment": frozenset({"vertical", "inference"})}

Points = Annotated[Array, Form("uint8", "n_points", 32)]  # of ristretto255


@dataclass(frozen=True, slots=True, eq=False)
class OpenRequest(Request):
    """Meet the others, and begin."""

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
    fold: Annotated[int, Range(0, MOST_FOLDS)] = 0  # that tests, from 1; 0: test_fraction decides
    folds: Annotated[int, Range(0, MOST_FOLDS)] = 0
    score_test: bool = True  # else the rows that test are held back, and nothing is told of them


@dataclass(frozen=True, slots=True, eq=False)
class MaskRequest(Request, letters=True):
    """To a passive party: mask lists once more, and pass them on."""

    kind: ClassVar[str] = "query.alignment_mask"
    doing: ClassVar[str] = "aligning the rows"


@dataclass(frozen=True, slots=True, eq=False)
class MatchRequest(Request, letters=True):
    """To the active party: find what all have in common."""

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
    """A party's ids, each as a point under the masks of all who have had the list."""

    owner: Annotated[str, Range(1, 64)]
    n_masks: Annotated[int, Range(1, 1000)]
    points: Points


@dataclass(frozen=True, slots=True, eq=False)
class CommonRows(Letter):
    """Active to passive: which entries of its own list all have in common."""

    common: Annotated[Array, Form("uint8", "n_common_bytes")]  # bits; none where align=ordered
    key: Annotated[Array, Form("uint8", 32)]  # of the digest of the order


@dataclass(frozen=True, slots=True, eq=False)
class OrderDigest(Letter):
    """Keyed digest of the ids in the common order."""

    digest: Annotated[Array, Form("uint8", 32)]
