"""Parties of a vertical run, whatever the method: its opening, and trees over their columns.

``aligned`` is what every role has, ``opening`` aligns the rows, ``growing`` makes splits and moves
rows. Read ``aligned`` first.
"""

from __future__ import annotations

from clients.vertical.opening import Opening
from fedapp.site.roles import handlers

HANDLERS = handlers(Opening)
