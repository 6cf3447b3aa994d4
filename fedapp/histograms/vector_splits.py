"""Splits and weights for all outputs at once, by XGBoost's rules for ``multi_output_tree``.

They are not those of ``split``, added up over outputs: ``min_child_weight`` refuses no split, but
gives an output with less of it weight 0; a gain is a float64 sum of products with float32 weights;
and with ``max_delta_step`` it is another function of the weight.

Source: ``HistMultiEvaluator`` in src/tree/hist/evaluate_splits.h, src/tree/hist/expand_entry.h and
src/tree/param.h of XGBoost 3.2.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.histograms.bins import Codes, Cuts, Ints
from fedapp.histograms.build import Histogram, build_histograms
from fedapp.histograms.split import SMALLEST_GAIN, SPLIT, Penalties, leaf_weight, shrunk
from fedapp.kernels import frozen, kernel

Doubles = npt.NDArray[np.float64]


def build_vector_histograms(
    codes: Codes,
    missing_code: int,
    columns: Ints,
    widths: Ints,
    gradients: npt.NDArray[np.float32],
    nodes: npt.NDArray[np.int32],
    wanted_trees: npt.NDArray[np.int32],
    wanted_nodes: npt.NDArray[np.int32],
) -> tuple[Histogram, npt.NDArray[np.int32]]:
    """``build_all_histograms`` of several outputs, whose rows are in the nodes of one tree.

    ``gradients`` is float32, shape (n_outputs, n_rows, 2), and ``nodes`` int32, (1, n_rows); the
    sums are float64, shape (n_wanted, sum of widths, n_outputs, 2).
    """
    sums = [
        build_histograms(codes, missing_code, columns, widths, of_output, nodes[0], wanted_nodes)
        for of_output in gradients
    ]
    return np.stack([histogram for histogram, _ in sums], axis=2), sums[0][1]


def best_vector_splits(
    histograms: Histogram,
    sums: Doubles,
    missing: npt.NDArray[np.int32],
    allowed: npt.NDArray[np.bool_],
    cuts: Cuts,
    penalties: Penalties,
) -> npt.NDArray[Any]:
    """The split of largest gain of each node, over all outputs; scans as in ``best_splits``.

    Parameters
    ----------
    histograms : float64, shape (n_nodes, n_bins, n_outputs, 2); no column is of categories.
    sums : float64, shape (n_nodes, n_outputs, 2).
    missing, allowed : as in ``best_splits``.

    Returns
    -------
    As ``best_splits``, with sums of the sides of shape (n_outputs, 2).
    """
    n_nodes = len(histograms)
    gains = np.zeros(n_nodes, dtype=np.float32)
    places = np.full((n_nodes, 3), -1)
    sides = np.zeros((n_nodes, 2, *sums.shape[1:]))
    arrays = frozen(histograms, sums, missing, allowed, cuts.offsets)
    _scan(*(*arrays, penalties.of_leaves, gains, places, sides))
    shapes = dict.fromkeys(("left", "right"), sums.shape[1:])
    fields = [(name, SPLIT[name].base, shapes.get(name, ())) for name in SPLIT.names or ()]
    splits = np.zeros(n_nodes, dtype=fields)
    splits["gain"] = gains
    splits["column"], splits["cut"], splits["default_left"] = places.T
    splits["left"], splits["right"] = sides[:, 0], sides[:, 1]
    is_one_sided = (sides[..., 1] == 0).all(axis=2).any(axis=1)
    too_small = (gains <= SMALLEST_GAIN) | (gains < np.float32(penalties.gamma))
    splits["column"][too_small | is_one_sided] = -1
    return splits


@kernel
def _scan(
    histograms: Any,
    sums: Any,
    missing: Any,
    allowed: Any,
    offsets: Any,
    penalties: Any,
    gains: Any,
    places: Any,
    sides: Any,
) -> None:
    """Fill ``gains``; of each node's split column, cut and default side; and its sides' sums."""
    near, far = np.empty(sums.shape[1:]), np.empty(sums.shape[1:])
    for node in range(histograms.shape[0]):
        root_gain = _gain(sums[node], penalties)
        for column in range(offsets.shape[0] - 1):
            first, n_bins = offsets[column], offsets[column + 1] - offsets[column]
            for backward in range(2):
                if not allowed[node, column] or (backward and missing[node, column] == 0):
                    continue
                near[:] = 0.0
                for step in range(n_bins):
                    bin_id = first + (n_bins - 1 - step if backward else step)
                    for output in range(near.shape[0]):
                        for part in range(2):
                            near[output, part] += histograms[node, bin_id, output, part]
                            far[output, part] = sums[node, output, part] - near[output, part]
                    gained = _gain(near, penalties) + _gain(far, penalties)
                    gain = np.float32(gained - root_gain)
                    if gain > gains[node] and gain < np.inf:
                        gains[node] = gain
                        places[node, 0] = column
                        places[node, 1] = bin_id - first - backward
                        places[node, 2] = backward
                        sides[node, backward] = near
                        sides[node, 1 - backward] = far


@kernel
def _gain(sums: Any, penalties: Any) -> Any:
    """Score of rows as a leaf, in float64, from weights in float32."""
    gain = 0.0
    for output in range(sums.shape[0]):
        weight = np.float32(leaf_weight(sums[output, 0], sums[output, 1], penalties))
        gain += -np.float64(weight) * shrunk(sums[output, 0], penalties[1])
    return gain


@kernel
def vector_weights(sums: Any, penalties: Any, eta: float) -> Any:
    """Weights of nodes, and these times ``eta``; both float32, shape (n_nodes, n_outputs)."""
    weights = np.empty(sums.shape[:2], dtype=np.float32)
    values = np.empty(sums.shape[:2], dtype=np.float32)
    for node in range(sums.shape[0]):
        for output in range(sums.shape[1]):
            weight = leaf_weight(sums[node, output, 0], sums[node, output, 1], penalties)
            weights[node, output], values[node, output] = weight, weight * eta
    return weights, values
