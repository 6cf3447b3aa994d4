"""Federated Forest at a party: one is active and has the labels, the others are passive.

``splits`` moves the rows, and has the order of requests for each role; ``passive`` is what any
party does with its columns, with encoded or encrypted labels; ``active`` adds labels, choices and
scores. Nothing here draws columns: the server does. Read ``splits`` first.
"""

from __future__ import annotations

from typing import Any

from clients.federated_forest import active, passive, splits
from clients.federated_forest.splits import SET_UP, SPLIT, role_of
from clients.scoring import score_arrays
from fedapp.errors import ProtocolError
from fedapp.messages.federated_forest import (
    FinishRequest,
    LevelReply,
    LevelRequest,
    PartitionReply,
    PartitionRequest,
    SetupRequest,
    SplitReply,
    SplitRequest,
    SumRequest,
)
from fedapp.messages.vertical import SentReply
from fedapp.site.answer import FINISHED, Site, enter, in_order, is_active, phase_of
from fedapp.site.mail import Letters, Mail, hold_once


def setup(site: Site, request: SetupRequest, mail: Mail) -> tuple[SentReply, Letters]:
    """Set up training, by role."""
    hold_once(site.name, site.store, request, "training was set up")
    if is_active(site):
        return SentReply(), active.setup(site, request, mail)
    splits.begin(site, request)
    return SentReply(), []


def level(site: Site, request: LevelRequest, mail: Mail) -> LevelReply:
    """Apply the last level's splits, and report the best split of each open node."""
    if phase_of(site.store) == SET_UP and not is_active(site):
        splits.take_encoded_labels(site, mail)
    if len(request.trees):
        splits.keep_partitions(site, mail)
        splits.take_splits(site, request)
    scores = _scores(site, request)
    candidates = splits.search_level(site, request)
    return LevelReply(improvements=candidates.improvements, ranks=candidates.ranks, **scores)


def sums(site: Site, request: SumRequest, mail: Mail) -> tuple[SentReply, Letters]:
    """Apply the last level's splits, and sum encrypted labels of the open nodes."""
    letters: Letters = []
    if phase_of(site.store) == SET_UP:
        passive.take_labels(site, mail)
    if len(request.trees):
        splits.keep_partitions(site, mail)
        letters = passive.make_won(site, request, mail)
        splits.take_splits(site, request)
    letters.append((site.store.facts["active"], passive.sum_columns(site, request)))
    return SentReply(), letters


def split(site: Site, request: SplitRequest, mail: Mail) -> tuple[SplitReply, Letters]:
    """Apply the last level's splits, and choose those of the open nodes for all parties."""
    if len(request.trees):
        active.check_chosen(site, request)
        splits.keep_partitions(site, mail)
        splits.take_splits(site, request)
    scores = _scores(site, request)
    chosen, letters = active.choose(site, request, mail)
    reply = SplitReply(trees=chosen.trees, nodes=chosen.nodes, owners=chosen.owners, **scores)
    return reply, letters


def _scores(site: Site, request: LevelRequest | SplitRequest) -> dict[str, Any]:
    has_trees = len(request.trees) and is_active(site)
    return score_arrays(
        active.level_scores(site.store) if has_trees else {"train": {}, "valid": {}}
    )


def partition(site: Site, request: PartitionRequest, mail: Mail) -> tuple[PartitionReply, Letters]:
    """Make the local splits of a level, send their sides; after the last level store the part."""
    splits.keep_partitions(site, mail)
    if splits.is_encrypted(site.store):
        letters = passive.make_won(site, request, mail)
    else:
        splits.make_local_splits(site, request)
        letters = splits.letters_to_others(site, splits.local_partition(site))
    if request.last and is_active(site):
        rule = "must be false at the active party"
        raise ProtocolError(site.name, "PartitionRequest", "last", rule)
    if request.last:
        enter(site.store, FINISHED)
        return passive.hand_over(site, request)
    enter(site.store, SPLIT)
    return PartitionReply(**splits.record_fields(site, shared=False)), letters


HANDLERS = in_order(
    {
        SetupRequest: setup,
        LevelRequest: level,
        SumRequest: sums,
        SplitRequest: split,
        PartitionRequest: partition,
        FinishRequest: active.finish,
    },
    role_of,
)
