"""In what order a party answers a method's messages: a table of phases for each role.

::

    {"grown": {BeginRequest: ("begun", "idle")}}  # phase -> message -> the phases it may lead to

The phase is a fact of the site's state, so it comes back with a checkpoint. Where a message may
lead to several phases, its handler says to which.
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
    """The phase a party is in."""
    return str(store.facts.get("phase", "not aligned"))


def enter(store: Store, phase: str) -> None:
    """Go on to another phase."""
    store.facts["phase"] = phase


def is_active(site: Site) -> bool:
    """Whether the party is the one that has the labels."""
    return bool(site.store.facts.get("active") == site.name)


def in_order(handlers: Handlers, role_of: Callable[[Site], tuple[str, Table]]) -> Handlers:
    """Handlers that refuse what the party's role does not answer in its phase.

    Parameters
    ----------
    role_of : name of a site's role, for errors, and its table.
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
        found, after = handler(site, request, *letters), table[before][kind]
        if len(after) == 1:
            enter(site.store, *after)
        assert phase_of(site.store) in after, f"{kind.__name__} led from {before} to no phase"
        return found

    return handle
