"""`fedapp app`: what a coordinator sends and a site knows it by."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedapp.commands.help import Command
from fedapp.errors import ConfigError

app_app = typer.Typer(help="The installed app, as sites know it.", no_args_is_help=True)


@app_app.command("hash", cls=Command)
def hash_command() -> None:
    """Print the hash of the bundle that a coordinator with this fedapp sends."""
    from fedapp.deploy.bundle import installed_bundle

    print(installed_bundle())


@app_app.command("copy", cls=Command)
def copy_command(folder: Annotated[Path, typer.Argument(help="New or empty.")]) -> None:
    """Copy the app into a folder, for `flwr run FOLDER` and `flwr build --app FOLDER`."""
    from fedapp.deploy.bundle import copy_sources

    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"folder must be new or empty, got {folder}")
    copy_sources(folder)
