"""The versions that a site's standing process answers by, as they are on its disk now."""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.errors import DataError, FedappError, without_folders
from fedapp.home import home
from fedapp.serve.http import RefusedError
from fedapp.site.certificates import WARNED_DAYS, days_left
from fedapp.site.log import LogError, append, check_takes, drop_old
from fedapp.site.rows_to_predict import Features, InDatabase, InTable, is_database, source_of
from fedapp.site.settings import SiteConfig, read_node_config, site_config
from fedapp.site.standing import (
    CURRENT,
    METHOD,
    NO_VERSION,
    TLS,
    Agreed,
    certificate,
    current,
    folder_of,
    ids_of,
)
from fedapp.site.store import part_digest, read_part
from fedapp.trees.cells import Crossing, open_cells
from fedapp.trees.divided import PARTS, ActivePart, Nesting, Part

log = logging.getLogger("fedapp.site")
LISTED, LISTED_SECONDS = 60, 60.0  # refusals of one asker that have lines; the others are counted
UNREADABLE = 423  # HTTP status; unlike a withdrawal, it deletes no cells
MOST_TEXT = 160  # characters of a text in the line of a refusal


@dataclass(frozen=True, slots=True, eq=False)
class Version:
    """A version at a site, with the features that its table has."""

    agreed: Agreed
    part: Part
    digest: str  # of the part's file
    ids: npt.NDArray[np.str_]
    features: Features
    crossing: Crossing | None  # at the active party
    numbers: Mapping[str, int]  # of the rows by their ids; at the active party

    @classmethod
    def load(cls, config: SiteConfig, version: str) -> Version:
        """Read a stored version and its rows; raises a FedappError."""
        agreed = Agreed.read(config.name, version)
        folder = home() / "sites" / config.name / agreed.model
        part, ids = read_part(folder, *PARTS), ids_of(config.name, version)
        crossing, numbers = None, dict[str, int]()
        if isinstance(part, ActivePart):
            crossing = Crossing.of(part)
            numbers = {name: number for number, name in enumerate(ids.tolist())}
        kind = InDatabase if is_database(config.predict_data) else InTable
        digest = part_digest(folder).hex()
        loaded = cls(agreed, part, digest, ids, kind(config, part, ids), crossing, numbers)
        loaded._load_kernels()
        return loaded

    def _load_kernels(self) -> None:
        """Score a row without values, as no request waits until numba has compiled a kernel."""
        missing = np.full((1, len(self.part.columns)), np.nan, np.float32)
        opened = open_cells(self.nesting, self.part.lookup, missing)
        if self.crossing is not None and isinstance(self.part, ActivePart):
            cells = {
                name: np.zeros((2 * len(nesting.under), 1), np.uint8)
                for name, nesting in self.crossing.nestings.items()
            }
            leaves = self.crossing.leaves({**cells, self.agreed.party: opened}, 1)
            self.part.model.predictions(leaves)

    @property
    def nesting(self) -> Nesting:
        """Of the party's splits."""
        return self.crossing.nestings[self.agreed.party] if self.crossing else self.part.nesting


class Site:
    """A site's settings and versions, read again when their files change.

    ``refreshed`` compares the files' times, so that a node config which withdraws permission, or a
    switch to none, counts from the next request on. A version that is new, or whose table changes,
    is loaded in a thread. Requests wait for a new one only if none can answer them. If a table
    cannot be read, nothing is answered.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.config = self._read_config()
        self.versions: dict[str, Version] = {}
        self.faults: dict[str, str] = {}  # why a version does not answer, as others may learn it
        self.current = ""
        self.folder = folder_of(self.config.name)
        self._names = NO_VERSION, NO_VERSION  # that are to answer: as ``current`` has them
        self._due: set[str] = set()  # to be loaded
        self._seen: tuple[Any, ...] = ()
        self._is_read = True  # the node config, and which version answers
        self._loading: asyncio.Task[None] | None = None
        self._refused = Counter[tuple[str, str]]()  # by event and peer, since that time
        self._refused_since = time.monotonic()
        certificate(self.config.name)
        if (days := days_left(self.folder / TLS)) <= WARNED_DAYS:
            way = "fedapp federation activate renews it"
            log.warning("the certificate ends in %d days: %s", days, way)
        self.server_context = _context(ssl.PROTOCOL_TLS_SERVER, self.folder)

    def _read_config(self) -> SiteConfig:
        return site_config(read_node_config(self._path), {})

    def check_allowed(self, status: int) -> None:
        """Raise RefusedError if the site permits nothing, ``UNREADABLE`` if nobody knows."""
        if METHOD in self.config.allowed:
            return
        if not self._is_read:
            rule = f"node config of {self.config.name} must be readable"
            raise RefusedError(UNREADABLE, f"{rule}, got a fault that its process logs")
        rule = f"allow in the node config of {self.config.name} must have {METHOD}"
        raise RefusedError(status, f"{rule}, got it withdrawn")

    @property
    def before(self) -> Version | None:
        """The version before, which answers requests that name it."""
        return self.versions.get(self._names[1])

    async def refreshed(self, version: str = NO_VERSION) -> None:
        """Read what has changed, for a request that names a version, or none."""
        if self._seen != (seen := self._files()):
            self._read()
            self._seen = seen
        if self._due - self.versions.keys():
            loading = self._load_due()
            if not {version, self.current} <= self._ready:
                await asyncio.wait({loading})

    async def follow(self) -> None:
        """Read what has changed, also the table, or could not be read."""
        if not self._is_read:
            self._seen = ()
        await self.refreshed()
        names = set(self._names) - {NO_VERSION}
        self._due |= self.faults.keys() & names | self._outdated()
        if self._due:
            await self._load_due()
        drop_old(self.folder.parent, self.config.log_days)
        if time.monotonic() >= self._refused_since + LISTED_SECONDS:
            self.note_refused()

    @property
    def _ready(self) -> set[str]:
        return {NO_VERSION, *self.versions, *self.faults}

    def _files(self) -> tuple[Any, ...]:
        return tuple(map(_state, (self._path, self.folder / CURRENT, self.folder / TLS)))

    def _read(self) -> None:
        """Read the settings, and which versions are to answer."""
        self._is_read = True
        try:
            self.config = self._read_config()
        except (FedappError, OSError, ValueError) as error:
            log.error("node config: %s", error)
            self.config, self._is_read = replace(self.config, allowed=frozenset()), False
        self.faults = {}
        try:
            self._names = current(self.config.name)
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.error("%s cannot be read: %s", CURRENT, error)
            self._names, self._is_read = (NO_VERSION, NO_VERSION), False
            self.faults = {NO_VERSION: f"unreadable file {CURRENT}: activate again"}
        names = set(self._names) - {NO_VERSION}
        self.versions = {name: self.versions[name] for name in self.versions if name in names}
        self._due = names - self.versions.keys() | self._outdated()
        if self.current not in self.versions or self._names[0] in self._ready:
            self.current = self._names[0]
        self.server_context.load_cert_chain(self.folder / TLS)  # a switch may have renewed it

    def _outdated(self) -> set[str]:
        source = source_of(self.config)
        versions = self.versions.items()
        return {name for name, version in versions if version.features.source != source}

    def _load_due(self) -> asyncio.Task[None]:
        if self._loading is None or self._loading.done():
            self._loading = asyncio.create_task(self._load_all())
        return self._loading

    async def _load_all(self) -> None:
        while due := [name for name in self._names if name in self._due]:
            await self._load(due[0])
            self._due.discard(due[0])
        self.current = self._names[0]

    async def _load(self, name: str) -> None:
        try:
            version = await asyncio.to_thread(Version.load, self.config, name)
        except Exception as error:
            is_bug = not isinstance(error, FedappError | OSError)
            log.error("version %s does not answer: %s", name, error, exc_info=is_bug)
            text = f"{type(error).__name__}; the site's own log says more"
            if isinstance(error, DataError):
                text = without_folders(error.for_others(self.config.shares_names).rule)
            self.versions.pop(name, None)
            self.faults[name] = text
            return
        if name not in self._names:
            return
        for peer in version.agreed.peers.values():
            self.server_context.load_verify_locations(cadata=peer.certificate)
        self.versions[name] = version
        self.faults.pop(name, None)
        log.info("version %s answers, of %d rows", name, len(version.ids))

    def note(self, event: str, **fields: Any) -> None:
        """Write a line into the site's log before an answer leaves; or raise RefusedError."""
        with _refusing():
            append(self.folder.parent, event, **fields)

    def check_log(self) -> None:
        """Raise RefusedError if the log would take no line."""
        with _refusing():
            check_takes(self.folder.parent)

    @contextmanager
    def noting(self, event: str, line: Mapping[str, Any]) -> Iterator[None]:
        """Note an error of the block, with what ``line`` has by then, of rows only how many.

        Otherwise who is refused could fill the disk, and without a log nobody is answered.
        """
        try:
            yield
        except Exception as error:
            outcome = f"failed: {type(error).__name__}"
            if isinstance(error, RefusedError):
                outcome = f"refused: {error.logged}"
            elif isinstance(error, DataError):
                outcome = f"refused: {error.rule}"
            asker = event, line.get("peer", "")
            self._refused[asker] += 1
            if self._refused[asker] <= LISTED:
                fields = {name: _cut(value) for name, value in line.items() if name != "rows"}
                if "rows" in line:
                    fields["n_rows"] = sum(last - first + 1 for first, last in line["rows"])
                self.note(event, **fields, outcome=_cut(outcome))
            raise

    def note_refused(self) -> None:
        """Write how many refusals had no line of their own, and list the next ones again."""
        for (event, peer), n_refused in self._refused.items():
            if (n_more := n_refused - LISTED) > 0:
                asker = {"peer": peer} if peer else {}
                self.note(event, **asker, outcome=f"refused: {n_more} more", n_refused=n_more)
                self._refused[event, peer] = LISTED
        self._refused.clear()
        self._refused_since = time.monotonic()

    def asked_by(self, certificate: bytes) -> Iterator[Version]:
        """Versions whose active party has a certificate, DER."""
        for version in self.versions.values():
            peer = version.agreed.peers.get(version.agreed.active)
            if peer and ssl.PEM_cert_to_DER_cert(peer.certificate) == certificate:
                yield version

    def context_to(self, peer_certificate: str) -> ssl.SSLContext:
        """For connections to one peer, which must have this certificate, PEM."""
        context = _context(ssl.PROTOCOL_TLS_CLIENT, self.folder)
        context.check_hostname = False  # the certificate itself is pinned
        context.load_verify_locations(cadata=peer_certificate)
        return context


@contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except LogError as error:
        raise RefusedError(503, str(error.strerror)) from None


def _context(side: int, folder: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    # Otherwise OpenSSL takes the first certificate of a subject only, such as the one before.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_cert_chain(folder / TLS)
    return context


def _cut(value: Any) -> Any:
    """A text that takes at most twice ``MOST_TEXT`` bytes of the log, or a number."""
    if isinstance(value, str) and len(escaped := json.dumps(value)[1:-1]) > MOST_TEXT:
        return escaped[:MOST_TEXT]
    return value


def _state(path: Path) -> tuple[int, ...]:
    """What changes with a file; its time alone is too coarse. Empty if there is no file."""
    try:
        stat = path.stat()
    except OSError:
        return ()
    return stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_size
