"""What the app needs to know about a method: its message module declares it.

::

    GROUPS = {"pax": Method("horizontal", {"": "sizes"})}      messages of one method
    GROUPS = {"labels": frozenset({"horizontal"})}             messages of all methods of a family

The second word of a message's kind, as in ``train.pax_grow``, is its group.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pkgutil import iter_modules
from types import ModuleType
from typing import Literal

from fedapp import messages
from fedapp.messages.fields import Request

# Parties share columns; parties share rows; parties predict with a vertical model.
Family = Literal["horizontal", "vertical", "inference"]


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
    methods = {name: one for name, (_, one) in _groups().items() if isinstance(one, Method)}
    return {name.replace("_", "-"): methods[name] for name in sorted(methods)}


def method_of(name: str) -> Method | None:
    """What a method declares; None if there is no method of this name."""
    _, declared = _groups().get(name.replace("-", "_"), (None, None))
    return declared if isinstance(declared, Method) else None


def senders_of(group: str) -> frozenset[Family]:
    """Families of the methods that share a group of messages; none if it is one method's."""
    _, declared = _groups().get(group, (None, None))
    return declared if isinstance(declared, frozenset) else frozenset()


def module_of_group(group: str) -> ModuleType | None:
    """The module that declares a group of messages; None if there is no such group."""
    module, _ = _groups().get(group, (None, None))
    return module


def modules_of_method(name: str) -> list[ModuleType]:
    """Modules of all messages that a method sends, its own first."""
    if (method := method_of(name)) is None:
        return []
    own = module_of_group(name.replace("-", "_"))
    shared = [
        module
        for module, by in _groups().values()
        if isinstance(by, frozenset) and method.family in by
    ]
    return list(dict.fromkeys(module for module in (own, *shared) if module))


def message_kinds() -> list[str]:
    """The kinds of all requests, of whatever method."""
    return sorted({kind for module, _ in _groups().values() for kind in kinds_of(module)})


def kinds_of(module: ModuleType) -> set[str]:
    """The kinds of the requests in a module."""
    classes = (one for one in vars(module).values() if isinstance(one, type))
    return {str(one.kind) for one in classes if issubclass(one, Request) and hasattr(one, "kind")}


@cache
def _groups() -> dict[str, tuple[ModuleType, Method | frozenset[Family]]]:
    """The module of each group of messages, and who sends it."""
    names = (module.name for module in iter_modules(messages.__path__))
    modules = [importlib.import_module(f"{messages.__name__}.{name}") for name in names]
    return {
        group: (module, declared)
        for module in modules
        for group, declared in getattr(module, "GROUPS", {}).items()
    }
