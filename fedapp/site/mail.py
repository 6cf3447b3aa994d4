"""Letters between parties, sealed so that the server, which carries them, cannot read them.

A parcel is 8 bytes of the step it was sent in, and the letter under the sender's and receiver's
keys of this run, bound to both names, the model and the step. A request never brings what is as old
as what an earlier request has brought: such parcels are refused as replays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from fedapp.crypto.sealed import Address, new_private_key, public_key, seal, unseal
from fedapp.errors import ProtocolError
from fedapp.messages.fields import Array, Letter
from fedapp.messages.parcels import Parcels, pack_parcels, unpack_parcels
from fedapp.site.answer import Site
from fedapp.site.store import Store
from fedapp.wire.codec import Content, put_together, take_apart
from fedapp.wire.parcel import from_bytes, to_bytes

L = TypeVar("L", bound=Letter)
STEP_BYTES = 8
BOX_KEY = "mail.key"


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


def box_key(store: Store) -> Array:
    """The site's public key of this run; drawn when it is first asked for. uint8, shape (32,)."""
    if BOX_KEY not in store:
        store[BOX_KEY] = np.frombuffer(new_private_key(), dtype=np.uint8)
    return np.frombuffer(public_key(store[BOX_KEY].tobytes()), dtype=np.uint8)


def know(store: Store, names: Sequence[str], keys: Array) -> None:
    """Keep who takes part, and their public keys."""
    store.facts["peers"] = {
        name: key.tobytes().hex() for name, key in zip(names, keys, strict=True)
    }
    store.facts["heard"] = {}


def read_mail(site: Site, request: Parcels) -> Mail:
    """Open all parcels of a request.

    Raises
    ------
    ProtocolError : a parcel is from nobody who takes part, was changed, or was sent before.
    """
    store, letters = site.store, []
    try:
        parcels = unpack_parcels(request)
    except ValueError as error:
        raise ProtocolError(site.name, type(request).__name__, "parcels", str(error)) from error
    before: dict[str, int] = store.facts["heard"]
    heard = dict(before)
    for sender, parcel in parcels:
        step, content = _open(site, sender, parcel)
        if step <= before.get(sender, 0):
            raise ProtocolError(sender, "parcel", "step", "must be a new one, got one seen before")
        heard[sender] = step
        letters.append((sender, from_bytes(content, sender)))
    store.facts["heard"] = heard
    return Mail(site.name, letters)


def _open(site: Site, sender: str, parcel: bytes) -> tuple[int, bytes]:
    """Step and content of a parcel."""
    peers: Mapping[str, str] = site.store.facts["peers"]
    if sender not in peers or sender == site.name:
        raise ProtocolError(sender, "parcel", "sender", "must be another party of the run")
    step = int.from_bytes(parcel[:STEP_BYTES], "little")
    address = Address(site.store.folder.name, sender, site.name, step)
    private, public = site.store[BOX_KEY].tobytes(), bytes.fromhex(peers[sender])
    try:
        return step, unseal(private, public, address, parcel[STEP_BYTES:])
    except ValueError as error:
        raise ProtocolError(sender, "parcel", "content", str(error)) from error


def write_mail(site: Site, letters: Iterable[tuple[str, Letter]]) -> dict[str, Any]:
    """The fields of ``Parcels`` that hold letters, each with its receiver."""
    return pack_parcels((receiver, _close(site, receiver, letter)) for receiver, letter in letters)


def _close(site: Site, receiver: str, letter: Letter) -> bytes:
    store = site.store
    step = store.step + 1  # the one that is being answered
    address = Address(store.folder.name, site.name, receiver, step)
    private = store[BOX_KEY].tobytes()
    public = bytes.fromhex(store.facts["peers"][receiver])
    content = to_bytes(take_apart(letter, site.name))
    return step.to_bytes(STEP_BYTES, "little") + seal(private, public, address, content)


def forget_all_but_mail(store: Store) -> None:
    """Forget the rows and all that came of them; a server started anew can still be answered."""
    key = store[BOX_KEY]
    store.forget()
    store[BOX_KEY] = key
