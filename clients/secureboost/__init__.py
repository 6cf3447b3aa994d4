"""SecureBoost at a party: one is active and has the labels, the others are passive.

``shared`` has what both keep. Of the active one, ``start`` codes labels and draws the key, and
``active`` sends encrypted gradients, chooses splits, and scores and stores the model; its state is
in three records: ``joint``, all parties' columns; ``round``, the trees that grow; ``model``, those
that are finished. It checks by ``claims`` what ``passive`` ones send, which sum and split their
columns. Rows move as in ``clients.vertical.growing``. Nothing here knows the server, which only
relays. Read ``shared`` first.
"""

from __future__ import annotations

from clients.secureboost.active import Active
from clients.secureboost.passive import Passive
from fedapp.site.roles import handlers

HANDLERS = handlers(Active, Passive)
