"""A site's answers to the other sites: cells of rows that the parties of a version have agreed on.

``POST /cells/VERSION`` with ``{"rows": [number, ...], "purpose": ..., "request": ...}`` answers
with cells (``fedapp.trees.cells``), as does ``POST /ahead/VERSION`` for a block of rows that are
sent ahead. Who asks is known by the certificate of the connection; only the version's active party
is answered. A line is in the site's log before an answer, or a refusal, leaves: ``answered`` if the
asker was still there. ``GET /alive?version=VERSION`` is refused as the next request would be.
"""

from __future__ import annotations

import json
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from fedapp.deploy.exporter import PEER_ROWS, PEER_SECONDS
from fedapp.errors import DataError, did_you_mean, without_folders
from fedapp.home import home
from fedapp.serve.http import (
    CONNECTION,
    HANDLERS,
    MOST_ROWS,
    RefusedError,
    check_awaited,
    read_body,
    read_object,
)
from fedapp.serve.versions import Site, Version
from fedapp.site.clock import SECONDS_A_DAY, read_clock
from fedapp.site.log import LOG, Audit
from fedapp.site.settings import SiteConfig
from fedapp.trees.cells import compress, open_cells

log = logging.getLogger("fedapp.site")
PEER = "fedapp.peer"  # in a request's scope: the certificate of the connection, DER
WITHDRAWN = 403  # HTTP status to a request for live cells of a site that has withdrawn
PART = "fedapp-part"  # header of an answer: digest of the sender's part of the model
DAYS = "fedapp-days"  # header: after which what is sent ahead is stale
MOST_BYTES = 2_000_000
BLOCK = 65_536  # rows of a block that is sent ahead
RULE = "body must be an object with rows, purpose and request"
MANY = 1000  # rows: more are opened in a thread

_Protocol: Any = AutoHTTPProtocol


class PeerProtocol(_Protocol):  # type: ignore[misc]
    """uvicorn's protocol, with the connection and its certificate in each request's scope."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        app: Any = self.app
        tls = transport.get_extra_info("ssl_object")
        about = {CONNECTION: transport, PEER: tls and tls.getpeercert(True)}

        async def with_peer(scope: Any, receive: Any, send: Any) -> None:
            scope.update(about)
            await app(scope, receive, send)

        self.app: Any = with_peer

    def shutdown(self) -> None:
        """End a connection; an idle one at once, as a peer that keeps it does not say goodbye."""
        if self.cycle is None or self.cycle.response_complete:
            self.transport.abort()
        else:
            super().shutdown()


class Allowance:
    """What one peer may still ask: rows in the last second, and different rows in 24 hours."""

    def __init__(self) -> None:
        self._rows = OrderedDict[str, float]()  # asked about, and when last; the oldest first
        self._recent = deque[tuple[float, int]]()  # times and rows of the last second's requests
        self._n_recent = 0

    def note(self, ids: Sequence[str], now: float) -> None:
        """Rows were asked about."""
        for name in ids:
            self._rows[name] = now
            self._rows.move_to_end(name)

    def check_second(self, config: SiteConfig, peer: str, n_rows: int, now: float) -> None:
        """Raise RefusedError if a request has too many rows, which are not counted then."""
        while self._recent and self._recent[0][0] <= now - 1:
            self._n_recent -= self._recent.popleft()[1]
        if most := config.standing_rows_per_second:
            if (count := self._n_recent + n_rows) > most:
                raise _limit(config, "standing-rows-per-second", most, f"{count} of {peer}")
            self._recent.append((now, n_rows))
            self._n_recent = count

    def check_day(
        self, config: SiteConfig, peer: str, ids: Sequence[str], now: float, n_more: int = 0
    ) -> None:
        """Raise RefusedError if a request has too many different rows, which are not counted.

        ``n_more`` unnamed rows are counted too, to ask whether more would be answered.
        """
        if most := config.standing_rows_per_day:
            while self._rows and next(iter(self._rows.values())) <= now - SECONDS_A_DAY:
                self._rows.popitem(last=False)
            total = len(self._rows) + sum(name not in self._rows for name in set(ids)) + n_more
            if total > most:
                raise _limit(config, "standing-rows-per-day", most, f"{total} of {peer}")
            self.note(ids, now)


def _limit(config: SiteConfig, setting: str, most: int, got: str) -> RefusedError:
    rule = f"must be <= {most} ({setting} in the node config of {config.name}), got {got}"
    return RefusedError(429, f"rows {rule}")


class Answers:
    """A site's side of scoring, towards its peers."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self._allowances: dict[str, Allowance] = {}
        self._heard = set[str]()  # versions whose active party knows that the site has withdrawn
        self._began = read_clock(home()).now - time.monotonic()

    @property
    def _now(self) -> float:
        """Unix time by the clock of the process's start, so that setting it frees no rows."""
        return self._began + time.monotonic()

    @property
    def app(self) -> Starlette:
        """The application for the peers' port."""
        routes = [Route("/alive", self.alive)]
        for event, most_rows in (("cells", MOST_ROWS), ("ahead", BLOCK)):
            answered = partial(self._answered, event, most_rows)
            routes.append(Route(f"/{event}/{{version}}", answered, methods=["POST"]))
        return Starlette(routes=routes, exception_handlers=HANDLERS)

    async def alive(self, request: Request) -> Response:
        """For a peer's pings: the versions that answer it here; refused as a request for cells.

        Of the day's rows one must be left.
        """
        await self.site.refreshed()
        if name := request.query_params.get("version"):
            version = self._asked(request, name)
            self.site.check_log()
            peer, config = version.agreed.active, self.site.config
            self._allowance(peer).check_day(config, peer, (), self._now, n_more=1)
        asked = self.site.asked_by(request.scope[PEER])
        return Response(" ".join(version.agreed.version for version in asked))

    async def _answered(self, event: str, most_rows: int, request: Request) -> Response:
        """Cells of rows, in the order of the request; or ``ahead``, where the site lets them be."""
        began, site = time.perf_counter(), self.site
        name = request.path_params["version"]
        await site.refreshed(name)
        line: dict[str, Any] = {"version": name[:64]}
        with site.noting(event, line):
            line["peer"] = self._asked(request, name).agreed.active
            body = await read_body(request, MOST_BYTES)
            await site.refreshed(name)
            version = self._asked(request, name)  # the site may have withdrawn meanwhile
            document = _read(body)
            line |= {name: document[name] for name in ("request", "purpose")}
            line |= {"all": True} if _is_of_all(event, document) else {}
            rows = _rows(document, len(version.ids), most_rows)
            line["rows"] = ranges(rows)
            self._check(event, version, rows, document)
            try:
                content = await _cells(version, rows)
            except DataError as error:
                text = without_folders(error.for_others(site.config.shares_names).rule)
                raise RefusedError(422, text) from None
            check_awaited(request.scope[CONNECTION])
        site.note(event, **line, outcome="answered", bytes=len(content))
        PEER_ROWS.labels(version.agreed.active).inc(len(rows))
        PEER_SECONDS.observe(time.perf_counter() - began)
        days = str(site.config.standing_days)
        return Response(content, headers={PART: version.digest, DAYS: days})

    def _allowance(self, peer: str) -> Allowance:
        return self._allowances.setdefault(peer, Allowance())

    def _asked(self, request: Request, name: str) -> Version:
        """The version that a request names; refuses all but its active party."""
        site = self.site
        asked = site.asked_by(request.scope[PEER])
        answering = {version.agreed.version: version for version in asked}
        try:
            site.check_allowed(WITHDRAWN)
        except RefusedError as error:
            if error.status == WITHDRAWN and name in answering and name not in self._heard:
                peer = answering[name].agreed.active
                with suppress(RefusedError):  # on a full disk the line follows later
                    site.note("withdrawn", version=name, peer=peer, outcome=f"{peer} knows")
                    self._heard.add(name)
            raise
        self._heard.clear()
        if name in answering:
            return answering[name]
        if name in site.faults:
            raise RefusedError(503, f"version does not answer: {site.faults[name]}")
        rule = f"version must be one that {site.config.name} answers for this certificate, its"
        names = ", ".join(answering) or "none"
        raise RefusedError(409, f"{rule} active party's ({names}), got {name[:64]}")

    def _check(
        self, event: str, version: Version, rows: npt.NDArray[np.int64], document: Any
    ) -> None:
        config, purpose, peer = self.site.config, document["purpose"], version.agreed.active
        ahead, is_of_all = config.standing_nightly, _is_of_all(event, document)
        if event == "ahead" and (ahead == "none" or (ahead == "named" and is_of_all)):
            rule = f"must be {'all' if ahead == 'named' else 'named or all'} in the node config of"
            raise RefusedError(403, f"standing-nightly {rule} {config.name}, got {ahead}")
        if not is_of_all and len(np.unique(rows)) < config.standing_least_rows:
            least = f"standing-least-rows of {config.name}"
            rule = f"must be >= {config.standing_least_rows} different ones ({least})"
            raise RefusedError(422, f"rows {rule}, got {len(np.unique(rows))}")
        if (purposes := config.standing_purposes) and purpose not in purposes:
            rule = f"purpose must be one of {', '.join(purposes)} (standing-purposes of"
            hint = did_you_mean(purpose, purposes)
            raise RefusedError(422, f"{rule} {config.name}), got {purpose[:80]!r}{hint}")
        allowance = self._allowance(peer)
        if event == "cells":
            allowance.check_second(config, peer, len(rows), time.monotonic())
        if not is_of_all:
            allowance.check_day(config, peer, version.ids[rows].tolist(), self._now)

    def count_logged(self) -> None:
        """Count what was answered in the last 24 hours, by a process before this one."""
        site, now = self.site, self._now
        if not site.config.standing_rows_per_day:
            return
        audit = Audit(site.folder.parent / LOG)
        for _, line in audit if audit.path.exists() else ():
            version = site.versions.get(line.get("version", ""))
            outcome = line.get("outcome")
            is_counted = "peer" in line and not line.get("all") and outcome == "answered"
            if not line or line["time"] <= now - SECONDS_A_DAY or not is_counted:
                continue
            spans = line.get("rows", ())
            rows = [row for first, last in spans for row in range(first, last + 1)]
            names = [f"{line['version']}/{row}" for row in rows]
            if version:
                names = version.ids[rows].tolist()
            self._allowance(line["peer"]).note(names, min(line["time"], now))
        if audit.faults:
            log.error("log of %s: %s", site.config.name, "; ".join(audit.faults))


def ranges(rows: npt.NDArray[np.int64]) -> list[list[int]]:
    """First and last of each run of successive numbers, ascending, for a line of the log."""
    ordered = np.unique(rows)
    breaks = np.flatnonzero(np.diff(ordered) > 1)
    firsts = ordered[np.concatenate(([0], breaks + 1))]
    lasts = ordered[np.concatenate((breaks, [len(ordered) - 1]))]
    return list(map(list, zip(firsts.tolist(), lasts.tolist(), strict=True)))


def _read(body: bytes) -> dict[str, Any]:
    document = read_object(body, RULE)
    texts = [document.get(name) for name in ("request", "purpose")]
    if not all(isinstance(text, str) and len(text) <= 80 for text in texts):
        raise RefusedError(422, f"{RULE}, got texts of more than 80 characters or none")
    return document


def _is_of_all(event: str, document: Mapping[str, Any]) -> bool:
    """Whether cells of all rows are asked for, which only ``standing-nightly`` limits."""
    return event == "ahead" and bool(document.get("all"))


def _rows(document: dict[str, Any], n_rows: int, most_rows: int) -> npt.NDArray[np.int64]:
    rows: Any = document.get("rows")
    rule = f"rows must be 1 to {most_rows} numbers of rows of the version, 0 to {n_rows - 1}"
    fits = isinstance(rows, list) and 1 <= len(rows) <= most_rows
    if not fits or not all(type(row) is int and 0 <= row < n_rows for row in rows):
        raise RefusedError(422, f"{rule}, got {json.dumps(rows)[:60]}")
    return np.array(rows, dtype=np.int64)


async def _cells(version: Version, rows: npt.NDArray[np.int64]) -> bytes:
    def opened() -> bytes:
        values = version.features.read(rows).values
        return compress(open_cells(version.nesting, version.part.lookup, values))

    if version.features.is_in_memory and len(rows) <= MANY:
        return opened()
    return await run_in_threadpool(opened)
