"""SecureBoost at a party: one is active and has the labels, the others are passive.

``shared`` has what both keep, and moves rows by the splits of all parties; ``active`` sends
encrypted gradients, chooses splits, and scores and stores the model; ``passive`` sums and splits
its columns. Each role has the order of its requests. Nothing here knows the server, which only
relays. Read ``shared`` first.
"""

from __future__ import annotations

from clients.secureboost.active import Active
from clients.secureboost.passive import Passive
from fedapp.site.roles import handlers

HANDLERS = handlers(Active, Passive)
