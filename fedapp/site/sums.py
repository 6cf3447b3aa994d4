"""Mask a site's sums, so that the server sees only sums over all parties; add noise before.

**Masks.** A handler returns integer sums, and they are masked here, so that no handler depends on
keys or steps. The label of the masks covers everything that determines the sums: the run with its
hello and all parties, through the secrets of the pairs; the step, the attempt of the server and its
checkpoint; and all requests since the parties met, each as a whole. The rows held back follow from
the hello, and the rows of a tree node from the splits of earlier requests. So a mask stream never
hides two contents, even if a site's disk is set back, and the masks of parties that were sent
different requests do not cancel from there on. The last answer of a run follows from its request
only, whatever attempt of the server asks: its label has no step, so a restarted server can add
answers to several attempts. If parties may be lost, the label also has the parties of the sum.

**Lost parties.** Each answer then has one more mask, from a seed drawn for it, and shares of the
seed, each sealed for its holder. The server names the parties whose answers it has. A site then
sends its shares of their seeds and, for each missing party, the seed of their pairwise stream for
this answer. So a party's seed can be reconstructed, or its pairwise masks, but never both:

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

**Noise**, in a run with an epsilon, is added once per sum. It is derived from a key that the site
draws for the run, from the sum's place in the schedule, and from all requests up to then. So a
restarted server that repeats a request gets the same noise, and cannot average several draws. The
account has the key, until the run ends, and which sums were disclosed: another request for one of
them is refused, and so is a sum beyond the schedule.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fedapp.crypto.masking import SHARE_BYTES, mask_vector, new_secret, seed_of, share_secret
from fedapp.crypto.noise import KEY_BYTES, MAX_VARIANCE, NOISE_LABEL, Budget, discrete_gaussian
from fedapp.crypto.sealed import Address, Stream, derived_key, prefixed, seal, unseal
from fedapp.errors import ProtocolError, as_protocol_error
from fedapp.histograms.fixed_point import Bounds, Whole
from fedapp.messages.fields import Array, Reply, Request, check_fields
from fedapp.messages.pax_secure import Promise
from fedapp.messages.secagg import (
    SEALED_BYTES,
    Among,
    MaskedReply,
    Roster,
    UnmaskReply,
    UnmaskRequest,
)
from fedapp.messages.wire import Envelope
from fedapp.metrics.adders import DOUBLES, Adder, WholeNumbers
from fedapp.site.account import Summed, account_of, is_masked, note, position_of
from fedapp.site.mail import checkpoint_of, pair_secrets
from fedapp.site.policy import check_delta
from fedapp.site.settings import SiteConfig
from fedapp.site.store import NoStateError, Store

log = logging.getLogger("fedapp.site")

LABEL = b"fedapp share v1"
ONCE = {"scores": 1}  # sums that are not in the schedule, and are disclosed once


@dataclass(frozen=True, slots=True)
class Pending:
    """An answer to be unmasked."""

    among: tuple[str, ...]
    number: int  # of its question
    chain: str
    follows: bool
    own: bytes  # share of the self-mask's seed
    boxes: Mapping[str, bytes]  # keys of the sealed shares, by party
    seeds: Mapping[str, bytes]  # of the pairs, by party


@dataclass(frozen=True, slots=True)
class Masks:
    """State of a run from where its sums leave the site only masked."""

    bounds: Bounds  # of the rows of all parties
    threshold: int  # smallest number of remaining parties; 0: all
    pending: Pending | None = None


@dataclass(frozen=True, slots=True)
class Promised:
    """The privacy budget of a run, and its bound on a row's gradients; 0 for none."""

    budget: Budget
    clip: float


@dataclass(frozen=True, slots=True)
class Noise:
    """Noise of one array of sums."""

    kind: str  # of the sum, as in ``Budget.schedule``, or ``scores``
    number: int  # of the sum within its kind, from 0
    variances: tuple[int, ...]  # for each index of the last axis, or one for all


@dataclass(frozen=True, slots=True, eq=False)
class Sums:
    """Sums over a party's rows, which ``site.answer`` masks if the run's plan says so.

    Under masks numbers are whole; else ``reply`` makes a reply of them.
    """

    arrays: Sequence[Array]  # of any shapes, in the order in which the server reads them
    reply: Callable[..., Reply] | None = None  # none of sums that leave only under masks
    n_bytes: int = 8  # each sum over all parties fits in
    noise: Sequence[Noise] = ()  # of each array, in a run with an epsilon; otherwise empty
    # Whether these sums overlap with others of the same rows and gradients: then no party may be
    # lost in between.
    follows: bool = False


def adder_of(store: Store) -> Adder:
    """How scores are added up: in doubles, or in whole numbers under masks."""
    return WholeNumbers(bounds_of(store)) if is_masked(store) else DOUBLES


def begin_masks(store: Store, bounds: Bounds, threshold: int, names: Sequence[str]) -> None:
    """Mask all further sums, over these parties."""
    store.put(Masks(bounds, threshold))
    # A party lost before this site resumed stays lost.
    note(store, among=account_of(store).among or tuple(sorted(names)))


def remaining(store: Store) -> list[str]:
    """Parties of the last sum."""
    if not (among := account_of(store).among):
        raise NoStateError("masks")
    return list(among)


def bounds_of(store: Store) -> Bounds:
    """Bounds on the rows of all parties, from the run."""
    return store.get(Masks).bounds


def has_roster(store: Store) -> bool:
    """Whether the site knows the parties between which its sums are masked."""
    return store.find(Masks) is not None


def check_leaves(name: str, store: Store, request: Request) -> None:
    """Check that a request asks for nothing without the masks or the noise of the run."""
    if has_roster(store) and request.leaves == "own":
        rule = "must be one for sums over all parties, as the run has begun"
        raise ProtocolError(name, type(request).__name__, "class", rule)
    if store.find(Promised) and request.leaves not in ("noised", "nothing"):
        rule = "must be one for noised sums, as the run has begun"
        raise ProtocolError(name, type(request).__name__, "class", rule)


def check_among(name: str, store: Store, request: Request, leaves: str) -> None:
    """Check the parties of a masked sum before anything is done for it: there must be some."""
    if leaves in ("sums", "noised") and not isinstance(request, Roster):
        parties_of(name, store, request, follows=False)


def forget_pending(store: Store) -> None:
    """After a rollback there is no answer to be unmasked."""
    if (masks := store.find(Masks)) and not store.finished:
        store.put(replace(masks, pending=None))


def mask_sums(
    name: str, store: Store, envelope: Envelope, request: Request, digest: str, sums: Sums
) -> MaskedReply:
    """Mask a site's sums; raises ProtocolError if the server names parties that may not sum."""
    parts = [np.ravel(array).astype(np.int64, casting="safe", copy=False) for array in sums.arrays]
    flat = np.concatenate(parts)
    among = parties_of(name, store, request, sums.follows)
    secrets = pair_secrets(name, store, envelope)
    # The last answer is the same in every attempt, whatever was asked before.
    asked = digest if store.finished else position_of(store).chain
    label = label_of(store, envelope, asked, among)
    if not among:  # no party may be lost: pairwise masks suffice
        nothing = np.empty((0, SEALED_BYTES), np.uint8)
        return MaskedReply(mask_vector(name, flat, secrets, label, sums.n_bytes), nothing)
    secrets = {peer: secret for peer, secret in secrets.items() if peer in among}
    self_mask, sealed = share(name, store, secrets, label, asked, sums.follows)
    return MaskedReply(mask_vector(name, flat, secrets, label, sums.n_bytes, self_mask), sealed)


def label_of(store: Store, envelope: Envelope, asked: str, among: Sequence[str]) -> bytes:
    """Label of the masks of one answer; see the module."""
    when = (envelope.step, envelope.attempt, checkpoint_of(store, envelope.attempt))
    when = (0, 0, 0) if store.finished else when
    return prefixed(*(str(part).encode() for part in (*when, asked)), *(p.encode() for p in among))


# Lost parties.


def parties_of(name: str, store: Store, request: Request, follows: bool) -> list[str]:
    """Parties between which an answer is masked; empty if these are all, and none may be lost.

    They are those that the request names, or else all remaining ones; `follows` says whether the
    sum overlaps with others. Raises ProtocolError if a party comes back, too few remain, or they
    differ from those of earlier sums.
    """
    if not (threshold := store.get(Masks).threshold):
        return []
    remaining = account_of(store).among
    named = (isinstance(request, Among) and request.among) or remaining
    return _checked(name, threshold, named, remaining, follows)


def share(
    name: str, store: Store, secrets: Mapping[str, bytes], label: bytes, asked: str, follows: bool
) -> tuple[bytes, Array]:
    """Draw the seed of a self-mask, and seal a share of it for each holder.

    `secrets` are those with each other party of the sum, `asked` is a digest of all requests that
    determine the answer, and `label` its label. Returns the seed and the sealed shares, uint8,
    shape (n_others, ``SEALED_BYTES``), sorted by party.
    """
    among = sorted([name, *secrets])
    seed, masks = new_secret(), store.get(Masks)
    shares = dict(zip(among, share_secret(seed, masks.threshold, len(among)), strict=True))
    boxes = {peer: derived_key(secret, LABEL, label) for peer, secret in secrets.items()}
    sealed = [seal(boxes[peer], Address(name, peer, 0), shares[peer]) for peer in sorted(secrets)]
    pending = Pending(
        tuple(among),
        position_of(store).number,
        asked,
        follows,
        shares[name],
        boxes,
        {peer: seed_of(secret, label) for peer, secret in secrets.items()},
    )
    store.put(replace(masks, pending=pending))
    rows = np.frombuffer(b"".join(sealed), dtype=np.uint8)
    return seed, rows.reshape(-1, SEALED_BYTES)


def unmask(name: str, store: Store, request: UnmaskRequest) -> UnmaskReply:
    """Disclose what unmasks the answers of the named parties, once.

    Raises
    ------
    ProtocolError : there is no such sum, or it was unmasked; the parties are too few, or differ
        from those of the same sum before; a share was changed, or is of another sum.
    """
    masks = store.find(Masks)
    if masks is None or (pending := masks.pending) is None:
        raise ProtocolError(name, "UnmaskRequest", "step", "must follow a sum, and but once")
    store.put(replace(masks, pending=None))
    names = _checked(name, masks.threshold, request.names, pending.among, pending.follows)
    # The same is summed for the same parties only.
    summed = account_of(store).summed
    for earlier in summed:
        if earlier.chain == pending.chain and list(earlier.names) != names:
            returning = ", ".join(sorted(set(earlier.names) - set(names)))
            rule = f"must have {returning}, with whom this was summed before the run was resumed"
            raise ProtocolError(name, "UnmaskRequest", "names", rule)
    if len(request.sealed) != len(names) - 1:
        raise ProtocolError(name, "UnmaskRequest", "sealed", f"must be {len(names) - 1} shares")
    shares = {name: pending.own}
    others = [peer for peer in names if peer != name]
    for peer, sealed in zip(others, request.sealed, strict=True):
        shares[peer] = _opened(peer, name, pending.boxes[peer], sealed)
    lost = [peer for peer in pending.among if peer not in names]
    if lost:
        log.warning("sums go on without %s", ", ".join(lost))
    seeds = b"".join(pending.seeds[peer] for peer in lost)
    this = Summed(pending.number, pending.chain, tuple(names))
    note(store, summed=(*summed, this), among=tuple(names))
    return UnmaskReply(
        np.frombuffer(b"".join(shares[peer] for peer in names), np.uint8).reshape(-1, SHARE_BYTES),
        np.frombuffer(seeds, np.uint8).reshape(-1, SHARE_BYTES),
    )


def _checked(
    name: str, fewest: int, names: Sequence[str], among: Sequence[str], follows: bool
) -> list[str]:
    """Check the parties of a sum, and return them sorted."""
    parties = sorted(set(names))
    rules = {
        "must differ": len(parties) == len(names),
        f"must be of those that are left: {', '.join(among)}": set(parties) <= set(among),
        f"must have {name}": name in parties,
        f"must be {fewest} or more": len(parties) >= fewest,
        "must be those of the sums that this one is part of": not follows or parties == list(among),
    }
    got = f", got {', '.join(parties)}"
    check_fields(name, "sum", *(("names", is_kept, rule + got) for rule, is_kept in rules.items()))
    return parties


def _opened(sender: str, receiver: str, box: bytes, sealed: Array) -> bytes:
    try:
        return unseal(box, Address(sender, receiver, 0), sealed.tobytes())
    except ValueError:
        rule = f"must be sealed by {sender} for {receiver} with this answer, got another"
        raise ProtocolError(sender, "UnmaskRequest", "sealed", rule) from None


# Noise.


def check_budget(
    config: SiteConfig, store: Store, request: Request, terms: Promise, n_train: int, n_parties: int
) -> None:
    """Check and store the privacy budget of a run; `request` contains `terms`.

    `n_train` is the number of the site's training rows.

    Raises ConfigError if delta is too large for the site's rows or there is no accountant, and
    ProtocolError if the noise does not keep the promise.
    """
    budget = Budget(
        terms.epsilon, terms.delta, terms.multiplier, terms.n_rounds, n_parties=max(n_parties, 2)
    )
    name = type(request).__name__
    check_delta(config, terms.delta, n_train)
    with as_protocol_error(config.name, name, "multiplier"):
        budget.check()
    store.put(Promised(budget, terms.clip))


def add_noise(
    name: str, store: Store, request: Request, arrays: Sequence[Whole], noise: Sequence[Noise]
) -> list[Whole]:
    """Add `noise` to the arrays of sums.

    Raises ProtocolError if the sums are beyond the schedule or were disclosed for another request,
    or if the variance is too large.
    """
    message = type(request).__name__
    account = account_of(store)
    chain = position_of(store).chain
    if max(max(gaussian.variances) for gaussian in noise) > MAX_VARIANCE:
        rule = "must be of less noise, for sums to fit in 64 bits; a larger epsilon helps"
        raise ProtocolError(name, message, "multiplier", rule)
    limits = {item.kind: item.times for item in store.get(Promised).budget.schedule} | ONCE
    slots = dict.fromkeys((gaussian.kind, gaussian.number) for gaussian in noise)
    noised = dict(account.noised)
    for kind, number in slots:
        if number >= limits[kind]:
            rule = f"must be one of {limits[kind]} for {kind}, which the run's epsilon allows"
            raise ProtocolError(name, message, "step", rule)
        if noised.setdefault(f"{kind} {number}", chain) != chain:
            rule = f"must be what it was when {kind} {number} was disclosed; noise is drawn once"
            raise ProtocolError(name, message, "content", f"{rule}: begin a new run")
    # On disk with the reply, before it leaves; a crash before that has disclosed nothing.
    key = account.noise_key or secrets.token_bytes(KEY_BYTES)
    note(store, noise_key=b"" if store.finished else key, noised=noised)
    sources = {
        slot: Stream(key, NOISE_LABEL, prefixed(*(str(part).encode() for part in (*slot, chain))))
        for slot in slots
    }
    return [
        array + _draws(array.shape, gaussian.variances, sources[gaussian.kind, gaussian.number])
        for array, gaussian in zip(arrays, noise, strict=True)
    ]


def _draws(shape: tuple[int, ...], variances: tuple[int, ...], source: Stream) -> Whole:
    if len(variances) == 1:
        return discrete_gaussian(variances[0], int(np.prod(shape)), source).reshape(shape)
    return np.stack([_draws(shape[:-1], (variance,), source) for variance in variances], axis=-1)
