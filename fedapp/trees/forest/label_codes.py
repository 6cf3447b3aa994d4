"""Labels in a form that says which splits are best, and as little else as can be.

Which rows share a class is all that Gini and entropy look at, so classes are numbered by their
first row: whatever the classes are called, and in whatever order, the numbers are the same. In the
same way the variance of numbers looks at them up to y -> a + b y alone, so the first row's number
is put at 0, the first other one above it, and the largest distance at a power of two. Every
labelling that leads to the same forest has the same codes: they cannot tell one from the other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Codes = npt.NDArray[np.float64]
MOST_BITS = 40


def class_codes(labels: npt.NDArray[Any]) -> Codes:
    """Class of each row, numbered by the first row of each class; float64, shape (n_rows,)."""
    _, firsts, places = np.unique(labels, return_index=True, return_inverse=True)
    codes: Codes = np.argsort(np.argsort(firsts))[places].astype(np.float64)
    return codes


def number_codes(labels: npt.NDArray[np.float32]) -> tuple[Codes, float]:
    """Whole numbers in place of numbers, up to an affine map that the codes do not tell.

    They are so small that sums over all rows are exact in float64, in whatever order they are
    added: equal splits have equal improvements, and first of equals is the same everywhere.

    Parameters
    ----------
    labels : not all the same.

    Returns
    -------
    codes : float64, shape (n_rows,).
    unit : what a step of 1 is in labels.
    """
    distances = labels.astype(np.float64) - float(labels[0])
    bits = min(MOST_BITS, 52 - math.ceil(math.log2(len(labels))))
    unit = np.abs(distances).max() / 2.0**bits
    sign = np.sign(distances[np.flatnonzero(distances)[0]])
    return np.round(distances * sign / unit), float(unit)


def exact_weights(weights: Codes) -> Codes:
    """Weights of which sums over all rows are exact in float64, in whatever order they are added.

    They are multiples of about 2^-52 of all rows' weight: those of float32 change where they are
    2^13 times smaller than the largest, of 30,000 rows. What is above 0 stays above it.

    Parameters
    ----------
    weights : float64, shape (n_rows,), >= 0.
    """
    step = _step(weights)
    return np.ceil(weights / step) * step


def exact_products(weights: Codes, codes: Codes) -> Codes:
    """Weights times codes of which sums over all rows are exact, as in ``exact_weights``."""
    products = weights * codes
    step = _step(products)
    return np.round(products / step) * step


def _step(values: Codes) -> float:
    """A power of two, of which a sum of this many values is less than 2^53 multiples."""
    exponent = math.frexp(np.abs(values).max(initial=0))[1]
    return math.ldexp(1.0, exponent + len(values).bit_length() - 52)


@dataclass(frozen=True, slots=True, eq=False)
class RowFields:
    """What each row adds to the sums that splits are chosen by, as whole numbers.

    Parameters
    ----------
    numbers : float64, shape (n_rows, n_fields): the weight in the field of the row's class, 0 in
        the others; or weight, and weight times number.
    units : float64, shape (n_fields,): what a step of 1 is; powers of two.
    weights : float64, shape (n_rows,): see ``exact_weights``.
    """

    numbers: Codes
    units: Codes
    weights: Codes

    @classmethod
    def of(cls, codes: Codes, weights: Codes, n_classes: int) -> RowFields:
        """Of labels in codes; ``n_classes`` is 0 for numbers."""
        exact = exact_weights(weights)
        unit = _unit(exact)
        if n_classes:
            is_own = codes[:, None] == np.arange(n_classes)
            return cls(is_own * (exact / unit)[:, None], np.full(n_classes, unit), exact)
        products = exact_products(exact, codes)
        units = np.array([unit, _unit(products)])
        return cls(np.stack((exact, products), axis=1) / units, units, exact)

    @property
    def bits(self) -> int:
        """No number is above 2^bits in absolute value."""
        return (int(np.abs(self.numbers).max(initial=1)) - 1).bit_length()


def _unit(values: Codes) -> float:
    """The largest power of two of which all are multiples."""
    fractions, exponents = np.frexp(values[values != 0])
    digits = np.ldexp(fractions, 53).astype(np.int64)
    lowest = exponents - 53 + np.log2(digits & -digits)
    return float(2.0 ** lowest.min(initial=1023)) if len(lowest) else 1.0
