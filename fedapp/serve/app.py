"""The FastAPI application around a scorer.

It does not authenticate: it listens on this machine only unless configured otherwise, and a proxy
in front of it must provide authentication and TLS.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Collection
from threading import Semaphore
from typing import Any

from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse
from markupsafe import Markup
from starlette.requests import ClientDisconnect

from fedapp.data.schema import composed, first
from fedapp.errors import DataError
from fedapp.report.page import page, table
from fedapp.serve.scorer import RowError, Scorer

MOST_ROWS, MOST_BYTES = 10_000, 16_000_000
MOST_NAMES = 20  # categories of a column on the page
LOOPBACK = ("127.0.0.1", "::1", "localhost")
BODY_SECONDS = 30.0  # in which a body must arrive
# What a column of a kind holds, on the page.
HELD = {
    "binary": "0 or 1",
    "boolean": "yes/no",
    "date": "date, as 2024-12-31",
    "time": "time of day, in days",
    "duration": "duration, in days",
    "ordinal": "name in the order of the schema",
}
SCORED_AT_ONCE, MOST_REQUESTS = 4, 32  # admitted requests beyond 4 wait


class RefusedError(Exception):
    """A request that is refused with an HTTP status and the content of the reply."""

    def __init__(self, status: int, **content: Any) -> None:
        super().__init__(status)
        self.status, self.content = status, content


def make_app(
    scorer: Scorer,
    most_rows: int = MOST_ROWS,
    most_bytes: int = MOST_BYTES,
    hosts: Collection[str] = LOOPBACK,
) -> FastAPI:
    """The application.

    Parameters
    ----------
    most_rows, most_bytes : limits of one request; larger ones get status 413.
    hosts : accepted Host headers. Others are refused, since a web page could make a browser send
        requests here under the page's host name (DNS rebinding).
    """
    # FastAPI's documentation page loads scripts from other hosts.
    app = FastAPI(title=f"fedapp: {scorer.name}", docs_url=None, redoc_url=None)
    described = scorer.schema
    turns = Semaphore(SCORED_AT_ONCE)
    n_requests = 0

    @app.exception_handler(RefusedError)
    async def refuse(request: Request, error: RefusedError) -> JSONResponse:
        return JSONResponse(error.content, error.status, {"connection": "close"})  # body unread

    @app.middleware("http")
    async def check_host(request: Request, call_next: Any) -> Any:
        host = re.sub(r":\d*$", "", request.headers.get("host", "")).strip("[]").lower()
        if host not in hosts:
            rule = f"host must be one of {', '.join(hosts)} (--allow-host adds another)"
            return await refuse(request, RefusedError(400, error=f"{rule}, got {host!r}"))
        return await call_next(request)

    def scored(body: bytes) -> tuple[dict[str, Any], bool]:
        with turns:
            rows, is_one = _rows(body, most_rows)
            return scorer.answer(rows), is_one

    @app.get("/health")
    async def health() -> dict[str, Any]:
        """Whether the model is loaded."""
        return {"status": "ok", "model": scorer.name}

    @app.get("/schema")
    async def schema() -> dict[str, Any]:
        """Columns that a row must have, what they hold, and what the model answers."""
        return described

    @app.get("/", response_class=RedirectResponse, include_in_schema=False)
    async def home() -> str:
        return "/docs"

    @app.get("/docs", response_class=HTMLResponse, include_in_schema=False)
    async def docs() -> str:
        return docs_page(described, most_rows, most_bytes)

    @app.post(
        "/predict",
        openapi_extra={
            "requestBody": {
                "required": True,
                "content": {"application/json": {"schema": _body_schema(described)}},
            },
            "responses": {
                "408": {"description": "the body took too long to arrive"},
                "413": {"description": "more rows or bytes than one request may have"},
                "422": {"description": "a row breaks a rule: error, and its column and row"},
                "503": {"description": "too many requests at once"},
            },
        },
    )
    async def predict(request: Request) -> JSONResponse:
        """Scores of one row, an object by column names, or of several, {"rows": [...]}."""
        nonlocal n_requests
        if n_requests >= MOST_REQUESTS:
            raise RefusedError(503, error=f"requests must be <= {MOST_REQUESTS} at once, got more")
        n_requests += 1
        try:
            reply, is_one = await run_in_threadpool(scored, await _body(request, most_bytes))
        except RowError as error:
            raise RefusedError(422, error=str(error), column=error.column, row=error.row) from None
        except DataError as error:
            raise RefusedError(422, error=str(error)) from None
        finally:
            n_requests -= 1
        if is_one:
            reply = {**reply["rows"][0], "warnings": reply["warnings"]}
        return JSONResponse(reply)

    return app


async def _body(request: Request, most_bytes: int) -> bytes:
    """Read the request body, at most `most_bytes` and for at most `BODY_SECONDS`."""
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > most_bytes:
                    rule = f"body must have at most {most_bytes:,} bytes"
                    raise RefusedError(413, error=f"{rule}, got more")
    except TimeoutError:
        rule = f"body must arrive within {BODY_SECONDS:g} seconds"
        raise RefusedError(408, error=f"{rule}, got {len(body):,} bytes by then") from None
    except ClientDisconnect:
        # Nobody reads this reply; without it the server logs a traceback.
        raise RefusedError(400, error="body must be whole, got a client that hung up") from None
    return bytes(body)


def _composed(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {composed(name): value for name, value in pairs}


def _rows(body: bytes, most_rows: int) -> tuple[list[dict[str, Any]], bool]:
    """The rows of a body, and whether it is a single row."""
    rule = 'body must be a row, an object by column names, or {"rows": [row, ...]}'
    try:
        document = json.loads(text := body.decode(), object_pairs_hook=_composed)
        if "\\u" in text:
            json.dumps(document, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise RefusedError(422, error=f"{rule}, got half a character (a lone surrogate)") from None
    except (ValueError, RecursionError):
        raise RefusedError(422, error=f"{rule}, got no JSON") from None
    if not isinstance(document, dict):
        raise RefusedError(422, error=f"{rule}, got {type(document).__name__}")
    if set(document) != {"rows"} or not isinstance(document["rows"], list):
        return [document], True
    rows = document["rows"]
    if len(rows) > most_rows:
        refused = f"rows must be at most {most_rows:,} in one request, got {len(rows):,}"
        raise RefusedError(413, error=refused)
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise RefusedError(422, error=f"{rule}, got rows that are none")
    return rows, False


def _body_schema(described: dict[str, Any]) -> dict[str, Any]:
    row = _row_schema(described)
    several = {
        "type": "object",
        "properties": {"rows": {"type": "array", "items": row}},
        "required": ["rows"],
    }
    return {"oneOf": [row, several]}


def _row_schema(described: dict[str, Any]) -> dict[str, Any]:
    types = {
        "number": ["number", "null"],
        "binary": ["number", "boolean", "null"],
        "boolean": ["boolean", "string", "number", "null"],
        "date": ["string", "null"],
        "time": ["number", "null"],
        "duration": ["number", "null"],
        "base margin": ["number"],
    }
    names = ["string", "number", "null"]
    columns = described["columns"]
    properties = {column["name"]: {"type": types.get(column["kind"], names)} for column in columns}
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def docs_page(described: dict[str, Any], most_rows: int, most_bytes: int) -> str:
    """The documentation of the endpoint as one page that loads nothing."""
    rows = []
    for column in described["columns"]:
        names = column.get("categories")
        values = HELD.get(column["kind"], column["kind"])
        values = values if names is None else f"one of {first(names, MOST_NAMES)}"
        rows.append([column["name"], values, "yes" if column["missing_allowed"] else "no"])
    heads = ["column", "holds", "may be missing"]
    requests = Markup(
        "<p><code>POST /predict</code> with one row, an object by column names, or "
        "<code>{{&quot;rows&quot;: [...]}}</code> of at most {:,} rows and {:,} bytes. null means "
        "that a value is missing. <code>GET /schema</code> has the columns as JSON, "
        "<code>GET /health</code> says whether the model is loaded, "
        '<a href="/openapi.json">/openapi.json</a> is the OpenAPI document.</p><pre>{}</pre>'
    ).format(most_rows, most_bytes, json.dumps(described["example"], indent=1, ensure_ascii=False))
    return page(
        "fedapp serve",
        f"{described['model']} · {described['objective']}",
        {"Requests": requests, "Columns": table(heads, rows, len(heads))},
    )
