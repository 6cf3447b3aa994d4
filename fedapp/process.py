"""Signals and limits of a process; few imports, so that a command can be interrupted early."""

from __future__ import annotations

import resource
import signal

STOPPING = (signal.SIGINT, signal.SIGTERM)
INTERRUPTED = 128 + 2  # exit status that shells give for SIGINT


def handle_stopping(handler: signal.Handlers | object) -> None:
    """Install a handler for the signals that stop a command, unless they are ignored."""
    for number in STOPPING:
        # Shell scripts ignore SIGINT for background commands.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)  # type: ignore[arg-type]


def leave_no_core() -> None:
    """Disable core dumps of this process and its children: they would have rows and keys."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
