"""Commands on a terminal, where a person presses Ctrl-C at a chosen call of a function.

As a program it imports what commands do, once, and forks a command for each line of JSON on its
standard input. ``Terminal`` is that program, for a test.
"""

import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import termios
import time

from fedapp.home import app_folder

READY = "@calls@"
MOST_SECONDS = 300  # of a command
HEARS, TOLD = socket.socketpair()  # of a signal that has come
TOLD.setblocking(False)
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")


class Terminal:
    """A process that forks commands."""

    def __init__(self):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.terminal"],
            cwd=app_folder(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def interrupted(self, spot, number, *words):
        """Press Ctrl-C, twice, in the ``number``-th call of ``module:function`` by a command; its
        status, and what its terminal shows."""
        assert self._process.stdin
        assert self._process.stdout
        print(json.dumps([spot, number, *map(str, words)]), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def close(self):
        """End the process."""
        self._process.communicate()


def _wait_at(spot, number):
    """Print ``READY`` at a call in the main thread, and wait there until a signal has come."""
    module, function = spot.split(":")
    n_calls = 0

    def profile(frame, event, _):
        nonlocal n_calls
        if event != "call" or frame.f_code.co_name != function:
            return
        n_calls += frame.f_globals.get("__name__") == module
        if n_calls == number:
            sys.setprofile(None)
            signal.set_wakeup_fd(TOLD.fileno(), warn_on_full_buffer=False)
            os.write(1, READY.encode())
            HEARS.recv(1)

    sys.setprofile(profile)


def _answer(spot, number, *words):
    child, terminal = pty.fork()
    if not child:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _wait_at(spot, number)
        sys.argv = ["fedapp", *words]
        from fedapp.__main__ import main

        main()
        sys.exit()
    modes = termios.tcgetattr(terminal)
    modes[3] |= termios.NOFLSH  # Ctrl-C drops nothing that is printed before it
    termios.tcsetattr(terminal, termios.TCSANOW, modes)
    text, n_presses, ends = b"", 0, time.monotonic() + MOST_SECONDS
    while True:
        if not select.select([terminal], [], [], max(0.0, ends - time.monotonic()))[0]:
            os.kill(child, signal.SIGKILL)  # a command that does not end must not hold the tests
            text += f"@not ended after {MOST_SECONDS} s@".encode()
            break
        try:
            text += (read := os.read(terminal, 65536))
        except OSError:  # the other end is closed
            break
        if not read:
            break
        if n_presses < 2 and (READY, "^C")[n_presses].encode() in text:
            n_presses += 1
            os.write(terminal, b"\x03")
    os.close(terminal)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return status, ESCAPES.sub("", text.decode(errors="replace"))


def _main():
    import onnx  # noqa: F401
    import pandas  # noqa: F401
    import uvicorn.server  # noqa: F401
    import xgboost  # noqa: F401

    import fedapp.api
    import fedapp.commands
    import fedapp.report.page
    import fedapp.runs.baselines
    import fedapp.runs.local  # noqa: F401
    import strategies.drive

    strategies.drive.CHECKPOINT_SECONDS = 0.0  # a brief run too has checkpoints
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(_answer(*asked)), flush=True)


if __name__ == "__main__":
    _main()
