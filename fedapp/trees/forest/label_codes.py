"""Labels as codes, whose sums are exact in any order.

Codes determine the best splits and disclose as little else as possible. Gini and entropy depend
only on which rows share a class, so classes are numbered by their first row, whatever their names
and order. The variance is invariant up to y -> a + b y, so the first row's number becomes 0, the
first different one is above it, and the largest distance is a power of two. All labellings that
lead to the same forest have the same codes and cannot be distinguished.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

LabelCodes = npt.NDArray[np.float64]

MOST_BITS = 40  # of a number's code


def class_codes(labels: npt.NDArray[Any]) -> LabelCodes:
    """Class of each row, classes numbered by their first row; float64, shape (n_rows,)."""
    _, firsts, places = np.unique(labels, return_index=True, return_inverse=True)
    codes: LabelCodes = np.argsort(np.argsort(firsts))[places].astype(np.float64)
    return codes


def number_codes(labels: npt.NDArray[np.float32]) -> tuple[LabelCodes, float]:
    """Integer codes of numbers, up to an affine map that is not disclosed, and their unit.

    They are so small that their float64 sums are exact in any order, so ties are broken alike
    everywhere. ``labels`` must not all be equal. A step of 1 is ``unit`` in labels.
    """
    distances = labels.astype(np.float64) - float(labels[0])
    bits = min(MOST_BITS, 52 - math.ceil(math.log2(len(labels))))
    unit = np.abs(distances).max() / 2.0**bits
    # The first row that differs from row 0 is above it, whatever the direction of the labels.
    sign = np.sign(distances[np.flatnonzero(distances)[0]])
    return np.round(distances * sign / unit), float(unit)


def exact_weights(weights: LabelCodes) -> LabelCodes:
    """Round weights, >= 0, so that their float64 sum is exact in any order.

    They become multiples of about 2^-52 of the total weight. For 30,000 rows, float32 weights
    change if they are 2^13 times smaller than the largest. Weights above 0 stay above 0.
    """
    step = _step(weights)
    return np.ceil(weights / step) * step


def exact_products(weights: LabelCodes, codes: LabelCodes) -> LabelCodes:
    """Weights times codes, rounded like ``exact_weights``."""
    products = weights * codes
    step = _step(products)
    return np.round(products / step) * step


def _step(values: LabelCodes) -> float:
    """A power of two; a sum of this many values has fewer than 2^53 multiples of it."""
    exponent = math.frexp(np.abs(values).max(initial=0))[1]
    return math.ldexp(1.0, exponent + len(values).bit_length() - 52)


@dataclass(frozen=True, slots=True, eq=False)
class RowFields:
    """What each row adds to the sums that determine splits, as integers.

    The weight, to the field of the row's class; or the weight, and weight times number, to two.
    """

    firsts: npt.NDArray[np.int64]  # (n_rows,): first field that the row adds to
    amounts: LabelCodes  # (n_rows, 1 or 2): added to this field, and to the next
    units: LabelCodes  # (n_fields,): size of a step of 1; powers of two
    weights: LabelCodes  # (n_rows,): see ``exact_weights``

    @classmethod
    def of(cls, codes: LabelCodes, weights: LabelCodes, n_classes: int) -> RowFields:
        """From labels as codes; ``n_classes`` is 0 for numbers."""
        exact = exact_weights(weights)
        unit = _unit(exact)
        if n_classes:
            units, amounts = np.full(n_classes, unit), (exact / unit)[:, None]
            return cls(codes.astype(np.int64), amounts, units, exact)
        products = exact_products(exact, codes)
        units, firsts = np.array([unit, _unit(products)]), np.zeros(len(codes), dtype=np.int64)
        return cls(firsts, np.stack((exact, products), axis=1) / units, units, exact)

    @property
    def fields(self) -> npt.NDArray[np.int64]:
        """The field of each amount, of the amounts' shape."""
        return self.firsts[:, None] + np.arange(self.amounts.shape[1])

    @property
    def numbers(self) -> LabelCodes:
        """What each row adds to each field, also 0; shape (n_rows, n_fields)."""
        numbers = np.zeros((len(self.firsts), len(self.units)))
        np.put_along_axis(numbers, self.fields, self.amounts, axis=1)
        return numbers

    def of_rows(self, rows: npt.NDArray[np.int32], counts: npt.NDArray[np.uint8]) -> RowFields:
        """The same of some rows, as often as each counts."""
        amounts = self.amounts[rows] * counts[rows, None]
        return RowFields(self.firsts[rows], amounts, self.units, self.weights[rows] * counts[rows])

    @property
    def bits(self) -> int:
        """No number exceeds 2^bits in absolute value."""
        return (int(np.abs(self.amounts).max(initial=1)) - 1).bit_length()


def _unit(values: LabelCodes) -> float:
    """The largest power of two that divides all values."""
    fractions, exponents = np.frexp(values[values != 0])
    digits = np.ldexp(fractions, 53).astype(np.int64)
    # digits & -digits is the lowest set bit of each mantissa.
    lowest = exponents - 53 + np.log2(digits & -digits)
    return float(2.0 ** lowest.min(initial=1023)) if len(lowest) else 1.0
