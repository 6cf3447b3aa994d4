"""The order of requests at each role of Federated Forest."""

from __future__ import annotations

from fedapp.messages.federated_forest import (
    ENCODED,
    PAILLIER,
    FinishRequest,
    LevelRequest,
    PartitionRequest,
    SetupRequest,
    SplitRequest,
    SumRequest,
)
from fedapp.site.answer import ALIGNED, FINISHED, Site, Table, is_active

SET_UP = "set up"  # columns are binned; passive parties do not have the labels yet
SEARCHED = "searched"  # the best splits of the open nodes are sent
SUMMED = "summed"  # encrypted sums of the open nodes are sent
CHOSEN = "chosen"  # the splits of the open nodes are chosen, for all parties
TOLD = "told"  # the local splits that won are made, and their sides sent

BEGINS: Table = {ALIGNED: {SetupRequest: (SET_UP,)}}
TABLES: dict[str, Table] = {
    f"the active party with {ENCODED} labels": {
        **BEGINS,
        SET_UP: {LevelRequest: (SEARCHED,)},
        SEARCHED: {
            LevelRequest: (SEARCHED,),
            PartitionRequest: (TOLD,),
            FinishRequest: (FINISHED,),
        },
        TOLD: {LevelRequest: (SEARCHED,)},
    },
    f"a passive party with {ENCODED} labels": {
        **BEGINS,
        SET_UP: {LevelRequest: (SEARCHED,)},
        SEARCHED: {LevelRequest: (SEARCHED,), PartitionRequest: (TOLD, FINISHED)},
        TOLD: {LevelRequest: (SEARCHED,)},
    },
    f"the active party with {PAILLIER} labels": {
        **BEGINS,
        SET_UP: {SplitRequest: (CHOSEN,)},
        CHOSEN: {SplitRequest: (CHOSEN,), FinishRequest: (FINISHED,)},
    },
    f"a passive party with {PAILLIER} labels": {
        **BEGINS,
        SET_UP: {SumRequest: (SUMMED,)},
        SUMMED: {SumRequest: (SUMMED,), PartitionRequest: (TOLD, FINISHED)},
        TOLD: {SumRequest: (SUMMED,)},
    },
}


def role_of(site: Site) -> tuple[str, Table]:
    """A site's role and its table."""
    labels = site.store.facts.get("forest", {}).get("labels", ENCODED)
    role = f"{'the active' if is_active(site) else 'a passive'} party with {labels} labels"
    return role, TABLES[role]
