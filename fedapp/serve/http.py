"""What every application over HTTP needs: refusals, hosts, requests at once, bodies within limits.

It is Starlette's alone, so that FastAPI and plain routes use the same pieces::

    Starlette(
        routes=..., exception_handlers=HANDLERS, middleware=[Middleware(HostCheck, hosts=LOOPBACK)]
    )
"""

from __future__ import annotations

import asyncio
import json
import re
import select
from collections.abc import Collection, Mapping
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from fedapp.data.schema import composed
from fedapp.errors import DataError

MOST_ROWS, MOST_BYTES = 10_000, 16_000_000
LOOPBACK = ("127.0.0.1", "::1", "localhost")
BODY_SECONDS = 30.0  # in which a body must arrive
MOST_REQUESTS = 32
CONNECTION = "fedapp.connection"  # in the scope of a standing process's requests: the transport
CONTENTS = "application/json", "application/octet-stream"  # that with binary data after it


class RefusedError(Exception):
    """A request that is refused with an HTTP status and a text; a log has ``logged`` instead."""

    def __init__(self, status: int, text: str, logged: str = "") -> None:
        super().__init__(text)
        self.status, self.logged = status, logged or text


class RowError(DataError):
    """A row, counted from 0, that cannot be scored; None where no single column is at fault."""

    def __init__(self, text: str, column: str | None = None, row: int | None = None) -> None:
        super().__init__(text)
        self.column, self.row = column, row


async def refuse(request: Request, error: Exception) -> JSONResponse:
    """The reply to a request that breaks a rule: ``error``, and a row's place if one is at fault.

    Paths of the Open Inference Protocol have ``error`` only, as it defines.
    """
    if isinstance(error, HTTPException):  # no such path or method
        return JSONResponse({"error": error.detail}, error.status_code, error.headers)
    content: dict[str, Any] = {"error": str(error)}
    if isinstance(error, RefusedError):
        return JSONResponse(content, error.status, {"connection": "close"})  # body unread
    if isinstance(error, RowError) and not request.url.path.startswith("/v2/"):
        content |= {"column": error.column, "row": error.row}
    return JSONResponse(content, 422)


HANDLERS: Mapping[Any, Any] = dict.fromkeys((RefusedError, DataError, HTTPException), refuse)


class HostCheck:
    """Middleware that accepts some Host headers, pages of that host only, and no forms.

    A web page could otherwise make a browser send requests here, under the page's host name (DNS
    rebinding) or across sites. Browsers send Origin with each POST of another site, and only
    contents of forms, or plain text, without asking first. A program may name no content type.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str]) -> None:
        self.app, self.hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(scope["method"], Headers(scope=scope))
            except RefusedError as refused:
                return await (await refuse(Request(scope), refused))(scope, receive, send)
        return await self.app(scope, receive, send)

    def _check(self, method: str, headers: Headers) -> None:
        """Raise RefusedError for a request that a page of another site may have caused."""
        named = headers.get("host", "")
        host = re.sub(r":\d*$", "", named).strip("[]").lower()
        if host not in self.hosts:
            rule = f"host must be one of {', '.join(self.hosts)} (--allow-host adds another)"
            raise RefusedError(400, f"{rule}, got {host[:80]!r}")
        for origin in headers.getlist("origin"):
            if origin.partition("://")[2].lower() != named.lower():
                rule = f"origin must be that of host {named}, or left out"
                raise RefusedError(403, f"{rule}, got {origin[:80]!r}")
        for content in headers.getlist("content-type") if method == "POST" else ():
            if content.partition(";")[0].strip().lower() not in CONTENTS:
                raise RefusedError(415, f"content-type must be {CONTENTS[0]}, got {content[:80]!r}")


class Admission:
    """A context of each request, of which `most` may be open at once."""

    def __init__(self, most: int = MOST_REQUESTS) -> None:
        self.most, self.n_requests = most, 0

    def __enter__(self) -> None:
        if self.n_requests >= self.most:
            raise RefusedError(503, f"requests must be <= {self.most} at once, got more")
        self.n_requests += 1

    def __exit__(self, *error: object) -> None:
        self.n_requests -= 1


def check_awaited(connection: Any) -> None:
    """Raise RefusedError if the asker of a request has hung up, such as after its deadline.

    It asks the kernel: the event loop may have been stopped, and learns that later.
    """
    has_gone, poll = connection.is_closing(), select.poll()
    if not has_gone:
        poll.register(connection.get_extra_info("socket").fileno(), select.POLLRDHUP)
    if has_gone or poll.poll(0):
        raise RefusedError(408, "asker must wait for the answer, got one that has hung up")


async def read_body(request: Request, most_bytes: int) -> bytes:
    """Read the request body, at most `most_bytes` and for at most `BODY_SECONDS`."""
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > most_bytes:
                    rule = f"body must have at most {most_bytes:,} bytes"
                    raise RefusedError(413, f"{rule}, got more")
    except TimeoutError:
        rule = f"body must arrive within {BODY_SECONDS:g} seconds"
        raise RefusedError(408, f"{rule}, got {len(body):,} bytes by then") from None
    except ClientDisconnect:
        # Nobody reads this reply; without it the server logs a traceback.
        raise RefusedError(400, "body must be whole, got a client that hung up") from None
    return bytes(body)


def read_object(body: bytes, rule: str) -> dict[str, Any]:
    """The JSON object of a body, its names in Unicode's form NFC; `rule` says what it must be."""
    try:
        document = json.loads(text := body.decode(), object_pairs_hook=_composed)
        if "\\u" in text:
            json.dumps(document, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise RefusedError(422, f"{rule}, got half a character (a lone surrogate)") from None
    except (ValueError, RecursionError):
        raise RefusedError(422, f"{rule}, got no JSON") from None
    if not isinstance(document, dict):
        raise RefusedError(422, f"{rule}, got {type(document).__name__}")
    return document


def _composed(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in pairs:
        if (name := composed(name)) in values:
            rule = "body must have each name of an object once"
            raise RefusedError(422, f"{rule}, got {name[:80]!r} twice")
        values[name] = value
    return values


def check_rows(n_rows: int, most_rows: int) -> None:
    """Refuse a request of more rows than one may have."""
    if n_rows > most_rows:
        rule = f"rows must be at most {most_rows:,} in one request"
        raise RefusedError(413, f"{rule}, got {n_rows:,}")
