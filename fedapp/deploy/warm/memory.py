"""A SuperLink's objects in memory, and one transaction at a time in its database."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from threading import RLock
from typing import Any

from flwr.server.superlink.linkstate import SqlLinkState, linkstate_factory
from flwr.supercore.corestate.in_memory_corestate import InMemoryCoreState, ObjectPushSession
from flwr.supercore.date import now
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.sql_mixin import SqlMixin
from flwr.supercore.state.schema.corestate_models import Task
from flwr.superlink import config_loader
from sqlalchemy import update
from sqlalchemy.orm import Session

from fedapp.deploy.warm import replace, wrap

# Held during a transaction, and while the objects in memory change.
TRANSACTION = RLock()
Transactions = Callable[[SqlMixin], AbstractContextManager[Session]]


def serialized(session: Transactions) -> Transactions:
    """Replaces ``SqlMixin.session``: a transaction starts when the previous one has ended."""

    # SQLite itself would poll for the end of the previous one, up to 0.1 s apart.
    @contextmanager
    def locked(state: SqlMixin) -> Iterator[Session]:
        with TRANSACTION, session(state) as open_session:
            yield open_session

    return locked


class LinkStateWithoutObjects(SqlLinkState):
    """Keeps runs, nodes, tasks and messages in the database, but objects in memory.

    Objects are deleted as soon as a message is fetched. If the SuperLink dies before, the message
    counts as lost and is sent again.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._object_push_sessions: dict[str, ObjectPushSession] = {}
        self._object_push_session_by_root: dict[str, str] = {}
        self._lock_object_push_sessions = TRANSACTION

    def initialize(self, *given: Any, **named: Any) -> list[str]:
        """Open the database. Tasks run on, whose heartbeats nobody could hear before."""
        tables = super().initialize(*given, **named)
        tasks = update(Task).where(Task.running_at.is_not(None), Task.active_until.is_not(None))
        with self.session() as session:
            session.execute(tasks.values(active_until=now() + timedelta(minutes=1)))  # Flower's
        return tables

    start_session = InMemoryCoreState.start_session
    delete_sessions_in_run = InMemoryCoreState.delete_sessions_in_run
    preregister_object_tree = InMemoryCoreState.preregister_object_tree
    store_object = InMemoryCoreState.store_object
    get_object = InMemoryCoreState.get_object
    _cleanup_push_session = InMemoryCoreState._cleanup_push_session


def superlink() -> None:
    """Keep objects out of the database, and let its transactions queue."""
    wrap(SqlMixin, session=serialized)
    replace(linkstate_factory, SqlLinkState=LinkStateWithoutObjects)
    replace(config_loader, ObjectStoreFactory=lambda database: ObjectStoreFactory())
