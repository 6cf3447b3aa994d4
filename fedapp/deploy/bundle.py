"""App bundles that a site answers: by default only the one its installed fedapp builds.

A site runs its installed code, so a bundle only identifies the coordinator's fedapp. A run of
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

from fedapp.deploy.release import is_signed
from fedapp.errors import ConfigError
from fedapp.settings import app_files, app_folder
from fedapp.site.config import SiteConfig


def build_bundle() -> bytes:
    """The bundle (FAB) that ``flwr run`` builds from the installed sources."""
    from flwr.cli.build import build_fab_from_files

    return build_fab_from_files(_sources())[0]


@cache
def installed_bundle() -> str:
    """SHA-256 of ``build_bundle``, 64 hex digits."""
    return hashlib.sha256(build_bundle()).hexdigest()


@contextmanager
def app_sources() -> Iterator[Path]:
    """Temporary folder with the sources that ``flwr run`` bundles."""
    # Flower scans every file of the folder; a checkout with a virtual environment has some 50,000,
    # which takes seconds.
    with TemporaryDirectory(prefix="fedapp-") as folder:
        copy_sources(Path(folder))
        yield Path(folder)


def copy_sources(folder: Path) -> None:
    """Copy the sources that ``flwr run`` bundles."""
    for name, path in _sources().items():
        (copy := folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)


def _sources() -> dict[str, Path]:
    """The installed files that go into the bundle, by path in the app's folder."""
    with (app_folder() / "pyproject.toml").open("rb") as file:
        patterns = tomllib.load(file)["tool"]["flwr"]["app"]["fab-include"]
    files: dict[str, Path] = {}
    for pattern in ("pyproject.toml", ".gitignore", *patterns):
        files |= app_files(pattern.removeprefix("/"))
    return files


def check_bundle(config: SiteConfig, bundle: bytes) -> None:
    """Check that the site accepts a run's bundle, by hash or signature; else ConfigError."""
    accepted, got = config.bundles or {installed_bundle()}, hashlib.sha256(bundle).hexdigest()
    if got not in accepted and not is_signed(bundle, config.release_keys):
        signed = " or signed by one of release-keys" if config.release_keys else ""
        raise ConfigError(
            f"app must be {' or '.join(sorted(accepted))}, which this site knows{signed}, got {got}"
            "; install the same fedapp at coordinator and site (fedapp app hash), "
            "or name both hashes in the site's node config (app)"
        )
