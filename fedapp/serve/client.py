"""``fedapp.Scorer``: scores by HTTP from a process that offers ``POST /score``."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

from fedapp.errors import (
    ConfigError,
    DataError,
    ScoringError,
    as_plain,
    check_package,
    check_rules,
    without_passwords,
)

RETRIED = (0, 502, 503, 504)  # 0: the connection failed
UNFIT = (413, 422)  # what was asked is at fault
FACTS = ("warnings", "parties", "way", "age_seconds", "request")
PAUSE = 0.02  # seconds before the first retry, doubled before each further one


@dataclass(frozen=True, slots=True)
class Score:
    """Scores of a row by name, and its most probable class, empty for a regression.

    A divided model also has the parties that answered, by which way, the age of their answers, and
    the number of the request. ``raw`` is the reply.

    >>> import fedapp
    >>> fedapp.Score({"probability_1": 0.19}, "0", "8d0d41d2edd65b02", {}, way="live").label
    '0'
    """

    scores: Mapping[str, float]
    label: str
    version: str
    raw: Mapping[str, Any]
    warnings: Sequence[str] = ()
    parties: Sequence[str] = ()
    way: str = ""
    age_seconds: float | None = None
    request: int | str | None = None


class Scorer:
    """Asks for scores over connections that stay open; threads may share it.

    Parameters
    ----------
    url : of ``fedapp serve`` or ``fedapp standing``, such as ``http://127.0.0.1:8000``.
    deadline : seconds of a call with all its retries; beyond them it raises ScoringError.
    retries : further attempts if the connection fails, or the status is 502, 503 or 504.

    Examples
    --------
    >>> with fedapp.Scorer("http://127.0.0.1:8090") as scorer:  # doctest: +SKIP
    ...     scorer.score("c80514", purpose="credit").scores
    {'probability_1': 0.19207367173613055}
    """

    def __init__(self, url: str, deadline: float = 2.0, retries: int = 2) -> None:
        check_package("httpx", "for fedapp.Scorer", "serve")
        import httpx

        self.deadline, self.retries = deadline, retries
        self._url = without_passwords(url)
        check_rules(
            ("deadline", 0 < deadline <= 86400, "be > 0 and <= 86400 seconds", deadline),
            ("retries", retries >= 0, "be >= 0", retries),
        )
        try:
            self._client = httpx.Client(base_url=url)
        except httpx.InvalidURL as error:
            raise ConfigError(f"url must be an address, got {self._url}: {error}") from None
        if self._client.base_url.scheme not in ("http", "https"):
            raise ConfigError(f"url must begin with http:// or https://, got {self._url}")

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def ready(self) -> bool:
        """Whether the server answers, within the deadline, that it can score."""
        status, _ = self._send("GET", "v2/health/ready", b"", retries=0)
        return status == 200

    def score(self, row: str | Mapping[str, Any], purpose: str = "", way: str = "") -> Score:
        """The score of a row by column names, or by the id of a row of a divided model.

        NaN and None are missing. ``way`` is live or nightly, of a divided model. DataError if the
        server refuses the row, ScoringError if it fails.
        """
        (score,) = self.score_all([row], purpose, way)
        return score

    def score_all(
        self, rows: Iterable[str | Mapping[str, Any]], purpose: str = "", way: str = ""
    ) -> list[Score]:
        """Scores of several rows, in their order, by one request; see ``score``."""
        listed = [_without_nan(row) if isinstance(row, Mapping) else row for row in rows]
        kinds = {isinstance(row, Mapping) for row in listed}
        if len(kinds) > 1 or isinstance(rows, str | Mapping):
            raise ConfigError("rows must be a list of ids, or of rows by column names, got others")
        if not listed:
            return []
        body: dict[str, Any] = {"rows" if True in kinds else "ids": listed, "purpose": purpose}
        body |= {"way": way} if way else {}
        try:
            content = json.dumps(body, default=_plain, allow_nan=False).encode()
        except (TypeError, ValueError) as error:
            raise DataError(f"rows must hold numbers, texts and dates, got: {error}") from None
        status, text = self._send("POST", "score", content, self.retries)
        try:
            reply = json.loads(text)
            if status == 200:
                scored = reply.pop("rows")
                return [_score(reply | row) for _, row in zip(listed, scored, strict=True)]
            text = str(reply["error"])
        except (ValueError, TypeError, LookupError, AttributeError):
            pass  # a page of a proxy
        if status in UNFIT:
            raise DataError(as_plain(text), self._url)
        rule = f"{self._url} must answer with scores, got "
        got = f"status {status}: " if status else ""
        raise ScoringError(rule + got + as_plain(text), status)

    def _send(self, method: str, path: str, content: bytes, retries: int) -> tuple[int, str]:
        """Status and text of the last attempt's reply; 0 and the cause without one."""
        import httpx

        end, status, text = time.monotonic() + self.deadline, 0, ""
        for attempt in range(retries + 1):
            try:
                if (left := end - time.monotonic()) <= 0:
                    raise httpx.ReadTimeout("")
                chunks = list[bytes]()
                with self._client.stream(method, path, content=content, timeout=left) as reply:
                    for chunk in reply.iter_bytes():  # a timeout is of a single read
                        chunks.append(chunk)
                        if time.monotonic() > end:
                            raise httpx.ReadTimeout("")
                status, text = reply.status_code, b"".join(chunks).decode(errors="replace")
            except httpx.TimeoutException:
                before = f"; before that: {text}" if text else ""
                return 0, f"no reply within deadline={self.deadline:g} seconds{before}"
            except httpx.TransportError as error:
                status, text = 0, str(error) or type(error).__name__
            if status not in RETRIED or attempt == retries:
                break
            time.sleep(min(PAUSE * 2**attempt, max(end - time.monotonic(), 0)))
        return status, text


def _without_nan(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: None if value != value else value for name, value in row.items()}


def _score(row: Mapping[str, Any]) -> Score:
    facts = {name: row[name] for name in FACTS if name in row}
    return Score(dict(row["scores"]), row.get("class", ""), row["version"], row, **facts)


def _plain(value: Any) -> Any:
    """A date or a number of numpy as JSON has it."""
    if isinstance(value, date):
        return value.isoformat()
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(type(value).__name__)
