"""Scores at the active party: from its own cells and those that the other parties answer with.

*live*: every other party is asked once, all at the same time. *nightly*: from cells that all have
sent ahead (``fetch``); nobody is asked then, and nobody learns which row is scored. Where a call
names no way, such cells also serve if a party is away, until they are stale; a party that was
silent is not waited for again before it answers a ping, but others are asked, as they may refuse.
The answer names the way, and the age of what was sent ahead. A party that withdraws has its cells
deleted. After a switch the cells of the version before serve until all parties have sent those of
the new one.

A call waits for ``LIVE_SECONDS`` until all parties have answered, and for ``ROWS_SECONDS`` until a
database has answered: in all less than callers wait.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import secrets
import ssl
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Self
from zipfile import BadZipFile

import httpx
import numpy as np
import numpy.typing as npt

from fedapp.arrays import Ints
from fedapp.data.predictions import most_probable, named_predictions, score_names
from fedapp.data.table import Table
from fedapp.deploy.exporter import PEER_UP, SCORE_SECONDS, SCORED_ROWS
from fedapp.home import PRIVATE, home, write_atomically
from fedapp.serve.http import RefusedError, check_awaited
from fedapp.serve.peers import BLOCK, DAYS, PART, WITHDRAWN, ranges
from fedapp.serve.v2 import CLASS, Answered, Asked, Tensor
from fedapp.serve.versions import Site, Version
from fedapp.site.clock import SECONDS_A_DAY, read_clock
from fedapp.trees.cells import Cells, Crossing, cells_of_rows, open_cells
from fedapp.trees.divided import ActivePart

log = logging.getLogger("fedapp.site")
LIVE_SECONDS = 0.4  # for the answers of all parties
ROWS_SECONDS = 0.3  # for the active party's own rows, where they are in a database
LONG_ROWS, LONG_SECONDS = 1000, 0.2  # as many rows more have as much longer
AHEAD_SECONDS = 60.0  # for a block of cells that are sent ahead
PING_SECONDS = 0.5  # between pings of the same parties, however many callers ask for them
IDLE_SECONDS = 60.0  # that a connection stays open
MOST_TEXT = 80  # characters of a caller's purpose and request, which are in logs
# Bytes of an answer. A part may have splits of many rounds that early stopping has dropped.
MOST_ANSWER, MOST_TIMES = 1_000_000, 64
WAYS = LIVE, NIGHTLY = "live", "nightly"
AHEAD = "cells."  # beginning of a file's name, before the party's
NONE = -1


@dataclass(frozen=True, slots=True, eq=False)
class Ahead:
    """Cells of some rows of a version, by one party."""

    cells: Cells  # of these rows, in their order
    places: npt.NDArray[np.int32]  # (n_rows,): of the version's rows in that order, or NONE
    since: float  # Unix time
    until: float  # when they are stale, as the party has said
    began: float  # since, by the clock that nobody sets

    @classmethod
    def of(cls, blocks: list[Cells], rows: Ints, n_rows: int, days: float) -> Self:
        """From blocks of rows, all but the last of a multiple of 8."""
        places = np.full(n_rows, NONE, np.int32)
        places[rows] = np.arange(len(rows))
        now = read_clock(home()).shown
        cells, until = np.concatenate(blocks, axis=1), now + days * SECONDS_A_DAY
        return cls(cells, places, now, until, time.monotonic())

    @property
    def age(self) -> float:
        """Seconds, by the clock that shows more; negative if one is before that time."""
        age = read_clock(home()).shown - self.since
        ages = age, time.time() - self.since, time.monotonic() - self.began
        return max(ages) if min(ages) >= 0 else min(ages)

    @property
    def fault(self) -> str:
        """Why they give no score any more; empty if they do."""
        hours, most = self.age / 3600, (self.until - self.since) / 3600
        if hours < 0:
            return f"were sent {-hours:.1f} hours in the future: set the clock, fetch them again"
        return f"are stale after {most:g} hours, got {hours:.1f}" if hours > most else ""

    def of_rows(self, rows: Ints) -> Cells | None:
        """Cells of some rows; None if one is missing, or if they are stale."""
        places = self.places[rows].astype(np.int64)
        if self.fault or (places == NONE).any():
            return None
        return cells_of_rows(self.cells, places)

    def write(self, path: Path) -> None:
        """Store them."""
        buffer = BytesIO()
        times = np.array([self.since, self.until])
        np.savez(buffer, cells=self.cells, places=self.places, times=times)
        write_atomically(path, buffer.getbuffer(), PRIVATE, lasting=True)

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """Stored ones; None if there are none, or if they cannot be read."""
        if not path.is_file():
            return None
        try:
            with np.load(BytesIO(path.read_bytes()), allow_pickle=False) as file:
                since, until = file["times"].tolist()
                began = time.monotonic() - (read_clock(home()).shown - since)
                return cls(file["cells"], file["places"], since, until, began)
        except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
            log.error("%s must be whole, got: %s; POST /nightly asks again", path.name, error)
            return None


class AwayError(RefusedError):
    """A party does not answer."""


class Joint:
    """What is served of the active party's version; see ``fedapp.serve.v2.Served``."""

    inputs = (Tensor("id", "BYTES"),)

    def __init__(self, site: Site, loaded: Version) -> None:
        assert isinstance(loaded.part, ActivePart)
        assert loaded.crossing
        self.site, self.loaded = site, loaded
        self.part: ActivePart = loaded.part
        self.crossing: Crossing = loaded.crossing
        self.name, self.version = loaded.agreed.service, loaded.agreed.version
        self.outputs = _outputs(self.part)
        self._clients = {
            name: httpx.AsyncClient(
                verify=site.context_to(peer.certificate),
                base_url=f"https://{peer.address}",
                limits=httpx.Limits(keepalive_expiry=IDLE_SECONDS),
                timeout=None,
                trust_env=False,
            )
            for name, peer in loaded.agreed.peers.items()
        }
        self.faults: dict[str, RefusedError] = {}  # of parties that would not answer now
        self.before: Joint | None = None  # whose cells serve until there are others
        self._may_renew = True
        self._looked_at: Version | None = None  # the version before whose cells were read
        self._ping: asyncio.Task[None] | None = None  # that is to begin
        self._pings, self._pinged = asyncio.Lock(), -math.inf
        self._n_users, self._is_unused = 0, asyncio.Event()
        self._is_unused.set()
        self._ahead = {name: Ahead.read(self._path(name)) for name in self._clients}

    def __enter__(self) -> Self:
        """Within the block the connections stay open, even if ``close`` is called."""
        self._n_users += 1
        self._is_unused.clear()
        return self

    def __exit__(self, *error: object) -> None:
        self._n_users -= 1
        if not self._n_users:
            self._is_unused.set()

    async def close(self) -> None:
        """Close the connections as soon as nobody uses them."""
        await self._is_unused.wait()
        await self._drop_before()
        for client in self._clients.values():
            await client.aclose()

    async def ready(self) -> str:
        """Why the next request that names no way is refused; empty if it is not."""
        await self.ping()
        if len(self.away) == len(self.faults) and not (self.faults and self.nightly):
            return ""
        return "; ".join(map(str, self.faults.values()))

    @property
    def parties(self) -> dict[str, str]:
        """Whether the other parties answer, or why not."""
        faults = self.faults.items()
        reasons = {name: str(one).removeprefix(name).lstrip(": ") for name, one in faults}
        return dict.fromkeys(self._clients, "answers") | reasons

    @property
    def away(self) -> dict[str, RefusedError]:
        """Parties that do not answer, in whose place cells of the night serve."""
        return {name: one for name, one in self.faults.items() if isinstance(one, AwayError)}

    @property
    def nightly(self) -> str:
        """Why cells that were sent ahead do not serve for all rows; empty if they do."""
        if self.before:
            return self.before.nightly
        n_rows, places = len(self.loaded.ids), list[npt.NDArray[np.int32]]()
        for name, ahead in self._ahead.items():
            if fault := ahead.fault if ahead else "were not sent ahead":
                return f"cells of {name} {fault}"
            assert ahead
            places.append(ahead.places)
        n_sent = int((np.stack(places) != NONE).all(axis=0).sum())
        return f"cells of {n_sent} of {n_rows} rows were sent ahead" if n_sent < n_rows else ""

    async def answer(self, asked: Asked) -> Answered:
        """Scores of rows by their ids; raises RefusedError."""
        before, ids = self.before, asked.columns["id"]
        asks_nobody = asked.way == NIGHTLY or (self.away and not asked.way)
        if before and asks_nobody and before.loaded.numbers.keys() >= set(ids):
            with before:
                return await before.answer(asked)
        began, request = time.perf_counter(), secrets.token_hex(8)
        line: dict[str, Any] = {"version": self.version, "request": request}
        line |= {"caller": asked.request[:MOST_TEXT], "purpose": asked.purpose[:MOST_TEXT]}
        with self.site.noting("score", line):
            if max(len(asked.request), len(asked.purpose)) > MOST_TEXT:
                rule = f"purpose and id of a request must have at most {MOST_TEXT} characters"
                raise RefusedError(422, f"{rule}, got more")
            if asked.explains:
                rule = "explain must be left out for a divided model"
                raise RefusedError(422, f"{rule}, got 1: fedapp predict --explain explains rows")
            rows = self._rows(ids)
            line["rows"] = ranges(rows)
            predictions, facts = await self._predictions(rows, asked, request)
            check_awaited(asked.connection)
        self.site.note("score", **line, outcome="answered", way=facts["way"])
        SCORED_ROWS.labels(facts["way"]).inc(len(rows))
        SCORE_SECONDS.observe(time.perf_counter() - began)
        model = self.part.model
        named = named_predictions(model.classes, model.n_outputs, predictions)
        classes = most_probable(model.classes, predictions)
        parties = [self.part.name, *self._clients]
        # What scored: since the request came the site may have switched.
        about = {"model": self.name, "version": self.version, "request": request}
        return Answered(named, classes, {**about, "parties": parties, **facts})

    def _rows(self, ids: Sequence[Any]) -> Ints:
        rows = [self.loaded.numbers.get(name, -1) for name in ids]
        if n_unknown := rows.count(-1):
            first = json.dumps(ids[rows.index(-1)])[:40]
            rule = "id must be of a row that all parties had when they matched"
            text = f"{rule}, got {n_unknown} unknown"
            way = "fedapp federation activate --refresh matches new ones"
            raise RefusedError(422, f"{text}, such as {first}: {way}", logged=text)
        return np.array(rows, dtype=np.int64)

    async def _predictions(
        self, rows: Ints, asked: Asked, request: str
    ) -> tuple[Any, Mapping[str, Any]]:
        """Predictions of rows, and how they came about."""
        if asked.way not in ("", *WAYS):
            raise RefusedError(422, f"way must be {' or '.join(WAYS)}, got {asked.way[:40]}")
        cells, facts = self._sent_ahead(rows), dict[str, Any](way=NIGHTLY)
        if asked.way != NIGHTLY:
            document = {"rows": rows.tolist(), "purpose": asked.purpose, "request": request}
            try:
                skips = self.away if cells is not None and not asked.way else {}
                cells, facts["way"] = await self._live(document, skips), LIVE
            except AwayError as error:
                if cells is None or asked.way == LIVE:
                    raise
                facts["away"] = str(error)
        if cells is None:
            rule = "way must be live for rows of which not all parties have sent cells"
            why = self.nightly or "others were sent ahead"
            raise RefusedError(404, f"{rule}, or where these are stale, got {NIGHTLY}: {why}")
        if facts["way"] == NIGHTLY:
            ages = [ahead.age for ahead in self._ahead.values() if ahead]
            facts["age_seconds"] = round(max(ages), 1)
        features = await self._features(rows)
        lookup, name = self.part.lookup, self.part.name
        cells[name] = open_cells(self.crossing.nestings[name], lookup, features.values)
        leaves = self.crossing.leaves(cells, len(rows))
        return self.part.model.predictions(leaves, features.base_margins), facts

    async def _features(self, rows: Ints) -> Table:
        features = self.loaded.features
        if features.is_in_memory:
            return features.read(rows)
        try:
            async with asyncio.timeout(seconds := _longer(ROWS_SECONDS, len(rows))):
                return await asyncio.to_thread(features.read, rows)
        except TimeoutError:
            rule = f"database of {self.part.name} must answer within {seconds:g} s"
            raise RefusedError(504, f"{rule}, got nothing") from None

    async def _live(
        self, document: Mapping[str, Any], skips: Mapping[str, RefusedError]
    ) -> dict[str, Cells]:
        """Cells of all parties, or the faults of some, of which a refusal comes first."""
        n_rows = len(document["rows"])

        async def cells(name: str) -> Cells:
            seconds = _longer(LIVE_SECONDS, n_rows)
            content, _ = await self._post(name, "cells", document, seconds)
            return self._read(name, content, n_rows)

        asked = [name for name in self._clients if name not in skips]
        every = await asyncio.gather(*map(cells, asked), return_exceptions=True)
        errors = [one for one in every if isinstance(one, BaseException)]
        if errors or skips:
            raise min([*errors, *skips.values()], key=lambda one: isinstance(one, AwayError))
        return {
            name: one for name, one in zip(asked, every, strict=True) if type(one) is np.ndarray
        }

    def _read(self, name: str, content: bytes, n_rows: int) -> Cells:
        try:
            return self.crossing.read(name, content, n_rows)
        except ValueError as error:
            raise RefusedError(502, f"{name}: {error}") from None

    async def _post(
        self, name: str, path: str, document: Mapping[str, Any], seconds: float
    ) -> tuple[bytes, httpx.Headers]:
        """The answer of a party, and its headers; raises RefusedError."""
        wanted = 2 * len(self.crossing.nestings[name].under) * -(-len(document["rows"]) // 8)
        most = MOST_ANSWER + MOST_TIMES * wanted
        of_version = f"/{path}/{self.version}"
        reply, content = await self._sent(name, "POST", of_version, seconds, most, json=document)
        if reply.status_code != 200:
            error = _refusal(name, reply, content)
            if path == "cells" and error.status == WITHDRAWN:
                self._note(name, error)
            raise error
        self._note(name)
        if reply.headers.get(PART) != self.part.digests[name].hex():
            rule = "part of the model must be the one that the model was trained with"
            raise RefusedError(502, f"{name}: {rule}, got another")
        return content, reply.headers

    async def _sent(
        self, name: str, method: str, path: str, seconds: float, most: int, **content: Any
    ) -> tuple[httpx.Response, bytes]:
        """A party's reply, and its body as it was sent; raises RefusedError."""
        client, address = self._clients[name], self.loaded.agreed.peers[name].address
        # A handshake that is cancelled would leave its socket open; one that times out does not.
        content["timeout"] = httpx.Timeout(None, connect=0.9 * seconds)
        try:
            async with asyncio.timeout(seconds):
                try:
                    reply = await _replied(client, name, most, method, path, **content)
                except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
                    # It had closed the connection, which another process may have had before it.
                    reply = await _replied(client, name, most, method, path, **content)
        except (TimeoutError, httpx.TimeoutException):
            reason = f" within {seconds:g} s, got nothing"
        except (httpx.TransportError, ssl.SSLError, OSError) as error:
            cause = " ".join(str(error).split())[:200] or type(error).__name__
            reason = f", got: {cause}"
        else:
            return reply
        self._note(name, away := AwayError(504, f"{name} must answer at {address}{reason}"))
        raise away

    def _note(self, name: str, fault: RefusedError | None = None) -> None:
        """A party has answered, or why it has not."""
        PEER_UP.labels(name).set(fault is None)
        self.faults.pop(name, None)
        if fault:
            self.faults[name] = fault
            if fault.status == WITHDRAWN:
                self._forget(name)

    async def ping(self) -> None:
        """Ask all parties whether they would answer; this also keeps the connections open.

        Whoever asks for that until it begins, ``PING_SECONDS`` after the last, shares it.
        """
        if self._ping is None:
            self._ping = asyncio.create_task(self._ping_all())
        await asyncio.shield(self._ping)

    async def _ping_all(self) -> None:
        async def alive(name: str) -> None:
            path = f"/alive?version={self.version}"
            try:
                reply, content = await self._sent(name, "GET", path, LIVE_SECONDS, MOST_ANSWER)
                if reply.status_code != 200:
                    raise _refusal(name, reply, content)
                if self.version not in (versions := content.decode(errors="replace")).split():
                    got = versions[:MOST_TEXT] or "none"
                    raise AwayError(502, f"{name} must have version {self.version}, got {got}")
            except RefusedError as error:
                self._note(name, error)
            else:
                self._note(name)

        with self:
            async with self._pings:
                await asyncio.sleep(self._pinged + PING_SECONDS - time.monotonic())
                self._ping, self._pinged = None, time.monotonic()
                await asyncio.gather(*map(alive, self._clients))

    # Cells that are sent ahead

    def _path(self, name: str) -> Any:
        return self.site.folder / self.version / f"{AHEAD}{name}"

    @property
    def has_cells(self) -> bool:
        """Whether all parties have sent some, be they stale."""
        return all(self._ahead.values())

    def _forget(self, name: str) -> None:
        """Delete the cells of a party that has withdrawn; until that has a line, a file is left."""
        for joint in filter(None, (self, self.before)):
            joint._ahead[name] = None
        if paths := [*self.site.folder.glob(f"*/{AHEAD}{name}")]:
            for path in paths:
                with suppress(FileNotFoundError), path.open("rb+") as file:
                    file.truncate()
                    os.fsync(file.fileno())
            outcome = "cells that it has sent are deleted"
            with suppress(RefusedError):  # where the disk is full, a later ping writes it
                self.site.note("withdrawn", version=self.version, peer=name, outcome=outcome)
                for path in paths:
                    path.unlink(missing_ok=True)

    def look_back(self, before: Version | None) -> None:
        """Keep the cells of the version before, if there are no others."""
        if before is None or before is self._looked_at or self.before or self.has_cells:
            return
        if not isinstance(before.part, ActivePart):
            return
        if (before.agreed.service, _outputs(before.part)) != (self.name, self.outputs):
            return
        folder, names = self.site.folder / before.agreed.version, before.agreed.peers
        if not all((folder / f"{AHEAD}{name}").is_file() for name in names):
            return
        if self._clients.keys() != names.keys():  # a party that is gone cannot withdraw them
            return
        self._looked_at, joint = before, Joint(self.site, before)
        if joint.has_cells:
            joint.faults, self.before = self.faults, joint

    async def renew(self) -> None:
        """Ask for cells of the rows of which the version before has some."""
        if not (before := self.before) or not self._may_renew or self.faults:
            return
        if not before.has_cells:  # one of its parties has withdrawn
            return
        sent = np.stack([ahead.places != NONE for ahead in before._ahead.values() if ahead])
        ids = before.loaded.ids[sent.all(axis=0)].tolist()
        still = [name for name in ids if name in self.loaded.numbers]
        self._may_renew = False
        try:
            if still:
                has_all = len(ids) == len(before.loaded.ids)
                await (self.fetch(None, still) if has_all else self.fetch(still))
        except AwayError:
            self._may_renew = True
        except RefusedError as error:
            log.warning("cells of the version before serve until POST /nightly: %s", error)

    async def _drop_before(self) -> None:
        before, self.before = self.before, None
        if before:
            await before.close()

    def _sent_ahead(self, rows: Ints) -> dict[str, Cells] | None:
        """What all parties have sent of some rows; None if one has not."""
        every = {}
        for name, ahead in self._ahead.items():
            if ahead is None or (cells := ahead.of_rows(rows)) is None:
                return None
            every[name] = cells
        return every

    async def fetch(self, ids: Sequence[str] | None, named: Sequence[str] = ()) -> dict[str, Any]:
        """Ask all parties for cells of rows, or of all; returns how many bytes of each.

        Of a party that does not send those of all, for rows that are ``named``. What a party has
        sent before stays until all of it is there.
        """
        began, request = time.perf_counter(), secrets.token_hex(8)
        line: dict[str, Any] = {"version": self.version, "request": request}
        with self.site.noting("fetch", line):
            rows = np.arange(len(self.loaded.ids)) if ids is None else np.unique(self._rows(ids))
            line["n_rows"] = len(rows)
            document = {"purpose": NIGHTLY, "request": request, "all": ids is None}
            sizes = dict[str, int]()
            for name in self._clients:
                try:
                    sizes[name] = await self._fetch(name, rows, document)
                except RefusedError as error:
                    if error.status != WITHDRAWN or not named:
                        raise
                    some = {**document, "all": False}
                    sizes[name] = await self._fetch(name, np.unique(self._rows(named)), some)
        self.site.note("fetch", **line, outcome="answered")
        await self._drop_before()
        seconds = round(time.perf_counter() - began, 3)
        return {"rows": len(rows), "bytes": sizes, "seconds": seconds}

    async def _fetch(self, name: str, rows: Ints, document: Mapping[str, Any]) -> int:
        """Ask one party for cells of rows; returns how many bytes."""
        blocks, n_bytes, days = list[Cells](), 0, 0.0
        # Of equal size, as a site may refuse a block of few rows.
        size = -(-len(rows) // (8 * -(-len(rows) // BLOCK))) * 8
        for first in range(0, len(rows), size):
            block = rows[first : first + size]
            asked = {**document, "rows": block.tolist()}
            content, headers = await self._post(name, "ahead", asked, AHEAD_SECONDS)
            blocks.append(await asyncio.to_thread(self._read, name, content, len(block)))
            n_bytes, days = n_bytes + len(content), _days(name, headers)
        ahead = Ahead.of(blocks, rows, len(self.loaded.ids), days)
        try:
            await asyncio.to_thread(ahead.write, self._path(name))
        except OSError as error:
            rule = f"cells of {name} must be stored, got: {error.strerror}"
            raise RefusedError(503, rule) from None
        self._ahead[name] = ahead
        return n_bytes


def _outputs(part: ActivePart) -> Sequence[Tensor]:
    model = part.model
    scores = [Tensor(name, "FP64") for name in score_names(model.classes, model.n_outputs)]
    return (*scores, *([Tensor(CLASS, "BYTES")] if model.classes else ()))


def _longer(seconds: float, n_rows: int) -> float:
    return seconds + n_rows // LONG_ROWS * LONG_SECONDS


def _refusal(name: str, reply: httpx.Response, content: bytes) -> RefusedError:
    status = reply.status_code
    try:
        text = str(json.loads(content)["error"])[:1000].encode(errors="replace").decode()
    except (ValueError, KeyError, TypeError, RecursionError):
        text = f"answered with status {status}"
    kind = AwayError if status >= 500 else RefusedError
    return kind(status if status in (WITHDRAWN, 422, 429) else 502, f"{name}: {text}")


async def _replied(
    client: httpx.AsyncClient, name: str, most: int, method: str, path: str, **content: Any
) -> tuple[httpx.Response, bytes]:
    """A party's reply and its body, which is not unpacked, whatever its headers say."""
    body = bytearray()
    async with client.stream(method, path, **content) as reply:
        async for chunk in reply.aiter_raw():
            body += chunk
            if len(body) > most:
                rule = f"answer must have at most {most:,} bytes"
                raise RefusedError(502, f"{name}: {rule}, got more")
    return reply, bytes(body)


def _days(name: str, headers: httpx.Headers) -> float:
    try:
        days = float(headers.get(DAYS, ""))
    except ValueError:
        days = -1.0
    if not 0 <= days < math.inf:
        rule = f"{DAYS} must be a number of days"
        raise RefusedError(502, f"{name}: {rule}, got {headers.get(DAYS, 'none')[:40]}")
    return days
