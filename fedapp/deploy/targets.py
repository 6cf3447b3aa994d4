"""The files that start a coordinator's or a site's processes, for each ``--target``.

``templates/commands.toml`` has the command lines and health checks of the processes. Scripts,
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from getpass import getuser
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar

import yaml

from fedapp.home import app_folder

Texts = dict[str, tuple[str, int]]  # file name -> (content, mode)
SECRET, PUBLIC, SCRIPT = 0o600, 0o644, 0o700
TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True, slots=True)
class Federation:
    """A coordinator's addresses and sites."""

    kind: ClassVar[str] = "federation"
    start: ClassVar[str] = "start-superlink.sh"
    name: str  # as --engine names it
    host: str  # name or address that the sites know
    public_port: int  # nginx, for sites
    users_port: int  # nginx, for users who start runs
    port: int  # SuperLink, on the loopback
    sites: Sequence[str]
    certificate: str = ""  # path of the host's, PEM; generated if empty
    key: str = ""


@dataclass(frozen=True, slots=True)
class Site:
    """A SuperNode, which has the network, and a SuperExec, which has the rows."""

    kind: ClassVar[str] = "site"
    start: ClassVar[str] = "start-supernode.sh"
    name: str
    data: str  # path of the table
    superlink: str  # HOST:PORT
    has_ca: bool  # whether ca.crt signed the coordinator's certificate, not a public authority
    port: int  # SuperNode, for the SuperExec


Party = Federation | Site


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

    def environment(self) -> dict[str, str]:
        """Environment of every process."""
        return _commands("environment", {"NAME": self.name, "DIR": self.folder})

    def sealed_environment(self) -> dict[str, str]:
        """Environment where neither installed packages nor the user's home are writable."""
        return self.environment() | _commands("sealed", {"DIR": self.folder})


def fill(name: str, values: Mapping[str, str]) -> str:
    """A file of ``templates`` with each ``{NAME}`` replaced; other braces stay."""
    return _replaced((TEMPLATES / name).read_text(), values)


def _replaced(text: str, values: Mapping[str, str]) -> str:
    return re.sub(r"(?<!\$)\{([A-Z_]+)\}", lambda match: values[match[1]], text)


def _commands(table: str, values: Mapping[str, str]) -> dict[str, str]:
    """A table of ``commands.toml``, filled."""
    texts = tomllib.loads((TEMPLATES / "commands.toml").read_text())[table]
    return {key: _replaced(text, values) for key, text in texts.items()}


def _values(
    machine: Machine, party: Party, write: Callable[[str], str] = str, **changes: str
) -> dict[str, str]:
    """What a party's templates name; `write` joins the lines of a command."""
    folder = machine.folder
    values = {key.upper(): str(value) for key, value in asdict(party).items()}
    values |= {"DIR": folder, "STATE": f"{folder}/flower"}
    # nginx workers cannot read the coordinator's folder, so the users file is elsewhere.
    values |= {"USERS": f"/etc/nginx/fedapp-{party.name}.users"}
    if isinstance(party, Site):
        ca = f"{folder}/ca.crt" if party.has_ca else ""
        values |= {"ROOT": ca and f"\n  --root-certificates {ca}", "CA": ca and f"- {ca}:{ca}:ro"}
        values |= {"LISTENS": "127.0.0.1", "REACHES": "127.0.0.1"}
    values |= changes
    commands = _commands(party.kind, values)
    return values | {name.upper(): write(lines) for name, lines in commands.items()}


def units(machine: Machine, party: Party) -> Texts:
    """systemd units, one per process, each isolated from what it does not need."""
    values = _values(machine, party, lambda text: " ".join(text.split()))
    path = f"{machine.programs}:/usr/local/bin:/usr/bin:/bin"
    variables = machine.sealed_environment() | {"PATH": path}
    environment = "".join(f"Environment={key}={value}\n" for key, value in variables.items())
    texts = Texts()
    for process, unit in tomllib.loads(fill(f"units-{party.kind}.toml", values)).items():
        parts = {"UNIT": "", "STARTED": "", **{key.upper(): text for key, text in unit.items()}}
        command = f"{machine.programs}/{values[process.upper()]}"
        parts |= {"USER": getuser(), "ENVIRONMENT": environment, "COMMAND": command}
        texts[f"fedapp-{party.name}-{process}.service"] = fill("process.unit", parts), PUBLIC
    return texts


def scripts(machine: Machine, party: Party) -> Texts:
    """A Bash script that starts the processes, and again when they end."""
    address = {"SUPERLINK": shlex.quote(party.superlink)} if isinstance(party, Site) else {}
    changes = {"STATE": machine.folder, "KEEP": fill("keep.sh", {}), **address}
    values = _values(machine, party, lambda text: text.replace("\n", " \\\n"), **changes)
    return {party.start: (fill(party.start, values), SCRIPT)}


def compose(machine: Machine, party: Party) -> Texts:
    """A Compose file and the image's Dockerfile, for a coordinator also nginx's configuration.

    The coordinator is on its host's network. A site's processes share a network that leads nowhere
    else, and a user's app sees no key and no password of others.
    """
    changes = {
        "IMAGE": machine.image,
        "USER": f"{os.getuid()}:{os.getgid()}",
        "ENVIRONMENT": json.dumps(machine.sealed_environment()),
        "USERS": f"{machine.folder}/nginx.users",
        "LISTENS": "0.0.0.0",
        "REACHES": "supernode",
    }
    values = _values(machine, party, lambda text: json.dumps(text.split())[1:-1], **changes)
    comment, _, text = fill(f"compose-{party.kind}.yaml", values).partition("---\n")
    document = {key: part for key, part in yaml.safe_load(text).items() if key[:2] != "x-"}
    # The JSON round trip copies shared objects, which YAML would write as references.
    text = yaml.safe_dump(json.loads(json.dumps(document)), sort_keys=False, width=100)
    texts = {"compose.yaml": (comment + text, PUBLIC), **machine.dockerfile()}
    if isinstance(party, Federation):
        values["SERVERS"] = fill("nginx.conf", values)
        texts["nginx.conf"] = fill("nginx-whole.conf", values), PUBLIC
    return texts


TARGETS = {"scripts": scripts, "compose": compose, "systemd": units}


def env_script(machine: Machine) -> Texts:
    """Environment that a shell sources before it uses a folder."""
    exports = [f"export {key}={value}" for key, value in machine.environment().items()]
    values = {"BIN": machine.programs, "EXPORTS": "\n".join(exports)}
    return {"env.sh": (fill("env.sh", values), SECRET)}


def host_config(machine: Machine, federation: Federation) -> Texts:
    """Configuration for the http block of the host's nginx."""
    return {"nginx.conf": (fill("nginx.conf", _values(machine, federation)), PUBLIC)}


def users_path(config: Path) -> str:
    """Path of the users file that an nginx configuration names."""
    return str(re.findall(r"auth_basic_user_file (\S+);", config.read_text())[0])


def user_line(name: str) -> tuple[str, str]:
    """A new random password for a user, and the user's line in nginx's users file."""
    # A salted SHA-1 is enough for 256 random bits, and every build of nginx supports it.
    password = secrets.token_hex(32)
    salt = secrets.token_bytes(16)
    digest = hashlib.sha1(password.encode() + salt).digest()
    return password, f"{name}:{{SSHA}}{b64encode(digest + salt).decode()}\n"


def how_started(target: str, folder: Path, process: str) -> str:
    """The command that starts a process (superlink or supernode) of a folder."""
    return {
        "scripts": f"{folder}/start-{process}.sh",
        "compose": f"make the image ({folder}/Dockerfile); "
        f"docker compose --file {folder}/compose.yaml up --detach",
        "systemd": f"sudo systemctl enable --now {folder}/*.service",
    }[target]
