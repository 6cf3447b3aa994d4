"""Fixed-point numbers: whole multiples of a power of two, whose sums are exact in any order.

The resolution follows from bounds that no single row decides: a sum of the given number of terms of
the given size must fit two's complement in 64 bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedapp.arrays import Doubles, Ints

Whole = Ints

# One bit for the sign and one to spare, so that most numbers that are no sum are out of range.
SPARE_BITS = 2


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds on the rows of all parties, rounded up to powers of two.

    A sum has at most ``n_rows`` rows, weights are at most 2^heaviest, and numeric labels at most
    2^largest in absolute value.
    """

    n_rows: int
    heaviest: int = 0
    largest: int = 0

    def exponent(self, power: int, n_bytes: int = 8) -> int:
        """Fractional bits of the terms of a sum of ``n_bytes``, unweighted at most 2^power."""
        return 8 * n_bytes - SPARE_BITS - power_above(self.n_rows) - self.heaviest - power

    def most(self, power: int) -> float:
        """The largest weighted term."""
        return math.ldexp(1.0, power + self.heaviest)


def power_above(value: float) -> int:
    """The least n with value <= 2^n; 0 for values <= 0."""
    if value <= 0:
        return 0
    mantissa, exponent = math.frexp(value)
    return exponent - 1 if mantissa == 0.5 else exponent


def to_fixed(values: npt.NDArray[np.floating], exponent: int | Whole) -> Whole:
    """Values below 2^(62 - exponent) as the nearest multiples of 2^-exponent, in units of that.

    There is one exponent, or one for each place of the last axis.
    """
    scaled = values.astype(np.float64) * np.ldexp(1.0, np.asarray(exponent))
    whole: Whole = np.rint(scaled, out=scaled).astype(np.int64)
    return whole


def from_fixed(whole: Whole, exponent: int | Whole) -> Doubles:
    """Inverse of ``to_fixed``, also for sums of its results; float64, rounded once."""
    values: Doubles = whole.astype(np.float64)
    values *= np.ldexp(1.0, -np.asarray(exponent))
    return values
