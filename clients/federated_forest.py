"""Federated Forest at a party: one is active and has the labels, the others are passive."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from clients import federated_forest_active as active
from clients import federated_forest_grow as grow
from fedapp.messages.federated_forest import (
    FinishRequest,
    LevelReply,
    LevelRequest,
    PartitionRequest,
    SetupReply,
    SetupRequest,
)
from fedapp.messages.fields import Request
from fedapp.site.answer import Handler, Site
from fedapp.site.mail import read_mail, write_mail


def setup(site: Site, request: SetupRequest) -> SetupReply:
    """Get ready, each in its role."""
    if site.store.facts["active"] == site.name:
        return active.setup(site, request)
    read_mail(site, request)
    grow.begin(site, request)
    return SetupReply(**write_mail(site, []))


def level(site: Site, request: LevelRequest) -> LevelReply:
    """Make the last level's splits, and say how well the open nodes could be split."""
    store, mail = site.store, read_mail(site, request)
    is_active = store.facts["active"] == site.name
    if not is_active and "targets" not in store:
        grow.take_labels(site, mail)
    train, valid = dict[str, float](), dict[str, float]()
    if len(request.trees):
        grow.take_splits(site, request, mail)
        if is_active:
            train, valid = active.level_scores(store)
    found = grow.search_level(site, request)
    return LevelReply(
        found.improvements,
        found.ranks,
        tuple(train),
        np.array(list(train.values()), dtype=np.float64),
        np.array(list(valid.values()), dtype=np.float64),
    )


HANDLERS: Mapping[type[Request], Handler] = {
    SetupRequest: setup,
    LevelRequest: level,
    PartitionRequest: grow.partition,
    FinishRequest: active.finish,
}
