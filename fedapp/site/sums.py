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
restarted server that repeats a request gets the same noise, and cannot average several draws.
Answers are recorded in a separate file, which a rollback of the run's state does not change:
another request for a sum already disclosed is refused, and so is a sum beyond the schedule. The
file is deleted when the run ends.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from fedapp.crypto.masking import SHARE_BYTES, mask_vector, new_secret, seed_of, split
from fedapp.crypto.noise import KEY_BYTES, MAX_VARIANCE, Budget, Source, discrete_gaussian
from fedapp.crypto.sealed import Address, prefixed, seal, unseal
from fedapp.errors import ProtocolError, as_protocol_error
from fedapp.histograms.fixed_point import Bounds, Whole
from fedapp.home import write_atomically
from fedapp.messages.fields import Array, Reply, Request
from fedapp.messages.pax_secure import Promise
from fedapp.messages.secagg import SEALED_BYTES, Among, MaskedReply, UnmaskReply, UnmaskRequest
from fedapp.messages.wire import Envelope
from fedapp.metrics.sums import DOUBLES, Adder, WholeNumbers
from fedapp.site.account import FIRST_ROUND, PLAN
from fedapp.site.mail import ANSWERED_ONCE, checkpoint_of, pair_secrets
from fedapp.site.settings import SiteConfig, check_delta
from fedapp.site.store import NOISE, Store

log = logging.getLogger("fedapp.site")

LABEL = b"fedapp share v1"
# Among a store's facts:
THRESHOLD = "threshold"  # smallest number of remaining parties; 0: all
AMONG = "among"  # the remaining parties
PENDING = "pending"  # the answer to be unmasked
SUMMED = "summed"  # since the last checkpoint: number of the request, its digest, the parties
N_ASKED = "n_asked"  # number of requests that led to this state, whatever their steps
ANSWERED = "answered_for"  # since the last checkpoint: digests of the requests by number
BOUNDS = "bounds"  # of the rows of all parties, once sums are masked
ASKED = "asked_for"  # digest of the requests since sums are masked
PROMISED = "promised"  # the privacy budget of the run
NOISED = "noised_for"  # digest of the noised requests since then
# What survives a rollback to a checkpoint.
SURVIVES_ROLLBACK = ANSWERED_ONCE, AMONG, SUMMED, ANSWERED, PLAN, FIRST_ROUND
ONCE = {"scores": 1}  # sums that are not in the schedule, and are disclosed once


@dataclass(frozen=True, slots=True)
class Noise:
    """Noise of one array of sums."""

    kind: str  # of the sum, as in ``Budget.schedule``, or ``scores``
    number: int  # of the sum within its kind, from 0
    variances: tuple[int, ...]  # for each index of the last axis, or one for all


@dataclass(frozen=True, slots=True, eq=False)
class Sums:
    """Sums over a party's rows."""

    arrays: Sequence[Whole]  # int64, of any shapes, in the order in which the server reads them
    n_bytes: int = 8  # each sum over all parties fits in
    noise: Sequence[Noise] = ()  # of each array, in a run with an epsilon; otherwise empty
    # Whether these sums overlap with others of the same rows and gradients: then no party may be
    # lost in between.
    follows: bool = False


def adder_of(store: Store, request: Request) -> Adder:
    """How scores are added up for a request: in doubles, or in whole numbers under masks."""
    return DOUBLES if request.leaves == "own" else WholeNumbers(bounds_of(store))


def leaving(
    request: Request, reply: type[Reply], arrays: Mapping[str, Array], follows: bool = False
) -> Reply | Sums:
    """What a handler returns: the site's own reply, or the same arrays as sums to be masked."""
    if request.leaves == "own":
        return reply(**arrays)
    return Sums(list(arrays.values()), follows=follows)


def begin_masks(store: Store, bounds: Bounds, threshold: int, names: Sequence[str]) -> None:
    """From now on sums leave the site only masked, over these parties."""
    store.facts[BOUNDS], store.facts[THRESHOLD] = asdict(bounds), threshold
    # A party lost before this site resumed stays lost.
    store.facts.setdefault(AMONG, sorted(names))


def remaining(store: Store) -> list[str]:
    """Parties of the last sum."""
    return list(store.facts[AMONG])


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


def mask_sums(
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
    when, asked = (envelope.step, envelope.attempt, checkpoint_of(store, envelope.attempt)), digest
    if store.finished:
        when = (0, 0, 0)  # the last answer is the same in every attempt
    else:
        asked = store.facts[ASKED]
    return prefixed(*(str(part).encode() for part in (*when, asked)), *(p.encode() for p in among))


# Lost parties.


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
    boxes = {peer: _share_key(secret, label) for peer, secret in secrets.items()}
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


def _share_key(secret: bytes, label: bytes) -> bytes:
    """Key that seals shares between two parties, for one answer."""
    return hashlib.blake2b(prefixed(LABEL, label), digest_size=SHARE_BYTES, key=secret).digest()


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
    for _, before, parties in summed:
        if before == asked and parties != names:
            returning = ", ".join(sorted(set(parties) - set(names)))
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


def carry_over(store: Store, before: Store) -> Store:
    """Carry over what survives a rollback; `before` is the state before it."""
    store.facts.update(
        {name: before.facts[name] for name in SURVIVES_ROLLBACK if name in before.facts}
    )
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
    for rule, is_kept in rules.items():
        if not is_kept:
            raise ProtocolError(name, "sum", "names", f"{rule}, got {', '.join(parties)}")
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
    numbers = terms.epsilon, terms.delta, terms.multiplier, terms.n_rounds, max(n_parties, 2)
    budget, name = Budget(*numbers), type(request).__name__
    check_delta(config, terms.delta, n_train)
    with as_protocol_error(config.name, name, "multiplier"):
        budget.check()
    store.facts[PROMISED] = {**asdict(budget), "clip": terms.clip}


def budget_of(store: Store) -> Budget:
    """The stored privacy budget of a run."""
    settings = store.facts[PROMISED]
    return Budget(**{name: settings[name] for name in settings if name != "clip"})


def clip_of(store: Store) -> float:
    """Bound on a row's gradients that the run promised; 0 for none."""
    return float(store.facts[PROMISED]["clip"])


def check_noised(name: str, store: Store, request: Request) -> None:
    """Check that a request does not ask for anything without noise in a run with an epsilon."""
    if PROMISED in store.facts and request.leaves not in ("noised", "nothing"):
        rule = "must be one for noised sums, as the run has begun"
        raise ProtocolError(name, type(request).__name__, "class", rule)


def add_noise(
    name: str,
    store: Store,
    request: Request,
    digest: str,
    arrays: Sequence[Whole],
    noise: Sequence[Noise],
) -> list[Whole]:
    """Add `noise` to the arrays of sums; `digest` is that of the request.

    Raises ProtocolError if the sums are beyond the schedule or were disclosed for another request,
    or if the variance is too large.
    """
    message = type(request).__name__
    if max(max(each.variances) for each in noise) > MAX_VARIANCE:
        rule = "must be of less noise, for sums to fit in 64 bits; a larger epsilon helps"
        raise ProtocolError(name, message, "multiplier", rule)
    requests = prefixed(store.facts.get(NOISED, "").encode(), digest.encode())
    store.facts[NOISED] = asked = hashlib.sha256(requests).hexdigest()
    try:
        # Key of the run, and which request each sum was disclosed for.
        record: dict[str, Any] = json.loads((store.folder / NOISE).read_bytes())
    except FileNotFoundError:
        record = {"key": secrets.token_bytes(KEY_BYTES).hex(), "told": {}}
    limits = {each.kind: each.times for each in budget_of(store).schedule} | ONCE
    slots = dict.fromkeys((each.kind, each.number) for each in noise)
    for kind, number in slots:
        if number >= limits[kind]:
            rule = f"must be one of {limits[kind]} for {kind}, which the run's epsilon allows"
            raise ProtocolError(name, message, "step", rule)
        if record["told"].setdefault(f"{kind} {number}", asked) != asked:
            rule = f"must be what it was when {kind} {number} was disclosed; noise is drawn once"
            raise ProtocolError(name, message, "content", f"{rule}: begin a new run")
    # Written before any noise is used, so that a crash cannot lead to a second draw.
    write_atomically(store.folder / NOISE, json.dumps(record).encode(), lasting=store.lasting)
    key = bytes.fromhex(record["key"])
    sources = {
        slot: Source(key, prefixed(*(str(part).encode() for part in (*slot, asked))))
        for slot in slots
    }
    return [
        array + _draws(array.shape, each.variances, sources[each.kind, each.number])
        for array, each in zip(arrays, noise, strict=True)
    ]


def _draws(shape: tuple[int, ...], variances: tuple[int, ...], source: Source) -> Whole:
    if len(variances) == 1:
        return discrete_gaussian(variances[0], int(np.prod(shape)), source).reshape(shape)
    return np.stack([_draws(shape[:-1], (one,), source) for one in variances], axis=-1)
