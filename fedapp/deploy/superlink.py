"""Flower's ``flower-superlink`` for a coordinator, which holds a question until there is an answer.

``python -m fedapp.deploy.superlink`` takes the options of ``flower-superlink``.
"""

from __future__ import annotations

import sys
from importlib.metadata import entry_points

from fedapp import log_lines
from fedapp.deploy.certificates import warn_of_expiry
from fedapp.deploy.warm import SUPERLINK
from fedapp.start import leave_no_core


def main() -> None:
    """Run Flower's SuperLink, which holds questions where its parts are known."""
    leave_no_core()
    (command,) = entry_points(group="console_scripts", name="flower-superlink")
    run = command.load()  # which sets up Flower's own log
    log_lines.begin("superlink")
    warn_of_expiry(sys.argv)
    if warm := SUPERLINK.load("superlink"):
        warm.replace_parts()
    run()


if __name__ == "__main__":
    main()
