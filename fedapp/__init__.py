"""Tree models across organisations, as one Flower app.

In Python, `run` trains a model and `load` opens a finished run; every method has scikit-learn
estimators. Modules are imported when they are first used.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedapp.api import compare, load, run, tune
    from fedapp.errors import ConfigError, DataError, FedappError, StoppedError
    from fedapp.run_files import RoundInfo
    from fedapp.runs.run import Run
    from fedapp.runs.run_groups import Compared, Tuned
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
        HorizontalForestClassifier,
        HorizontalForestRegressor,
        PAXClassifier,
        PAXRegressor,
        SecureBoostClassifier,
        SecureBoostRegressor,
    )


def _find_own_packages() -> None:
    """Import ``strategies``, ``clients`` and ``simulations`` from beside this package."""
    # A wheel has them in ``_app``, as their names would clash in site-packages; a checkout, and the
    # app as Flower unpacks it, beside this package.
    package = os.path.dirname(os.path.abspath(__file__))
    inside = os.path.join(package, "_app")
    folder = inside if os.path.isdir(inside) else os.path.dirname(package)
    for name in ("strategies", "clients", "simulations"):
        ours = os.path.join(folder, name, "__init__.py")
        spec = find_spec(name)
        if os.path.isfile(ours) and (spec is None or spec.origin != ours):
            if name in sys.modules:
                rule = f"must be fedapp's own package, got {sys.modules[name]}"
                raise ImportError(f"{name} {rule}; import fedapp first, or rename the other one")
            sys.path.insert(0, folder)


_find_own_packages()

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
    "HorizontalForestClassifier",
    "HorizontalForestRegressor",
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

_HOMES = {  # names by the module that has them
    "fedapp.api": ("compare", "load", "run", "tune"),
    "fedapp.errors": ("ConfigError", "DataError", "FedappError", "StoppedError"),
    "fedapp.sklearn": tuple(name for name in __all__ if name.endswith(("Classifier", "Regressor"))),
    "fedapp.runs.run": ("Run",),
    "fedapp.runs.run_groups": ("Compared", "Tuned"),
    "fedapp.run_folder": ("RoundInfo",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __dir__() -> list[str]:
    return [*globals(), *__all__]


if not TYPE_CHECKING:  # so that a type checker refuses names that are not above

    def __getattr__(name: str) -> object:
        if name not in _HOME_OF:
            raise AttributeError(f"module 'fedapp' has no attribute {name!r}")
        return getattr(import_module(_HOME_OF[name]), name)
