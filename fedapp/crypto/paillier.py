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

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import gmpy2
import numpy as np
import numpy.typing as npt
from gmpy2 import mpz

from fedapp.crypto.lanes import has_lanes, ring_of, run_shared
from fedapp.crypto.paillier_keys import PrivateKey, PublicKey
from fedapp.crypto.paillier_masks import masks_of
from fedapp.crypto.rings import N_LANES, Bytes, from_bytes_array, product, to_bytes_array
from fedapp.crypto.workers import Workers
from fedapp.errors import check_package

if TYPE_CHECKING:
    from phe.paillier import EncryptedNumber, PaillierPrivateKey

# Several calls a process, so that none waits long for the last; the rows of a call fit in memory.
CALLS_PER_WORKER, MOST_ROWS = 4, 4096


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
    n2_ring = ring_of(key.n_squared)
    limit = to_bytes_array([key.n_squared], width)[0]
    # The product of all values mod n: it is a unit only if each value is.
    n_wrong, common = 0, mpz(1)
    for first in range(0, len(ciphertexts), MOST_ROWS):
        rows = np.asarray(ciphertexts[first : first + MOST_ROWS])
        # Compare with n^2 at the first byte that differs.
        differs = rows != limit
        places = differs.argmax(axis=1)
        below: npt.NDArray[np.bool_] = rows[np.arange(len(rows)), places] < limit[places]
        below &= differs.any(axis=1)
        n_wrong += len(rows) - int((below & rows.any(axis=1)).sum())
        if not n_wrong:
            common = common * product(n2_ring, n2_ring.read(rows)) % key.n
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
