"""What the app needs to know about a method: its message module declares it.

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

# Parties share columns; parties share rows; parties predict with a vertical model.
Family = Literal["horizontal", "vertical", "inference"]
MODULE = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True, slots=True)
class Method:
    """A way to train or to predict.

    Parameters
    ----------
    gets : what the coordinator gets from a site, in a few words, by the settings of the node config
        that change it: "" for none, and later entries replace earlier ones.
    codes_labels : whether labels are encoded when they leave the active party, unless a run
        overrides it.
    baseline : the model on pooled rows to compare with.
    package : that only this method needs; an extra of the method's name installs it.
    holds_columns : whether its trees obey column constraints of a site's node config.
    takes_margins : whether rows may start from a margin of their own.
    merges_bins : whether it applies a site's minimum of rows per bin to gradient sums.
    counts_rows : whether its trees obey a site's minimum of rows per child.
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
        """Whether it trains a model, rather than predicts with one."""
        return self.family != "inference"

    @property
    def needs_label(self) -> bool:
        """Whether every party must have labels; otherwise one has, and rows are matched by id."""
        return self.family == "horizontal"


def all_methods() -> dict[str, Method]:
    """Every method by its name."""
    modules = sorted(module.name for module in iter_modules(messages.__path__))
    methods = {name.replace("_", "-"): method_of(name) for name in modules}
    return {name: method for name, method in methods.items() if method is not None}


def method_of(name: str) -> Method | None:
    """A method's declaration; None if there is no method of this name."""
    return getattr(messages_of(name.replace("-", "_")), "METHOD", None)


def modules_of_method(name: str) -> list[ModuleType]:
    """Modules of all messages that a method sends, the method's module first."""
    method, shared = method_of(name), []
    for info in iter_modules(messages.__path__):
        module = messages_of(info.name)
        if module and method and method.family in getattr(module, "SHARED_BY", ()):
            shared.append(module)
    first = messages_of(name.replace("-", "_"))
    return [*([first] if first else []), *shared]


def message_kinds() -> list[str]:
    """The kinds of all requests of all methods."""
    modules = (messages_of(info.name) for info in iter_modules(messages.__path__))
    return sorted({kind for module in modules if module for kind in kinds_of(module)})


def kinds_of(module: ModuleType) -> set[str]:
    """The kinds of the requests in a module."""
    types = (one for one in vars(module).values() if isinstance(one, type))
    return {str(one.kind) for one in types if issubclass(one, Request) and hasattr(one, "kind")}


def messages_of(name: str) -> ModuleType | None:
    """A module of this package; None if there is no such module."""
    return module_at(f"{__package__}.{name}") if MODULE.fullmatch(name) else None


def module_at(path: str) -> ModuleType | None:
    """A module; None if there is no such module."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name != path:  # the module exists, but one of its imports does not
            raise
        return None
