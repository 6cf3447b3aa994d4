"""In what order the roles of SecureBoost answer."""

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
from fedapp.site.answer import Site
from fedapp.site.phases import ALIGNED, FINISHED, Table, is_active

SET_UP = "set up"  # columns are in bins; what the others say of theirs is to come
TO_WALK = "to walk"  # the same, and rows are on their way down the model to go on from
WALKED = "walked"  # all are at its leaves
ENCRYPTING = "encrypting"  # some of a round's gradients are out, and the rest is to come
BEGUN = "begun"  # all of them are
CHOSEN = "chosen"  # a level's splits are; who made them tells the sides with the next sums
GROWN = "grown"  # so are the splits of the last level
IDLE = "idle"  # no round is under way, and none begins
TAKING = "taking"  # a round's gradients come, block by block
SUMMED = "summed"  # the sums of a level are out
TOLD = "told"  # a level's splits are known, and the own ones made

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
