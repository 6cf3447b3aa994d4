"""SecureBoost at a party: one is active and has the labels, the others are passive.

``shared`` moves rows by the splits of all parties, and has the order of requests for each role;
``active`` sends encrypted gradients, chooses splits, and scores and stores the model; ``passive``
sums and splits its columns. Nothing here knows the server, which only relays. Read
``shared`` first.
"""

from __future__ import annotations

from clients.secureboost import active, passive
from clients.secureboost.active import finish
from clients.secureboost.shared import note_init_model, role_of
from fedapp.messages.secureboost import (
    AnswerRequest,
    BeginRequest,
    EncryptRequest,
    FinishRequest,
    HandOverRequest,
    PartitionRequest,
    SetupRequest,
    SplitRequest,
    SumRequest,
    TakeRequest,
    WalkRequest,
)
from fedapp.messages.vertical import SentReply
from fedapp.site.answer import Site, in_order, is_active
from fedapp.site.mail import Letters, Mail, hold_once


def setup(site: Site, request: SetupRequest, mail: Mail) -> tuple[SentReply, Letters]:
    """Set up training, by role."""
    hold_once(site.name, site.store, request, "training was set up")
    note_init_model(site, request)
    return active.setup(site, request, mail) if is_active(site) else passive.setup(site, request)


HANDLERS = in_order(
    {
        SetupRequest: setup,
        WalkRequest: active.walk,
        AnswerRequest: passive.answer,
        BeginRequest: active.begin,
        EncryptRequest: active.send_on,
        TakeRequest: passive.take,
        SumRequest: passive.sum_nodes,
        SplitRequest: active.split,
        PartitionRequest: passive.partition,
        HandOverRequest: passive.hand_over,
        FinishRequest: finish,
    },
    role_of,
)
