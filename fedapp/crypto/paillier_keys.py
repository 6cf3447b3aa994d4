"""Paillier's keys: drawn here, and checked if they come from outside."""

from __future__ import annotations

import functools
import secrets
from dataclasses import dataclass

import gmpy2
from gmpy2 import mpz

from fedapp.crypto.rings import Bytes, from_bytes_array, to_bytes_array

SMALLEST_BITS = 2048
SMALLEST_INSECURE_BITS = 128  # fewer cannot hold one pair of gradient and hessian
# GMP makes 24 of them a Baillie-PSW test; the other 40 let a composite pass once in 2^80.
PRIME_ROUNDS = 64


# Keys


@dataclass(frozen=True, slots=True)
class PublicKey:
    """Encrypts, adds and re-randomises: the modulus n."""

    n: mpz

    def __repr__(self) -> str:
        return f"PublicKey(bits={self.bits})"

    @property
    def bits(self) -> int:
        """Bits of n."""
        return int(self.n.bit_length())

    @property
    def n_squared(self) -> mpz:
        """Modulus of the ciphertexts."""
        return self.n * self.n

    @property
    def ciphertext_bytes(self) -> int:
        """Bytes of a ciphertext as it is sent."""
        return (2 * self.bits + 7) // 8

    def to_array(self) -> Bytes:
        """The modulus, big endian; uint8, shape (bytes of n,)."""
        return to_bytes_array([self.n], (self.bits + 7) // 8).ravel()

    @staticmethod
    def from_array(modulus: Bytes) -> PublicKey:
        """Inverse of ``to_array``; does not check the modulus (see ``read_public_key``)."""
        return PublicKey(from_bytes_array(modulus[None])[0])


@dataclass(frozen=True, slots=True)
class PrivateKey:
    """Decrypts: the primes p and q of n = p q.

    ``full_masks`` selects the masks that its owner encrypts with, see the module.
    """

    p: mpz
    q: mpz
    full_masks: bool = False

    def __repr__(self) -> str:
        return f"PrivateKey(bits={self.public.bits})"

    @property
    def public(self) -> PublicKey:
        return PublicKey(self.p * self.q)

    def to_array(self) -> Bytes:
        """p, q and ``full_masks``, big endian, to store on the owner's disk; uint8, shape (3,
        n_bytes).
        """
        n_bytes = (max(self.p.bit_length(), self.q.bit_length()) + 7) // 8
        return to_bytes_array((self.p, self.q, mpz(self.full_masks)), n_bytes)

    @staticmethod
    def from_array(numbers: Bytes) -> PrivateKey:
        """Inverse of ``to_array``."""
        p, q, full_masks = from_bytes_array(numbers)
        return PrivateKey(p, q, bool(full_masks))


def generate_key(
    bits: int, *, insecure_small_key: bool = False, full_masks: bool = False
) -> PrivateKey:
    """Draw a key from the operating system's randomness.

    Both primes have ``bits / 2`` bits and their two highest bits set, so n has ``bits`` bits and is
    coprime to (p - 1)(q - 1).

    Parameters
    ----------
    bits : even, >= 2048 unless ``insecure_small_key``: bits of n.
    insecure_small_key : for tests.
    full_masks : whether the owner's masks are uniform, at three times the cost.
    """
    _check_bits(bits, insecure_small_key)
    if bits % 2:
        raise ValueError(f"key-bits must be even, got {bits}")
    p = q = _random_prime(bits // 2)
    # Close primes could be found by Fermat's method; FIPS 186-5, A.1.3, asks for this distance.
    while abs(p - q).bit_length() < bits // 2 - 100 or p == q:
        q = _random_prime(bits // 2)
    return PrivateKey(p, q, full_masks)


def read_public_key(modulus: Bytes, bits: int, *, insecure_small_key: bool = False) -> PublicKey:
    """Check a key from outside: refuse what is visibly not a product of two primes.

    ``modulus`` is uint8, shape (bytes of n,), big endian. Raises a ValueError if n does not have
    ``bits`` bits, or is too small, a prime, a power, or a multiple of a prime below 2^16. A third
    large factor, or two close ones, cannot be detected without knowing the factors.
    """
    _check_bits(bits, insecure_small_key)
    # Checked before the number is read, as arithmetic on a longer one takes many times longer.
    if len(modulus) != (bits + 7) // 8:
        raise ValueError(f"n must be {bits} bits, got {len(modulus)} bytes")
    key = PublicKey.from_array(modulus)
    if key.bits != bits:
        raise ValueError(f"n must be {bits} bits, got {key.bits}")
    has_small_factor = gmpy2.gcd(key.n, _primorial()) != 1
    if has_small_factor or gmpy2.is_power(key.n) or gmpy2.is_prime(key.n):
        raise ValueError("n must be the product of two large primes, got another number")
    return key


@functools.cache
def _primorial() -> mpz:
    """The product of all primes below 2^16."""
    return gmpy2.primorial(2**16)


def _check_bits(bits: int, insecure_small_key: bool) -> None:
    smallest = SMALLEST_INSECURE_BITS if insecure_small_key else SMALLEST_BITS
    if bits < smallest:
        hint = "" if insecure_small_key else " unless insecure-small-key is set"
        raise ValueError(f"key-bits must be >= {smallest}{hint}, got {bits}")


def _random_prime(bits: int) -> mpz:
    """A uniform prime among those of ``bits`` bits whose two highest bits are set."""
    while True:
        candidate = mpz(secrets.randbits(bits)) | (mpz(3) << (bits - 2)) | 1
        if gmpy2.is_prime(candidate, PRIME_ROUNDS):
            return candidate
