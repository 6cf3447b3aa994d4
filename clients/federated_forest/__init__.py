"""Federated Forest at a party: one is active and has the labels, the others are passive.

``splits`` has the state of any party, and moves the rows; ``passive`` searches or sums columns;
``active`` adds labels, choices and scores. Each role has the order of its requests. Nothing here
draws columns: the server does. Read ``splits`` first.
"""

from __future__ import annotations

from clients.federated_forest.active import EncodedActive, PaillierActive
from clients.federated_forest.passive import EncodedPassive, PaillierPassive
from fedapp.site.roles import handlers

HANDLERS = handlers(EncodedActive, EncodedPassive, PaillierActive, PaillierPassive)
