"""What the ServerApp's process does sooner than Flower's: it fetches a reply that was announced."""

from __future__ import annotations

from functools import partial
from typing import Any

from fedapp.deploy.warm import BACKOFF, SERVER


def replace_parts() -> None:
    """Have Flower's grid use these parts, where it is known."""
    if SERVER.are_known():
        from flwr.supercore.inflatable.inflatable_utils import pull_objects
        from flwr.superlink.grid import http_grid

        grid: Any = http_grid
        grid.pull_objects = partial(pull_objects, initial_backoff=BACKOFF)
