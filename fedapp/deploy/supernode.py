"""Flower's ``flower-supernode`` for a site, quick while a run goes on.

``python -m fedapp.deploy.supernode`` takes the options of ``flower-supernode``.
"""

from __future__ import annotations

import sys
from importlib.metadata import entry_points

from fedapp import log_lines
from fedapp.deploy.certificates import warn_of_expiry
from fedapp.deploy.warm import SITE, Parts
from fedapp.start import leave_no_core


def run_flower(program: str, parts: Parts) -> None:
    """Run Flower's SuperNode or SuperLink, with the parts of ``warm`` where Flower's are known."""
    leave_no_core()
    (command,) = entry_points(group="console_scripts", name=f"flower-{program}")
    run = command.load()  # which sets up Flower's own log
    log_lines.begin(program)
    warn_of_expiry(sys.argv)
    if warm := parts.load(program):
        warm.replace_parts()
    run()


def main() -> None:
    """Run Flower's SuperNode, with the site's own pace where its parts are known."""
    run_flower("supernode", SITE)


if __name__ == "__main__":
    main()
