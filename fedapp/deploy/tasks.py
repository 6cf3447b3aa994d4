"""Processes that execute Flower's tasks. A task's token lives as long as its process.

Flower starts a process for a task and forgets it: the token expires 30 s later if the process has
not sent a heartbeat by then, which a busy machine does not manage, and a process that has died is
noticed after 60 s. So the SuperExec sends heartbeats for its processes, and reports their death.
"""

from __future__ import annotations

import logging
import os
import select
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from signal import Signals
from typing import Any

import httpx
from flwr.common.constant import SubStatus
from flwr.proto.runtime_pb2 import PushTaskOutputRequest, SendTaskHeartbeatRequest
from flwr.supercore.constant import (
    TASK_TOKEN_HEADER,
    TASK_TYPE_TO_APPIO_API_ADDRESS_ARG,
    TASK_TYPE_TO_COMMAND,
)
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.protobuf.client import ProtobufCall, ProtobufRequestContext
from flwr.supercore.retry import RetryInvoker
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.superexec import run_superexec
from flwr.supercore.superexec.executor import ExecutionSpec, LaunchResult, SubprocessExecutor
from flwr.supercore.tls import validate_and_resolve_root_certificates

from fedapp.deploy.warm import NOT_STARTED, replace

log = logging.getLogger("fedapp")
BEAT_SECONDS = 10.0
START_SECONDS = 600.0  # that a process may take until it is ready
STOPPED_SECONDS = 60.0  # that a process may be stopped by a signal, as long as Flower waits


class Token:
    """The token of the task that requests are about; empty between tasks."""

    def __init__(self, text: str = "") -> None:
        self.text = text

    def intercept(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> httpx.Response:
        """Add the token to a request."""
        context.request.headers[TASK_TOKEN_HEADER] = self.text
        return call_next(context)

    def client(
        self, address: str, insecure: bool, ca: str | None, retry: RetryInvoker | None = None
    ) -> RuntimeHttpClient:
        """A connection to the SuperNode or SuperLink that sends the token."""
        # Flower's retry invoker exits this process when a token is refused; None does not retry.
        certificates = validate_and_resolve_root_certificates(ca, insecure)
        version_header = RuntimeVersionHttpInterceptor(component_name="SuperExec")
        return RuntimeHttpClient.from_server_address(
            address, insecure, certificates, [version_header, self], retry_invoker=retry
        )


class TaskProcess:
    """A process and the tokens of its open tasks, of which ``spec`` has the first."""

    is_ready: bool | None = None  # None: not known

    def __init__(self, spec: ExecutionSpec, command: Sequence[str], **how: Any) -> None:
        self.tokens, self._why, self._began = {spec.token}, "", time.monotonic()
        self.process = subprocess.Popen(command, **how)
        self._watch = threading.Thread(target=self._keep_tokens, args=(spec,), daemon=True)
        self._watch.start()

    @property
    def start_seconds(self) -> float:
        """Seconds since the process began; 0 once it is known to be ready."""
        return 0.0 if self.is_ready else time.monotonic() - self._began

    def end(self, why: str) -> None:
        """Kill the process and report its open tasks as failed."""
        self._why = why
        self.process.kill()
        self.process.wait()
        self._watch.join(1)  # the report takes longer where nobody answers

    def _keep_tokens(self, spec: ExecutionSpec) -> None:
        """Send heartbeats until the process has ended, then report its open tasks as failed."""
        token = Token()
        last_running = time.monotonic()
        status = None
        address, ca = spec.runtime_api_address, spec.root_certificates_path
        with token.client(address, spec.insecure, ca) as client:
            while status is None or self.tokens:
                with suppress(subprocess.TimeoutExpired):
                    if (status := self.process.wait(BEAT_SECONDS)) == 0:
                        self.tokens.clear()  # it has reported by itself
                    self._read_last_answers()
                if not self._is_stopped():
                    last_running = time.monotonic()
                elif time.monotonic() - last_running > STOPPED_SECONDS:
                    self._why = f"was stopped for {STOPPED_SECONDS:.0f} s"
                    self.process.kill()
                for token.text in list(self.tokens):
                    try:
                        if status is not None:
                            why = f"{spec.task_type} {self._why or self._ending(status)}"
                            output = PushTaskOutputRequest(sub_status=SubStatus.FAILED, details=why)
                            client.PushTaskOutput(output)
                            log.error("%s", why)
                            self.tokens.discard(token.text)
                        elif self.start_seconds < START_SECONDS and not self._beats():
                            client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
                    except httpx.HTTPError as error:
                        if getattr(getattr(error, "response", None), "is_client_error", False):
                            self.tokens.discard(token.text)  # the task is finished, or has expired
                        else:
                            time.sleep(1)  # until the SuperLink or SuperNode answers again
        if self.process.stdout:
            self.process.stdout.close()

    def _read_last_answers(self) -> None:
        """Wait for what the ended process has written."""

    def _beats(self) -> bool:
        """Whether the process sends heartbeats: then it has closed its end of a pipe.

        It also knows when its task is finished, after which a heartbeat is refused as an error.
        """
        pipe = self.process.stdout
        return pipe is not None and bool(select.select([pipe], [], [], 0)[0])

    def _is_stopped(self) -> bool:
        with suppress(ChildProcessError):  # it has ended
            look = os.WSTOPPED | os.WNOHANG | os.WNOWAIT
            return os.waitid(os.P_PID, self.process.pid, look) is not None
        return False

    def _ending(self, status: int) -> str:
        if status < 0:
            return f"was killed by {Signals(-status).name}"
        ended = f"ended with status {status}"
        return f"{NOT_STARTED}: it {ended}" if status and self.is_ready is False else ended


class TaskExecutor(SubprocessExecutor):
    """Flower's executor, with tokens that live as long as the processes."""

    streams: Mapping[str, int] = {}

    def __init__(self) -> None:
        self._started: dict[int, TaskProcess] = {}  # by task

    def launch(self, spec: ExecutionSpec) -> LaunchResult:
        """Start executing a task."""
        before = self._started.pop(spec.task_id, None)
        if before and (seconds := before.start_seconds):
            # Flower hands out a task again whose process has not started in time.
            is_given_up = seconds > START_SECONDS
            before.tokens |= {spec.token} if is_given_up else set()
            before.end(f"{NOT_STARTED} within {seconds:.0f} s")
            if is_given_up:
                return LaunchResult.accepted()
        self._started[spec.task_id] = self.start(spec)
        return LaunchResult.accepted()

    def start(self, spec: ExecutionSpec) -> TaskProcess:
        """Start the process of a task."""
        options = [TASK_TYPE_TO_APPIO_API_ADDRESS_ARG[spec.task_type], spec.runtime_api_address]
        options += ["--token", spec.token, "--parent-pid", str(spec.parent_pid)]
        if spec.insecure:
            options.append("--insecure")
        elif ca := spec.root_certificates_path:
            options += ["--root-certificates", ca]
        if spec.runtime_dependency_install:
            options.append("--allow-runtime-dependency-installation")
        output = subprocess.DEVNULL if spec.suppress_output else None
        streams = {"stdout": output, "stderr": output, **self.streams}
        return TaskProcess(spec, [*self.program(spec), *options], **streams)

    def program(self, spec: ExecutionSpec) -> list[str]:
        """The command that executes a task."""
        return [TASK_TYPE_TO_COMMAND[spec.task_type]]

    def reconcile(self) -> None:
        """Forget the processes without open tasks."""
        self._started = {task: process for task, process in self._started.items() if process.tokens}


def superexec() -> None:
    """Let Flower's SuperExec have this executor."""
    replace(run_superexec, get_executor=lambda *_, **__: TaskExecutor())


coordinator = superexec
