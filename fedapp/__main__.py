"""Entry point of the ``fedapp`` command; has few imports, so that it can be interrupted early."""

from __future__ import annotations

import os
import signal


def _leave(number: int, *_: object) -> None:
    signal.signal(number, signal.SIG_IGN)
    os.write(2, b"\ninterrupted: nothing has begun; run the same command again\n")
    os._exit(130)


def main() -> None:
    """Import the commands and run one; an interrupt before that exits at once."""
    for number in (signal.SIGINT, signal.SIGTERM):
        # Shell scripts ignore SIGINT for background commands.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _leave)
    from fedapp.process import leave_no_core

    leave_no_core()
    from fedapp.commands import main as run_command

    run_command()


if __name__ == "__main__":
    main()
