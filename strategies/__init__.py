"""The server's side: one module a method, each a Flower strategy for any ServerApp::

from strategies import PAX

result = PAX(num_boost_round=50, eta=0.3).start(grid)
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strategies.bagging import Bagging
    from strategies.cyclic import Cyclic
    from strategies.fedavg_linear import FedAvgLinear
    from strategies.federated_forest import FederatedForest
    from strategies.fedxgbllr import FedXGBllr
    from strategies.pax import PAX
    from strategies.secureboost import SecureBoost

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
    for module in iter_modules(__path__):
        if name in __all__ and module.name.replace("_", "") == name.lower():
            return import_module(f"strategies.{module.name}").STRATEGY
    raise AttributeError(f"module 'strategies' has no attribute {name!r}")
