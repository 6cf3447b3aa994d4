"""Parties of a vertical run, whatever the method: its opening, and trees over their columns.

``opening`` aligns the rows; ``party`` has what every role has then; ``growing`` has the trees: it
makes splits, passes on which rows they send left, and moves the rows; ``ciphertexts`` has rows that
only the active party can read, on their way to the others and back as sums.
"""

from __future__ import annotations

from clients.vertical.opening import Opening
from fedapp.site.roles import handlers

HANDLERS = handlers(Opening)
