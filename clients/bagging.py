"""Bagging at a party: boost from the margins of the common model."""

from __future__ import annotations

from collections.abc import Mapping

from clients.local_boosting import boost
from fedapp.messages.fields import Request
from fedapp.messages.local_boosting import BagReply, BagRequest
from fedapp.site.answer import Handler, Site


def bag(site: Site, request: BagRequest) -> BagReply:
    """Add trees, score and grow; see ``clients.local_boosting``."""
    return BagReply(**boost(site, request))


HANDLERS: Mapping[type[Request], Handler] = {BagRequest: bag}
