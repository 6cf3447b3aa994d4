"""A site's executor that keeps one process per run, and that process.

The process starts with the run's first message and ends with the run, so no run sees another's
memory. While a run waits for other sites, its process waits too, up to `IDLE_SECONDS`; beyond
`MOST_WORKERS` processes, the one that has waited longest ends.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from signal import SIG_DFL, SIGINT, signal
from typing import IO, TextIO, cast

from flwr.common.constant import SubStatus
from flwr.proto.task_pb2 import Task as TaskProto
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.superexec import run_superexec
from flwr.supercore.superexec.executor import ExecutionSpec, LaunchResult
from flwr.supercore.superexec.plugin import AutoExecPlugin
from flwr.supernode.runtime import run_clientapp

from fedapp.client_app import SiteApp
from fedapp.deploy.tasks import BEAT_SECONDS, TaskExecutor, TaskProcess, Token
from fedapp.deploy.warm import apply, replace
from fedapp.kernels import load_ahead, modules_with_kernels
from fedapp.messages.wire import WAITING
from fedapp.process import keep_imported, start_log
from fedapp.site.store import Stores

IDLE_SECONDS = 3600.0  # as long as a run waits for a site by default
MOST_WORKERS = 4  # of 430 to 470 MB; more only while all are answering


class WarmExecutor(TaskExecutor):
    """Starts one process per run."""

    def __init__(self) -> None:
        super().__init__()
        self.run_id = 0  # of the next task to launch
        self._workers: dict[int, RunsWorker] = {}

    def start(self, spec: ExecutionSpec) -> TaskProcess:
        """Pass the task to the run's process, starting one if needed."""
        worker = self._workers.get(self.run_id)
        if worker is None or not worker.ask(spec.token):
            self._workers[self.run_id] = worker = RunsWorker(spec)
        return worker

    def reconcile(self) -> None:
        """End processes that have waited too long, and forget those that have ended."""
        super().reconcile()
        for run_id, worker in sorted(self._workers.items(), key=lambda item: item[1].since):
            idle = worker.idle_seconds()
            if idle > (0 if len(self._workers) > MOST_WORKERS else IDLE_SECONDS):
                worker.end("was idle")
            if worker.process.poll() is not None:
                del self._workers[run_id]

    def close(self) -> None:
        """End all processes."""
        for worker in self._workers.values():
            worker.end("was closed")


class RunsWorker(TaskProcess):
    """The process that answers the messages of one run, started for its first task."""

    is_ready = False

    def __init__(self, spec: ExecutionSpec) -> None:
        self.since = time.monotonic()  # of the last answer
        self._all_read = threading.Event()
        place = (spec.runtime_api_address, spec.insecure, spec.root_certificates_path)
        command = [sys.executable, "-P", "-m", "fedapp.deploy.warm.executor", json.dumps(place)]
        pipe = subprocess.PIPE
        super().__init__(spec, command, stdin=pipe, stdout=pipe, text=True)
        threading.Thread(target=self._read_answers, daemon=True).start()
        self.ask(spec.token)

    def ask(self, token: str) -> bool:
        """Pass on a task; False if the process had ended before it could take it."""
        if self.process.poll() is not None:
            return False
        self.tokens.add(token)
        with suppress(BrokenPipeError, ValueError):  # it ends, and its tasks are reported as failed
            print(token, file=cast(IO[str], self.process.stdin), flush=True)
        return True

    def idle_seconds(self) -> float:
        """Seconds since the last answer; 0 during a task."""
        return 0.0 if self.tokens else time.monotonic() - self.since

    def _read_answers(self) -> None:
        """Remove answered tasks; end the process after its run."""
        stdin, stdout = cast(IO[str], self.process.stdin), cast(IO[str], self.process.stdout)
        with suppress(BrokenPipeError), stdin, stdout:
            for line in stdout:
                self.is_ready = True
                self.since = time.monotonic()
                self.tokens.discard(line.strip())
                if line.startswith("ended"):
                    break
            self.process.kill()
        self._all_read.set()

    def _read_last_answers(self) -> None:
        self._all_read.wait(BEAT_SECONDS)

    def _beats(self) -> bool:
        return False


class RunNotingPlugin(AutoExecPlugin):
    """Flower's plugin, which here also passes the run of a task to the executor."""

    def launch_task(self, token: str, task: TaskProto) -> LaunchResult:
        """Note the run and launch."""
        assert isinstance(self.executor, WarmExecutor)
        self.executor.run_id = task.run_id
        return super().launch_task(token, task)


def superexec() -> None:
    """Answer a run's messages in one process."""
    make = lambda *_, **__: WarmExecutor()  # noqa: E731
    replace(run_superexec, AutoExecPlugin=RunNotingPlugin, get_executor=make)


# ``python -m fedapp.deploy.warm.executor`` reads task tokens from stdin, one a line, answers each
# task with Flower's functions, and writes a line: ``ready``, each token that is answered, and
# ``ended`` after the run's last message. It exits when stdin closes.


class EndingStores(Stores):
    """Notes that the run has ended here."""

    has_ended = False

    def ended(self, folder: Path) -> None:
        super().ended(folder)
        self.has_ended = True


class Worker:
    """Answers tasks over one connection."""

    def __init__(self, token: Token, client: RuntimeHttpClient) -> None:
        self._token, self._client = token, client
        self._app: SiteApp | None = None
        self._stores = EndingStores()
        apply("worker", client)

    def answer(self, token: str) -> bool:
        """Answer one task; True if the run has ended here with it."""
        self._token.text = token
        message, context, _, fab = run_clientapp.pull_task_input(self._client)
        if self._app is None:
            self._app = SiteApp(fab.content, self._stores)
        reply = self._app(message, context)
        run_clientapp.push_message(self._client, reply, context)
        run_clientapp.push_task_output(self._client, context, SubStatus.COMPLETED, "")
        if reply.has_error():
            return reply.error.code != WAITING
        return self._stores.has_ended


def _read(source: TextIO, tokens: SimpleQueue[str]) -> None:
    """Forward tokens to the queue. Exits when stdin closes: the parent has died."""
    for line in source:
        tokens.put(line.strip())
    os._exit(0)


def main() -> None:
    """Answer tasks until stdin closes."""
    # stdout carries the answers, so whatever the app prints goes to stderr, the log.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    start_log("worker")
    load_ahead([*modules_with_kernels(), "xgboost"])
    tokens: SimpleQueue[str] = SimpleQueue()
    threading.Thread(target=_read, args=(sys.stdin, tokens), daemon=True).start()
    signal(SIGINT, SIG_DFL)  # what Flower raises if a token is refused; without a traceback
    token = Token()
    address, insecure, ca = json.loads(sys.argv[1])
    client = token.client(address, insecure, ca, make_simple_http_retry_invoker())
    worker = Worker(token, client)
    keep_imported()
    answers.write("ready\n")
    while True:
        answers.flush()
        has_ended = worker.answer(tokens.get())
        answers.write(f"{token.text}\n" + "ended\n" * has_ended)


if __name__ == "__main__":
    main()
