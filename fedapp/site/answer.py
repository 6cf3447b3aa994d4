"""How a site answers a message: once a step, whatever is sent twice.

A method's handlers are functions ``(Site, Request) -> Reply`` in ``clients.<module>``, listed
there in ``HANDLERS``; the module is imported when a message of its kind arrives.
"""

from __future__ import annotations

import importlib
import logging
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import numpy as np

from fedapp.errors import ConfigError, DataError, ProtocolError
from fedapp.home import home
from fedapp.messages.fields import Reply, Request
from fedapp.packages import check_extra
from fedapp.site.config import SiteConfig
from fedapp.site.store import Store, locked
from fedapp.wire.codec import Envelope
from fedapp.wire.content import Content, put_together, take_apart

log = logging.getLogger("fedapp.site")

Handler = Callable[["Site", Any], Reply]
R = TypeVar("R", bound=Reply)
MODEL_ID = re.compile(r"[0-9a-f]{16}")
# Fields of requests that only trials give another value: what it must be, in words and as a test.
SECURE: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "insecure_small_key": ("false", lambda value: not value),
    "unguarded": ("false", lambda value: not value),
    "least_possibilities": (">= 1000", lambda value: bool(value >= 1000)),
}
# Modules whose messages several methods send; each other one is a method.
SHARED = frozenset({"hello", "vertical", "alignment", "labels", "booster", "explain"})


@dataclass(frozen=True, slots=True)
class Site:
    """What a handler works with: the site's table settings and its state for one model."""

    config: SiteConfig
    store: Store

    @property
    def name(self) -> str:
        """Name of the party."""
        return self.config.name

    def seeds(self, seed: int, round_id: int) -> np.random.SeedSequence:
        """Of this party's own draws in a round of a run; the same run draws the same again."""
        return np.random.SeedSequence([seed, round_id, zlib.crc32(self.name.encode())])

    def random(self, seed: int, round_id: int) -> np.random.Generator:
        """The draws that begin with ``seeds``."""
        return np.random.default_rng(self.seeds(seed, round_id))


def answer(config: SiteConfig, kind: str, envelope: Envelope, content: Content) -> Content:
    """Answer one message.

    A repeated step gets the stored reply. A server that was started again may go back to its last
    checkpoint; any other step out of order is refused.

    Raises
    ------
    ProtocolError : unknown kind, broken message, or a step out of order.
    DataError, ConfigError : the site cannot do what is asked, or does not allow it.
    """
    check_policy(config, kind, envelope.method)
    check_extra(envelope.method)
    request_class, handler = find_handler(kind, config.name)
    request = put_together(request_class, content, config.name)
    check_secure(config, request)
    if not MODEL_ID.fullmatch(envelope.model_id):
        raise ProtocolError(config.name, content.name, "model-id", "must be 16 hex digits")
    folder = home() / "sites" / config.name / envelope.model_id
    with locked(folder):
        store = _at_step(Store.open(folder), envelope, config.name, content.name)
        if store.step == envelope.step:
            return Content(*store.last_reply())
        with _kept_here(config):
            reply = take_apart(handler(Site(config, store), request), config.name)
        stored = {"class": reply.name, "scalars": reply.scalars, "arrays": reply.arrays}
        store.commit(envelope.step, envelope.attempt, stored)
    return reply


@contextmanager
def _kept_here(config: SiteConfig) -> Iterator[None]:
    """What an error says of a table's values goes into the site's own log, and no further."""
    try:
        yield
    except DataError as error:
        if config.simulated or error.here == error.rule:
            raise
        log.error("%s", error)
        raise error.for_others(shares_names=True) from None


def keep_reply(store: Store, reply: Reply) -> None:
    """Keep the last reply of a run, for a server started anew that asks for it again."""
    told = {field.name: getattr(reply, field.name) for field in fields(reply)}  # type: ignore[arg-type]
    store.facts["reply"] = {k: v for k, v in told.items() if not isinstance(v, np.ndarray)}
    for name in told.keys() - store.facts["reply"].keys():
        store[name] = told[name]


def kept_reply(store: Store, kind: type[R]) -> R:
    """What ``keep_reply`` kept, a reply of this class."""
    scalars = {k: tuple(v) if isinstance(v, list) else v for k, v in store.facts["reply"].items()}
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    return kind(**{name: scalars[name] if name in scalars else store[name] for name in names})


def check_policy(config: SiteConfig, kind: str, method: str) -> None:
    """Hold that the site allows the method a run names, and the one its message belongs to.

    A server that names another method than it runs gets no further than what those two share.

    Raises
    ------
    ConfigError : it does not allow one of them.
    """
    module = module_of(kind)
    wanted = {method} if module in SHARED else {method, module.replace("_", "-")}
    refused = wanted - config.allowed
    if config.allowed and refused:
        allowed = ", ".join(sorted(config.allowed))
        got = ", ".join(sorted(refused))
        raise ConfigError(f"strategy must be one that the site allows ({allowed}), got {got}")


def check_secure(config: SiteConfig, request: Request) -> None:
    """Hold that a run, whose settings are the coordinator's, does not switch a site's safety off.

    Raises
    ------
    ConfigError : it asks for small keys, or for a weaker guard or none, and the site does not
        allow that.
    """
    if config.simulated or config.allows_insecure:
        return
    for name, (rule, holds) in SECURE.items():
        value = getattr(request, name, None)
        if value is not None and not holds(value):
            setting, got = name.replace("_", "-"), str(value).lower()
            raise ConfigError(
                f"{setting} must be {rule}, or allow-insecure true in the node config, got {got}"
            )


def module_of(kind: str) -> str:
    """The module of a message kind, ``<category>.<module>[_<name>]``."""
    action = kind.partition(".")[2]
    return action.rpartition("_")[0] or action


def find_handler(kind: str, party: str) -> tuple[type[Request], Handler]:
    """The request class and the function of a message kind.

    Raises
    ------
    ProtocolError : no method has such a message.
    """
    name = module_of(kind)
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ProtocolError(party, "message", "kind", f"must be known, got {kind!r}")
    try:
        module = importlib.import_module(f"clients.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"clients.{name}":
            raise
        raise ProtocolError(party, "message", "kind", f"must be known, got {kind!r}") from None
    handlers: Mapping[type[Request], Handler] = getattr(module, "HANDLERS", {})
    for request_class, handler in handlers.items():
        if request_class.kind == kind:
            return request_class, handler
    raise ProtocolError(party, "message", "kind", f"must be known, got {kind!r}")


def _at_step(store: Store, envelope: Envelope, party: str, message: str) -> Store:
    """The state to answer from: just before the step, or just after it."""
    if envelope.attempt < store.attempt:
        rule = f"must be {store.attempt} or more, got {envelope.attempt}"
        raise ProtocolError(party, message, "attempt", rule)
    before = envelope.step - envelope.gap
    if envelope.attempt > store.attempt and store.step > envelope.checkpoint:
        store = store.roll_back(envelope.checkpoint) or store
        if store.finished:
            # Handlers answer from what they kept of the result.
            store.step = envelope.step - max(envelope.gap, 1)
    # A server started anew does not know yet whom it asks, and so not when it last did.
    in_order = store.step == before or (not envelope.gap and 0 < store.step < envelope.step)
    if store.step != envelope.step and not in_order:
        rule = f"must be {store.step + envelope.gap}, got {envelope.step}"
        if not store.step:
            rule = "must be 1: the site has no state of this model, or has lost it"
        raise ProtocolError(party, message, "step", rule)
    if store.step <= envelope.checkpoint and not store.finished:
        store.keep()
    return store
