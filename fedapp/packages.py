"""Packages that fedapp stands on: their versions, and those that only some methods need."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from fedapp.errors import ConfigError

SHOWN = ("fedapp", "flwr", "xgboost", "numpy")
# XGBoost's CPU build has the same modules under another name.
DISTRIBUTIONS: Mapping[str, tuple[str, ...]] = {"xgboost": ("xgboost-cpu", "xgboost")}
# Method -> module that it alone needs; the method is also the extra of pyproject that brings it.
EXTRAS: Mapping[str, str] = {"fedxgbllr": "torch"}


def versions(packages: Iterable[str] = SHOWN) -> dict[str, str]:
    """The installed version of each package, ``unknown`` where there is none."""
    return {package: _version(package) for package in packages}


def _version(package: str) -> str:
    for name in DISTRIBUTIONS.get(package, (package,)):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"


def missing_extra(method: str) -> str:
    """How to install what a method needs and this machine lacks; empty if nothing is missing."""
    module = EXTRAS.get(method)
    if module is None or find_spec(module) is not None:
        return ""
    return f"pip install 'fedapp[{method}]'"


def check_extra(method: str) -> None:
    """Hold that what a method alone needs is installed.

    Raises
    ------
    ConfigError : it is not; says what to install.
    """
    if command := missing_extra(method):
        raise ConfigError(f"{EXTRAS[method]} must be installed for {method} ({command}), got none")
