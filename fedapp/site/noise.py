"""How noise comes to a site's sums in a run that promises an epsilon, and never twice.

Noise follows from a key that the site draws for the run, from the sum of the schedule that it is
for, and from all requests up to then. So a server that was started anew and asks the same again
gets the same, and cannot take the mean of several draws. What was answered stands in a file of its
own, which no step back of the run's state changes: another request for a sum that was told is
refused, and so is a sum beyond the schedule. The file is deleted when the run ends.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from fedapp.crypto.budget import Budget
from fedapp.crypto.fixed_point import Whole
from fedapp.crypto.noise import KEY_BYTES, MOST_VARIANCE, Source, discrete_gaussian
from fedapp.crypto.sealed import prefixed
from fedapp.errors import ConfigError, ProtocolError, blaming
from fedapp.home import write_whole
from fedapp.messages.fields import Request
from fedapp.messages.private import Promise
from fedapp.site.config import SiteConfig
from fedapp.site.store import NOISE, Store

# Among a store's facts: what the run promises, and the digest of the noised requests since then.
PROMISED, NOISED = "promised", "noised_for"
# Sums that are told once; of the others the schedule says how many there are.
ONCE = {"scores": 1}


@dataclass(frozen=True, slots=True)
class Noise:
    """Of one array of sums.

    Parameters
    ----------
    kind : of the sum, as in ``Budget.schedule``, or ``scores``.
    number : of the sum among those of its kind, from 0.
    variances : of each place of the last axis, or one of all.
    """

    kind: str
    number: int
    variances: tuple[int, ...]


def promise(
    config: SiteConfig, store: Store, request: Request, said: Promise, n_parties: int
) -> None:
    """Hold a run to what it promises.

    Parameters
    ----------
    request : the message of which ``said`` is a part.
    n_parties : whose sums are added up.

    Raises
    ------
    ConfigError : its delta is too large for the site's rows, or there is no accountant.
    ProtocolError : its noise does not keep the promise.
    """
    numbers = said.epsilon, said.delta, said.multiplier, said.n_rounds, max(n_parties, 2)
    budget, name = Budget(*numbers, said.levels), type(request).__name__
    n_own = len(store["train.labels"])
    if said.delta * n_own >= 1:
        rule = f"must be below 1 / {n_own}, the training rows of {config.name}"
        raise ConfigError(f"privacy.delta {rule}, got {said.delta:g}")
    with blaming(config.name, name, "multiplier"):
        budget.check()
    store.facts[PROMISED] = {**asdict(budget), "clip": said.clip}


def budget_of(store: Store) -> Budget:
    """What the run promises."""
    said = store.facts[PROMISED]
    return Budget(**{name: said[name] for name in said if name != "clip"})


def check_noised(name: str, store: Store, request: Request) -> None:
    """Hold that nothing leaves a site without noise in a run that promises it.

    Raises
    ------
    ProtocolError : the request asks for it.
    """
    if PROMISED in store.facts and request.leaves not in ("noised", "nothing"):
        rule = "must be one for noised sums, as the run has begun"
        raise ProtocolError(name, type(request).__name__, "class", rule)


def noised(
    name: str,
    store: Store,
    request: Request,
    digest: str,
    arrays: Sequence[Whole],
    noise: Sequence[Noise],
) -> list[Whole]:
    """Sums with their noise.

    Parameters
    ----------
    digest : of the request.
    noise : of each array.

    Raises
    ------
    ProtocolError : the sums are beyond the schedule, or were told for another request; or so much
        noise cannot be drawn.
    """
    message = type(request).__name__
    if max(max(each.variances) for each in noise) > MOST_VARIANCE:
        rule = "must be of less noise, for sums to fit in 64 bits; a larger epsilon helps"
        raise ProtocolError(name, message, "multiplier", rule)
    since = prefixed(store.facts.get(NOISED, "").encode(), digest.encode())
    store.facts[NOISED] = asked = hashlib.sha256(since).hexdigest()
    kept = _kept(store)
    limits = {each.kind: each.times for each in budget_of(store).schedule} | ONCE
    slots = dict.fromkeys((each.kind, each.number) for each in noise)
    for kind, number in slots:
        if number >= limits[kind]:
            rule = f"must be one of {limits[kind]} for {kind}, which the run's epsilon allows"
            raise ProtocolError(name, message, "step", rule)
        if kept["told"].setdefault(f"{kind} {number}", asked) != asked:
            rule = f"must be what it was when {kind} {number} was told; noise is drawn once"
            raise ProtocolError(name, message, "content", f"{rule}: begin a new run")
    write_whole(store.folder / NOISE, json.dumps(kept).encode(), lasting=store.lasting)
    key = bytes.fromhex(kept["key"])
    sources = {
        slot: Source(key, prefixed(*(str(part).encode() for part in (*slot, asked))))
        for slot in slots
    }
    return [
        array + _draws(array.shape, each.variances, sources[each.kind, each.number])
        for array, each in zip(arrays, noise, strict=True)
    ]


def _draws(shape: tuple[int, ...], variances: tuple[int, ...], source: Source) -> Whole:
    """Noise of one array."""
    if len(variances) == 1:
        return discrete_gaussian(variances[0], int(np.prod(shape)), source).reshape(shape)
    drawn = [_draws(shape[:-1], (variance,), source) for variance in variances]
    return np.stack(drawn, axis=-1)


def _kept(store: Store) -> dict[str, Any]:
    """The run's key, and what was told so far; drawn with the first sum."""
    try:
        found: dict[str, Any] = json.loads((store.folder / NOISE).read_bytes())
    except FileNotFoundError:
        return {"key": secrets.token_bytes(KEY_BYTES).hex(), "told": {}}
    return found
