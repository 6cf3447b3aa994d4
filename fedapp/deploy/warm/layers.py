"""Less work for each request: responses in one piece, and no layers that only forward them.

Starlette passes each response through a stream and starts two tasks in each layer of middleware. A
SuperLink has eight layers, of which five or six only forward each request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.middleware.base import BaseHTTPMiddleware, _CachedRequest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from fedapp.deploy.warm import replace

FLEET, RUNTIME = "/v1/fleet/", "/v1/runtime/"
# Middleware -> path prefixes of the requests that it only forwards.
BYPASSED: Mapping[str, tuple[str, ...]] = {
    "ControlSensitiveResponseMiddleware": (FLEET, RUNTIME),
    "ControlAuthenticationMiddleware": (FLEET, RUNTIME),
    "ControlLicenseMiddleware": (FLEET, RUNTIME),
    "ControlEventLogMiddleware": (FLEET, RUNTIME),
    "NodeAuthMiddleware": (RUNTIME,),
    "FleetEventLogMiddleware": (RUNTIME,),
    "RuntimeTracingMiddleware": (FLEET,),  # until 1.41
}


# Requests whose responses are whole, not streams.
MESSAGES = ("pull-messages", "push-messages")
TASKS = ("acquire-task", "pull-task-input", "push-task-output")
WHOLE = {FLEET + name for name in MESSAGES} | {RUNTIME + name for name in MESSAGES + TASKS}


def superlink() -> None:
    """Bypass layers, and pass the responses to frequent requests through others in one piece."""
    stream = BaseHTTPMiddleware.__call__

    async def call(layer: BaseHTTPMiddleware, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"] if scope["type"] == "http" else ""
        if path.startswith(BYPASSED.get(type(layer).__name__, ())):
            await layer.app(scope, receive, send)
        elif path in WHOLE:
            await pass_on_whole(layer, scope, receive, send)
        else:
            await stream(layer, scope, receive, send)

    replace(BaseHTTPMiddleware, __call__=call)


supernode = superlink


async def pass_on_whole(
    layer: BaseHTTPMiddleware, scope: Scope, receive: Receive, send: Send
) -> None:
    """Replaces a layer's ``__call__``."""
    request = _CachedRequest(scope, receive)

    async def call_next(_: Request) -> Response:
        parts = list[Any]()

        async def collect(part: Any) -> None:
            parts.append(part)

        await layer.app(scope, request.wrapped_receive, collect)
        content = b"".join(part.get("body", b"") for part in parts)
        response = Response(content, parts[0]["status"])
        response.raw_headers = parts[0]["headers"]
        return response

    response = await layer.dispatch_func(request, call_next)
    await response(scope, request.wrapped_receive, send)
