"""The FastAPI application around a scorer.

It does not authenticate: it listens on this machine only unless configured otherwise, and a proxy
in front of it must provide authentication and TLS.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from threading import Semaphore
from typing import Any

from fastapi import FastAPI
from fastapi.concurrency import run_in_threadpool
from fastapi.middleware import Middleware
from fastapi.responses import RedirectResponse

from fedapp.serve import http
from fedapp.serve.scorer import Scorer
from fedapp.serve.v2 import CLASS, Answered, Asked, Tensor, routes

SCORED_AT_ONCE = 4  # admitted requests beyond 4 wait
NUMBERS = ("number", "binary", "time", "duration", "base margin")  # kinds that hold numbers


class WholeModel:
    """A whole model as the Open Inference Protocol and ``/score`` have it, scored in threads."""

    def __init__(self, scorer: Scorer) -> None:
        described = scorer.schema
        self.scorer, self.turns = scorer, Semaphore(SCORED_AT_ONCE)
        self.name, self.version = scorer.run, scorer.version
        self.inputs: Sequence[Tensor] = list(map(_input, described["columns"]))
        classes = [Tensor(CLASS, "BYTES")] if described["classes"] else []
        scores = [Tensor(name, "FP32") for name in described["scores"]]
        self.outputs: Sequence[Tensor] = [*scores, *classes]

    async def answer(self, asked: Asked) -> Answered:
        # A whole model has one way, and records no requests.
        for name, text in (("purpose", asked.purpose), ("way", asked.way)):
            if text:
                rule = f"{name} must be left out for a model that is whole"
                raise http.RefusedError(422, error=f"{rule}, got {text[:40]!r}")
        return await run_in_threadpool(self._scored, asked)

    async def ready(self) -> str:
        return ""  # it is loaded

    def _scored(self, asked: Asked) -> Answered:
        with self.turns:
            return Answered(*self.scorer.score(asked.columns))


def _input(column: Mapping[str, Any]) -> Tensor:
    is_number = column["kind"] in NUMBERS and "categories" not in column
    datatype = "FP64" if is_number else "BOOL" if column["kind"] == "boolean" else "BYTES"
    return Tensor(column["name"], datatype)


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
    score, *others = routes(WholeModel(scorer), most_rows, most_bytes)
    app = FastAPI(
        title=f"fedapp: {scorer.name}",
        docs_url=None,  # FastAPI's documentation page loads scripts from other hosts
        redoc_url=None,
        routes=[*others],
        exception_handlers=dict(http.HANDLERS),
        middleware=[Middleware(http.HostCheck, hosts=hosts)],
    )

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
        return "/openapi.json"

    app.add_api_route(
        score.path,
        score.endpoint,
        methods=["POST"],
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
    return app


def _body_schema(described: dict[str, Any]) -> dict[str, Any]:
    row = _row_schema(described)
    return {
        "oneOf": [
            {"type": "object", "properties": {name: form}, "required": [name]}
            for name, form in {"row": row, "rows": {"type": "array", "items": row}}.items()
        ]
    }


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
