"""Mask a site's sums, so that the server sees only sums over all parties.

A handler returns integer sums, and they are masked here, so that no handler depends on keys or
steps. The label of the masks covers everything that determines the sums: the run with its hello and
all parties, through the secrets of the pairs; the step, the attempt of the server and its
checkpoint; and all requests since the parties met, each as a whole. The rows held back follow from
the hello, and the rows of a tree node from the splits of earlier requests. So a mask stream never
hides two contents, even if a site's disk is set back, and the masks of parties that were sent
different requests do not cancel from there on.

The last answer of a run follows from its request only, whatever attempt of the server asks: its
label has no step, so a restarted server can add answers to several attempts.

If parties may be lost, the label also has the parties of the sum; see ``site.shares``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedapp.crypto.masking import mask_vector
from fedapp.crypto.sealed import prefixed
from fedapp.errors import ProtocolError
from fedapp.histograms.fixed_point import Bounds, Whole
from fedapp.messages.fields import Request
from fedapp.messages.secagg import SEALED_BYTES, Among, MaskedReply
from fedapp.messages.wire import Envelope
from fedapp.site.mail import pair_secrets, since
from fedapp.site.noise import Noise
from fedapp.site.shares import ANSWERED, N_ASKED, THRESHOLD, parties_of, share
from fedapp.site.store import Store

# Facts of a store once sums are masked: bounds of the rows, and a digest of the requests since.
BOUNDS, ASKED = "bounds", "asked_for"


@dataclass(frozen=True, slots=True, eq=False)
class Sums:
    """Sums over a party's rows."""

    arrays: Sequence[Whole]  # int64, of any shapes, in the order in which the server reads them
    n_bytes: int = 8  # each sum over all parties fits in
    noise: Sequence[Noise] = ()  # of each array, in a run with an epsilon; otherwise empty
    # Whether these sums overlap with others of the same rows and gradients: then no party may be
    # lost in between.
    follows: bool = False


def bounds_of(store: Store) -> Bounds:
    """Bounds on the rows of all parties, from the run."""
    return Bounds(**store.facts[BOUNDS])


def is_masked(store: Store) -> bool:
    """Whether the site's sums leave it only masked."""
    return BOUNDS in store.facts


def check_leaves(name: str, store: Store, request: Request) -> None:
    """Check that a request does not ask for unmasked sums in a run with masks."""
    if is_masked(store) and request.leaves == "own":
        rule = "must be one for sums over all parties, as the run has begun"
        raise ProtocolError(name, type(request).__name__, "class", rule)


def note_request(name: str, store: Store, request: Request, digest: str) -> None:
    """Add a request, by its digest, to those that determine the masks; ``query.`` ones do not.

    Raises ProtocolError if no party may be lost and another request was answered before a rollback:
    its sums would be of other nodes, or after other leaves, once per rollback.
    """
    if not request.kind.startswith("query."):
        both = prefixed(store.facts.get(ASKED, "").encode(), digest.encode())
        store.facts[ASKED] = hashlib.sha256(both).hexdigest()
        store.facts[N_ASKED] = number = store.facts.get(N_ASKED, 0) + 1
        answered = store.facts.setdefault(ANSWERED, {})
        if answered.setdefault(str(number), digest) != digest and not store.facts[THRESHOLD]:
            rule = "must be what it was before the run was resumed; begin a new run"
            raise ProtocolError(name, type(request).__name__, "content", rule)


def masked(
    name: str, store: Store, envelope: Envelope, request: Request, digest: str, sums: Sums
) -> MaskedReply:
    """Mask a site's sums; raises ProtocolError if the server names parties that may not sum."""
    parts = [np.ravel(each).astype(np.int64, copy=False) for each in sums.arrays]
    flat = np.concatenate(parts)
    named = request.among if isinstance(request, Among) else ()
    among = parties_of(name, store, named, sums.follows)
    secrets, label = pair_secrets(name, store, envelope), label_of(store, envelope, digest, among)
    if not among:  # no party may be lost: pairwise masks suffice
        nothing = np.empty((0, SEALED_BYTES), np.uint8)
        return MaskedReply(mask_vector(name, flat, secrets, label, sums.n_bytes), nothing)
    secrets = {peer: secret for peer, secret in secrets.items() if peer in among}
    asked = digest if store.finished else store.facts[ASKED]
    self_mask, sealed = share(name, store, secrets, label, asked, sums.follows)
    return MaskedReply(mask_vector(name, flat, secrets, label, sums.n_bytes, self_mask), sealed)


def label_of(store: Store, envelope: Envelope, digest: str, among: Sequence[str]) -> bytes:
    """Label of the masks of one answer; see the module."""
    when, asked = (envelope.step, envelope.attempt, since(store, envelope.attempt)), digest
    if store.finished:
        when = (0, 0, 0)  # the last answer is the same in every attempt
    else:
        asked = store.facts[ASKED]
    return prefixed(*(str(part).encode() for part in (*when, asked)), *(p.encode() for p in among))
