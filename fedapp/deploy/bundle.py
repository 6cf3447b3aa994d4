"""Which app bundles a site answers: by default the one that its own fedapp makes.

A site runs what it has installed, so a bundle says only which fedapp the coordinator has; a run of
another one ends before its first message is read.
"""

from __future__ import annotations

import hashlib
from functools import cache

from fedapp.config import app_folder
from fedapp.errors import ConfigError
from fedapp.site.config import SiteConfig


@cache
def installed_bundle() -> str:
    """SHA-256 of the bundle (FAB) that ``flwr run`` makes of the installed sources, 64 hex digits.

    Raises
    ------
    ConfigError : fedapp was installed without its folder.
    """
    from flwr.cli.build import build_fab_from_disk

    return hashlib.sha256(build_fab_from_disk(app_folder())).hexdigest()


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
