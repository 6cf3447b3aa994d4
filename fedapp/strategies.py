"""``from fedapp.strategies import ...``: the same as ``strategies``, for a ServerApp of your own.

A wheel finds ``strategies`` only once fedapp is imported.
"""

from strategies import *  # noqa: F403
