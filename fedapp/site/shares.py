"""Dropout-tolerant secure aggregation: a self-mask whose seed is secret-shared.

Each answer has one more mask, from a seed drawn for it, and shares of the seed, each sealed for its
holder. The server names the parties whose answers it has. A site then sends its shares of their
seeds and, for each missing party, the seed of their pairwise stream for this answer. So a party's
seed can be reconstructed, or its pairwise masks, but never both:

- A site accepts one set of parties per sum, which includes itself and at least ``threshold``
  parties. With n parties, whatever sets the server sends to whom, a sum that it gets is over at
  least ``2 threshold - n`` parties. The site checks that this is at least its ``least-parties``.
- Missing parties do not come back: the next sum is over those named. This survives a restart of the
  server and a rollback, even to before the run was opened.
- A request is summed once: if it is repeated after a rollback, only over the same parties, however
  steps are numbered. Sums that overlap with others, such as a level of a tree, must be over the
  parties of these.

Source: Bonawitz et al. 2017, "Practical Secure Aggregation for Privacy-Preserving Machine
Learning", Section 4 and Figure 4. Departure: no round in which all parties sign the set; a higher
threshold replaces it.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence

import numpy as np

from fedapp.crypto.masking import SHARE_BYTES, new_secret, seed_of, split
from fedapp.crypto.sealed import Address, prefixed, seal, unseal
from fedapp.errors import ProtocolError
from fedapp.messages.fields import Array
from fedapp.messages.secagg import SEALED_BYTES, UnmaskReply, UnmaskRequest
from fedapp.site.mail import TOLD_ONCE
from fedapp.site.plan import FIRST_ROUND, PLAN
from fedapp.site.store import Store

log = logging.getLogger("fedapp.site")

LABEL = b"fedapp share v1"
# Among a store's facts:
THRESHOLD = "threshold"  # smallest number of remaining parties; 0: all
AMONG = "among"  # the remaining parties
PENDING = "pending"  # the answer to be unmasked
SUMMED = "summed"  # since the last checkpoint: number of the request, its digest, the parties
N_ASKED = "n_asked"  # number of requests that led to this state, whatever their steps
ANSWERED = "answered_for"  # since the last checkpoint: digests of the requests by number
# What survives a rollback to a checkpoint.
LASTING = TOLD_ONCE, AMONG, SUMMED, ANSWERED, PLAN, FIRST_ROUND


def parties_of(name: str, store: Store, named: Sequence[str], follows: bool) -> list[str]:
    """Parties between which an answer is masked; empty if these are all, and none may be lost.

    `named` are the parties that the server names, or empty for all remaining ones; `follows` says
    whether the sum overlaps with others. Raises ProtocolError if a party comes back, too few
    remain, or they differ from those of earlier sums.
    """
    if not store.facts[THRESHOLD]:
        return []
    remaining = store.facts[AMONG]
    return _checked(name, store.facts[THRESHOLD], named or remaining, remaining, follows)


def share(
    name: str, store: Store, secrets: Mapping[str, bytes], label: bytes, asked: str, follows: bool
) -> tuple[bytes, Array]:
    """Draw the seed of a self-mask, and seal a share of it for each holder.

    `secrets` are those with each other party of the sum, `asked` is a digest of all requests that
    determine the answer, and `label` its label. Returns the seed and the sealed shares, uint8,
    shape (n_others, ``SEALED_BYTES``), sorted by party.
    """
    among = sorted([name, *secrets])
    seed = new_secret()
    shares = dict(zip(among, split(seed, store.facts[THRESHOLD], len(among)), strict=True))
    # Keys that seal the shares between two parties, for this answer only.
    data = prefixed(LABEL, label)
    boxes = {
        peer: hashlib.blake2b(data, digest_size=SHARE_BYTES, key=secret).digest()
        for peer, secret in secrets.items()
    }
    sealed = [seal(boxes[peer], Address(name, peer, 0), shares[peer]) for peer in sorted(secrets)]
    store.facts[PENDING] = {
        "among": among,
        "number": store.facts[N_ASKED],
        "asked": asked,
        "follows": follows,
        "own": shares[name].hex(),
        "boxes": {peer: box.hex() for peer, box in boxes.items()},
        "seeds": {peer: seed_of(secret, label).hex() for peer, secret in secrets.items()},
    }
    rows = np.frombuffer(b"".join(sealed), dtype=np.uint8)
    return seed, rows.reshape(-1, SEALED_BYTES)


def unmask(name: str, store: Store, request: UnmaskRequest) -> UnmaskReply:
    """Disclose what unmasks the answers of the named parties, once.

    Raises
    ------
    ProtocolError : there is no such sum, or it was unmasked; the parties are too few, or differ
        from those of the same sum before; a share was changed, or is of another sum.
    """
    if PENDING not in store.facts:
        raise ProtocolError(name, "UnmaskRequest", "step", "must follow a sum, and but once")
    pending = store.facts.pop(PENDING)
    among, threshold = pending["among"], store.facts[THRESHOLD]
    names = _checked(name, threshold, request.names, among, pending["follows"])
    # The same is summed for the same parties only.
    number, asked = pending["number"], pending["asked"]
    summed = store.facts.get(SUMMED, [])
    for _, before, of_whom in summed:
        if before == asked and of_whom != names:
            returning = ", ".join(sorted(set(of_whom) - set(names)))
            rule = f"must have {returning}, with whom this was summed before the run was resumed"
            raise ProtocolError(name, "UnmaskRequest", "names", rule)
    store.facts[SUMMED] = [*summed, [number, asked, names]]
    if len(request.sealed) != len(names) - 1:
        raise ProtocolError(name, "UnmaskRequest", "sealed", f"must be {len(names) - 1} shares")
    shares = {name: bytes.fromhex(pending["own"])}
    others = [peer for peer in names if peer != name]
    for peer, sealed in zip(others, request.sealed, strict=True):
        shares[peer] = _opened(peer, name, bytes.fromhex(pending["boxes"][peer]), sealed)
    lost = [peer for peer in among if peer not in names]
    if lost:
        log.warning("sums go on without %s", ", ".join(lost))
    seeds = b"".join(bytes.fromhex(pending["seeds"][peer]) for peer in lost)
    store.facts[AMONG] = names
    return UnmaskReply(
        np.frombuffer(b"".join(shares[peer] for peer in names), np.uint8).reshape(-1, SHARE_BYTES),
        np.frombuffer(seeds, np.uint8).reshape(-1, SHARE_BYTES),
    )


def keep(store: Store, checkpoint: int) -> None:
    """Store the state as that of a checkpoint, and forget sums that cannot be repeated.

    By number of requests, as a server may number steps as it likes.
    """
    after = store.facts.get(N_ASKED, 0)
    if SUMMED in store.facts:
        store.facts[SUMMED] = [one for one in store.facts[SUMMED] if one[0] > after]
    if ANSWERED in store.facts:
        answered = store.facts[ANSWERED].items()
        store.facts[ANSWERED] = {number: one for number, one in answered if int(number) > after}
    store.keep(checkpoint)


def go_back(store: Store, before: Store) -> Store:
    """Carry over what survives a rollback; `before` is the state before it."""
    store.facts.update({name: before.facts[name] for name in LASTING if name in before.facts})
    if not store.finished:
        store.facts.pop(PENDING, None)
    return store


def _checked(
    name: str, fewest: int, names: Sequence[str], among: list[str], follows: bool
) -> list[str]:
    """Check the parties of a sum, and return them sorted."""
    parties = sorted(set(names))
    rules = {
        "must differ": len(parties) == len(names),
        f"must be of those that are left: {', '.join(among)}": set(parties) <= set(among),
        f"must have {name}": name in parties,
        f"must be {fewest} or more": len(parties) >= fewest,
        "must be those of the sums that this one is part of": not follows or parties == among,
    }
    for rule, holds in rules.items():
        if not holds:
            raise ProtocolError(name, "sum", "names", f"{rule}, got {', '.join(parties)}")
    return parties


def _opened(sender: str, receiver: str, box: bytes, sealed: Array) -> bytes:
    try:
        found = unseal(box, Address(sender, receiver, 0), sealed.tobytes())
    except ValueError:
        rule = f"must be sealed by {sender} for {receiver} with this answer, got another"
        raise ProtocolError(sender, "UnmaskRequest", "sealed", rule) from None
    return found
