"""Folders of a coordinator and of a site, as the commands write them."""

import re
from pathlib import Path
from tempfile import TemporaryDirectory

from typer.testing import CliRunner

from fedapp.commands.federation import federation_app
from fedapp.commands.site import site_app


def init_federation(parent, *options):
    """A coordinator's folder, and what the command prints."""
    folder = parent / "coordinator"
    given = ("--host", "fed.example.org", "--sites", "bank, insurer", *options)
    return folder, invoke(federation_app, "init", str(folder), *given)


def init_site(parent, table, *options):
    """A site's folder, and what the command prints."""
    folder, ca = parent / "bank", parent / "ca.crt"
    ca.write_text("a certificate")
    given = {
        "--name": "bank",
        "--superlink": "fed.example.org:9092",
        "--data": str(table),
        "--ca": str(ca),
    }
    given |= dict(zip(options[::2], options[1::2], strict=True))
    words = (word for pair in given.items() for word in pair)
    return folder, invoke(site_app, "init", str(folder), *words)


def invoke(app, *words):
    """What a command prints; its error is raised."""
    result = CliRunner().invoke(app, words)
    if result.exception:
        raise result.exception
    return result.output


def checked_site(node_config, *words):
    """``fedapp site check`` with a node config's text, in one line."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "site.toml")
        path.write_text(re.sub(r" (?=[a-z-]+=)", "\n", node_config))
        given = ["check", "--site", str(path), *words]
        return CliRunner().invoke(site_app, given, env={"COLUMNS": "200"})
