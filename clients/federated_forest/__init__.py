"""Federated Forest at a party: one is active and has the labels, the others are passive.

``party`` has the forest as any party knows it, a record, and the roles: the active one has labels,
leaf values and scores. ``paillier`` has both roles where labels are encrypted: one sums, the other
chooses.
Each role has the order of its requests. Nothing here draws columns: the server does. Rows move as
in ``clients.vertical.growing``. Read ``party`` first.
"""

from __future__ import annotations

from clients.federated_forest.paillier import PaillierActive, PaillierPassive
from clients.federated_forest.party import EncodedActive, EncodedPassive
from fedapp.site.roles import handlers

HANDLERS = handlers(EncodedActive, EncodedPassive, PaillierActive, PaillierPassive)
