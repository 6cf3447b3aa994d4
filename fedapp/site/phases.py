"""The order of a method's messages at a party: a table of phases for each role.

::

    {"grown": {BeginRequest: ("begun", "idle")}}  # phase -> message -> the phases it may lead to

The phase is a fact of the site's state, so it is restored with a checkpoint. If a message may lead
to several phases, its handler enters one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from fedapp.errors import ProtocolError
from fedapp.messages.fields import Request
from fedapp.site.answer import Handler, Site
from fedapp.site.store import Store

Table = Mapping[str, Mapping[type[Request], tuple[str, ...]]]
Handlers = Mapping[type[Request], Handler]
ALIGNED = "aligned"  # where a method's table begins
FINISHED = "finished"  # where it ends


def phase_of(store: Store) -> str:
    """Current phase of a party."""
    return str(store.facts.get("phase", "not aligned"))


def enter(store: Store, phase: str) -> None:
    """Enter another phase."""
    store.facts["phase"] = phase


def is_active(site: Site) -> bool:
    """Whether the party has the labels."""
    return bool(site.store.facts.get("active") == site.name)


def in_order(handlers: Handlers, role_of: Callable[[Site], tuple[str, Table]]) -> Handlers:
    """Wrap handlers to refuse messages that the party's role does not answer in its phase.

    `role_of` returns the name of a site's role, for errors, and its table.
    """
    return {request: _in_order(handler, role_of) for request, handler in handlers.items()}


def _in_order(handler: Handler, role_of: Callable[[Site], tuple[str, Table]]) -> Handler:
    @wraps(handler)
    def handle(site: Site, request: Request, *letters: Any) -> Any:
        (role, table), before, kind = role_of(site), phase_of(site.store), type(request)
        if kind not in table.get(before, {}):
            allowed = [phase for phase, messages in table.items() if kind in messages]
            rule = f"must be {' or '.join(allowed) or 'none'} at {role}, got {before}"
            raise ProtocolError(site.name, kind.__name__, "phase", rule)
        answer, after = handler(site, request, *letters), table[before][kind]
        if len(after) == 1:
            enter(site.store, *after)
        assert phase_of(site.store) in after, f"{kind.__name__} led from {before} to no phase"
        return answer

    return handle
