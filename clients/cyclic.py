"""Cyclic boosting at a party: add the others' trees, and boost in its turn."""

from __future__ import annotations

from collections.abc import Mapping

from clients.local_boosting import boost
from fedapp.messages.fields import Request
from fedapp.messages.local_boosting import TurnReply, TurnRequest
from fedapp.site.answer import Handler, Site


def take_turn(site: Site, request: TurnRequest) -> TurnReply:
    """Add trees, score and grow; see ``clients.local_boosting``."""
    return TurnReply(**boost(site, request))


HANDLERS: Mapping[type[Request], Handler] = {TurnRequest: take_turn}
