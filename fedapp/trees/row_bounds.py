"""How far one row moves the sums of gradients and hessians, and how it is held to that."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fedapp.crypto.fixed_point import Bounds, Whole, power_above, to_whole
from fedapp.trees.objective import LOSSES, LossParameters, Objective

BOUNDED = "binary:logistic", "reg:logistic", "multi:softprob"
# Of what a hessian is multiplied by before both are measured together. With p the prediction, a row
# of logistic loss has g^2 + 9 h^2 <= max(p^2 + 9 p^2 (1 - p)^2) = 1, so hessians cost nothing at
# this scale (from 3.4 on they would). With softmax, h = 2 p (1 - p) and at the scale 1 each class
# has at most its p, or 1 - p for the class of the row, so that a row has 2 at most.
LOGISTIC_SCALE, SOFTMAX_SCALE = 3.0, 1.0
# Where gradients are clipped, the largest hessian counts half as much as the largest gradient.
CLIPPED_SHARE = 0.5
# More than what rounding adds to a row: half a unit for each of up to 2000 numbers, where the
# largest of them has 2^21 units at least.
ROUNDING = 2.0**-16


@dataclass(frozen=True, slots=True)
class RowBounds:
    """What holds for a row of weight 1.

    Parameters
    ----------
    gradient, hessian : largest sizes; more is clipped.
    scale : of hessians beside gradients.
    norm : largest L2 norm of all gradients of the row and its scaled hessians.
    """

    gradient: float
    hessian: float
    scale: float
    norm: float

    def exponents(self, bounds: Bounds) -> tuple[int, int]:
        """How many bits behind the point whole gradients and hessians have."""
        powers = power_above(self.gradient), power_above(self.hessian)
        return bounds.exponent(powers[0]), bounds.exponent(powers[1])

    def sensitivities(self, bounds: Bounds) -> tuple[float, float]:
        """The norm in units of gradients, and in those of hessians."""
        heaviest = math.ldexp(self.norm * (1 + ROUNDING), bounds.heaviest)
        of_gradients, of_hessians = self.exponents(bounds)
        return math.ldexp(heaviest, of_gradients), math.ldexp(heaviest / self.scale, of_hessians)

    def whole(self, pairs: np.ndarray, weights: np.ndarray, bounds: Bounds) -> Whole:
        """Clipped gradients and hessians as whole numbers; 0 where one is no number, as leaves
        that no honest run has can make it.

        Parameters
        ----------
        pairs : float32, shape (n_rows, n_outputs, 2), of rows without their weights.
        weights : float32, shape (n_rows,).
        bounds : of the weights.

        Returns
        -------
        int64, of the shape of ``pairs``.
        """
        found = np.empty(pairs.shape, dtype=np.int64)
        for place, (most, exponent) in enumerate(
            zip((self.gradient, self.hessian), self.exponents(bounds), strict=True)
        ):
            known = np.nan_to_num(pairs[..., place].astype(np.float64), nan=0.0)
            clipped = np.clip(known, -most, most)
            found[..., place] = to_whole(clipped * weights[:, None], exponent)
        return found


def row_bounds(objective: Objective, parameters: LossParameters, clip: float) -> RowBounds:
    """What holds for a row of an objective.

    Parameters
    ----------
    clip : size of the largest gradient, where the objective has no bound of its own; else 0.

    Raises
    ------
    ValueError : a clip is missing, or there is nothing to clip.
    """
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
    """Gradients and hessians without the rows' weights; float32, shape (n_rows, n_outputs, 2)."""
    return np.stack(LOSSES[objective].pairs(margins, labels, parameters), axis=-1)
