"""What the ServerApp's process does in other ways than Flower's.

Between organisations messages carry their objects, and a reply that was announced is fetched
sooner. In a simulation messages are passed on sooner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from queue import Queue
from threading import Event
from types import SimpleNamespace
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from fedapp.deploy.warm import BACKOFF, SERVER, SIMULATION, SUPERLINK, replace

TICK = 0.02  # seconds between looks for messages in a simulation; 0.1 in Flower


def replace_parts(grid: Grid) -> None:
    """Have Flower's grid, or the simulation that it belongs to, use these parts."""
    engine = type(grid).__name__
    if engine == "HttpGrid" and (carried := SERVER.load("carried")):
        _carry_objects(grid, carried.Carrier(), carried.contents_of)
    if engine == "InMemoryGrid" and SIMULATION.load("serverapp"):
        from flwr.server.superlink.fleet.vce import vce_api

        replace(vce_api, add_messages_to_queue=partial(ticking, vce_api.add_messages_to_queue))


def slow_modes(engine: str) -> list[str]:
    """Why a run's exchanges take longer than they need to: none, or one sentence."""
    parts = {"deployment": (SERVER, SUPERLINK), "simulation": (SIMULATION,)}.get(engine, ())
    return [text for one in parts if (text := one.slow_mode())][:1]


def _carry_objects(grid: Any, carrier: Any, contents_of: Callable[..., Any]) -> None:
    """Replace what a grid sends and fetches messages with."""
    from flwr.supercore.inflatable.inflatable_utils import pull_objects
    from flwr.superlink.grid import http_grid

    push = grid._try_push_messages
    carrier.serve(grid._runtime_client)

    def push_with_objects(run_id: int, messages: Iterable[Message]) -> list[str]:
        sent = list(messages)
        carrier.find = contents_of(sent).get
        pushed: list[str] = push(run_id, sent)
        return pushed

    grid._try_push_messages = push_with_objects
    replace(http_grid, pull_objects=partial(pull_objects, initial_backoff=BACKOFF))


def ticking(
    look: Callable[..., None], state: Any, queue: Queue[Message], nodes: Any, stop: Event
) -> None:
    """Stands for ``add_messages_to_queue``, which waits for ``stop`` between its looks."""
    often = SimpleNamespace(is_set=stop.is_set, wait=lambda _: stop.wait(TICK))
    look(state, queue, nodes, often)
