"""Sealed parcels: only the receiver can open them, whatever relay they pass.

Two parties derive a secret for one run from two key pairs each: a long-lived one, which people
verify, and one drawn for the run. It depends on all four Diffie-Hellman products, as in Noise KK,
and on the run's opening as each side received it. So each side knows that the other wrote a parcel
and received the same opening. Once one of them has deleted its key of the run, nobody can open its
parcels, even with the long-lived keys. The relay sees sender, receiver, time and size; it can drop
a parcel or deliver it again.

No nonce repeats, even where a party's disk or whole machine is reset to an older state. A key is
used for the parcels of one run and address. Nonces are keyed hashes of fresh randomness and the
content: if the randomness repeated, the same nonce would imply the same content, and so the same
parcel.

Source: Noise Protocol Framework, revision 34, pattern KK; X25519 of RFC 7748, HKDF of RFC 5869,
ChaCha20-Poly1305 of RFC 8439, BLAKE2b of RFC 7693.
"""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import astuple, dataclass, field

import numpy as np
import numpy.typing as npt
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF, HKDFExpand

from fedapp.arrays import Ints

LABEL = b"fedapp parcel v2"
KEY_BYTES = 32
NONCE_BYTES = 12  # RFC 8439, Section 2.8
LARGEST_CONTENT = 2**31 - 1 - 16  # limit of one call of the cryptography package
LARGEST_STEP, LARGEST_ATTEMPT = 2**32 - 1, 2**16 - 1
STREAM_NONCE_BYTES, WORD_BYTES = 16, 8

Words = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Keys:
    """A party's long-lived key (``static``) and key of the run; both private or both public."""

    static: bytes = field(repr=False)
    run: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Address:
    """What a parcel is bound to, within a run.

    Parameters
    ----------
    step : the exchange in which it is sent, 0 to 2^32 - 1.
    attempt : start of the server, 0 to 2^16 - 1.
    since : the step from which this start resumed.
    last : whether the sender ends the run with it.
    """

    sender: str
    receiver: str
    step: int
    attempt: int = 0
    since: int = 0
    last: bool = False


def new_private_key() -> bytes:
    """A private key from the operating system's randomness: 32 bytes."""
    return X25519PrivateKey.generate().private_bytes_raw()


def public_key(private: bytes) -> bytes:
    """The public key of a 32-byte private key."""
    return _private_key(private).public_key().public_bytes_raw()


def fingerprint_of(public: bytes) -> str:
    """A public key for people to compare: 128 bits of its SHA-256, as 8 groups of 4 hex digits."""
    if len(public) != KEY_BYTES:
        raise ValueError(f"public must be {KEY_BYTES} bytes, got {len(public)}")
    digits = hashlib.sha256(public).hexdigest()[:32]
    return " ".join(digits[start : start + 4] for start in range(0, 32, 4))


def agree(private: Keys, peer: Keys, opening: bytes) -> bytes:
    """The secret of two parties for one run: 32 bytes, the same at both.

    ``private`` are the party's keys, ``peer`` the other's public keys, and ``opening`` the run's
    opening as the party received it. Raises a ValueError if a key has another length, or a public
    one is of low order.
    """
    both = _product(private.run, peer.run)
    mine, theirs = _product(private.static, peer.run), _product(private.run, peer.static)
    # Both sides must use the same order: the smaller long-lived key's product first.
    crossed = mine + theirs if public_key(private.static) < peer.static else theirs + mine
    products = both + crossed + _product(private.static, peer.static)
    salt = hashlib.sha256(opening).digest()
    return HKDF(SHA256(), KEY_BYTES, salt, LABEL).derive(products)


def seal(secret: bytes, address: Address, content: bytes) -> bytes:
    """Encrypt content, 0 to 2^31 - 17 bytes, for ``address.receiver`` only.

    Returns 12 bytes nonce, ciphertext, 16 bytes tag: 28 bytes more than ``content``. Raises a
    ValueError if the content is too long.
    """
    if len(content) > LARGEST_CONTENT:
        raise ValueError(f"content must be <= {LARGEST_CONTENT} bytes, got {len(content)}")
    key = _key(secret, address)
    fresh = secrets.token_bytes(hashlib.blake2b.SALT_SIZE)
    nonce = hashlib.blake2b(content, digest_size=NONCE_BYTES, key=key, salt=fresh).digest()
    return nonce + ChaCha20Poly1305(key).encrypt(nonce, content, None)


def unseal(secret: bytes, address: Address, parcel: bytes) -> bytes:
    """The content of a parcel that its sender sealed for this very address, else a ValueError."""
    nonce = parcel[:NONCE_BYTES]
    sealed = memoryview(parcel)[NONCE_BYTES:]
    try:
        return ChaCha20Poly1305(_key(secret, address)).decrypt(nonce, sealed, None)
    except (InvalidTag, ValueError, OverflowError):
        rule = f"be sealed for this address by its sender, got {len(parcel)} bytes that are not"
        raise ValueError(f"parcel must {rule}") from None


def _private_key(private: bytes) -> X25519PrivateKey:
    if len(private) != KEY_BYTES:
        raise ValueError(f"private must be {KEY_BYTES} bytes, got {len(private)}")
    return X25519PrivateKey.from_private_bytes(private)


def _product(private: bytes, public: bytes) -> bytes:
    """Diffie-Hellman."""
    key = _private_key(private)
    if len(public) != KEY_BYTES:
        raise ValueError(f"public must be {KEY_BYTES} bytes, got {len(public)}")
    try:
        return key.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        # RFC 7748, Section 6.1: the shared secret is all zero.
        raise ValueError("public must be of full order, got one of low order") from None


def _key(secret: bytes, address: Address) -> bytes:
    """The key of the parcels of one address."""
    info = prefixed(LABEL, *(str(part).encode() for part in astuple(address)))
    return HKDFExpand(SHA256(), KEY_BYTES, info).derive(secret)


def prefixed(*parts: bytes) -> bytes:
    """Join byte strings so that no other list of them gives the same result."""
    return b"".join(len(part).to_bytes(8, "little") + part for part in parts)


def derived_key(key: bytes, *parts: bytes) -> bytes:
    """The 32-byte key that belongs to a list of byte strings; other lists have other keys."""
    return hashlib.blake2b(prefixed(*parts), digest_size=KEY_BYTES, key=key).digest()


class Stream:
    """Pseudorandom 64-bit words of a 32-byte key and labels; other labels give other words.

    A key without a label must be used for one stream only.
    """

    def __init__(self, key: bytes, *labels: bytes) -> None:
        key = derived_key(key, *labels) if labels else key
        self._cipher = Cipher(ChaCha20(key, bytes(STREAM_NONCE_BYTES)), mode=None).encryptor()

    def words(self, n_words: int) -> Words:
        """The next words, shape (n_words,)."""
        return np.frombuffer(self._cipher.update(bytes(n_words * WORD_BYTES)), dtype="<u8")

    def below(self, bound: int, n_numbers: int) -> Ints:
        """Uniform integers from 0 to ``bound`` - 1 < 2^62."""
        numbers = np.empty(0, dtype=np.int64)
        mask = np.uint64((1 << (bound - 1).bit_length()) - 1)
        while len(numbers) < n_numbers:
            candidates = (self.words(n_numbers - len(numbers)) & mask).astype(np.int64)
            numbers = np.concatenate((numbers, candidates[candidates < bound]))
        return numbers
