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
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from getpass import getuser
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from fedapp.deploy.health import ALIVE, REACHED
from fedapp.home import app_folder

Texts = dict[str, tuple[str, int]]  # file name -> (content, mode)
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


def as_yaml(comment: str, document: object) -> str:
    """A YAML document after a comment."""
    # The JSON round trip copies shared objects, which YAML would write as references.
    separate = json.loads(json.dumps(document))
    return comment + str(yaml.safe_dump(separate, sort_keys=False, width=100))


# systemd units, one per process, each isolated from what it does not need.

# For processes that run the app or read rows: no network beyond this machine.
_NO_WAY_OUT = ("IPAddressDeny=any", "IPAddressAllow=localhost")


def units_federation(machine: Machine, federation: Federation) -> Texts:
    """Units of SuperLink, SuperExec and metrics; nginx is the host's."""
    folder, name = machine.folder, federation.name
    superlink, superexec = (f"fedapp-{name}-{p}.service" for p in ("superlink", "superexec"))
    flower, home = f"{folder}/flower", f"{folder}/home"
    hidden = f"InaccessiblePaths={folder}/ca.key {folder}/users"
    return {
        superlink: _unit(
            machine,
            f"SuperLink of {name}",
            (f"Wants={superexec}",),
            federation.superlink(folder, flower),
            (f"ReadWritePaths={flower}", f"{hidden} {home}", *_NO_WAY_OUT),
            federation.health(folder),
        ),
        **_metrics(machine, name, f"{hidden} {folder}/server.key"),
        superexec: _unit(
            machine,
            f"SuperExec of {name}",
            (f"After={superlink}",),
            federation.superexec(folder),
            (f"ReadWritePaths={flower} {home}", f"{hidden} {folder}/server.key", *_NO_WAY_OUT),
        ),
        **host_config(machine, federation),
    }


def units_site(machine: Machine, site: Site) -> Texts:
    """Units of SuperNode, SuperExec and metrics."""
    # SuperNode is PartOf SuperExec, so both restart together: an unpatched SuperNode waits forever
    # for the answer of a process that died with its SuperExec.
    folder, name = machine.folder, site.name
    supernode, superexec = (f"fedapp-{name}-{p}.service" for p in ("supernode", "superexec"))
    return {
        supernode: _unit(
            machine,
            f"SuperNode of {name}",
            (f"Wants={superexec}", f"PartOf={superexec}"),
            site.supernode(folder),
            (f"ReadWritePaths={folder}/flower", f"InaccessiblePaths={folder}/home {site.data}"),
            site.health(),
        ),
        **_metrics(machine, name, f"InaccessiblePaths=-{folder}/home/sites {site.data}"),
        **_standing(machine, site),
        superexec: _unit(
            machine,
            f"SuperExec of {name}",
            (f"After={supernode}",),
            site.superexec(folder),
            (
                f"ReadWritePaths={folder}/flower {folder}/home",
                f"InaccessiblePaths={folder}/supernode.key -{folder}/supernode.key.old",
                *_NO_WAY_OUT,
            ),
        ),
    }


def _standing(machine: Machine, site: Site) -> Texts:
    """Unit of the standing process, which has the rows and the network; it starts only if set."""
    folder, name = machine.folder, site.name
    condition = f"ExecCondition=/bin/grep -q {shlex.quote(STANDS)} {folder}/site.toml"
    hidden = f"InaccessiblePaths={folder}/supernode.key {folder}/flower"
    lines = (condition, f"ReadWritePaths={folder}/home", hidden)
    unit = _unit(machine, f"standing scores of {name}", (), site.standing(folder), lines)
    return {f"fedapp-{name}-standing.service": unit}


def _metrics(machine: Machine, name: str, hidden: str) -> Texts:
    """Unit of the exporter, which starts only if its environment sets a port."""
    condition = """ExecCondition=/bin/sh -c '[ -n "$FEDAPP_METRICS" ]'"""
    unit = _unit(machine, f"metrics of {name}", (), METRICS, (condition, hidden, *_NO_WAY_OUT))
    return {f"fedapp-{name}-metrics.service": unit}


def _unit(
    machine: Machine,
    description: str,
    unit_lines: Sequence[str],
    command: Sequence[str],
    service_lines: Sequence[str],
    health: Sequence[str] = (),
) -> tuple[str, int]:
    wait_until_healthy = f"ExecStartPost=/bin/sh -c 'until {' '.join(health)}; do sleep 1; done'"
    path = f"{machine.programs}:/usr/local/bin:/usr/bin:/bin"
    variables = {**sealed_environment(machine.folder, machine.name), "PATH": path}
    values = {
        "DESCRIPTION": description,
        "UNIT": _lines(unit_lines),
        "USER": getuser(),
        "ENVIRONMENT": _lines(f"Environment={key}={value}" for key, value in variables.items()),
        "COMMAND": f"{machine.programs}/{' '.join(command)}",
        "STARTED": _lines([wait_until_healthy] if health else []),
        "SERVICE": _lines(service_lines),
    }
    return fill("process.unit", values), PUBLIC


def _lines(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


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

IMAGE = "nginx:1.28.0"


# The SuperLink serves all its routes on one port and does not authenticate users who start runs. So
# it listens on the loopback only, and nginx forwards two path prefixes, each on its own port:
# ``/v1/fleet/`` to sites, which the SuperLink knows by their keys, and ``/v1/control/`` to users
# with a password.
def host_config(machine: Machine, federation: Federation) -> Texts:
    """Configuration for the http block of the host's nginx."""
    # nginx workers cannot read the coordinator's folder, so the users file is elsewhere.
    users = f"/etc/nginx/fedapp-{federation.name}.users"
    text = _servers(machine, federation, users)
    return {"nginx.conf": (text, PUBLIC)}


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

_FEDERATION = """\
# docker compose up --detach; on the host's network, where all but nginx listens on the loopback.
"""
_COMPOSE_SITE = """\
# docker compose up --detach. The SuperNode has the network and the key, but no rows; the process
# that reads the rows has no network but to the SuperNode. A table for predict-data needs a line in
# the superexec's volumes too. With another Flower than the tested one a superexec that died is
# started again, but the SuperNode waits for its answer for ever: docker compose restart supernode
"""


def compose_federation(machine: Machine, federation: Federation) -> Texts:
    """SuperLink, SuperExec and nginx; a user's app sees no key and no password of others."""
    folder = machine.folder
    flower, home = (f"{folder}/{name}" for name in ("flower", "home"))
    keys = [f"{folder}/{name}" for name in ("ca.crt", "superexec.secret")]
    server = [f"{folder}/{name}" for name in ("server.crt", "server.key")]
    proxy = [f"{folder}/{name}" for name in ("ca.crt", "nginx.conf", "nginx.users")]
    servers = _servers(machine, federation, f"{folder}/nginx.users")
    superlink, superexec = federation.superlink(folder, flower), federation.superexec(folder)
    files = _volumes((*keys, *server), (flower,))
    services = {
        "superlink": _service(machine, superlink, files, federation.health(folder)),
        "superexec": {
            "depends_on": ["superlink"],
            **_service(machine, superexec, _volumes(keys, (flower, home))),
        },
        "nginx": {
            **_guarded(IMAGE),
            "volumes": _volumes((*proxy, *certificate_of(machine, federation))),
            "command": ["nginx", "-c", f"{folder}/nginx.conf", "-g", "daemon off;"],
        },
    }
    for service in services.values():
        service["network_mode"] = "host"
    return {
        "compose.yaml": (as_yaml(_FEDERATION, {"services": services}), PUBLIC),
        "nginx.conf": (fill("nginx-whole.conf", {"SERVERS": servers}), PUBLIC),
        **machine.dockerfile(),
    }


def compose_site(machine: Machine, site: Site) -> Texts:
    """SuperNode and SuperExec, which share a network that leads nowhere else."""
    folder = machine.folder
    flower, home = (f"{folder}/{name}" for name in ("flower", "home"))
    names = ["supernode.key", "superexec.secret", "site.toml", *["ca.crt"] * site.has_ca]
    keys = _volumes([f"{folder}/{name}" for name in names], (flower,))
    reached, asked = [*HEALTH, f"{flower}/{REACHED}"], [*HEALTH, f"{home}/{ALIVE}"]
    supernode = _service(machine, site.supernode(folder, listens="0.0.0.0"), keys, reached)
    supernode["networks"] = ["outside", "inside"]
    files = _volumes((f"{folder}/superexec.secret", site.data), (home, flower))
    superexec = {
        "depends_on": ["supernode"],
        "networks": ["inside"],
        # Docker before 23.0.11 and 25.0.5 forwards a container's DNS requests to a name server on
        # the host's loopback, which leaks data (CVE-2024-29018). No server listens on the
        # container's loopback, and Docker resolves the SuperNode's name itself.
        "dns": [LOOPBACK],
        **_service(machine, site.superexec(folder, supernode="supernode"), files, asked),
    }
    # The other sites reach it, and callers on this machine; it starts with --profile standing.
    files = _volumes((f"{folder}/site.toml", site.data), (home,))
    standing = {
        "profiles": [STANDING],
        "network_mode": "host",
        **_service(machine, site.standing(folder), files),
    }
    # An internal network has no route beyond this machine; without a bridge address it has none
    # to this machine either.
    driver_options = {"com.docker.network.bridge.inhibit_ipv4": "true"}
    document = {
        "services": {"supernode": supernode, "superexec": superexec, STANDING: standing},
        "networks": {"outside": {}, "inside": {"internal": True, "driver_opts": driver_options}},
    }
    return {"compose.yaml": (as_yaml(_COMPOSE_SITE, document), PUBLIC), **machine.dockerfile()}


def _volumes(read_only: Sequence[str], writable: Sequence[str] = ()) -> list[str]:
    return [*(f"{path}:{path}:ro" for path in read_only), *(f"{path}:{path}" for path in writable)]


def _service(
    machine: Machine, command: Sequence[str], volumes: list[str], health: Sequence[str] = ()
) -> dict[str, Any]:
    service = _guarded(machine.image) | {
        "environment": dict(sealed_environment(machine.folder, machine.name)),
        "volumes": volumes,
        "command": [word.replace("$", "$$") for word in command],  # compose substitutes variables
    }
    if health:  # a site may compile for minutes before the first
        often = {"interval": "30s", "timeout": "10s", "start_period": "5m"}
        service["healthcheck"] = {"test": ["CMD", *health], **often}
    return service


def _guarded(image: str) -> dict[str, Any]:
    """A service without privileges that can write to its mounts and /tmp only."""
    return {
        "image": image,
        "restart": "always",
        "user": f"{os.getuid()}:{os.getgid()}",
        "read_only": True,
        "tmpfs": ["/tmp"],
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
    }


# Writers of a coordinator's files, and of a site's, by target.
TARGETS = {
    "scripts": (scripts_federation, scripts_site),
    "compose": (compose_federation, compose_site),
    "systemd": (units_federation, units_site),
}
