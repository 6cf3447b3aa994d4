"""The files that start a coordinator's or a site's processes, for each ``--target``.

`Federation` and `Site` give the command lines and health checks of their processes. Scripts,
systemd units and compose files wrap the same commands, and differ in what separates the rows from
the network; nginx is in front of every SuperLink.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shlex
import sys
import tomllib
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from getpass import getuser
from importlib.metadata import version
from pathlib import Path

import yaml

from fedapp.deploy.health import ALIVE, REACHED
from fedapp.home import app_folder

Texts = dict[str, tuple[str, int]]  # file name -> (content, mode)
Commands = Mapping[str, Sequence[str]]  # by process, or by name in a template
SECRET, PUBLIC, SCRIPT = 0o600, 0o644, 0o700
LOOPBACK = "127.0.0.1"
METRICS = ("python", "-P", "-m", "fedapp", "serve", "--metrics", "--port", "${FEDAPP_METRICS}")
HEALTH = ("python", "-P", "-m", "fedapp.deploy.health")
STANDING = "standing"  # Compose service and profile
# A line of the node config that makes a site start its standing process.
STANDS = "^ *standing-address *= *.[[A-Za-z0-9]"


# Scripts, compose files and systemd units differ only in paths and addresses.
@dataclass(frozen=True, slots=True)
class Federation:
    """A coordinator's addresses and sites."""

    name: str  # as --engine names it
    host: str  # name or address that the sites know
    public_port: int  # nginx, for sites
    users_port: int  # nginx, for users who start runs
    port: int  # SuperLink, on the loopback
    sites: Sequence[str]
    certificate: str = ""  # of the host, PEM; generated if empty
    key: str = ""

    def superlink(self, keys: str, state: str) -> list[str]:
        """Command of the SuperLink; `keys` and `state` are folders."""
        return [
            *("python", "-P", "-m", "fedapp.deploy.superlink"),
            # In process isolation a run survives a restart of the SuperLink.
            *("--isolation", "process"),
            *("--database", f"{state}/superlink.db"),
            *("--host", LOOPBACK, "--port", str(self.port), "--enable-supernode-auth"),
            *("--ssl-ca-certfile", f"{keys}/ca.crt"),
            *("--ssl-certfile", f"{keys}/server.crt"),
            *("--ssl-keyfile", f"{keys}/server.key"),
            *("--superexec-auth-secret-file", f"{keys}/superexec.secret"),
        ]

    def superexec(self, keys: str) -> list[str]:
        """Command of the SuperExec, which starts the ServerApp."""
        return [
            *("python", "-P", "-m", "fedapp.deploy.coordinator"),
            *("--runtime-api-address", f"{LOOPBACK}:{self.port}"),
            *("--root-certificates", f"{keys}/ca.crt"),
            *("--superexec-auth-secret-file", f"{keys}/superexec.secret"),
        ]

    def health(self, keys: str) -> list[str]:
        """Command that checks the SuperLink's health."""
        return [*HEALTH, f"https://localhost:{self.port}", f"{keys}/ca.crt"]


@dataclass(frozen=True, slots=True)
class Site:
    """A SuperNode, which has the network, and a SuperExec, which has the rows."""

    name: str
    data: str  # path of the table
    superlink: str  # HOST:PORT
    has_ca: bool  # whether ca.crt signed the coordinator's certificate, not a public authority
    port: int  # SuperNode, for the SuperExec

    def supernode(self, keys: str, listens: str = LOOPBACK) -> list[str]:
        """Command of the SuperNode, which talks to the coordinator."""
        root = ["--root-certificates", f"{keys}/ca.crt"] if self.has_ca else []
        return [
            *("python", "-P", "-m", "fedapp.deploy.supernode"),
            *("--superlink", self.superlink, *root),
            *("--auth-supernode-private-key", f"{keys}/supernode.key"),
            *("--isolation", "process"),
            *("--superexec-auth-secret-file", f"{keys}/superexec.secret"),
            *("--host", listens, "--port", str(self.port)),
            *("--node-config", f"{keys}/site.toml"),
        ]

    def superexec(self, keys: str, supernode: str = LOOPBACK) -> list[str]:
        """Command of the SuperExec, which starts the process that reads the rows."""
        return [
            *("python", "-P", "-m", "fedapp.deploy.superexec", "--insecure"),
            *("--runtime-api-address", f"{supernode}:{self.port}"),
            *("--superexec-auth-secret-file", f"{keys}/superexec.secret"),
        ]

    def standing(self, keys: str) -> list[str]:
        """Command of the process that scores rows between runs."""
        return ["python", "-P", "-m", "fedapp", "serve", "--site", f"{keys}/site.toml"]

    def health(self) -> list[str]:
        """Command that checks the SuperNode's health, run beside it."""
        return [*HEALTH, f"http://{LOOPBACK}:{self.port}"]


def environment(state: str, name: str) -> Mapping[str, str]:
    """Environment of every process; `state` is the folder where it writes."""
    return {
        "FEDAPP_NAME": name,
        "FEDAPP_LOG": "text",  # or json
        "FEDAPP_METRICS": "",  # port of the exporter; empty for none
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_HOME": f"{state}/flower",
        "FEDAPP_HOME": f"{state}/home",
    }


def sealed_environment(state: str, name: str) -> Mapping[str, str]:
    """Environment where neither installed packages nor the user's home are writable."""
    return {
        **environment(state, name),
        "HOME": f"{state}/home",
        "NUMBA_CACHE_DIR": f"{state}/home/numba",
    }


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine and folder that processes run from."""

    folder: str  # absolute path
    programs: str  # absolute path of the folder of installed programs
    name: str  # of the site, or "coordinator"

    @property
    def image(self) -> str:
        """The container image of this version."""
        return f"fedapp:{version('fedapp')}"

    def dockerfile(self) -> Texts:
        """Dockerfile of the image; ``BASE`` may be any image with the same Python version."""
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        app = shlex.quote(str(app_folder()))
        steps = "Dockerfile.checkout"
        if app_folder().name == "_app":
            app, steps = "FOLDER_OF_THE_WHEEL", "Dockerfile.wheel"
        values = {"IMAGE": self.image, "DIR": self.folder, "APP": app, "PYTHON": python}
        values["WHEEL"] = f"fedapp-{version('fedapp')}-py3-none-any.whl"
        return {"Dockerfile": (fill(steps, values), PUBLIC)}


def fill(name: str, values: Mapping[str, str]) -> str:
    """A file of ``templates`` with each ``{NAME}`` replaced; other braces stay."""
    text = (Path(__file__).parent / "templates" / name).read_text()
    return re.sub(r"\{([A-Z_]+)\}", lambda match: values[match[1]], text)


# systemd units, one per process, each isolated from what it does not need: templates/units-*.toml.


def units_federation(machine: Machine, federation: Federation) -> Texts:
    """Units of SuperLink, SuperExec and metrics; nginx is the host's."""
    folder = machine.folder
    commands = {
        "superlink": federation.superlink(folder, f"{folder}/flower"),
        "superexec": federation.superexec(folder),
    }
    values = {"NAME": federation.name, "HEALTH": " ".join(federation.health(folder))}
    units = _units("units-federation.toml", machine, commands, values)
    return units | host_config(machine, federation)


def units_site(machine: Machine, site: Site) -> Texts:
    """Units of SuperNode, SuperExec, metrics and the standing process."""
    folder = machine.folder
    commands = {
        "supernode": site.supernode(folder),
        "superexec": site.superexec(folder),
        STANDING: site.standing(folder),
    }
    values = {"NAME": site.name, "HEALTH": " ".join(site.health()), "DATA": site.data}
    return _units("units-site.toml", machine, commands, values | {"STANDS": shlex.quote(STANDS)})


def _units(name: str, machine: Machine, commands: Commands, values: Mapping[str, str]) -> Texts:
    path = f"{machine.programs}:/usr/local/bin:/usr/bin:/bin"
    variables = {**sealed_environment(machine.folder, machine.name), "PATH": path}
    environment = "".join(f"Environment={key}={value}\n" for key, value in variables.items())
    commands = {**commands, "metrics": METRICS}
    texts = Texts()
    for process, unit in tomllib.loads(fill(name, {**values, "DIR": machine.folder})).items():
        parts = {"UNIT": "", "STARTED": "", **{key.upper(): text for key, text in unit.items()}}
        command = f"{machine.programs}/{' '.join(commands[process])}"
        parts |= {"USER": getuser(), "ENVIRONMENT": environment, "COMMAND": command}
        texts[f"fedapp-{values['NAME']}-{process}.service"] = fill("process.unit", parts), PUBLIC
    return texts


# Bash scripts that start the processes and restart them when they end.

_KEPT = {"METRICS": " ".join(METRICS), "KEEP": fill("keep.sh", {})}


def scripts_federation(machine: Machine, federation: Federation) -> Texts:
    """Start script of SuperLink and SuperExec; nginx is the host's."""
    folder = machine.folder
    values = {
        "DIR": folder,
        "SUPERLINK": _command(federation.superlink(folder, folder)),
        "SUPEREXEC": _command(federation.superexec(folder)),
        "HEALTH": shlex.join(federation.health(folder)),
        **_KEPT,
    }
    start = {"start-superlink.sh": (fill("start-superlink.sh", values), SCRIPT)}
    return start | host_config(machine, federation)


def scripts_site(machine: Machine, site: Site) -> Texts:
    """Start script of SuperNode and SuperExec."""
    folder = machine.folder
    values = {
        "DIR": folder,
        "SUPERNODE": _command(site.supernode(folder)),
        "SUPEREXEC": _command(site.superexec(folder)),
        "STANDING": _command(site.standing(folder)),
        "STANDS": shlex.quote(STANDS),
        **_KEPT,
    }
    return {"start-supernode.sh": (fill("start-supernode.sh", values), SCRIPT)}


def env_script(machine: Machine) -> Texts:
    """Environment that a shell sources before it uses a folder."""
    variables = environment(machine.folder, machine.name)
    exports = [f"export {key}={value}" for key, value in variables.items()]
    values = {"BIN": machine.programs, "EXPORTS": "\n".join(exports)}
    return {"env.sh": (fill("env.sh", values), SECRET)}


def _command(words: Sequence[str]) -> str:
    """A shell command with one option per line."""
    return shlex.join(words).replace(" --", " \\\n  --")


# nginx in front of a coordinator's SuperLink.


# The SuperLink serves all its routes on one port and does not authenticate users who start runs. So
# it listens on the loopback only, and nginx forwards two path prefixes, each on its own port:
# ``/v1/fleet/`` to sites, which the SuperLink knows by their keys, and ``/v1/control/`` to users
# with a password.
def host_config(machine: Machine, federation: Federation) -> Texts:
    """Configuration for the http block of the host's nginx."""
    # nginx workers cannot read the coordinator's folder, so the users file is elsewhere.
    users = f"/etc/nginx/fedapp-{federation.name}.users"
    return {"nginx.conf": (_servers(machine, federation, users), PUBLIC)}


def certificate_of(machine: Machine, federation: Federation) -> tuple[str, str]:
    """Paths of the certificate that nginx presents and of its key."""
    generated = (f"{machine.folder}/server.crt", f"{machine.folder}/server.key")
    return (federation.certificate, federation.key) if federation.certificate else generated


def users_path(config: Path) -> str:
    """Path of the users file that an nginx configuration names."""
    return str(re.findall(r"auth_basic_user_file (\S+);", config.read_text())[0])


def _servers(machine: Machine, federation: Federation, users: str) -> str:
    certificate = certificate_of(machine, federation)
    values = {
        "UPSTREAM": f"fedapp-{federation.name}",
        "HOST": federation.host,
        "PUBLIC_PORT": str(federation.public_port),
        "USERS_PORT": str(federation.users_port),
        "PORT": str(federation.port),
        "CERTIFICATE": certificate[0],
        "KEY": certificate[1],
        "CA": f"{machine.folder}/ca.crt",
        "USERS": users,
    }
    return fill("nginx.conf", values)


def user_line(name: str) -> tuple[str, str]:
    """A new random password for a user, and the user's line in nginx's users file."""
    # A salted SHA-1 is enough for 256 random bits, and every build of nginx supports it.
    password = secrets.token_hex(32)
    salt = secrets.token_bytes(16)
    digest = hashlib.sha1(password.encode() + salt).digest()
    return password, f"{name}:{{SSHA}}{b64encode(digest + salt).decode()}\n"


# Compose files: a coordinator on its host's network, a site in two networks.


def compose_federation(machine: Machine, federation: Federation) -> Texts:
    """SuperLink, SuperExec and nginx; a user's app sees no key and no password of others."""
    folder = machine.folder
    certificate, key = certificate_of(machine, federation)
    commands = {
        "SUPERLINK": federation.superlink(folder, f"{folder}/flower"),
        "SUPEREXEC": federation.superexec(folder),
        "HEALTH": ["CMD", *federation.health(folder)],
    }
    values = {"CERTIFICATE": certificate, "KEY": key}
    servers = _servers(machine, federation, f"{folder}/nginx.users")
    return {
        **_compose("compose-federation.yaml", machine, commands, values),
        "nginx.conf": (fill("nginx-whole.conf", {"SERVERS": servers}), PUBLIC),
    }


def compose_site(machine: Machine, site: Site) -> Texts:
    """SuperNode and SuperExec, which share a network that leads nowhere else."""
    folder = machine.folder
    commands = {
        "SUPERNODE": site.supernode(folder, listens="0.0.0.0"),
        "SUPEREXEC": site.superexec(folder, supernode="supernode"),
        "STANDING": site.standing(folder),
        "REACHED": ["CMD", *HEALTH, f"{folder}/flower/{REACHED}"],
        "ASKED": ["CMD", *HEALTH, f"{folder}/home/{ALIVE}"],
    }
    ca = f"- {folder}/ca.crt:{folder}/ca.crt:ro" if site.has_ca else ""
    return _compose("compose-site.yaml", machine, commands, {"DATA": site.data, "CA": ca})


def _compose(name: str, machine: Machine, commands: Commands, values: Mapping[str, str]) -> Texts:
    """A Compose file, with the anchors of its template written out, and the image's Dockerfile."""
    filled = {
        "DIR": machine.folder,
        "IMAGE": machine.image,
        "USER": f"{os.getuid()}:{os.getgid()}",
        "ENVIRONMENT": json.dumps(sealed_environment(machine.folder, machine.name)),
        # Compose substitutes variables.
        **{key: json.dumps(words).replace("$", "$$") for key, words in commands.items()},
        **values,
    }
    comment, _, text = fill(name, filled).partition("---\n")
    document = {key: part for key, part in yaml.safe_load(text).items() if key[:2] != "x-"}
    # The JSON round trip copies shared objects, which YAML would write as references.
    text = yaml.safe_dump(json.loads(json.dumps(document)), sort_keys=False, width=100)
    return {"compose.yaml": (comment + text, PUBLIC), **machine.dockerfile()}


# Writers of a coordinator's files, and of a site's, by target.
TARGETS = {
    "scripts": (scripts_federation, scripts_site),
    "compose": (compose_federation, compose_site),
    "systemd": (units_federation, units_site),
}
