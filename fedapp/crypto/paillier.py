"""Paillier's cryptosystem with g = n + 1, on raw integers; ciphertexts are those of phe.

A plaintext m becomes (1 + m n) r^n mod n^2. What hides it is the mask r^n, an n-th residue.

**With the public key** masks must also hide from the key's owner, who can divide a result by the
masks of the rows it sent and so test which rows were added. So they are statistically close to
uniform, whatever one knows. The first masks of a process are r^n for a fresh uniform unit r mod n
each. Once there are M of them, ``BASE_BYTES * 8 * M >= b + 128`` for n of b bits, a mask is

    u_1^e_1 * ... * u_M^e_M mod n^2,    e_j uniform in [0, 2^24), fresh for each mask,

of these first masks u_j, a ninth of the work. By the leftover hash lemma it is, even to an
adversary who knows all u_j, within 1/2 sqrt(|G| C - 1) of uniform in the group G of n-th residues,
where C is the chance that two such products of the same random bases agree. With g the common
divisor of all differences of exponents, they agree with chance |{x in G: x^g = 1}| / |G| <= g^2 /
|G|, as G is a product of two cyclic groups; g divides M differences with chance below (1/g +
2^-24)^M; and all differences are 0 with chance 2^(-24 M). So

    |G| C - 1 < sum over g >= 2 of g^2 (1/g + 2^-24)^M + |G| 2^(-24 M) < 5 * 2^-M + 2^-128,

and at 2048 bits (M = 91) a mask is within 2^-45 of uniform and of independence from all others.
Powers of a single base would not do: G is not cyclic, so the owner would see each result's coset of
the group that the base generates, which is that of the product of the masks of the rows.

**With the private key** a mask is a power h^r of one base, computed mod p^2 and mod q^2. Readers of
these ciphertexts know neither p nor q. The plaintexts are hidden

- with full masks by Paillier's assumption only: n-th residues mod n^2 cannot be distinguished from
  units. The exponents mod p^2 and mod q^2 are independent and longer than p and q. The n-th
  residues mod p^2 are a cyclic group of order p - 1, so the mask is a uniform n-th residue, up to
  2^-63, where both bases generate theirs. A base is drawn until no prime below 2^16 divides the
  index of the group that it generates; the chance that a larger prime does is below 2^-18 over the
  draws of key and base;
- otherwise by that assumption and one more: h^r for a uniform r of ``short_bits`` bits cannot be
  distinguished from h^r for a uniform r, where the order of h is unknown. The exponents of RFC 7919
  and Damgard, Jurik and Nielsen's Paillier assume it too; the best attack known, Pollard's
  kangaroos, takes 2^(short_bits / 2) products. Here h is the square of a full base, so that no
  Jacobi symbol shows the lowest bit of r.

Ciphertexts re-randomised for the owner always get public-key masks.

Source: Paillier, Public-key cryptosystems based on composite degree residuosity classes, 1999,
scheme 1 and section 7 (Chinese remainders); Impagliazzo, Levin and Luby 1989 (the lemma); Gennaro
2000 (short exponents); Damgard, Jurik and Nielsen 2010; Brickell, Gordon, McCurley and Wilson, Fast
exponentiation with precomputation, 1992 (fixed bases).
"""

from __future__ import annotations

import functools
import itertools
import math
import secrets
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import gmpy2
import numpy as np
from gmpy2 import mpz, powmod

from fedapp.crypto.lanes import has_lanes, ring_of, run_shared
from fedapp.crypto.paillier_keys import PrivateKey, PublicKey
from fedapp.crypto.rings import (
    N_LANES,
    Bytes,
    Residues,
    Ring,
    from_bytes_array,
    products_by_place,
    to_bytes_array,
)
from fedapp.crypto.workers import Workers
from fedapp.errors import check_package

if TYPE_CHECKING:
    from phe.paillier import EncryptedNumber, PaillierPrivateKey

# Several calls a process, so that none waits long for the last; the rows of a call fit in memory.
CALLS_PER_WORKER, MOST_ROWS = 4, 4096
# Of several threads that need new masks, only one computes their tables.
_LOCK = threading.Lock()
BASE_BYTES = 3  # of an exponent e_j
# All exponents together are longer than the group's order by this many bits.
SLACK_BITS, OWNER_SLACK_BITS = 128, 64
# Bits of short exponents for n up to 2048 bits, and more for each 1024 beyond.
SHORT_BITS, MORE_SHORT_BITS = 256, 64
SMALL_PRIME_BOUND = 1 << 16  # trying all primes below takes milliseconds
# At 2048 bits a table of powers mod n^2 takes 140 kB; digits of 12 bits would save a third of the
# products for eleven times the memory.
DIGIT_BITS = 8


def encrypt(key: PublicKey | PrivateKey, plaintexts: Sequence[int], workers: Workers) -> Bytes:
    """Encrypt integers to uint8 rows, shape (n, ciphertext_bytes), big endian.

    Parameters
    ----------
    key : the private key where the caller owns it: many times faster.
    plaintexts : -n / 2 < m < n / 2 for the modulus n; a negative m is encrypted as m + n.

    Raises
    ------
    ValueError : a plaintext is out of range.
    """
    public = key.public if isinstance(key, PrivateKey) else key
    limit = int(public.n) // 2
    n_wrong = sum(not -limit <= plaintext <= limit for plaintext in plaintexts)
    if n_wrong:
        raise ValueError(f"plaintexts must be within n / 2, got {n_wrong} that are not")
    return join_ciphertexts(public, _in_parts(_encrypt, key, plaintexts, workers))


def rerandomise(key: PublicKey, ciphertexts: Bytes, workers: Workers) -> Bytes:
    """The same plaintexts under fresh masks, unlinkable to the checked ``ciphertexts``."""
    return join_ciphertexts(key, _in_parts(_rerandomise, key, ciphertexts, workers))


def decrypt(key: PrivateKey, ciphertexts: Bytes, workers: Workers) -> list[int]:
    """Plaintexts m, -n / 2 < m < n / 2, of checked ciphertexts."""
    chunks = _in_parts(_decrypt, key, ciphertexts, workers)
    return [plaintext for chunk in chunks for plaintext in chunk]


def check_ciphertexts(key: PublicKey, ciphertexts: Bytes) -> None:
    """Refuse what cannot be a ciphertext under this key; needed for all that comes from outside.

    Raises
    ------
    ValueError : not uint8 of shape (n, ciphertext_bytes), or a value is not a unit mod n^2.
    """
    width, shape = key.ciphertext_bytes, ciphertexts.shape
    if ciphertexts.dtype != np.uint8 or len(shape) != 2 or shape[1] != width:
        form = f"{ciphertexts.dtype} of shape {shape}"
        raise ValueError(f"ciphertexts must be uint8 of shape (n, {width}), got {form}")
    n2_ring, n_squared = ring_of(key.n_squared), key.n_squared
    # The product of all values mod n: it is a unit only if each value is.
    n_wrong, common = 0, mpz(1)
    for first in range(0, len(ciphertexts), MOST_ROWS):
        rows = np.asarray(ciphertexts[first : first + MOST_ROWS])
        n_wrong += sum(not 0 < value < n_squared for value in from_bytes_array(rows))
        if not n_wrong:
            together = np.zeros(len(rows), dtype=np.int64)
            _, products = products_by_place(n2_ring, n2_ring.read(rows), together)
            common = common * n2_ring.numbers(products)[0] % key.n
    if n_wrong:
        raise ValueError(f"ciphertexts must be > 0 and < n^2, got {n_wrong} that are not")
    if gmpy2.gcd(common, key.n) != 1:
        n_wrong = sum(gmpy2.gcd(value, key.n) != 1 for value in from_bytes_array(ciphertexts))
        raise ValueError(f"ciphertexts must be prime to n, got {n_wrong} that are not")


def share_out(n_rows: int, workers: Workers) -> list[tuple[int, int]]:
    """First and past-the-end row of each call: more calls than workers, and full lanes."""
    unit = N_LANES if has_lanes() else 1
    n_units = -(-n_rows // unit)
    n_calls = max(workers.n_workers * CALLS_PER_WORKER, -(-n_rows // MOST_ROWS))
    n_calls = min(n_units, n_calls)
    ends = [min(unit * (n_units * call // n_calls), n_rows) for call in range(1, n_calls + 1)]
    return list(itertools.pairwise([0, *ends]))


def _in_parts(function: Callable[..., Any], key: Any, rows: Any, workers: Workers) -> list[Any]:
    calls = [(key, rows[first:last]) for first, last in share_out(len(rows), workers)]
    return run_shared(workers, function, calls)


def join_ciphertexts(key: PublicKey, chunks: Iterable[Bytes]) -> Bytes:
    """The ciphertexts of all calls."""
    return np.concatenate([np.empty((0, key.ciphertext_bytes), np.uint8), *chunks])


def _encrypt(key: PublicKey | PrivateKey, plaintexts: Sequence[int]) -> Bytes:
    """Encrypt the plaintexts of one call: (1 + m n) r^n mod n^2."""
    public = key.public if isinstance(key, PrivateKey) else key
    n, n2_ring = public.n, ring_of(public.n_squared)
    bodies = n2_ring.take([1 + plaintext % n * n for plaintext in plaintexts])
    values = n2_ring.multiply(bodies, masks_of(key).draw(len(plaintexts)))
    return n2_ring.write(values, public.ciphertext_bytes)


def _rerandomise(key: PublicKey, ciphertexts: Bytes) -> Bytes:
    """Put the ciphertexts of one call under fresh masks."""
    n2_ring = ring_of(key.n_squared)
    values = n2_ring.multiply(n2_ring.read(ciphertexts), masks_of(key).draw(len(ciphertexts)))
    return n2_ring.write(values, key.ciphertext_bytes)


def _decrypt(key: PrivateKey, ciphertexts: Bytes) -> list[int]:
    """Decrypt the ciphertexts of one call by Chinese remainders."""
    p = key.p
    q = key.q
    n = key.p * key.q
    # (1 + n)^(p - 1) = 1 + (p - 1) n mod p^2, so Paillier's h_p is the inverse of -q mod p.
    scale_p = gmpy2.invert(-q, p)
    scale_q = gmpy2.invert(-p, q)
    inverse = gmpy2.invert(p, q)
    values, powers = from_bytes_array(ciphertexts), []
    for prime in (p, q):
        prime_ring = ring_of(prime**2)
        residues = prime_ring.take([value % prime**2 for value in values])
        powers.append(prime_ring.numbers(prime_ring.power(residues, prime - 1)))
    plaintexts = []
    for power_p, power_q in zip(*powers, strict=True):
        part_p, part_q = power_p // p * scale_p % p, power_q // q * scale_q % q
        plaintext = part_p + p * ((part_q - part_p) * inverse % q)
        plaintexts.append(int(plaintext if plaintext <= n // 2 else plaintext - n))
    return plaintexts


# Masks


class PublicMasks:
    """Masks under a public key: fresh ones first, then products of powers of those. Thread-safe."""

    def __init__(self, key: PublicKey) -> None:
        self.n_bases = -(-(key.bits + SLACK_BITS) // (8 * BASE_BYTES))
        self._key, self._ring = key, ring_of(key.n_squared)
        self._bases: list[mpz] = []
        self._tables: FixedBases | None = None
        self._lock = threading.Lock()

    def draw(self, n_masks: int) -> Residues:
        """Residues mod n^2, within 2^-45 of uniform and independent at 2048 bits."""
        with self._lock:
            fresh = self._fresh(min(n_masks, self.n_bases - len(self._bases)))
            self._bases += self._ring.numbers(fresh)
            if len(fresh) == n_masks:
                return fresh
            if self._tables is None:
                self._tables = fixed_bases(self._ring, self._bases, BASE_BYTES)
        digits = random_digits(n_masks - len(fresh), self._tables.n_tables)
        return np.concatenate([fresh, self._tables.powers(digits)])

    def _fresh(self, n_masks: int) -> Residues:
        """r^n mod n^2 for uniform units r."""
        n, units = self._key.n, list[mpz]()
        while len(units) < n_masks:
            unit = mpz(secrets.randbelow(int(n)))
            if gmpy2.gcd(unit, n) == 1:
                units.append(unit)
        return self._ring.power(self._ring.take(units), n)


class OwnerMasks:
    """Masks under a private key: powers of a base mod p^2 and mod q^2, joined mod n^2."""

    def __init__(self, key: PrivateKey) -> None:
        self._is_full = key.full_masks
        n_bits = max(key.p.bit_length(), key.q.bit_length()) + OWNER_SLACK_BITS
        if not key.full_masks:
            n_bits = min(n_bits, short_bits(key.public.bits))
        power = 1 if key.full_masks else 2
        n_bytes = -(-n_bits // 8)
        pairs = (key.p, key.q), (key.q, key.p)
        self._ring = ring_of(key.public.n_squared)
        self._rings = [ring_of(prime**2) for prime, _ in pairs]
        self.tables: list[FixedBases | SquareBase] = []
        for ring, (prime, other) in zip(self._rings, pairs, strict=True):
            base = powmod(_residue(prime, other), power, prime**2)
            self.tables.append(
                fixed_bases(ring, [base], n_bytes)
                if has_lanes()
                else square_base(base, prime, n_bytes)
            )
        # 1 modulo one prime's square and 0 modulo the other's.
        self._units = [
            self._ring.take([other**2 * gmpy2.invert(other**2, prime**2)]) for prime, other in pairs
        ]

    def draw(self, n_masks: int) -> Residues:
        """Fresh independent masks, residues mod n^2."""
        digits = random_digits(n_masks, self.tables[0].n_tables)
        others = random_digits(*digits.shape) if self._is_full else digits
        left, right = (
            self._ring.multiply(self._ring.lift(table.powers(exponents), prime_ring), unit)
            for table, exponents, prime_ring, unit in zip(
                self.tables, (digits, others), self._rings, self._units, strict=True
            )
        )
        return self._ring.add(left, right)


# Those of the last key of each kind are this process's until another key is used.
_public_masks = functools.lru_cache(maxsize=1)(PublicMasks)
_owner_masks = functools.lru_cache(maxsize=1)(OwnerMasks)


def masks_of(key: PublicKey | PrivateKey) -> PublicMasks | OwnerMasks:
    """This process's masks under a key, by the owner's way if it is private."""
    with _LOCK:
        return _owner_masks(key) if isinstance(key, PrivateKey) else _public_masks(key)


def short_bits(key_bits: int) -> int:
    """Bits of a short exponent for a modulus n of ``key_bits`` bits."""
    return SHORT_BITS + MORE_SHORT_BITS * max(0, math.ceil(key_bits / 1024) - 2)


def _residue(p: mpz, q: mpz) -> mpz:
    """An n-th residue mod p^2 that generates all of them, up to primes above 2^16."""
    primes = [prime for prime in _small_primes() if (p - 1) % prime == 0]
    while True:
        unit = mpz(1 + secrets.randbelow(int(p - 1)))
        # Without this, a p that is no prime could fail here; the self-test is to detect it.
        is_unit = gmpy2.gcd(unit, p) == 1
        if is_unit and all(powmod(unit, (p - 1) // prime, p) != 1 for prime in primes):
            return powmod(unit, p * q, p**2)


@functools.cache
def _small_primes() -> tuple[int, ...]:
    primes, prime = [], mpz(2)
    while prime < SMALL_PRIME_BOUND:
        primes.append(int(prime))
        prime = gmpy2.next_prime(prime)
    return tuple(primes)


# Powers of fixed bases: a table has all powers of a base for one byte of its exponent. A power is
# the product of one entry a byte and takes no squaring:
#
#     exponent    0xA1 0x74                 0x0C
#     table       1    0                    2
#     entry       base0^(0xA1 * 2^8)
#                      base0^0x74           base1^0x0C


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class FixedBases:
    """Tables of powers of some bases: (n_bases * n_bytes, 256) residues."""

    ring: Ring
    tables: Residues

    @property
    def n_tables(self) -> int:
        """Bytes of the exponents of all bases."""
        return len(self.tables)

    def powers(self, digits: Bytes) -> Residues:
        """n products of powers.

        ``digits``, uint8, shape (n, n_tables): bytes of the exponents, base after base, lowest
        first.
        """
        return self.ring.table_products(self.tables, digits)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class SquareBase:
    """Powers of one base modulo a prime's square by gmpy2, at little more than half the cost.

    A unit w mod p^2 is r (1 + p u) for its residue r = w mod p and one u mod p, and

        r (1 + p u) * r' (1 + p u') = r r' (1 + p (u + u')) mod p^2.

    So a power is a product of residues, which have half the digits of p^2, and a sum. ``tables``
    has the residues r and terms u of the powers, a table a byte of the exponent; an even number.
    """

    prime: mpz
    tables: tuple[tuple[list[mpz], list[mpz]], ...]

    def powers(self, digits: Bytes) -> Residues:
        """Powers mod p^2 as residues of ``Ring``; digits as for ``FixedBases``."""
        prime = self.prime
        modulus = self.prime**2
        columns = digits.T.tolist()
        products, totals = [mpz(1)] * len(digits), [mpz(0)] * len(digits)
        for column in range(0, len(columns), 2):
            (residues, terms), (others, more) = self.tables[column : column + 2]
            # A product of two residues is no longer than p^2: one reduction for two tables.
            rows = list(zip(*columns[column : column + 2], strict=True))
            products = [
                product * (residues[first] * others[second]) % modulus
                for product, (first, second) in zip(products, rows, strict=True)
            ]
            totals = [
                total + (terms[first] + more[second])
                for total, (first, second) in zip(totals, rows, strict=True)
            ]
        pairs = zip(products, totals, strict=True)
        powers = [product * (1 + prime * total) % modulus for product, total in pairs]
        return Ring(modulus).take(powers)

    @property
    def n_tables(self) -> int:
        """Bytes of an exponent."""
        return len(self.tables)


def square_base(base: mpz, prime: mpz, n_bytes: int) -> SquareBase:
    """Tables of the powers mod ``prime**2`` of a base that is coprime to ``prime``.

    The exponent has ``n_bytes``, rounded up to an even number.
    """
    tables = []
    for table in fixed_bases(Ring(prime**2), [base], n_bytes + n_bytes % 2).tables:
        inverses = [mpz(1)]
        inverse = gmpy2.invert(table[1], prime)
        while len(inverses) < len(table):
            inverses.append(inverses[-1] * inverse % prime)
        # w = r + p h: its term is u = h / r mod p.
        pairs = zip(table, inverses, strict=True)
        terms = [power // prime * inverse % prime for power, inverse in pairs]
        tables.append(([power % prime for power in table], terms))
    return SquareBase(prime, tuple(tables))


def fixed_bases(ring: Ring, bases: Sequence[mpz], n_bytes: int) -> FixedBases:
    """Tables of the powers of bases >= 1 and < modulus, by exponents of ``n_bytes`` each."""
    by_byte = [ring.take(bases)]
    for _ in range(n_bytes - 1):
        by_byte.append(ring.squares(by_byte[-1], DIGIT_BITS))
    # firsts: base 0 byte 0, base 0 byte 1, ..., base 1 byte 0, ...
    firsts = np.stack(by_byte, axis=1).reshape(-1, *by_byte[0].shape[1:])
    powers = [ring.ones(len(firsts)), firsts]
    while len(powers) < 1 << DIGIT_BITS:
        powers.append(ring.multiply(powers[-1], firsts))
    return FixedBases(ring, np.stack(powers, axis=1))


def random_digits(n_powers: int, n_tables: int) -> Bytes:
    """Independent uniform exponents from the system; uint8, shape (n_powers, n_tables)."""
    digits = np.frombuffer(secrets.token_bytes(n_powers * n_tables), dtype=np.uint8)
    return digits.reshape(n_powers, n_tables)


# phe, the package that others use, is under GPL-3.0: an extra that only these functions need.
def to_phe(key: PrivateKey) -> PaillierPrivateKey:
    """The same key as phe's; its ``public_key`` is the public one."""
    check_package("phe", "to write its keys", "phe")
    from phe.paillier import PaillierPrivateKey, PaillierPublicKey

    return PaillierPrivateKey(PaillierPublicKey(int(key.public.n)), int(key.p), int(key.q))


def from_phe(key: PaillierPrivateKey, *, full_masks: bool = False) -> PrivateKey:
    """The same key as ours; ``full_masks`` as in ``generate_key``."""
    return PrivateKey(mpz(key.p), mpz(key.q), full_masks)


def to_phe_numbers(key: PublicKey, ciphertexts: Bytes) -> list[EncryptedNumber]:
    """Ciphertexts, uint8 of shape (n, ciphertext_bytes), as phe's encrypted integers."""
    check_package("phe", "to write its ciphertexts", "phe")
    from phe.paillier import EncryptedNumber, PaillierPublicKey

    public = PaillierPublicKey(int(key.n))
    return [EncryptedNumber(public, int(value)) for value in from_bytes_array(ciphertexts)]


def from_phe_numbers(key: PublicKey, numbers: Sequence[EncryptedNumber]) -> Bytes:
    """Encrypted integers of phe as uint8 rows, shape (n, ciphertext_bytes), big endian.

    phe masks a number before it hands out its ciphertext. Raises a ValueError for a number under
    another key, and for one with an exponent: phe's floats, of which only the mantissa is
    encrypted.
    """
    for index, number in enumerate(numbers):
        if number.public_key.n != int(key.n):
            raise ValueError(f"numbers must be under the given key, got another at {index}")
        if number.exponent:
            raise ValueError(f"numbers must be integers, got exponent {number.exponent} at {index}")
    return to_bytes_array(
        [mpz(phe_number.ciphertext()) for phe_number in numbers], key.ciphertext_bytes
    )
