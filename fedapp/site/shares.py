"""A site's part in sums that go on when a party is lost: a mask of its own, with shares for all.

Each answer has one more mask, of a seed drawn for it alone, and shares of the seed, each sealed for
its holder. When the server has named the parties whose answers it has, a site tells its shares of
their seeds, and of each party that is missing the seed of the stream that the two had, for this
answer alone. So a party's own seed or those of its pairs can be put together, and never both:

- A site names one set of parties a sum, itself among them and so many at least as the run began
  with (``threshold``). With n parties, and that many at least, whatever the server tells whom,
  a sum that it gets is over ``2 threshold - n`` parties at least. The site sees to it that these
  are no fewer than its ``least-parties``.
- Parties that are missing do not come back: the next sum is among those that were named. This
  outlives a server that was started anew, and goes back, even to before the run was opened.
- What was asked is summed once: asked again after a step back, for the same parties alone, however
  steps are numbered; and what other sums are parts of, such as a level of a tree, for the parties
  of these.

Source: Bonawitz et al. 2017, "Practical Secure Aggregation for Privacy-Preserving Machine
Learning", Section 4 and Figure 4. Departure: no round in which all sign the set; the threshold is
higher in place of that.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence

import numpy as np

from fedapp.crypto.pairwise import seed_of
from fedapp.crypto.sealed import Address, prefixed, seal, unseal
from fedapp.crypto.shamir import SHARE_BYTES, new_secret, split
from fedapp.errors import ProtocolError
from fedapp.messages.fields import Array
from fedapp.messages.secure import SEALED_BYTES, UnmaskReply, UnmaskRequest
from fedapp.site.mail import TOLD_ONCE
from fedapp.site.plan import FIRST_ROUND, PLAN
from fedapp.site.store import Store

log = logging.getLogger("fedapp.site")

LABEL = b"fedapp share v1"
# Among a store's facts: how many must be left, 0 where all must; who is; the answer that waits to
# be unmasked; of each that the last checkpoint does not follow from, the number of its request,
# what was asked and of whom; and how many requests a state follows from, whatever their steps.
THRESHOLD, AMONG, PENDING, SUMMED = "threshold", "among", "pending", "summed"
N_ASKED = "n_asked"
# Digests of the requests that were answered since the last checkpoint, by their number.
ANSWERED = "answered_for"
# What a site does not forget when it goes back to a checkpoint.
LASTING = TOLD_ONCE, AMONG, SUMMED, ANSWERED, PLAN, FIRST_ROUND


def parties_of(name: str, store: Store, told: Sequence[str], follows: bool) -> list[str]:
    """Between whom an answer is masked; empty where that is all parties, and none may be lost.

    Parameters
    ----------
    told : what the server says; empty for all that are left.
    follows : whether other sums are parts of it, or it of them.

    Raises
    ------
    ProtocolError : a party comes back, too few are left, or they are not those of the sums before.
    """
    if not store.facts[THRESHOLD]:
        return []
    left = store.facts[AMONG]
    return _checked(name, store.facts[THRESHOLD], told or left, left, follows)


def share(
    name: str, store: Store, secrets: Mapping[str, bytes], label: bytes, asked: str, follows: bool
) -> tuple[bytes, Array]:
    """Draw the seed of a mask, and seal a share of it for each holder; keep what opens the others'.

    Parameters
    ----------
    secrets : with each other party of the sum.
    label : of the answer.
    asked : digest of all that it follows from.
    follows : as of ``parties_of``.

    Returns
    -------
    The seed, and uint8, shape (n_others, ``SEALED_BYTES``), in the order of the names.
    """
    among = sorted([name, *secrets])
    seed = new_secret()
    shares = dict(zip(among, split(seed, store.facts[THRESHOLD], len(among)), strict=True))
    boxes = {peer: _box(secret, label) for peer, secret in secrets.items()}
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
    """Tell what takes the masks off the answers of the parties that are named, once.

    Raises
    ------
    ProtocolError : there is no such sum, or it was unmasked; the parties are too few, or others
        than those with which the same was summed before; a share was changed, or is another sum's.
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
            back = ", ".join(sorted(set(of_whom) - set(names)))
            rule = f"must have {back}, with whom this was summed before the run was resumed"
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
    """Keep the state as that of a checkpoint, and forget sums that cannot be asked for again.

    By the requests that the state follows from, as a server numbers steps as it likes.
    """
    after = store.facts.get(N_ASKED, 0)
    if SUMMED in store.facts:
        store.facts[SUMMED] = [one for one in store.facts[SUMMED] if one[0] > after]
    if ANSWERED in store.facts:
        answered = store.facts[ANSWERED].items()
        store.facts[ANSWERED] = {number: one for number, one in answered if int(number) > after}
    store.keep(checkpoint)


def go_back(store: Store, before: Store) -> Store:
    """The state that a server started anew goes on from, with what a site does not forget.

    Parameters
    ----------
    before : as it was, of which ``store`` is an older state, or the same.
    """
    store.facts.update({name: before.facts[name] for name in LASTING if name in before.facts})
    if not store.finished:
        store.facts.pop(PENDING, None)
    return store


def _checked(
    name: str, fewest: int, names: Sequence[str], among: list[str], follows: bool
) -> list[str]:
    """The parties of a sum."""
    found = sorted(set(names))
    rules = {
        "must differ": len(found) == len(names),
        f"must be of those that are left: {', '.join(among)}": set(found) <= set(among),
        f"must have {name}": name in found,
        f"must be {fewest} or more": len(found) >= fewest,
        "must be those of the sums that this one is part of": not follows or found == among,
    }
    for rule, holds in rules.items():
        if not holds:
            raise ProtocolError(name, "sum", "names", f"{rule}, got {', '.join(found)}")
    return found


def _opened(sender: str, receiver: str, box: bytes, sealed: Array) -> bytes:
    try:
        found = unseal(box, Address(sender, receiver, 0), sealed.tobytes())
    except ValueError:
        rule = f"must be sealed by {sender} for {receiver} with this answer, got another"
        raise ProtocolError(sender, "UnmaskRequest", "sealed", rule) from None
    return found


def _box(secret: bytes, label: bytes) -> bytes:
    """What seals the shares between two parties, with one answer each."""
    return hashlib.blake2b(prefixed(LABEL, label), digest_size=SHARE_BYTES, key=secret).digest()
