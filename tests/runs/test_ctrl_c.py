"""Ctrl-C on a terminal ends every command in the same sentence and status, wherever it comes."""

import contextlib
import ctypes
import importlib
import re
import signal
import subprocess
import sys

import pytest

from fedapp.process import interruptible, is_interrupted, raise_interrupt
from fedapp.runs.local import run_local
from fedapp.settings import load_settings
from tests.terminal import READY, Terminal

SMALL = [
    word for pair in ("num-boost-round=3", "max-depth=2", "parties=2") for word in ("-c", pair)
]
KEYS = ["-c", "secureboost.key-bits=256", "-c", "secureboost.insecure-small-key=true"]
PAX = ["run", "pax", *SMALL, "-c", "run-dir={new}"]
ALONE = [*PAX, "--baselines"]
SECUREBOOST = ["run", "secureboost", *SMALL, *KEYS, "-c", "run-dir={new}"]
NOTHING, RESUMES = "nothing was saved yet", r"saved up to \w+ \d+ in .*; to resume:"
COMPLETE, AGAIN = "the run is complete and saved in", "run the same command again"
PUSH, XGBOOST = "fedapp.runs.local:push_messages", "xgboost.core"
# Stage: the function that runs, its how many-th call, the command, and what it prints.
STAGES = {
    "words": ("fedapp.arguments:parse_overrides", 1, PAX, NOTHING),
    "reading": (PUSH, 1, PAX, NOTHING),
    "matching": (PUSH, 4, SECUREBOOST, NOTHING),
    "training": (PUSH, 7, PAX, RESUMES),
    "baselines": ("fedapp.runs.baselines:train_boosted", 1, ALONE, COMPLETE),
    "rows for XGBoost": (f"{XGBOOST}:_next_wrapper", 1, ALONE, COMPLETE),
    "a round of XGBoost": (f"{XGBOOST}:update", 2, ALONE, COMPLETE),
    "XGBoost's memory": (f"{XGBOOST}:__del__", 1, ALONE, COMPLETE),
    "results": ("fedapp.report.summary:print_summary", 1, PAX, COMPLETE),
    "page": ("fedapp.report:write_report", 1, ["report", "{run}"], AGAIN),
    "compare": (PUSH, 7, ["compare", "pax", "bagging", *SMALL, "--output", "{new}"], "finished"),
    "tune": (PUSH, 7, ["tune", "pax", "--runs", "2", *SMALL, "--output", "{new}"], "finished"),
    "describe": (PUSH, 2, ["describe", "-c", "parties=2", "-c", "run-dir={new}"], NOTHING),
    "audit": (PUSH, 5, ["audit", "--quick", "{run}"], "the audit was not written"),
    "predict": (
        "fedapp.runs.predict:write_rows",
        1,
        ["predict", "{run}", "--data", "breast-cancer", "--output", "{new}.csv"],
        AGAIN,
    ),
    "serve": ("uvicorn.server:main_loop", 1, ["serve", "{run}", "--port", "0"], "the server has"),
}


@pytest.fixture(scope="module")
def terminal():
    opened = Terminal()
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run."""
    folder = tmp_path_factory.mktemp("finished")
    given = {"num_boost_round": 3, "max_depth": 2, "parties": 2, "run_dir": str(folder / "run")}
    return run_local(load_settings({**given, "strategy": "pax", "data": "breast-cancer"})).path


@pytest.mark.by_default("words", "matching", "training", "rows for XGBoost", "XGBoost's memory")
@pytest.mark.parametrize("stage", STAGES)
def test_ctrl_c_ends_a_command_in_one_sentence(stage, terminal, tmp_path, request):
    spot, number, words, told = STAGES[stage]
    places = {"new": str(tmp_path / "new"), "run": ""}
    if "{run}" in words:
        places["run"] = str(request.getfixturevalue("finished"))
    status, text = terminal.interrupted(spot, number, *(word.format(**places) for word in words))
    assert READY in text
    said = re.findall(r"^interrupted: (.*)$", text, re.MULTILINE)
    assert [re.match(told, each) is not None for each in said] == [True], text
    assert not re.search(r"Traceback|Exception ignored|\w+Error\b|\[bt\]|Aborted|\?\[", text)
    assert status == 130


class Importing:
    """Presses Ctrl-C while a module is looked for."""

    def find_spec(self, name, *_):
        signal.raise_signal(signal.SIGINT)
        PASSED.append(name)


class Freed:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)
        PASSED.append("freed")


PASSED = []


def _import():
    with contextlib.suppress(ImportError):
        importlib.import_module("fedapp_has_no_such_module")


def _call_back():
    """Where the library is none that is known to call back."""
    ctypes.CFUNCTYPE(None)(lambda: signal.raise_signal(signal.SIGINT))()


@pytest.fixture
def _interrupts():
    """As from a terminal: what a shell starts in the background ignores interrupts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


LATE = """import signal, sys
class Late:
    def __del__(self, press=signal.raise_signal, number=int(signal.SIGINT)):
        press(number)
sys.late, sys.argv = Late(), ["fedapp", "--version"]
from fedapp.__main__ import main
main()"""


@pytest.mark.usefixtures("_interrupts")
def test_ctrl_c_while_python_ends_leaves_the_status():
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("fedapp ")


@pytest.mark.usefixtures("_interrupts")
@pytest.mark.parametrize(
    ("call", "passed"),
    [(_import, ["fedapp_has_no_such_module"]), (Freed, ["freed"]), (_call_back, [])],
)
def test_an_interrupt_waits_for_what_must_not_be_left(call, passed, monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [Importing(), *sys.meta_path])
    PASSED.clear()
    before = sys.unraisablehook
    with pytest.raises(KeyboardInterrupt), interruptible():  # noqa: PT012
        call()
        assert is_interrupted()
        raise_interrupt()
    assert passed == PASSED
    assert not is_interrupted()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert sys.unraisablehook is before
