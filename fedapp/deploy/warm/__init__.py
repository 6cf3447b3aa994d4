"""Patches to Flower 1.41 and 1.42 that cut an exchange from 13 s to 0.1 s.

Flower polls for messages every 3 s and starts a process for each, and neither is configurable. So a
few names in its modules are replaced, by the patches in `patches.toml`. A patch knows the syntax
trees of the functions of Flower that it depends on. Where one differs, or a name is gone, Flower's
own way stays, of that patch and of those that need it: a run takes longer, and nothing else
changes. Names of patches in the environment variable ``FEDAPP_WARM_OFF``, divided by commas, turn
them off.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import inspect
import logging
import os
import textwrap
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from importlib.resources import files
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

log = logging.getLogger("fedapp")

OFF = "FEDAPP_WARM_OFF"
NOT_STARTED = "has not started"  # in the error of a process that was never ready
# Programs that are patched, and the process in whose name a patch falls back. "worker" answers all
# messages of a run, "clientapp" one; "coordinator" is a coordinator's SuperExec.
PROCESSES = {
    **dict.fromkeys(("superexec", "supernode", "worker", "clientapp"), "site"),
    **dict.fromkeys(("superlink", "coordinator"), "superlink"),
    "server": "server",
    "simulation": "simulation",
}
LISTED = tomllib.loads((files(__name__) / "patches.toml").read_text("utf-8"))


@dataclass(frozen=True, slots=True)
class Patch:
    """One thing that a deployment or simulation does in another way than Flower."""

    name: str
    title: str
    programs: tuple[str, ...]
    module: str
    factor: float = 1.0
    needs: tuple[str, ...] = ()
    loss: str = ""

    @property
    def processes(self) -> set[str]:
        """Where it can fall back."""
        return {PROCESSES[program] for program in self.programs}

    def digests(self, process: str) -> Iterator[tuple[str, list[str]]]:
        """Yield the path of each function that it depends on, and the digests that are known."""
        place = ""
        for users, text in LISTED["functions"].items():
            for word in text.split() if f"{process}.{self.name}" in users.split(",") else ():
                name, _, digests = word.partition("=")
                if digests:
                    yield f"flwr.{place}{name}", digests.split("/")
                else:
                    place = name


*PATCHES, BUNDLES = (
    Patch(name, **{"module": f"{__name__}.{name}", **fields})
    for name, fields in LISTED["patches"].items()
)


@dataclass(frozen=True, slots=True)
class FallBack:
    """A patch that does not fit the installed Flower."""

    patch: Patch
    function: str  # of Flower, that differs; or why else, as a sentence

    def __str__(self) -> str:
        cause = self.function if " " in self.function else f"{self.function} differs"
        loss = self.patch.loss or f"exchanges take {self.patch.factor:g} times as long"
        return f"flwr {version('flwr')}: {cause}; without {self.patch.title}, {loss}"


def fall_backs(process: str) -> list[FallBack]:
    """Patches of a site, superlink, server or simulation that do not work here."""
    whys, listed = causes(process), list[FallBack]()
    for patch in (patch for patch in PATCHES if process in patch.processes):
        # A program imports only its own patches; here all are.
        why = whys.get(patch.name) or _import_error(patch) or _needed(patch, whys)
        if why:
            whys[patch.name] = why
            listed.append(FallBack(patch, why))
    return listed + (bundles_read() if process == "site" and "executor" in whys else [])


def bundles_read() -> list[FallBack]:
    """Why a process a message could read a bundle's code: nothing, or one fault."""
    cause = _differs(BUNDLES, "site")
    return [FallBack(BUNDLES, cause)] if cause else []


def without_bundles(cause: object) -> str:
    """Sentence of a site that does not start."""
    return str(FallBack(BUNDLES, str(cause)))


def slow_modes(engine: str) -> list[str]:
    """What makes a run's exchanges slow at the coordinator."""
    processes = {"deployment": ("server", "superlink"), "simulation": ("simulation",)}
    return [str(one) for process in processes.get(engine, ()) for one in fall_backs(process)]


def apply(program: str, *given: Any) -> None:
    """Patch a program before it starts, with what works; the rest is logged, once a process."""
    whys = causes(PROCESSES[program])
    if unknown := _switched_off() - {patch.name for patch in PATCHES}:
        names = ", ".join(patch.name for patch in PATCHES)
        log.warning("%s must be names of %s, got %s", OFF, names, ", ".join(sorted(unknown)))
    for patch in (patch for patch in PATCHES if program in patch.programs):
        done = len(_replaced)
        cause = whys.get(patch.name) or _needed(patch, whys)
        try:
            if not cause:
                getattr(importlib.import_module(patch.module), program)(*given)
        except Exception as error:  # whatever it is, the program starts
            cause = f"{type(error).__name__}: {error}"
            while len(_replaced) > done:
                setattr(*_replaced.pop())
        if cause:
            whys[patch.name] = cause
            if program != "worker":  # which is one a run
                log.warning("%s", FallBack(patch, cause))


_replaced: list[tuple[Any, str, object]] = []  # and what it was


def replace(module: Any, **names: object) -> None:
    """Replace names in a module or class of Flower's; AttributeError if one does not exist."""
    for name, replacement in names.items():
        _replaced.append((module, name, getattr(module, name)))
        setattr(module, name, replacement)


def wrap(module: Any, **wrappers: Callable[[Any], object]) -> None:
    """Replace names by what wrappers make of what they name."""
    for name, wrapper in wrappers.items():
        replace(module, **{name: wrapper(getattr(module, name))})


def extend(module: Any, name: str, mixin: type, **attributes: object) -> None:
    """Replace a class by one that has a mixin's methods before its own."""
    wrap(module, **{name: lambda base: type(name, (mixin, base), attributes)})


def connected(patch: Callable[[Any], None], client: Any) -> Any:
    """Wraps a class of clients: patches each one that it connects."""

    def connect(*given: Any, **named: Any) -> Any:
        patch(connection := client.from_server_address(*given, **named))
        return connection

    return SimpleNamespace(from_server_address=connect)


@functools.cache
def causes(process: str) -> dict[str, str]:
    """Why patches of a process do not work, by name; read before any is applied."""
    whys = dict[str, str]()
    off = _switched_off()
    for patch in (patch for patch in PATCHES if process in patch.processes):
        cause = f"{OFF} turns {patch.name} off" if patch.name in off else ""
        if cause := cause or _differs(patch, process) or _needed(patch, whys):
            whys[patch.name] = cause
    return whys


def _needed(patch: Patch, whys: dict[str, str]) -> str:
    return next((whys[name] for name in patch.needs if name in whys), "")


def _switched_off() -> set[str]:
    return {name.strip() for name in os.environ.get(OFF, "").split(",")} - {""}


def _import_error(patch: Patch) -> str:
    try:
        importlib.import_module(patch.module)
    except Exception as error:
        return f"{type(error).__name__}: {error}".partition("\n")[0].partition(" (/")[0]
    return ""


def differing(patch: Patch, process: str) -> list[str]:
    """Functions of a patch that differ from all known versions."""
    return [name for name, digests in patch.digests(process) if digest(name) not in digests]


def _differs(patch: Patch, process: str) -> str:
    names = (name.replace(":", ".").removeprefix("flwr.") for name in differing(patch, process))
    return next(names, "")


@functools.cache
def digest(function: str) -> str:
    """First six hex digits of the SHA-256 of an installed function's syntax tree; "none" if there
    is no such function, "unreadable" if it has no source."""
    module, _, name = function.partition(":")
    try:
        source = inspect.getsource(attrgetter(name)(importlib.import_module(module)))
        tree = syntax(ast.parse(textwrap.dedent(source)))
    except (ImportError, AttributeError):
        return "none"
    except Exception:  # of whatever a Flower that nobody knows is made
        return "unreadable"
    return hashlib.sha256(tree.encode()).hexdigest()[:6]


def syntax(tree: object) -> str:
    """A syntax tree without docstrings and comments, the same for every version of Python."""
    if isinstance(tree, list):
        return f"[{','.join(map(syntax, tree))}]"
    if not isinstance(tree, ast.AST):
        return repr(tree)
    fields = dict(ast.iter_fields(tree))
    if isinstance(tree, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        fields["body"] = tree.body[ast.get_docstring(tree) is not None :]
    written = ((name, syntax(value)) for name, value in fields.items())
    shown = (f"{name}={text}" for name, text in written if text not in ("[]", "None"))
    return f"{type(tree).__name__}({','.join(shown)})"
