"""``fedapp key`` and ``fedapp trust``: sites get to know each other's keys."""

from __future__ import annotations

from typing import Annotated

import typer

from fedapp.commands.common import console
from fedapp.errors import ConfigError


def key(name: Annotated[str, typer.Argument(help="The site's name in its node config.")]) -> None:
    """Print the fingerprint of this site's key, for the other sites to trust."""
    from fedapp.crypto.sealed import fingerprint_of
    from fedapp.data.datasets import NAME
    from fedapp.site.mail import box_key

    if not NAME.fullmatch(name):
        raise ConfigError(f"name must be letters, digits, '.', '_' or '-', got {name!r}")
    console.print(fingerprint_of(box_key(name).tobytes()), highlight=False)


def trust(
    name: Annotated[str, typer.Argument(help="The other site's name in its node config.")],
    fingerprint: Annotated[list[str], typer.Argument(help="As fedapp key prints it there.")],
) -> None:
    """Trust the key of another site from now on, and no other key of that site."""
    from fedapp.home import display_path, home
    from fedapp.site.mail import PINNED, pin

    before = pin(home(), name, "".join(fingerprint))
    place = display_path(home() / PINNED)
    replaced = f", instead of {before}" if before else ""
    console.print(f"{name} is trusted by its key{replaced}: {place}", highlight=False)
