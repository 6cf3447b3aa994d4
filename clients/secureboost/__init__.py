"""SecureBoost at a party: one is active and has the labels, the others are passive."""

from __future__ import annotations

from collections.abc import Mapping

from clients.secureboost import active, passive
from fedapp.messages.fields import Request
from fedapp.messages.parcels import SentReply
from fedapp.messages.secureboost import (
    BeginRequest,
    FinishRequest,
    HandOverRequest,
    PartitionRequest,
    SetupRequest,
    SplitRequest,
    SumRequest,
)
from fedapp.site.answer import Handler, Site
from fedapp.site.mail import Letters, Mail


def setup(site: Site, request: SetupRequest, mail: Mail) -> tuple[SentReply, Letters]:
    """Get ready, each in its role."""
    is_active = site.store.facts["active"] == site.name
    return active.setup(site, request, mail) if is_active else passive.setup(site, request)


HANDLERS: Mapping[type[Request], Handler] = {
    SetupRequest: setup,
    BeginRequest: active.begin,
    SumRequest: passive.sum_nodes,
    SplitRequest: active.split,
    PartitionRequest: passive.partition,
    HandOverRequest: passive.hand_over,
    FinishRequest: active.finish,
}
