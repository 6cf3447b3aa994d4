"""The SuperLinks in Flower's configuration, and why one cannot be reached."""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedapp.errors import ConfigError
from fedapp.home import read_toml

SIMULATED = ("local", "simulation")  # engines, and names of Flower's that are no SuperLinks
LONGEST_HANDSHAKE = 5.0  # seconds


def flower_config() -> Path:
    """Path of Flower's configuration; a coordinator's env.sh sets its folder, FLWR_HOME."""
    return Path(os.environ.get("FLWR_HOME") or Path.home() / ".flwr") / "config.toml"


def superlinks() -> Mapping[str, Mapping[str, Any]]:
    """The SuperLinks in Flower's configuration, by name."""
    path = flower_config()
    if not path.is_file():
        return {}
    try:
        links = read_toml(path.read_text(), f"{path} must be TOML, got").get("superlink", {})
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} must be TOML, got: {error}") from None
    return {
        name: link
        for name, link in links.items()
        if isinstance(link, Mapping) and name not in SIMULATED
    }


def fault_of(address: str, name: str) -> str:
    """Why a SuperLink cannot be reached, and the way out: Flower gives no cause."""
    host, _, port = address.replace("[", "").replace("]", "").rpartition(":")
    link = superlinks().get(name, {})
    start = "at the coordinator: FOLDER/start-superlink.sh"
    try:
        with socket.create_connection((host, int(port)), LONGEST_HANDSHAKE) as connection:
            if not link.get("insecure"):
                context = ssl.create_default_context(cafile=link.get("root-certificates"))
                context.wrap_socket(connection, server_hostname=host).close()
    except ssl.SSLCertVerificationError as error:
        way = "at the coordinator: fedapp federation renew FOLDER"
        return f"a certificate that is refused ({error.verify_message}); {way}"
    except (TimeoutError, ssl.SSLError, ConnectionResetError):
        return f"a connection without an answer: it is starting, stopped or overloaded; {start}"
    except (OSError, ValueError):
        return f"no connection; {start}"
    return f"a connection, but no answer to Flower's command: it is starting; {start}"
