"""How a site's sums leave it where none may but added to those of others: under masks.

A handler of such a request gives back whole numbers; here they are masked, so that none knows of a
key or a step. The label of the masks says what they hide: the run with its hello and all its
parties, through the secrets of the pairs; the step, the start of the server that it was sent in and
where that went back to; and all requests since the parties met, each as a whole. What a handler
answers follows from these alone: whose rows are held back, from the hello; the nodes of the rows,
and so whose rows enter a sum, from the splits of requests before it. So no
stream of masks hides two contents, not even where a site's disk is set back, and parties that were
once asked for different things give noise from there on.

The last answer of a run follows from its request alone, whatever start of the server asks: its
label has no step, and a server that was started anew can add up answers to several starts.

Where a party may be lost, the label also names the parties of the sum; see ``site.shares``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedapp.crypto.fixed_point import Bounds, Whole
from fedapp.crypto.pairwise import hide
from fedapp.crypto.sealed import prefixed
from fedapp.errors import ProtocolError
from fedapp.messages.fields import Request
from fedapp.messages.secure import SEALED_BYTES, Among, MaskedReply
from fedapp.site.mail import pair_secrets, since
from fedapp.site.noise import Noise
from fedapp.site.shares import ANSWERED, N_ASKED, THRESHOLD, parties_of, share
from fedapp.site.store import Store
from fedapp.wire.codec import Envelope

# Among a store's facts, once the site's sums are to be masked.
BOUNDS = "bounds"
# The digest of the requests since then.
ASKED = "asked_for"


@dataclass(frozen=True, slots=True, eq=False)
class Sums:
    """What a party has summed over its rows.

    Parameters
    ----------
    arrays : int64, of any shapes, in the order in which the server reads them.
    n_bytes : that each sum over all parties fits in.
    noise : of each array, in a run that promises an epsilon; else none.
    follows : whether other sums of the same rows and gradients are parts of these, or these of
        them: then no party may be lost in between.
    """

    arrays: Sequence[Whole]
    n_bytes: int = 8
    noise: Sequence[Noise] = ()
    follows: bool = False


def bounds_of(store: Store) -> Bounds:
    """What the run says of the rows of all parties."""
    return Bounds(**store.facts[BOUNDS])


def is_masked(store: Store) -> bool:
    """Whether the site's sums leave it under masks alone from here on."""
    return BOUNDS in store.facts


def check_leaves(name: str, store: Store, request: Request) -> None:
    """Hold that nothing of a site's own leaves it in a run whose sums are masked.

    Raises
    ------
    ProtocolError : the request asks for it.
    """
    if is_masked(store) and request.leaves == "own":
        rule = "must be one for sums over all parties, as the run has begun"
        raise ProtocolError(name, type(request).__name__, "class", rule)


def note_request(name: str, store: Store, request: Request, digest: str) -> None:
    """Add a request to those that the masks follow from; what answers follow from no query.

    Parameters
    ----------
    digest : of the request.

    Raises
    ------
    ProtocolError : no party may be lost, and another one was answered before a step back: sums of
        other nodes, or after other leaves, would be as many as the server goes back.
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
    """A site's sums as they may leave it.

    Parameters
    ----------
    digest : of the request.

    Raises
    ------
    ProtocolError : the parties that are told are not those that may be.
    """
    whole = [np.ravel(each).astype(np.int64, copy=False) for each in sums.arrays]
    flat = np.concatenate(whole)
    told = request.among if isinstance(request, Among) else ()
    among = parties_of(name, store, told, sums.follows)
    secrets, label = pair_secrets(name, store, envelope), label_of(store, envelope, digest, among)
    if not among:
        nothing = np.empty((0, SEALED_BYTES), np.uint8)
        return MaskedReply(hide(name, flat, secrets, label, sums.n_bytes), nothing)
    secrets = {peer: secret for peer, secret in secrets.items() if peer in among}
    asked = digest if store.finished else store.facts[ASKED]
    own, sealed = share(name, store, secrets, label, asked, sums.follows)
    return MaskedReply(hide(name, flat, secrets, label, sums.n_bytes, own), sealed)


def label_of(store: Store, envelope: Envelope, digest: str, among: Sequence[str]) -> bytes:
    """What the masks of one answer are drawn for."""
    when, asked = (envelope.step, envelope.attempt, since(store, envelope.attempt)), digest
    if store.finished:
        when = (0, 0, 0)
    else:
        asked = store.facts[ASKED]
    return prefixed(*(str(part).encode() for part in (*when, asked)), *(p.encode() for p in among))
