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
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strategies.arguments import MethodStrategy

    PAX = MethodStrategy
    Bagging = MethodStrategy
    Cyclic = MethodStrategy
    FedAvgLinear = MethodStrategy
    FedXGBllr = MethodStrategy
    FederatedForest = MethodStrategy
    HorizontalForest = MethodStrategy
    SecureBoost = MethodStrategy

MODULES = {
    "PAX": "pax",
    "Bagging": "local_boosting",
    "Cyclic": "local_boosting",
    "FedAvgLinear": "fedavg_linear",
    "FedXGBllr": "fedxgbllr",
    "FederatedForest": "federated_forest",
    "HorizontalForest": "horizontal_forest",
    "SecureBoost": "secureboost",
}
__all__ = [
    "PAX",
    "Bagging",
    "Cyclic",
    "FedAvgLinear",
    "FedXGBllr",
    "FederatedForest",
    "HorizontalForest",
    "SecureBoost",
]


@cache
def __getattr__(name: str) -> Any:
    """A strategy; its module is imported on access, as some need large packages."""
    if name not in MODULES:
        raise AttributeError(f"module 'strategies' has no attribute {name!r}")
    arguments = import_module("strategies.arguments")
    return arguments.strategy_of(getattr(import_module(f"strategies.{MODULES[name]}"), name))
