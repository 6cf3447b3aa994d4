"""What a deployment replaces of Flower: when it looks, one process a run, and what dies."""

import ast
import asyncio
import hashlib
import importlib
import re
import runpy
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from email.utils import formatdate
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import flwr
import httpx
import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode, SubStatus
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import PullMessagesRequest
from flwr.proto.node_pb2 import Node as NodeProto
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullAppMessagesRequest,
    PushAppMessagesRequest,
)
from flwr.server.superlink.fleet.vce.backend.raybackend import RayBackend
from flwr.supercore.constant import NOOP_FEDERATION_ID, ExecutorType, TaskType
from flwr.supercore.date import now
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.inflatable.inflatable_utils import ObjectUnavailableError
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
from flwr.supercore.run import Run
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.superexec import run_superexec
from flwr.supercore.superexec.executor import ExecutionSpec, LaunchResultStatus
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.federation import NoOpFederationManager
from flwr.superlink.servicer.fleet import fleet_handlers
from flwr.superlink.servicer.runtime import runtime_handlers as superlink_handlers
from flwr.supernode import fleet_http_connection
from flwr.supernode.main import create_app
from flwr.supernode.nodestate import NodeStateFactory
from flwr.supernode.runtime import run_clientapp
from flwr.supernode.servicer.runtime import runtime_handlers
from flwr.supernode.start_client_internal import _insert_message
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.responses import PlainTextResponse
from starlette.routing import Route

import fedapp
from fedapp.deploy import superexec, warm
from fedapp.deploy.tasks import TaskProcess, Token
from fedapp.deploy.warm import (
    PATCHES,
    PROCESSES,
    carried,
    connection,
    failures,
    fall_backs,
    layers,
    objects,
    polling,
    slow_modes,
)
from fedapp.deploy.warm.executor import (
    IDLE_SECONDS,
    MOST_WORKERS,
    RunsWorker,
    WarmExecutor,
)
from fedapp.deploy.warm.failures import signed_request
from fedapp.deploy.warm.memory import LinkStateWithoutObjects, serialized
from fedapp.deploy.warm.polling import WAIT_SECONDS, MessageQueue, notify_waiting, wait_for_messages
from fedapp.deploy.warm.simulation import one_cpu
from fedapp.process import FALL_BACKS
from fedapp.server_app import train_alone
from simulations.deployment import WORKER
from strategies.delivery import LOST
from strategies.handshake import ENGINES
from tests.deployed import PAX as DEPLOYED_PAX
from tests.deployed import local_pax, model_in, started
from tests.serving import serving

SERVER, NODE, RUN, OTHER_RUN = 1, 7, 21, 22
BUNDLE = b"a bundle, of which nothing is used"
LONG = 300.0  # seconds, on however busy a machine
CHANGED = [
    pytest.param(patch, program, name, id=f"{patch.name}-{program}")
    for patch in PATCHES
    for program in patch.programs
    for name, _ in [*patch.digests(PROCESSES[program])][-1:]
]


# Which Flower


KERNELS = "fedapp.runs.kernels"


@pytest.fixture
def apply():
    """Patch a program; Flower is as before after the test."""
    warm.causes.cache_clear()
    before = len(warm._replaced)
    yield warm.apply
    while len(warm._replaced) > before:
        setattr(*warm._replaced.pop())
    warm.causes.cache_clear()


def compiles_at_once(monkeypatch):
    """A SuperExec in this process compiles nothing; what it notes for its children ends here."""
    monkeypatch.setenv(FALL_BACKS, "")
    popen, nothing = subprocess.Popen, [sys.executable, "-S", "-c", "pass"]
    monkeypatch.setattr(
        "subprocess.Popen",
        lambda command, **how: popen(nothing if KERNELS in command else command, **how),
    )


def given_to(program):
    """What a patch is given."""
    if program in ("server", "worker"):
        client = SimpleNamespace(_unary_unary=None, _try_push_messages=None)
        client._runtime_client = client
        return [client]
    state = SimpleNamespace(store_message_ins=None, store_message_res=None)
    return [SimpleNamespace(state=state, pull_messages=None)] * (program == "simulation")


def watched(program, monkeypatch):
    """Names of the patches that are applied from now on to their end."""
    applied = set()

    def patched(name, patch, *given):
        patch(*given)
        applied.add(name)

    for one in PATCHES:
        if program in one.programs:
            module = importlib.import_module(one.module)
            patch = partial(patched, one.name, getattr(module, program))
            monkeypatch.setattr(module, program, patch)
    return applied


def test_of_the_installed_flower_every_function_is_known():
    for process in set(PROCESSES.values()):
        assert fall_backs(process) == []
    assert slow_modes("deployment") == slow_modes("simulation") == slow_modes("local") == []


@pytest.mark.parametrize(("patch", "program", "function"), CHANGED)
def test_a_patch_falls_back_alone_where_a_function_that_it_depends_on_differs(
    patch, program, function, apply, monkeypatch, caplog
):
    known, process = warm.digest, PROCESSES[program]
    monkeypatch.setattr(warm, "digest", lambda name: "00" if name == function else known(name))
    here = [one for one in PATCHES if process in one.processes]
    concerned = {one.name for one in here if function in dict(one.digests(process))}
    concerned |= {one.name for one in here if concerned & {*one.needs}}
    assert {found.patch.name for found in fall_backs(process)} == concerned
    applied = watched(program, monkeypatch)
    apply(program, *given_to(program))
    assert applied == {one.name for one in here if program in one.programs} - concerned
    shown = function.replace(":", ".").removeprefix("flwr.")
    line = f"flwr {version('flwr')}: {shown} differs; without {patch.title}, "
    assert sum(message.startswith(line) for message in caplog.messages) == (program != "worker")


def change(function, folder):
    """A copy of Flower in which a function has one statement more, which does nothing."""
    module, _, name = function.partition(":")
    installed = Path(flwr.__file__).parent
    shutil.copytree(installed, folder / "flwr", ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / "flwr" / f"{module.replace('.', '/')}.py"
    node = ast.parse(source := path.read_text())
    for part in name.split("."):
        (node,) = (one for one in node.body if getattr(one, "name", "") == part)
    lines = source.splitlines(keepends=True)
    lines.insert(node.body[-1].lineno - 1, f"{' ' * node.body[-1].col_offset}pass\n")
    path.write_text("".join(lines))


# A function of Flower, and the patches that fall back where it differs: those that depend on it and
# those that need them. No function is of long polling only.
ACROSS_SITES = {
    "supercore.superexec.plugin.base_exec_plugin:BaseExecPlugin.launch_task": {"tasks", "executor"},
    "supercore.inflatable.inflatable_object:get_object_id": {"objects", "memory"},
    "supercore.superexec.plugin.base_exec_plugin:AutoExecPlugin": {"executor"},
    "supernode.nodestate.in_memory_nodestate:InMemoryNodeState.finish_task": {"failures"},
    "supercore.heartbeat:HeartbeatSender._heartbeat": {"connection"},
    "supernode.nodestate.nodestate_factory:NodeStateFactory.state": {"polling", "failures"},
    "server.superlink.linkstate.linkstate_factory:LinkStateFactory.state": {"memory"},
    "supercore.protobuf.translation:ProtobufTranslationMiddleware.dispatch": {"layers"},
}


@pytest.mark.slow
@pytest.mark.parametrize(("function", "patches"), ACROSS_SITES.items(), ids=ACROSS_SITES)
def test_across_sites_a_patch_falls_back_and_the_model_is_the_same(
    function, patches, tmp_path, monkeypatch
):
    change(function, tmp_path / "flower")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "flower"))
    (tmp_path / "sites").mkdir()
    with started(tmp_path / "sites") as deployment:
        run = deployment.train(tmp_path / "across", {"strategy": "pax", **DEPLOYED_PAX})
        assert model_in(run.path) == local_pax(deployment, tmp_path / "local")
        logs = [deployment.log(name).read_text() for name in ("coordinator", "bank")]
    for shown in ("".join(logs), "\n".join(run.summary["warnings"])):
        differ = {one.name for one in PATCHES if f" differs; without {one.title}, " in shown}
        assert differ == patches


def test_a_patch_that_fails_half_way_leaves_flower_as_it_was(apply, monkeypatch, caplog):
    client = fleet_http_connection.FleetHttpClient
    monkeypatch.setenv(warm.OFF, "objects")
    monkeypatch.delattr("flwr.supercore.heartbeat.HEARTBEAT_DEFAULT_INTERVAL")
    applied = watched("supernode", monkeypatch)
    apply("supernode")
    gone = "no attribute 'HEARTBEAT_DEFAULT_INTERVAL'; without the SuperNode's patience, it gives"
    assert len([line for line in caplog.messages if gone in line]) == 1
    assert fleet_http_connection.FleetHttpClient is client
    assert fleet_http_connection.HEARTBEAT_DEFAULT_INTERVAL == 30
    assert [found.patch.name for found in fall_backs("site")] == ["objects", "connection"]
    assert applied == {"failures", "polling", "layers"}


def test_a_patch_whose_name_of_flower_is_gone_falls_back_alone(monkeypatch, apply):
    monkeypatch.delitem(sys.modules, "fedapp.deploy.warm.memory")
    monkeypatch.delattr("flwr.supercore.sql_mixin.SqlMixin")
    assert [found.patch.name for found in fall_backs("superlink")] == ["memory"]


def test_patches_are_turned_off_by_name_with_those_that_need_them(monkeypatch, apply, caplog):
    monkeypatch.setenv(warm.OFF, "objects, gone")
    assert [found.patch.name for found in fall_backs("superlink")] == ["objects", "memory"]
    apply("superlink")
    unknown, *lines = caplog.messages
    assert unknown.endswith("layers, simulation, got gone")
    way = "FEDAPP_WARM_OFF turns objects off; without objects within messages, exchanges take "
    assert way in lines[0]
    assert len(lines) == 2


def read_as(source):
    return warm.syntax(ast.parse(source))


def test_a_digest_is_of_what_a_function_does():
    source = "def f(a):\n    return a + 1"
    same = "def f(a):\n    '''Add.'''\n    # one\n    return (a + 1)"
    assert read_as(source) == read_as(same)
    assert read_as(source) != read_as(source.replace("1", "2"))
    assert read_as("f()") != read_as("f(None)")


def test_a_run_in_slow_mode_says_so_in_its_summary(monkeypatch, tmp_path, apply):
    monkeypatch.setenv(warm.OFF, "simulation")
    monkeypatch.setitem(ENGINES, "LocalGrid", "simulation")
    # Flower's simulation calls the ServerApp, which adds the engine's warnings.
    monkeypatch.setattr(
        "fedapp.runs.local.train", lambda grid, settings, *_, **__: train_alone(grid, settings)
    )
    run = fedapp.run("pax", num_boost_round=1, max_depth=1, run_dir=tmp_path / "run")
    (warning,) = slow_modes("simulation")
    assert "FEDAPP_WARM_OFF turns simulation off" in warning
    assert warning in run.summary["warnings"]


GONE = """
import importlib, sys
vars(importlib.import_module({0!r})).pop({1!r}, None)
sys.modules[{0!r} + "." + {1!r}] = None
from fedapp.deploy.superexec import {2}
{2}()
"""
EXECUTOR = "flwr.supercore.superexec.executor", "SubprocessExecutor", "main"
ANSWERING = "flwr.supernode.runtime", "run_clientapp", "answer_message"


@pytest.mark.by_default("executor")
@pytest.mark.parametrize("gone", [EXECUTOR, ANSWERING], ids=["executor", "answering"])
def test_of_another_flower_no_process_starts_where_a_bundles_code_could_not_be_kept_out(gone):
    command = [sys.executable, "-c", GONE.format(*gone), "--help"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (1, "")
    rule = (
        rf"flwr [\d.]+: .*{gone[1]}.*; without it a bundle's code could be read, and the site does"
    )
    assert len(re.findall(rule, ended.stderr)) == 1
    assert "Traceback" not in ended.stderr


LOADER = "flwr.supernode.runtime.run_clientapp:run_clientapp"


@pytest.mark.parametrize(
    ("off", "refuses"), [("", False), ("tasks", True)], ids=["warm", "a message"]
)
def test_a_site_starts_where_flower_reads_bundles_by_other_means_only_if_no_process_uses_it(
    off, refuses, monkeypatch, apply
):
    known = warm.digest
    monkeypatch.setenv(warm.OFF, off)
    monkeypatch.setattr(warm, "digest", lambda name: "00" if name == LOADER else known(name))
    compiles_at_once(monkeypatch)
    started = []
    monkeypatch.setattr(superexec, "flower_superexec", lambda: started.append(1))
    monkeypatch.setattr(superexec, "start_log", lambda name: None)
    rule = "run_clientapp differs; without it a bundle's code could be read, and the site does not"
    with pytest.raises(SystemExit, match=rule) if refuses else nullcontext():
        superexec.main()
    assert bool(started) is not refuses
    with pytest.raises(SystemExit, match=rule):
        superexec.answer_message()


@pytest.mark.parametrize("off", ["", "executor", "tasks"])
def test_whichever_executor_fits_a_site_starts_its_own_program_and_nothing_else(
    off, monkeypatch, apply
):
    monkeypatch.setenv(warm.OFF, off)
    assert ("executor" in warm.causes("site")) == bool(off)  # it needs tasks
    compiles_at_once(monkeypatch)
    monkeypatch.setattr(superexec, "start_log", lambda name: None)
    commands, processes, popen = [], [], subprocess.Popen

    def start(command, **how):
        if KERNELS in command:
            return popen(command, **how)
        commands.append(command)
        processes.append(popen([sys.executable, "-S", "-c", "pass"], **how))
        return processes[-1]

    def launch():
        executor = run_superexec.get_executor(ExecutorType.SUBPROCESS)
        options = ("127.0.0.1:9", "token", True, None, False, None, False)
        executor.launch(ExecutionSpec(TaskType.CLIENT_APP, *options, 1))
        refused = executor.launch(ExecutionSpec(TaskType.SERVER_APP, *options, 2))
        assert refused.status == LaunchResultStatus.FAILED

    monkeypatch.setattr(superexec, "flower_superexec", launch)
    monkeypatch.setattr("subprocess.Popen", start)
    superexec.main()
    processes[0].wait(LONG)
    whole = [*superexec.PROGRAM] if off else [sys.executable, "-P", "-m", WORKER]
    assert [command[:4] for command in commands] == [whole]


@pytest.mark.parametrize(("asked", "status"), [("site", 0), ("superlink", 1)])
def test_a_command_names_the_functions_that_differ(asked, status, monkeypatch, capsys, apply):
    place, known = "flwr.superlink.main:create_app", warm.digest
    monkeypatch.setattr(warm, "digest", lambda name: "00" if name == place else known(name))
    monkeypatch.setattr(sys, "argv", ["warm", asked])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("fedapp.deploy.warm", run_name="__main__")
    assert ended.value.code == status
    assert (f"    {place}=00" in capsys.readouterr().out.splitlines()) is bool(status)


# The SuperNode


class Node:
    """A SuperNode's state, and what a SuperLink would put into it."""

    def __init__(self):
        bases = polling.PollingState, failures.AnsweringState
        state = type("State", bases, {"timer": polling.PollTimer()})
        self.state = state(ObjectStoreFactory().store())
        self.state.set_node_id(NODE)

    def begin(self, run_id):
        """A run whose bundle the site knows."""
        self.state.store_fab(Fab("", BUNDLE, {}))
        context = Context(run_id, NODE, {}, RecordDict(), {}, series_id=run_id)
        self.state.set_run_series_context(run_id, context)
        fab_hash = hashlib.sha256(BUNDLE).hexdigest()
        self.state.store_run(replace(Run.create_empty(run_id), fab_hash=fab_hash, series_id=run_id))

    def send(self, run_id):
        """A message has come."""
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = run_id, SERVER, 0
        records = RecordDict({"question": ConfigRecord({"step": 1})})
        message = Message(records, NODE, "query.hello", group_id="1")
        self.state.create_task(TaskType.CLIENT_APP, run_id)
        _insert_message(message, self.state, self.state.object_store)
        return message

    def start(self, run_id):
        """The first message of a run has come."""
        self.begin(run_id)
        return self.send(run_id)

    def replies(self):
        return list(self.state.get_messages_legacy(is_reply=True))


@pytest.fixture
def node():
    return Node()


def claimed(node):
    """The token of the task of a message that has come."""
    request = AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP])
    return runtime_handlers.acquire_task(request, node.state).token


def push_reply(node, message, n_objects):
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


@pytest.mark.parametrize("progress", ["not taken", "taken", "half a reply", "a reply"])
def test_a_task_that_failed_is_answered_at_once_and_a_reply_passed_on_once_it_is_whole(
    node, progress
):
    message = node.start(RUN)
    task = node.state.get_task_by_token(claimed(node))
    if progress == "taken":
        (taken,) = node.state.get_messages_legacy(run_ids=[RUN], is_reply=False)
        assert taken.metadata.message_id == message.metadata.message_id
    if progress == "half a reply":
        push_reply(node, message, n_objects=1)
        assert node.state.timer.reply.is_set()
        assert node.replies() == []
    if progress == "a reply":
        push_reply(node, message, n_objects=2)
    assert node.state.finish_task(task.task_id, SubStatus.FAILED, "killed")
    (reply,) = node.replies()
    assert reply.has_error() is (progress != "a reply")
    assert not reply.has_error() or reply.error.code == ErrorCode.CLIENT_APP_CRASHED
    assert reply.metadata.reply_to_message_id == message.metadata.message_id
    assert node.state.get_messages_legacy(is_reply=False) == []


def test_whoever_asks_for_a_task_gets_it_when_a_message_comes(node):
    node.begin(RUN)
    acquire = partial(polling.wait_for_task, runtime_handlers.acquire_task, node.state.timer)
    request = AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP])
    threading.Timer(0.1, node.send, [RUN]).start()
    wait_until(lambda: acquire(request, node.state).token)


def test_a_supernode_asks_the_sooner_the_less_time_has_passed_since_a_message():
    pace = polling.PollTimer()
    assert pace.seconds(3) == 3
    pace.note_message()
    assert pace.seconds(3) < 3
    assert pace.task.is_set()


@pytest.mark.parametrize(
    ("status", "responses", "n_warnings"),
    [
        (200, [(30, -29), (0.1, -29.5), (0.1, 0), (3, -2), (0.1, 0)], 0),
        (200, [(0.1, 400), (0.1, 400)], 0),
        (200, [(0.1, 400), (5, 0), (0.1, 400), (0.1, 400)], 1),
        (401, [(0.1, 400), (0.1, 400)], 1),
    ],
    ids=["a SuperLink that was stopped", "off for a moment", "a clock that is off", "refused"],
)
def test_a_clock_is_off_if_it_is_so_for_seconds_or_refused(
    status, responses, n_warnings, monkeypatch, caplog
):
    """Responses by the seconds they take, and by which their date is ahead."""
    clock, note = [1e9], connection.ClockWarning()
    monkeypatch.setattr("fedapp.deploy.warm.connection.time.time", lambda: clock[-1])
    for seconds, ahead in responses:

        def respond(_, seconds=seconds, ahead=ahead):
            clock.append(clock[-1] + seconds)
            date = formatdate(clock[-1] + ahead, usegmt=True)
            return httpx.Response(status, headers={"date": date})

        note.intercept(Any, respond)
    rule = r"this machine's clock is (39\d|400) s behind the SuperLink's; Flower"
    assert [bool(re.match(rule, one)) for one in caplog.messages] == [True] * n_warnings


@pytest.mark.parametrize(
    ("faults", "n_tries", "said"),
    [
        (["refused"] * 2 + ["timed out"] * 3, 6, ["start-superlink.sh"] * 2),
        ([500] * 2, 3, ["must do as asked, got an internal error"]),
        ([502] * 2, 3, ["got nginx alone"]),
        ([404] * 2, 1, []),
    ],
    ids=["no connection", "a server fails", "a proxy fails", "refused"],
)
def test_a_supernode_tries_again_what_was_not_refused_and_says_each_cause_once(
    faults, n_tries, said, caplog
):
    retry, left, tries = connection.patient_retry(), [*faults], list[int]()
    retry.wait_function = lambda _: None

    def ask():
        tries.append(1)
        if left and isinstance(fault := left.pop(0), str):
            raise httpx.ConnectError(fault)
        if len(tries) <= len(faults):
            httpx.Response(fault, request=httpx.Request("POST", "https://a")).raise_for_status()

    with suppress(httpx.HTTPStatusError):
        retry.invoke(ask)
    assert len(tries) == n_tries
    causes = [one for one in caplog.messages if "no connection" in one]
    assert [cause in text for cause, text in zip(said, causes, strict=True)] == [True] * len(said)


EXIT = """
  from flwr.supernode import fleet_http_connection
  try:
    raise ValueError('no key')
  except ValueError:
    fleet_http_connection.flwr_exit(305, 'Failed to initialize the connection')
"""


@pytest.mark.parametrize(
    ("ending", "cause"),
    [
        ("return", "the SuperNode has given up"),
        ("raise OSError('no route')", "no route"),
        (EXIT, "no key"),
        ("threading.Thread(target=lambda: [][0]).start(); time.sleep(600)", "out of range"),
    ],
    ids=["its loop returns", "its loop fails", "Flower's exit", "a thread fails"],
)
def test_a_supernode_that_has_given_up_ends_though_its_threads_go_on(ending, cause):
    code = "import threading, time; from fedapp.deploy import supernode\n"
    code += "def run(*_):\n  threading.Thread(target=time.sleep, args=(600,)).start()\n"
    code += f"  {ending}\nsupernode.run_flower = run; supernode.main()"
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LONG)
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    assert line.endswith(f"{cause}: this process ends, to be started again")


# The SuperLink


def found(*messages):
    return SimpleNamespace(messages_list=list(messages))


def asking(node=NODE, *message_ids):
    return SimpleNamespace(node=node, message_ids=message_ids)


def looked_up(arrivals, pull, asked):
    """What a request gets."""
    return wait_for_messages(arrivals, lambda request: request.node, pull, asked).messages_list


def test_a_message_that_came_while_its_node_was_looked_up_is_not_waited_for():
    arrivals = MessageQueue()
    responses = iter([found(), found(1)])

    def pull(request):
        arrivals.add(request.node)
        return next(responses)

    before = time.monotonic()
    assert looked_up(arrivals, pull, asking()) == [1]
    assert time.monotonic() - before < WAIT_SECONDS


@given(st.lists(st.sampled_from(("comes", "pulled", "lost")), max_size=12), st.integers(0, 2))
def test_no_message_waits_although_a_node_without_any_is_not_looked_up(events, n_before):
    """Messages are there at the start, come, are pulled, and are deleted at the end of a run."""
    arrivals, left, looks = MessageQueue(), list(range(n_before)), list[int]()

    def pull(_):
        looks.append(NODE)
        return found(*[left.pop(0)] if left else [])

    def ask():
        with patch("fedapp.deploy.warm.polling.WAIT_SECONDS", LONG if left else 0):
            return looked_up(arrivals, pull, asking())

    for number, event in enumerate(events, start=n_before):
        if event == "comes":
            left.append(number)
            arrivals.add(NODE)
        elif event == "lost":
            left.clear()
        else:
            expected, start = left[:1], time.monotonic()
            assert ask() == expected
            assert time.monotonic() - start < LONG
    while ask():
        pass
    before = len(looks)
    assert ask() == []
    assert len(looks) == before + 1  # once, after the wait


def test_replies_that_come_together_are_pulled_together():
    arrivals, looks, came = MessageQueue(), [], list[int]()

    def pull(_):
        looks.append(1)
        return found(*[came.pop() for _ in range(len(came))])

    def arrive():
        while not looks:  # until somebody has looked
            time.sleep(0.001)
        for reply in (1, 2):
            came.append(reply)
            arrivals.add(SERVER)

    threading.Thread(target=arrive).start()
    with patch("fedapp.deploy.warm.polling.GATHER_SECONDS", LONG):
        assert sorted(looked_up(arrivals, pull, asking(SERVER, 1, 2))) == [1, 2]
    assert len(looks) == 2


# Starlette's layers of middleware


class Numbered(BaseHTTPMiddleware):
    """Reads the request, adds a header, refuses one, as the layers of Flower do."""

    async def dispatch(self, request, call_next):
        content = await request.body()
        if content == b"refused":
            return PlainTextResponse("refused", 401)
        try:
            response = await call_next(request)
        except ZeroDivisionError:
            return PlainTextResponse("failed", 500)
        response.headers.append("layer", str(len(content)))
        return response


async def echo(request):
    """Answer with the request's own content."""
    content = await request.body()
    if content == b"fails":
        raise ZeroDivisionError
    return PlainTextResponse(content, 201, {"own": "1"})


def echoed(content, path="/v1/fleet/pull-messages"):
    """Status, headers and content of a response that two layers pass on."""
    app = Starlette(
        routes=[Route(path, echo, methods=["POST"])], middleware=[Middleware(Numbered)] * 2
    )

    async def post():
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://site") as client:
            one = await client.post(path, content=content)
            return one.status_code, one.headers.multi_items(), one.content

    return asyncio.run(post())


@pytest.mark.parametrize("content", [b"", b"x" * 100_000, b"refused", b"fails"])
def test_a_response_in_one_piece_is_that_of_starlette(content):
    with patch.object(BaseHTTPMiddleware, "__call__", BaseHTTPMiddleware.__call__):
        layers.superlink()
        whole = echoed(content)
    assert whole == echoed(content)


@pytest.mark.parametrize(("prefix", "n_layers"), [(layers.FLEET, 0), (layers.RUNTIME, 2)])
def test_layers_are_bypassed_by_requests_that_they_would_only_forward(
    prefix, n_layers, monkeypatch
):
    monkeypatch.setitem(layers.BYPASSED, "Numbered", (prefix,))
    with patch.object(BaseHTTPMiddleware, "__call__", BaseHTTPMiddleware.__call__):
        layers.superlink()
        status, headers, content = echoed(b"a message")
    assert (status, content) == (201, b"a message")
    assert headers.count(("layer", "9")) == n_layers


def test_only_its_own_messages_end_a_nodes_waiting_where_threads_can_be_spared(node, monkeypatch):
    monkeypatch.setattr("fedapp.deploy.warm.polling.WAIT_SECONDS", 0.05)
    arrivals, message = MessageQueue(), node.send(RUN)
    notify_waiting(arrivals, lambda request: None, found(message))
    assert (arrivals[NODE], arrivals[SERVER]) == (1, 0)
    assert not arrivals.wait(SERVER, 0)
    assert arrivals.wait(NODE, 0)
    while arrivals._room.acquire(blocking=False):
        pass
    assert not arrivals.wait(NODE, 0)


def test_transactions_begin_one_after_the_other():
    began, ended, order = threading.Event(), threading.Event(), []

    @contextmanager
    def session(state):
        order.append("begins")
        yield state
        order.append("ends")

    locked = serialized(session)

    def second():
        began.set()
        with locked(None), locked(None):  # one within another does not wait for it
            ended.set()

    with locked(None):
        thread = threading.Thread(target=second)
        thread.start()
        began.wait(LONG)
        assert not ended.wait(0.05)
    thread.join()
    assert order == ["begins", "ends", "begins", "begins", "ends", "ends"]


def test_a_message_whose_objects_died_with_the_superlink_is_reported_as_lost():
    store = InMemoryObjectStore()
    state = LinkStateWithoutObjects(":memory:", NoOpFederationManager(), store)
    state.initialize()
    fab = "0" * 64
    run_id = state.create_run("", "", fab, {}, NOOP_FEDERATION_ID, None, "", TaskType.SERVER_APP)
    node_id = state.create_node("", "", b"a key", 30)
    state.activate_node(node_id, 30)
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = run_id, SUPERLINK_NODE_ID, 0
    message = Message(RecordDict(), node_id, "query.hello")
    message.metadata.__dict__["_message_id"] = message.object_id
    request = PushAppMessagesRequest(
        messages_list=[message_to_proto(remove_content_from_message(message))],
        message_object_trees=[get_object_tree(message)],
    )
    carried.add(request, contents=objects.contents_of([message]).values())
    task = SimpleNamespace(run_id=run_id)
    pushed = objects.store_objects(superlink_handlers.push_messages, request, state, task)
    assert list(pushed.message_ids) == [message.object_id]
    assert list(pushed.objects_to_push) == []
    question = PullMessagesRequest(node=NodeProto(node_id=node_id))
    assert store.get(message.object_id) == message.deflate()
    store.clear()
    assert not fleet_handlers.pull_messages(question, state, store).messages_list
    asked = PullAppMessagesRequest(message_ids=[message.object_id])
    (reply,) = superlink_handlers.pull_messages(asked, state, task).messages_list
    assert reply.error.code in LOST
    state._engine.dispose()


@pytest.mark.filterwarnings("ignore:No path_separator:DeprecationWarning")  # Alembic's
def test_a_task_outlives_a_superlink_that_was_away_and_not_its_own_silence(tmp_path, monkeypatch):
    """Heartbeats that nobody could hear are not missed."""
    minutes = [0]

    def opened():
        given = str(tmp_path / "superlink.db"), NoOpFederationManager(), InMemoryObjectStore()
        (state := LinkStateWithoutObjects(*given)).initialize()
        return state

    for module in ("flwr.supercore.corestate.sql_corestate", "fedapp.deploy.warm.memory"):
        monkeypatch.setattr(f"{module}.now", lambda: now() + timedelta(minutes=minutes[0]))
    before = opened()
    before.create_run("", "", "0" * 64, {}, NOOP_FEDERATION_ID, None, "", TaskType.SERVER_APP)
    (task,) = before.get_tasks()
    assert before.claim_task(task.task_id)
    assert before.activate_task(task.task_id)
    before._engine.dispose()
    minutes[0] += 10
    state = opened()
    assert state.acknowledge_task_heartbeat(task.task_id)
    minutes[0] += 2
    assert not state.acknowledge_task_heartbeat(task.task_id)
    state._engine.dispose()


# Objects that travel with their message


class Straight:
    """Stands for a client, of a task of the SuperNode's, that calls the handlers without a network,
    some of which are not Flower's."""

    def __init__(self, state, token, **handlers):
        self.requests = Counter[str]()
        self._state, self._task, self._handlers = state, state.get_task_by_token(token), handlers
        self._unary_unary = self._call

    def __getattr__(self, method):
        """As Flower's, each method sends its request by one function."""
        name = re.sub("(?<!^)(?=[A-Z])", "_", method).lower()
        return lambda request: self._unary_unary(request=request, path=name)

    def _call(self, *, request, path):
        self.requests[path] += 1
        handler = self._handlers.get(path) or getattr(runtime_handlers, path)
        return handler(request, self._state, self._task)


WARM = {
    "pull_messages": partial(objects.attach_objects, runtime_handlers.pull_messages),
    "push_messages": partial(objects.store_objects, runtime_handlers.push_messages),
}
SINGLY = Counter(pull_object=3, confirm_message_received=1, push_object=2)


@pytest.mark.parametrize(
    ("handlers", "carries", "singly"),
    [(WARM, True, {}), (WARM, False, SINGLY), ({}, True, SINGLY)],
    ids=["both", "Flower's client", "Flower's server"],
)
def test_objects_travel_with_their_message_where_both_ends_know_how(
    node, handlers, carries, singly
):
    message = node.start(RUN)
    client = Straight(node.state, claimed(node), **handlers)
    carrier = objects.ObjectCarrier()
    if carries:
        carrier.serve(client)
    pulled, context, _, _ = run_clientapp.pull_task_input(client)
    assert pulled.content == message.content
    assert message.object_id not in node.state.object_store
    reply = Message(RecordDict(), reply_to=pulled)
    carrier.find = objects.contents_of([reply]).get
    run_clientapp.push_message(client, reply, context)
    (passed_on,) = node.replies()
    for name, content in objects.contents_of([reply]).items():
        assert node.state.object_store.get(name) == content
    assert passed_on.metadata.message_id == reply.object_id
    always = Counter(pull_task_input=1, pull_messages=1, push_messages=1)
    assert client.requests == always + Counter(singly)


def test_a_runs_bundle_is_sent_once_to_the_process_that_answers(node):
    node.start(RUN)
    whole = partial(objects.without_bundle, runtime_handlers.pull_task_input)
    client = Straight(node.state, claimed(node), **WARM, pull_task_input=whole)
    carrier = objects.ObjectCarrier()
    carrier.serve(client)
    assert run_clientapp.pull_task_input(client)[-1].content == BUNDLE
    node.send(RUN)
    client._task = node.state.get_task_by_token(claimed(node))
    _, context, run, fab = run_clientapp.pull_task_input(client)
    assert (context.run_id, run.run_id, fab.content) == (RUN, RUN, b"")


def test_objects_are_pulled_whenever_each_of_them_comes(monkeypatch):
    waits = {"a": 2, "b": 0, "c": 1}

    def pull(name):
        waits[name] -= 1
        if waits[name] >= 0:
            raise ObjectUnavailableError(name)
        return name.encode()

    monkeypatch.setattr("fedapp.deploy.warm.objects.BACKOFF", 0.0001)
    assert objects.pull_at_once([*waits], pull) == {name: name.encode() for name in waits}


def test_the_objects_of_a_long_message_travel_singly(node, monkeypatch):
    message = node.start(RUN)
    client = Straight(node.state, claimed(node), **WARM)
    objects.ObjectCarrier().serve(client)
    monkeypatch.setattr("fedapp.deploy.warm.objects.MOST_BYTES", len(message.deflate()))
    assert run_clientapp.pull_task_input(client)[0].content == message.content
    assert client.requests["pull_object"] == SINGLY["pull_object"]


def test_a_message_that_is_not_whole_yet_is_handed_out_without_objects(node):
    message = node.start(RUN)
    entry = node.state.object_store.store[message.object_id]
    entry.content, entry.is_available = b"", False
    request = PullAppMessagesRequest()
    carried.add(request, wanted=True)
    task = node.state.get_task_by_token(claimed(node))
    response = WARM["pull_messages"](request, node.state, task)
    assert [one.metadata.message_id for one in response.messages_list] == [message.object_id]
    assert objects.objects_in(response) == {}
    assert message.object_id in node.state.object_store


def test_an_object_that_no_message_named_is_not_stored(node):
    message = node.start(RUN)
    client = Straight(node.state, claimed(node), **WARM)
    pulled, *_ = run_clientapp.pull_task_input(client)
    reply, other = Message(RecordDict(), reply_to=pulled), Message(RecordDict(), reply_to=message)
    reply.metadata.__dict__["_message_id"] = reply.object_id
    request = PushAppMessagesRequest(
        messages_list=[message_to_proto(reply)], message_object_trees=[get_object_tree(reply)]
    )
    carried.add(request, contents=objects.contents_of([other]).values())
    response = client.PushMessages(request)
    assert reply.object_id in response.objects_to_push
    assert other.object_id not in node.state.object_store


def test_a_request_that_may_be_sent_again_is_left_as_it_is():
    client = SimpleNamespace(_unary_unary=lambda request: request)
    objects.ObjectCarrier().serve(client)
    request = PullAppMessagesRequest()
    assert carried.added(client._unary_unary(request=request), carried.WANTED)
    assert not carried.added(request, carried.WANTED)


# The simulation


@pytest.mark.parametrize(("said", "taken"), [(None, 1), (2, 1), (3, 3)])
def test_an_actor_takes_one_cpu_unless_the_federation_says_more(said, taken):
    config = {"client_resources": {"num_cpus": said, "num_gpus": 0.5}} if said else {}
    backend = SimpleNamespace(client_resources_key="client_resources")
    resources = one_cpu(backend, RayBackend._validate_client_resources, config=config)
    assert resources == {"num_cpus": taken, "num_gpus": 0.5 if said else 0.0}


# The executor, and the processes that it starts


def test_what_an_executor_was_asked_fails_when_another_one_asks(node, monkeypatch):
    acquire = partial(failures.Executors().acquire, runtime_handlers.acquire_task)
    first, second = (
        signed_request(sender, supported_task_types=[TaskType.CLIENT_APP])
        for sender in (b"one", b"another")
    )
    message = node.start(RUN)
    assert acquire(first, node.state).token
    assert not acquire(first, node.state).token
    assert node.replies() == []
    node.send(OTHER_RUN)
    assert acquire(second, node.state).token
    (reply,) = node.replies()
    assert reply.error.code == ErrorCode.CLIENT_APP_CRASHED
    assert reply.metadata.reply_to_message_id == message.metadata.message_id


@pytest.fixture
def address(node):
    """Where the SuperNode's state is served as Flower serves it."""
    factory = NodeStateFactory(ObjectStoreFactory())
    factory.state_instance = node.state
    with serving(create_app(factory), ws="none") as url:
        yield url.removeprefix("http://")


def spec_of(node, address):
    """The task of a message that has come."""
    token = claimed(node)
    return ExecutionSpec(TaskType.CLIENT_APP, address, token, True, None, False, None, False, 1)


def sleeping(monkeypatch, script="while True: input()"):
    """Every process that is started runs this script instead."""
    start = partial(subprocess.Popen, [sys.executable, "-S", "-c", script])
    monkeypatch.setattr("subprocess.Popen", lambda command, **how: start(**how))


def reply_of(node):
    replies = []
    wait_until(lambda: replies.extend(node.replies()) or replies)
    return replies[0]


def wait_until(condition):
    deadline = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_answer_that_is_noted_late_leaves_the_next_message_asked(node, address, monkeypatch):
    """The process stands still between a reply and the word that it has replied."""
    sleeping(monkeypatch, "a = input(); b = input(); print(b, flush=True); input()")
    node.start(RUN)
    spec = spec_of(node, address)
    worker = RunsWorker(spec)
    assert worker.ask("of the message before")
    wait_until(lambda: worker.tokens == {spec.token})
    assert worker.idle_seconds() == 0
    worker.process.kill()
    error = reply_of(node).error
    assert error.code == ErrorCode.CLIENT_APP_CRASHED
    assert error.reason == "flwr-clientapp was killed by SIGKILL"
    worker._watch.join(LONG)


def test_a_process_that_dies_after_its_answer_leaves_the_executor_alone(node, address):
    node.start(RUN)
    spec, interrupted = spec_of(node, address), list[int]()
    with Token(spec.token).client(address, True, None) as client:
        run_clientapp.push_task_output(client, None, SubStatus.FAILED, "done")
    before = signal.signal(signal.SIGINT, lambda number, frame: interrupted.append(number))
    try:
        worker = RunsWorker(spec)
        assert worker.ask(spec.token)
        worker.process.kill()
        worker._watch.join(LONG)
        assert not worker._watch.is_alive()
    finally:
        signal.signal(signal.SIGINT, before)
    assert interrupted == []


# Tokens, which live as long as the processes of their tasks


def test_a_token_lives_while_its_process_starts(node, address, monkeypatch):
    monkeypatch.setattr("fedapp.deploy.tasks.BEAT_SECONDS", 0.05)
    sleeping(monkeypatch)
    node.start(RUN)
    spec = spec_of(node, address)
    (record,) = node.state.task_token_store.values()
    claimed_until = record.active_until
    worker = RunsWorker(spec)
    wait_until(lambda: record.active_until > claimed_until)
    worker.end("was closed")


def test_a_token_outlives_errors_of_its_server(node, address, monkeypatch):
    monkeypatch.setattr("fedapp.deploy.tasks.BEAT_SECONDS", 0.05)
    no_pause = SimpleNamespace(sleep=lambda _: None, monotonic=time.monotonic)
    monkeypatch.setattr("fedapp.deploy.tasks.time", no_pause)
    beats, statuses = list[int](), [500, 502, 503, 401]

    def beat(client, request):
        beats.append(status := statuses[len(beats)])
        httpx.Response(status, request=httpx.Request("POST", "https://a")).raise_for_status()

    monkeypatch.setattr(RuntimeHttpClient, "SendTaskHeartbeat", beat)
    sleeping(monkeypatch)
    node.start(RUN)
    worker = RunsWorker(spec_of(node, address))
    wait_until(lambda: not worker.tokens)
    assert beats == statuses
    worker.end("was closed")


def test_a_process_that_sends_heartbeats_itself_gets_none(node, address, monkeypatch):
    monkeypatch.setattr("fedapp.deploy.tasks.BEAT_SECONDS", 0.05)
    sleeping(monkeypatch, "import os, time; os.close(1); time.sleep(600)")
    node.start(RUN)
    process = TaskProcess(spec_of(node, address), [], stdout=subprocess.PIPE)
    wait_until(process._beats)
    looks = []
    monkeypatch.setattr(process, "_is_stopped", lambda: looks.append(1))
    wait_until(lambda: len(looks) > 1)  # until a heartbeat that was on its way has arrived
    (record,) = node.state.task_token_store.values()
    active_until = record.active_until
    wait_until(lambda: len(looks) > 4)
    assert record.active_until == active_until
    process.end("was closed")
    assert str(reply_of(node).error.reason) == "flwr-clientapp was closed"


@pytest.mark.parametrize("is_given_up", [False, True])
def test_a_task_that_comes_back_ends_the_process_that_has_not_started_it(
    node, address, monkeypatch, is_given_up
):
    monkeypatch.setattr("fedapp.deploy.tasks.START_SECONDS", 0.0 if is_given_up else 600.0)
    sleeping(monkeypatch)
    node.start(RUN)
    executor, spec = WarmExecutor(), spec_of(node, address)
    executor.run_id = RUN
    executor.launch(spec)
    first = executor._workers[RUN]
    (record,) = node.state.task_token_store.values()
    record.active_until -= timedelta(hours=1)
    executor.launch(replace(spec, token=claimed(node)))
    assert first.process.wait(LONG) == -signal.SIGKILL
    if is_given_up:
        error = reply_of(node).error
        assert error.code not in LOST
        assert re.match("flwr-clientapp has not started within [0-9]+ s", str(error.reason))
    else:
        assert executor._workers[RUN] is not first
        assert executor._workers[RUN].process.poll() is None
    executor.close()


@pytest.mark.by_default("exits", "is killed")
@pytest.mark.parametrize(
    ("script", "reason", "is_lost"),
    [
        ("raise SystemExit(3)", "flwr-clientapp has not started: it ended with status 3", False),
        ("print(flush=True); raise SystemExit(3)", "flwr-clientapp ended with status 3", True),
        ("import os; os.kill(os.getpid(), 9)", "flwr-clientapp was killed by SIGKILL", True),
        ("import os; os.kill(os.getpid(), 19)", "flwr-clientapp was stopped for 0 s", True),
    ],
    ids=["never starts", "exits", "is killed", "is stopped"],
)
def test_how_a_process_ended_is_the_reason_of_the_reply(
    node, address, monkeypatch, script, reason, is_lost
):
    monkeypatch.setattr("fedapp.deploy.tasks.BEAT_SECONDS", 0.05)
    monkeypatch.setattr("fedapp.deploy.tasks.STOPPED_SECONDS", 0.2)
    read = RunsWorker._read_answers

    def read_late(worker):  # what the process has written is read after its end
        worker.process.wait()
        time.sleep(0.2)
        read(worker)

    monkeypatch.setattr(RunsWorker, "_read_answers", read_late)
    sleeping(monkeypatch, script)
    node.start(RUN)
    RunsWorker(spec_of(node, address))
    error = reply_of(node).error
    assert (error.reason, error.code in LOST) == (reason, is_lost)


def test_a_run_has_one_process_which_stays_and_the_longest_idle_one_makes_room(
    node, address, monkeypatch
):
    sleeping(monkeypatch, "while True: print(input(), flush=True)")
    node.start(RUN)
    executor, spec = WarmExecutor(), spec_of(node, address)

    def launched(run_id, task_id):
        executor.run_id = run_id
        executor.launch(replace(spec, task_id=task_id, token=f"{task_id}"))
        worker = executor._workers[run_id]
        wait_until(lambda: not worker.tokens)
        return worker

    workers = []
    for run_id in range(MOST_WORKERS + 1):
        workers.append(worker := launched(run_id, run_id + 1))
        if run_id < MOST_WORKERS:
            worker.since -= IDLE_SECONDS - 60
            executor.reconcile()
    assert len({worker.process.pid for worker in workers}) == MOST_WORKERS + 1
    executor.reconcile()
    executor.reconcile()
    assert list(executor._workers) == list(range(1, MOST_WORKERS + 1))
    assert launched(2, MOST_WORKERS + 2) is workers[2]
    executor._workers[3].since -= IDLE_SECONDS
    executor.reconcile()
    assert 3 not in executor._workers
    executor.close()
    assert all(worker.process.poll() is not None for worker in workers)
