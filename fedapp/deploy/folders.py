"""Write the folder of a coordinator, or of a site.

The folder and what is secret in it can be read by its owner alone; nothing that exists is
overwritten, but certificates where that is asked for.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from getpass import getuser
from importlib.metadata import version
from pathlib import Path

from fedapp.config import app_folder
from fedapp.data.names import NAME
from fedapp.deploy import templates
from fedapp.deploy.certificates import (
    KeyPair,
    hosts_of,
    new_authority,
    renewed_authority,
    server_certificate,
    supernode_keys,
)
from fedapp.errors import ConfigError
from fedapp.home import write_new, write_whole
from fedapp.site.config import SiteConfig

HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.:-]{0,252}[A-Za-z0-9])?")
# What may stand in scripts, units and compose files without quotes.
PLAIN = re.compile(r"[A-Za-z0-9_/.+,@-]+")
SECRET, PUBLIC, SCRIPT = 0o600, 0o644, 0o700
LOOPBACK = ("localhost", "127.0.0.1")


@dataclass(frozen=True, slots=True)
class Federation:
    """How a coordinator is reached.

    Parameters
    ----------
    name : what ``--engine`` calls it.
    host : name or address that the sites know.
    public_port : where nginx listens for them.
    port : where the SuperLink listens on the loopback.
    sites : names of those that take part.
    certificate, key : of the host, PEM, where there are some; else they are made.
    """

    name: str
    host: str
    public_port: int
    port: int
    sites: Sequence[str]
    certificate: str = ""
    key: str = ""


def write_federation(folder: Path, federation: Federation) -> None:
    """Write what the coordinator needs.

    Raises
    ------
    ConfigError : a name is none, or the folder is not empty.
    """
    for name in (federation.name, *federation.sites):
        _check(NAME, name, "a name of letters, digits, '.', '_' or '-'", "name")
    _check(HOST, federation.host, "a host name or an address", "host")
    if bool(federation.certificate) != bool(federation.key):
        raise ConfigError("--certificate and --key must be given together")
    certificate = _existing(federation.certificate) if federation.certificate else ""
    key = _existing(federation.key) if federation.key else ""
    folder = _new(folder)
    authority = new_authority(federation.name)
    hosts = tuple(dict.fromkeys((federation.host, *LOOPBACK)))
    ca, server = authority.files(), server_certificate(authority, hosts)
    values = _values(folder) | {
        "NAME": federation.name,
        "HOST": federation.host,
        "PUBLIC_PORT": str(federation.public_port),
        "PORT": str(federation.port),
        "SITES": " ".join(federation.sites),
        "CERTIFICATE": certificate or f"{folder}/server.crt",
        "KEY": key or f"{folder}/server.key",
        "WHAT": "SuperLink",
        "SCRIPT": "start-superlink.sh",
    }
    write_new(folder / "ca.key", ca.secret, SECRET)
    write_new(folder / "ca.crt", ca.public, PUBLIC)
    write_new(folder / "server.key", server.secret, SECRET)
    write_new(folder / "server.crt", server.public, PUBLIC)
    _write_superexec_secret(folder)
    for name in ("sites", "flower", "home"):
        (folder / name).mkdir(mode=0o700)
    texts = {
        "env.sh": (templates.ENVIRONMENT, SECRET),
        "start-superlink.sh": (templates.START_SUPERLINK, SCRIPT),
        "register-sites.sh": (templates.REGISTER_SITES, SCRIPT),
        "fedapp-superlink.service": (templates.UNIT, PUBLIC),
        "nginx.conf": (templates.NGINX, PUBLIC),
        "flower/config.toml": (templates.FLOWER_CONFIG, SECRET),
        "Dockerfile": (templates.DOCKERFILE, PUBLIC),
        "compose.yaml": (templates.COMPOSE_FEDERATION, PUBLIC),
    }
    _write_texts(folder, texts, values)


def renew_certificates(folder: Path) -> datetime:
    """Write new certificates of a coordinator, signed by the key that its sites trust already.

    Returns
    -------
    When they end, UTC.

    Raises
    ------
    ConfigError : the folder is no coordinator's, or its certificates are broken.
    """
    paths = {name: folder / name for name in ("ca.key", "ca.crt", "server.key", "server.crt")}
    for path in paths.values():
        _existing(str(path))
    ca = KeyPair(paths["ca.key"].read_bytes(), paths["ca.crt"].read_bytes())
    authority = renewed_authority(ca)
    server = server_certificate(authority, hosts_of(paths["server.crt"].read_bytes()))
    write_whole(paths["ca.crt"], authority.files().public, PUBLIC)
    write_whole(paths["server.key"], server.secret, SECRET)
    write_whole(paths["server.crt"], server.public, PUBLIC)
    return authority.certificate.not_valid_after_utc


def write_site(folder: Path, site: SiteConfig, superlink: str, ca: str, port: int) -> None:
    """Write what a site needs.

    Parameters
    ----------
    site : what its node config says; ``data`` is an existing file.
    superlink : host and port.
    ca : file of the certificate that signed the coordinator's; empty: the system's.
    port : where the SuperNode listens on the loopback for its own processes.

    Raises
    ------
    ConfigError : a name or an address is none, a file is missing, or the folder is not empty.
    """
    _check(NAME, site.name, "letters, digits, '.', '_' or '-'", "name")
    host, _, superlink_port = superlink.rpartition(":")
    if not HOST.fullmatch(host.strip("[]")) or not superlink_port.isdecimal():
        raise ConfigError(f"superlink must be HOST:PORT, got {superlink}")
    data, ca = _existing(site.data), _existing(ca) if ca else ""
    folder = _new(folder)
    keys = supernode_keys(site.name)
    write_new(folder / "supernode.key", keys.secret, SECRET)
    _write_superexec_secret(folder)
    write_new(folder / f"{site.name}.pub", keys.public, PUBLIC)
    if ca:
        write_new(folder / "ca.crt", Path(ca).read_bytes(), PUBLIC)
    write_new(folder / "site.toml", _node_config(site, data).encode(), SECRET)
    for name in ("flower", "home"):
        (folder / name).mkdir(mode=0o700)
    mounted = ["supernode.key", "site.toml", "superexec.secret", *(["ca.crt"] if ca else [])]
    volumes = [f"{folder}/{name}:{folder}/{name}:ro" for name in mounted]
    values = _values(folder) | {
        "SUPERLINK": superlink,
        "ROOT": f"--root-certificates {folder}/ca.crt" if ca else "",
        "PORT": str(port),
        "DATA": data,
        "KEY_VOLUMES": json.dumps([*volumes, f"{folder}/flower:{folder}/flower"]),
        "WHAT": f"SuperNode of {site.name}",
        "SCRIPT": "start-supernode.sh",
    }
    texts = {
        "env.sh": (templates.ENVIRONMENT, SECRET),
        "start-supernode.sh": (templates.START_SUPERNODE, SCRIPT),
        "fedapp-supernode.service": (templates.UNIT, PUBLIC),
        "Dockerfile": (templates.DOCKERFILE, PUBLIC),
        "compose.yaml": (templates.COMPOSE_SITE, PUBLIC),
    }
    _write_texts(folder, texts, values)


def registered_sites(flower_home: Path) -> dict[str, str]:
    """Names of the sites that a coordinator's ``register-sites.sh`` has registered, by node id.

    Parameters
    ----------
    flower_home : ``$FLWR_HOME`` as the coordinator's ``env.sh`` sets it.
    """
    files = sorted((flower_home.parent / "sites").glob("*.node"))
    return {path.read_text().strip(): path.stem for path in files}


def _node_config(site: SiteConfig, data: str) -> str:
    """A node config as TOML, with what may be added as comments."""
    said = {
        "name": site.name,
        "data": data,
        "label": site.label,
        "id": site.id_column,
        "allow": ",".join(sorted(site.allowed)),
        "min-rows": site.min_rows,
    }
    lines = [f"{key} = {json.dumps(value)}" for key, value in said.items() if value]
    lines += [
        '# allow = "pax,secureboost,interactive"  # methods; without it, all',
        "# min-rows = 100                # the fewest rows that a run may train on",
        "# share-column-names = true     # between parties with different columns",
        "# allow-export = true           # this site's part of a model may leave it",
        "# encrypted-labels = true       # labels may leave this site under encryption alone",
        "# allow-insecure = true         # trials: small keys, less guard for Fed-EINI",
        '# trusted = "NAME:FINGERPRINT"  # keys of other sites, beside those of fedapp trust',
        '# app = "HASH,HASH"            # of the coordinator: fedapp app hash prints its own',
        "# full-masks = true            # own Paillier ciphertexts under uniform masks, slower",
        '# predict-data = "new.csv"      # what fedapp predict predicts',
    ]
    return "\n".join(lines) + "\n"


def _values(folder: Path) -> dict[str, str]:
    """What every template may name."""
    bin_folder = str(Path(sys.executable).parent)
    _check(PLAIN, bin_folder, "letters, digits and _/.+,@-", "path")
    return {
        "DIR": str(folder),
        "BIN": bin_folder,
        "APP": shlex.quote(str(app_folder())),
        "IMAGE": f"fedapp:{version('fedapp')}",
        "PYTHON": f"{sys.version_info.major}.{sys.version_info.minor}",
        "USER": getuser(),
        "UID": str(os.getuid()),
        "GID": str(os.getgid()),
    }


def _check(rule: re.Pattern[str], text: str, words: str, what: str) -> None:
    if not rule.fullmatch(text):
        raise ConfigError(f"{what} must be {words}, got {text!r}")


def _existing(path: str) -> str:
    """Absolute path of a file."""
    found = Path(path).expanduser().resolve()
    if not found.is_file():
        raise ConfigError(f"{path} must be a file")
    _check(PLAIN, str(found), "letters, digits and _/.+,@-", "path")
    return str(found)


def _new(folder: Path) -> Path:
    """A folder for its owner alone, absolute; made, or empty."""
    folder = folder.expanduser().resolve()
    _check(PLAIN, str(folder), "letters, digits and _/.+,@-", "path")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if any(folder.iterdir()):
        raise ConfigError(f"{folder} must be an empty folder or a new one")
    folder.chmod(0o700)
    return folder


def _write_texts(
    folder: Path, texts: Mapping[str, tuple[str, int]], values: Mapping[str, str]
) -> None:
    for name, (template, mode) in texts.items():
        write_new(folder / name, templates.fill(template, values).encode(), mode)


def _write_superexec_secret(folder: Path) -> None:
    """What a SuperExec shows to be given work: others on the machine reach the loopback too."""
    write_new(folder / "superexec.secret", secrets.token_hex(32).encode(), SECRET)
