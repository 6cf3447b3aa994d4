"""A site's standing process: one port for the other sites, one on the loopback for callers."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from fedapp.errors import ConfigError
from fedapp.home import shared_lock
from fedapp.process import leave_no_core, listening_socket, raise_file_limit, start_log
from fedapp.serve.http import (
    HANDLERS,
    LOOPBACK,
    MOST_BYTES,
    MOST_ROWS,
    Admission,
    HostCheck,
    RefusedError,
    read_body,
    read_object,
)
from fedapp.serve.joint import IDLE_SECONDS, Joint
from fedapp.serve.peers import Answers, PeerProtocol
from fedapp.serve.v2 import Answered, Asked, Tensor, routes
from fedapp.serve.versions import Site, Version
from fedapp.site.settings import is_address
from fedapp.site.standing import METHOD, write_reached
from fedapp.trees.divided import ActivePart

log = logging.getLogger("fedapp.site")
PING_SECONDS, FILES_SECONDS = 5.0, 1.0  # a party that is away is pinged as often as files are read
# Strangers too can begin a handshake. Each connection takes some 50 KB.
HANDSHAKE_SECONDS, MOST_FILES = 5.0, 16_384


class Standing:
    """What a site serves now: at the active party scores, elsewhere the reason why there are none.

    It is ``fedapp.serve.v2.Served`` by whatever version answers.
    """

    inputs = Joint.inputs

    def __init__(self, site: Site) -> None:
        self.site = site
        self._joint: Joint | None = None
        self._scores, self._probes = Admission(), Admission()
        self._closing: set[asyncio.Task[None]] = set()  # and what else runs by itself
        self._pinged = -PING_SECONDS

    @property
    def _now(self) -> Version | None:
        return self.site.versions.get(self.site.current)

    @property
    def name(self) -> str:
        """Of the service, as callers know it."""
        return self._now.agreed.service if self._now else "none"

    @property
    def version(self) -> str:
        """Id of the version."""
        return self._now.agreed.version if self._now else "none"

    @property
    def outputs(self) -> Sequence[Tensor]:
        """Scores by name, and the class."""
        return self._joint.outputs if self._joint else ()

    async def joint(self) -> Joint:
        """The version that scores now; raises RefusedError if there is none."""
        site = self.site
        await site.refreshed()
        loaded, name = site.versions.get(site.current), site.config.name
        site.check_allowed(503)
        if loaded is None:
            fault = site.faults.get(site.current, "none: fedapp federation activate RUN begins one")
            raise RefusedError(503, f"version must be active at {name}, got {fault}")
        if not isinstance(loaded.part, ActivePart):
            rule = f"scores are at {loaded.agreed.active}, which has the labels"
            raise RefusedError(404, f"{name} must be the party with the labels: {rule}")
        if self._joint is None or self._joint.loaded is not loaded:
            replaced, self._joint = self._joint, Joint(site, loaded)
            self._joint.look_back(site.before)
            if replaced:
                self._begin(replaced.close())
        return self._joint

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        self._closing.add(task := asyncio.create_task(work))
        task.add_done_callback(self._closing.discard)

    async def answer(self, asked: Asked) -> Answered:
        """Scores; raises RefusedError."""
        with await self.joint() as joint:
            return await joint.answer(asked)

    async def ready(self) -> str:
        """Why the next request gets no score; empty if it gets one."""
        try:
            joint = await self.joint()
            self.site.check_log()
            with joint, self._probes:
                return await joint.ready()
        except RefusedError as error:
            return str(error)

    async def close(self) -> None:
        """Close all connections."""
        if self._joint:
            await self._joint.close()

    async def watch(self) -> None:
        """Ask the other parties whether they answer, if it is time, and say so beside the version.

        ``clients.standing`` reads that once it has switched.
        """
        now, joint = time.monotonic(), self._joint
        is_new = joint is None or joint.version != self.site.current
        if not (is_new or (joint and joint.faults) or now >= self._pinged + PING_SECONDS):
            return
        self._pinged = now
        try:
            with await self.joint() as joint:
                await joint.ping()
                write_reached(self.site.config.name, joint.version, sorted(joint.away))
                joint.look_back(self.site.before)
                if joint.before:
                    self._begin(joint.renew())
        except RefusedError as error:
            log.debug("no party is asked: %s", error)

    @property
    def app(self) -> Starlette:
        """The application for callers."""
        more = [
            Route("/health", self._health),
            Route("/metrics", self._metrics),
            Route("/nightly", self._nightly, methods=["POST"]),
        ]
        return Starlette(
            routes=[*routes(self, MOST_ROWS, MOST_BYTES, self._scores), *more],
            exception_handlers=HANDLERS,
            middleware=[Middleware(HostCheck, hosts=LOOPBACK)],
        )

    async def _health(self, request: Request) -> Response:
        """What the next request would get, by either way, and which party is away."""
        site, reason, joint = self.site, "", None
        try:
            joint = await self.joint()
        except RefusedError as error:
            if error.status != 404:  # a passive party, which is well without scores
                reason = str(error)
        try:
            site.check_log()
        except RefusedError as error:
            reason = reason or str(error)
        if joint:
            with joint, self._probes:
                reason = await joint.ready() or reason
        version = site.versions.get(site.current)
        status: dict[str, Any] = {"status": reason or "ok", "site": site.config.name}
        status |= {"version": site.current, "rows": len(version.ids) if version else 0}
        status |= {"parties": joint.parties if joint else {}}
        status |= {"nightly": joint.nightly or "ok"} if joint else {}
        return JSONResponse(status, 503 if reason else 200)

    async def _metrics(self, request: Request) -> Response:
        return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST)

    async def _nightly(self, request: Request) -> Response:
        """Ask the other parties for cells of rows ahead."""
        rule = 'body must be {"ids": [id, ...]} or {"all": true}'
        with self._scores:
            document = read_object(await read_body(request, MOST_BYTES), rule)
            ids = document.get("ids")
            is_list = isinstance(ids, list) and ids and all(isinstance(one, str) for one in ids)
            if len(document) != 1 or not (is_list or document.get("all") is True):
                raise RefusedError(422, f"{rule}, got another")
            with await self.joint() as joint:
                return JSONResponse(await joint.fetch(ids))


def stand(path: Path, listen: str, port: int, say: Callable[[str], None]) -> None:
    """Serve until a signal ends it.

    ``path`` is the node config, ``listen`` HOST:PORT for peers; by default it names both ports.
    """

    ended_by: list[int] = []

    async def until_a_signal() -> None:
        ending, loop = asyncio.Event(), asyncio.get_running_loop()

        def end(number: int) -> None:
            ended_by.append(number)
            ending.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, end, number)
        await serve(Site(path), listen, port, ending, say)

    start_log(METHOD)
    leave_no_core()
    raise_file_limit(MOST_FILES)
    run: Callable[..., None] = asyncio.run
    with suppress(ImportError):  # where it is installed
        from uvloop import run
    run(until_a_signal())
    if signal.SIGINT in ended_by:  # SIGTERM is how a service ends
        raise KeyboardInterrupt


async def serve(
    site: Site, listen: str, port: int, ending: asyncio.Event, say: Callable[[str], None]
) -> None:
    """Serve until ``ending`` is set."""
    if not (address := site.config.standing_address):
        rule = "must be where the other sites reach this process, HOST:PORT"
        raise ConfigError(f"standing-address in the node config {rule}, got none")
    port = port or site.config.standing_port
    if listen and not is_address(listen):
        raise ConfigError(f"--listen must be HOST:PORT, got {listen}")
    host, _, peers_port = (listen or f"0.0.0.0:{address.rpartition(':')[2]}").rpartition(":")
    standing, answers = Standing(site), Answers(site)
    await site.refreshed()
    answers.count_logged()
    to_peers, to_callers = _server(answers.app), _server(standing.app)
    to_peers.config.ssl = site.server_context
    way = "standing-port in the node config names another for callers, --listen for peers"
    for_callers = listening_socket(LOOPBACK[0], port, way)
    for_peers = listening_socket(host, int(peers_port), way)
    tasks = [
        asyncio.create_task(_every(FILES_SECONDS, standing.watch)),
        asyncio.create_task(_every(FILES_SECONDS, site.follow)),
        asyncio.create_task(to_peers.serve([for_peers])),
        asyncio.create_task(to_callers.serve([for_callers])),
    ]
    say(f"{site.config.name} answers other sites at {host}:{peers_port}, callers at port {port}")
    try:
        with shared_lock(site.folder):
            await ending.wait()
        to_peers.should_exit = to_callers.should_exit = True
        await asyncio.gather(*tasks[2:])
    finally:
        for task in tasks:
            task.cancel()
        await standing.close()
        with suppress(RefusedError):  # where the disk is full
            site.note_refused()


class _Server(uvicorn.Server):
    """A server among several, whose signals are handled elsewhere."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, with ``HANDSHAKE_SECONDS``, of which it has no setting."""
        await super().startup([])
        config, loop, tls = self.config, asyncio.get_running_loop(), dict[str, Any]()
        if config.ssl:
            tls = {"ssl": config.ssl, "ssl_handshake_timeout": HANDSHAKE_SECONDS}
        for sock in sockets or ():
            listening = await loop.create_server(self._protocol, sock=sock, backlog=256, **tls)
            self.servers.append(listening)

    def _protocol(self) -> Any:
        protocol: Any = self.config.http_protocol_class
        about = {"server_state": self.server_state, "app_state": self.lifespan.state}
        return protocol(config=self.config, **about)


def _server(app: Starlette) -> _Server:
    config = uvicorn.Config(
        app,
        http=PeerProtocol,
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        timeout_keep_alive=int(IDLE_SECONDS) + 15,
        timeout_graceful_shutdown=1,
    )
    config.load()
    return _Server(config)


async def _every(seconds: float, work: Callable[[], Awaitable[None]]) -> None:
    """Repeat a piece of work; what fails is logged, and tried again."""
    while True:
        try:
            await work()
        except Exception:
            log.exception("a regular task of the standing process has failed")
        await asyncio.sleep(seconds)
