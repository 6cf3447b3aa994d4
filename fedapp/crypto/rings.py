"""Arithmetic modulo big numbers, many products at once, by what the processor has.

Where it multiplies eight big integers side by side (``fedapp.crypto.lanes``) residues are rows of
limbs, and products release Python's lock, so threads share the work. Elsewhere they are gmpy2's
integers in an array, and processes share it. What is written is the same.
"""

from __future__ import annotations

import functools
import importlib
import secrets
from collections.abc import Callable, Sequence
from contextvars import Context, ContextVar
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from gmpy2 import mpz, powmod

from fedapp.crypto.integers import Bytes, from_bytes_array, to_bytes_array
from fedapp.crypto.workers import Call, Workers

# One residue a row: objects, shape (n,), or uint64, shape (n, n_limbs).
Residues = npt.NDArray[Any]
Rows = npt.NDArray[np.int64]
LANES, FEATURE = "fedapp.crypto.lanes", "avx512ifma"
N_LANES = 8  # of a register
# Operations that need no check any more in a call of ``share``; outside of these each has one.
_checked: ContextVar[set[str] | None] = ContextVar("_checked", default=None)
EVERY = ""


class Ring(Protocol):
    """Arithmetic modulo a number; see ``fedapp.crypto.lane_ring.LaneRing``."""

    modulus: mpz

    def read(self, rows: Bytes) -> Residues: ...

    def write(self, residues: Residues, width: int) -> Bytes: ...

    def take(self, numbers: Sequence[mpz]) -> Residues: ...

    def numbers(self, residues: Residues) -> list[mpz]: ...

    def ones(self, n: int) -> Residues: ...

    def multiply(
        self,
        left: Residues,
        right: Residues,
        left_rows: Rows | None = None,
        right_rows: Rows | None = None,
    ) -> Residues: ...

    def add(self, left: Residues, right: Residues) -> Residues: ...

    def power(self, residues: Residues, exponent: int) -> Residues: ...

    def squares(self, residues: Residues, times: int) -> Residues: ...

    def table_products(self, tables: Residues, digits: Bytes) -> Residues: ...

    def lift(self, residues: Residues, ring: Any) -> Residues: ...


class PlainRing:
    """The same on gmpy2's integers, an array of which is one of objects."""

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
        left_rows: Rows | None = None,
        right_rows: Rows | None = None,
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


@functools.cache
def has_lanes() -> bool:
    """Whether big integers are multiplied side by side here."""
    processor: Any = importlib.import_module("llvmlite.binding")
    try:
        features = processor.get_host_cpu_features()
    except RuntimeError:  # LLVM does not know the processor
        return False
    # numba takes a moment to load, which a worker of another processor need not wait for.
    return bool(features.get(FEATURE)) and importlib.import_module(LANES).supported()


def ring(modulus: mpz) -> Ring:
    """The faster ring of an odd modulus; none is kept, as a modulus may be secret."""
    if not has_lanes():
        return PlainRing(modulus)
    from fedapp.crypto.lane_ring import LaneRing, check_known_answers

    # In another context, as its operations are no part of the batch at hand.
    Context().run(check_known_answers)
    return LaneRing(modulus)


def share(workers: Workers, function: Callable[..., Any], calls: Sequence[Call]) -> list[Any]:
    """Calls whose time goes into products: in threads where these release Python's lock.

    Each operation of one of them, chosen at random, is checked once (``sampled``).
    """
    checked = secrets.randbelow(max(1, len(calls)))
    given = [(place == checked, function, *call) for place, call in enumerate(calls)]
    return workers.run_here(call, given) if has_lanes() else workers.run(call, given)


def call(is_checked: bool, function: Callable[..., Any], *arguments: Any) -> Any:
    """A call with or without checks."""
    context = Context()
    context.run(_checked.set, set() if is_checked else {EVERY})
    return context.run(function, *arguments)


def sampled(operation: str, n_rows: int) -> list[int]:
    """The row of an operation that a library computes again, drawn at random; or none.

    A fault in every row, as of code compiled wrongly, is caught in every batch. A fault in k of n
    rows, as of a failing core, is caught with chance k / n each time, so some time in a long run.
    What breaks later, or what the library gets wrong as well, is not caught.
    """
    checked = _checked.get()
    if not n_rows or (checked and checked & {operation, EVERY}):
        return []
    if checked is not None:
        checked.add(operation)
    return [secrets.randbelow(n_rows)]


def product(ring: Ring, residues: Residues) -> mpz:
    """The product of all."""
    while len(residues) > 1:
        half = len(residues) // 2
        halves = ring.multiply(residues[:half], residues[half : 2 * half])
        residues = np.concatenate([halves, residues[2 * half :]])
    return ring.numbers(residues)[0] if len(residues) else mpz(1)


def products_by_place(
    ring: Ring, residues: Residues, places: Rows, rows: Rows | None = None
) -> tuple[Rows, Residues]:
    """The product of all that go to the same place, by pairs, pairs of pairs and so on.

    Parameters
    ----------
    places : int64, shape (n,).
    rows : int64, shape (n,): which residue goes there; all in order where there is None.

    Returns
    -------
    The places that something goes to, ascending, and the product at each.
    """
    order = np.argsort(places, kind="stable")
    places, rows = places[order], order if rows is None else rows[order]
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
