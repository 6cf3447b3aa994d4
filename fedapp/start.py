"""Where the ``fedapp`` command begins: with few imports, so that it can be interrupted early."""

from __future__ import annotations

import os
import resource
import signal
from types import FrameType

STOPPING = (signal.SIGINT, signal.SIGTERM)
INTERRUPTED = 128 + 2  # exit status, as shells give it for SIGINT


def _leave(number: int, frame: FrameType | None) -> None:
    """End at once: nothing has begun."""
    os._exit(INTERRUPTED)


def handle_stopping(handler: signal.Handlers | object) -> None:
    """Have a handler take the signals that stop a command, but for those that it ignores."""
    for number in STOPPING:
        # A shell's script ignores SIGINT for what it starts in the background.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)  # type: ignore[arg-type]


def leave_no_core() -> None:
    """Have this process, and those that it starts, leave no copy of their memory on the disk when
    they crash: rows and keys are in it."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main() -> None:
    """Import the commands, and run one; interrupted before that, it ends quietly."""
    leave_no_core()
    handle_stopping(_leave)
    from fedapp.cli import main as run_command

    run_command()
