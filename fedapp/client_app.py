"""The Flower ClientApp: a function for each kind of message.

A method's modules are imported with its first message.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import Any

from flwr.app import Context, Error, Message
from flwr.clientapp import ClientApp
from flwr.clientapp.client_app import DEFAULT_ACTION
from flwr.clientapp.typing import Mod

from fedapp.data.datasets import NAME
from fedapp.errors import (
    ClusterError,
    ConfigError,
    DivergedError,
    FedappError,
    ProtocolError,
    WaitingError,
    did_you_mean,
    without_folders,
)
from fedapp.messages.methods import message_kinds, method_of
from fedapp.messages.wire import DIVERGED, FAILED, REFUSED, WAITING, from_records, to_records
from fedapp.process import log_run
from fedapp.site.answer import ON_DISK, answered, log_refusal
from fedapp.site.bundle import check_bundle
from fedapp.site.log import LogError
from fedapp.site.settings import SiteConfig, config_in_memory, paths_in, site_config
from fedapp.site.store import Stores
from fedapp.site.table import named_by_value

log = logging.getLogger("fedapp.site")


class SiteApp(ClientApp):
    """A Flower ClientApp that answers the messages of every method.

    Each kind of message has a function registered with Flower, so mods and ``@app.lifespan()``
    apply. ``@app.train()`` and similar decorators can register other kinds.

    Parameters
    ----------
    bundle : the app bundle (FAB) whose runs it answers; None in a simulation, where the app is
        part of that bundle.
    stores : where sites keep their states between two messages.
    mods : Flower's mods around every function.
    kind_mods : mods around the function of one kind, inside the others.
    table : returns a simulated party's rows from its ``partition-id`` and ``num-partitions``, as a
        frame (pandas, polars, pyarrow), a dict of columns or an array; called at every read. A
        site with ``data`` in its node config uses that table.
    label, id : columns of ``table`` that are not features.

    Raises
    ------
    ConfigError : ``kind_mods`` names an unknown kind, or ``label`` or ``id`` come without a table.

    Examples
    --------
    ::

        def table(partition_id: int, num_partitions: int) -> pandas.DataFrame:
            return load_breast_cancer(as_frame=True).frame.iloc[partition_id::num_partitions]

        app = SiteApp(table=table, label="target", kind_mods={"train.pax_grow": [message_size_mod]})
    """

    def __init__(
        self,
        bundle: bytes | None = None,
        stores: Stores = ON_DISK,
        *,
        mods: Sequence[Mod] = (),
        kind_mods: Mapping[str, Sequence[Mod]] = MappingProxyType({}),
        table: Callable[[int, int], Any] | None = None,
        label: str = "",
        id: str = "",
    ) -> None:
        super().__init__(mods=list(mods))
        self._bundle, self.stores, self._table = bundle, stores, table
        self._columns = {"label": label, "id": id}
        if (label or id) and table is None:
            raise ConfigError(f"label and id must come with table, got {label or id!r} without")
        self._configs: dict[int, tuple[Context, SiteConfig]] = {}
        kinds = message_kinds()
        if unknown := sorted(set(kind_mods) - set(kinds)):
            hint = did_you_mean(unknown[0], kinds)
            raise ConfigError(f"kind_mods must name kinds of messages, got {unknown[0]!r}{hint}")
        for kind in kinds:
            category, _, action = kind.partition(".")
            getattr(self, category)(action, mods=list(kind_mods.get(kind, ())))(self._answer)
        self._own = self._parts

    @property
    def _parts(self) -> tuple[Any, ...]:
        """What Flower's decorators change."""
        return tuple(self._registered_funcs), self._lifespan

    def __reduce__(self) -> str | tuple[Any, ...]:
        """This module's app by name: a simulation sends the app with every message."""
        is_as_here = self is app and self._parts == self._own
        return (_simulated_app, ()) if is_as_here else super().__reduce__()

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer a message; an error goes back as its text, without a traceback.

        An error of a site that is not simulated is in its log before.
        """
        began = time.perf_counter()
        kind = message.metadata.message_type
        name = str(context.node_config.get("name", "site"))
        has_log = "data" in context.node_config and NAME.fullmatch(name)
        if has_log:
            log_run(message.metadata.run_id)
        try:
            config = self._config_of(context)
            name = config.name
            if self._bundle is not None:
                check_bundle(config, self._bundle)
            if not {kind, f"{kind}.{DEFAULT_ACTION}"} & self._registered_funcs.keys():
                raise ProtocolError(name, "message", "kind", f"must be known, got {kind!r}")
            return super().__call__(message, context)
        except FedappError as error:
            cause: Exception = error
            log.error("%s: %s", kind, error)
            text = str(error) if isinstance(error, ProtocolError) else f"{name}: {error}"
            if "data" in context.node_config:  # no simulated site: the text leaves its machine
                text = without_folders(text, paths_in(context.node_config))
                if isinstance(error, ClusterError):
                    text = f"{name}: {error.outside}"
            codes = {WaitingError: WAITING, DivergedError: DIVERGED}
            code = codes.get(type(error), REFUSED)
        except Exception as error:
            cause, code = error, FAILED
            log.exception("%s failed", kind)
            # The coordinator learns the error's class or errno's text: a message may have a path.
            text = type(error).__name__
            if isinstance(error, OSError) and error.errno:
                text += f" ({os.strerror(error.errno)})"
            text = f"{name}: {text} in {kind}; the site's own log says more"
        if has_log and code != WAITING:  # a run that waits has a line when it begins to wait
            try:
                log_refusal(name, message, cause, text, began)
            except LogError as error:
                code, text = FAILED, f"{name}: {error.strerror}"
        return Message(Error(code, text), reply_to=message)

    def _answer(self, message: Message, context: Context) -> Message:
        """Registered for every kind: pass the content to the kind's handler."""
        config = self._config_of(context)
        kind = message.metadata.message_type
        envelope, content = from_records(message.content, config.name)
        reply = answered(config, kind, envelope, content, self.stores)
        return Message(to_records(reply, envelope), reply_to=message)

    def _config_of(self, context: Context) -> SiteConfig:
        """The site's configuration; cached for as long as Flower passes the same one.

        A real site's is read again with each context: a path in it may lead elsewhere by then.
        """
        node, run = context.node_config, context.run_config
        seen, config = self._configs.get(context.node_id, (None, None))
        simulated = "partition-id" in node and "data" not in node
        is_same = seen is context
        if simulated and seen is not None and not is_same:
            is_same = (seen.node_config, seen.run_config) == (node, run)
        if config is None or not is_same:
            if self._table is None or "data" in node or "partition-id" not in node:
                config = site_config(node, run)
                if simulated:
                    config = named_by_value(config, method_of(str(run.get("strategy"))))
            else:
                config = config_in_memory(node, run, self._table, self._columns)
            self._configs[context.node_id] = context, config
        return config


app = SiteApp()


def _simulated_app() -> SiteApp:
    """The app above, in a simulation's process; the first round does not wait for XGBoost there."""
    import_module("xgboost")
    return app
