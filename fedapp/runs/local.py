"""The local engine: a run in this process, with a site for each simulated party."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import MappingProxyType
from typing import Any
from uuid import uuid4

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

from fedapp.client_app import SiteApp
from fedapp.run_files import OnRound
from fedapp.run_folder import RunFolder
from fedapp.sections import flatten
from fedapp.settings import Settings
from fedapp.site.store import LiveStores
from strategies.method import TreeStrategy
from strategies.run import train

SERVER_NODE = 1
PULL_SECONDS = 0.05  # that a pull waits for all replies; most exchanges take less


class LocalGrid(Grid):
    """A Flower Grid whose nodes are threads of this process, one for each context.

    By default the ``client_app`` keeps the sites' states in memory.
    """

    def __init__(self, contexts: Iterable[Context], client_app: ClientApp | None = None) -> None:
        self._contexts = {context.node_id: context for context in contexts}
        self._client_app = client_app or SiteApp(stores=LiveStores())
        self._pool = ThreadPoolExecutor(max_workers=len(self._contexts))
        self._running: dict[str, Future[Message]] = {}
        TaskIdentity.run_id = 0
        TaskIdentity.node_id = SERVER_NODE
        TaskIdentity.task_id = 0

    def set_run(self, run: Run) -> None:
        """Do nothing: there is only one run."""

    @property
    def run(self) -> Run:
        """The only run."""
        return Run.create_empty(TaskIdentity.run_id)

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Create a message, like Flower's grids."""
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
        """Replies: all of them, or those that have arrived after ``PULL_SECONDS``."""
        futures = {name: self._running[name] for name in message_ids if name in self._running}
        done, _ = wait(futures.values(), PULL_SECONDS)
        ids = [message_id for message_id, future in futures.items() if future in done]
        return [self._running.pop(message_id).result() for message_id in ids]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Push, wait, pull."""
        ids = list(self.push_messages(messages))
        return [self._running.pop(message_id).result(timeout) for message_id in ids]

    def write_states(self) -> None:
        """Write the sites' states to the disk."""
        if isinstance(self._client_app, SiteApp):
            self._client_app.stores.write()

    def close(self) -> None:
        """End the threads, without waiting for those that hang."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def simulated_contexts(settings: Settings) -> list[Context]:
    """Contexts of simulated parties, like those of Flower's simulation."""
    shares = range(settings.parties)
    nodes = ({"partition-id": share, "num-partitions": settings.parties} for share in shares)
    return site_contexts(nodes, flatten(settings.as_config()))


def site_contexts(
    nodes: Iterable[Mapping[str, Any]], run_config: Mapping[str, Any] = MappingProxyType({})
) -> list[Context]:
    """Contexts of parties that have node configs, like those of SuperNodes."""
    return [
        Context(
            run_id=0,
            node_id=node_id,
            node_config=dict(node),
            state=RecordDict(),
            run_config=dict(run_config),
        )
        for node_id, node in enumerate(nodes, start=SERVER_NODE + 1)
    ]


def run_local(
    settings: Settings,
    contexts: Iterable[Context] | None = None,
    on_round: OnRound | None = None,
    client_app: ClientApp | None = None,
    strategy: TreeStrategy[Any] | None = None,
) -> RunFolder:
    """Train in this process; ``on_round`` is called after every round, in the caller's thread.
    ``contexts`` has one for each party, by default shares of the table that ``data`` names.
    ``strategy`` takes the place of the method's own, of the same settings."""
    grid = LocalGrid(contexts or simulated_contexts(settings), client_app)
    try:
        return train(grid, settings, on_round, grid.write_states, strategy=strategy)
    finally:
        grid.close()
