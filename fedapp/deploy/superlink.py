"""Flower's ``flower-superlink`` for a coordinator, which holds a question until there is an answer.

``python -m fedapp.deploy.superlink`` takes the options of ``flower-superlink``.
"""

from __future__ import annotations

from flwr.superlink.cli import flower_superlink

from fedapp.deploy.warm import SUPERLINK
from fedapp.start import leave_no_core


def main() -> None:
    """Run Flower's SuperLink, which holds questions where its parts are known."""
    leave_no_core()
    if SUPERLINK.are_known():
        from fedapp.deploy.warm.superlink import replace_parts

        replace_parts()
    flower_superlink()


if __name__ == "__main__":
    main()
