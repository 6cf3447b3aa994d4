"""The processes of a deployment: what each is started with, whatever starts it.

Scripts, compose files, Kubernetes manifests and systemd units differ in paths and addresses alone.
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
    """How a coordinator is reached.

    Parameters
    ----------
    name : what ``--engine`` calls it.
    host : name or address that the sites know.
    public_port : where nginx listens for them.
    users_port : where it listens for users, who start runs.
    port : where the SuperLink listens on the loopback.
    sites : names of those that take part.
    certificate, key : of the host, PEM, where there are some; else they are made.
    """

    name: str
    host: str
    public_port: int
    users_port: int
    port: int
    sites: Sequence[str]
    certificate: str = ""
    key: str = ""

    def superlink(self, keys: str, state: str) -> list[str]:
        """In process isolation a run survives a SuperLink that comes back.

        Parameters
        ----------
        keys : folder of certificates and secrets.
        state : folder of the database.
        """
        return [
            *("python", "-P", "-m", "fedapp.deploy.superlink"),
            *("--isolation", "process"),
            *("--database", f"{state}/superlink.db"),
            *("--host", LOOPBACK, "--port", str(self.port), "--enable-supernode-auth"),
            *("--ssl-ca-certfile", f"{keys}/ca.crt"),
            *("--ssl-certfile", f"{keys}/server.crt"),
            *("--ssl-keyfile", f"{keys}/server.key"),
            *("--superexec-auth-secret-file", f"{keys}/superexec.secret"),
        ]

    def superexec(self, keys: str) -> list[str]:
        """What starts the ServerApp."""
        return [
            *("python", "-P", "-m", "fedapp.deploy.coordinator"),
            *("--runtime-api-address", f"{LOOPBACK}:{self.port}"),
            *("--root-certificates", f"{keys}/ca.crt"),
            *("--superexec-auth-secret-file", f"{keys}/superexec.secret"),
        ]

    def health(self, keys: str) -> list[str]:
        """What asks the SuperLink for its health."""
        return [*HEALTH, f"https://localhost:{self.port}", f"{keys}/ca.crt"]


@dataclass(frozen=True, slots=True)
class Site:
    """A SuperNode, which has the network, and a SuperExec, which has the rows.

    Parameters
    ----------
    name : unique in the federation.
    data : path of its table.
    superlink : host and port of the coordinator.
    has_ca : whether ``ca.crt`` signed the coordinator's certificate, not a public authority.
    port : where the SuperNode listens for the SuperExec.
    """

    name: str
    data: str
    superlink: str
    has_ca: bool
    port: int

    def key_files(self) -> list[str]:
        """Files that the SuperNode reads."""
        files = ["supernode.key", "superexec.secret", "site.toml"]
        return [*files, *(["ca.crt"] if self.has_ca else [])]

    def supernode(self, keys: str, listens: str = LOOPBACK) -> list[str]:
        """What speaks to the coordinator.

        Parameters
        ----------
        keys : folder of keys, secrets and the node config.
        """
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
        """What starts the process that reads the rows, by the fedapp that is installed at the site.

        Parameters
        ----------
        supernode : host by which it reaches the SuperNode.
        """
        return [
            *("python", "-P", "-m", "fedapp.deploy.superexec", "--insecure"),
            *("--runtime-api-address", f"{supernode}:{self.port}"),
            *("--superexec-auth-secret-file", f"{keys}/superexec.secret"),
        ]

    def health(self) -> list[str]:
        """What asks the SuperNode for its health, where that is."""
        return [*HEALTH, f"http://{LOOPBACK}:{self.port}"]

    def superexec_health(self, state: str) -> list[str]:
        """What looks when the SuperExec last asked for a task, in its folder."""
        return [*HEALTH, f"{state}/home/{ALIVE}"]


def environment(state: str, name: str) -> Mapping[str, str]:
    """What every process is told by its environment.

    Parameters
    ----------
    state : folder where it writes.
    name : of the site, in its log lines.
    """
    return {
        "FEDAPP_NAME": name,
        "FEDAPP_LOG": "text",  # or json
        "FEDAPP_METRICS": "",  # port of the exporter, where there is to be one
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_HOME": f"{state}/flower",
        "FEDAPP_HOME": f"{state}/home",
    }


def sealed_environment(state: str, name: str) -> Mapping[str, str]:
    """The same where neither the installed packages nor the user's own folder can be written."""
    return {
        **environment(state, name),
        "HOME": f"{state}/home",
        "NUMBA_CACHE_DIR": f"{state}/home/numba",
    }
