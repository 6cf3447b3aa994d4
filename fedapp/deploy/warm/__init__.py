"""Patches to Flower 1.41 and 1.42 that cut an exchange from 13 s to 0.1 s.

Flower polls for messages every 3 s and starts a process for each, and neither is configurable. So a
few names in its modules are replaced; its other functions stay. Every function that looks up such a
name, or is called here, is listed below with a digest of its source. If any source differs, nothing
is replaced: exchanges take as long as Flower's own, and nothing else changes.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial, partialmethod
from importlib.metadata import version
from operator import attrgetter
from queue import Queue
from threading import Event
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from flwr.app import Message
    from flwr.serverapp import Grid

log = logging.getLogger("fedapp")

# Seconds before an announced object that has not arrived is requested again; 1 in Flower.
BACKOFF = 0.02
TICK = 0.1  # seconds after which a simulation that has ended notices it
PULL_SECONDS = 0.5  # that a simulation's ServerApp waits for a reply; Flower's asks without waiting
FLOWERS_CPUS = 2  # Flower's default per actor

VERSIONS = ("1.41.0", "1.42.0")
# [processes], then module or class, then function=digest. One digest holds for all VERSIONS, or one
# for each is separated by /; "none" means that the version has no such function.
DIGESTS = """
[site]
supernode.start_client_internal: start_client_internal=9e89a6 _pull_and_store_message=eaf5d0
  _insert_message=a0c6f4 _push_messages=00bb86
supernode.fleet_http_connection: http_request_response=b80ca3
supernode.nodestate.nodestate_factory:NodeStateFactory. state=b1cb8f
supernode.nodestate.in_memory_nodestate:InMemoryNodeState. __init__=5c1110 store_message=8d38cc
  store_message_and_object_tree=6712f3 get_messages_legacy=1a5a91 delete_messages=b5305a
  finish_task=680080 _store_error_replies=3af030 _on_task_tokens_expired=a181b6
  record_message_processing_start=be1591 record_message_processing_end=46dac2 get_tasks=12178d
  claim_task=a81e71 get_task_by_token=08f66c
supernode.servicer.runtime.runtime_handlers: acquire_task=d11e03 pull_messages=490899
  push_messages=f0b01d pull_task_input=035e6c
supernode.runtime.run_clientapp: run_clientapp=6ce095 pull_task_input=5607a2 push_message=07cb51
  push_task_output=920640
supercore.corestate.in_memory_corestate:InMemoryCoreState. __init__=5f4491 finish_task=74802c
  _cleanup_expired_task_tokens_locked=4d292b acknowledge_task_heartbeat=e00234
supercore.servicer.runtime.runtime_handlers: send_task_heartbeat=0664b5
supercore.heartbeat:HeartbeatSender. __init__=1c966e start=888aef _run=b176ff _heartbeat=cc581b
supercore.protobuf.client:ProtobufClient. from_server_address=786f4a _send=8841dc
supercore.inflatable.inflatable_utils: pull_and_inflate_object_from_tree=139811
supercore.superexec.run_superexec: run_superexec=d11f4e/91e7a3
supercore.superexec.plugin.base_exec_plugin: AutoExecPlugin=557f1a
supercore.superexec.plugin.base_exec_plugin:BaseExecPlugin. launch_task=c968cd
  _build_execution_spec=b7d9e4
supercore.interceptors:RuntimeVersionHttpInterceptor. intercept=5e42a4
supercore.tls: validate_and_resolve_root_certificates=bc209e
supercore.retry: make_simple_http_retry_invoker=49e123 exponential=f3b566
supercore.retry:RetryInvoker. __init__=a6b392 invoke=14c826
supercore.superexec.executor:SubprocessExecutor. launch=83abf3
[site,superlink]
supercore.corestate.in_memory_corestate: ObjectPushSession=86c9a4
supercore.corestate.in_memory_corestate:InMemoryCoreState. start_session=232e93
  delete_sessions_in_run=ecc399 preregister_object_tree=6b9ea0 store_object=2f952e get_object=d68857
  _cleanup_push_session=38de64
supercore.object_store.in_memory_object_store:InMemoryObjectStore. __init__=a97f38
  preregister=9e051e get_object_tree=1283fc put=978d35 get=b67cbc delete=e6ab07
supercore.protobuf.translation:ProtobufTranslationMiddleware. dispatch=9a37d0
supercore.error.http: http_error_translator=63e39a
[site,superlink,server]
supercore.inflatable.inflatable_object: get_all_nested_objects=409d98 get_object_id=1c9d67
  iterate_object_tree=34c0fe no_object_id_recompute=1374cc
[site,server]
supercore.protobuf.client:ProtobufClient. __init__=ea5755 _unary_unary=31d392
supercore.inflatable.inflatable_utils: pull_objects=31bb2d
[superlink]
superlink.servicer.fleet.fleet_handlers: pull_messages=5f1d88 push_messages=70c2fe
superlink.servicer.runtime.runtime_handlers: pull_messages=8c998d push_messages=03b2ea
superlink.routers.fleet.router: fleet_pull_messages=0f9739 fleet_push_messages=925bc1
supercore.routers.runtime.router: pull_messages=ef2d4e push_messages=195c0d
supercore.routers.runtime.tracing:RuntimeTracingMiddleware. dispatch=b097ed/none
supercore.sql_mixin:SqlMixin. __init__=c6aa81 session=2aa8a8
supercore.corestate.sql_corestate:SqlCoreState. __init__=ee58a6
server.superlink.linkstate.linkstate_factory:LinkStateFactory. state=8b1e22
server.superlink.linkstate.sql_linkstate:SqlLinkState. __init__=5aa214
  store_message_and_object_tree=1fd5d6 get_message_res=5c1b46 delete_messages=d4e490
  _check_stored_messages=e4aa2d _on_push_session_expired=5dbe56 _store_generated_message=f1393b
superlink.config_loader: get_objectstore_linkstate_factories=9f697d
superlink.main: _get_middleware=acdbc2/911d5e create_app=ee966b
superlink.routers.control.middlewares: _is_control_path=bfb546 _is_control_auth_route=29389e
superlink.routers.control.middlewares:ControlAuthenticationMiddleware. dispatch=ce00d7
superlink.routers.control.middlewares:ControlEventLogMiddleware. dispatch=492845
superlink.routers.control.middlewares:ControlLicenseMiddleware. dispatch=b49e34
superlink.routers.control.middlewares:ControlSensitiveResponseMiddleware. dispatch=ede59d
superlink.routers.fleet.middlewares:FleetEventLogMiddleware. dispatch=e7c0ea
superlink.routers.fleet.node_auth:NodeAuthMiddleware. dispatch=4b198e
[server]
superlink.grid.http_grid:HttpGrid. _try_push_messages=6e420b push_messages=9aa593
  pull_messages=67a526
[simulation]
server.superlink.fleet.vce.vce_api: add_messages_to_queue=953f4b run_api=f85c0c
server.superlink.fleet.vce.backend.raybackend:RayBackend. _validate_client_resources=0e0b58
server.superlink.linkstate.in_memory_linkstate:InMemoryLinkState. get_message_ins=6547c8
  store_message_ins=a2b78a store_message_res=52a4f7
superlink.grid.inmemory_grid:InMemoryGrid. push_messages=9c70a8 pull_messages=71c93f
"""


@dataclass(frozen=True, slots=True)
class PatchedFunctions:
    """The functions of Flower that the patches of one process depend on."""

    process: str
    slow: str = "seconds"  # time of an exchange without the patches

    def digests(self) -> Iterator[tuple[str, list[str]]]:
        """Yield each function's path and its digests, one per version in ``VERSIONS``."""
        processes = module = ""
        for word in DIGESTS.split():
            name, _, digests = word.partition("=")
            if word.startswith("["):
                processes = word
            elif not digests:
                module = word
            elif self.process in processes.strip("[]").split(","):
                yield f"flwr.{module}{name}", (digests.split("/") * len(VERSIONS))[: len(VERSIONS)]

    def nearest(self) -> tuple[list[str], list[str]]:
        """Known versions closest to the installed Flower, and the functions that differ."""
        differing = {
            candidate: [
                function
                for function, expected in self.digests()
                if digest(function) != expected[column]
            ]
            for column, candidate in enumerate(VERSIONS)
        }
        fewest = min(differing.values(), key=len)
        return [candidate for candidate in VERSIONS if differing[candidate] == fewest], fewest

    def slow_mode(self) -> str:
        """Warning that the installed Flower is unknown; empty if it is known."""
        if not self.nearest()[1]:
            return ""
        rule = version_error("it differs; slow mode, each exchange takes")
        return f"{rule} {self.slow}; what differs: python -m fedapp.deploy.warm"

    def load(self, module: str = "") -> Any:
        """Import a module of patches, or this one; None, with a warning, if Flower is unknown."""
        if not (text := self.slow_mode()):
            try:
                return importlib.import_module(f"{__name__}.{module}".rstrip("."))
            except ImportError as error:  # Flower lacks a constant or class
                text = f"{version_error(error)}; slow mode, each exchange takes {self.slow}"
        log.warning("%s", text)
        return None


SITE, SUPERLINK, SERVER = map(PatchedFunctions, ("site", "superlink", "server"))
SIMULATION = PatchedFunctions("simulation", slow="0.1 s")


@functools.cache
def digest(function: str) -> str:
    """First six hex digits of the SHA-256 of an installed function's source, or "none"."""
    module, _, name = function.partition(":")
    try:
        source = inspect.getsource(attrgetter(name)(importlib.import_module(module)))
    except (ImportError, AttributeError, OSError, TypeError):
        return "none"
    return hashlib.sha256(source.encode()).hexdigest()[:6]


def version_error(why: object) -> str:
    """Error text for an unsuitable Flower."""
    return f"flwr must be {' or '.join(VERSIONS)}, got {version('flwr')}: {why}"


def replace(module: Any, **names: object) -> None:
    """Replace names in a module or class of Flower's; SystemExit if one does not exist."""
    for name, replacement in names.items():
        if not hasattr(module, name):
            raise SystemExit(version_error(f"it has no {module.__name__}.{name}"))
        setattr(module, name, replacement)


# The ServerApp's process


def patch_serverapp(grid: Grid) -> None:
    """Patch a ServerApp's grid, or the simulation that it belongs to.

    In a deployment, messages carry their objects and announced replies are fetched sooner. In a
    simulation, messages and replies are passed on as they come, and every actor takes one CPU.
    """
    engine = type(grid).__name__
    if engine == "HttpGrid" and (warm := SERVER.load("supernode")):
        _carry_objects(grid, warm)
    if engine == "InMemoryGrid" and SIMULATION.load():
        # The simulation starts while the ServerApp is still loading.
        from flwr.server.superlink.fleet.vce import vce_api
        from flwr.server.superlink.fleet.vce.backend.raybackend import RayBackend

        validate = RayBackend._validate_client_resources
        replace(RayBackend, _validate_client_resources=partialmethod(one_cpu, validate))
        _pass_on_at_once(grid, vce_api)


def slow_modes(engine: str) -> list[str]:
    """Why a run's exchanges are slow: no sentence, or one."""
    parts = {"deployment": (SERVER, SUPERLINK), "simulation": (SIMULATION,)}.get(engine, ())
    return [text for part in parts if (text := part.slow_mode())][:1]


def _carry_objects(grid: Any, warm: Any) -> None:
    from flwr.superlink.grid import http_grid

    push = grid._try_push_messages
    carrier = warm.ObjectCarrier()
    carrier.serve(grid._runtime_client)

    def push_with_objects(run_id: int, messages: Iterable[Message]) -> list[str]:
        sent = list(messages)
        carrier.find = warm.contents_of(sent).get
        return cast(list[str], push(run_id, sent))

    grid._try_push_messages = push_with_objects
    replace(http_grid, pull_objects=warm.pull_at_once)


def one_cpu(backend: Any, validate: Callable[..., dict[str, Any]], config: Any) -> dict[str, Any]:
    """Replaces ``_validate_client_resources``, whose default leaves every second CPU idle."""
    resources = validate(backend, config)
    return {**resources, "num_cpus": 1} if resources["num_cpus"] == FLOWERS_CPUS else resources


def _pass_on_at_once(grid: Any, vce_api: Any) -> None:
    asked = Event()
    answered = Event()
    state = grid.state

    def announced(store: Callable[[Message], str | None], came: Event) -> Callable[..., str | None]:
        def store_and_announce(message: Message) -> str | None:
            stored = store(message)
            came.set()
            return stored

        return store_and_announce

    state.store_message_ins = announced(state.store_message_ins, asked)
    state.store_message_res = announced(state.store_message_res, answered)
    grid.pull_messages = partial(wait_for_replies, answered, grid.pull_messages)
    replace(vce_api, add_messages_to_queue=partial(pass_on_messages, asked))


def pass_on_messages(
    asked: Event, state: Any, queue: Queue[Message], nodes: Any, stop: Event
) -> None:
    """Replaces ``add_messages_to_queue``, which scans all messages for every node each 0.1 s."""
    while not stop.is_set():
        asked.wait(TICK)
        asked.clear()
        with state.lock:
            for message in state.message_ins_store.values():
                if not message.metadata.delivered_at:
                    message.metadata.delivered_at = datetime.now(UTC).isoformat()
                    queue.put(message)


def wait_for_replies(
    answered: Event, pull: Callable[..., list[Message]], message_ids: Iterable[str]
) -> list[Message]:
    """Replaces a grid's ``pull_messages``: waits for a reply if there is none."""
    answered.clear()
    replies = pull(ids := list(message_ids))
    return replies or (pull(ids) if answered.wait(PULL_SECONDS) else [])
