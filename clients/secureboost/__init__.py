"""SecureBoost at a party: one is active and has the labels, the others are passive.

``active`` and ``passive`` have a role each, beside Algorithms 2 and 1 of the paper: a level is read
there. Their state is in records: ``columns``, those of a party in bins, and all; ``model``, labels,
loss and finished trees; ``round``, gradients, the trees that grow, and what others claim. Rows move
as in ``clients.vertical.growing``. Nothing here knows the server, which only relays.
"""

from __future__ import annotations

from clients.secureboost.active import Active
from clients.secureboost.passive import Passive
from fedapp.site.roles import handlers

HANDLERS = handlers(Active, Passive)
