"""Entry point of the ``fedapp`` command; has few imports, so that it can be interrupted early."""

from __future__ import annotations

import os
import resource
import signal
from types import FrameType

STOPPING = (signal.SIGINT, signal.SIGTERM)
INTERRUPTED = 128 + 2  # exit status that shells give for SIGINT


def _leave(number: int, frame: FrameType | None) -> None:
    """Exit at once: nothing has begun."""
    os._exit(INTERRUPTED)


def handle_stopping(handler: signal.Handlers | object) -> None:
    """Install a handler for the signals that stop a command, unless they are ignored."""
    for number in STOPPING:
        # Shell scripts ignore SIGINT for background commands.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)  # type: ignore[arg-type]


def leave_no_core() -> None:
    """Disable core dumps of this process and its children: they would have rows and keys."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main() -> None:
    """Import the commands and run one; an interrupt before that exits quietly."""
    leave_no_core()
    handle_stopping(_leave)
    from fedapp.commands import main as run_command

    run_command()
