"""The patches that `patches.toml` lists, and the functions of Flower that they depend on."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

# Programs that are patched, and the process in whose name a patch falls back. "worker" answers all
# messages of a run, "clientapp" one; "coordinator" is a coordinator's SuperExec.
PROCESSES = {
    **dict.fromkeys(("superexec", "supernode", "worker", "clientapp"), "site"),
    **dict.fromkeys(("superlink", "coordinator"), "superlink"),
    "server": "server",
    "simulation": "simulation",
}
LISTED = tomllib.loads((files("fedapp.deploy.warm") / "patches.toml").read_text("utf-8"))


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
        """Yield each function's path and the digests that are known of it."""
        place = ""
        for users, text in LISTED["functions"].items():
            for word in text.split() if f"{process}.{self.name}" in users.split(",") else ():
                name, _, digests = word.partition("=")
                if digests:
                    yield f"flwr.{place}{name}", digests.split("/")
                else:
                    place = name


def _patch(name: str, **fields: Any) -> Patch:
    return Patch(name, **{"module": f"fedapp.deploy.warm.{name}", **fields})


*PATCHES, BUNDLES = (_patch(name, **fields) for name, fields in LISTED["patches"].items())
