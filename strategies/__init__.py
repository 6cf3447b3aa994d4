"""The server's side: one module a method, each a Flower strategy for any ServerApp::

from strategies import PAX

result = PAX(num_boost_round=50, eta=0.3).start(grid)
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
    "Bagging": "local_boosting",
    "Cyclic": "local_boosting",
    "FedAvgLinear": "fedavg_linear",
    "FederatedForest": "federated_forest",
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
    if name in __all__:
        return getattr(import_module(f"strategies.{MODULES.get(name, name.lower())}"), name)
    raise AttributeError(f"module 'strategies' has no attribute {name!r}")
