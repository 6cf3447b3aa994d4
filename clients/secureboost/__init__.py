"""SecureBoost at a party: one is active and has the labels, the others are passive.

``active`` and ``passive`` have a role each, beside Algorithms 2 and 1 of the paper: a level is read
there. Their state is in records: ``table``, a party's columns in bins; ``target``, labels and loss;
``joint``, all parties' columns; ``round``, gradients and the trees that grow; ``model``, those that
are finished; ``claims``, what passive parties have sent, checked. Rows move as in
``clients.vertical.growing``. Nothing here knows the server, which only relays.
"""

from __future__ import annotations

from clients.secureboost.active import Active
from clients.secureboost.passive import Passive
from fedapp.site.roles import handlers

HANDLERS = handlers(Active, Passive)
