"""What the app must know of a method without naming it: the method's message module declares it.

::

    METHOD = Method("vertical", {"": "sizes"})        in the module of a method
    SHARED_BY = frozenset({"vertical", "inference"})  in one whose messages several methods send
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pkgutil import iter_modules
from types import ModuleType
from typing import Literal

from fedapp import messages
from fedapp.messages.fields import Request

# Parties that have the same columns; that have the same rows; that predict with a vertical model.
Family = Literal["horizontal", "vertical", "inference"]
MODULE = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True, slots=True)
class Method:
    """A way to train or to predict.

    Parameters
    ----------
    gets : what the coordinator gets of a site, in a few words, by the settings of the node config
        that change it: "" for none, and later entries replace earlier ones.
    codes_labels : whether labels leave the active party in codes, unless a run says otherwise.
    baseline : what the model is held against, trained on pooled rows.
    package : that it alone needs; an extra of the method's name brings it.
    holds_columns : whether constraints of columns in a site's node config hold in its trees.
    takes_margins : whether rows may start from a margin of their own.
    merges_bins : whether a site's least rows of a bin hold in what it tells of gradients.
    counts_rows : whether a site's least rows of a child hold in its trees.
    """

    family: Family
    gets: Mapping[str, str]
    codes_labels: bool = False
    baseline: Literal["boosted", "forest"] = "boosted"
    package: str = ""
    holds_columns: bool = False
    takes_margins: bool = False
    merges_bins: bool = False
    counts_rows: bool = False

    @property
    def trains(self) -> bool:
        """Whether it makes a model, and does not predict with one."""
        return self.family != "inference"

    @property
    def needs_label(self) -> bool:
        """Whether every party must have labels; else one has, and rows are matched by id."""
        return self.family == "horizontal"


def all_methods() -> dict[str, Method]:
    """Every method by its name."""
    modules = sorted(module.name for module in iter_modules(messages.__path__))
    found = {name.replace("_", "-"): method_of(name) for name in modules}
    return {name: method for name, method in found.items() if method is not None}


def method_of(name: str) -> Method | None:
    """What a method declares; None if there is no method of this name."""
    return getattr(messages_of(name.replace("-", "_")), "METHOD", None)


def modules_of_method(name: str) -> list[ModuleType]:
    """Modules of all messages that a method sends, its own first."""
    method, shared = method_of(name), []
    for found in iter_modules(messages.__path__):
        module = messages_of(found.name)
        if module and method and method.family in getattr(module, "SHARED_BY", ()):
            shared.append(module)
    own = messages_of(name.replace("-", "_"))
    return [*([own] if own else []), *shared]


def message_kinds() -> list[str]:
    """The kinds of all requests, of whatever method."""
    modules = (messages_of(found.name) for found in iter_modules(messages.__path__))
    return sorted({kind for module in modules if module for kind in kinds_of(module)})


def kinds_of(module: ModuleType) -> set[str]:
    """The kinds of the requests in a module."""
    found = (one for one in vars(module).values() if isinstance(one, type))
    return {str(one.kind) for one in found if issubclass(one, Request) and hasattr(one, "kind")}


def messages_of(name: str) -> ModuleType | None:
    """A module of this package; None if there is none of this name."""
    return module_at(f"{__package__}.{name}") if MODULE.fullmatch(name) else None


def module_at(path: str) -> ModuleType | None:
    """A module; None if there is none there."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name != path:
            raise
        return None
