"""`fedapp federation`: what a coordinator needs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedapp.commands.help import Command

federation_app = typer.Typer(help="A coordinator: write what it needs.", no_args_is_help=True)


@federation_app.callback()
def _group() -> None:
    """A coordinator."""


@federation_app.command("init", cls=Command)
def init_command(
    folder: Annotated[Path, typer.Argument(help="New folder, for its owner alone.")],
    host: Annotated[str, typer.Option(help="Name or address by which the sites reach it.")],
    sites: Annotated[str, typer.Option(help="Names of the sites, separated by commas.")],
    name: Annotated[str, typer.Option(help="What --engine calls it.")] = "federation",
    public_port: Annotated[int, typer.Option(help="Where nginx listens for the sites.")] = 9092,
    port: Annotated[int, typer.Option(help="Where the SuperLink listens, on loopback.")] = 8000,
    certificate: Annotated[str, typer.Option(help="The host's own, PEM, for nginx.")] = "",
    key: Annotated[str, typer.Option(help="The key of --certificate, PEM.")] = "",
) -> None:
    """Write certificates, scripts, and Flower's configuration into a folder."""
    from fedapp.deploy.folders import Federation, write_federation

    names = [site.strip() for site in sites.split(",") if site.strip()]
    federation = Federation(name, host, public_port, port, names, certificate, key)
    write_federation(folder, federation)
    say = Console(soft_wrap=True, highlight=False).print
    say(f"Written to {folder}. Next:")
    say(f"  {folder}/start-superlink.sh      or fedapp-superlink.service, or compose.yaml")
    say(f"  nginx.conf into nginx: sites then reach {host}:{public_port}, the fleet routes alone")
    if not certificate:
        say(f"  give {folder}/ca.crt to every site")
    say(f"  put the sites' public keys into {folder}/sites, then {folder}/register-sites.sh")
    say(f"  . {folder}/env.sh; fedapp run pax --engine {name} -c parties={len(names)}")


@federation_app.command("renew", cls=Command)
def renew_command(
    folder: Annotated[Path, typer.Argument(help="The coordinator's folder.")],
) -> None:
    """Write new certificates in place of those that end soon; keys of the sites stay."""
    from fedapp.deploy.folders import renew_certificates

    ends = renew_certificates(folder)
    say = Console(soft_wrap=True, highlight=False).print
    say(f"The certificates in {folder} are valid until {ends:%Y-%m-%d}. Next:")
    say(f"  start the SuperLink again: {folder}/start-superlink.sh")
    say("  reload nginx, where it uses them")
    say(f"  give {folder}/ca.crt to every site; the one they have is good until it ends")
