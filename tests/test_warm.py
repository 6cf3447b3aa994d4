"""What a deployment replaces of Flower: when it looks, one process a run, and what dies."""

from __future__ import annotations

import hashlib
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import psutil
import pytest
import uvicorn
from flwr.app import Context, Message, RecordDict
from flwr.common.constant import ErrorCode, SubStatus
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import Run
from flwr.supercore.superexec.executor import ExecutionSpec
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode.main import create_app
from flwr.supernode.nodestate import NodeStateFactory
from flwr.supernode.servicer.runtime import runtime_handlers
from flwr.supernode.start_client_internal import _insert_message

from fedapp.deploy import warm
from fedapp.deploy.warm.executor import WarmExecutor
from fedapp.deploy.warm.superlink import HOLD, Arrivals, held, told
from fedapp.deploy.warm.supernode import Pace, WarmNodeState, hold
from fedapp.messages.hello import HelloRequest
from fedapp.wire.codec import Envelope, to_records
from fedapp.wire.content import take_apart
from simulations.engines import free_ports
from tests.conftest import WriteTable

SERVER, NODE, RUN, OTHER_RUN = 1, 7, 21, 22
BUNDLE = b"a bundle, of which nothing is used"
LONG = 60.0  # seconds, on however busy a machine
PARTS = {"site": warm.SITE, "superlink": warm.SUPERLINK, "server": warm.SERVER}


# Which Flower


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_the_installed_flower_is_the_one_that_parts_are_replaced_of(parts: warm.Parts) -> None:
    assert parts.found_digest() == parts.digest


@pytest.mark.parametrize(
    "parts",
    [
        replace(warm.SERVER, digest="0" * 64),
        replace(warm.SERVER, places=(*warm.SERVER.places, "flwr.superlink.grid.http_grid:Gone")),
        replace(warm.SERVER, places=("flwr.gone:HttpGrid",)),
    ],
    ids=["another source", "a part that is gone", "a module that is gone"],
)
def test_of_another_flower_nothing_is_replaced_with_one_warning(
    parts: warm.Parts, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "fedapp"):
        assert not parts.are_known()
    assert [record.message for record in caplog.records] == [
        "flwr must be 1.41.0 for fast exchanges; with this one each takes seconds"
    ]


# The SuperNode


@dataclass(slots=True)
class Node:
    """A SuperNode's state, and what a SuperLink would put into it."""

    state: WarmNodeState
    folder: Path
    n_sent: int = 0

    def begin(self, run_id: int, **more: str) -> None:
        """A run whose bundle the site knows."""
        config = {
            "name": "bank",
            "data": str(self.folder / "rows.csv"),
            "label": "y",
            "app": hashlib.sha256(BUNDLE).hexdigest(),
            **more,
        }
        self.state.store_fab(Fab("", BUNDLE, {}))
        context = Context(run_id, NODE, dict(config), RecordDict(), {}, series_id=run_id)
        self.state.set_run_series_context(run_id, context)
        fab_hash = hashlib.sha256(BUNDLE).hexdigest()
        self.state.store_run(replace(Run.create_empty(run_id), fab_hash=fab_hash, series_id=run_id))

    def send(self, run_id: int, step: int = 1) -> Message:
        """A message has come."""
        self.n_sent += 1
        request = HelloRequest("binary:logistic", 0.2, 0.1, self.n_sent)
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = run_id, SERVER, 0
        envelope = Envelope(f"{run_id:016x}", step, method="pax")
        records = to_records(take_apart(request, "bank"), envelope)
        message = Message(records, NODE, request.kind, group_id=str(step))
        self.state.create_task(TaskType.CLIENT_APP, run_id)
        _insert_message(message, self.state, self.state.object_store)
        return message

    def replies(self) -> list[Message]:
        return list(self.state.get_messages_legacy(is_reply=True))


@pytest.fixture
def node(tmp_path: Path, write_table: WriteTable) -> Node:
    write_table("rows")
    state = WarmNodeState(Pace(), ObjectStoreFactory().store())
    state.set_node_id(NODE)
    return Node(state, tmp_path)


def claimed(node: Node) -> str:
    """The token of the task of a message that has come."""
    request = AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP])
    return runtime_handlers.acquire_task(request, node.state).token


def push_reply(node: Node, message: Message, n_objects: int) -> None:
    """A process has pushed so many of its reply's objects."""
    reply = Message(RecordDict(), reply_to=message)
    reply.metadata.__dict__["_message_id"] = reply.object_id
    session = node.state.start_session(RUN)
    node.state.record_message_processing_start(message.metadata.message_id)
    node.state.record_message_processing_end(message.metadata.message_id)
    _, missing = node.state.store_message_and_object_tree(reply, get_object_tree(reply), session)
    parts = get_all_nested_objects(reply)
    for name in missing[:n_objects]:
        assert node.state.store_object(RUN, session, name, parts[name].deflate())


@pytest.mark.parametrize(("n_objects", "n_replies"), [(1, 0), (2, 1)])
def test_a_reply_is_passed_on_when_its_last_object_has_come(
    node: Node, n_objects: int, n_replies: int
) -> None:
    push_reply(node, node.send(RUN), n_objects)
    assert node.state.pace.reply.is_set()
    assert len(node.replies()) == n_replies


@pytest.mark.parametrize("progress", ["not taken", "taken", "half a reply"])
def test_a_task_that_failed_is_answered_at_once_whatever_was_done_of_it(
    node: Node, progress: str
) -> None:
    node.begin(RUN)
    message = node.send(RUN)
    task = node.state.get_task_by_token(claimed(node))
    assert task
    if progress != "not taken":
        (taken,) = node.state.get_messages_legacy(run_ids=[RUN], is_reply=False)
        assert taken.metadata.message_id == message.metadata.message_id
    if progress == "half a reply":
        push_reply(node, message, n_objects=1)
    assert node.state.finish_task(task.task_id, SubStatus.FAILED, "killed")
    (reply,) = node.replies()
    assert reply.error.code == ErrorCode.CLIENT_APP_CRASHED
    assert reply.metadata.reply_to_message_id == message.metadata.message_id
    assert node.state.get_messages_legacy(is_reply=False) == []


def test_a_task_that_failed_after_its_reply_keeps_it(node: Node) -> None:
    node.begin(RUN)
    message = node.send(RUN)
    task = node.state.get_task_by_token(claimed(node))
    assert task
    push_reply(node, message, n_objects=2)
    node.state.finish_task(task.task_id, SubStatus.FAILED, "its handler failed")
    (reply,) = node.replies()
    assert not reply.has_error()


def test_whoever_asks_for_a_task_gets_it_when_a_message_comes(node: Node) -> None:
    node.begin(RUN)
    acquire = partial(hold, runtime_handlers.acquire_task, node.state.pace)
    request = AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP])
    threading.Timer(0.1, node.send, [RUN]).start()
    deadline = time.monotonic() + LONG
    while not (token := acquire(request, node.state).token):
        assert time.monotonic() < deadline
    assert node.state.get_task_by_token(token)


def test_a_supernode_asks_the_sooner_the_less_time_has_passed_since_a_message() -> None:
    pace = Pace()
    assert pace.seconds(3) == 3
    pace.asked()
    assert pace.seconds(3) < 3
    assert pace.task.is_set()


# The SuperLink


@dataclass(frozen=True, slots=True)
class Found:
    """What stands for a response."""

    messages_list: list[int]


def test_a_question_is_answered_again_when_a_message_for_that_node_has_come() -> None:
    arrivals, looks = Arrivals(), []

    def pull(request: int) -> Found:
        looks.append(request)
        return Found([request] if len(looks) > 1 else [])

    def arrive() -> None:
        while not looks:
            time.sleep(0.001)
        arrivals.add(NODE)

    threading.Thread(target=arrive).start()
    assert held(arrivals, pull, lambda request: request, NODE).messages_list == [NODE]
    assert looks == [NODE, NODE]


def test_a_message_that_came_while_its_node_was_looked_up_is_not_waited_for() -> None:
    arrivals = Arrivals()
    found = iter([Found([]), Found([1])])

    def pull(request: int) -> Found:
        arrivals.add(request)
        return next(found)

    before = time.monotonic()
    assert held(arrivals, pull, lambda request: request, NODE).messages_list == [1]
    assert time.monotonic() - before < HOLD


def test_another_nodes_message_ends_no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedapp.deploy.warm.superlink.HOLD", 0.05)
    arrivals = Arrivals()
    arrivals.add(NODE + 1)
    assert not arrivals.wait(NODE, 0)
    assert arrivals.wait(NODE + 1, 0)


def test_no_more_questions_are_held_than_threads_can_be_spared() -> None:
    arrivals = Arrivals()
    while arrivals._room.acquire(blocking=False):
        pass
    arrivals.add(NODE)
    assert not arrivals.wait(NODE, 0)


def test_a_push_tells_the_nodes_that_its_messages_are_for(node: Node) -> None:
    arrivals, message = Arrivals(), node.send(RUN)
    told(arrivals, lambda request: None, Found([message]))  # type: ignore[list-item]
    assert (arrivals[NODE], arrivals[SERVER]) == (1, 0)


# The executor, and the processes that it starts


@pytest.fixture
def address(node: Node) -> Iterator[str]:
    """Where the SuperNode's state is served as Flower serves it."""
    factory = NodeStateFactory(ObjectStoreFactory())
    factory.state_instance = node.state
    (port,) = free_ports(1)
    config = uvicorn.Config(create_app(factory), host="127.0.0.1", port=port, ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    yield f"127.0.0.1:{port}"
    server.should_exit = True
    thread.join()


@pytest.fixture
def answer(node: Node, address: str) -> Iterator[Callable[[int], Message]]:
    """``answer(run)``: what a message of a run is answered."""
    executor = WarmExecutor()

    def ask(run_id: int) -> Message:
        node.send(run_id)
        executor.run_id = run_id
        spec = ExecutionSpec(
            TaskType.CLIENT_APP, address, claimed(node), True, None, False, None, False, 1
        )
        executor.launch(spec)
        return reply_of(node)

    ask.executor = executor  # type: ignore[attr-defined]
    yield ask
    executor.close()


def reply_of(node: Node) -> Message:
    deadline = time.monotonic() + LONG
    while not (replies := node.replies()):
        assert time.monotonic() < deadline
        node.state.pace.reply.wait(0.1)
    return replies[0]


def answered(reply: Message) -> bool:
    """Whether a message was answered, and not with an error."""
    assert not reply.has_error(), reply.error
    return True


def process_of(answer: Callable[[int], Message], run_id: int) -> psutil.Process:
    workers = answer.executor._workers  # type: ignore[attr-defined]
    return psutil.Process(workers[run_id]._process.pid)


def test_a_run_has_one_process_and_another_run_another(
    node: Node, answer: Callable[[int], Message]
) -> None:
    for run_id in (RUN, OTHER_RUN):
        node.begin(run_id)
        assert answered(answer(run_id))
    processes = [process_of(answer, run_id) for run_id in (RUN, OTHER_RUN)]
    assert answered(answer(RUN))
    assert [process_of(answer, run_id) for run_id in (RUN, OTHER_RUN)] == processes
    assert len(set(processes)) == 2
    answer.executor.close()  # type: ignore[attr-defined]
    assert not any(process.is_running() for process in processes)


def test_a_process_that_dies_costs_its_message_alone(
    node: Node, answer: Callable[[int], Message]
) -> None:
    node.begin(RUN)
    answer(RUN)
    process = process_of(answer, RUN)
    process.suspend()
    threading.Timer(0.5, process.kill).start()
    assert answer(RUN).error.code == ErrorCode.CLIENT_APP_CRASHED
    assert answered(answer(RUN))
    assert process_of(answer, RUN) != process


def test_a_process_ends_with_its_executor_and_when_it_is_idle(
    node: Node, answer: Callable[[int], Message], monkeypatch: pytest.MonkeyPatch
) -> None:
    node.begin(RUN)
    answer(RUN)
    process = process_of(answer, RUN)
    answer.executor.reconcile()  # type: ignore[attr-defined]
    assert process.is_running()
    monkeypatch.setattr("fedapp.deploy.warm.executor.IDLE_SECONDS", -1.0)
    deadline = time.monotonic() + LONG
    while process.is_running():  # as soon as it has said that it has answered
        assert time.monotonic() < deadline
        answer.executor.reconcile()  # type: ignore[attr-defined]
    answer(RUN)
    process = process_of(answer, RUN)
    # As the system does when the executor is killed.
    answer.executor._workers[RUN]._process.stdin.close()  # type: ignore[attr-defined]
    process.wait(LONG)


def test_a_bundle_that_the_site_does_not_know_is_refused_with_both_hashes(
    node: Node, answer: Callable[[int], Message]
) -> None:
    node.begin(RUN, app="0" * 64)
    reason = answer(RUN).error.reason
    got = hashlib.sha256(BUNDLE).hexdigest()
    rule = f"bank: app must be {'0' * 64}, which this site knows, got {got}; install the same"
    assert reason
    assert re.match(rule, reason)
