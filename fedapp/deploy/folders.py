"""Write the folder of a coordinator or of a site.

The folder and its secrets are readable only by their owner. Nothing that exists is overwritten,
except certificates by `renew_certificates`.
"""

from __future__ import annotations

import json
import re
import secrets
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

import psutil
import tomli_w

from fedapp.data.datasets import NAME, NAME_RULE
from fedapp.data.read import FILE_OR_FOLDER, has_table
from fedapp.deploy import targets
from fedapp.deploy.targets import PUBLIC, SCRIPT, SECRET, TARGETS, Federation, Machine, Site, Texts
from fedapp.errors import ConfigError
from fedapp.home import write_atomically, write_new
from fedapp.messages.methods import Method, all_methods
from fedapp.sections import declared
from fedapp.settings import Value
from fedapp.site.certificates import (
    KeyPair,
    hosts_of,
    key_fingerprint,
    new_authority,
    public_key_in,
    renewed_authority,
    server_certificate,
    supernode_keys,
)
from fedapp.site.settings import SiteConfig, is_address, name_of, read_node_config

HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.:-]{0,252}[A-Za-z0-9])?")
PLAIN = re.compile(r"[A-Za-z0-9_/.+,@-]+")  # needs no quotes in scripts, units, configurations
ONE_TARGET = re.compile("|".join(TARGETS))
LOOPBACK = ("localhost", "127.0.0.1")


@dataclass(frozen=True, slots=True)
class Policy:
    """What a site lets leave: the methods it allows, and other settings of its node config."""

    meaning: str
    fits: Callable[[Method], bool]
    settings: Mapping[str, Value] = field(default_factory=dict)


_SUMS: Mapping[str, Value] = {
    "least-parties": 3,
    "min-rows": 20,
    "share-categories": 10,
    "approve": "ask",
}
POLICIES = {
    "sums": Policy(
        "PAX and counts summed over 3 sites or more, in bins of 5 rows or more, and predictions",
        lambda method: (
            (method.merges_bins or method.uses_model)
            and ("least-parties" in method.gets or not method.needs_label)
        ),
        {"least-bin-rows": 5, **_SUMS},
    ),
    "private": Policy(
        "PAX summed over 3 sites or more, with noise: epsilon 1 in a run and 3 in all runs",
        lambda method: "run-epsilon" in method.gets,
        {"run-epsilon": 1.0, "total-epsilon": 3.0, **_SUMS},
    ),
    "rows": Policy(
        "every method: from PAX's sums the coordinator can rebuild most rows of a small table "
        "with their labels (373 of 409 of breast-cancer)",
        lambda _: True,
    ),
}
NAMES = "names.txt"  # in a coordinator's sites, one a line
INSIDE_PORT = 9094  # a SuperNode's, inside a container network


def write_federation(folder: Path, federation: Federation, target: str = "scripts") -> None:
    """Write a coordinator's folder for `target`; ConfigError if a name or path is invalid, or the
    folder is not empty."""
    for name in (federation.name, *federation.sites):
        check_name(name)
    _check(ONE_TARGET, target, ", ".join(TARGETS), "target")
    _check(HOST, federation.host, "a host name or an address", "host")
    if bool(federation.certificate) != bool(federation.key):
        raise ConfigError("--certificate and --key must be given together")
    files = [_existing(path) for path in (federation.certificate, federation.key) if path]
    machine = _new_folder(folder, "coordinator")
    folder = Path(machine.folder)
    certificate, key = files or (f"{folder}/server.crt", f"{folder}/server.key")
    federation = replace(federation, certificate=certificate, key=key)
    authority = new_authority(federation.name)
    hosts = tuple(dict.fromkeys((federation.host, *LOOPBACK)))
    server = server_certificate(authority, hosts)
    for name, pair in (("ca", authority.files()), ("server", server)):
        write_new(folder / f"{name}.key", pair.secret, SECRET)
        write_new(folder / f"{name}.crt", pair.public, PUBLIC)
    for name in ("sites", "users"):
        (folder / name).mkdir(mode=0o700)
    write_names(folder, federation.sites)
    root = "" if files else f"{folder}/ca.crt"
    outside = _flower_config(federation, f"{federation.host}:{federation.users_port}", root)
    register = targets.fill("register-sites.sh", {"DIR": machine.folder})
    texts = {
        "user.toml": (outside, SECRET),
        "nginx.users": ("", PUBLIC),
        "register-sites.sh": (register, SCRIPT),
        **targets.host_config(machine, federation),
        **TARGETS[target](machine, federation),
    }
    _write_texts(machine, texts)
    inside = _flower_config(federation, f"127.0.0.1:{federation.port}", f"{folder}/ca.crt")
    write_new(folder / "flower" / "config.toml", inside.encode(), SECRET)


def write_names(folder: Path, names: Iterable[str]) -> None:
    """Write the names of a coordinator's sites, one a line."""
    content = "".join(f"{name}\n" for name in names)
    write_atomically(folder / "sites" / NAMES, content.encode(), PUBLIC)


def add_user(folder: Path, name: str) -> Path:
    """Add a user who may start runs; returns Flower's configuration file for them.

    ConfigError if the name is invalid or taken, or the folder is not a coordinator's.
    """
    check_name(name)
    users = Path(_existing(str(folder / "nginx.users")))
    if any(line.startswith(f"{name}:") for line in users.read_text().splitlines()):
        raise ConfigError(f"name must be new, got {name}, which is in {users}")
    config = tomllib.loads((folder / "user.toml").read_text())
    password, line = targets.user_line(name)
    (link,) = (link for link in config["superlink"].values() if isinstance(link, dict))
    link["address"] = f"{name}:{password}@{link['address']}"
    path = folder / "users" / f"{name}.toml"
    write_atomically(path, tomli_w.dumps(config).encode(), SECRET)
    # Appended, since a container keeps the mounted inode: a replaced file would be invisible.
    with users.open("a") as file:
        file.write(line)
    return path


def _flower_config(federation: Federation, address: str, root: str) -> str:
    link = {"address": address, **({"root-certificates": root} if root else {})}
    return tomli_w.dumps({"superlink": {"default": federation.name, federation.name: link}})


def renew_certificates(folder: Path) -> datetime:
    """Renew a coordinator's certificates, keeping the CA key; returns when they end (UTC).

    ConfigError if the folder is not a coordinator's, or its certificates are broken.
    """
    paths = {name: folder / name for name in ("ca.key", "ca.crt", "server.key", "server.crt")}
    for path in paths.values():
        _existing(str(path))
    ca = KeyPair(paths["ca.key"].read_bytes(), paths["ca.crt"].read_bytes())
    authority = renewed_authority(ca)
    server = server_certificate(authority, hosts_of(paths["server.crt"].read_bytes()))
    write_atomically(paths["ca.crt"], authority.files().public, PUBLIC)
    write_atomically(paths["server.key"], server.secret, SECRET)
    write_atomically(paths["server.crt"], server.public, PUBLIC)
    return authority.certificate.not_valid_after_utc


def end_superlink(folder: Path) -> bool:
    """End the running SuperLink of a folder, which its script, unit or container starts again.

    Returns whether there was one that this user may end. In process isolation runs survive that.
    """
    words = {"fedapp.deploy.superlink", f"{folder.resolve()}/server.crt"}
    for process in psutil.process_iter(["cmdline"]):
        if words <= {*(process.info["cmdline"] or ())}:
            with suppress(psutil.Error):
                process.terminate()
                return True
    return False


def write_site(
    folder: Path,
    site: SiteConfig,
    superlink: str,
    ca: str,
    port: int,
    target: str = "scripts",
    policy: str = "",
) -> None:
    """Write a site's folder; ConfigError if an argument is invalid, a file is missing, or the
    folder is not empty.

    ``superlink`` is HOST:PORT of the coordinator, ``ca`` its CA certificate or empty for the
    system's, ``port`` the loopback port on which the SuperNode serves the site's processes.
    ``policy`` is a name in `POLICIES` for what `site` leaves open; empty allows no method.
    """
    if policy and policy not in POLICIES:
        raise ConfigError(f"policy must be one of {', '.join(POLICIES)}, got {policy!r}")
    check_name(site.name)
    _check(ONE_TARGET, target, ", ".join(TARGETS), "target")
    if not is_address(superlink):
        raise ConfigError(f"superlink must be HOST:PORT, got {superlink}")
    data = _existing(site.data, has_table, FILE_OR_FOLDER)
    ca = _existing(ca) if ca else ""
    if target == "compose":
        port = INSIDE_PORT
    machine = _new_folder(folder, site.name)
    folder = Path(machine.folder)
    keys = supernode_keys(site.name)
    write_new(folder / "supernode.key", keys.secret, SECRET)
    write_new(folder / f"{site.name}.pub", keys.public, PUBLIC)
    if ca:
        write_new(folder / "ca.crt", Path(ca).read_bytes(), PUBLIC)
    write_new(folder / "site.toml", _node_config(site, data, policy).encode(), SECRET)
    processes = Site(site.name, data, superlink, bool(ca), port)
    _write_texts(machine, TARGETS[target](machine, processes))


def name_in(node_config: Path) -> str:
    """Name of the site in a node config; ConfigError if it is none."""
    return name_of(read_node_config(Path(_existing(str(node_config)))))


def renew_key(folder: Path) -> str:
    """Draw a new key for a site's SuperNode; returns its fingerprint.

    The one before stays as ``*.old``. ConfigError if the folder is not a site's.
    """
    name = name_in(folder / "site.toml")
    keys = supernode_keys(name)
    files = {"supernode.key": (keys.secret, SECRET), f"{name}.pub": (keys.public, PUBLIC)}
    for path in map(folder.joinpath, files):
        content, mode = files[path.name]
        write_atomically(path.with_name(f"{path.name}.old"), path.read_bytes(), mode)
        write_atomically(path, content, mode)
    return key_fingerprint(public_key_in(folder / f"{name}.pub"))


def _node_config(site: SiteConfig, data: str, policy: str) -> str:
    """A node config as TOML; other settings follow as comments."""
    values = {
        "name": site.name,
        "data": data,
        "label": site.label,
        "id": site.id_column,
        "allow": ",".join(sorted(site.allowed)),
        "min-rows": site.min_rows,
    }
    values = {key: value for key, value in values.items() if value}
    if policy:
        rules = POLICIES[policy]
        # A method that stands is lasting, and has to be allowed by name.
        methods = {name: each for name, each in all_methods().items() if not each.stands}
        allowed = ",".join(name for name, each in methods.items() if rules.fits(each))
        values = {**values, "allow": allowed, **rules.settings, **values}
    lines = [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    # TOML refuses a key that is set twice, so settings in use are not offered again.
    lines += [
        f"# {about.name} = {json.dumps(about.example)}  # {about.text}"
        for about in declared(SiteConfig).values()
        if about.example is not None and about.name not in values
    ]
    return "\n".join(lines) + "\n"


def _new_folder(folder: Path, name: str) -> Machine:
    """Make the folder of a coordinator or site, with what both have."""
    programs = str(Path(sys.executable).parent)
    _check(PLAIN, programs, "letters, digits and _/.+,@-", "path")
    folder = folder.expanduser().resolve()
    _check(PLAIN, str(folder), "letters, digits and _/.+,@-", "path")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if any(folder.iterdir()):
        ways = {
            "register-sites.sh": f"; a site joins by fedapp federation add {folder} NAME",
            "supernode.key": f"; a site's new key: fedapp site key --new supernode --site {folder}",
        }
        way = "".join(way for file, way in ways.items() if (folder / file).exists())
        raise ConfigError(f"{folder} must be an empty folder or a new one{way}")
    folder.chmod(0o700)
    for state in ("flower", "home"):
        (folder / state).mkdir(mode=0o700)
    # A SuperExec authenticates with it, since other users of the machine reach the loopback too.
    write_new(folder / "superexec.secret", secrets.token_hex(32).encode(), SECRET)
    return Machine(str(folder), programs, name)


def check_name(name: str) -> None:
    """ConfigError if a name is none of a site, user or federation."""
    _check(NAME, name, NAME_RULE, "name")


def _check(rule: re.Pattern[str], text: str, words: str, what: str) -> None:
    if not rule.fullmatch(text):
        raise ConfigError(f"{what} must be {words}, got {text!r}")


def _existing(
    path: str, is_there: Callable[[Path], bool] = Path.is_file, what: str = "a file"
) -> str:
    resolved = Path(path).expanduser().resolve()
    if not is_there(resolved):
        raise ConfigError(f"{path} must be {what}")
    _check(PLAIN, str(resolved), "letters, digits and _/.+,@-", "path")
    return str(resolved)


def _write_texts(machine: Machine, texts: Texts) -> None:
    for name, (text, mode) in {**targets.env_script(machine), **texts}.items():
        write_new(Path(machine.folder, name), text.encode(), mode)
