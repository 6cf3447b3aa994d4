"""The best split of a tree node, by XGBoost's rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from fedapp.histograms.bins import Ints
from fedapp.histograms.build import Histogram

SPLIT = np.dtype(
    [
        ("gain", np.float32),
        ("column", np.int32),
        ("cut", np.int32),  # place of the threshold in the column's edges, -1 for the minimum
        ("default_left", np.bool_),
        ("left", np.float64, (2,)),  # sums of gradients and hessians of the left child
        ("right", np.float64, (2,)),
    ]
)
# XGBoost's kRtEps: no split gains less.
SMALLEST_GAIN = np.float32(1e-6)


@dataclass(frozen=True, slots=True)
class Penalties:
    """What holds a tree back, named as in XGBoost: all >= 0."""

    reg_lambda: float
    reg_alpha: float
    gamma: float
    min_child_weight: float


def node_weight(gradient: float, hessian: float, penalties: Penalties) -> np.float32:
    """Optimal weight of a leaf, before the learning rate.

    Source: Chen and Guestrin 2016 (arXiv:1603.02754v3), Eq. 5, with XGBoost's L1 term.
    """
    if hessian < penalties.min_child_weight or hessian <= 0:
        return np.float32(0)
    shrunk = np.sign(gradient) * max(abs(gradient) - penalties.reg_alpha, 0.0)
    return np.float32(-shrunk / (hessian + penalties.reg_lambda))


def best_splits(
    histograms: Histogram,
    sums: npt.NDArray[np.float64],
    missing: npt.NDArray[np.int32],
    allowed: npt.NDArray[np.bool_],
    offsets: Ints,
    penalties: Penalties,
) -> npt.NDArray[Any]:
    """The split of largest gain of each node.

    Gains are without the factor 1/2 and compared as float32. The scan with missing rows on the
    right goes first and from the lowest cut up, the one with missing rows on the left from the
    highest cut down, and only where the node has missing rows in that column; the first of equals
    wins.

    Source: Chen and Guestrin 2016 (arXiv:1603.02754v3), Eq. 7 and Algorithm 3; order of the scans
    as in XGBoost 3.2.

    Parameters
    ----------
    histograms : float64, shape (n_nodes, n_bins, 2): sums of gradients and hessians.
    sums : float64, shape (n_nodes, 2): the same over all rows of the node.
    missing : int32, shape (n_nodes, n_columns): rows without a value.
    allowed : bool, shape (n_nodes, n_columns): columns that may split the node.
    offsets : int64, shape (n_columns + 1,): bins of column f are ``offsets[f]`` to
        ``offsets[f+1]``.
    penalties : regularisation.

    Returns
    -------
    ``SPLIT``, shape (n_nodes,); ``column`` is -1 where no split gains enough.
    """
    splits = np.zeros(len(histograms), dtype=SPLIT)
    splits["column"] = -1
    _scan(
        histograms,
        sums,
        missing,
        allowed,
        offsets,
        penalties.reg_lambda,
        penalties.reg_alpha,
        penalties.min_child_weight,
        splits,
    )
    too_small = (splits["gain"] <= SMALLEST_GAIN) | (splits["gain"] < np.float32(penalties.gamma))
    splits["column"][too_small] = -1
    return splits


@numba.njit(cache=True, nogil=True)
def _side_gain(gradient: float, hessian: float, reg_lambda: float, reg_alpha: float) -> Any:
    """Score of one side of a split, in float32."""
    if hessian <= 0.0:
        return np.float32(0.0)
    if gradient > reg_alpha:
        shrunk = gradient - reg_alpha
    elif gradient < -reg_alpha:
        shrunk = gradient + reg_alpha
    else:
        shrunk = 0.0
    return np.float32(shrunk * shrunk / (hessian + reg_lambda))


@numba.njit(cache=True, nogil=True)
def _scan(
    histograms: Any,
    sums: Any,
    missing: Any,
    allowed: Any,
    offsets: Any,
    reg_lambda: float,
    reg_alpha: float,
    min_child_weight: float,
    splits: Any,
) -> None:
    """Fill ``splits``; lower columns first, so that they win ties."""
    for node in range(histograms.shape[0]):
        total_gradient, total_hessian = sums[node, 0], sums[node, 1]
        root_gain = _side_gain(total_gradient, total_hessian, reg_lambda, reg_alpha)
        best = np.float32(0.0)
        for column in range(offsets.shape[0] - 1):
            if not allowed[node, column]:
                continue
            first, last = offsets[column], offsets[column + 1] - 1
            for backward in range(2):
                if backward and missing[node, column] == 0:
                    continue
                gradient = 0.0
                hessian = 0.0
                for step in range(last - first + 1):
                    bin_id = last - step if backward else first + step
                    gradient += histograms[node, bin_id, 0]
                    hessian += histograms[node, bin_id, 1]
                    other_gradient = total_gradient - gradient
                    other_hessian = total_hessian - hessian
                    if hessian < min_child_weight or other_hessian < min_child_weight:
                        continue
                    if hessian == 0.0 or other_hessian == 0.0:
                        continue
                    gain = np.float32(
                        np.float32(
                            _side_gain(gradient, hessian, reg_lambda, reg_alpha)
                            + _side_gain(other_gradient, other_hessian, reg_lambda, reg_alpha)
                        )
                        - root_gain
                    )
                    if gain > best:
                        best = gain
                        splits[node]["gain"] = gain
                        splits[node]["column"] = column
                        splits[node]["cut"] = bin_id - first - backward
                        splits[node]["default_left"] = backward == 1
                        near = splits[node]["right"] if backward else splits[node]["left"]
                        far = splits[node]["left"] if backward else splits[node]["right"]
                        near[0], near[1] = gradient, hessian
                        far[0], far[1] = other_gradient, other_hessian
