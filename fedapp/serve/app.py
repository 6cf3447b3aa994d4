"""The HTTP side: FastAPI's application around a scorer.

It asks nobody who they are: it is bound to this machine unless told otherwise, and a proxy in front
of it has to see to authentication and TLS.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Collection
from html import escape
from threading import Semaphore
from typing import Any

from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import HTMLResponse, JSONResponse

from fedapp.data.schema import first
from fedapp.errors import DataError
from fedapp.report.markup import page, section, table
from fedapp.serve.divided import DividedScorer
from fedapp.serve.scorer import RowError, Scorer

MOST_ROWS, MOST_BYTES = 10_000, 16_000_000
MOST_NAMES = 20  # of categories, on the page
LOOPBACK = ("127.0.0.1", "::1", "localhost")
BODY_SECONDS = 30.0  # in which a body must arrive
SCORED_AT_ONCE, MOST_REQUESTS = 4, 32  # the others of these wait


class RefusedError(Exception):
    """A request that is not answered.

    Parameters
    ----------
    status : of HTTP.
    content : of the answer.
    """

    def __init__(self, status: int, **content: Any) -> None:
        super().__init__(status)
        self.status, self.content = status, content


def make_app(
    scorer: Scorer | DividedScorer,
    most_rows: int = MOST_ROWS,
    most_bytes: int = MOST_BYTES,
    hosts: Collection[str] = LOOPBACK,
) -> FastAPI:
    """The application.

    Parameters
    ----------
    most_rows, most_bytes : that one request may have; more are refused with status 413.
    hosts : names that requests may ask for: a web page could have a browser send requests here
        under a name of its own.
    """
    # FastAPI's own page loads its scripts from elsewhere; ours is whole.
    app = FastAPI(title=f"fedapp: {scorer.name}", docs_url=None, redoc_url=None)
    described, turns, n_requests = scorer.schema, Semaphore(SCORED_AT_ONCE), 0

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
        """Whether the model is loaded, and where its parts lie if parties have them."""
        return {"status": "ok", "model": scorer.name, **scorer.health}

    @app.get("/schema")
    async def schema() -> dict[str, Any]:
        """Columns that a row must have, of each party where they have parts of the model, what they
        hold, and what the model answers."""
        return described

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
        """Scores of one row, an object by column names, or of several, {"rows": [...]}; where
        parties have parts of the model, a row is an object of such objects by party."""
        nonlocal n_requests
        if n_requests >= MOST_REQUESTS:
            raise RefusedError(503, error=f"requests must be <= {MOST_REQUESTS} at once, got more")
        n_requests += 1
        try:
            found, is_one = await run_in_threadpool(scored, await _body(request, most_bytes))
        except RowError as error:
            place = {"column": error.column, "row": error.row}
            if error.party is not None:
                place["party"] = error.party
            raise RefusedError(422, error=str(error), **place) from None
        except DataError as error:
            raise RefusedError(422, error=str(error)) from None
        finally:
            n_requests -= 1
        if is_one:
            found = {**found["rows"][0], "warnings": found["warnings"]}
        return JSONResponse(found)

    return app


async def _body(request: Request, most_bytes: int) -> bytes:
    """The body, of which no more is read than is allowed, and no longer."""
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
    return bytes(body)


def _rows(body: bytes, most_rows: int) -> tuple[list[dict[str, Any]], bool]:
    """The rows of a body, and whether it is one row alone."""
    rule = 'body must be a row, an object by column names, or {"rows": [row, ...]}'
    try:
        found = json.loads(text := body.decode())
        if "\\u" in text:
            json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise RefusedError(422, error=f"{rule}, got half a character (a lone surrogate)") from None
    except (ValueError, RecursionError):
        raise RefusedError(422, error=f"{rule}, got no JSON") from None
    if not isinstance(found, dict):
        raise RefusedError(422, error=f"{rule}, got {type(found).__name__}")
    if set(found) != {"rows"} or not isinstance(found["rows"], list):
        return [found], True
    rows = found["rows"]
    if len(rows) > most_rows:
        refused = f"rows must be at most {most_rows:,} in one request, got {len(rows):,}"
        raise RefusedError(413, error=refused)
    if not rows or not all(isinstance(row, dict) for row in rows):
        raise RefusedError(422, error=f"{rule}, got rows that are none")
    return rows, False


def _body_schema(described: dict[str, Any]) -> dict[str, Any]:
    """The rows as JSON Schema."""
    if "parties" in described:
        row = _object_schema({one["name"]: _row_schema(one) for one in described["parties"]})
    else:
        row = _row_schema(described)
    several = {
        "type": "object",
        "properties": {"rows": {"type": "array", "items": row}},
        "required": ["rows"],
    }
    return {"oneOf": [row, several]}


def _row_schema(described: dict[str, Any]) -> dict[str, Any]:
    """A row's values of some columns."""
    values = {"number": ["number", "boolean", "string", "null"], "base margin": ["number"]}
    columns = described["columns"]
    return _object_schema(
        {
            column["name"]: {"type": values.get(column["kind"], ["string", "number", "null"])}
            for column in columns
        }
    )


def _object_schema(properties: dict[str, Any]) -> dict[str, Any]:
    """An object of these properties, all of them and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _held(column: dict[str, Any]) -> str:
    """What a column holds, in words."""
    names = column.get("categories")
    return column["kind"] if names is None else f"one of {first(names, MOST_NAMES)}"


def docs_page(described: dict[str, Any], most_rows: int, most_bytes: int) -> str:
    """What can be asked, on one page that loads nothing."""
    parties = described.get("parties")
    columns = [
        [*owner, one["name"], _held(one), "yes" if one["missing_allowed"] else "no"]
        for owner, one in _owned(described)
    ]
    heads = [*(["party"] if parties else []), "column", "holds", "may be missing"]
    row = "an object by column names"
    if parties:
        row = "an object by party of objects by column names"
    asked = (
        f"<p><code>POST /predict</code> with one row, {row}, or "
        f"<code>{{&quot;rows&quot;: [...]}}</code> of at most {most_rows:,} rows and "
        f"{most_bytes:,} bytes. null means that a value is missing. "
        "<code>GET /schema</code> has the columns as JSON, <code>GET /health</code> says whether "
        'the model is loaded, <a href="/openapi.json">/openapi.json</a> is the OpenAPI document.'
        f"</p><pre>{escape(_example(described))}</pre>"
    )
    return page(
        "fedapp serve",
        f"{described['model']} · {described['objective']}",
        [
            section("Requests", asked),
            section("Columns", table(heads, columns, n_texts=len(heads))),
        ],
    )


def _owned(described: dict[str, Any]) -> list[tuple[list[str], dict[str, Any]]]:
    """All columns, each with its party where there are parties."""
    if "parties" not in described:
        return [([], column) for column in described["columns"]]
    return [([one["name"]], column) for one in described["parties"] for column in one["columns"]]


def _example(described: dict[str, Any]) -> str:
    """A row of missing values, by its first columns."""
    if "parties" in described:
        rows = (f"{json.dumps(one['name'])}: {_example(one)}" for one in described["parties"])
        return "{" + ", ".join(rows) + "}"
    names = [column["name"] for column in described["columns"]]
    text = json.dumps(dict.fromkeys(names[:3]))
    return text[:-1] + ", ...}" if len(names) > 3 else text
