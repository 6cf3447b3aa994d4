"""Tree models across organisations, as one Flower app.

In Python: `run` trains, `load` opens a finished run, and there are scikit-learn estimators, one a
method. Nothing is imported before it is used.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedapp.api import compare, load, run, tune
    from fedapp.errors import ConfigError, DataError, FedappError, StoppedError
    from fedapp.finished import Run
    from fedapp.sklearn import (
        FedAvgLinearClassifier,
        FedAvgLinearRegressor,
        FedBaggingClassifier,
        FedBaggingRegressor,
        FedCyclicClassifier,
        FedCyclicRegressor,
        FederatedForestClassifier,
        FederatedForestRegressor,
        FedXGBllrClassifier,
        FedXGBllrRegressor,
        PAXClassifier,
        PAXRegressor,
        SecureBoostClassifier,
        SecureBoostRegressor,
    )
    from fedapp.studies import Compared, Folds, Tuned
    from fedapp.watch import RoundInfo

# A wheel has strategies, clients and simulations in here: in site-packages their names would clash
# with others. A checkout, and the app as Flower unpacks it, have them beside this package.
_APP = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_app")
if os.path.isdir(_APP) and _APP not in sys.path:
    for _name in ("strategies", "clients", "simulations"):
        if _name in sys.modules:
            raise ImportError(
                f"{_name} must be fedapp's own package, got {sys.modules[_name]}; "
                "import fedapp first, or rename the other one"
            )
    sys.path.insert(0, _APP)

__all__ = [
    "Compared",
    "ConfigError",
    "DataError",
    "FedAvgLinearClassifier",
    "FedAvgLinearRegressor",
    "FedBaggingClassifier",
    "FedBaggingRegressor",
    "FedCyclicClassifier",
    "FedCyclicRegressor",
    "FedXGBllrClassifier",
    "FedXGBllrRegressor",
    "FedappError",
    "FederatedForestClassifier",
    "FederatedForestRegressor",
    "Folds",
    "PAXClassifier",
    "PAXRegressor",
    "RoundInfo",
    "Run",
    "SecureBoostClassifier",
    "SecureBoostRegressor",
    "StoppedError",
    "Tuned",
    "compare",
    "load",
    "run",
    "tune",
]

_HOMES = {
    "fedapp.api": ("compare", "load", "run", "tune"),
    "fedapp.finished": ("Run",),
    "fedapp.errors": ("ConfigError", "DataError", "FedappError", "StoppedError"),
    "fedapp.sklearn": tuple(name for name in __all__ if name.endswith(("Classifier", "Regressor"))),
    "fedapp.studies": ("Compared", "Folds", "Tuned"),
    "fedapp.watch": ("RoundInfo",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __dir__() -> list[str]:
    return [*globals(), *__all__]


if not TYPE_CHECKING:  # to a type checker, a name that is not above is none

    def __getattr__(name: str) -> object:
        if name not in _HOME_OF:
            raise AttributeError(f"module 'fedapp' has no attribute {name!r}")
        return getattr(import_module(_HOME_OF[name]), name)
