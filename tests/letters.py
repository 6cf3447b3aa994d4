"""What parties of a vertical run wrote each other: the letters in the parcels that were carried."""

from dataclasses import dataclass

import numpy as np

from fedapp.crypto.psi import expander, points_of
from fedapp.crypto.sealed import unseal
from fedapp.messages.vertical import Parcels, unpack_parcels
from fedapp.messages.wire import Content, from_bytes
from fedapp.site.mail import HEAD, address_of
from tests.transcript import arrays_of, scalars_of


@dataclass(frozen=True)
class Opened:
    """A letter that was sent."""

    sender: str
    receiver: str
    content: Content
    raw: bytes

    @property
    def name(self):
        return self.content.name

    def __getitem__(self, field):
        return {**self.content.scalars, **self.content.arrays}[field]


def parcels_of(message):
    """Peer and content of each parcel of a message."""
    arrays, scalars = arrays_of(message), scalars_of(message)
    if "peers" not in scalars:
        return []
    peers = tuple(scalars["peers"])
    return unpack_parcels(Parcels(peers, arrays["parcel_ends"], arrays["parcels"]))


def letters_sent(app):
    """All letters in the order in which they were sent, each opened with its receiver's key."""
    hellos = [reply for _, reply in app.of_kind("hello")]
    nodes = {hello.metadata.src_node_id: str(scalars_of(hello)["name"]) for hello in hellos}
    found = []
    for _, _, reply in app.heard:
        sender = nodes[reply.metadata.src_node_id]
        for receiver, parcel in parcels_of(reply):
            address = address_of(app.store(receiver), sender, receiver, parcel)
            raw = unseal(app.secret(receiver, sender), address, parcel[HEAD.size :])
            found.append(Opened(sender, receiver, from_bytes(raw, sender), raw))
    return found


def ciphertexts(letters, name):
    """All ciphertexts in letters of a class, as bytes."""
    return [row.tobytes() for one in letters if one.name == name for row in one["ciphertexts"]]


def raw_of(message):
    """All that a message carries, as the server sees it."""
    records = message.content
    data = [array.data for record in records.array_records.values() for array in record.values()]
    values = [value for record in records.config_records.values() for value in record.values()]
    data += [value for value in values if isinstance(value, bytes)]
    texts = [repr(value) for value in values if not isinstance(value, bytes)]
    return b"".join(data) + "".join([*texts, repr(scalars_of(message))]).encode()


def written(values, n_run):
    """Runs of so many neighbouring values that vary, as whoever leaks them may write them."""
    found = set()
    for dtype in ("<f4", "<f8", ">f4", ">f8", "<i4", "<i8", "u1"):
        cast = np.asarray(values).astype(dtype)
        if "f" in dtype or np.array_equal(cast, values):
            runs = np.lib.stride_tricks.sliding_window_view(cast, n_run)
            varied = (np.diff(runs, axis=1) != 0).sum(axis=1) >= max(1, n_run // 4)
            found |= {run.tobytes() for run in runs[varied]}
    return found


def texts_of(values):
    """Numbers as text, where they have digits enough to be told from others."""
    texts = {text for value in values for text in (repr(float(value)), str(np.float32(value)))}
    return {text.encode() for text in texts if len(text) >= 6}


def hash_messages(messages, dst):
    """Byte strings as points: hash_to_group of RFC 9380, Appendix B."""
    uniform = b"".join(map(expander(dst, 64), messages))
    return points_of(np.frombuffer(uniform, np.uint8).reshape(-1, 64))
