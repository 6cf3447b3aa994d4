"""The server's side of each method: a Flower strategy for any ServerApp.

::

    from strategies import PAX

    result = PAX(num_boost_round=50, eta=0.3).start(grid)

A method's file has its algorithm as one conversation: ask the parties, compute, ask again. Several
methods share ``horizontal`` and ``vertical`` (what parties have in common), ``secagg`` and
``scoring``; ``base`` drives any conversation through Flower. Nothing here knows how a party
answers. Read ``local_boosting`` first, the simplest methods, then ``base``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strategies.fedavg_linear import FedAvgLinear
    from strategies.federated_forest import FederatedForest
    from strategies.fedxgbllr import FedXGBllr
    from strategies.local_boosting import Bagging, Cyclic
    from strategies.pax import PAX
    from strategies.secureboost import SecureBoost

MODULES = {
    "PAX": "pax",
    "Bagging": "local_boosting",
    "Cyclic": "local_boosting",
    "FedAvgLinear": "fedavg_linear",
    "FedXGBllr": "fedxgbllr",
    "FederatedForest": "federated_forest",
    "SecureBoost": "secureboost",
}
__all__ = [
    "PAX",
    "Bagging",
    "Cyclic",
    "FedAvgLinear",
    "FedXGBllr",
    "FederatedForest",
    "SecureBoost",
]


def __getattr__(name: str) -> Any:
    """A strategy; its module is imported on access, as some need large packages."""
    if name in MODULES:
        return getattr(import_module(f"strategies.{MODULES[name]}"), name)
    raise AttributeError(f"module 'strategies' has no attribute {name!r}")
