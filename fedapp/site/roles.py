"""A party's role in a method: a dataclass whose fields are its state, and its methods the handlers.

An example, with all there is to use::

    @role
    class Passive(Aligned):                      # may extend another role: one base, no ``super()``
        title = "a passive party"                # in errors
        order = Order(                           # request -> the requests that may follow it
            {OrderRequest: {SetupRequest}, SetupRequest: {SumRequest}, SumRequest: {SumRequest}},
            any_time={ExplainRequest},           # these come at any time, and leave the order alone
        )
        bins: Bins                               # a record: a dataclass of arrays and other values
        key: PublicNumbers | None = None         # absent until set
        sides: Mapping[str, Bits] = {}           # by party

        def sum_nodes(self, request: SumRequest, mail: Mail) -> tuple[SentReply, Letters]:
            self.sides = {**self.sides, self.name: sides}

    HANDLERS = handlers(Active, Passive)         # in the method's module of ``clients``

*Fields* have types as in ``records.codec``: arrays, records (dataclasses, nested ones too), JSON
scalars and bytes; tuples and mappings (by str) of these; each of them ``| None``. What a field
refers to is never changed in place: assign another value. A field stays in memory between messages;
it is written after the handler if it has been assigned, of its arrays only those that are other
objects than before. A field that was never assigned has its default; without one, reading it is a
ProtocolError, as a message must have come before its time. The end of a run deletes fields that
have arrays; ``Annotated[T, IN_FILE]`` makes an array of a JSON value that is of rows, or long.
Nothing but names of fields connects state on disk with a class, so a method's roles, and those
that lead to them, share what they declare under the same name.

*Handlers* are the public methods with a parameter ``request`` of one class, or of several (as in
``A | B``), whose subclasses they answer too. They return what ``site.answer`` describes. A request
comes to the stored role if that is one of ``handlers``; otherwise to the first role whose order
lets the request follow the last one answered (by whatever role), and whose ``fits`` accepts it: so
``Passive`` begins, above, with a SetupRequest after an OrderRequest. The order of a role includes
that of its bases. The last request is part of the state, thus of a checkpoint; ``follows`` compares
it. ``end`` deletes all arrays after the handler.

A handler reaches settings of the site by ``self.config``, and the facts that belong to the site
(keys, masks, plan) by the functions of this room, on ``self.site``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Set
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Self,
    TypeVar,
    dataclass_transform,
    get_args,
    get_type_hints,
)

import numpy as np

from fedapp.errors import ProtocolError
from fedapp.messages.fields import Request
from fedapp.records.codec import Codec, codec_of, once
from fedapp.site.answer import Handlers, Site
from fedapp.site.settings import SiteConfig
from fedapp.site.store import NoStateError

NEVER = object()  # read
OF_ALL = frozenset(("site", "_last", "_ends", "_read"))  # attributes of a role that are no fields
R = TypeVar("R")
Kind = type[Request]


@dataclass(frozen=True, slots=True)
class Order:
    """Which requests may follow which at a role."""

    follow: Mapping[Kind, Set[Kind]]  # request -> the requests that may follow it
    any_time: Set[Kind] = frozenset()
    after_end: Set[Kind] = frozenset()  # those in order that are answered without a state too


@dataclass_transform(kw_only_default=True)
def role(cls: type[R]) -> type[R]:
    """Make a class a role: a dataclass whose repr shows no state."""
    for name, default in [*vars(cls).items()]:
        # An array or a mapping is a safe default, as nothing is changed in place.
        if name in cls.__annotations__ and isinstance(default, np.ndarray | Mapping):
            setattr(cls, name, field(default_factory=_constant(default)))
    declared: Any = dataclass(eq=False, repr=False, kw_only=True)(cls)
    for state in fields(declared):  # or the defaults would hide what is stored
        if state.name in vars(declared):
            delattr(declared, state.name)
    return cls


def _constant(value: object) -> Callable[[], object]:
    return lambda: value


class Role:
    """What all roles have; see the module."""

    title: ClassVar[str] = "a party"
    order: ClassVar[Order] = Order({})
    site: Site
    _last: str  # the last request's class, as ``name_of`` names it
    _ends: bool
    _read: dict[str, object]  # fields as they were read

    @classmethod
    def load(cls, site: Site) -> Self:
        """The role as it is in a site's store; its fields are read when used."""
        loaded = cls.__new__(cls)
        loaded.site = site
        loaded._last = site.store.last
        loaded._ends = False
        loaded._read = {}
        return loaded

    if not TYPE_CHECKING:  # or every name would be an attribute

        def __getattr__(self, name: str) -> object:
            """Read a field that is not set yet."""
            if name not in (by_name := _fields(type(self))):
                raise AttributeError(name)
            codec, default = by_name[name]
            is_there = default is None or name in self.site.store
            value = self.site.store.read(name, codec) if is_there else default()
            self._read[name] = value
            setattr(self, name, value)
            return value

    def save(self) -> None:
        """Write the fields that were assigned to the store."""
        by_name = _fields(type(self))
        for name, value in vars(self).items():  # those that were read or assigned
            if name not in by_name and name not in OF_ALL:
                raise AttributeError(f"{type(self).__name__} has no field {name}")
            if name in by_name and value is not self._read.get(name, NEVER):
                self.site.store.write(name, by_name[name][0], value)

    @classmethod
    def fits(cls, request: Request) -> bool:
        """Whether the role may begin with a request."""
        return True

    def follows(self, request: Kind) -> bool:
        """Whether the last request was of this class."""
        return self._last == name_of(request)

    def end(self) -> None:
        """Delete all arrays after the handler: the run has ended here."""
        self._ends = True

    @property
    def name(self) -> str:
        """Name of the party."""
        return self.site.name

    @property
    def config(self) -> SiteConfig:
        """Settings of the site."""
        return self.site.config

    @property
    def folder(self) -> Path:
        """The model's folder at the site."""
        return self.site.store.folder


def handlers(*roles: type[Role]) -> Handlers:
    """Handlers of all requests in the orders of some roles, without those of their bases."""

    def handle(site: Site, request: Request, *mail: Any) -> Any:
        kind, store = type(request), site.store
        role_class, is_in_order = _role_for(site, request, roles)
        answering = role_class.load(site)
        names = answers(role_class)
        name = next(names[base] for base in kind.__mro__ if base in names)  # of the nearest base
        reply = getattr(answering, name)(request, *mail)
        answering.save()
        if is_in_order:
            store.role = name_of(role_class)
            store.last = name_of(kind)
        store.last = store.last or name_of(kind)
        if answering._ends:
            store.forget()
        return reply

    return dict.fromkeys((kind for role_class in roles for kind in _own(role_class)), handle)


def _own(role_class: type[Role]) -> set[Kind]:
    """Requests in the order of a role, without that of its bases."""
    return {*role_class.order.any_time}.union(*role_class.order.follow.values())


def name_of(kind: type[Any]) -> str:
    """A class of roles or requests as the store names it: several methods have a SetupRequest."""
    return f"{kind.__module__}.{kind.__name__}"


def _role_for(
    site: Site, request: Request, roles: tuple[type[Role], ...]
) -> tuple[type[Role], bool]:
    """The role that answers a request, and whether the request is in an order."""
    kind, last = type(request), site.store.last
    stored = [role_class for role_class in roles if name_of(role_class) == site.store.role]
    for role_class in stored or roles:
        if any(kind in order.any_time for order in _orders(role_class)):
            return role_class, False
    orders = (order for role_class in stored for order in _orders(role_class))
    answers_ended = any(kind in order.after_end for order in orders)
    if not last or (site.store.finished and not answers_ended):
        raise NoStateError("state")
    for role_class in stored or roles:
        if last in _before(role_class, kind) and (stored or role_class.fits(request)):
            return role_class, True
    names = [name for role_class in stored or roles for name in _before(role_class, kind).values()]
    before = " or ".join(dict.fromkeys(names))
    at = stored[0].title if stored else "this party"
    rule = f"must follow {before}"
    rule = f"{rule} at {at}" if before else f"must not come to {at}"
    rule = f"{rule}, got it after {last.rpartition('.')[2]}"
    raise ProtocolError(site.name, kind.__name__, "step", rule)


@once
def _orders(role_class: type[Any]) -> list[Order]:
    return [vars(base)["order"] for base in role_class.__mro__ if "order" in vars(base)]


@once
def _before(role_class: type[Any], kind: Kind) -> dict[str, str]:
    """Names of the requests that a request may follow at a role, by ``name_of``."""
    return {
        name_of(before): before.__name__
        for order in _orders(role_class)
        for before, after in order.follow.items()
        if kind in after
    }


@once
def answers(role_class: type[Any]) -> dict[Kind, str]:
    """Name of the handler of each request class that a role answers."""
    names: dict[Kind, str] = {}
    for name, method in inspect.getmembers(role_class, inspect.isfunction):
        if name.startswith("_") or "request" not in inspect.signature(method).parameters:
            continue
        hint = get_type_hints(method)["request"]
        for kind in get_args(hint) or (hint,):
            if inspect.isclass(kind) and issubclass(kind, Request) and kind is not Request:
                both = f"{names.get(kind)} and {name} answer {kind.__name__}"
                assert kind not in names, f"{role_class.__name__}: {both}; helpers begin with _"
                names[kind] = name
    return names


@once
def _fields(role_class: type[Any]) -> dict[str, tuple[Codec, Callable[[], object] | None]]:
    """Codec and default of each field of a role."""
    hints = get_type_hints(role_class, include_extras=True)
    by_name = {}
    for state in fields(role_class):
        default = None if state.default_factory is MISSING else state.default_factory
        if state.default is not MISSING:
            default = _constant(state.default)
        by_name[state.name] = codec_of(hints[state.name]), default
    return by_name
