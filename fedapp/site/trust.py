"""Which keys a site trusts, and what a run may ask of it: pinned keys, and the plan of the run.

A fingerprint is pinned by ``trusted`` in the node config or by ``fedapp trust``, which writes it to
``$FEDAPP_HOME/trusted.toml``::

    "insurer" = "6668 7aad f862 bd77 6c8f c18b 8e9f 8e20"

Parties that share a home, as in simulation and the local engine, need no pins: anyone who could
replace a key there could also read it.

The plan is stored when the run opens, and compared with every later request. It survives a
rollback. Without it, a run that was approved with masked sums and 50 rounds could then ask for
plain sums, or for sums of 2,500 other draws.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fedapp.crypto.sealed import fingerprint_of, new_private_key, public_key
from fedapp.data.datasets import NAME, NAME_RULE
from fedapp.errors import ProtocolError
from fedapp.home import PRIVATE, home, private_folder, read_toml, secret_at, write_atomically
from fedapp.messages.fields import Request
from fedapp.messages.handshake import Plan
from fedapp.site.settings import SiteConfig, pinned_key
from fedapp.site.store import Store

IDENTITY = "identity.key"
PINNED = "trusted.toml"
# Among a store's facts: the plan; the first round of the run (not 0 if it continues another model),
# and the last one requested.
PLAN, FIRST_ROUND, LAST_ROUND = "plan", "first_round", "last_round"
# Fields of an opening that are settings of the run, besides those of ``Plan``.
SPLIT = ("test_fraction", "valid_fraction", "seed", "fold", "folds")
# What a request discloses -> the aggregations that allow it.
ALLOWED = {"own": ("plain", "sealed"), "sums": ("secure",), "noised": ("secure",)}


def identity(name: str, place: Path | None = None) -> bytes:
    """The site's private key, 32 bytes, drawn on first use; `place` is the site's home."""
    return secret_at((place or home()) / "sites" / name / IDENTITY, new_private_key)


def site_fingerprint(name: str) -> str:
    """Fingerprint of the site's public key."""
    return fingerprint_of(public_key(identity(name)))


def pins_in(place: Path) -> dict[str, str]:
    """Fingerprints by name, as ``pin`` has written them; raises ConfigError."""
    path = place / PINNED
    rule = f"{PINNED} must have a fingerprint for each name"
    pins = read_toml(path.read_text(), rule) if path.exists() else {}
    return dict(pinned_key(name, str(key), PINNED) for name, key in pins.items())


def pin(place: Path, name: str, fingerprint: str) -> str:
    """Trust this key of a site from now on, and no other; raises ConfigError if it is invalid.

    `place` is the home of the site that trusts. Returns the fingerprint that was pinned before,
    empty if there was none.
    """
    name, fingerprint = pinned_key(name, fingerprint, "fedapp trust")
    pins = pins_in(place)
    before = pins.get(name, "")
    entries = sorted({**pins, name: fingerprint}.items())
    lines = [f"{json.dumps(each)} = {json.dumps(key)}\n" for each, key in entries]
    private_folder(place)
    write_atomically(place / PINNED, "".join(lines).encode(), PRIVATE)
    return before


def trusted_keys(config: SiteConfig, names: Iterable[str]) -> dict[str, str]:
    """Fingerprints that the site trusts, by name.

    Keys of these parties in this home are trusted too, unless the node config sets ``trusted``.
    """
    pins = {**pins_in(home()), **config.trusted}
    if config.trusted:
        return pins
    files = {name: home() / "sites" / name / IDENTITY for name in names if NAME.fullmatch(name)}
    local = {
        name: fingerprint_of(public_key(path.read_bytes()))
        for name, path in files.items()
        if path.exists()
    }
    return {**local, **pins}


def check_trusted(config: SiteConfig, keys: dict[str, bytes]) -> None:
    """Check that the site trusts the public keys that the server forwards.

    Raises ProtocolError with the first unknown or different key, and the command to trust it.
    """
    site, trusted = config.name, trusted_keys(config, keys)
    for name, key in keys.items():
        got, pinned = fingerprint_of(key), trusted.get(name, "")
        if got == pinned:
            continue
        rule = f"must be one {site} trusts ({pinned or 'none is pinned'}), got {got}"
        way = f"run at {site}: . env.sh; fedapp trust {name} {got}"
        if name in config.trusted:
            way = f"change trusted in the node config of {site}"
        compare = f"if 'fedapp key {name}' prints that at {name}"
        raise ProtocolError(name, "parcel", "key", f"{rule}; {compare}, {way}")


def plan_of(request: Plan) -> dict[str, Any]:
    """Settings fixed by an opening, as JSON values."""
    settings = {name: getattr(request, name) for name in (*Plan.__dataclass_fields__, *SPLIT)}
    return {name: list(one) if isinstance(one, tuple) else one for name, one in settings.items()}


def keep_plan(config: SiteConfig, store: Store, request: Plan) -> None:
    """Store the plan of a run; it must contain the site, and be that of any earlier opening."""
    plan, name, message = plan_of(request), config.name, type(request).__name__
    for field, value in store.facts.get(PLAN, plan).items():
        is_shorter = field == "rounds" and plan[field] < value  # resumed after it has diverged
        if plan[field] != value and not is_shorter:
            rule = f"must be {value}, as when the run was opened, got {plan[field]}"
            raise ProtocolError(name, message, field, f"{rule}; begin a new run")
    store.facts[PLAN] = plan
    if config.simulated:
        return
    parties, fingerprints = request.parties, request.fingerprints
    if len(set(parties)) < len(parties) or not all(map(NAME.fullmatch, parties)):
        raise ProtocolError(name, message, "parties", f"must be {NAME_RULE}, each once")
    if len(fingerprints) != len(parties):
        raise ProtocolError(name, message, "fingerprints", "must be one a party")
    if dict(zip(parties, fingerprints, strict=True)).get(name) != site_fingerprint(name):
        rule = f"must have {name} with the fingerprint of its key"
        raise ProtocolError(name, message, "parties", rule)


def check_within(
    config: SiteConfig, store: Store, message: str, field: str, got: int, limit: str
) -> None:
    """Check a value derived from a request against a limit of the plan; raises ProtocolError."""
    if not config.simulated and got > (most := store.facts[PLAN][limit]):
        rule = f"must be <= {most} by the plan that opened the run, got {got}"
        raise ProtocolError(config.name, message, field, rule)


def check_roster(store: Store, name: str, roster: dict[str, str]) -> None:
    """Check that the parties and the fingerprints of their keys are those of the plan."""
    plan = store.facts[PLAN]
    planned = dict(zip(plan["parties"], plan["fingerprints"], strict=True))
    for party in sorted({*planned, *roster}):
        if (due := planned.get(party)) != (got := roster.get(party)):
            rule = f"must be {due} by the plan that opened the run, got {got}"
            raise ProtocolError(name, "parcel", "key", f"of {party} {rule}")


def check_planned(config: SiteConfig, store: Store, request: Request) -> None:
    """Check that a request is within the plan of the run; not in a simulation.

    Raises ProtocolError if a setting differs, a limit is exceeded, or a round is out of order.
    """
    if config.simulated or isinstance(request, Plan) or not request.is_step:
        return
    plan = store.facts[PLAN]
    rules: dict[str, tuple[bool, str]] = {}
    for field in type(request).forms:
        value = getattr(request, field)
        if field in plan and isinstance(value, bool | int | float | str):
            rules[field] = value == plan[field], f"must be {plan[field]}"
        elif limit := type(request).planned.get(field):
            rules[field] = value <= plan[limit.name], f"must be <= {plan[limit.name]}"
    aggregation = plan["aggregation"]
    fits = aggregation in ALLOWED.get(request.leaves, (aggregation,))
    is_noised = request.leaves not in ("own", "sums") or not plan["epsilon"]
    rules["class"] = fits and is_noised, f"must be one for aggregation {aggregation}"
    if hasattr(request, "round_id"):
        first = store.facts.setdefault(FIRST_ROUND, request.round_id)
        last = store.facts.get(LAST_ROUND, first - 1)
        # After the last round, a request that adds nothing may score the model.
        adds = getattr(request, "n_rounds", getattr(request, "epochs", 1)) > 0
        # A round of masked sums begins once; a plain one begins again if a party fails in it.
        is_turn = getattr(request, "n_rounds", 1) > 0
        begins = request.leaves == "sums" and not getattr(request, "level", 0)
        least, end = last + begins, first + plan["rounds"] - adds
        rules["round_id"] = least <= request.round_id <= end, f"must be {least} to {end}"
        if is_turn:
            store.facts[LAST_ROUND] = request.round_id
    for field, (is_kept, rule) in rules.items():
        if not is_kept:
            got = getattr(request, field, request.kind)
            rule = f"{rule} by the plan that opened the run, got {got}"
            raise ProtocolError(config.name, type(request).__name__, field, rule)
