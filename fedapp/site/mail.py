"""Letters between parties, sealed so that the server, which carries them, cannot read them.

Every site has a key pair of its own, and opens a run only with keys that it trusts. A parcel is 8
bytes of the step it was sent in, and the letter under a key that follows from the sender's and
receiver's, bound to both names, the model and the step. What has come before, or is as old as
something that an earlier request has brought, is refused as a replay.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from fedapp.crypto.sealed import Address, public_key, seal, unseal
from fedapp.data.names import NAME, NAME_RULE
from fedapp.errors import ProtocolError, blaming
from fedapp.messages.fields import Array, Letter
from fedapp.messages.parcels import Parcel
from fedapp.site.config import SiteConfig
from fedapp.site.store import Store
from fedapp.site.trust import check_trusted, identity
from fedapp.wire.content import Content, put_together, take_apart
from fedapp.wire.layout import from_bytes, to_bytes

L = TypeVar("L", bound=Letter)
Letters = list[tuple[str, Letter]]  # receiver and content of each
STEP_BYTES = 8


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
            if content.name == kind.__name__
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
    """The site's public key. uint8, shape (32,)."""
    return np.frombuffer(public_key(identity(name)), dtype=np.uint8)


def know(config: SiteConfig, store: Store, names: Sequence[str], keys: Array) -> None:
    """Keep who takes part, and their public keys.

    Raises
    ------
    ProtocolError : the site is not among them, a name comes twice or is none, they were sent
        before, or a key is not trusted.
    """
    own = config.name
    if own not in names or len(set(names)) < len(names):
        raise ProtocolError(own, "parcel", "names", "must differ, with the site's own")
    if not all(map(NAME.fullmatch, names)):
        raise ProtocolError(own, "parcel", "names", f"must be {NAME_RULE}")
    if "peers" in store.facts:
        raise ProtocolError(own, "parcel", "names", "must be sent once")
    found = {name: key.tobytes() for name, key in zip(names, keys, strict=True)}
    check_trusted(config, found)
    store.facts["peers"] = {name: key.hex() for name, key in found.items()}
    store.facts["heard"] = {}


def open_mail(name: str, store: Store, parcels: Iterable[Parcel]) -> Mail:
    """Open what has come with a request.

    Raises
    ------
    ProtocolError : a parcel is from nobody who takes part, was changed, or was sent before.
    """
    before: dict[str, int] = store.facts["heard"]
    heard, seen, letters = dict(before), set(), []
    for sender, parcel in parcels:
        step, content = _open(name, store, sender, parcel)
        if step <= before.get(sender, 0) or parcel in seen:
            raise ProtocolError(sender, "parcel", "step", "must be a new one, got one seen before")
        heard[sender] = step
        seen.add(parcel)
        letters.append((sender, from_bytes(content, sender)))
    store.facts["heard"] = heard
    return Mail(name, letters)


def _open(name: str, store: Store, sender: str, parcel: bytes) -> tuple[int, bytes]:
    """Step and content of a parcel."""
    peers: Mapping[str, str] = store.facts["peers"]
    if sender not in peers or sender == name:
        raise ProtocolError(sender, "parcel", "sender", "must be another party of the run")
    step = int.from_bytes(parcel[:STEP_BYTES], "little")
    address = Address(store.folder.name, sender, name, step)
    private, public = identity(name), bytes.fromhex(peers[sender])
    with blaming(sender, "parcel", "content"):
        return step, unseal(private, public, address, parcel[STEP_BYTES:])


def write_letters(name: str, letters: Letters) -> list[Parcel]:
    """Letters as bytes, not sealed yet, each with its receiver.

    Raises
    ------
    ProtocolError : a field of a letter breaks its form.
    """
    return [(receiver, to_bytes(take_apart(letter, name))) for receiver, letter in letters]


def seal_mail(name: str, store: Store, letters: Iterable[Parcel]) -> list[Parcel]:
    """Seal what ``write_letters`` wrote, under the step that is being answered."""
    step, private = store.step + 1, identity(name)
    parcels = []
    for receiver, content in letters:
        address = Address(store.folder.name, name, receiver, step)
        public = bytes.fromhex(store.facts["peers"][receiver])
        sealed = seal(private, public, address, content)
        parcels.append((receiver, step.to_bytes(STEP_BYTES, "little") + sealed))
    return parcels
