"""Flower's ``flower-superlink`` for a coordinator, which holds a question until there is an answer.

``python -m fedapp.deploy.superlink`` takes the options of ``flower-superlink``.
"""

from __future__ import annotations

from fedapp.deploy.supernode import run_flower
from fedapp.deploy.warm import SUPERLINK


def main() -> None:
    """Run Flower's SuperLink, which holds questions where its parts are known."""
    run_flower("superlink", SUPERLINK)


if __name__ == "__main__":
    main()
