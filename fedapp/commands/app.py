"""`fedapp app`: what a coordinator sends and a site knows it by."""

from __future__ import annotations

import typer

from fedapp.commands.help import Command

app_app = typer.Typer(help="The installed app, as sites know it.", no_args_is_help=True)


@app_app.command("hash", cls=Command)
def hash_command() -> None:
    """Print the hash of the bundle that a coordinator with this fedapp sends."""
    from fedapp.deploy.bundle import installed_bundle

    print(installed_bundle())
