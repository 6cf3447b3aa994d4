"""Add noise to a site's sums in a run with an epsilon, once per sum.

Noise is derived from a key that the site draws for the run, from the sum's place in the schedule,
and from all requests up to then. So a restarted server that repeats a request gets the same noise,
and cannot average several draws. Answers are recorded in a separate file, which a rollback of the
run's state does not change: another request for a sum already disclosed is refused, and so is a sum
beyond the schedule. The file is deleted when the run ends.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from fedapp.crypto.noise import KEY_BYTES, MAX_VARIANCE, Budget, Source, discrete_gaussian
from fedapp.crypto.sealed import prefixed
from fedapp.errors import ConfigError, ProtocolError, as_protocol_error
from fedapp.histograms.fixed_point import Whole
from fedapp.home import write_atomically
from fedapp.messages.fields import Request
from fedapp.messages.pax import Promise
from fedapp.site.config import SiteConfig
from fedapp.site.store import NOISE, Store

# Among a store's facts: the promised budget, and a digest of the noised requests since then.
PROMISED, NOISED = "promised", "noised_for"
ONCE = {"scores": 1}  # sums that are not in the schedule, and are disclosed once


@dataclass(frozen=True, slots=True)
class Noise:
    """Noise of one array of sums."""

    kind: str  # of the sum, as in ``Budget.schedule``, or ``scores``
    number: int  # of the sum within its kind, from 0
    variances: tuple[int, ...]  # for each index of the last axis, or one for all


def promise(
    config: SiteConfig, store: Store, request: Request, terms: Promise, n_parties: int
) -> None:
    """Check and store the privacy budget of a run; `request` contains `terms`.

    Raises ConfigError if delta is too large for the site's rows or there is no accountant, and
    ProtocolError if the noise does not keep the promise.
    """
    numbers = terms.epsilon, terms.delta, terms.multiplier, terms.n_rounds, max(n_parties, 2)
    budget, name = Budget(*numbers, terms.levels), type(request).__name__
    n_train = len(store["train.labels"])
    if terms.delta * n_train >= 1:
        rule = f"must be below 1 / {n_train}, the training rows of {config.name}"
        raise ConfigError(f"privacy.delta {rule}, got {terms.delta:g}")
    with as_protocol_error(config.name, name, "multiplier"):
        budget.check()
    store.facts[PROMISED] = {**asdict(budget), "clip": terms.clip}


def budget_of(store: Store) -> Budget:
    """The stored privacy budget of a run."""
    settings = store.facts[PROMISED]
    return Budget(**{name: settings[name] for name in settings if name != "clip"})


def check_noised(name: str, store: Store, request: Request) -> None:
    """Check that a request does not ask for anything without noise in a run with an epsilon."""
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
    drawn = [_draws(shape[:-1], (variance,), source) for variance in variances]
    return np.stack(drawn, axis=-1)
