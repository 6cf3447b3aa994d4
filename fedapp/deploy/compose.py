"""Compose files: a coordinator on its host's network, a site in two networks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from fedapp.deploy import nginx
from fedapp.deploy.machine import PUBLIC, Machine, Texts, as_yaml
from fedapp.deploy.processes import LOOPBACK, Federation, Site, sealed_environment

_FEDERATION = """\
# docker compose up --detach; on the host's network, where all but nginx listens on the loopback.
"""
_SITE = """\
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
    certificate = nginx.certificate_of(machine, federation)
    services = {
        "superlink": _service(machine)
        | {
            "volumes": [*(_read_only(path) for path in (*keys, *server)), _writable(flower)],
            "command": _words(federation.superlink(folder, flower)),
            "healthcheck": _healthcheck(federation.health(folder)),
        },
        "superexec": _service(machine)
        | {
            "depends_on": ["superlink"],
            "volumes": [*(_read_only(path) for path in keys), _writable(flower), _writable(home)],
            "command": _words(federation.superexec(folder)),
        },
        "nginx": _guarded(nginx.IMAGE)
        | {
            "volumes": [_read_only(path) for path in (*proxy, *certificate)],
            "command": _words(nginx.container_words(folder)),
        },
    }
    for service in services.values():
        service["network_mode"] = "host"
    return {
        "compose.yaml": (as_yaml(_FEDERATION, {"services": services}), PUBLIC),
        **nginx.for_container(federation, folder, certificate),
        **machine.dockerfile(),
    }


def compose_site(machine: Machine, site: Site) -> Texts:
    """SuperNode and SuperExec, which share a network that leads nowhere else."""
    folder = machine.folder
    flower, home = (f"{folder}/{name}" for name in ("flower", "home"))
    supernode = _service(machine) | {
        "networks": ["outside", "inside"],
        "volumes": [
            *(_read_only(f"{folder}/{name}") for name in site.key_files()),
            _writable(flower),
        ],
        "command": _words(site.supernode(folder, listens="0.0.0.0")),
        "healthcheck": _healthcheck(site.health()),
    }
    files = (f"{folder}/superexec.secret", site.data)
    superexec = _service(machine) | {
        "depends_on": ["supernode"],
        "networks": ["inside"],
        # Docker before 23.0.11 and 25.0.5 forwards a container's DNS requests to a name server on
        # the host's loopback, which leaks data (CVE-2024-29018). No server listens on the
        # container's loopback, and Docker resolves the SuperNode's name itself.
        "dns": [LOOPBACK],
        "volumes": [_writable(home), _writable(flower), *(_read_only(path) for path in files)],
        "command": _words(site.superexec(folder, supernode="supernode")),
        "healthcheck": _healthcheck(site.superexec_health(folder)),
    }
    # An internal network has no route beyond this machine; without a bridge address it has none
    # to this machine either.
    driver_options = {"com.docker.network.bridge.inhibit_ipv4": "true"}
    document = {
        "services": {"supernode": supernode, "superexec": superexec},
        "networks": {"outside": {}, "inside": {"internal": True, "driver_opts": driver_options}},
    }
    return {"compose.yaml": (as_yaml(_SITE, document), PUBLIC), **machine.dockerfile()}


def _read_only(path: str) -> str:
    return f"{path}:{path}:ro"


def _writable(path: str) -> str:
    return f"{path}:{path}"


def _service(machine: Machine) -> dict[str, Any]:
    return _guarded(machine.image) | {
        "environment": dict(sealed_environment(machine.folder, machine.name))
    }


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


def _healthcheck(command: Sequence[str]) -> dict[str, Any]:
    """A health check; a site may compile for minutes before the first."""
    return {"test": ["CMD", *command], "interval": "30s", "timeout": "10s", "start_period": "5m"}


def _words(command: Sequence[str]) -> list[str]:
    """A command with $ escaped, since compose substitutes variables."""
    return [word.replace("$", "$$") for word in command]
