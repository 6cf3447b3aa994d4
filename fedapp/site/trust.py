"""Whose keys a site trusts: those it has pinned, and those of its own machine.

A fingerprint is pinned by ``trusted`` in the node config or by ``fedapp trust``, which writes it
into ``$FEDAPP_HOME/trusted.toml``::

    "insurer" = "6668 7aad f862 bd77 6c8f c18b 8e9f 8e20"

Parties that share a home, as in simulation and the local engine, need no pins: who could exchange a
key there could read it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from fedapp.crypto.sealed import fingerprint_of, new_private_key, public_key
from fedapp.data.names import NAME
from fedapp.errors import ProtocolError
from fedapp.home import PRIVATE, home, private_folder, secret_at, write_whole
from fedapp.site.config import SiteConfig
from fedapp.site.node_config import pinned_key
from fedapp.toml import read_toml

IDENTITY = "identity.key"
PINNED = "trusted.toml"


def identity(name: str, place: Path | None = None) -> bytes:
    """The site's private key, 32 bytes, drawn when it is first asked for and kept on its disk.

    Parameters
    ----------
    place : the site's home; by default this process's.
    """
    return secret_at((place or home()) / "sites" / name / IDENTITY, new_private_key)


def own_fingerprint(name: str) -> str:
    """The fingerprint of the site's own public key."""
    return fingerprint_of(public_key(identity(name)))


def pins_in(place: Path) -> dict[str, str]:
    """Fingerprints by name that ``pin`` has written.

    Raises
    ------
    ConfigError : the file holds something else.
    """
    path = place / PINNED
    rule = f"{PINNED} must hold a fingerprint for each name"
    found = read_toml(path.read_text(), rule) if path.exists() else {}
    return dict(pinned_key(name, str(key), PINNED) for name, key in found.items())


def pin(place: Path, name: str, fingerprint: str) -> str:
    """Trust this key of a site from now on, and no other.

    Parameters
    ----------
    place : the home of the site that trusts.
    fingerprint : as ``fedapp key`` prints it.

    Returns
    -------
    The fingerprint that was pinned before; empty where there was none.

    Raises
    ------
    ConfigError : name or fingerprint are none.
    """
    name, fingerprint = pinned_key(name, fingerprint, "fedapp trust")
    pins = pins_in(place)
    before = pins.get(name, "")
    kept = sorted({**pins, name: fingerprint}.items())
    lines = [f"{json.dumps(each)} = {json.dumps(key)}\n" for each, key in kept]
    private_folder(place)
    write_whole(place / PINNED, "".join(lines).encode(), PRIVATE)
    return before


def trusted_keys(config: SiteConfig, names: Iterable[str]) -> dict[str, str]:
    """Fingerprints that the site trusts, by name.

    Parameters
    ----------
    names : of the parties of a run. Those whose private keys lie in this home are trusted unless
        the node config itself says who is.
    """
    pins = {**pins_in(home()), **config.trusted}
    return pins if config.trusted else {**_at_home(names), **pins}


def _at_home(names: Iterable[str]) -> dict[str, str]:
    """Of the parties that share this home."""
    here = [one for one in names if NAME.fullmatch(one)]
    files = {one: home() / "sites" / one / IDENTITY for one in here}
    return {
        name: fingerprint_of(public_key(path.read_bytes()))
        for name, path in files.items()
        if path.exists()
    }


def check_trusted(config: SiteConfig, keys: dict[str, bytes]) -> None:
    """Hold that the site trusts the public keys that the server passes on.

    Parameters
    ----------
    keys : of the other parties, by name.

    Raises
    ------
    ProtocolError : names a party whose key is unknown or another one, and says what to do.
    """
    own, trusted = config.name, trusted_keys(config, keys)
    for name, key in keys.items():
        got, known = fingerprint_of(key), trusted.get(name, "")
        if got == known:
            continue
        rule = f"must be one {own} trusts ({known or 'none is pinned'}), got {got}"
        way = f"run at {own}: . env.sh; fedapp trust {name} {got}"
        if name in config.trusted:
            way = f"change trusted in the node config of {own}"
        compare = f"if 'fedapp key {name}' prints that at {name}"
        raise ProtocolError(name, "parcel", "key", f"{rule}; {compare}, {way}")
