"""Patches of the ServerApp's process.

In a deployment, messages carry their objects and announced replies are fetched sooner. In a
simulation, messages are forwarded sooner and every actor takes one CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial, partialmethod
from queue import Queue
from threading import Event
from types import SimpleNamespace
from typing import Any, cast

from flwr.app import Message
from flwr.serverapp import Grid

from fedapp.deploy.warm import BACKOFF, SERVER, SIMULATION, SUPERLINK, replace

TICK = 0.02  # polling interval of a simulation in seconds; 0.1 in Flower
FLOWERS_CPUS = 2  # Flower's default per actor


def replace_parts(grid: Grid) -> None:
    """Patch Flower's grid, or the simulation that it belongs to."""
    engine = type(grid).__name__
    if engine == "HttpGrid" and (warm := SERVER.load("supernode")):
        _carry_objects(grid, warm.ObjectCarrier(), warm.contents_of)
    if engine == "InMemoryGrid" and SIMULATION.load("serverapp"):
        # The simulation starts while the ServerApp is still loading.
        from flwr.server.superlink.fleet.vce import vce_api
        from flwr.server.superlink.fleet.vce.backend.raybackend import RayBackend

        validate = RayBackend._validate_client_resources
        replace(vce_api, add_messages_to_queue=partial(poll_often, vce_api.add_messages_to_queue))
        replace(RayBackend, _validate_client_resources=partialmethod(one_cpu, validate))


def slow_modes(engine: str) -> list[str]:
    """Why a run's exchanges are slow: no sentence, or one."""
    parts = {"deployment": (SERVER, SUPERLINK), "simulation": (SIMULATION,)}.get(engine, ())
    return [text for one in parts if (text := one.slow_mode())][:1]


def _carry_objects(grid: Any, carrier: Any, contents_of: Callable[..., Any]) -> None:
    from flwr.supercore.inflatable.inflatable_utils import pull_objects
    from flwr.superlink.grid import http_grid

    push = grid._try_push_messages
    carrier.serve(grid._runtime_client)

    def push_with_objects(run_id: int, messages: Iterable[Message]) -> list[str]:
        sent = list(messages)
        carrier.find = contents_of(sent).get
        return cast(list[str], push(run_id, sent))

    grid._try_push_messages = push_with_objects
    replace(http_grid, pull_objects=partial(pull_objects, initial_backoff=BACKOFF))


def one_cpu(backend: Any, validate: Callable[..., dict[str, Any]], config: Any) -> dict[str, Any]:
    """Replaces ``_validate_client_resources``, whose default leaves every second CPU idle."""
    resources = validate(backend, config)
    return {**resources, "num_cpus": 1} if resources["num_cpus"] == FLOWERS_CPUS else resources


def poll_often(
    look: Callable[..., None], state: Any, queue: Queue[Message], nodes: Any, stop: Event
) -> None:
    """Replaces ``add_messages_to_queue``, which scans all messages for every node."""

    def addressed() -> set[int]:
        metadata = (message.metadata for message in list(state.message_ins_store.values()))
        return {each.dst_node_id for each in metadata if not each.delivered_at}

    often = SimpleNamespace(is_set=stop.is_set, wait=lambda _: stop.wait(TICK))
    look(state, queue, SimpleNamespace(keys=addressed), often)
