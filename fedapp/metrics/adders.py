"""Add up terms of rows: as doubles, or as whole numbers, whose sum does not depend on the order."""

from __future__ import annotations

from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from fedapp.histograms.fixed_point import Bounds, from_fixed, to_fixed

Array = NDArray[np.float64]
Ints = NDArray[np.int64]

# (a, b): terms are clipped at 2^(a * power of the largest label + b), so a log loss at 4096 nats,
# an error at 64 times the largest label.
_POWERS: Final = {
    "weight": (0, 0),
    "loss": (0, 12),
    "label": (1, 0),
    "label square": (2, 0),
    "error": (1, 6),
    "square": (2, 12),
}
_DEVIANCE_POWER = 20  # plus that of the largest label, if it is above 1


class Adder(Protocol):
    """Adds up rows; ``size`` bounds the terms: a key of ``_POWERS``, or "deviance"."""

    def total(self, size: str, terms: Array, weights: Array) -> Any:
        """Weighted sum of terms, shape (n_rows,)."""

    def cells(
        self, rows: Ints, columns: Ints, weights: Array, shape: tuple[int, int]
    ) -> NDArray[Any]:
        """Sum of weights in each cell of a (rows, columns) table."""


class Doubles:
    """Sums in float64; the last bits depend on the order of the rows."""

    def total(self, size: str, terms: Array, weights: Array) -> float:
        return float((weights * terms).sum())

    def cells(self, rows: Ints, columns: Ints, weights: Array, shape: tuple[int, int]) -> Array:
        flat = np.bincount(rows * shape[1] + columns, weights, minlength=shape[0] * shape[1])
        return flat.astype(np.float64).reshape(shape)  # without rows bincount gives integers


DOUBLES: Final = Doubles()


class WholeNumbers:
    """Sums in multiples of powers of two; ``exponents`` has minus the power for each total."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds, self.exponents = bounds, list[int]()

    @property
    def cell_exponent(self) -> int:
        return self.bounds.exponent(0)

    def total(self, size: str, terms: Array, weights: Array) -> int:
        power = self._power(size)
        self.exponents.append(exponent := self.bounds.exponent(power))
        most = float(np.ldexp(1.0, power))
        return int(to_fixed(weights * np.clip(terms, -most, most), exponent).sum())

    def cells(self, rows: Ints, columns: Ints, weights: Array, shape: tuple[int, int]) -> Ints:
        flat = np.zeros(shape[0] * shape[1], dtype=np.int64)
        np.add.at(flat, rows * shape[1] + columns, to_fixed(weights, self.cell_exponent))
        return flat.reshape(shape)

    def _power(self, size: str) -> int:
        largest = self.bounds.largest
        if size not in _POWERS:
            return max(largest, 0) + _DEVIANCE_POWER
        factor, more = _POWERS[size]
        return factor * largest + more


def read_sums(sums: Ints, adder: WholeNumbers, histogram: Ints) -> tuple[Array, Array]:
    """Sums and a histogram, as ``adder`` has added them up, as doubles; also of several parties."""
    exponents = adder.exponents + [adder.cell_exponent] * (len(sums) - len(adder.exponents))
    return (
        from_fixed(sums, np.array(exponents, dtype=np.int64)),
        from_fixed(histogram, adder.cell_exponent),
    )
