"""The plan of a run: what its opening says, compared with every later request.

The plan is stored when the run opens. It survives a rollback. Without it, a run that was approved
with masked sums and 50 rounds could then ask for plain sums, or for sums of 2,500 other draws.
"""

from __future__ import annotations

from typing import Any

from fedapp.data.datasets import NAME, NAME_RULE
from fedapp.errors import ProtocolError
from fedapp.messages.fields import Request
from fedapp.messages.handshake import Plan
from fedapp.site.register import SPLIT
from fedapp.site.settings import SiteConfig
from fedapp.site.store import Store
from fedapp.site.trust import site_fingerprint

# Among a store's facts: the plan; the first round of the run (not 0 if it continues another model),
# and the last one requested.
PLAN, FIRST_ROUND, LAST_ROUND = "plan", "first_round", "last_round"
# What a request discloses -> the aggregations that allow it.
ALLOWED = {"own": ("plain", "sealed"), "sums": ("secure",), "noised": ("secure",)}


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
