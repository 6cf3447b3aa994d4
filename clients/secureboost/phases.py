"""The order of requests at each role of SecureBoost."""

from __future__ import annotations

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
from fedapp.site.answer import ALIGNED, FINISHED, Site, Table, is_active

SET_UP = "set up"  # columns are binned; the others' bins are to come
TO_WALK = "to walk"  # the same, and rows are traversing the initial model
WALKED = "walked"  # all rows are at its leaves
ENCRYPTING = "encrypting"  # some of a round's gradients are sent
BEGUN = "begun"  # all of them are sent
CHOSEN = "chosen"  # a level's splits are chosen; their owners send sides with the next sums
GROWN = "grown"  # so are those of the last level
IDLE = "idle"  # no round is in progress, and none follows
TAKING = "taking"  # receiving a round's gradients, block by block
SUMMED = "summed"  # a level's sums are sent
TOLD = "told"  # a level's splits are received, and the local ones made

ACTIVE: Table = {
    ALIGNED: {SetupRequest: (SET_UP, TO_WALK)},
    TO_WALK: {WalkRequest: (TO_WALK, WALKED)},
    WALKED: {BeginRequest: (ENCRYPTING, BEGUN, IDLE)},
    SET_UP: {BeginRequest: (ENCRYPTING, BEGUN, IDLE)},
    ENCRYPTING: {EncryptRequest: (ENCRYPTING, BEGUN), FinishRequest: (FINISHED,)},
    BEGUN: {SplitRequest: (CHOSEN, GROWN), FinishRequest: (FINISHED,)},
    CHOSEN: {SplitRequest: (CHOSEN, GROWN)},
    GROWN: {BeginRequest: (ENCRYPTING, BEGUN, IDLE)},
    IDLE: {FinishRequest: (FINISHED,)},
}
PASSIVE: Table = {
    ALIGNED: {SetupRequest: (SET_UP,)},
    SET_UP: {
        AnswerRequest: (SET_UP,),
        TakeRequest: (TAKING,),
        SumRequest: (SUMMED,),
        HandOverRequest: (FINISHED,),
    },
    TAKING: {TakeRequest: (TAKING,), SumRequest: (SUMMED,)},
    SUMMED: {
        TakeRequest: (TAKING,),
        SumRequest: (SUMMED,),
        PartitionRequest: (TOLD, SUMMED),
        HandOverRequest: (FINISHED,),
    },
    TOLD: {TakeRequest: (TAKING,), SumRequest: (SUMMED,), HandOverRequest: (FINISHED,)},
}


def role_of(site: Site) -> tuple[str, Table]:
    """A site's role and its table."""
    return ("the active party", ACTIVE) if is_active(site) else ("a passive party", PASSIVE)
