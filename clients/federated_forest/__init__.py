"""Federated Forest at a party: one is active and has the labels, the others are passive.

``party`` has the state of any party, moves the rows, and searches or sums columns; ``active``
adds labels, choices and scores. Each role has the order of its requests. Nothing here draws
columns: the server does. Read ``party`` first.
"""

from __future__ import annotations

from clients.federated_forest.active import EncodedActive, PaillierActive
from clients.federated_forest.party import EncodedPassive, PaillierPassive
from fedapp.site.roles import handlers

HANDLERS = handlers(EncodedActive, EncodedPassive, PaillierActive, PaillierPassive)
