"""Flower's ``flwr-clientapp``, answering with the locally installed fedapp.

``python -m fedapp.deploy.clientapp`` takes the options of ``flwr-clientapp``. Flower would unpack
the coordinator's bundle and import its code; here the bundle is only hashed and its signature
checked.
"""

from __future__ import annotations

from collections.abc import Callable

from fedapp.client_app import SiteApp
from fedapp.deploy.warm import replace, version_error
from fedapp.process import start_log

try:
    from flwr.supernode.cli.flwr_clientapp import flwr_clientapp
    from flwr.supernode.runtime import run_clientapp
except ImportError as error:
    raise SystemExit(version_error(error)) from error


class Bundle:
    """Bundle of a run, used only for its hash and its signature."""

    def __init__(self) -> None:
        self.content = b""

    def hold(self, content: bytes, **_: object) -> None:
        """Replaces ``install_from_fab``."""
        self.content = content

    def loader(self, **_: object) -> Callable[..., SiteApp]:
        """Replaces ``get_load_client_app_fn``."""
        return lambda *_: SiteApp(self.content)


def refuse_to_install(*_: object, **__: object) -> None:
    """Replaces ``install_app_dependencies``: installing a package may run its code."""
    raise PermissionError("a site installs nothing that a bundle asks for")


def main() -> None:
    """Answer one message. SystemExit if Flower lacks one of the functions replaced here."""
    start_log("clientapp")
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
