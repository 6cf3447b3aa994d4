"""What a site's standing process answers by: versions of divided models, as the sites agreed.

::

    standing/tls.pem                  the process's key and certificate
    standing/tls.next.pem             those that follow with the next switch
    standing/current                  {"version": id, "before": id}; empty ids for none
    standing/ID/agreed.json           model, parties, addresses, certificates
    standing/ID/ids.parquet           ids of the rows; a row's number is its pseudonym
    standing/ID/cells.PARTY           cells that a party has sent ahead (``fedapp.serve``)
    standing/ID/reached.json          at the active party: which parties do not answer its process

below the site's folder in ``$FEDAPP_HOME/sites``. ``clients.standing`` writes versions, the
standing process reads them, follows ``current``, and shares the lock of the folder.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from fedapp.errors import DataError
from fedapp.home import PRIVATE, home, is_held, private_folder, sync_folder, write_atomically
from fedapp.site.certificates import WARNED_DAYS, days_left, own_certificate
from fedapp.site.clock import read_clock
from fedapp.site.table import keyed_order

METHOD = FOLDER = "standing"
TLS, NEXT_TLS = "tls.pem", "tls.next.pem"
CURRENT, AGREED, IDS, REACHED = "current", "agreed.json", "ids.parquet", "reached.json"
NO_VERSION = ""


@dataclass(frozen=True, slots=True)
class Peer:
    """Another party of a version."""

    address: str  # HOST:PORT
    certificate: str  # PEM


@dataclass(frozen=True, slots=True)
class Agreed:
    """What the parties of a version have agreed on, at one of them."""

    version: str  # id
    service: str  # the name by which callers know it
    model: str  # id
    party: str  # this one
    active: str
    peers: Mapping[str, Peer]  # the others, by name
    since: float  # Unix time

    @classmethod
    def read(cls, site: str, version: str) -> Self:
        """A stored version; raises DataError if there is none."""
        path = folder_of(site) / version / AGREED
        if not path.is_file():
            raise DataError(f"version must be one that {site} has stored, got {version}", site)
        fields = json.loads(path.read_text())
        peers = {name: Peer(**peer) for name, peer in fields.pop("peers").items()}
        return cls(**fields, peers=peers)

    def write(self, ids: npt.NDArray[np.str_]) -> None:
        """Store the version, and the ids of its rows by their numbers."""
        import pyarrow as pa
        from pyarrow import parquet

        folder = folder_of(self.party) / self.version
        private_folder(folder)
        buffer = pa.BufferOutputStream()
        parquet.write_table(pa.table({"id": pa.array(ids.tolist(), pa.string())}), buffer)
        write_atomically(folder / IDS, memoryview(buffer.getvalue()), PRIVATE, lasting=True)
        text = json.dumps(asdict(self), indent=1) + "\n"
        write_atomically(folder / AGREED, text.encode(), PRIVATE, lasting=True)
        sync_folder(folder)


def ids_of(site: str, version: str) -> npt.NDArray[np.str_]:
    """Ids of a version's rows by their numbers; none without a version."""
    from pyarrow import parquet

    if not version:
        return np.empty(0, np.str_)
    table = parquet.read_table(folder_of(site) / version / IDS)
    return np.array(table["id"].to_pylist(), dtype=np.str_)


def folder_of(site: str) -> Path:
    """Where the versions of a site are."""
    return home() / "sites" / site / FOLDER


def current(site: str) -> tuple[str, str]:
    """Ids of the version that answers, and of the one before, which answers requests that name it.

    Empty for none.
    """
    path = folder_of(site) / CURRENT
    if not path.is_file():
        return NO_VERSION, NO_VERSION
    fields = json.loads(path.read_text())
    return fields["version"], fields["before"]


def switch(site: str, version: str, replaced: str = NO_VERSION) -> str:
    """Answer by another version, or by none; returns the one before.

    Of the others only that stays: whoever still names it is answered. It is ``replaced``, which the
    active party answers by, if the site has it: where an activation ended halfway, a passive one
    has switched already. A certificate that the version's other sites know comes into use.
    """
    before, earlier = current(site)
    if replaced and replaced == earlier:
        before = replaced
    folder = folder_of(site)
    private_folder(folder)
    if version and (folder / NEXT_TLS).is_file():
        (folder / NEXT_TLS).replace(folder / TLS)
    after = {"version": version, "before": before if version else NO_VERSION}
    write_atomically(folder / CURRENT, json.dumps(after).encode(), PRIVATE, lasting=True)
    sync_folder(folder)
    for path in folder.glob(f"*/{AGREED}"):
        if path.parent.name not in after.values():
            shutil.rmtree(path.parent)
    return before


def write_reached(site: str, version: str, unreached: Sequence[str]) -> None:
    """Store which parties do not answer a site's standing process, by a version."""
    path = folder_of(site) / version / REACHED
    if path.parent.is_dir() and unreached != _read_reached(path):
        write_atomically(path, json.dumps(unreached).encode(), PRIVATE)


def unreached(site: str, version: str, seconds: float) -> Sequence[str]:
    """Which parties do not answer the site's standing process after some seconds.

    The site itself, if its process does not run or does not know the version by then.
    """
    deadline, path = time.monotonic() + seconds, folder_of(site) / version / REACHED
    while is_held(folder_of(site)) and _read_reached(path) != [] and time.monotonic() < deadline:
        time.sleep(0.05)
    names = _read_reached(path)
    return [site] if names is None or not is_held(folder_of(site)) else names


def _read_reached(path: Path) -> Sequence[str] | None:
    with suppress(OSError, ValueError):
        return list(json.loads(path.read_text()))
    return None


def certificate(site: str, renews: bool = False) -> bytes:
    """The certificate of a site's standing process, PEM; a new one if there is none.

    With ``renews`` the one that other sites are to know: if the certificate ends soon, one that
    ``switch`` puts in its place, as until then they accept only the certificate that they know.
    TLS goes by the machine's clock, which may be right though it is not believed.
    """
    path, now = folder_of(site) / TLS, datetime.fromtimestamp(read_clock(home()).shown, UTC)
    latest = max(now, datetime.now(UTC))
    if renews and path.is_file() and days_left(path, latest) <= WARNED_DAYS:
        path = path.with_name(NEXT_TLS)
    if not path.is_file() or (renews and days_left(path, latest) <= WARNED_DAYS):
        private_folder(path.parent)
        pair = own_certificate(site, now)
        write_atomically(path, pair.secret + pair.public, PRIVATE, lasting=True)
    content = path.read_bytes()
    return content[content.index(b"-----BEGIN CERTIFICATE") :]


def numbered(
    ids: npt.NDArray[np.str_], drawn: Sequence[bytes], before: npt.NDArray[np.str_]
) -> npt.NDArray[np.str_]:
    """Ids in the order of their pseudonyms: those of `before`, then new ones in a secret order."""
    order = keyed_order(ids.tolist(), b"".join(drawn))
    return np.concatenate((before, ids[order]))


def new_rows(site: str, ids: npt.NDArray[np.str_]) -> npt.NDArray[np.int64]:
    """Places of the ids that the site's version does not have yet."""
    return np.flatnonzero(~np.isin(ids, ids_of(site, current(site)[0])))
