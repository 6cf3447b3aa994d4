"""Numbers as whole multiples of a power of two, whose sums are exact.

A sum of such numbers does not depend on their order, nor on who added which of them. How fine they
may be written follows from bounds that no row decides: so many terms of at most such a size must
fit two's complement in 64 bits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Doubles = npt.NDArray[np.float64]
Whole = npt.NDArray[np.int64]

# A sum has a sign, and is below half of what then fits, so that most of what is no sum shows.
SPARE_BITS = 2


@dataclass(frozen=True, slots=True)
class Bounds:
    """What holds for the rows of all parties together, told to powers of two.

    Parameters
    ----------
    n_rows : most rows that a sum is over, > 0.
    heaviest : no weight is beyond 2^heaviest.
    largest : no label that is a number is beyond 2^largest in size.
    """

    n_rows: int
    heaviest: int = 0
    largest: int = 0

    def exponent(self, power: int, n_bytes: int = 8) -> int:
        """How many bits behind the point the terms of a sum may have.

        Parameters
        ----------
        power : no term is beyond 2^power in size, before it is weighted.
        n_bytes : that a sum fits in, but for two bits.
        """
        return 8 * n_bytes - SPARE_BITS - power_above(self.n_rows) - self.heaviest - power

    def finer(self, exponent: int) -> int:
        """How many bits the terms of a sum of what others leave may have, when these have so many:
        see ``to_parts``."""
        return 8 * 8 - SPARE_BITS - power_above(self.n_rows) + exponent + 1

    def most(self, power: int) -> float:
        """The largest term, with its weight."""
        return math.ldexp(1.0, power + self.heaviest)


def power_above(value: float) -> int:
    """The least n with value <= 2^n; of a value that is not above 0, that of 1."""
    if value <= 0:
        return 0
    mantissa, exponent = math.frexp(value)
    return exponent - 1 if mantissa == 0.5 else exponent


def to_whole(values: npt.NDArray[np.floating], exponent: int | Whole) -> Whole:
    """Values as the nearest multiples of 2^-exponent, in units of that.

    Parameters
    ----------
    values : any shape; below 2^(62 - exponent) in size.
    exponent : one, or one for each place of the last axis.
    """
    scaled = values.astype(np.float64) * np.ldexp(1.0, np.asarray(exponent))
    whole: Whole = np.rint(scaled, out=scaled).astype(np.int64)
    return whole


def from_whole(whole: Whole, exponent: int | Whole) -> Doubles:
    """Undo ``to_whole``, or of sums of such; float64, rounded once.

    Parameters
    ----------
    exponent : one, or one for each place of the last axis.
    """
    values: Doubles = whole.astype(np.float64)
    values *= np.ldexp(1.0, -np.asarray(exponent))
    return values


def to_parts(values: Doubles, exponents: tuple[Whole, Whole]) -> tuple[Whole, Whole]:
    """Values as multiples of a coarse unit, and what that leaves as multiples of a fine one: twice
    the bits, where those of one whole number are too few.

    Parameters
    ----------
    values : any shape.
    exponents : of both units, one for each place of the last axis; see ``Bounds.finer``.
    """
    coarse = to_whole(values, exponents[0])
    return coarse, to_whole(values - from_whole(coarse, exponents[0]), exponents[1])


def from_parts(parts: Whole, exponents: tuple[Whole, Whole]) -> Doubles:
    """Undo ``to_parts``, or of sums of such.

    Parameters
    ----------
    parts : shape (..., 2, n), the coarse one first.
    """
    pairs = zip((0, 1), exponents, strict=True)
    coarse, fine = (from_whole(parts[..., place, :], exponent) for place, exponent in pairs)
    return coarse + fine
