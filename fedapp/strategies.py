"""``from fedapp.strategies import ...``: the same as ``strategies``, for a ServerApp of your own.

A wheel finds ``strategies`` only once fedapp is imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import strategies

if TYPE_CHECKING:
    from strategies.arguments import MethodStrategy


def __dir__() -> list[str]:
    return sorted(strategies.__all__)  # type: ignore[attr-defined]


def __getattr__(name: str) -> type[MethodStrategy]:
    """The strategy of a method, by its class."""
    return strategies.__getattr__(name)
