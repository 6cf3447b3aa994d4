"""Send the party's name, before a run opens."""

from __future__ import annotations

from collections.abc import Mapping

from fedapp.messages.handshake import GreetReply, GreetRequest
from fedapp.site.answer import Handler, Site
from fedapp.site.mail import site_fingerprint


def greet(site: Site, request: GreetRequest) -> GreetReply:
    """Name of the party and fingerprint of its key."""
    return GreetReply(site.name, "" if site.config.simulated else site_fingerprint(site.name))


HANDLERS: Mapping[type[GreetRequest], Handler] = {GreetRequest: greet}
