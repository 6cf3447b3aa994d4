"""Entry point of the ``fedapp`` command; has few imports, so that it can be interrupted early."""

from __future__ import annotations

import os
from types import FrameType

from fedapp.process import INTERRUPTED, handle_stopping, leave_no_core


def _leave(number: int, frame: FrameType | None) -> None:
    """Exit at once: nothing has begun."""
    os._exit(INTERRUPTED)


def main() -> None:
    """Import the commands and run one; an interrupt before that exits quietly."""
    leave_no_core()
    handle_stopping(_leave)
    from fedapp.commands import main as run_command

    run_command()


if __name__ == "__main__":
    main()
