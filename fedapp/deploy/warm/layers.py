"""Less work for each request: responses in one piece, and no layers that only forward them.

Starlette passes each response through a stream and starts two tasks in each layer of middleware. A
SuperLink has eight layers, of which five or six only forward each request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, _CachedRequest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from fedapp.deploy.warm import replace, wrap

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


class Layer:
    """A middleware, bypassed by requests that it would only forward."""

    def __init__(self, app: ASGIApp, layer: Middleware, bypass_prefixes: tuple[str, ...]) -> None:
        self._app, self._passed_on = app, bypass_prefixes
        self._layer = layer.cls(app, *layer.args, **layer.kwargs)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_bypassed = scope["type"] == "http" and scope["path"].startswith(self._passed_on)
        await (self._app if is_bypassed else self._layer)(scope, receive, send)


def bypassable_layers(get_middleware: Callable[[], list[Middleware]]) -> list[Middleware]:
    """Replaces ``_get_middleware``."""
    candidates = (
        (layer, BYPASSED.get(getattr(layer.cls, "__name__", ""))) for layer in get_middleware()
    )
    return [Middleware(Layer, layer, paths) if paths else layer for layer, paths in candidates]


# Requests whose responses are whole, not streams.
WHOLE = frozenset(
    (
        *(f"/v1/fleet/{name}" for name in ("pull-messages", "push-messages")),
        *(f"/v1/runtime/{name}" for name in ("pull-messages", "push-messages", "acquire-task")),
        *(f"/v1/runtime/{name}" for name in ("pull-task-input", "push-task-output")),
    )
)


def supernode() -> None:
    """Pass the responses to frequent requests through layers of middleware in one piece."""
    stream = BaseHTTPMiddleware.__call__

    async def call(layer: BaseHTTPMiddleware, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in WHOLE:
            await stream(layer, scope, receive, send)
            return
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

    replace(BaseHTTPMiddleware, __call__=call)


def superlink() -> None:
    """Pass on whole responses, through fewer layers."""
    from flwr.superlink import main

    wrap(main, _get_middleware=partial(partial, bypassable_layers))
    supernode()
