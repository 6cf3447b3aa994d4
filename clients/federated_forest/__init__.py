"""Federated Forest at a party: one is active and has the labels, the others are passive."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from clients.federated_forest import active, grow, part, splits
from clients.federated_forest import paillier_active as chooser
from clients.federated_forest import paillier_passive as summer
from fedapp.messages.federated_forest import (
    ENCODED,
    PAILLIER,
    FinishRequest,
    LevelReply,
    LevelRequest,
    PartitionReply,
    PartitionRequest,
    SetupReply,
    SetupRequest,
    SplitReply,
    SplitRequest,
    SumReply,
    SumRequest,
)
from fedapp.messages.fields import Request
from fedapp.site.answer import Handler, Site
from fedapp.site.mail import Letters, Mail


def setup(site: Site, request: SetupRequest, mail: Mail) -> tuple[SetupReply, Letters]:
    """Get ready, each in its role."""
    if site.store.facts["active"] == site.name:
        return SetupReply(), active.setup(site, request, mail)
    grow.begin(site, request)
    return SetupReply(), []


def level(site: Site, request: LevelRequest, mail: Mail) -> LevelReply:
    """Make the last level's splits, and say how well the open nodes could be split."""
    splits.check_mode(site, ENCODED, "LevelRequest")
    if "targets" not in site.store:
        grow.take_labels(site, mail)
    if len(request.trees):
        splits.keep_partitions(site, mail)
        splits.take_splits(site, request)
    scores = _scores(site, request)
    found = grow.search_level(site, request)
    return LevelReply(found.improvements, found.ranks, **scores)


def sums(site: Site, request: SumRequest, mail: Mail) -> tuple[SumReply, Letters]:
    """Make the last level's splits, and sum encrypted labels of the open nodes."""
    splits.check_mode(site, PAILLIER, "SumRequest")
    letters: Letters = []
    summer.take_labels(site, mail)
    if len(request.trees):
        splits.keep_partitions(site, mail)
        letters = summer.make_won(site, request, mail)
        splits.take_splits(site, request)
    letters.append((site.store.facts["active"], summer.sum_columns(site, request)))
    return SumReply(), letters


def split(site: Site, request: SplitRequest, mail: Mail) -> tuple[SplitReply, Letters]:
    """Make the last level's splits, and choose those of the open nodes for all parties."""
    splits.check_mode(site, PAILLIER, "SplitRequest")
    if len(request.trees):
        chooser.check_told(site, request)
        splits.keep_partitions(site, mail)
        splits.take_splits(site, request)
    scores = _scores(site, request)
    chosen, letters = chooser.choose(site, request, mail)
    return SplitReply(chosen.trees, chosen.nodes, chosen.owners, **scores), letters


def _scores(site: Site, request: LevelRequest | SplitRequest) -> dict[str, Any]:
    """Scores of the forest as it is, at the active party once there is one."""
    train, valid = dict[str, float](), dict[str, float]()
    if len(request.trees) and site.store.facts["active"] == site.name:
        train, valid = active.level_scores(site.store)
    return {
        "score_names": tuple(train),
        "train_scores": np.array(list(train.values()), dtype=np.float64),
        "valid_scores": np.array(list(valid.values()), dtype=np.float64),
    }


def partition(site: Site, request: PartitionRequest, mail: Mail) -> tuple[PartitionReply, Letters]:
    """Make the own splits of a level and tell the others; after the last level keep the part."""
    splits.keep_partitions(site, mail)
    if splits.is_encrypted(site.store):
        letters = summer.make_won(site, request, mail)
    else:
        splits.make_own(site, request)
        letters = splits.tell_others(site, splits.own_partition(site))
    if request.last:
        return part.hand_over(site, request)
    return PartitionReply(**part.own_records(site, told=False)), letters


HANDLERS: Mapping[type[Request], Handler] = {
    SetupRequest: setup,
    LevelRequest: level,
    SumRequest: sums,
    SplitRequest: split,
    PartitionRequest: partition,
    FinishRequest: active.finish,
}
