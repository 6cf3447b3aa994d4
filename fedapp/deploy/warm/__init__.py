"""What of Flower a deployment replaces, so that an exchange takes less than a second.

Flower 1.41 asks for messages every 3 s and starts a process for each; none of that can be set. So a
few names in its modules are replaced, and its own functions go on as they are. What looks the names
up, or is called here, is known by a digest of its source. With any other source nothing is
replaced: exchanges take the seconds that Flower's own ways take, and nothing else changes.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import logging
from dataclasses import dataclass

log = logging.getLogger("fedapp")

# Seconds until an object that was announced, but had not come, is asked for again; 1 in Flower.
BACKOFF = 0.02


@dataclass(frozen=True, slots=True)
class Parts:
    """Functions and classes of Flower, as ``module:name``.

    Parameters
    ----------
    digest : SHA-256 of all their sources in flwr 1.41.0, 64 hex digits.
    slow : how long an exchange takes by Flower's own ways.
    """

    places: tuple[str, ...]
    digest: str
    slow: str = "seconds"

    def found_digest(self) -> str:
        """The same of what is installed; of a part that is missing, of no source."""
        texts = (f"{place}\n{_source(place)}" for place in self.places)
        return hashlib.sha256("".join(texts).encode()).hexdigest()

    def are_known(self) -> bool:
        """Whether they are those that something is replaced of; warns where they are not."""
        known = self.found_digest() == self.digest
        if not known:
            rule = "flwr must be 1.41.0 for fast exchanges; with this one each takes"
            log.warning("%s %s", rule, self.slow)
        return known


SITE = Parts(
    (
        "flwr.supernode.start_client_internal:start_client_internal",
        "flwr.supernode.start_client_internal:_pull_and_store_message",
        "flwr.supernode.start_client_internal:_push_messages",
        "flwr.supernode.fleet_http_connection:http_request_response",
        "flwr.supercore.heartbeat:HeartbeatSender",
        "flwr.supercore.protobuf.client:ProtobufClient",
        "flwr.supernode.nodestate.nodestate_factory:NodeStateFactory",
        "flwr.supernode.nodestate.in_memory_nodestate:InMemoryNodeState",
        "flwr.supernode.servicer.runtime.runtime_handlers:acquire_task",
        "flwr.supernode.servicer.runtime.runtime_handlers:pull_messages",
        "flwr.supernode.servicer.runtime.runtime_handlers:push_messages",
        "flwr.supernode.runtime.run_clientapp:run_clientapp",
        "flwr.supernode.runtime.run_clientapp:pull_task_input",
        "flwr.supernode.runtime.run_clientapp:push_message",
        "flwr.supernode.runtime.run_clientapp:push_task_output",
        "flwr.supercore.corestate.in_memory_corestate:InMemoryCoreState",
        "flwr.supercore.object_store.in_memory_object_store:InMemoryObjectStore",
        "flwr.supercore.inflatable.inflatable_utils:pull_objects",
        "flwr.supercore.inflatable.inflatable_utils:pull_and_inflate_object_from_tree",
        "flwr.supercore.superexec.run_superexec:run_superexec",
        "flwr.supercore.superexec.executor.subprocess_executor:SubprocessExecutor",
        "flwr.supercore.superexec.plugin.base_exec_plugin:AutoExecPlugin",
        "flwr.supercore.superexec.plugin.base_exec_plugin:BaseExecPlugin",
    ),
    "50c8aad05eedaaa4f536783eefdfe36fe9711b4a605b95a77c7e54c045c82156",
)
SUPERLINK = Parts(
    (
        "flwr.superlink.servicer.fleet.fleet_handlers:pull_messages",
        "flwr.superlink.servicer.fleet.fleet_handlers:push_messages",
        "flwr.superlink.servicer.runtime.runtime_handlers:pull_messages",
        "flwr.superlink.servicer.runtime.runtime_handlers:push_messages",
        "flwr.superlink.routers.fleet.router:fleet_pull_messages",
        "flwr.superlink.routers.fleet.router:fleet_push_messages",
        "flwr.supercore.routers.runtime.router:pull_messages",
        "flwr.supercore.routers.runtime.router:push_messages",
        "flwr.supercore.routers.runtime.tracing:RuntimeTracingMiddleware",
        "flwr.supercore.sql_mixin:SqlMixin",
        "flwr.supercore.corestate.sql_corestate:SqlCoreState",
        "flwr.supercore.corestate.in_memory_corestate:InMemoryCoreState",
        "flwr.supercore.object_store.in_memory_object_store:InMemoryObjectStore",
        "flwr.superlink.config_loader:get_objectstore_linkstate_factories",
        "flwr.server.superlink.linkstate.linkstate_factory:LinkStateFactory",
        "flwr.server.superlink.linkstate.sql_linkstate:SqlLinkState",
        "flwr.superlink.main:_get_middleware",
        "flwr.superlink.main:create_app",
        "flwr.superlink.routers.control.middlewares:_is_control_path",
        "flwr.superlink.routers.control.middlewares:ControlAuthenticationMiddleware",
        "flwr.superlink.routers.control.middlewares:ControlEventLogMiddleware",
        "flwr.superlink.routers.control.middlewares:ControlLicenseMiddleware",
        "flwr.superlink.routers.control.middlewares:ControlSensitiveResponseMiddleware",
        "flwr.superlink.routers.fleet.middlewares:FleetEventLogMiddleware",
        "flwr.superlink.routers.fleet.node_auth:NodeAuthMiddleware",
    ),
    "f7eb897c74f55bf4aeb305f1703b35f1c4c36048dc754de429efcb2b616d010a",
)
SERVER = Parts(
    (
        "flwr.superlink.grid.http_grid:HttpGrid",
        "flwr.supercore.protobuf.client:ProtobufClient",
        "flwr.supercore.inflatable.inflatable_utils:pull_objects",
    ),
    "f47b7c186baa951de7f2f3e87b56f4936398e50fcb04fe530e1cab17f07f237e",
)
SIMULATION = Parts(
    (
        "flwr.server.superlink.fleet.vce.vce_api:add_messages_to_queue",
        "flwr.server.superlink.fleet.vce.vce_api:run_api",
    ),
    "c0ad614362a5c3ea4621dedcbf83860aed72c495d860dff5926fe75d28d4a6f4",
    slow="0.1 s",
)


def _source(place: str) -> str:
    module, _, name = place.partition(":")
    try:
        return inspect.getsource(getattr(importlib.import_module(module), name))
    except (ImportError, AttributeError, OSError):
        return ""
