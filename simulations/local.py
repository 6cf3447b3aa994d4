"""Runs in this process: the messages of Flower's apps handed to threads, one a party."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any
from uuid import uuid4

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from fedapp.client_app import SiteApp
from fedapp.config import Settings, flatten
from fedapp.run_folder import RunFolder
from fedapp.server_app import train
from fedapp.site.stores import LiveStores
from fedapp.watch import OnRound

SERVER_NODE = 1
PULL_SECONDS = 0.01  # that a pull waits for a reply where none is there


class LocalGrid(Grid):
    """A Flower Grid whose nodes are threads of this process.

    Parameters
    ----------
    contexts : one a node; ``node_config`` says which table it has.
    client_app : answers the messages; by default one whose sites' states stay in this process.
    """

    def __init__(self, contexts: Iterable[Context], client_app: ClientApp | None = None) -> None:
        self._contexts = {context.node_id: context for context in contexts}
        self._client_app = client_app or SiteApp(stores=LiveStores())
        self._pool = ThreadPoolExecutor(max_workers=len(self._contexts))
        self._running: dict[str, Future[Message]] = {}
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 0, SERVER_NODE, 0

    def set_run(self, run: Run) -> None:
        """There is one run only."""

    @property
    def run(self) -> Run:
        """There is one run only."""
        return Run.create_empty(TaskIdentity.run_id)

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """As in Flower's grids."""
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """All nodes."""
        return list(self._contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Hand messages to the threads of their nodes."""
        ids = []
        for message in messages:
            message_id = str(uuid4())
            message.metadata.__dict__["_message_id"] = message_id
            context = self._contexts[message.metadata.dst_node_id]
            self._running[message_id] = self._pool.submit(self._client_app, message, context)
            ids.append(message_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Replies that are there, or come within a moment."""
        asked = {one: self._running[one] for one in message_ids if one in self._running}
        done, _ = wait(asked.values(), PULL_SECONDS, FIRST_COMPLETED)
        found = [message_id for message_id, reply in asked.items() if reply in done]
        return [self._running.pop(message_id).result() for message_id in found]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Push, wait, pull."""
        ids = list(self.push_messages(messages))
        return [self._running.pop(message_id).result(timeout) for message_id in ids]

    def write_states(self) -> None:
        """Put what sites have in memory on the disk."""
        if isinstance(self._client_app, SiteApp):
            self._client_app.stores.write()

    def close(self) -> None:
        """End the threads, without waiting for one that hangs."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def simulated_contexts(settings: Settings) -> list[Context]:
    """Contexts of simulated parties, as Flower's simulation makes them."""
    run_config = flatten(settings.as_config())
    return [
        Context(
            run_id=0,
            node_id=SERVER_NODE + 1 + share,
            node_config={"partition-id": share, "num-partitions": settings.parties},
            state=RecordDict(),
            run_config=run_config,
        )
        for share in range(settings.parties)
    ]


def site_contexts(nodes: Iterable[Mapping[str, Any]]) -> list[Context]:
    """Contexts of parties with tables of their own, as SuperNodes make them.

    Parameters
    ----------
    nodes : the node config of each.
    """
    return [
        Context(
            run_id=0, node_id=node_id, node_config=dict(node), state=RecordDict(), run_config={}
        )
        for node_id, node in enumerate(nodes, start=SERVER_NODE + 1)
    ]


def run_local(
    settings: Settings,
    contexts: Iterable[Context] | None = None,
    on_round: OnRound | None = None,
    client_app: ClientApp | None = None,
) -> RunFolder:
    """Train in this process.

    Parameters
    ----------
    contexts : one a party; by default shares of the table that ``data`` names.
    on_round : called after every round, in the caller's thread.
    client_app : see ``LocalGrid``.

    Raises
    ------
    StoppedError : ``on_round`` stopped the run.
    FedappError : the run cannot go on.
    """
    grid = LocalGrid(contexts or simulated_contexts(settings), client_app)
    try:
        return train(grid, settings, on_round, grid.write_states)
    finally:
        grid.close()
