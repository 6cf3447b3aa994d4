"""Which method or family sends which messages."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pkgutil import iter_modules
from types import ModuleType
from typing import Literal

from fedapp import messages
from fedapp.errors import check_package
from fedapp.messages.fields import Request

# Parties share columns; parties share rows; parties predict with a vertical model.
Family = Literal["horizontal", "vertical", "inference"]


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of memory that a party needs, beside the table, for all of its rows at once."""

    value: int  # for each value
    tree: int = 0  # for each row and tree of all parties
    row: int = 0  # for each row

    def of(self, n_rows: int, n_columns: int, n_trees: int = 0) -> int:
        """Bytes for a table."""
        return n_rows * (self.value * n_columns + self.tree * n_trees + self.row)


@dataclass(frozen=True, slots=True)
class Method:
    """A way to train, to predict, or to describe tables.

    Parameters
    ----------
    gets : what the coordinator gets from a site, in a few words, by the settings of the node config
        that change it: "" for none, and later entries replace earlier ones.
    codes_labels : whether labels are encoded when they leave the active party, unless a run
        overrides it.
    baseline : the model on pooled rows to compare with.
    package : that only this method needs; an extra of the method's name installs it.
    holds_columns : whether its trees obey column constraints of a site's node config.
    takes_margins : whether rows may start from a base margin.
    merges_bins : whether it applies a site's minimum of rows per bin to gradient sums.
    hides_labels : whether it uses labels only as ``label-epsilon`` of a site has randomised them.
    stands : whether its runs write no predictions, but let sites score by themselves later.
    sums_ciphertexts : whether a passive party sums what the label holder encrypts every round.
    fits_leaves : whether leaves may be quantiles of residuals, which are those of single rows.
    describes : whether its runs describe tables, and train nothing.
    memory : what it needs to copy a table; None if it reads one that is larger than memory by
        parts.
    """

    family: Family
    gets: Mapping[str, str]
    memory: Memory | None = field(kw_only=True)
    codes_labels: bool = False
    baseline: Literal["boosted", "forest"] = "boosted"
    package: str = ""
    title: str = ""  # of a method whose files have others too; else the strategy's first line
    holds_columns: bool = False
    takes_margins: bool = False
    merges_bins: bool = False
    hides_labels: bool = False
    stands: bool = False
    sums_ciphertexts: bool = False
    fits_leaves: bool = False
    describes: bool = False

    def gets_with(self, settings: set[str]) -> str:
        """What the coordinator gets where these settings are in force."""
        return [text for key, text in self.gets.items() if settings.issuperset(key.split())][-1]

    @property
    def parties(self) -> str:
        """What the parties of a run share, in words."""
        shared, others = ("columns", "rows") if self.needs_label else ("rows", "columns")
        return f"the same {shared}, different {others}"

    @property
    def uses_model(self) -> bool:
        """Whether its runs use a model that another has trained."""
        return self.family == "inference"

    @property
    def trains(self) -> bool:
        """Whether it trains a model."""
        return not self.uses_model and not self.describes

    @property
    def shows_label_figures(self) -> bool:
        """Whether its runs disclose what columns of other parties say about the label."""
        return self.describes and not self.needs_label

    @property
    def predicts(self) -> bool:
        """Whether its runs write predictions."""
        return self.uses_model and not self.stands

    @property
    def needs_label(self) -> bool:
        """Whether every party must have labels; otherwise one has, and rows are matched by id."""
        return self.family == "horizontal"


def all_methods() -> dict[str, Method]:
    """Every method by its name."""
    declared = _groups().items()
    methods = {name: method for name, (_, method) in declared if isinstance(method, Method)}
    return {name.replace("_", "-"): methods[name] for name in sorted(methods)}


def method_of(name: str) -> Method | None:
    """What a method declares; None if there is no method of this name."""
    _, declared = _groups().get(name.replace("-", "_"), (None, None))
    return declared if isinstance(declared, Method) else None


def missing_extra(method: str) -> str:
    """The command that installs a method's missing package; empty if nothing is missing."""
    declared = method_of(method)
    if not declared or not declared.package or find_spec(declared.package) is not None:
        return ""
    return f"pip install 'fedapp[{method}]'"


def check_extra(method: str) -> None:
    """Raise ConfigError if a method needs a package that is not installed."""
    if (declared := method_of(method)) and declared.package:
        check_package(declared.package, f"for {method}", method)


def senders_of(group: str) -> frozenset[Family]:
    """Families of the methods that share a group of messages; none if it is one method's."""
    _, declared = _groups().get(group, (None, None))
    return declared if isinstance(declared, frozenset) else frozenset()


def module_of_group(group: str) -> ModuleType | None:
    """The module that declares a group of messages; None if there is no such group."""
    module, _ = _groups().get(group, (None, None))
    return module


def modules_of_method(name: str) -> list[ModuleType]:
    """Modules of all messages that a method sends, first the one that declares it."""
    if (method := method_of(name)) is None:
        return []
    declaring = module_of_group(name.replace("-", "_"))
    shared = [
        module
        for module, by in _groups().values()
        if isinstance(by, frozenset) and method.family in by
    ]
    return list(dict.fromkeys(module for module in (declaring, *shared) if module))


def message_kinds() -> list[str]:
    """The kinds of all requests, of whatever method."""
    return sorted({kind for module, _ in _groups().values() for kind in kinds_of(module)})


def kinds_of(module: ModuleType) -> set[str]:
    """The kinds of the requests in a module."""
    classes = (value for value in vars(module).values() if isinstance(value, type))
    return {
        str(message_class.kind)
        for message_class in classes
        if issubclass(message_class, Request) and hasattr(message_class, "kind")
    }


@cache
def _groups() -> dict[str, tuple[ModuleType, Method | frozenset[Family]]]:
    names = (module.name for module in iter_modules(messages.__path__))
    modules = [importlib.import_module(f"{messages.__name__}.{name}") for name in names]
    return {
        group: (module, declared)
        for module in modules
        for group, declared in getattr(module, "GROUPS", {}).items()
    }
