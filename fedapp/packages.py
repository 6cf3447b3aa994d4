"""Packages that fedapp stands on: their versions, and those that only some methods need."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from fedapp.errors import ConfigError
from fedapp.messages.methods import method_of

SHOWN = ("fedapp", "flwr", "xgboost", "numpy")
# XGBoost's CPU build has the same modules under another name.
DISTRIBUTIONS: Mapping[str, tuple[str, ...]] = {"xgboost": ("xgboost-cpu", "xgboost")}


def versions(packages: Iterable[str] = SHOWN) -> dict[str, str]:
    """The installed version of each package, ``unknown`` where there is none."""
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
    """How to install what a method needs and this machine lacks; empty if nothing is missing."""
    package = _package_of(method)
    if not package or find_spec(package) is not None:
        return ""
    return f"pip install 'fedapp[{method}]'"


def check_extra(method: str) -> None:
    """Hold that what a method alone needs is installed.

    Raises
    ------
    ConfigError : it is not; says what to install.
    """
    if package := _package_of(method):
        check_package(package, f"for {method}", method)


def check_package(package: str, why: str, extra: str) -> None:
    """Hold that a package is installed.

    Parameters
    ----------
    package : as pip calls it.
    why : what it is needed for, as in ``for log=mlflow``; empty where that is plain.
    extra : of fedapp, that installs it.

    Raises
    ------
    ConfigError : it is not; says what to install.
    """
    if find_spec(package.replace("-", "_")) is None:
        rule = " ".join(filter(None, ("must be installed", why)))
        raise ConfigError(f"{package} {rule} (pip install 'fedapp[{extra}]'), got none")


def _package_of(method: str) -> str:
    """What a method alone needs, if anything."""
    declared = method_of(method)
    return declared.package if declared else ""
