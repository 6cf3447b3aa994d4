"""`fedapp federation`: what a coordinator needs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedapp.commands.common import say
from fedapp.commands.help import Command
from fedapp.commands.targets import Target, how_started
from fedapp.errors import listed

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
    users_port: Annotated[int, typer.Option(help="Where nginx listens for users.")] = 9093,
    port: Annotated[int, typer.Option(help="Where the SuperLink listens, on loopback.")] = 8000,
    certificate: Annotated[str, typer.Option(help="The host's own, PEM, for nginx.")] = "",
    key: Annotated[str, typer.Option(help="The key of --certificate, PEM.")] = "",
    target: Target = "scripts",
) -> None:
    """Write certificates, Flower's configuration, and what starts the processes into a folder."""
    from fedapp.deploy.folders import write_federation
    from fedapp.deploy.targets import Federation

    names, ports = listed(sites), (public_port, users_port, port)
    write_federation(folder, Federation(name, host, *ports, names, certificate, key), target)
    say(f"Written to {folder}. Next:")
    say(f"  {how_started(target, folder, 'superlink')}")
    if target in ("scripts", "systemd"):
        say(f"  {folder}/nginx.conf into nginx's http block")
    say(f"  sites reach {host}:{public_port}, the fleet routes alone; users {host}:{users_port},")
    say(f"    each by fedapp federation user {folder} NAME")
    if not certificate:
        say(f"  give {folder}/ca.crt to every site")
    say(f"  put the sites' public keys into {folder}/sites, then {folder}/register-sites.sh")
    say(f"  . {folder}/env.sh; fedapp run pax --engine {name} -c parties={len(names)}")


@federation_app.command("user", cls=Command)
def user_command(
    folder: Annotated[Path, typer.Argument(help="The coordinator's folder.")],
    name: Annotated[str, typer.Argument(help="Of the user.")],
) -> None:
    """Let a user start runs from another machine; the password is drawn."""
    from fedapp.deploy.folders import add_user
    from fedapp.deploy.targets import users_path

    path = add_user(folder, name)
    say(f"Written to {path}. Next:")
    if (folder / "kustomization.yaml").exists():
        say(f"  kubectl apply -k {folder}")
    elif not (folder / "compose.yaml").exists():
        say(f"  sudo install -m 644 {folder}/nginx.users {users_path(folder / 'nginx.conf')}")
    say(f"  give {name} the file, as ~/.flwr/config.toml, and ca.crt where it says")


@federation_app.command("renew", cls=Command)
def renew_command(
    folder: Annotated[Path, typer.Argument(help="The coordinator's folder.")],
) -> None:
    """Write new certificates in place of those that end soon; keys of the sites stay."""
    from fedapp.deploy.folders import renew_certificates

    ends = renew_certificates(folder)
    say(f"The certificates in {folder} are valid until {ends:%Y-%m-%d}. Next:")
    say("  start the SuperLink and its SuperExec again")
    say("  reload nginx, where it uses them")
    say(f"  give {folder}/ca.crt to every site; the one they have is good until it ends")
