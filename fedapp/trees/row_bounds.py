"""How much one row can change the sums of gradients and hessians, and clipping to that."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fedapp.histograms.fixed_point import Bounds, Whole, power_above, to_fixed
from fedapp.trees.objective import LOSSES, LossParameters, Objective

BOUNDED = "binary:logistic", "reg:logistic", "multi:softprob"
# Factor of a hessian in the joint L2 norm. For logistic loss with prediction p,
# g^2 + 9 h^2 <= max(p^2 + 9 p^2 (1 - p)^2) = 1, so at this scale hessians add nothing to the norm
# (from 3.4 on they would). For softmax, h = 2 p (1 - p): at scale 1 each class adds at most its p,
# or 1 - p for the row's class, so a row's squared norm is at most 2.
LOGISTIC_SCALE, SOFTMAX_SCALE = 3.0, 1.0
# With clipped gradients, the largest hessian counts half as much as the largest gradient.
CLIPPED_SHARE = 0.5
# Upper bound of what rounding adds to a row's norm: half a unit for each of up to 2000 numbers,
# the largest of which has at least 2^21 units.
ROUNDING = 2.0**-16


@dataclass(frozen=True, slots=True)
class RowBounds:
    """Bounds of a row of weight 1."""

    # gradient, hessian: largest absolute values; beyond, they are clipped
    gradient: float
    hessian: float
    scale: float  # factor of hessians in the norm
    norm: float  # largest L2 norm of all gradients and scaled hessians of a row

    def exponents(self, bounds: Bounds) -> tuple[int, int]:
        """Fractional bits of integer gradients and hessians."""
        powers = power_above(self.gradient), power_above(self.hessian)
        return bounds.exponent(powers[0]), bounds.exponent(powers[1])

    def sensitivities(self, bounds: Bounds) -> tuple[float, float]:
        """The norm in units of integer gradients, and of integer hessians."""
        heaviest = math.ldexp(self.norm * (1 + ROUNDING), bounds.heaviest)
        gradient_bits, hessian_bits = self.exponents(bounds)
        return math.ldexp(heaviest, gradient_bits), math.ldexp(heaviest / self.scale, hessian_bits)

    def whole(self, pairs: np.ndarray, weights: np.ndarray, bounds: Bounds) -> Whole:
        """Clipped and weighted gradients and hessians as integers; int64, shape of ``pairs``.

        ``pairs`` is float32, shape (n_rows, n_outputs, 2), without weights. NaN, which only a
        dishonest run's leaves can cause, becomes 0.
        """
        numbers = np.empty(pairs.shape, dtype=np.int64)
        for place, (most, exponent) in enumerate(
            zip((self.gradient, self.hessian), self.exponents(bounds), strict=True)
        ):
            finite = np.nan_to_num(pairs[..., place].astype(np.float64), nan=0.0)
            clipped = np.clip(finite, -most, most)
            numbers[..., place] = to_fixed(clipped * weights[:, None], exponent)
        return numbers


def row_bounds(objective: Objective, parameters: LossParameters, clip: float) -> RowBounds:
    """Bounds of a row; ValueError unless ``clip`` is given exactly where none follow."""
    if (objective in BOUNDED) == bool(clip):
        rule = "be 0, for gradients have a bound" if clip else "be > 0, for gradients have no bound"
        raise ValueError(f"must {rule} with {objective}, got {clip:g}")
    if objective == "multi:softprob":
        return RowBounds(1.0, 0.5, SOFTMAX_SCALE, math.sqrt(2))
    if objective in BOUNDED:
        heavier = max(parameters.scale_pos_weight, 1.0)
        return RowBounds(heavier, heavier / 4, LOGISTIC_SCALE, heavier)
    hessian = 1.0 if objective == "reg:squarederror" else clip
    return RowBounds(
        clip, hessian, CLIPPED_SHARE * clip / hessian, clip * math.hypot(1, CLIPPED_SHARE)
    )


def row_pairs(
    objective: Objective, margins: np.ndarray, labels: np.ndarray, parameters: LossParameters
) -> np.ndarray:
    """Gradients and hessians without weights; float32, shape (n_rows, n_outputs, 2)."""
    return np.stack(LOSSES[objective].pairs(margins, labels, parameters), axis=-1)
