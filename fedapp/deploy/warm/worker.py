"""One process per run at a site: it answers the messages of that run, one after the other.

``python -m fedapp.deploy.warm.worker`` reads task tokens from stdin, one a line, answers each task
with Flower's functions, and writes a line: ``ended`` after the run's last message, else empty. It
exits when stdin closes.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
from functools import partial
from queue import SimpleQueue
from typing import TextIO

import httpx
from flwr.common.constant import SubStatus
from flwr.supercore.constant import TASK_TOKEN_HEADER
from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.protobuf.client import ProtobufCall, ProtobufRequestContext
from flwr.supercore.retry import RetryInvoker, make_simple_http_retry_invoker
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.tls import validate_and_resolve_root_certificates
from flwr.supernode.runtime import run_clientapp

from fedapp import log_lines
from fedapp.client_app import SiteApp
from fedapp.deploy.warm import BACKOFF, replace
from fedapp.deploy.warm.carried import Carrier, contents_of
from fedapp.home import home
from fedapp.kernels import load_ahead, modules_with_kernels
from fedapp.messages.wire import ENVELOPE
from fedapp.site.store import Store


class Task:
    """The token of the current task; empty between tasks."""

    def __init__(self, token: str = "") -> None:
        self.token = token

    def intercept(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> httpx.Response:
        """Add the token to a request."""
        context.request.headers[TASK_TOKEN_HEADER] = self.token
        return call_next(context)

    def client(
        # Flower's retry invoker exits this process when a token is refused; None does not retry.
        self,
        address: str,
        insecure: bool,
        ca: str | None,
        retry: RetryInvoker | None = None,
    ) -> RuntimeHttpClient:
        """A connection to the SuperNode that sends the token."""
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
        self._carrier = Carrier()
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
    log_lines.begin("worker")
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
