"""The server's side of each method: a Flower strategy for any ServerApp.

::

    from strategies import PAX

    result = PAX(num_boost_round=50, eta=0.3).start(grid)

A method's file has its algorithm as one conversation: ask the parties, compute, ask again. It knows
neither Flower nor files: ``drive`` drives any conversation, and ``flower`` is its face to Flower.
Several methods share ``method`` (which settings a method reads), ``horizontal`` and ``vertical``
(what parties have in common), ``secagg`` and ``scoring``. Nothing here knows how a party answers.
Read ``local_boosting`` first, the simplest methods, then ``drive``.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from strategies.arguments import MethodStrategy


@cache
def __getattr__(name: str) -> type[MethodStrategy]:
    """The strategy of a method that trains, by its class, which has the method's name.

    Its module is imported on access, as some need large packages; ``__all__`` imports all.
    """
    if name != "__all__" and name.islower():  # a module
        raise AttributeError(f"module 'strategies' has no attribute {name!r}")
    from fedapp.messages.methods import all_methods
    from strategies.arguments import strategy_of
    from strategies.run import load_strategy

    methods = [method for method, declared in all_methods().items() if declared.trains]
    if name == "__all__":
        return [load_strategy(method).__name__ for method in methods]  # type: ignore[return-value]
    for method in methods:
        same = method.replace("-", "") == name.lower()
        if same and (strategy := load_strategy(method)).__name__ == name:
            return strategy_of(strategy)
    raise AttributeError(f"module 'strategies' has no attribute {name!r}")
