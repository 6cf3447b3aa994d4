"""Entry point of the ``fedapp`` command; has few imports, so that it can be interrupted early."""

from __future__ import annotations

from fedapp.process import handle_stopping, leave_no_core, leaving


def main() -> None:
    """Import the commands and run one; an interrupt before that exits at once."""
    handle_stopping(leaving("nothing has begun; run the same command again"))
    leave_no_core()
    from fedapp.commands import main as run_command

    run_command()


if __name__ == "__main__":
    main()
