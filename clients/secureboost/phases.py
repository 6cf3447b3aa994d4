"""In what order the roles of SecureBoost answer."""

from __future__ import annotations

from fedapp.messages.secureboost import (
    AnswerRequest,
    BeginRequest,
    FinishRequest,
    HandOverRequest,
    PartitionRequest,
    SetupRequest,
    SplitRequest,
    SumRequest,
    WalkRequest,
)
from fedapp.site.answer import Site
from fedapp.site.phases import ALIGNED, FINISHED, Table, is_active

SET_UP = "set up"  # columns are in bins; what the others say of theirs is to come
TO_WALK = "to walk"  # the same, and rows are on their way down the model to go on from
WALKED = "walked"  # all are at its leaves
BEGUN = "begun"  # a round's gradients are out
CHOSEN = "chosen"  # a level's splits are; who made them tells the sides with the next sums
GROWN = "grown"  # so are the splits of the last level
IDLE = "idle"  # no round is under way, and none begins
SUMMED = "summed"  # the sums of a level are out
TOLD = "told"  # a level's splits are known, and the own ones made

ACTIVE: Table = {
    ALIGNED: {SetupRequest: (SET_UP, TO_WALK)},
    TO_WALK: {WalkRequest: (TO_WALK, WALKED)},
    WALKED: {BeginRequest: (BEGUN, IDLE)},
    SET_UP: {BeginRequest: (BEGUN, IDLE)},
    BEGUN: {SplitRequest: (CHOSEN, GROWN), FinishRequest: (FINISHED,)},
    CHOSEN: {SplitRequest: (CHOSEN, GROWN)},
    GROWN: {BeginRequest: (BEGUN, IDLE)},
    IDLE: {FinishRequest: (FINISHED,)},
}
PASSIVE: Table = {
    ALIGNED: {SetupRequest: (SET_UP,)},
    SET_UP: {
        AnswerRequest: (SET_UP,),
        SumRequest: (SUMMED,),
        HandOverRequest: (FINISHED,),
    },
    SUMMED: {
        SumRequest: (SUMMED,),
        PartitionRequest: (TOLD, SUMMED),
        HandOverRequest: (FINISHED,),
    },
    TOLD: {SumRequest: (SUMMED,), HandOverRequest: (FINISHED,)},
}


def role_of(site: Site) -> tuple[str, Table]:
    """A site's role and its table."""
    return ("the active party", ACTIVE) if is_active(site) else ("a passive party", PASSIVE)
