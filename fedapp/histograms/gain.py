"""Leaf weights and split gains, by XGBoost's rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fedapp.kernels import inlined, kernel


@dataclass(frozen=True, slots=True)
class Penalties:
    """Regularisation, named as in XGBoost; all >= 0."""

    reg_lambda: float
    reg_alpha: float
    gamma: float
    min_child_weight: float
    max_delta_step: float = 0.0

    @property
    def of_leaves(self) -> tuple[float, float, float, float]:
        """All but ``gamma``, for kernels: what leaf weights depend on."""
        return self.reg_lambda, self.reg_alpha, self.min_child_weight, self.max_delta_step


def node_weight(gradient: float, hessian: float, penalties: Penalties) -> np.float32:
    """Optimal weight of a leaf before the learning rate (arXiv:1603.02754v3, Eq. 5, with L1)."""
    if hessian < penalties.min_child_weight or hessian <= 0:
        return np.float32(0)
    shrunk = np.sign(gradient) * max(abs(gradient) - penalties.reg_alpha, 0.0)
    weight = -shrunk / (hessian + penalties.reg_lambda)
    if longest := penalties.max_delta_step:
        weight = min(max(weight, -longest), longest)
    return np.float32(weight)


@kernel
def _shrunk(gradient: float, reg_alpha: float) -> Any:
    """A sum of gradients, moved towards 0 by the L1 penalty."""
    if gradient > reg_alpha:
        return gradient - reg_alpha
    if gradient < -reg_alpha:
        return gradient + reg_alpha
    return 0.0


@inlined
def _bounded_weight(gradient: float, hessian: float, penalties: Any) -> Any:
    """Optimal weight of rows as a leaf, without min_child_weight; hessian > 0."""
    reg_lambda, reg_alpha, _, longest = penalties
    weight = -_shrunk(gradient, reg_alpha) / (hessian + reg_lambda)
    return min(max(weight, -longest), longest) if longest > 0.0 else weight


@inlined
def leaf_weight(gradient: float, hessian: float, penalties: Any) -> Any:
    """``node_weight`` for kernels, in float64."""
    if hessian < penalties[2] or hessian <= 0.0:
        return 0.0
    return _bounded_weight(gradient, hessian, penalties)


@kernel
def weight_within(gradient: float, hessian: float, penalties: Any, bounds: Any) -> Any:
    """Weight of one side of a split within bounds, in float32."""
    weight = leaf_weight(gradient, hessian, penalties)
    return min(max(np.float32(weight), bounds[0]), bounds[1])


@kernel
def gain_of_weight(gradient: float, hessian: float, penalties: Any, weight: Any) -> Any:
    """Score of one side of a split with a given weight, in float32."""
    if hessian <= 0.0:
        return np.float32(0.0)
    gained = np.float32(2.0) * np.float32(gradient) * weight
    spent = (np.float32(hessian) + np.float32(penalties[0])) * (weight * weight)
    return -(gained + spent)


@kernel
def side_gain(gradient: float, hessian: float, penalties: Any) -> Any:
    """Score of one side of a split, in float32.

    XGBoost squares in float64, divides in float32, and computes the score from the weight if
    weights are bounded.
    """
    reg_lambda, reg_alpha, _, longest = penalties
    if hessian <= 0.0:
        return np.float32(0.0)
    if longest > 0.0:
        weight = np.float32(_bounded_weight(gradient, hessian, penalties))
        return gain_of_weight(gradient, hessian, penalties, weight)
    shrunk = _shrunk(gradient, reg_alpha)
    return np.float32(shrunk * shrunk) / np.float32(hessian + reg_lambda)
