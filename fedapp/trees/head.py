"""Train the head of a stacked model with torch.

Nothing else of the house imports torch, so it stays optional: who trains imports this file late."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fedapp.arrays import Floats, Ints
from fedapp.trees.losses import PLAIN, REGRESSION, LossParameters, Objective
from fedapp.trees.stacked import HeadShape, split_weights

WATCHED_ROWS = 4096  # validation rows per batch


@dataclass(frozen=True, slots=True)
class Training:
    """Settings of training a head."""

    epochs: int
    batch_size: int  # rows per step; the last batch of an epoch may be smaller
    # learning_rate, beta1, beta2: of Adam
    learning_rate: float
    beta1: float
    beta2: float
    patience: int  # epochs without a lower validation loss before training stops; 0: never
    device: str  # ``cpu``, or ``cuda``, used if torch finds it


@dataclass(frozen=True, slots=True, eq=False)
class HeadRows:
    """Rows to train on."""

    outputs: Floats  # (n_rows, n_columns): of every tree; may be memory-mapped
    labels: Floats  # (n_rows,)
    weights: Floats  # (n_rows,), >= 0, with a sum > 0
    base_margin: Floats  # (n_outputs,): added to the head's margins
    unit: np.float32  # inputs and outputs of the head are divided by it, see ``StackedModel``


def fit_head(
    objective: Objective,
    shape: HeadShape,
    weights: Floats,
    rows: HeadRows,
    training: Training,
    rng: np.random.Generator,
    held_back: HeadRows | None = None,
    parameters: LossParameters = PLAIN,
) -> tuple[Floats, float]:
    """Continue training a head by Adam with new moments.

    Every epoch permutes the rows once and gathers them batch by batch.

    Parameters
    ----------
    weights : float32, shape (n_weights,).
    held_back : validation rows for ``training.patience``; epoch 0 is the given head.

    Returns
    -------
    Weights, float32, shape (n_weights,), and the mean loss of the last epoch (0 without epochs).
    """
    # A step on 64 rows is too small for several threads; one gives the same bits everywhere.
    torch.set_num_threads(1)
    on_gpu = training.device == "cuda" and torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    layers = [
        torch.tensor(layer, device=device, requires_grad=True)
        for layer in split_weights(shape, weights)
    ]
    adam = torch.optim.Adam(
        layers, lr=training.learning_rate, betas=(training.beta1, training.beta2), fused=True
    )
    measure = objective, parameters.tweedie_variance_power
    batches = _Batches(measure, shape, rows, training.batch_size, device)
    watched = None
    if held_back is not None and training.patience:
        watched = _Batches(measure, shape, held_back, WATCHED_ROWS, device)
    # The weights with the lowest validation loss so far, and how many epochs ago they were.
    best, lowest = _flat(layers), watched.mean_loss(layers) if watched else 0.0
    loss, since = 0.0, 0
    for _ in range(training.epochs):
        loss = _epoch(batches, layers, adam, rng.permutation(len(rows.labels)))
        if watched is None:
            continue
        watched_loss, since = watched.mean_loss(layers), since + 1
        if watched_loss < lowest:
            best, lowest, since = _flat(layers), watched_loss, 0
        if since >= training.patience:
            break
    return best if watched else _flat(layers), loss


def _epoch(
    batches: _Batches,
    layers: list[Tensor],
    adam: torch.optim.Optimizer,
    order: Ints,
) -> float:
    """One pass over the rows in this order; returns the mean loss."""
    total = torch.zeros((), device=layers[0].device)
    for start in range(0, len(order), batches.size):
        rows = order[start : start + batches.size]
        loss = batches.loss(layers, rows)
        adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        adam.step()
        total += loss.detach() * len(rows)
    return float(total) / len(order)


def _flat(layers: list[Tensor]) -> Floats:
    """A copy of the weights, float32, shape (n_weights,)."""
    flat: Floats = torch.cat([layer.detach().flatten() for layer in layers]).cpu().numpy()
    return flat


def forward(shape: HeadShape, layers: list[Tensor], outputs: Tensor) -> Tensor:
    """The head's margins; see ``fedapp.trees.stacked``."""
    first, bias, second, last = layers
    if shape.kind == "cnn3":
        # Patches overlap: a convolution avoids copying them. Its output has channels first.
        k = shape.n_outputs
        by_patch = second.view(-1, shape.n_patches, shape.width)
        hidden = functional.conv1d(outputs[:, None], first[:, None], bias, stride=k, padding=k)
        second = by_patch.transpose(1, 2).flatten(1)
        return functional.linear(hidden.relu_().flatten(1), second, last)
    patches = outputs.view(len(outputs), shape.n_patches, shape.patch_size)
    hidden = functional.linear(patches, first, bias).relu_().flatten(1)
    return functional.linear(hidden, second, last)


class _Batches:
    """Batches of rows, gathered into one reused buffer, and their loss."""

    def __init__(
        self,
        measure: tuple[Objective, float],
        shape: HeadShape,
        rows: HeadRows,
        size: int,
        device: torch.device,
    ) -> None:
        self.n_rows, self.size = len(rows.labels), min(size, len(rows.labels))
        (self._objective, self._power), self._shape = measure, shape
        self._rows, self._device = rows, device
        self._gathered = np.empty((self.size, rows.outputs.shape[1]), dtype=np.float32)
        self._base_margin = torch.tensor(rows.base_margin, device=device)
        labels = rows.labels
        if self._objective == REGRESSION:
            labels = (labels - rows.base_margin[0]) / rows.unit  # squared errors are in unit^2
        self._labels = torch.tensor(labels, device=device)
        mean = rows.weights.mean(dtype=np.float64)
        self._scales = torch.tensor((rows.weights / mean).astype(np.float32), device=device)

    def loss(self, layers: list[Tensor], rows: Ints) -> Tensor:
        """Mean loss of a batch; each row is weighted relative to the mean weight of all rows."""
        places = torch.from_numpy(rows).to(self._device)
        labels = self._labels[places]
        scales = self._scales[places]
        outputs = self._gathered[: len(rows)]
        np.take(self._rows.outputs, rows, axis=0, out=outputs, mode="clip")
        if self._rows.unit != 1:
            np.divide(outputs, self._rows.unit, out=outputs)
        margins = forward(self._shape, layers, torch.from_numpy(outputs).to(self._device))
        totals = margins + self._base_margin
        if self._objective in ("binary:logistic", "reg:logistic"):
            return functional.binary_cross_entropy_with_logits(totals[:, 0], labels, weight=scales)
        if self._objective == "multi:softprob":
            losses = functional.cross_entropy(totals, labels.long(), reduction="none")
            return (losses * scales).mean()
        if self._objective == REGRESSION:
            return ((margins[:, 0] - labels).square() * scales).mean()
        return (self._deviance(totals[:, 0], labels) * scales).mean()

    def mean_loss(self, layers: list[Tensor]) -> float:
        """Mean loss of all rows."""
        total = 0.0
        with torch.no_grad():
            for start in range(0, self.n_rows, self.size):
                rows = np.arange(start, min(start + self.size, self.n_rows))
                total += float(self.loss(layers, rows)) * len(rows)
        return total / self.n_rows

    def _deviance(self, margins: Tensor, labels: Tensor) -> Tensor:
        """Negative log-likelihood of labels with an exponential mean, up to a constant."""
        if self._objective == "count:poisson":
            return margins.exp() - labels * margins
        if self._objective == "reg:gamma":
            return margins + labels * (-margins).exp()
        below, above = 1 - self._power, 2 - self._power
        return (above * margins).exp() / above - labels * (below * margins).exp() / below
