"""The versions that a site's standing process answers by, as they are on its disk now."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.errors import DataError, FedappError
from fedapp.home import home
from fedapp.serve.http import RefusedError
from fedapp.site.features import Features, features_of, source_of
from fedapp.site.log import Log
from fedapp.site.settings import SiteConfig, parse_node_config, site_config
from fedapp.site.standing import (
    CURRENT,
    METHOD,
    TLS,
    Agreed,
    certificate,
    current,
    folder_of,
    ids_of,
)
from fedapp.site.store import part_digest, read_part
from fedapp.trees.cells import Crossing
from fedapp.trees.divided import PARTS, ActivePart, Nesting, Part

log = logging.getLogger("fedapp.site")
LOG = "log.jsonl"


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
        features = features_of(config, part, agreed.model, ids)
        digest = part_digest(folder).hex()
        return cls(agreed, part, digest, ids, features, crossing, numbers)

    @property
    def nesting(self) -> Nesting:
        """Of the party's splits."""
        return self.crossing.nestings[self.agreed.party] if self.crossing else self.part.nesting


class Site:
    """A site's settings and versions, read again when their files change.

    ``refreshed`` compares the files' times, so that a node config which withdraws permission, or a
    switch, counts from the next request on. Of a table that changes, the version is loaded in a
    thread, and answers as before until that is done; if it cannot be read, nothing is answered.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.config = self._read_config()
        self.versions: dict[str, Version] = {}
        self.faults: dict[str, str] = {}  # why a version does not answer
        self.current = ""
        self.folder = folder_of(self.config.name)
        self.log = Log(self.folder / LOG)
        self._seen: tuple[Any, ...] = ()
        self._reading = asyncio.Lock()
        certificate(self.config.name)
        self.server_context = _context(ssl.PROTOCOL_TLS_SERVER, self.folder / TLS)

    def _read_config(self) -> SiteConfig:
        return site_config(parse_node_config(str(self._path)), {})

    @property
    def is_allowed(self) -> bool:
        """Whether the site still permits it."""
        return METHOD in self.config.allowed

    async def refreshed(self) -> None:
        """Read what has changed."""
        if self._seen == (seen := self._files()):
            return
        async with self._reading:
            if self._seen == (seen := self._files()):
                return
            try:
                self.config = self._read_config()
            except (FedappError, OSError) as error:
                log.error("%s", error)
                self.config = replace(self.config, allowed=frozenset())
            await self._read_versions()
            self._seen = seen

    def _files(self) -> tuple[Any, ...]:
        return _time(self._path), _time(self.folder / CURRENT)

    async def _read_versions(self) -> None:
        self.current, before = current(self.config.name)
        names = [name for name in (self.current, before) if name]
        loaded = {name: self.versions[name] for name in names if name in self.versions}
        self.faults = {}
        for name in names:
            old = loaded.get(name)
            if old is None or old.features.source != source_of(self.config):
                await self._load(name, loaded)
        self.versions = loaded
        self.server_context.load_cert_chain(self.folder / TLS)  # a match may have renewed it
        for version in loaded.values():
            for peer in version.agreed.peers.values():
                self.server_context.load_verify_locations(cadata=peer.certificate)

    async def _load(self, name: str, loaded: dict[str, Version]) -> None:
        try:
            loaded[name] = await asyncio.to_thread(Version.load, self.config, name)
            log.info("version %s answers, of %d rows", name, len(loaded[name].ids))
        except (FedappError, OSError) as error:
            loaded.pop(name, None)
            text = error.rule if isinstance(error, DataError) else str(error)
            self.faults[name] = text
            log.error("version %s does not answer: %s", name, error)

    def note(self, event: str, **fields: Any) -> None:
        """Write a line into the site's log before an answer leaves; or raise RefusedError."""
        try:
            self.log.append(event, **fields)
        except OSError as error:
            rule = f"log of {self.config.name} must take a line before an answer leaves"
            raise RefusedError(503, error=f"{rule}, got: {error.strerror or error}") from None

    async def follow_table(self) -> None:
        """Load the versions again if the site's table has changed."""
        sources = {version.features.source for version in self.versions.values()}
        if self.faults or sources - {source_of(self.config)}:
            async with self._reading:
                await self._read_versions()

    def peers_of(self, certificate: bytes) -> Iterator[tuple[Version, str]]:
        """Versions and names of the party that has a certificate, DER."""
        for version in self.versions.values():
            for name, peer in version.agreed.peers.items():
                if ssl.PEM_cert_to_DER_cert(peer.certificate) == certificate:
                    yield version, name

    def context_to(self, peer_certificate: str) -> ssl.SSLContext:
        """For connections to one peer, which must have this certificate, PEM."""
        context = _context(ssl.PROTOCOL_TLS_CLIENT, self.folder / TLS)
        context.check_hostname = False  # the certificate itself is pinned
        context.load_verify_locations(cadata=peer_certificate)
        return context


def _context(side: int, own: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(side)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(own)
    return context


def _time(path: Path) -> int:
    return path.stat().st_mtime_ns if path.exists() else 0
