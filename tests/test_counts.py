"""What a message costs, in numbers that no load changes: calls, system calls, bytes.

``COSTS`` has for each method what a message costs at a party and at the server, as means over the
messages of a run whose imports and caches are warm. Parties keep their states on the disk, like
sites. A change that costs 15 % fails here, on a busy machine too; after one that saves as much
``python -m tests.test_counts`` prints the lines of the table.
"""

import sys
import tempfile
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
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
ON_TIME += ("fedapp.run_folder.NOTED", "fedapp.run_folder.BRIEF")
# C functions by what they are counted as.
FILES = {"open", "mkdir", "rename", "unlink", "remove", "scandir", "listdir", "fsync", "rmdir"}
FILES |= {"stat", "lstat", "fstat", "flock", "chmod", "write", "pwrite", "ftruncate", "fdopen"}
ENCODES = {"tobytes", "join", "encode", "dumps", "c_make_encoder", "hex", "fromhex", "loads"}


@dataclass(slots=True)
class Costs:
    """Of a message, at one side."""

    calls: float = 0  # of this project's functions
    c_calls: float = 0  # of functions in C, from wherever
    files: float = 0  # operations on files and folders
    encodes: float = 0  # and decodes: of JSON, texts, hex digits, and of arrays as bytes
    bytes: float = 0  # written


class Counter:
    """Counts what the main thread does, at a party or at the server."""

    def __init__(self):
        self.costs = {"party": Costs(), "server": Costs()}
        self.at = "server"
        self.n_messages = 0
        self._written = written()

    def enter(self, side):
        """From here on, another side is at work."""
        before, self._written = self._written, written()
        self.costs[self.at].bytes += self._written - before
        self.at = side

    def profile(self, frame, event, argument):
        """For ``sys.setprofile``."""
        costs = self.costs[self.at]
        if event == "call":
            code = frame.f_code
            # Python 3.12 calls no comprehensions; generators are called for each element.
            if code.co_filename.startswith(OURS) and not code.co_name.startswith("<"):
                costs.calls += 1
        elif event == "c_call":
            name = argument.__name__
            costs.c_calls += 1
            if name in ENCODES:
                costs.encodes += 1
            elif name in FILES and (
                argument.__module__ in ("posix", "io", "_io", "fcntl") or name == "write"
            ):
                costs.files += 1

    @contextmanager
    def counting(self):
        """Count during the block."""
        sys.setprofile(self.profile)
        try:
            yield
        finally:
            sys.setprofile(None)
            self.enter("server")


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
    counter = Counter()
    for is_warm in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            monkeypatch.setenv("FEDAPP_HOME", folder)
            settings = load_settings({**PLANS[plan].settings, "run-dir": f"{folder}/run"})
            app = CountedApp()
            app.counter = counter = Counter()
            grid = LocalGrid(simulated_contexts(settings), app)
            grid._pool = Serial()
            if is_warm:
                with counter.counting():
                    train(grid, settings)
            else:
                train(grid, settings)
    for costs in counter.costs.values():
        for each in fields(costs):
            setattr(costs, each.name, round(getattr(costs, each.name) / counter.n_messages))
    return counter.costs["party"], counter.costs["server"]


COSTS = {
    # plan: at a party, at the server
    "pax": (Costs(293, 877, 13, 13, 22289), Costs(218, 1006, 3, 17, 1220)),
    "fedxgbllr": (Costs(412, 3000, 14, 50, 47060), Costs(267, 1732, 5, 28, 5355)),
    "bagging": (Costs(375, 1930, 14, 63, 38987), Costs(322, 1560, 6, 29, 2538)),
    "secureboost": (Costs(1339, 6002, 21, 118, 36878), Costs(155, 883, 4, 22, 564)),
    "federated-forest, encoded": (Costs(480, 1979, 18, 130, 26774), Costs(186, 1036, 6, 28, 1190)),
}


@pytest.mark.by_default("pax", "federated-forest, encoded")
@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="other versions count other calls")
@pytest.mark.parametrize("plan", COSTS)
def test_a_message_costs_what_it_did(plan, monkeypatch):
    for due, costs in zip(COSTS[plan], costs_of(plan, monkeypatch), strict=True):
        for each in fields(costs):
            before, now = getattr(due, each.name), getattr(costs, each.name)
            assert abs(now - before) <= TOLERANCE * before + 1, (each.name, before, now)


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        for name in sys.argv[1:] or COSTS:
            values = [", ".join(map(str, astuple(each))) for each in costs_of(name, patch)]
            print(f'    "{name}": (Costs({values[0]}), Costs({values[1]})),', flush=True)
