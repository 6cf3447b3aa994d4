"""Parcels that only their receiver can open, for the way through a relay no one trusts.

The key of a direction comes from the long-lived keys of both sides, so each side knows the other
wrote a parcel if the public keys are the right ones: people compare their fingerprints. The relay
sees who sends to whom, when, and how many bytes; it can drop a parcel and deliver it again, and the
receiver tells a copy by its step. Who steals a private key opens all parcels to and from its owner,
past ones as well.

Source: X25519 of RFC 7748, HKDF of RFC 5869, ChaCha20-Poly1305 of RFC 8439.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

LABEL = b"fedapp parcel v1"
KEY_BYTES = 32
# RFC 8439, Section 2.8. Random ones repeat once in 2^32 for 2^32 parcels of one direction.
NONCE_BYTES = 12
# What cryptography takes in one call.
LARGEST_CONTENT = 2**31 - 1 - 16
LARGEST_STEP = 2**64 - 1


@dataclass(frozen=True, slots=True)
class Address:
    """What a parcel is bound to.

    Parameters
    ----------
    model_id : names the model at every site.
    sender, receiver : names of parties.
    step : the exchange the parcel was sent in, 0 to 2^64 - 1.

    Raises
    ------
    ValueError : step is out of range.
    """

    model_id: str
    sender: str
    receiver: str
    step: int

    def __post_init__(self) -> None:
        if not 0 <= self.step <= LARGEST_STEP:
            raise ValueError(f"step must be 0 to {LARGEST_STEP}, got {self.step}")


def new_private_key() -> bytes:
    """A private key from the operating system's randomness: 32 bytes."""
    return X25519PrivateKey.generate().private_bytes_raw()


def public_key(private: bytes) -> bytes:
    """The public key of a private one: 32 bytes.

    Raises
    ------
    ValueError : private has another length.
    """
    return _own_key(private).public_key().public_bytes_raw()


def fingerprint_of(public: bytes) -> str:
    """A public key as people compare it: 128 bits of its SHA-256, as 8 groups of 4 hex digits.

    Raises
    ------
    ValueError : public has another length.
    """
    if len(public) != KEY_BYTES:
        raise ValueError(f"public must be {KEY_BYTES} bytes, got {len(public)}")
    digits = hashlib.sha256(public).hexdigest()[:32]
    return " ".join(digits[start : start + 4] for start in range(0, 32, 4))


def seal(private: bytes, peer_public: bytes, address: Address, content: bytes) -> bytes:
    """Content that only ``address.receiver`` can open.

    Parameters
    ----------
    private : 32 bytes, the sender's own key.
    peer_public : 32 bytes, the receiver's.
    address : bound to the parcel.
    content : 0 to 2^31 - 17 bytes.

    Returns
    -------
    12 bytes nonce, ciphertext, 16 bytes tag: 28 bytes more than ``content``.

    Raises
    ------
    ValueError : a key has another length, ``peer_public`` is of low order, or the content is too
    long.
    """
    if len(content) > LARGEST_CONTENT:
        raise ValueError(f"content must be <= {LARGEST_CONTENT} bytes, got {len(content)}")
    shared, own_public = _agree(private, peer_public)
    cipher = _cipher(shared, address, own_public, peer_public)
    nonce = secrets.token_bytes(NONCE_BYTES)
    return nonce + cipher.encrypt(nonce, content, _bound(address))


def unseal(private: bytes, peer_public: bytes, address: Address, parcel: bytes) -> bytes:
    """The content of a parcel, if its sender sealed it for this very address.

    Parameters
    ----------
    private : 32 bytes, the receiver's own key.
    peer_public : 32 bytes, the sender's.
    address : as the sender gave it.
    parcel : from ``seal``.

    Raises
    ------
    ValueError : ``private`` has another length, or anything else does not fit; what, is not told.
    """
    _own_key(private)
    try:
        shared, own_public = _agree(private, peer_public)
        cipher = _cipher(shared, address, peer_public, own_public)
        nonce, sealed = parcel[:NONCE_BYTES], memoryview(parcel)[NONCE_BYTES:]
        return cipher.decrypt(nonce, sealed, _bound(address))
    except (InvalidTag, ValueError, OverflowError):
        rule = f"be sealed for this address by its sender, got {len(parcel)} bytes that are not"
        raise ValueError(f"parcel must {rule}") from None


def _own_key(private: bytes) -> X25519PrivateKey:
    if len(private) != KEY_BYTES:
        raise ValueError(f"private must be {KEY_BYTES} bytes, got {len(private)}")
    return X25519PrivateKey.from_private_bytes(private)


def _agree(private: bytes, peer_public: bytes) -> tuple[bytes, bytes]:
    """The shared secret and one's own public key."""
    own = _own_key(private)
    if len(peer_public) != KEY_BYTES:
        raise ValueError(f"peer_public must be {KEY_BYTES} bytes, got {len(peer_public)}")
    peer = X25519PublicKey.from_public_bytes(peer_public)
    try:
        shared = own.exchange(peer)
    except ValueError:
        # RFC 7748, Section 6.1: the shared secret is all zero.
        raise ValueError("peer_public must be of full order, got one of low order") from None
    return shared, own.public_key().public_bytes_raw()


def _cipher(
    shared: bytes, address: Address, sender_public: bytes, receiver_public: bytes
) -> ChaCha20Poly1305:
    """The cipher of one model and direction."""
    names = (address.sender.encode(), address.receiver.encode())
    info = LABEL + _prefixed(*names, sender_public, receiver_public)
    derive = HKDF(SHA256(), KEY_BYTES, salt=address.model_id.encode(), info=info).derive
    return ChaCha20Poly1305(derive(shared))


def _bound(address: Address) -> bytes:
    """The associated data. The model is in it too: salts "a" and "a\\0" are one to HMAC."""
    names = (address.model_id, address.sender, address.receiver)
    return address.step.to_bytes(8, "little") + _prefixed(*(name.encode() for name in names))


def _prefixed(*parts: bytes) -> bytes:
    """Byte strings joined so that no other list of them gives the same."""
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)
