"""A site's executor that keeps one process per run, and that process.

The process starts with the run's first message and ends with the run, or after `IDLE_SECONDS`
without messages; so no run sees another's memory. If it dies, its messages are answered with an
error at once.
"""

from __future__ import annotations

import argparse
import logging
import os
import secrets
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import IO, Any, TextIO, cast

import httpx
from flwr.common.constant import SubStatus
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.proto.task_pb2 import Task as TaskProto
from flwr.supercore.constant import TASK_TOKEN_HEADER
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.protobuf.client import ProtobufCall, ProtobufRequestContext
from flwr.supercore.retry import RetryInvoker, make_simple_http_retry_invoker
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.superexec import run_superexec
from flwr.supercore.superexec.executor import ExecutionSpec, LaunchResult
from flwr.supercore.superexec.plugin import AutoExecPlugin
from flwr.supercore.tls import validate_and_resolve_root_certificates
from flwr.supernode.runtime import run_clientapp
from flwr.supernode.runtime.run_clientapp import push_task_output

from fedapp.client_app import SiteApp
from fedapp.deploy.superexec import SiteExecutor, tls_options
from fedapp.deploy.warm import BACKOFF, replace
from fedapp.deploy.warm.supernode import ObjectCarrier, add, contents_of
from fedapp.home import home
from fedapp.kernels import load_ahead, modules_with_kernels
from fedapp.messages.wire import ENVELOPE
from fedapp.process import start_log
from fedapp.site.store import Store

log = logging.getLogger("fedapp")
IDLE_SECONDS = 30.0


class WarmExecutor(SiteExecutor):
    """Starts one process per run."""

    def __init__(self) -> None:
        self.run_id = 0  # of the next task to launch
        self._workers: dict[int, RunsWorker] = {}

    def answer(self, spec: ExecutionSpec) -> None:
        """Pass the task to the run's process, starting one if needed."""
        worker = self._workers.get(self.run_id)
        if worker is None or not worker.ask(spec.token):
            self._workers[self.run_id] = worker = RunsWorker(spec)
            worker.ask(spec.token)

    def reconcile(self) -> None:
        """End idle processes."""
        for run_id, worker in list(self._workers.items()):
            if worker.idle_seconds() > IDLE_SECONDS:
                worker.end()
                del self._workers[run_id]

    def close(self) -> None:
        """End all processes."""
        for worker in self._workers.values():
            worker.end()


class RunsWorker:
    """The process that answers the messages of one run, started for its first task."""

    def __init__(self, spec: ExecutionSpec) -> None:
        self._connection = (spec.runtime_api_address, spec.insecure, spec.root_certificates_path)
        self._asked = deque[str]()  # tokens of unanswered tasks, oldest first
        self._since, self._lock = time.monotonic(), threading.Lock()
        command = [sys.executable, "-P", "-m", "fedapp.deploy.warm.executor"]
        command += [spec.runtime_api_address, *tls_options(spec)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self._tokens, answers = cast(IO[str], self._process.stdin), self._process.stdout
        self._watch = threading.Thread(target=self._note, args=(answers,), daemon=True)
        self._watch.start()

    def ask(self, token: str) -> bool:
        """Pass on a task; False if the process had ended before it could take it."""
        with self._lock:
            if self._process.poll() is not None:
                return False
            try:
                print(token, file=self._tokens, flush=True)
            except BrokenPipeError:
                return False
            self._asked.append(token)
            return True

    def idle_seconds(self) -> float:
        """Seconds since the last answer; 0 during a task."""
        return 0.0 if self._asked else time.monotonic() - self._since

    def end(self) -> None:
        """Kill the process."""
        with self._lock:
            self._asked.clear()
        self._process.kill()
        self._watch.join()

    def _note(self, stdout: IO[str]) -> None:
        """Remove answered tasks; report an error for those of a process that died."""
        with stdout:
            for line in stdout:
                with self._lock:
                    if self._asked:
                        self._asked.popleft()
                    self._since = time.monotonic()
                if line.strip():
                    break
        self._process.kill()
        status = self._process.wait()
        with self._lock:
            unanswered = list(self._asked)
            self._asked.clear()
            with suppress(BrokenPipeError):
                self._tokens.close()
        for token in unanswered:
            reason = f"the process that answered has ended with status {status}"
            log.error("%s", reason)
            # The task may be finished already, if the process died before it could report that.
            with Task(token).client(*self._connection) as client:
                push_task_output(client, None, SubStatus.FAILED, reason)


class RunNotingPlugin(AutoExecPlugin):
    """Flower's plugin, which here also passes the run of a task to the executor."""

    def launch_task(self, token: str, task: TaskProto) -> LaunchResult:
        """Note the run and launch."""
        assert isinstance(self.executor, WarmExecutor)
        self.executor.run_id = task.run_id
        return super().launch_task(token, task)


def signed_request(sender: bytes, **fields: Any) -> AcquireTaskRequest:
    """Replaces ``AcquireTaskRequest``: adds which process asks for a task."""
    request = AcquireTaskRequest(**fields)
    add(request, sender=sender)
    return request


def warm_executor() -> WarmExecutor:
    """Patch Flower's SuperExec and return its executor.

    An executor's open tasks are lost when it dies; the SuperNode notices that the next one's first
    request has another sender.
    """
    request = partial(signed_request, secrets.token_bytes(16))
    replace(run_superexec, AutoExecPlugin=RunNotingPlugin, AcquireTaskRequest=request)
    return WarmExecutor()


# ``python -m fedapp.deploy.warm.executor`` reads task tokens from stdin, one a line, answers each
# task with Flower's functions, and writes a line: ``ended`` after the run's last message, else
# empty. It exits when stdin closes.


class Task:
    """The token of the current task; empty between tasks."""

    def __init__(self, token: str = "") -> None:
        self.token = token

    def intercept(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> httpx.Response:
        """Add the token to a request."""
        context.request.headers[TASK_TOKEN_HEADER] = self.token
        return call_next(context)

    def client(
        self, address: str, insecure: bool, ca: str | None, retry: RetryInvoker | None = None
    ) -> RuntimeHttpClient:
        """A connection to the SuperNode that sends the token."""
        # Flower's retry invoker exits this process when a token is refused; None does not retry.
        certificates = validate_and_resolve_root_certificates(ca, insecure)
        version_header = RuntimeVersionHttpInterceptor(component_name="flwr-clientapp")
        return RuntimeHttpClient.from_server_address(
            address, insecure, certificates, [version_header, self], retry_invoker=retry
        )


class Worker:
    """Answers tasks over one connection."""

    def __init__(self, task: Task, client: RuntimeHttpClient) -> None:
        self._task, self._client = task, client
        self._app: SiteApp | None = None
        self._lock = threading.Lock()
        self._carrier = ObjectCarrier()
        self._carrier.serve(client)
        self._send_heartbeat = make_task_heartbeat_fn_http(client)
        HeartbeatSender(self._heartbeat).start()

    def answer(self, token: str) -> bool:
        """Answer one task; True if the run has ended here with it."""
        self._task.token = token
        message, context, _, fab = run_clientapp.pull_task_input(self._client)
        if self._app is None:
            self._app = SiteApp(fab.content)
        reply = self._app(message, context)
        self._carrier.find = contents_of([reply]).get
        run_clientapp.push_message(self._client, reply, context)
        with self._lock:
            run_clientapp.push_task_output(self._client, context, SubStatus.COMPLETED, "")
            self._task.token = ""
        if reply.has_error():
            return False
        name, model = context.node_config["name"], message.content[ENVELOPE]["model-id"]
        return Store.open(home() / "sites" / str(name) / str(model)).finished

    def _heartbeat(self) -> bool:
        # Between tasks there is nothing to keep alive, and the old token would be refused.
        with self._lock:
            return not self._task.token or self._send_heartbeat()


def _read(source: TextIO, tokens: SimpleQueue[str]) -> None:
    """Forward tokens to the queue. Exits when stdin closes: the parent has died."""
    for line in source:
        tokens.put(line.strip())
    os._exit(0)


def main() -> None:
    """Answer tasks until stdin closes."""
    (parser := argparse.ArgumentParser()).add_argument("address")
    parser.add_argument("--insecure", action="store_true")
    parser.add_argument("--root-certificates")
    args = parser.parse_args()
    # stdout carries the answers, so whatever the app prints goes to stderr, the log.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    start_log("worker")
    load_ahead([*modules_with_kernels(), "xgboost"])
    tokens: SimpleQueue[str] = SimpleQueue()
    threading.Thread(target=_read, args=(sys.stdin, tokens), daemon=True).start()
    pull = partial(pull_and_inflate_object_from_tree, initial_backoff=BACKOFF)
    replace(run_clientapp, pull_and_inflate_object_from_tree=pull)
    task = Task()
    connection = args.address, args.insecure, args.root_certificates
    worker = Worker(task, task.client(*connection, make_simple_http_retry_invoker()))
    while True:
        print("ended" if worker.answer(tokens.get()) else "", file=answers, flush=True)


if __name__ == "__main__":
    main()
