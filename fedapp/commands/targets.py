"""``--target``: what starts the processes of a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Target = Annotated[
    str, typer.Option(help="What starts the processes: scripts, compose, kubernetes or systemd.")
]


def how_started(target: str, folder: Path, process: str) -> str:
    """The command that starts a process (superlink or supernode) of a folder."""
    return {
        "scripts": f"{folder}/start-{process}.sh",
        "compose": f"make the image ({folder}/Dockerfile); "
        f"docker compose --file {folder}/compose.yaml up --detach",
        "kubernetes": f"make the image ({folder}/Dockerfile); kubectl apply -k {folder}",
        "systemd": f"sudo systemctl enable --now {folder}/*.service",
    }[target]
