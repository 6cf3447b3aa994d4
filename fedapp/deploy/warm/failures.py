"""Replies of a SuperNode for a process that has died, at once."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from functools import partial
from typing import Any

from flwr.app import Error, Message
from flwr.common.constant import ErrorCode, Status, SubStatus
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.superexec import run_superexec
from flwr.supernode.nodestate import NodeState, nodestate_factory
from flwr.supernode.nodestate.in_memory_nodestate import InMemoryNodeState
from flwr.supernode.servicer.runtime import runtime_handlers as handlers

from fedapp.deploy.warm import NOT_STARTED, extend, replace, wrap
from fedapp.deploy.warm.carried import SENDER, add, added


class AnsweringState(InMemoryNodeState):
    """Answers for a process that has died."""

    def get_messages_legacy(self, *, is_reply: Any = None, **kwargs: Any) -> Sequence[Message]:
        """Return no reply before it is complete: its objects might never arrive."""
        if is_reply and self._object_push_session_by_root:
            return []
        return super().get_messages_legacy(is_reply=is_reply, **kwargs)

    def finish_task(self, task_id: int, sub_status: str, details: str) -> bool:
        """Finish a task; one that failed gets an error as its reply."""
        finished = super().finish_task(task_id, sub_status, details)
        if finished and sub_status == SubStatus.FAILED:
            (task,) = self.get_tasks(task_ids=[task_id])
            if task.type == TaskType.CLIENT_APP:
                crashed, failed = ErrorCode.CLIENT_APP_CRASHED, ErrorCode.LOAD_CLIENT_APP_EXCEPTION
                error = Error(failed if NOT_STARTED in details else crashed, details)
                self._store_error_replies({task.run_id}, error)
        return finished

    def _store_error_replies(self, run_ids: set[int], error: Error) -> None:
        """Also for messages that no process took, and in place of incomplete replies."""
        with self._lock_object_push_sessions, self.lock_msg_store:
            incomplete = self._object_push_session_by_root.keys() & self.msg_store.keys()
            self.delete_messages(message_ids=list(incomplete))
            for run_id in run_ids:
                self.delete_sessions_in_run(run_id)
            for entry in self.msg_store.values():
                metadata = entry.message.metadata
                if metadata.run_id in run_ids and not metadata.reply_to_message_id:
                    entry.is_retrieved = True
                    self.record_message_processing_start(metadata.message_id)
        super()._store_error_replies(run_ids, error)


class Executors:
    """The executor that asked for tasks last: its open tasks are lost when another one asks."""

    def __init__(self) -> None:
        self._last = b""

    def acquire(self, acquire: Any, request: AcquireTaskRequest, state: NodeState) -> Any:
        """Replaces ``acquire_task``."""
        before, self._last = self._last, b"".join(added(request, SENDER))
        if before not in (b"", self._last):
            for task in state.get_tasks(statuses=[Status.STARTING, Status.RUNNING]):
                state.finish_task(task.task_id, SubStatus.FAILED, "the executor has ended")
        return acquire(request, state)


def signed_request(sender: bytes, **fields: Any) -> AcquireTaskRequest:
    """Replaces ``AcquireTaskRequest``: adds which process asks for a task."""
    request = AcquireTaskRequest(**fields)
    add(request, sender=sender)
    return request


def superexec() -> None:
    """Sign requests for tasks, so that the SuperNode notices another executor."""
    replace(run_superexec, AcquireTaskRequest=partial(signed_request, secrets.token_bytes(16)))


def supernode() -> None:
    """Answer for what has died."""
    extend(nodestate_factory, "InMemoryNodeState", AnsweringState)
    wrap(handlers, acquire_task=partial(partial, Executors().acquire))
