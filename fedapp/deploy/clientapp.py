"""Flower's ``flwr-clientapp``, which answers with the fedapp that is installed here.

``python -m fedapp.deploy.clientapp`` takes the options of ``flwr-clientapp``. What Flower would do
with the bundle that the coordinator sends, unpack it and import its code, is replaced: the bundle
is read for its hash and its signature, and otherwise left alone.
"""

from __future__ import annotations

from collections.abc import Callable

from fedapp import log_lines
from fedapp.client_app import SiteApp
from fedapp.deploy.warm import must_be, replace

try:
    from flwr.supernode.cli.flwr_clientapp import flwr_clientapp
    from flwr.supernode.runtime import run_clientapp
except ImportError as error:
    raise SystemExit(must_be(error)) from error


class Bundle:
    """The bundle of a run, of which nothing is used but its hash and its signature."""

    def __init__(self) -> None:
        self.content = b""

    def hold(self, content: bytes, **_: object) -> None:
        """Stands for ``install_from_fab``."""
        self.content = content

    def loader(self, **_: object) -> Callable[..., SiteApp]:
        """Stands for ``get_load_client_app_fn``."""
        return lambda *_: SiteApp(self.content)


def refuse_to_install(*_: object, **__: object) -> None:
    """Stands for ``install_app_dependencies``: what a bundle names may run code as it installs."""
    raise PermissionError("a site installs nothing that a bundle asks for")


def main() -> None:
    """Answer one message.

    Raises
    ------
    SystemExit : Flower unpacks bundles by other means than those that are replaced here.
    """
    log_lines.begin("clientapp")
    bundle = Bundle()
    replace(
        run_clientapp,
        install_from_fab=bundle.hold,
        get_load_client_app_fn=bundle.loader,
        install_app_dependencies=refuse_to_install,
    )
    flwr_clientapp()


if __name__ == "__main__":
    main()
