"""Command lines and environment of each process of a deployment.

Scripts, compose files, Kubernetes manifests and systemd units differ only in paths and addresses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedapp.deploy.health import ALIVE

LOOPBACK = "127.0.0.1"
METRICS = ("python", "-P", "-m", "fedapp", "metrics", "--port", "${FEDAPP_METRICS}")
HEALTH = ("python", "-P", "-m", "fedapp.deploy.health")


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

    def key_files(self) -> list[str]:
        """Files that the SuperNode reads."""
        files = ["supernode.key", "superexec.secret", "site.toml"]
        return [*files, *(["ca.crt"] if self.has_ca else [])]

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

    def health(self) -> list[str]:
        """Command that checks the SuperNode's health, run beside it."""
        return [*HEALTH, f"http://{LOOPBACK}:{self.port}"]

    def superexec_health(self, state: str) -> list[str]:
        """Command that checks when the SuperExec last asked for a task."""
        return [*HEALTH, f"{state}/home/{ALIVE}"]


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
