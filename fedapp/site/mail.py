"""Letters between parties, sealed so that the server, which carries them, cannot read them.

Every site has a long-lived key pair and draws another for each run. It takes part only with
long-lived keys that it trusts, and deletes its private key of the run when it has answered for the
last time. A parcel is 8 bytes that tell when it was sent, and the letter under a key that follows
from both parties' keys and from what each was told when the run began.

Nothing old is read. What has come before, or is as old as something that an earlier request has
brought, is refused as a replay. A server that was started anew goes back to a checkpoint, and the
sites with it: of what earlier starts have brought, only letters up to that checkpoint still count,
and the one by which a site has ended the run, as that site can write no other. Parties that were
told of different checkpoints do not read each other. A site that has lost its state draws a new
key, under which nothing of before opens.

A run is opened once: a site that has gone back to before that takes the same opening alone, so that
what follows from it, such as which rows are held back, is one thing a run.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
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
from fedapp.data.names import NAME, NAME_RULE
from fedapp.errors import ProtocolError, blaming
from fedapp.messages.fields import Array, Letter, Request
from fedapp.messages.parcels import Parcel
from fedapp.site.config import SiteConfig
from fedapp.site.plan import check_roster
from fedapp.site.store import Store
from fedapp.site.trust import check_trusted, identity
from fedapp.wire.codec import Envelope
from fedapp.wire.content import Content, put_together, take_apart
from fedapp.wire.layout import from_bytes, to_bytes

L = TypeVar("L", bound=Letter)
Letters = list[tuple[str, Letter]]  # receiver and content of each
PAIRS = "pairs"  # secrets of the site's pairs, in a store's facts
# There too: digests of the requests that are answered once a run, by what they are for. No step
# back of the state changes them: what was told stays told.
TOLD_ONCE = "told_once"
HEAD = struct.Struct("<II")  # step; twice the attempt, one more where it is the sender's last


class Mail:
    """The letters that came with a request.

    Parameters
    ----------
    name : of the receiver.
    letters : sender and content of each.
    """

    def __init__(self, name: str, letters: Sequence[tuple[str, Content]]) -> None:
        self._name, self._letters = name, letters

    def each(self, kind: type[L]) -> list[tuple[str, L]]:
        """Letters of one class with their senders, in the order in which they came.

        Raises
        ------
        ProtocolError : a field of a letter breaks its form.
        """
        return [
            (sender, put_together(kind, content, sender))
            for sender, content in self._letters
            if content.name == kind.wire_name
        ]

    def all(self, kind: type[L]) -> dict[str, L]:
        """Letters of one class by sender; the last one of each.

        Raises
        ------
        ProtocolError : a field of a letter breaks its form.
        """
        return dict(self.each(kind))

    def only(self, kind: type[L], sender: str) -> L | None:
        """The letter that one party may send and no other; None if there is none.

        Raises
        ------
        ProtocolError : another party has sent one.
        """
        found = self.all(kind)
        for other in found.keys() - {sender}:
            raise ProtocolError(other, kind.__name__, "letter", f"must come from {sender} alone")
        return found.get(sender)

    def one(self, kind: type[L], sender: str) -> L:
        """The letter of one sender.

        Raises
        ------
        ProtocolError : there is none.
        """
        found = self.all(kind)
        if sender not in found:
            raise ProtocolError(sender, kind.__name__, "letter", f"must reach {self._name}")
        return found[sender]


def box_key(name: str) -> Array:
    """The site's long-lived public key. uint8, shape (32,)."""
    return np.frombuffer(public_key(identity(name)), dtype=np.uint8)


def note_greeting(store: Store, greeting: Request) -> None:
    """Keep what the server said at the beginning of the run, which is bound to all that is sent."""
    store.facts["told"] = _digest(greeting)


def begin_session(store: Store) -> None:
    """Draw the site's key of the run."""
    private = new_private_key()
    store.facts["run_key"], store.facts["session"] = public_key(private).hex(), private.hex()


def run_key(store: Store) -> Array:
    """The site's public key of the run. uint8, shape (32,)."""
    return np.frombuffer(bytes.fromhex(store.facts["run_key"]), dtype=np.uint8)


def end_session(store: Store) -> None:
    """Forget the private key of the run: from here on nobody reads what was sent."""
    store.facts.pop("session", None)
    store.facts.pop(PAIRS, None)


def know(
    config: SiteConfig,
    store: Store,
    names: Sequence[str],
    keys: tuple[Array, Array],
    opening: Request,
) -> None:
    """Keep who takes part, and their public keys.

    Parameters
    ----------
    keys : the long-lived ones and those of the run, each uint8, shape (n_parties, 32).
    opening : the request that told them, which is bound to all letters as a whole.

    Raises
    ------
    ProtocolError : the site is not among them, a name comes twice or is none, they were sent
        before, they are not those of the plan, a key is not trusted, one of the site's own was
        exchanged, or the run was opened otherwise before the site went back.
    """
    own = config.name
    if own not in names or len(set(names)) < len(names):
        raise ProtocolError(own, "parcel", "names", "must differ, with the site's own")
    if any(len(each) != len(names) for each in keys):
        raise ProtocolError(own, "parcel", "key", "must be one a name")
    if not all(map(NAME.fullmatch, names)):
        raise ProtocolError(own, "parcel", "names", f"must be {NAME_RULE}")
    if "peers" in store.facts:
        raise ProtocolError(own, "parcel", "names", "must be sent once")
    hold_once(own, store, opening, "the run was opened")
    found = {
        name: (key.tobytes(), of_run.tobytes())
        for name, key, of_run in zip(names, *keys, strict=True)
    }
    if found[own] != (box_key(own).tobytes(), run_key(store).tobytes()):
        rule = "must be the site's own, the server sent another"
        raise ProtocolError(own, "parcel", "key", rule)
    check_trusted(config, {name: key for name, (key, _) in found.items() if name != own})
    if not config.simulated:
        check_roster(store, own, {name: fingerprint_of(key) for name, (key, _) in found.items()})
    store.facts["peers"] = {name: [key.hex() for key in both] for name, both in found.items()}
    store.facts["told"] += _digest(opening)
    store.facts["heard"] = {}


def hold_once(name: str, store: Store, request: Request | Letter, what: str) -> None:
    """Hold that what is told once a run is asked for again, if ever, by the same request.

    Parameters
    ----------
    name : of the site, or of who sent the letter.
    request : or the letter that is answered.
    what : happens then, in the past tense.

    Raises
    ------
    ProtocolError : it was asked for otherwise, before the site went back.
    """
    told = store.facts.get(TOLD_ONCE, {})
    if told.get(what, digest := _digest(request)) != digest:
        rule = f"must be what it was when {what}, before the run was resumed"
        raise ProtocolError(name, type(request).__name__, "content", f"{rule}; begin a new run")
    store.facts[TOLD_ONCE] = {**told, what: digest}


def _digest(request: Request | Letter) -> str:
    return hashlib.sha256(to_bytes(take_apart(request, "server"))).hexdigest()


def session_secret(name: str, store: Store, envelope: Envelope, peer: str) -> bytes:
    """What the site shares with another party in this run: 32 bytes.

    Raises
    ------
    ProtocolError : the peer does not take part, its key is none, or the site has ended the run.
    """
    facts = store.facts
    if peer not in facts["peers"] or peer == name:
        raise ProtocolError(peer, "parcel", "sender", "must be another party of the run")
    if "session" not in facts:
        raise ProtocolError(name, "parcel", "key", "must be there, the site has ended the run")
    private = Keys(identity(name), bytes.fromhex(facts["session"]))
    told = (envelope.model_id, envelope.method, facts["told"])
    with blaming(peer, "parcel", "key"):
        public = Keys(*map(bytes.fromhex, facts["peers"][peer]))
        return agree(private, public, prefixed(*(text.encode() for text in told)))


def pair_secrets(name: str, store: Store, envelope: Envelope) -> dict[str, bytes]:
    """What the site shares with each other party, by name; kept as long as the key of the run."""
    if PAIRS not in store.facts:
        others = [peer for peer in store.facts["peers"] if peer != name]
        found = {peer: session_secret(name, store, envelope, peer) for peer in others}
        store.facts[PAIRS] = {peer: secret.hex() for peer, secret in found.items()}
    return {peer: bytes.fromhex(secret) for peer, secret in store.facts[PAIRS].items()}


def open_mail(name: str, store: Store, envelope: Envelope, parcels: Iterable[Parcel]) -> Mail:
    """Open what has come with a request.

    Raises
    ------
    ProtocolError : a parcel is from nobody who takes part, was changed, was sent before, comes from
        a start of the server that is over, or its sender was told of another run.
    """
    before: dict[str, int] = store.facts["heard"]
    heard, seen, letters = dict(before), set(), []
    for sender, parcel in parcels:
        address, content = _open(name, store, envelope, sender, parcel)
        if address.step <= before.get(sender, 0) or parcel in seen:
            raise ProtocolError(sender, "parcel", "step", "must be a new one, got one seen before")
        if not address.last and _is_over(store, address):
            rule = "must be a new one, got one of an earlier attempt"
            raise ProtocolError(sender, "parcel", "step", rule)
        heard[sender] = max(address.step, heard.get(sender, 0))
        seen.add(parcel)
        letters.append((sender, from_bytes(content, sender)))
    store.facts["heard"] = heard
    return Mail(name, letters)


def address_of(store: Store, sender: str, receiver: str, parcel: bytes) -> Address:
    """Where a parcel says that it belongs.

    Raises
    ------
    struct.error, ValueError : it is too short, or says what cannot be.
    """
    step, start = HEAD.unpack(parcel[: HEAD.size])
    return Address(sender, receiver, step, start // 2, since(store, start // 2), bool(start % 2))


def since(store: Store, attempt: int) -> int:
    """The step that a start of the server went back to, as it was told."""
    return int(dict(store.facts.get("starts", ())).get(attempt, 0))


def _open(
    name: str, store: Store, envelope: Envelope, sender: str, parcel: bytes
) -> tuple[Address, bytes]:
    """When a parcel was sent, and its content."""
    secret = session_secret(name, store, envelope, sender)
    try:
        address = address_of(store, sender, name, parcel)
        return address, unseal(secret, address, parcel[HEAD.size :])
    except (struct.error, ValueError):
        rule = (
            f"must be sealed by {sender} for {name} in this run, got {len(parcel)} bytes that are "
            "not: changed on the way, or the server told the two of different parties, keys or "
            "settings"
        )
        raise ProtocolError(sender, "parcel", "content", rule) from None


def _is_over(store: Store, address: Address) -> bool:
    """Whether a later start of the server went back to before a letter."""
    return any(
        attempt > address.attempt and address.step > checkpoint
        for attempt, checkpoint in store.facts.get("starts", ())
    )


def write_letters(name: str, letters: Letters) -> list[Parcel]:
    """Letters as bytes, not sealed yet, each with its receiver.

    Raises
    ------
    ProtocolError : a field of a letter breaks its form, or it is too long to be sealed.
    """
    written = []
    for receiver, letter in letters:
        written.append((receiver, to_bytes(take_apart(letter, name))))
        if (size := len(written[-1][1])) > LARGEST_CONTENT:
            rule = f"must be <= {LARGEST_CONTENT} bytes, got {size}; take fewer rows, columns or "
            raise ProtocolError(name, type(letter).__name__, "letter", f"{rule}bins (max-bin)")
    return written


def seal_mail(
    name: str, store: Store, envelope: Envelope, letters: Iterable[Parcel]
) -> list[Parcel]:
    """Seal what ``write_letters`` wrote, as of the exchange that is being answered."""
    parcels = []
    for receiver, content in letters:
        with blaming(name, "parcel", "step"):
            when = (envelope.step, envelope.attempt, since(store, envelope.attempt))
            address = Address(name, receiver, *when, last=store.finished)
        head = HEAD.pack(address.step, 2 * address.attempt + address.last)
        sealed = seal(session_secret(name, store, envelope, receiver), address, content)
        parcels.append((receiver, head + sealed))
    return parcels
