"""``fedapp key``: what the other sites trust this one by."""

from __future__ import annotations

from typing import Annotated

import typer

from fedapp.commands.common import console
from fedapp.errors import ConfigError


def key(name: Annotated[str, typer.Argument(help="The site's name in its node config.")]) -> None:
    """Print the fingerprint of this site's key, for the others' node configs to trust."""
    from fedapp.crypto.sealed import fingerprint_of
    from fedapp.data.names import NAME
    from fedapp.site.mail import box_key

    if not NAME.fullmatch(name):
        raise ConfigError(f"name must be letters, digits, '.', '_' or '-', got {name!r}")
    console.print(fingerprint_of(box_key(name).tobytes()), highlight=False)
