"""Letters between parties, sealed so that the server, which forwards them, cannot read them.

Every site has a long-lived key pair and draws another for each run. It takes part only with
long-lived keys that it trusts, and deletes its private key of the run after its last answer. A
parcel is a head of 8 bytes with the time of sending, and the letter under a key derived from both
parties' keys and from the opening messages of the run, as both received them.

A letter is a replay unless its (attempt, step) is newer than the newest one seen. A restarted
server goes back to a checkpoint, and so do the sites: letters of earlier attempts count only up to
that checkpoint, except a site's last letter of the run, as it can write no other. Parties that were
sent different checkpoints cannot read each other's letters. A site that has lost its state draws a
new key, which opens no earlier letter.

A run is opened once (``site.account``), so all that follows from the opening, such as the rows held
back, is unique per run.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import TypeVar

import numpy as np

from fedapp.crypto.sealed import (
    LARGEST_CONTENT,
    Address,
    Keys,
    agree,
    fingerprint_of,
    new_private_key,
    prefixed,
    public_key,
    seal,
    unseal,
)
from fedapp.data.datasets import NAME, NAME_RULE
from fedapp.errors import ProtocolError, as_protocol_error
from fedapp.messages.fields import Array, Letter, Request, check_fields
from fedapp.messages.methods import modules_of_method
from fedapp.messages.vertical import Parcel
from fedapp.messages.wire import Content, Envelope, from_bytes, from_content, to_bytes, to_content
from fedapp.site.account import account_of, check_roster
from fedapp.site.settings import SiteConfig
from fedapp.site.store import Store
from fedapp.site.trust import check_trusted, identity

L = TypeVar("L", bound=Letter)
Letters = list[tuple[str, Letter]]  # receiver and content of each
HEAD = struct.Struct("<II")  # step; 2 * attempt + (1 if it is the sender's last letter)


@dataclass(frozen=True, slots=True)
class Session:
    """The site's keys of a run, and what it knows of the other parties."""

    opening: str = ""  # digests of the requests that opened the run; all keys are bound to them
    public_key: bytes = b""
    private_key: bytes = field(default=b"", repr=False)  # until the run ends
    peers: Mapping[str, tuple[bytes, bytes]] = field(default_factory=dict)  # public keys: long, run
    heard: Mapping[str, int] = field(default_factory=dict)  # step of each sender's newest letter
    # Secrets of the site's pairs, once computed, until the run ends.
    pairs: Mapping[str, bytes] = field(default_factory=dict, repr=False)


class Mail:
    """Letters that came with a request to `name`, each with its sender."""

    def __init__(self, name: str, letters: Sequence[tuple[str, Content]]) -> None:
        self._name, self._letters = name, letters

    def add_to(self, digest: hashlib._Hash) -> None:
        """Add all letters to a digest."""
        for sender, content in self._letters:
            digest.update(prefixed(sender.encode(), to_bytes(content)))

    def decoded(self, method: str, request: type[Request]) -> Iterator[tuple[str, Letter]]:
        """All letters with their senders, each of a class that may come with a request.

        Raises ProtocolError for another class.
        """
        modules = [import_module(request.__module__), *modules_of_method(method)]
        for sender, content in self._letters:
            named = (vars(module).get(content.name) for module in modules)
            kind = next((one for one in named if isinstance(one, type)), Letter)
            if not issubclass(kind, Letter) or kind is Letter:
                raise ProtocolError(sender, "parcel", "class", f"must be known, got {content.name}")
            yield sender, from_content(kind, content, sender)

    def each(self, kind: type[L]) -> list[tuple[str, L]]:
        """Letters of one class with their senders, in order of arrival."""
        return [
            (sender, from_content(kind, content, sender))
            for sender, content in self._letters
            if content.name == kind.wire_name
        ]

    def all(self, kind: type[L]) -> dict[str, L]:
        """Letters of one class by sender; the last one of each."""
        return dict(self.each(kind))

    def only(self, kind: type[L], sender: str) -> L | None:
        """The letter that `sender` may send, or None; raises ProtocolError if another did."""
        letters = self.all(kind)
        for other in letters.keys() - {sender}:
            raise ProtocolError(other, kind.__name__, "letter", f"must come only from {sender}")
        return letters.get(sender)

    def one(self, kind: type[L], sender: str) -> L:
        """The letter of one sender; raises ProtocolError if there is none."""
        letters = self.all(kind)
        check_fields(sender, kind, ("letter", sender in letters, f"must reach {self._name}"))
        return letters[sender]


def box_key(name: str) -> Array:
    """The site's long-lived public key; uint8, shape (32,)."""
    return np.frombuffer(public_key(identity(name)), dtype=np.uint8)


def note_greeting(store: Store, greeting: Request) -> None:
    """Store the digest of the server's greeting; all session keys are derived from it."""
    store.put(replace(store.find(Session) or Session(), opening=_digest(greeting)))


def begin_session(store: Store) -> None:
    """Draw the site's key pair of the run."""
    private = new_private_key()
    session = store.find(Session) or Session()
    store.put(replace(session, public_key=public_key(private), private_key=private))


def run_key(store: Store) -> Array:
    """The site's public key of the run; uint8, shape (32,)."""
    return np.frombuffer(store.get(Session).public_key, dtype=np.uint8)


def end_session(store: Store) -> None:
    """Delete the private key of the run: from now on nobody can decrypt its letters."""
    if session := store.find(Session):
        store.put(replace(session, private_key=b"", pairs={}))


def store_peers(
    config: SiteConfig,
    store: Store,
    names: Sequence[str],
    keys: tuple[Array, Array],
    opening: Request,
) -> None:
    """Store the parties of the run and their public keys, after checks.

    Parameters
    ----------
    keys : long-lived keys and those of the run, each uint8, shape (n_parties, 32).
    opening : the request that contains them; all session keys are derived from it.
    """
    name, session = config.name, store.get(Session)
    pairs = [(key.tobytes(), of_run.tobytes()) for key, of_run in zip(*keys, strict=False)]
    peers = dict(zip(names, pairs, strict=False))
    local = box_key(name).tobytes(), run_key(store).tobytes()
    is_whole = name in names and len(set(names)) == len(names)
    check_fields(
        name,
        "parcel",
        ("names", is_whole, "must be distinct and include the site's"),
        ("key", all(len(array) == len(names) for array in keys), "must be one a name"),
        ("names", all(map(NAME.fullmatch, names)), f"must be {NAME_RULE}"),
        ("names", not session.peers, "must be sent once"),
        ("key", peers.get(name) == local, "must be the one that the site sent, got another"),
    )
    check_trusted(config, {peer: key for peer, (key, _) in peers.items() if peer != name})
    if not config.simulated:
        check_roster(store, name, {peer: fingerprint_of(key) for peer, (key, _) in peers.items()})
    store.put(replace(session, peers=peers, opening=session.opening + _digest(opening)))


def _digest(request: Request) -> str:
    return hashlib.sha256(to_bytes(to_content(request, "server"))).hexdigest()


def session_secret(name: str, store: Store, envelope: Envelope, peer: str) -> bytes:
    """Secret of the site and another party in this run: 32 bytes.

    Raises ProtocolError if the peer does not take part, its key is invalid, or the site has ended
    the run.
    """
    session = store.get(Session)
    is_other = peer in session.peers and peer != name
    check_fields(peer, "parcel", ("sender", is_other, "must be another party of the run"))
    rule = "must be there, the site has ended the run"
    check_fields(name, "parcel", ("key", session.private_key, rule))
    private = Keys(identity(name), session.private_key)
    context = (envelope.model_id, envelope.method, session.opening)
    with as_protocol_error(peer, "parcel", "key"):
        public = Keys(*session.peers[peer])
        return agree(private, public, prefixed(*(text.encode() for text in context)))


def pair_secrets(name: str, store: Store, envelope: Envelope) -> dict[str, bytes]:
    """Secrets of the site with each other party, by name; stored as long as the key of the run."""
    session = store.get(Session)
    if not session.pairs:
        others = [peer for peer in session.peers if peer != name]
        secrets = {peer: session_secret(name, store, envelope, peer) for peer in others}
        store.put(session := replace(session, pairs=secrets))
    return dict(session.pairs)


def open_mail(name: str, store: Store, envelope: Envelope, parcels: Iterable[Parcel]) -> Mail:
    """Open the parcels of a request.

    Raises ProtocolError if the sender does not take part or has other opening messages, or if a
    parcel was changed, repeated, or sent in an attempt of the server that is over.
    """
    session = store.get(Session)
    before = session.heard
    starts = account_of(store).starts
    newest = dict(before)
    seen = set()
    letters = []
    for sender, parcel in parcels:
        address, content = _open(name, store, envelope, sender, parcel)
        is_new = address.step > before.get(sender, 0) and parcel not in seen
        # Whether no later attempt of the server went back to before the letter.
        is_of_now = address.last or not any(
            attempt > address.attempt and address.step > checkpoint
            for attempt, checkpoint in starts
        )
        check_fields(
            sender,
            "parcel",
            ("step", is_new, "must be a new one, got one seen before"),
            ("step", is_of_now, "must be a new one, got one of an earlier attempt"),
        )
        newest[sender] = max(address.step, newest.get(sender, 0))
        seen.add(parcel)
        letters.append((sender, from_bytes(content, sender)))
    store.put(replace(session, heard=newest))
    return Mail(name, letters)


def address_of(store: Store, sender: str, receiver: str, parcel: bytes) -> Address:
    """Address in the head of a parcel; raises struct.error or ValueError if it is invalid."""
    step, start = HEAD.unpack(parcel[: HEAD.size])
    return Address(
        sender, receiver, step, start // 2, checkpoint_of(store, start // 2), bool(start % 2)
    )


def checkpoint_of(store: Store, attempt: int) -> int:
    """The checkpoint to which an attempt of the server went back, as this site received it."""
    return dict(account_of(store).starts).get(attempt, 0)


def _open(
    name: str, store: Store, envelope: Envelope, sender: str, parcel: bytes
) -> tuple[Address, bytes]:
    secret = session_secret(name, store, envelope, sender)
    try:
        address = address_of(store, sender, name, parcel)
        return address, unseal(secret, address, parcel[HEAD.size :])
    except (struct.error, ValueError):
        rule = f"must be sealed by {sender} for {name} in this run, got {len(parcel)} bytes that "
        rule += "are not: changed on the way, or the server sent the two different parties, keys "
        rule += "or settings"
        raise ProtocolError(sender, "parcel", "content", rule) from None


def write_letters(name: str, letters: Letters) -> list[Parcel]:
    """Serialise letters, not sealed yet, each with its receiver.

    Raises ProtocolError if a field is invalid, or a letter is too long to be sealed.
    """
    written = []
    for receiver, letter in letters:
        written.append((receiver, to_bytes(to_content(letter, name))))
        if (size := len(written[-1][1])) > LARGEST_CONTENT:
            rule = f"must be <= {LARGEST_CONTENT} bytes, got {size}; take fewer rows, columns or "
            raise ProtocolError(name, type(letter).__name__, "letter", f"{rule}bins (max-bin)")
    return written


def seal_mail(
    name: str, store: Store, envelope: Envelope, letters: Iterable[Parcel]
) -> list[Parcel]:
    """Seal the letters of ``write_letters`` for the exchange that is being answered."""
    parcels = []
    for receiver, content in letters:
        since = checkpoint_of(store, envelope.attempt)
        address = Address(
            name, receiver, envelope.step, envelope.attempt, since, last=store.finished
        )
        head = HEAD.pack(address.step, 2 * address.attempt + address.last)
        sealed = seal(session_secret(name, store, envelope, receiver), address, content)
        parcels.append((receiver, head + sealed))
    return parcels
