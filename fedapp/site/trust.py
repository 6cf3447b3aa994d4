"""Whom a site trusts: pinned keys.

A fingerprint is pinned by ``trusted`` in the node config or by ``fedapp site trust``, which writes
it to ``$FEDAPP_HOME/trusted.toml``::

    "insurer" = "6668 7aad f862 bd77 6c8f c18b 8e9f 8e20"

Parties that share a home, as in simulation and the local engine, need no pins: anyone who could
replace a key there could also read it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedapp.crypto.sealed import KEY_BYTES, fingerprint_of, new_private_key, public_key
from fedapp.data.datasets import NAME
from fedapp.home import PRIVATE, home, private_folder, read_toml, secret_at, write_atomically
from fedapp.messages.fields import check_fields
from fedapp.site.settings import SiteConfig, pinned_key

IDENTITY = "identity.key"
# Beside a new key, until the site has a register of runs; see ``fedapp.site.register``.
UNUSED = "identity.new"
PINNED = "trusted.toml"
LOG_KEY = b"fedapp log key v1"


def identity(name: str, site_home: Path | None = None) -> bytes:
    """The site's private key, 32 bytes, drawn on first use; `site_home` is the site's home."""
    folder = (site_home or home()) / "sites" / name
    if not (folder / IDENTITY).exists():
        private_folder(folder)
        (folder / UNUSED).touch(PRIVATE)
    return secret_at(folder / IDENTITY, new_private_key)


def site_fingerprint(name: str) -> str:
    """Fingerprint of the site's public key."""
    return fingerprint_of(public_key(identity(name)))


def signing_key(private: bytes) -> Ed25519PrivateKey:
    """The key that signs a site's log: Ed25519, derived from its private key, which cannot sign."""
    derived = HKDF(SHA256(), KEY_BYTES, None, LOG_KEY).derive(private)
    return Ed25519PrivateKey.from_private_bytes(derived)


def pins_in(folder: Path) -> dict[str, str]:
    """Fingerprints by name, as ``pin`` has written them; raises ConfigError."""
    path = folder / PINNED
    rule = f"{PINNED} must have a fingerprint for each name"
    pins = read_toml(path.read_bytes(), rule) if path.exists() else {}
    return dict(pinned_key(name, str(key), PINNED) for name, key in pins.items())


def pin(folder: Path, name: str, fingerprint: str) -> str:
    """Trust this key of a site from now on, and no other; raises ConfigError if it is invalid.

    `folder` is the home of the site that trusts. Returns the fingerprint that was pinned before,
    empty if there was none.
    """
    name, fingerprint = pinned_key(name, fingerprint, "fedapp site trust")
    pins = pins_in(folder)
    before = pins.get(name, "")
    entries = sorted({**pins, name: fingerprint}.items())
    lines = [f"{json.dumps(site)} = {json.dumps(key)}\n" for site, key in entries]
    private_folder(folder)
    write_atomically(folder / PINNED, "".join(lines).encode(), PRIVATE)
    return before


def trusted_keys(config: SiteConfig, names: Iterable[str]) -> dict[str, str]:
    """Fingerprints that the site trusts, by name.

    Keys of these parties in this home are trusted too, unless the node config sets ``trusted``.
    """
    pins = {**pins_in(home()), **config.trusted}
    if config.trusted:
        return pins
    files = {name: home() / "sites" / name / IDENTITY for name in names if NAME.fullmatch(name)}
    local = {
        name: fingerprint_of(public_key(path.read_bytes()))
        for name, path in files.items()
        if path.exists()
    }
    return {**local, **pins}


def check_trusted(config: SiteConfig, keys: dict[str, bytes]) -> None:
    """Check that the site trusts the public keys that the server forwards.

    Raises ProtocolError with the first unknown or different key, and the command to trust it.
    """
    site = config.name
    trusted = trusted_keys(config, keys)
    for name, key in keys.items():
        got, pinned = fingerprint_of(key), trusted.get(name, "")
        rule = f"must be one {site} trusts ({pinned or 'none is pinned'}), got {got}"
        way = f"run at {site}: fedapp site trust {name} {got} --site FOLDER"
        if name in config.trusted:
            way = f"change trusted in the node config of {site}"
        compare = f"if 'fedapp site key' prints that at {name}"
        check_fields(name, "parcel", ("key", got == pinned, f"{rule}; {compare}, {way}"))
