"""Which app bundles a site answers: by default the one that its own fedapp makes.

A site runs what it has installed, so a bundle says only which fedapp the coordinator has; a run of
another one ends before its first message is read.
"""

from __future__ import annotations

import hashlib
import shutil
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from fedapp.config import app_files, app_folder
from fedapp.errors import ConfigError
from fedapp.site.config import SiteConfig


@cache
def installed_bundle() -> str:
    """SHA-256 of the bundle (FAB) that ``flwr run`` makes of the installed sources, 64 hex digits.

    Raises
    ------
    ConfigError : fedapp was installed without its pyproject.toml.
    """
    from flwr.cli.build import build_fab_from_files

    return hashlib.sha256(build_fab_from_files(_sources())[0]).hexdigest()


@contextmanager
def app_sources() -> Iterator[Path]:
    """A folder of what ``flwr run`` makes the bundle of, for as long as that takes.

    Flower looks at every file of the folder it is given, and a checkout often holds a virtual
    environment of some 50,000, which takes seconds.
    """
    with TemporaryDirectory(prefix="fedapp-") as folder:
        copy_sources(Path(folder))
        yield Path(folder)


def copy_sources(folder: Path) -> None:
    """Copy what ``flwr run`` makes the bundle of."""
    for name, path in _sources().items():
        (copy := folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)


def _sources() -> dict[str, Path]:
    """The installed files that decide what is in the bundle, by their paths in the app's folder."""
    with (app_folder() / "pyproject.toml").open("rb") as file:
        patterns = tomllib.load(file)["tool"]["flwr"]["app"]["fab-include"]
    found: dict[str, Path] = {}
    for pattern in ("pyproject.toml", ".gitignore", *patterns):
        found |= app_files(pattern.removeprefix("/"))
    return found


def check_bundle(config: SiteConfig, bundle: str) -> None:
    """Hold that a run's bundle is one that the site knows.

    Parameters
    ----------
    bundle : its SHA-256, 64 hex digits.

    Raises
    ------
    ConfigError : it is another one.
    """
    known = config.bundles or {installed_bundle()}
    if bundle not in known:
        raise ConfigError(
            f"app must be {' or '.join(sorted(known))}, which this site knows, got {bundle}; "
            "install the same fedapp at coordinator and site (fedapp app hash), "
            "or name both hashes in the site's node config (app)"
        )
