"""Parties of a vertical run, whatever the method: its opening, and trees over their columns.

``party`` has what every role has, and makes splits and moves rows; ``opening`` aligns the rows.
"""

from __future__ import annotations

from clients.vertical.opening import Opening
from fedapp.site.roles import handlers

HANDLERS = handlers(Opening)
