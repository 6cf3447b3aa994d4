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

*Fields* are arrays, records (dataclasses, nested ones too), JSON scalars and bytes; tuples and
mappings (by str) of these; each of them ``| None``. What a field refers to is never changed in
place: assign another value. A field is read from the store when a handler first uses it (arrays are
memory-mapped) and written after the handler if it has been assigned, of records and collections
only what is another object than before. A field that was never assigned has its default; without
one, reading it is a ProtocolError, as a message must have come before its time.
``Annotated[T, IN_FILE]`` stores a long JSON value as an array, which is not rewritten in each step.
Nothing but names of fields connects state on disk with a class, so a method's roles, and those
that lead to them, share what they declare under the same name.

*Handlers* are the public methods with a parameter ``request`` of one class. They return what
``site.answer`` describes. A request comes to the stored role if that is one of ``handlers``;
otherwise to the first role whose order lets the request follow the last one answered (by whatever
role), and whose ``fits`` accepts it: so ``Passive`` begins, above, with a SetupRequest after an
OrderRequest. The order of a role includes that of its bases. The last request is part of the state,
thus of a checkpoint; ``follows`` compares it. ``end`` deletes all arrays after the handler.

A handler reaches settings of the site by ``self.config``, and the facts that belong to the site
(keys, masks, plan) by the functions of this room, on ``self.site``.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Set
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    Protocol,
    Self,
    TypeVar,
    cast,
    dataclass_transform,
    get_args,
    get_type_hints,
)

import numpy as np

from fedapp.errors import ProtocolError
from fedapp.messages.fields import Request, origin_of
from fedapp.site.answer import Handlers, Site
from fedapp.site.settings import SiteConfig
from fedapp.site.store import UNIONS, NoStateError, Store, decoded, encoded

IN_FILE = "in a file"  # see the module
NEVER = object()  # read
ROLE, LAST = "role", "last"  # facts of a store: the role, and the name of the last request's class
SCALARS = (str, bool, int, float, bytes)
R = TypeVar("R")
Kind = type[Request]
C = TypeVar("C", bound=Callable[..., Any])
once = cast(Callable[[C], C], cache)  # mypy takes no class for hashable


@dataclass(frozen=True, slots=True)
class Order:
    """Which requests may follow which at a role."""

    follow: Mapping[Kind, Set[Kind]]  # request -> the requests that may follow it
    any_time: Set[Kind] = frozenset()
    after_end: Set[Kind] = frozenset()  # those in order that are answered without a state too


@dataclass_transform(kw_only_default=True)
def role(cls: type[R]) -> type[R]:
    """Make a class a role: a dataclass with slots, whose repr shows no state."""
    for name, default in [*vars(cls).items()]:
        # An array or a mapping is a safe default, as nothing is changed in place.
        if name in cls.__annotations__ and isinstance(default, np.ndarray | Mapping):
            setattr(cls, name, field(default_factory=_constant(default)))
    return dataclass(slots=True, eq=False, repr=False, kw_only=True)(cls)


def _constant(value: object) -> Callable[[], object]:
    return lambda: value


class Role:
    """What all roles have; see the module."""

    __slots__ = ("_ends", "_last", "_read", "site")
    title: ClassVar[str] = "a party"
    order: ClassVar[Order] = Order({})
    site: Site
    _last: str  # name of the last request's class
    _ends: bool
    _read: dict[str, tuple[object, object]]  # fields: value as read, and as it is in the store

    @classmethod
    def load(cls, site: Site) -> Self:
        """The role as it is in a site's store; its fields are read when used."""
        loaded = cls.__new__(cls)
        loaded.site, loaded._last, loaded._ends = site, site.store.facts.get(LAST, ""), False
        loaded._read = {}
        return loaded

    if not TYPE_CHECKING:  # or every name would be an attribute

        def __getattr__(self, name: str) -> object:
            """Read a field that is not set yet."""
            if name not in (forms := _forms(type(self))):
                raise AttributeError(name)
            form, default = forms[name]
            try:
                value = stored = form.read(self.site.store, name)
            except NoStateError:
                if default is None:
                    raise NoStateError(name) from None
                value, stored = default(), None
            self._read[name] = value, stored
            setattr(self, name, value)
            return value

    def save(self) -> None:
        """Write the fields that were assigned to the store."""
        for name, (form, _) in _forms(type(self)).items():
            try:
                value = object.__getattribute__(self, name)
            except AttributeError:  # neither read nor assigned
                continue
            read, stored = self._read.get(name, (NEVER, None))
            if value is not read:
                form.write(self.site.store, name, value, stored)

    @classmethod
    def fits(cls, request: Request) -> bool:
        """Whether the role may begin with a request."""
        return True

    def follows(self, request: Kind) -> bool:
        """Whether the last request was of this class."""
        return self._last == request.__name__

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
        kind, facts = type(request), site.store.facts
        role_class, is_in_order = _role_for(site, request, roles)
        answering = role_class.load(site)
        reply = getattr(answering, answers(role_class)[kind])(request, *mail)
        answering.save()
        if is_in_order:
            facts[ROLE], facts[LAST] = name_of(role_class), kind.__name__
        facts.setdefault(LAST, kind.__name__)
        if answering._ends:
            site.store.forget()
        return reply

    return dict.fromkeys((kind for each in roles for kind in _own(each)), handle)


def _own(role_class: type[Role]) -> set[Kind]:
    """Requests in the order of a role, without that of its bases."""
    return {*role_class.order.any_time}.union(*role_class.order.follow.values())


def name_of(role_class: type[Role]) -> str:
    """A role as the store names it."""
    return f"{role_class.__module__}.{role_class.__name__}"


def _role_for(
    site: Site, request: Request, roles: tuple[type[Role], ...]
) -> tuple[type[Role], bool]:
    """The role that answers a request, and whether the request is in an order."""
    kind, facts = type(request), site.store.facts
    stored = [each for each in roles if name_of(each) == facts.get(ROLE)]
    for each in stored or roles:
        if any(kind in order.any_time for order in _orders(each)):
            return each, False
    last = facts.get(LAST, "")
    answers_ended = any(kind in order.after_end for each in stored for order in _orders(each))
    if not last or (site.store.finished and not answers_ended):
        raise NoStateError("state")
    for each in stored or roles:
        if last in _before(each, kind) and (stored or each.fits(request)):
            return each, True
    before = " or ".join(
        dict.fromkeys(name for each in stored or roles for name in _before(each, kind))
    )
    at, rule = stored[0].title if stored else "this party", f"must follow {before}"
    rule = f"{rule} at {at}" if before else f"must not come to {at}"
    raise ProtocolError(site.name, kind.__name__, "step", f"{rule}, got it after {last}")


@once
def _orders(role_class: type[Any]) -> list[Order]:
    return [vars(base)["order"] for base in role_class.__mro__ if "order" in vars(base)]


@once
def _before(role_class: type[Any], kind: Kind) -> list[str]:
    """Names of the requests that a request may follow at a role."""
    return [
        before.__name__
        for order in _orders(role_class)
        for before, after in order.follow.items()
        if kind in after
    ]


@once
def answers(role_class: type[Any]) -> dict[Kind, str]:
    """Name of the handler of each request class that a role answers."""
    names: dict[Kind, str] = {}
    for name, method in inspect.getmembers(role_class, inspect.isfunction):
        if name.startswith("_") or "request" not in inspect.signature(method).parameters:
            continue
        kind = get_type_hints(method)["request"]
        if inspect.isclass(kind) and issubclass(kind, Request):
            assert kind not in names, f"{role_class.__name__} answers {kind.__name__} twice"
            names[kind] = name
    return names


class Form(Protocol):
    """How a value of some type is stored."""

    def read(self, store: Store, path: str) -> Any:
        """The value at a path; raises NoStateError if there is none."""

    def write(self, store: Store, path: str, value: Any, before: Any) -> None:
        """Store a value in place of another one, or of None."""


@once
def _forms(role_class: type[Any]) -> dict[str, tuple[Form, Callable[[], object] | None]]:
    """Form and default of each field of a role."""
    hints, forms = get_type_hints(role_class, include_extras=True), {}
    for each in fields(role_class):
        default = None if each.default_factory is MISSING else each.default_factory
        if each.default is not MISSING:
            default = _constant(each.default)
        forms[each.name] = form_of(hints[each.name]), default
    return forms


@once
def form_of(hint: Any) -> Form:
    """Form of a type; raises TypeError for one that a field of a role may not have."""
    origin, args = origin_of(hint), get_args(hint)
    if origin is Annotated:
        return _JsonFile(args[0]) if IN_FILE in args[1:] else form_of(args[0])
    if _is_json(hint):
        return _Json(hint)
    if origin in UNIONS and (kinds := [each for each in args if each is not NoneType]):
        is_array = all(origin_of(each) is np.ndarray for each in kinds)
        if is_array or len(kinds) == 1:
            return _Optional(form_of(kinds[0])) if NoneType in args else form_of(kinds[0])
    if origin is np.ndarray:
        return _Arrays()
    if origin is tuple and args[1:] == (...,):
        return _Many(form_of(args[0]), is_mapping=False)
    if origin is Mapping and args[0] is str:
        return _Many(form_of(args[1]), is_mapping=True)
    if is_dataclass(hint):
        hints = get_type_hints(hint, include_extras=True)
        return _Record(
            cast(type[Any], hint), {each.name: form_of(hints[each.name]) for each in fields(hint)}
        )
    rule = "must be an array, a record, a JSON value, or a tuple or Mapping of them"
    raise TypeError(f"field of a role {rule}, got {hint}")


def _is_json(hint: Any) -> bool:
    origin, args = origin_of(hint), get_args(hint)
    if origin is Annotated:
        return IN_FILE not in args and _is_json(args[0])
    if origin in (tuple, Mapping, *UNIONS):
        return all(each in (..., NoneType) or _is_json(each) for each in args)
    return hint in SCALARS or origin is Literal


@dataclass(frozen=True, slots=True)
class _Arrays:
    def read(self, store: Store, path: str) -> Any:
        return store[path]

    def write(self, store: Store, path: str, value: Any, before: Any) -> None:
        if value is not before:
            store[path] = value


@dataclass(frozen=True, slots=True)
class _Json:
    hint: Any

    def read(self, store: Store, path: str) -> Any:
        return decoded(self.hint, store.facts[path])

    def write(self, store: Store, path: str, value: Any, before: Any) -> None:
        store.facts[path] = encoded(value)


@dataclass(frozen=True, slots=True)
class _JsonFile:
    hint: Any

    def read(self, store: Store, path: str) -> Any:
        return decoded(self.hint, json.loads(store[path].tobytes()))

    def write(self, store: Store, path: str, value: Any, before: Any) -> None:
        store[path] = np.frombuffer(json.dumps(encoded(value)).encode(), dtype=np.uint8)


@dataclass(frozen=True, slots=True)
class _Optional:
    """Absent for None; a record has a fact of its own that says whether it is there."""

    form: Form

    def read(self, store: Store, path: str) -> Any:
        return self.form.read(store, path) if path in store.facts or path in store else None

    def write(self, store: Store, path: str, value: Any, before: Any) -> None:
        if value is None:
            _drop(store, path)
        else:
            self.form.write(store, path, value, before)
            if isinstance(self.form, _Record):
                store.facts[path] = True


@dataclass(frozen=True, slots=True)
class _Record:
    kind: type[Any]
    forms: Mapping[str, Form]

    def read(self, store: Store, path: str) -> Any:
        return self.kind(*(form.read(store, f"{path}.{name}") for name, form in self.forms.items()))

    def write(self, store: Store, path: str, value: Any, before: Any) -> None:
        for name, form in self.forms.items():
            form.write(store, f"{path}.{name}", getattr(value, name), getattr(before, name, None))


@dataclass(frozen=True, slots=True)
class _Many:
    """A tuple or mapping; its keys are a fact."""

    form: Form
    is_mapping: bool

    def read(self, store: Store, path: str) -> Any:
        values = {key: self.form.read(store, f"{path}.{key}") for key in store.facts[path]}
        return values if self.is_mapping else tuple(values.values())

    def write(self, store: Store, path: str, value: Any, before: Any) -> None:
        values, old = (
            dict(each if self.is_mapping else enumerate(each)) for each in (value, before or ())
        )
        for key in set(store.facts.get(path, ())) - values.keys():
            _drop(store, f"{path}.{key}")
        for key, each in values.items():
            self.form.write(store, f"{path}.{key}", each, old.get(key))
        store.facts[path] = list(values)


def _drop(store: Store, path: str) -> None:
    """Delete what is stored at a path and below it."""
    store.drop(path)
    for name in [name for name in store.facts if name == path or name.startswith(f"{path}.")]:
        del store.facts[name]
