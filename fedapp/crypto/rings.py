"""Big integers as rows of bytes, and batched modular arithmetic.

``Ring`` has residues as gmpy2 integers in an object array, and processes share the work. Its
subclass ``fedapp.crypto.lanes.ring.LaneRing`` has rows of limbs, and products release Python's
lock, so threads share it. Both serialise alike: an integer is a big-endian row of bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from gmpy2 import mpz, powmod

from fedapp.arrays import Ints

N_LANES = 8  # big integers side by side in a register
ORDER = 2**252 + 27742317777372353535851937790883648493  # of ristretto255: l of RFC 9496, Section 4

Bytes = npt.NDArray[np.uint8]
# One residue a row: objects, shape (n,), or uint64, shape (n, n_limbs).
Residues = npt.NDArray[Any]


def to_bytes_array(values: Iterable[mpz], width: int) -> Bytes:
    """Integers >= 0 and < 256**width as big-endian rows; uint8, shape (n, width)."""
    data = b"".join([value.to_bytes(width, "big") for value in values])
    return np.frombuffer(data, dtype=np.uint8).reshape(-1, width)


def from_bytes_array(rows: Bytes) -> list[mpz]:
    """Inverse of ``to_bytes_array``."""
    data, width = rows.tobytes(), rows.shape[1]
    return [
        mpz.from_bytes(data[start : start + width], "big") for start in range(0, len(data), width)
    ]


class Ring:
    """Arithmetic modulo a number, on arrays of gmpy2 integers."""

    def __init__(self, modulus: mpz) -> None:
        self.modulus = modulus

    def read(self, rows: Bytes) -> Residues:
        return self.take([value % self.modulus for value in from_bytes_array(rows)])

    def write(self, residues: Residues, width: int) -> Bytes:
        return to_bytes_array(residues, width)

    def take(self, numbers: Sequence[mpz]) -> Residues:
        residues = np.empty(len(numbers), dtype=object)
        residues[:] = numbers
        return residues

    def numbers(self, residues: Residues) -> list[mpz]:
        return list(residues)

    def ones(self, n: int) -> Residues:
        return self.take([mpz(1)] * n)

    def multiply(
        self,
        left: Residues,
        right: Residues,
        left_rows: Ints | None = None,
        right_rows: Ints | None = None,
    ) -> Residues:
        left = left if left_rows is None else left[left_rows]
        right = right if right_rows is None else right[right_rows]
        products: Residues = left * right % self.modulus
        return products

    def add(self, left: Residues, right: Residues) -> Residues:
        sums: Residues = (left + right) % self.modulus
        return sums

    def power(self, residues: Residues, exponent: int) -> Residues:
        return self.take([powmod(value, exponent, self.modulus) for value in residues])

    def squares(self, residues: Residues, times: int) -> Residues:
        return self.power(residues, mpz(1) << times)

    def table_products(self, tables: Residues, digits: Bytes) -> Residues:
        products = self.ones(len(digits))
        # All rows through one table before the next: a table fits in the cache, all do not.
        for table, column in zip(tables, digits.T, strict=True):
            products = products * table[column] % self.modulus
        return products

    def lift(self, residues: Residues, ring: Any) -> Residues:
        return residues


def products_by_place(
    ring: Ring, residues: Residues, places: Ints, rows: Ints | None = None
) -> tuple[Ints, Residues]:
    """The distinct places, ascending, and the product of all residues of each place.

    ``places`` is int64, shape (n,), and ``rows`` the residue for each; None for all in order.
    Products are formed by pairs, pairs of pairs and so on.
    """
    order = np.argsort(places, kind="stable")
    places = places[order]
    rows = order if rows is None else rows[order]
    # Each pass multiplies neighbours at even and odd rank of a run of equal places:
    #     places  3 3 3 5  ->  ranks  0 1 2 0  ->  products  (0 1), lone  2 and 0
    while True:
        same = places[1:] == places[:-1]
        starts = np.flatnonzero(np.concatenate([[True], ~same])[: len(places)])
        ranks = np.arange(len(places)) - np.repeat(starts, np.diff([*starts, len(places)]))
        heads = np.flatnonzero(ranks % 2 == 0)
        paired = np.append(same, False)[heads]
        if not paired.any():
            return places, residues[rows]
        first, lone = heads[paired], heads[~paired]
        products = ring.multiply(residues, residues, rows[first], rows[first + 1])
        residues = np.concatenate([products, residues[rows[lone]]])
        order = np.argsort(np.concatenate([first, lone]), kind="stable")
        places, rows = places[heads], order
