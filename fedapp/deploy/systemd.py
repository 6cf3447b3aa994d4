"""systemd units, one per process, each isolated from what it does not need."""

from __future__ import annotations

from collections.abc import Sequence
from getpass import getuser

from fedapp.deploy import nginx
from fedapp.deploy.machine import PUBLIC, Machine, Texts
from fedapp.deploy.processes import METRICS, Federation, Site, sealed_environment

_GUARDS = """\
NoNewPrivileges=true
CapabilityBoundingSet=
LockPersonality=true
PrivateDevices=true
PrivateTmp=true
ProtectControlGroups=true
ProtectKernelModules=true
ProtectKernelTunables=true
ProtectSystem=strict
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6
RestrictNamespaces=true
RestrictSUIDSGID=true
SystemCallArchitectures=native"""
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
        **nginx.for_host(machine, federation),
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
        superexec: _unit(
            machine,
            f"SuperExec of {name}",
            (f"After={supernode}",),
            site.superexec(folder),
            (
                f"ReadWritePaths={folder}/flower {folder}/home",
                f"InaccessiblePaths={folder}/supernode.key",
                *_NO_WAY_OUT,
            ),
        ),
    }


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
    start_checks = [wait_until_healthy] if health else []
    path = f"{machine.programs}:/usr/local/bin:/usr/bin:/bin"
    environment = {**sealed_environment(machine.folder, machine.name), "PATH": path}
    lines = [
        "[Unit]",
        f"Description=fedapp: {description}",
        "Wants=network-online.target",
        "After=network-online.target",
        *unit_lines,
        "",
        "[Service]",
        f"User={getuser()}",
        *(f"Environment={key}={value}" for key, value in environment.items()),
        f"ExecStart={machine.programs}/{' '.join(command)}",
        *start_checks,
        "Restart=always",
        "RestartSec=5",
        "UMask=0077",
        _GUARDS,
        *service_lines,
        "",
        "[Install]",
        "WantedBy=multi-user.target",
    ]
    return "\n".join(lines) + "\n", PUBLIC
