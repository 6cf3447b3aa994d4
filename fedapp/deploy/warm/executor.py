"""A site's executor that keeps one process per run.

The process starts with the run's first message and ends with the run, or after `IDLE_SECONDS`
without messages; so no run sees another's memory. If it dies, its messages are answered with an
error at once.
"""

from __future__ import annotations

import logging
import secrets
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from functools import partial
from typing import IO, Any, cast

from flwr.common.constant import SubStatus
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.proto.task_pb2 import Task as TaskProto
from flwr.supercore.superexec import run_superexec
from flwr.supercore.superexec.executor import ExecutionSpec, LaunchResult
from flwr.supercore.superexec.plugin import AutoExecPlugin
from flwr.supernode.runtime.run_clientapp import push_task_output

from fedapp.deploy.superexec import SiteExecutor, tls_options
from fedapp.deploy.warm import replace
from fedapp.deploy.warm.carried import add
from fedapp.deploy.warm.worker import Task

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
        command = [sys.executable, "-P", "-m", "fedapp.deploy.warm.worker"]
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
