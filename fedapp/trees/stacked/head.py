"""The network over the outputs of all trees: shape, initial weights, predictions, rates.

Source: Ma et al. 2023, "Gradient-less Federated Gradient Boosting Trees with Learnable Learning
Rates", section 3.3 and the ablation of section 4.3. All three heads are one formula::

    hidden[p, c] = relu(patch[p] @ first[c] + bias[c])        p a patch of the tree outputs
    margin[o]    = hidden.ravel() @ second[o] + bias[o]

A patch is all trees of one party (``cnn``; a convolution whose kernel and stride are a party's
trees), each boosting round with its two neighbours (``cnn3``; kernel 3, stride 1), or everything
(``fcnn``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

Kind = Literal["cnn", "cnn3", "fcnn"]
Floats = npt.NDArray[np.float32]
Layers: TypeAlias = tuple[Floats, Floats, Floats, Floats]  # first, its bias, second, its bias

FCNN_WIDTH = 256  # as in the paper's section 4.3
KERNEL = 3  # of cnn3, in boosting rounds
BATCH_NUMBERS = 2**22  # size of the arrays of a batch of predictions


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Shape of a head."""

    kind: Kind  # see the module
    n_parties: int  # ensembles under the head
    n_rounds: int  # boosting rounds of each; with k outputs a round has k trees
    n_outputs: int  # margins per row
    channels: int  # of the convolution; ignored for ``fcnn``

    @classmethod
    def over(cls, kind: Kind, counts: Sequence[int], n_outputs: int, channels: int) -> HeadShape:
        """The head over padded ensembles; ValueError unless all have whole rounds, one at least."""
        if not len(counts) or max(counts) < 1 or any(count % n_outputs for count in counts):
            raise ValueError(f"trees of a party must be a positive multiple of {n_outputs}")
        return cls(kind, len(counts), int(max(counts)) // n_outputs, n_outputs, channels)

    @property
    def n_trees(self) -> int:
        """Columns of one party in the tree outputs."""
        return self.n_rounds * self.n_outputs

    @property
    def n_columns(self) -> int:
        """Columns of the tree outputs."""
        return self.n_parties * self.n_trees

    @property
    def n_patches(self) -> int:
        """Number of patches."""
        counts = {"cnn": self.n_parties, "cnn3": self.n_parties * self.n_rounds, "fcnn": 1}
        return counts[self.kind]

    @property
    def patch_size(self) -> int:
        """Tree outputs in a patch."""
        sizes = {"cnn": self.n_trees, "cnn3": KERNEL * self.n_outputs, "fcnn": self.n_columns}
        return sizes[self.kind]

    @property
    def n_hidden(self) -> int:
        """Size of the hidden layer."""
        return self.n_patches * self.width

    @property
    def width(self) -> int:
        """Hidden units per patch."""
        return FCNN_WIDTH if self.kind == "fcnn" else self.channels

    @property
    def layers(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of first, its bias, second and its bias, in the order of the flat weights."""
        first = (self.width, self.patch_size)
        return first, first[:1], (self.n_outputs, self.n_hidden), (self.n_outputs,)

    @property
    def n_weights(self) -> int:
        """Number of parameters."""
        return sum(prod(shape) for shape in self.layers)


def split_weights(shape: HeadShape, weights: Floats) -> Layers:
    """Views of the flat weights, float32, shape (n_weights,), one per layer."""
    sizes = [prod(layer) for layer in shape.layers]
    pieces = np.split(weights, np.cumsum(sizes)[:-1])
    first, bias, second, last = (
        piece.reshape(layer) for piece, layer in zip(pieces, shape.layers, strict=True)
    )
    return first, bias, second, last


def initial_weights(shape: HeadShape, seed: int) -> Floats:
    """Kaiming initialisation: variance 2 / fan-in, biases 0 (arXiv:1502.01852, Eq. 10)."""
    rng = np.random.default_rng(seed)
    weights = np.zeros(shape.n_weights, dtype=np.float32)
    for layer in split_weights(shape, weights):
        if layer.ndim == 2:
            deviation = np.float32(np.sqrt(2 / layer.shape[1]))
            layer[:] = rng.standard_normal(layer.shape, dtype=np.float32) * deviation
    return weights


def weights_in_unit(shape: HeadShape, weights: Floats, unit: np.float32) -> Floats:
    """Weights of ``outputs -> unit * head(outputs / unit)``: only the biases change."""
    scaled = weights.copy()
    for layer in split_weights(shape, scaled):
        if layer.ndim == 1:
            layer *= unit
    return scaled


def head_margins(shape: HeadShape, weights: Floats, outputs: Floats) -> Floats:
    """Margins of tree outputs, float32, shape (n_rows, n_columns) to (n_rows, n_outputs)."""
    _, _, second, last = split_weights(shape, weights)
    margins = np.empty((len(outputs), shape.n_outputs), dtype=np.float32)
    for rows in _batches(shape, len(outputs)):
        margins[rows] = _hidden(shape, weights, outputs[rows]) @ second.T + last
    return margins


def learned_rates(shape: HeadShape, weights: Floats, outputs: Floats) -> npt.NDArray[np.float64]:
    """How much the head amplifies each tree: mean over rows of d margin / d tree output.

    A tree of class k counts for margin k; a plain sum of trees has 1 everywhere. ReLU switches
    channels off by row, so a rate is a sum over channels: (share of rows with the channel on) x
    (its weight at the party) x (weight of the tree in it). Returns float64, shape (n_parties,
    n_trees).
    """
    active = np.zeros(shape.n_hidden)
    for rows in _batches(shape, len(outputs)):
        active += (_hidden(shape, weights, outputs[rows]) > 0).sum(axis=0)
    active /= max(1, len(outputs))
    first, _, second, _ = split_weights(shape, weights.astype(np.float64))
    by_patch = (second * active).reshape(shape.n_outputs, shape.n_patches, shape.width) @ first
    rates = _unpatched(shape, by_patch)
    columns = np.arange(shape.n_columns)
    return rates[columns % shape.n_outputs, columns].reshape(shape.n_parties, shape.n_trees)


def _batches(shape: HeadShape, n_rows: int) -> Iterator[slice]:
    """Slices of rows that fit in memory."""
    size = max(1, BATCH_NUMBERS // max(shape.n_hidden, shape.n_patches * shape.patch_size))
    return (slice(start, start + size) for start in range(0, n_rows, size))


def _hidden(shape: HeadShape, weights: Floats, outputs: Floats) -> Floats:
    """Hidden layer: float32, shape (n_rows, n_hidden)."""
    first, bias, _, _ = split_weights(shape, weights)
    patches = _patches(shape, outputs).reshape(-1, shape.patch_size)
    hidden = patches @ first.T
    hidden += bias
    np.maximum(hidden, 0, out=hidden)
    return hidden.reshape(len(outputs), shape.n_hidden)


def _patches(shape: HeadShape, outputs: Floats) -> Floats:
    """Tree outputs by patch: float32, shape (n_rows, n_patches, patch_size)."""
    if shape.kind != "cnn3":
        return outputs.reshape(len(outputs), shape.n_patches, shape.patch_size)
    padded = np.pad(outputs, ((0, 0), (shape.n_outputs, shape.n_outputs)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, shape.patch_size, axis=1)
    return windows[:, :: shape.n_outputs]


def _unpatched(shape: HeadShape, by_patch: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Sum over the patches of each column: float64, shape (n_outputs, n_columns)."""
    if shape.kind != "cnn3":
        return by_patch.reshape(shape.n_outputs, shape.n_columns)
    n_outputs, n_patches = shape.n_outputs, shape.n_patches
    padded = np.zeros((n_outputs, n_patches + KERNEL - 1, n_outputs))
    # Overlapping patches: tap ``step`` of patch p belongs to padded round p + step.
    for step in range(KERNEL):
        taps = slice(step * n_outputs, (step + 1) * n_outputs)
        padded[:, step : step + n_patches] += by_patch[..., taps]
    return padded[:, 1:-1].reshape(n_outputs, shape.n_columns)
