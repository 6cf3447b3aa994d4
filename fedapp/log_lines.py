"""Log lines of one form, for every process of a coordinator and of a site.

::

    2026-11-23T19:05:28.499Z INFO bank worker run=7270070455849061505: kernels are compiled

``FEDAPP_LOG=json`` writes an object a line, ``FLWR_LOG_LEVEL=DEBUG`` what is said of each message
too. ``FEDAPP_NAME``, which scripts and units set, is the site.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from datetime import UTC, datetime
from typing import Any

from fedapp.errors import ConfigError

FORMS = ("text", "json")
# What Flower says of every message, and of what nobody waits for.
_CHATTER = re.compile(
    r"$|\[RUN |(Receiving|Sending): |(Received|Sent) successfully|ControlServicer\.\w+$"
    r"|\[Fleet\.(PushMessages|GetRun|GetFab)|(FastAPI l|SuperLinkL)ifespan|Start `flwr-"
)
_RUN = re.compile(r"\brun(?:_id=| ID | )`?(\d{6,})")
_about = {"process": "", "run": ""}


class Lines(logging.Formatter):
    """Says where a record comes from: the site or coordinator, the process, the run."""

    def format(self, record: logging.LogRecord) -> str:
        """One line; in text, further lines of a message are indented, so that none looks new."""
        message = super().format(record).strip()
        named = _RUN.search(message)
        fields = {
            "time": f"{datetime.fromtimestamp(record.created, UTC):%FT%T}.{int(record.msecs):03}Z",
            "level": record.levelname,
            "site": os.environ.get("FEDAPP_NAME", "-"),
            **_about,
            **({"run": named[1]} if named else {}),
            "message": message,
        }
        if os.environ.get("FEDAPP_LOG") == "json":
            return json.dumps(fields)
        time, level, site, process, run, _ = fields.values()
        plain = "".join(one if one.isprintable() or one == "\n" else "?" for one in message)
        indented = plain.replace("\n", "\n    ")
        return f"{time} {level} {site} {process}{run and f' run={run}'}: {indented}"


class Handler(logging.StreamHandler[Any]):
    """Writes to stderr; what is said of single messages counts as DEBUG."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is shown."""
        args: Any = record.args
        is_chatter = not record.name.startswith("fedapp")
        if record.name.startswith("flwr"):
            is_chatter = bool(_CHATTER.match(str(record.msg)))
        elif record.name == "uvicorn.access":
            is_chatter = int(args[-1]) < 400
        if is_chatter and record.levelno == logging.INFO:
            record.levelno, record.levelname = logging.DEBUG, "DEBUG"
        return record.levelno >= self.level


def begin(process: str, run: int | str = "") -> None:
    """Write this process's log lines in one form from now on.

    Raises
    ------
    ConfigError : ``FEDAPP_LOG`` is another word.
    """
    if (form := os.environ.get("FEDAPP_LOG", "text")) not in FORMS:
        raise ConfigError(f"FEDAPP_LOG must be {' or '.join(FORMS)}, got {form!r}")
    _about.update(process=process, run=str(run))
    handler = Handler()
    handler.setLevel("DEBUG" if os.environ.get("FLWR_LOG_LEVEL", "").upper() == "DEBUG" else "INFO")
    handler.setFormatter(Lines())
    # Not DEBUG: other libraries' lines would show headers, and so tokens.
    logging.basicConfig(handlers=[handler], level=logging.INFO, force=True)
    logging.getLogger("fedapp").setLevel(handler.level)
    logging.getLogger("flwr").handlers.clear()
    if uvicorn := sys.modules.get("uvicorn"):  # which would give its loggers their own handlers
        setattr(uvicorn.Config, "configure_logging", lambda _: None)  # noqa: B010


def name_run(run: int | str) -> None:
    """Name the run that this process's lines are about."""
    _about["run"] = str(run)
