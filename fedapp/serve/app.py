"""The FastAPI application around a scorer.

It does not authenticate: it listens on this machine only unless configured otherwise, and a proxy
in front of it must provide authentication and TLS.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from fastapi import FastAPI
from fastapi.middleware import Middleware
from fastapi.responses import RedirectResponse

from fedapp.serve import http
from fedapp.serve.scorer import Scorer
from fedapp.serve.v2 import routes


def make_app(
    scorer: Scorer,
    most_rows: int = http.MOST_ROWS,
    most_bytes: int = http.MOST_BYTES,
    hosts: Collection[str] = http.LOOPBACK,
) -> FastAPI:
    """The application.

    Parameters
    ----------
    most_rows, most_bytes : limits of one request; larger ones get status 413.
    hosts : accepted Host headers.
    """
    described = scorer.schema
    score, *others = routes(scorer, most_rows, most_bytes)
    app = FastAPI(
        title=f"fedapp: {scorer.title}",
        docs_url=None,  # FastAPI's documentation page loads scripts from other hosts
        redoc_url=None,
        routes=[*others],
        exception_handlers=dict(http.HANDLERS),
        middleware=[Middleware(http.HostCheck, hosts=hosts)],
    )

    @app.get("/health")
    async def health() -> dict[str, Any]:
        """Whether the model is loaded."""
        return {"status": "ok", "model": scorer.title}

    @app.get("/schema")
    async def schema() -> dict[str, Any]:
        """Columns that a row must have, what they hold, and what the model answers."""
        return described

    @app.get("/", response_class=RedirectResponse, include_in_schema=False)
    async def home() -> str:
        return "/openapi.json"

    app.add_api_route(
        score.path,
        score.endpoint,
        methods=["POST"],
        openapi_extra={
            "parameters": [{"name": "explain", "in": "query", "schema": {"enum": ["0", "1"]}}],
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
    return app


def _body_schema(described: dict[str, Any]) -> dict[str, Any]:
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
    row = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {
        "oneOf": [
            {"type": "object", "properties": {name: form}, "required": [name]}
            for name, form in {"row": row, "rows": {"type": "array", "items": row}}.items()
        ]
    }
