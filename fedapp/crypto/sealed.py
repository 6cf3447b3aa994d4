"""Parcels that only their receiver can open, for the way through a relay no one trusts.

Two parties agree on a secret for one run from two key pairs each: the long-lived one, by which
people know each other, and one drawn for the run. It follows from all four Diffie-Hellman products,
as in Noise KK, and from what each was told of the run: so each side knows that the other wrote a
parcel and was told the same, and once one of them has deleted its key of the run, nobody opens its
parcels, whoever steals the long-lived keys. The relay sees who sends to whom, when, and how many
bytes; it can drop a parcel and deliver it again.

No nonce comes twice, even where a party goes back to an older state of its disk or of its whole
machine. A key serves the parcels of one run and address. Its nonces
are keyed hashes of fresh randomness and the content: where the randomness came again, the same
nonce would mean the same content, and so the same parcel.

Source: Noise Protocol Framework, revision 34, pattern KK; X25519 of RFC 7748, HKDF of RFC 5869,
ChaCha20-Poly1305 of RFC 8439, BLAKE2b of RFC 7693.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import astuple, dataclass, field

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand

LABEL = b"fedapp parcel v2"
KEY_BYTES = 32
NONCE_BYTES = 12  # RFC 8439, Section 2.8
# What cryptography takes in one call.
LARGEST_CONTENT = 2**31 - 1 - 16
LARGEST_STEP, LARGEST_ATTEMPT = 2**32 - 1, 2**16 - 1


@dataclass(frozen=True, slots=True)
class Keys:
    """The two keys of a party, both private or both public; 32 bytes each.

    Parameters
    ----------
    own : the long-lived one.
    run : the one drawn for the run.
    """

    own: bytes = field(repr=False)
    run: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Address:
    """What a parcel is bound to, within a run.

    Parameters
    ----------
    sender, receiver : names of parties.
    step : the exchange the parcel was sent in, 0 to 2^32 - 1.
    attempt : start of the server that it was sent in, 0 to 2^16 - 1.
    since : the step that this start went back to.
    last : whether the sender has ended the run with it.

    Raises
    ------
    ValueError : step or attempt is out of range.
    """

    sender: str
    receiver: str
    step: int
    attempt: int = 0
    since: int = 0
    last: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.step <= LARGEST_STEP:
            raise ValueError(f"step must be 0 to {LARGEST_STEP}, got {self.step}")
        if not 0 <= self.attempt <= LARGEST_ATTEMPT:
            raise ValueError(f"attempt must be 0 to {LARGEST_ATTEMPT}, got {self.attempt}")


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


def agree(private: Keys, peer: Keys, opening: bytes) -> bytes:
    """The secret of two parties for one run: 32 bytes, the same at both.

    Parameters
    ----------
    private : the party's own keys.
    peer : the public keys of the other.
    opening : what the party was told of the run.

    Raises
    ------
    ValueError : a key has another length, or a public one is of low order.
    """
    both = _product(private.run, peer.run)
    mine, theirs = _product(private.own, peer.run), _product(private.run, peer.own)
    # The same order at both.
    crossed = mine + theirs if public_key(private.own) < peer.own else theirs + mine
    products = both + crossed + _product(private.own, peer.own)
    salt = hashlib.sha256(opening).digest()
    return HKDF(SHA256(), KEY_BYTES, salt, LABEL).derive(products)


def seal(secret: bytes, address: Address, content: bytes) -> bytes:
    """Content that only ``address.receiver`` can open.

    Parameters
    ----------
    secret : of sender and receiver, from ``agree``.
    address : bound to the parcel.
    content : 0 to 2^31 - 17 bytes.

    Returns
    -------
    12 bytes nonce, ciphertext, 16 bytes tag: 28 bytes more than ``content``.

    Raises
    ------
    ValueError : the content is too long.
    """
    if len(content) > LARGEST_CONTENT:
        raise ValueError(f"content must be <= {LARGEST_CONTENT} bytes, got {len(content)}")
    key, fresh = _key(secret, address), secrets.token_bytes(hashlib.blake2b.SALT_SIZE)
    nonce = hashlib.blake2b(content, digest_size=NONCE_BYTES, key=key, salt=fresh).digest()
    return nonce + ChaCha20Poly1305(key).encrypt(nonce, content, None)


def unseal(secret: bytes, address: Address, parcel: bytes) -> bytes:
    """The content of a parcel, if its sender sealed it for this very address.

    Parameters
    ----------
    secret : of sender and receiver, from ``agree``.
    address : as the sender gave it.
    parcel : from ``seal``.

    Raises
    ------
    ValueError : something does not fit; what, is not told.
    """
    nonce, sealed = parcel[:NONCE_BYTES], memoryview(parcel)[NONCE_BYTES:]
    try:
        return ChaCha20Poly1305(_key(secret, address)).decrypt(nonce, sealed, None)
    except (InvalidTag, ValueError, OverflowError):
        rule = f"be sealed for this address by its sender, got {len(parcel)} bytes that are not"
        raise ValueError(f"parcel must {rule}") from None


def _own_key(private: bytes) -> X25519PrivateKey:
    if len(private) != KEY_BYTES:
        raise ValueError(f"private must be {KEY_BYTES} bytes, got {len(private)}")
    return X25519PrivateKey.from_private_bytes(private)


def _product(private: bytes, public: bytes) -> bytes:
    """Of Diffie and Hellman."""
    own = _own_key(private)
    if len(public) != KEY_BYTES:
        raise ValueError(f"public must be {KEY_BYTES} bytes, got {len(public)}")
    try:
        return own.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        # RFC 7748, Section 6.1: the shared secret is all zero.
        raise ValueError("public must be of full order, got one of low order") from None


def _key(secret: bytes, address: Address) -> bytes:
    """The key of the parcels of one address."""
    info = prefixed(LABEL, *(str(part).encode() for part in astuple(address)))
    return HKDFExpand(SHA256(), KEY_BYTES, info).derive(secret)


def prefixed(*parts: bytes) -> bytes:
    """Byte strings joined so that no other list of them gives the same."""
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)
