"""The Flower ClientApp: every message goes to the handler of its kind.

Only what the runtime needs is imported here; a method's modules come with its first message.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from flwr.app import Context, Error, Message
from flwr.clientapp import ClientApp

from fedapp.deploy.bundle import check_bundle
from fedapp.errors import DivergedError, FedappError, ProtocolError, WaitingError
from fedapp.site.answer import ON_DISK, answered
from fedapp.site.answers import noted
from fedapp.site.config import SiteConfig, site_config
from fedapp.site.stores import Stores
from fedapp.wire.codec import DIVERGED, FAILED, REFUSED, WAITING, from_records, records_of

log = logging.getLogger("fedapp.site")


class SiteApp(ClientApp):
    """A ClientApp that knows its handlers by the message kind instead of by registration.

    Parameters
    ----------
    bundle : the app bundle (FAB) whose run it answers; None where it is of that bundle itself,
        in simulation.
    stores : where sites have their states between two messages.
    frames : rows in memory that simulated parties are to predict, by party; each sees its own.
    """

    def __init__(
        self,
        bundle: bytes | None = None,
        stores: Stores = ON_DISK,
        frames: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        super().__init__()
        self._bundle, self.stores, self._frames = bundle, stores, frames
        self._known: dict[int, tuple[Context, SiteConfig]] = {}

    @noted
    def __call__(self, message: Message, context: Context) -> Message:
        """Answer a message; an error goes back as its text, without a traceback."""
        kind, name = message.metadata.message_type, str(context.node_config.get("name", "site"))
        try:
            config = self._config_of(context)
            name = config.name
            if name in self._frames:
                config = replace(config, frame=self._frames[name])
            if self._bundle is not None:
                check_bundle(config, self._bundle)
            envelope, content = from_records(message.content, name)
            reply = answered(config, kind, envelope, content, self.stores)
            return Message(records_of(reply, envelope), reply_to=message)
        except FedappError as error:
            log.error("%s: %s", kind, error)
            text = str(error) if isinstance(error, ProtocolError) else f"{name}: {error}"
            codes = {WaitingError: WAITING, DivergedError: DIVERGED}
            return Message(Error(codes.get(type(error), REFUSED), text), reply_to=message)
        except Exception as error:
            log.exception("%s failed", kind)
            reason = f"{name}: {_told(error)} in {kind}; the site's own log says more"
            return Message(Error(FAILED, reason), reply_to=message)

    def _config_of(self, context: Context) -> SiteConfig:
        """What a site's configs say; read once where all its messages come with one context."""
        known, config = self._known.get(context.node_id, (None, None))
        if config is None or known is not context:
            config = site_config(context.node_config, context.run_config)
            self._known[context.node_id] = context, config
        return config


def _told(error: Exception) -> str:
    """What the coordinator may know of an error: its kind, or the system's words, free of paths."""
    if isinstance(error, OSError) and error.errno:
        return f"{type(error).__name__} ({os.strerror(error.errno)})"
    return type(error).__name__


app = SiteApp()
