"""What a message costs, in numbers that no load changes: calls, system calls, bytes.

``COSTS`` has for a method of each family what a message costs at a party and at the server, as
means over the messages of a run whose imports and caches are warm. Parties keep their states on the
disk, like sites. A change that costs 15 % fails here, on a busy machine too.
"""

import sys
import tempfile
from concurrent.futures import Future
from importlib import import_module
from pathlib import Path

import pytest

from fedapp.client_app import SiteApp
from fedapp.runs.local import LocalGrid, simulated_contexts
from fedapp.settings import load_settings
from simulations.reference import PLANS
from strategies.run import train

OURS = tuple(f"{Path(__file__).parents[1] / room}/" for room in ("fedapp", "strategies", "clients"))
TOLERANCE = 0.15
ON_TIME = ("strategies.drive.CHECKPOINT_SECONDS", "strategies.delivery.FLUSH_SECONDS")
ON_TIME += ("strategies.flower.NOTED",)
# Of a message, at one side: calls of this project's functions and of C's from wherever, operations
# on files and folders, encodes and decodes (of JSON, texts, hex digits, arrays), bytes written.
COUNTED = ("calls", "c_calls", "files", "encodes", "bytes")
# C functions by what they are counted as.
FILES = {"open", "mkdir", "rename", "unlink", "remove", "scandir", "listdir", "fsync", "rmdir"}
FILES |= {"stat", "lstat", "fstat", "flock", "chmod", "write", "pwrite", "ftruncate", "fdopen"}
ENCODES = {"tobytes", "join", "encode", "dumps", "c_make_encoder", "hex", "fromhex", "loads"}


class Counter:
    """Counts what the main thread does, at a party or at the server."""

    def __init__(self):
        self.costs = {side: dict.fromkeys(COUNTED, 0) for side in ("party", "server")}
        self.at = "server"
        self.n_messages = 0
        self._written = written()

    def enter(self, side):
        """From here on, another side is at work."""
        before, self._written = self._written, written()
        self.costs[self.at]["bytes"] += self._written - before
        self.at = side

    def profile(self, frame, event, argument):
        """For ``sys.setprofile``."""
        costs = self.costs[self.at]
        if event == "call":
            code = frame.f_code
            # Python 3.12 calls no comprehensions; generators are called for each element.
            costs["calls"] += code.co_filename.startswith(OURS) and code.co_name[0] != "<"
        elif event == "c_call":
            name, module = argument.__name__, argument.__module__
            costs["c_calls"] += 1
            costs["encodes"] += name in ENCODES
            is_file = module in ("posix", "io", "_io", "fcntl") or name == "write"
            costs["files"] += name in FILES and is_file


def written():
    """Bytes that this process has written so far, also to pipes."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["wchar"])


class Serial:
    """Calls at once, in the caller's thread."""

    def submit(self, function, *arguments):
        future = Future()
        future.set_result(function(*arguments))
        return future

    def shutdown(self, **options):
        """Nothing."""


class CountedApp(SiteApp):
    """Sites whose states are on disk between messages, as at real sites."""

    counter: Counter

    def __call__(self, message, context):
        self.counter.enter("party")
        reply = super().__call__(message, context)
        self.counter.enter("server")
        self.counter.n_messages += 1
        assert not reply.has_error(), reply.error
        return reply


def costs_of(plan, monkeypatch):
    """What a message of a plan costs, at a party and at the server."""
    for name in ON_TIME:  # what is done now and then is not done again within the run
        monkeypatch.setattr(name, 1e9)
    monkeypatch.setattr("fedapp.kernels.n_cores", lambda: 1)  # others are reached through pipes
    monkeypatch.setattr(import_module("fedapp.metrics.intervals"), "N_DRAWS", 500)
    for is_warm in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            monkeypatch.setenv("FEDAPP_HOME", folder)
            settings = load_settings({**PLANS[plan].settings, "run-dir": f"{folder}/run"})
            app = CountedApp()
            app.counter = counter = Counter()
            grid = LocalGrid(simulated_contexts(settings), app)
            grid._pool = Serial()
            sys.setprofile(counter.profile if is_warm else None)
            try:
                train(grid, settings)
            finally:
                sys.setprofile(None)
                counter.enter("server")
    return [
        tuple(round(each / counter.n_messages) for each in costs.values())
        for costs in counter.costs.values()
    ]


COSTS = {
    # plan: at a party, at the server
    "pax": ((358, 980, 14, 14, 22336), (247, 1133, 3, 17, 1222)),
    "federated-forest, encoded": ((515, 2279, 20, 130, 27099), (199, 1092, 6, 28, 1201)),
}


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="other versions count other calls")
@pytest.mark.parametrize("plan", COSTS)
def test_a_message_costs_what_it_did(plan, monkeypatch):
    found = costs_of(plan, monkeypatch)
    for due, costs in zip(COSTS[plan], found, strict=True):
        for name, before, now in zip(COUNTED, due, costs, strict=True):
            assert abs(now - before) <= TOLERANCE * before + 1, (name, found)
