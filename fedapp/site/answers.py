"""Log of a site's answers: one JSON line per message in ``$FEDAPP_HOME/answers/NAME.jsonl``.

A line has the time, run, outcome, seconds and bytes, and nothing about rows.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

from fedapp import log_lines
from fedapp.data.datasets import NAME
from fedapp.home import home, open_private, private_folder
from fedapp.messages.wire import DIVERGED, REFUSED, WAITING, n_bytes

OUTCOMES = {None: "answered", WAITING: "waiting", REFUSED: "refused", DIVERGED: "refused"}
Call = TypeVar("Call", bound=Callable[..., Any])


def answers_file(name: str) -> Path:
    """Path of a site's log."""
    return home() / "answers" / f"{name}.jsonl"


def noted(answer: Call) -> Call:
    """Wrap a ClientApp's call to log each answer, except in simulation."""

    @wraps(answer)
    def call(app: Any, message: Any, context: Any) -> Any:
        name = str(context.node_config.get("name"))
        if "data" not in context.node_config or not NAME.fullmatch(name):
            return answer(app, message, context)
        log_lines.name_run(message.metadata.run_id)
        began, reply = time.perf_counter(), answer(app, message, context)
        error = reply.error.code if reply.has_error() else None
        line = {
            "time": round(time.time(), 3),
            "run": str(message.metadata.run_id),
            "outcome": OUTCOMES.get(error, "failed"),
            "seconds": round(time.perf_counter() - began, 4),
            "received": n_bytes(message.content),
            "sent": 0 if error else n_bytes(reply.content),
        }
        private_folder(answers_file(name).parent)
        with open_private(answers_file(name), "a") as file:
            file.write(json.dumps(line) + "\n")
        return reply

    return cast(Call, call)
