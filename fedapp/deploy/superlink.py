"""Flower's ``flower-superlink`` for a coordinator, which holds a question until there is an answer.

``python -m fedapp.deploy.superlink`` takes the options of ``flower-superlink``.
"""

from __future__ import annotations

import sys

from flwr.superlink.cli import flower_superlink

from fedapp import log_lines
from fedapp.deploy.certificates import warn_of_expiry
from fedapp.deploy.warm import SUPERLINK
from fedapp.start import leave_no_core


def main() -> None:
    """Run Flower's SuperLink, which holds questions where its parts are known."""
    leave_no_core()
    log_lines.begin("superlink")
    warn_of_expiry(sys.argv)
    if SUPERLINK.are_known():
        from fedapp.deploy.warm.superlink import replace_parts

        replace_parts()
    flower_superlink()


if __name__ == "__main__":
    main()
