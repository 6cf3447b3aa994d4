"""Commands of a coordinator: ``fedapp federation``.

It writes what starts the coordinator's processes, adds and removes sites and users, and activates a
divided model at the sites.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table as Grid
from typer import Argument, Option

from fedapp.arguments import parse_overrides
from fedapp.commands.common import (
    AsJson,
    Command,
    Group,
    NewFolder,
    Overrides,
    RunDir,
    Target,
    console,
    followed,
    port_option,
    print_json,
    say,
)
from fedapp.errors import ConfigError, listed

CoordinatorFolder = Annotated[Path, Argument(help="The coordinator's folder.")]
federation_app = typer.Typer(
    cls=Group, help="A coordinator: init, add, remove, list, renew, activate.", no_args_is_help=True
)


@federation_app.command("init", cls=Command)
def federation_init_command(
    folder: NewFolder,
    host: Annotated[str, Option(help="Name or address by which the sites reach it.")],
    sites: Annotated[str, Option(help="Names of the sites, separated by commas.")],
    name: Annotated[str, Option(help="What --engine calls it.")] = "federation",
    public_port: Annotated[int, port_option("Where nginx listens for the sites.")] = 9092,
    users_port: Annotated[int, port_option("Where nginx listens for users.")] = 9093,
    port: Annotated[int, port_option("Where the SuperLink listens, on loopback.")] = 8000,
    certificate: Annotated[str, Option(help="The host's own, PEM, for nginx.")] = "",
    key: Annotated[str, Option(help="The key of --certificate, PEM.")] = "",
    target: Target = "scripts",
) -> None:
    """Write certificates, Flower's configuration, and what starts the processes into a folder."""
    from fedapp.deploy.folders import write_federation
    from fedapp.deploy.targets import Federation, how_started

    names = listed(sites)
    federation = Federation(name, host, public_port, users_port, port, names, certificate, key)
    write_federation(folder, federation, target)
    say(f"Written to {folder}. Next:")
    say(f"  {how_started(target, folder, 'superlink')}")
    if target in ("scripts", "systemd"):
        say(f"  {folder}/nginx.conf into nginx's http block")
    say(f"  sites reach {host}:{public_port}, the fleet routes alone; users {host}:{users_port},")
    say(f"    each by fedapp federation add {folder} --user NAME")
    if not certificate:
        say(f"  give {folder}/ca.crt to every site")
    say(f"  put the sites' public keys into {folder}/sites, then {folder}/register-sites.sh")
    say(f"  . {folder}/env.sh; fedapp run pax --engine {name} --parties {len(names)}")


@federation_app.command("add", cls=Command)
def add_command(
    folder: CoordinatorFolder,
    names: Annotated[
        list[str] | None, Argument(help="Of the sites; by default all of the folder.")
    ] = None,
    user: Annotated[
        str,
        Option(
            metavar="NAME",
            help="Let a user start runs from another machine instead; the password is drawn.",
        ),
    ] = "",
) -> None:
    """Register sites, or new keys of sites, at the running SuperLink; runs continue."""
    from fedapp.deploy.folders import add_user
    from fedapp.deploy.members import add_sites
    from fedapp.deploy.targets import users_path

    if user:
        if names:
            raise ConfigError(f"--user must be given without sites, got {', '.join(names)}")
        path = add_user(folder, user)
        say(f"Written to {path}. Next:")
        if not (folder / "compose.yaml").exists():
            say(f"  sudo install -m 644 {folder}/nginx.users {users_path(folder / 'nginx.conf')}")
        say(f"  give {user} the file, as ~/.flwr/config.toml, and ca.crt where it says")
        return
    missing = []
    for name, fingerprint in add_sites(folder, names or ()):
        if fingerprint:
            say(f"{name} is registered with {fingerprint} (at {name}: ssh-keygen -lf {name}.pub)")
            continue
        missing.append(name)
        say(f"{folder}/sites/{name}.pub is missing. Next:")
        say(f"  give {folder}/ca.crt, if other sites have it, to {name} for fedapp site init")
        say(f"  put {name}.pub, which that writes, into {folder}/sites; then again:")
        say(f"  fedapp federation add {folder} {name}")
    if missing and not names:
        raise typer.Exit(1)


@federation_app.command("remove", cls=Command)
def remove_command(
    folder: CoordinatorFolder, name: Annotated[str, Argument(help="Of the site.")]
) -> None:
    """Unregister a site at the running SuperLink, which then refuses it."""
    from fedapp.deploy.members import remove_site

    remove_site(folder, name)
    say(f"{name} is refused from now on; its files in {folder}/sites end in .removed. Next:")
    say(f"  the other sites delete {name} from home/trusted.toml")
    say(f"  if {name} is to return, it needs a new key: fedapp site key --new supernode")


@federation_app.command("list", cls=Command)
def list_command(folder: CoordinatorFolder, as_json: AsJson = False) -> None:
    """Show sites, users, and how long the certificates are valid."""
    from fedapp.deploy.members import members
    from fedapp.report.summary import print_warning
    from fedapp.site.certificates import days_left, validity

    sites, fault = members(folder)
    users = [line.partition(":")[0] for line in (folder / "nginx.users").read_text().splitlines()]
    certificates = sorted(folder.glob("*.crt"))
    if as_json:
        days = {path.name: round(days_left(path)) for path in certificates}
        members_of = {"sites": list(map(asdict, sites)), "users": users}
        print_json("federation list", **members_of, certificate_days=days, fault=fault)
        return
    grid = Grid("site", "status", "since", "key")
    for site in sites:
        since = f"{site.since.astimezone():%Y-%m-%d %H:%M}" if site.since else ""
        grid.add_row(escape(site.name), site.status, since, site.fingerprint)
    console.print(grid)
    say(f"users: {', '.join(users) or 'none'}")
    for path in certificates:
        say(validity(path))
    if fault:
        print_warning(console, fault)


@federation_app.command("renew", cls=Command)
def renew_command(folder: CoordinatorFolder) -> None:
    """Write new certificates in place of those that end soon, and restart the SuperLink."""
    from fedapp.deploy.folders import end_superlink, renew_certificates

    ends = renew_certificates(folder)
    say(f"The certificates in {folder} are valid until {ends:%Y-%m-%d}. Next:")
    if end_superlink(folder):
        say("  the SuperLink starts again with them; runs continue")
    else:
        say("  restart the SuperLink, which does not run or is not yours; runs continue")
    say("  reload nginx (nginx -s reload); restart the SuperExec between two runs")
    say(f"  give {folder}/ca.crt to every site; the one they have is good until it ends")


@federation_app.command("activate", cls=Command)
def activate_command(
    run_dir: RunDir,
    engine: Annotated[str, Option(help="A SuperLink's name.")],
    service: Annotated[
        str, Option(help="Name by which callers know it; by default that of the run's folder.")
    ] = "",
    refresh: Annotated[
        bool, Option("--refresh", help="Match new ids only; other rows stay as they are.")
    ] = False,
    none: Annotated[
        bool, Option("--none", help="End: the standing processes answer by no version.")
    ] = False,
    config: Overrides = None,
) -> None:
    """Let the sites of a divided model score by it, each by its fedapp serve --site.

    They match ids once, agree on pseudonyms and addresses, and switch together. An older run's
    model is active again once it is activated again.
    """
    from fedapp.report.summary import print_warning
    from fedapp.runs.predict import parts_of
    from fedapp.runs.session import activate

    if (parts := parts_of(run_dir)) is None:
        rule = "must be a run whose model is divided among the sites (fedapp serve has whole ones)"
        raise ConfigError(f"run {rule}, got {run_dir}")
    about = {"service": service or run_dir.resolve().name, "refresh": refresh, "none": none}
    overrides = {f"standing.{name}": value for name, value in about.items()}
    with followed(lambda: "the sites answer by the version that they had") as follower:
        more = parse_overrides(config or [])
        summary = activate(run_dir, parts, more, overrides, engine, follower)
    if none:
        say("The sites answer by no version any more.")
    elif summary is None:
        say(f"The sites have switched. GET /health at {parts.active} says whether rows get scores.")
    elif summary["unreached"]:
        for text in summary["warnings"]:
            print_warning(console, text)
    else:
        n_rows = summary["standing_rows"]
        say(f"{n_rows:,} rows can be scored at {parts.active}, by its fedapp serve --site.")
