"""`fedapp app`: what a coordinator sends and a site knows it by."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedapp.commands.common import say
from fedapp.commands.help import Command
from fedapp.errors import ConfigError

app_app = typer.Typer(help="The installed app, as sites know it.", no_args_is_help=True)


@app_app.command("hash", cls=Command)
def hash_command() -> None:
    """Print the hash of the bundle that a coordinator with this fedapp sends."""
    from fedapp.site.bundle import installed_bundle

    print(installed_bundle())


@app_app.command("copy", cls=Command)
def copy_command(folder: Annotated[Path, typer.Argument(help="New or empty.")]) -> None:
    """Copy the app into a folder, for `flwr run FOLDER` and `flwr build --app FOLDER`."""
    from fedapp.site.bundle import copy_sources

    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"folder must be new or empty, got {folder}")
    copy_sources(folder)


@app_app.command("sign", cls=Command)
def sign_command(
    key: Annotated[Path, typer.Option(help="Ed25519 private key, PEM; keep it off this machine.")],
) -> None:
    """Sign the installed fedapp as a release, which sites that pin the key answer."""
    import fedapp
    from fedapp.site.bundle import SIGNATURE, build_bundle, load_key, signature_file

    private, path = load_key(key), Path(fedapp.__file__).parent.parent / SIGNATURE
    path.write_text(signature_file(build_bundle(), private))
    say(f"signed in {path}, which is part of what a coordinator sends; sites pin:")
    say(f'release-keys = "{private.public_key().public_bytes_raw().hex()}"')
