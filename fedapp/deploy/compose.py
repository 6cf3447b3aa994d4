"""Compose files: a coordinator's on its host's network, a site's in two networks."""

from __future__ import annotations

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
    """SuperLink, SuperExec and nginx; a user's app sees no key and no other's password."""
    folder = machine.folder
    flower, home = (f"{folder}/{name}" for name in ("flower", "home"))
    keys = [f"{folder}/{name}" for name in ("ca.crt", "superexec.secret")]
    server = [f"{folder}/{name}" for name in ("server.crt", "server.key")]
    proxy = [f"{folder}/{name}" for name in ("ca.crt", "nginx.conf", "nginx.users")]
    certificate = nginx.certificate_of(machine, federation)
    services = {
        "superlink": _service(machine)
        | {
            "volumes": [*(_read_only(path) for path in (*keys, *server)), _both(flower)],
            "command": _words(federation.superlink(folder, flower)),
            "healthcheck": _healthcheck(federation.health(folder)),
        },
        "superexec": _service(machine)
        | {
            "depends_on": ["superlink"],
            "volumes": [*(_read_only(path) for path in keys), _both(flower), _both(home)],
            "command": _words(federation.superexec(folder)),
        },
        "nginx": _guarded(machine, nginx.IMAGE)
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
        "volumes": [*(_read_only(f"{folder}/{name}") for name in site.key_files()), _both(flower)],
        "command": _words(site.supernode(folder, listens="0.0.0.0")),
        "healthcheck": _healthcheck(site.health()),
    }
    files = (f"{folder}/superexec.secret", site.data)
    superexec = _service(machine) | {
        "depends_on": ["supernode"],
        "networks": ["inside"],
        # Before 23.0.11 and 25.0.5 Docker asks a host's name server on the loopback, as systemd's,
        # whatever a container asks: a way out (CVE-2024-29018). Nobody answers at the container's
        # own loopback, and Docker itself knows the SuperNode's name.
        "dns": [LOOPBACK],
        "volumes": [_both(home), _both(flower), *(_read_only(path) for path in files)],
        "command": _words(site.superexec(folder, supernode="supernode")),
        "healthcheck": _healthcheck(site.superexec_health(folder)),
    }
    # It leads to nothing beyond this machine, nor, without an address of it there, to this machine.
    own = {"com.docker.network.bridge.inhibit_ipv4": "true"}
    document = {
        "services": {"supernode": supernode, "superexec": superexec},
        "networks": {"outside": {}, "inside": {"internal": True, "driver_opts": own}},
    }
    return {"compose.yaml": (as_yaml(_SITE, document), PUBLIC), **machine.dockerfile()}


def _read_only(path: str) -> str:
    return f"{path}:{path}:ro"


def _both(path: str) -> str:
    """A folder that the container may write to."""
    return f"{path}:{path}"


def _service(machine: Machine) -> dict[str, Any]:
    """A service of fedapp's image."""
    return _guarded(machine, machine.image) | {
        "environment": dict(sealed_environment(machine.folder, machine.name))
    }


def _guarded(machine: Machine, image: str) -> dict[str, Any]:
    """What may write to its mounts and /tmp alone, and become nobody else."""
    return {
        "image": image,
        "restart": "always",
        "user": machine.ids,
        "read_only": True,
        "tmpfs": ["/tmp"],
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
    }


def _healthcheck(words: Sequence[str]) -> dict[str, Any]:
    """After the minutes in which a site may compile."""
    return {"test": ["CMD", *words], "interval": "30s", "timeout": "10s", "start_period": "5m"}


def _words(words: Sequence[str]) -> list[str]:
    """A command; compose fills in what follows a dollar."""
    return [word.replace("$", "$$") for word in words]
