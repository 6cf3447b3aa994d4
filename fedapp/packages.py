"""Versions of the packages fedapp builds on, and checks for optional ones."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from fedapp.errors import check_package
from fedapp.messages.fields import method_of

SHOWN = ("fedapp", "flwr", "xgboost", "numpy")
# XGBoost's CPU build has the same modules under another name.
DISTRIBUTIONS: Mapping[str, tuple[str, ...]] = {"xgboost": ("xgboost-cpu", "xgboost")}


def versions(packages: Iterable[str] = SHOWN) -> dict[str, str]:
    """The installed version of each package, or ``unknown``."""
    return {package: _version(package) for package in packages}


@functools.cache
def _version(package: str) -> str:
    for name in DISTRIBUTIONS.get(package, (package,)):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"


def missing_extra(method: str) -> str:
    """The command that installs a method's missing package; empty if nothing is missing."""
    package = _package_of(method)
    if not package or find_spec(package) is not None:
        return ""
    return f"pip install 'fedapp[{method}]'"


def check_extra(method: str) -> None:
    """Raise ConfigError if a method needs a package that is not installed."""
    if package := _package_of(method):
        check_package(package, f"for {method}", method)


def _package_of(method: str) -> str:
    """The optional package of a method, or empty."""
    declared = method_of(method)
    return declared.package if declared else ""
