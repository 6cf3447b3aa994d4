"""A simulation: messages and replies passed on as they come, and one CPU for each actor."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from functools import partial, partialmethod
from queue import Queue
from threading import Event
from typing import Any

from flwr.app import Message
from flwr.server.superlink.fleet.vce import vce_api
from flwr.server.superlink.fleet.vce.backend.raybackend import RayBackend

from fedapp.deploy.warm import replace

TICK = 0.1  # seconds after which a simulation that has ended notices it
FLOWERS_CPUS = 2  # Flower's default per actor
PULL_SECONDS = 0.5  # that a simulation's ServerApp waits for a reply; Flower's asks without waiting


def simulation(grid: Any) -> None:
    """Wake the simulation for messages, and its ServerApp for replies; a CPU an actor.

    The simulation starts while its ServerApp is still loading.
    """
    validate = RayBackend._validate_client_resources
    replace(RayBackend, _validate_client_resources=partialmethod(one_cpu, validate))
    asked = Event()
    answered = Event()
    state = grid.state

    def announced(store: Callable[[Message], str | None], came: Event) -> Callable[..., str | None]:
        def store_and_announce(message: Message) -> str | None:
            stored = store(message)
            came.set()
            return stored

        return store_and_announce

    replace(state, store_message_ins=announced(state.store_message_ins, asked))
    replace(state, store_message_res=announced(state.store_message_res, answered))
    replace(grid, pull_messages=partial(wait_for_replies, answered, grid.pull_messages))
    replace(vce_api, add_messages_to_queue=partial(pass_on_messages, asked))


def pass_on_messages(
    asked: Event, state: Any, queue: Queue[Message], nodes: Any, stop: Event
) -> None:
    """Replaces ``add_messages_to_queue``, which scans all messages for every node each 0.1 s."""
    while not stop.is_set():
        asked.wait(TICK)
        asked.clear()
        with state.lock:
            for message in state.message_ins_store.values():
                if not message.metadata.delivered_at:
                    message.metadata.delivered_at = datetime.now(UTC).isoformat()
                    queue.put(message)


def wait_for_replies(
    answered: Event, pull: Callable[..., list[Message]], message_ids: Iterable[str]
) -> list[Message]:
    """Replaces a grid's ``pull_messages``: waits for a reply if there is none."""
    answered.clear()
    replies = pull(ids := list(message_ids))
    return replies or (pull(ids) if answered.wait(PULL_SECONDS) else [])


def one_cpu(backend: Any, validate: Callable[..., dict[str, Any]], config: Any) -> dict[str, Any]:
    """Replaces ``_validate_client_resources``, whose default leaves every second CPU idle."""
    resources = validate(backend, config)
    return {**resources, "num_cpus": 1} if resources["num_cpus"] == FLOWERS_CPUS else resources
