"""A fault of a deployment, and what strikes both its runs and its standing scores."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa

from fedapp.data.datasets import source_frame
from simulations.study import Row

SITES, COORDINATOR = ("bank", "insurer", "shop"), "coordinator"
SITE, PEER = SITES[:2]
SMALL: Row = {"parties": len(SITES), "num-boost-round": 3, "max-depth": 2, "max-bin": 32}
LIMIT = 300.0  # seconds by which a fault may delay a run
LOOK_SECONDS = 0.1
# In a line that names the site.
AT_SITE = rf"waiting for.*\b{SITE}\b|\b{SITE}\b.*(ended|SuperLink|not connected)"
Strike = Callable[[Any, ExitStack], None]  # of a Scene or Scores


class NotTriedError(Exception):
    """This machine does not allow the fault, or the run had ended before it."""


class Disturbed(Protocol):
    """What a fault disturbs: a Scene or Scores."""

    hooks: Path

    def home(self, name: str) -> Path: ...
    def restart(self, name: str) -> None: ...


def nothing(scene: Disturbed, undo: ExitStack) -> None:
    """No fault."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A row; ``phase`` may be a share of an undisturbed run's time."""

    name: str
    phase: str | float
    strike: Strike
    named: str = AT_SITE  # pattern of a line that names place or cause
    seconds: float = 0.0  # that it lasts, or until it is named if it must be, within the run
    given: Strike = nothing  # around the run
    method: str = "pax"
    settings: Row = field(default_factory=dict)  # of its run only
    noted: str = ""  # pattern of what the run's summary must have
    must: bool = False  # be named, also where the run ends as an undisturbed one


def table_with_ids() -> tuple[pa.Table, str]:
    """A small table, and its label."""
    frame, roles, _, _ = source_frame("breast-cancer")
    ids = pa.array([f"p{row}" for row in range(frame.num_rows)])
    return frame.append_column("id", ids), roles.label


def hook(scene: Disturbed, undo: ExitStack, code: str) -> None:
    """Each Python of the deployment runs some code first."""
    path = scene.hooks / "sitecustomize.py"  # which Python imports when it starts
    path.write_text(code)
    undo.callback(path.unlink)


def scripted(scene: Disturbed, undo: ExitStack, do: str, then: str, host: str = SITE) -> None:
    """Run a script, and another one later; NotTriedError if this machine does not allow it."""

    def run(script: str) -> None:
        command = ["bash", "-ec", script.format(home=scene.home(host), hooks=scene.hooks)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise NotTriedError(done.stderr.strip())

    run(do)
    undo.callback(run, then)


WRONG_CLOCK = """
import os, time
if os.environ.get("FEDAPP_NAME") == "{host}":
    time.time = lambda right=time.time: right() + 86_400 * {days}
"""


def wrong_clock(scene: Disturbed, undo: ExitStack, host: str, days: int) -> None:
    """A site's clock is wrong by some days, for fedapp, not for Flower, since it was started."""
    undo.callback(scene.restart, host)
    hook(scene, undo, WRONG_CLOCK.format(host=host, days=days))
    scene.restart(host)
