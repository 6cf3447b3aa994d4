"""Numbers in which sums of rows are added up.

``Doubles``; ``WholeNumbers``, whose sum does not depend on the order and can be masked; or
``ClippedNumbers`` for differential privacy.
"""

from __future__ import annotations

from typing import Any, Final, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedapp.histograms.fixed_point import Bounds, from_fixed, power_above, to_fixed

Array: TypeAlias = NDArray[np.float64]
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
LOSS_POWER = 2  # with differential privacy log losses are clipped at 4 nats
# Noise of a total over that of a cell. With equal noise a few totals would take most of the budget
# from the histograms, whose noise determines the error of the AUC.
TOTALS_NOISE = 2


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


class ClippedNumbers(WholeNumbers):
    """Whole numbers, each of which a row of the largest weight changes by at most as many units.

    Errors of regression are clipped at ``clip``, or if it is 0, at the largest label, both rounded
    up to a power of two.
    """

    def __init__(self, bounds: Bounds, clip: float) -> None:
        super().__init__(bounds)
        self._error_power = power_above(clip) if clip else max(bounds.largest, 0)
        self._n_tables = 0

    @property
    def sensitivity(self) -> float:
        """Most that a row changes all sums so far (L2), in units."""
        # Each total, over TOTALS_NOISE, and one cell of each table.
        most = 2.0 ** (self.bounds.exponent(0) + self.bounds.heaviest)
        return float(most * np.sqrt(len(self.exponents) / TOTALS_NOISE**2 + self._n_tables))

    @property
    def n_totals(self) -> int:
        """Totals added up so far; among the sums they come before the cells."""
        return len(self.exponents)

    def cells(self, rows: Ints, columns: Ints, weights: Array, shape: tuple[int, int]) -> Ints:
        self._n_tables += 1
        return super().cells(rows, columns, weights, shape)

    def _power(self, size: str) -> int:
        powers = {
            "weight": 0,
            "loss": LOSS_POWER,
            "label": self.bounds.largest,
            "label square": 2 * self.bounds.largest,
            "error": self._error_power,
            "square": 2 * self._error_power,
        }
        return powers.get(size, self._error_power + LOSS_POWER)


def read_sums(sums: Ints, adder: WholeNumbers, histogram: Ints) -> tuple[Array, Array]:
    """Sums and a histogram, as ``adder`` has added them up, as doubles; also of several parties."""
    exponents = adder.exponents + [adder.cell_exponent] * (len(sums) - len(adder.exponents))
    return (
        from_fixed(sums, np.array(exponents, dtype=np.int64)),
        from_fixed(histogram, adder.cell_exponent),
    )
