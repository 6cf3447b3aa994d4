"""One process a run answers its messages, at a site.

It is warm after the first of them and ends with the run, or when no message has come for a while;
so no run sees another one's memory. Where it dies, its message is answered with an error at once.
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
    """Starts one process a run."""

    def __init__(self) -> None:
        self.run_id = 0  # of the task to launch next
        self._workers: dict[int, RunsWorker] = {}

    def answer(self, spec: ExecutionSpec) -> None:
        """Have the run's process answer, a new one where there is none."""
        worker = self._workers.get(self.run_id)
        if worker is None or not worker.ask(spec.token):
            self._workers[self.run_id] = worker = RunsWorker(spec)
            worker.ask(spec.token)

    def reconcile(self) -> None:
        """End processes that nobody has asked for a while."""
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
        self._asked = deque[str]()  # tasks without an answer, the oldest first
        self._since, self._lock = time.monotonic(), threading.Lock()
        command = [sys.executable, "-P", "-m", "fedapp.deploy.warm.worker"]
        command += [spec.runtime_api_address, *tls_options(spec)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self._tokens, answers = cast(IO[str], self._process.stdin), self._process.stdout
        self._watch = threading.Thread(target=self._note, args=(answers,), daemon=True)
        self._watch.start()

    def ask(self, token: str) -> bool:
        """Have a task answered; False where the process has ended before it could take it."""
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
        """Since the last task was answered; 0 during one."""
        return 0.0 if self._asked else time.monotonic() - self._since

    def end(self) -> None:
        """End the process, whatever it does."""
        with self._lock:
            self._asked.clear()
        self._process.kill()
        self._watch.join()

    def _note(self, answers: IO[str]) -> None:
        """Note what is answered, and answer for a process that died meanwhile."""
        with answers:
            for line in answers:
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
            # The task may have been finished before the process could say so.
            with Task(token).client(*self._connection) as client:
                push_task_output(client, None, SubStatus.FAILED, reason)


class RunNotingPlugin(AutoExecPlugin):
    """Flower's, which tells its executor the run of a task."""

    def launch_task(self, token: str, task: TaskProto) -> LaunchResult:
        """Launch as Flower does."""
        assert isinstance(self.executor, WarmExecutor)
        self.executor.run_id = task.run_id
        return super().launch_task(token, task)


def signed_request(sender: bytes, **fields: Any) -> AcquireTaskRequest:
    """Stands for ``AcquireTaskRequest``: says which process asks for a task."""
    request = AcquireTaskRequest(**fields)
    add(request, sender=sender)
    return request


def warm_executor() -> WarmExecutor:
    """An executor that Flower's SuperExec tells the run of a task, and the SuperNode from another.

    What an executor was asked is lost with it: the next one's first request tells the SuperNode so.
    """
    request = partial(signed_request, secrets.token_bytes(16))
    replace(run_superexec, AutoExecPlugin=RunNotingPlugin, AcquireTaskRequest=request)
    return WarmExecutor()
