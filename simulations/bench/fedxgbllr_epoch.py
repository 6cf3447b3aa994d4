"""What an epoch of FedXGBllr's head takes, and how much memory 50,000 rows x 500 trees.

Seconds: an epoch of ``fit_head`` against a plain training loop with torch's own layers, over the
same tensors in the same order; both must end in the same weights. Memory: one party that has all
rows goes from its table to its finished model in a new process; the peak includes the server of the
run and all libraries.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import torch
from rich.console import Console
from torch import nn

from fedapp.runs.engines import run_local
from fedapp.settings import load_settings
from fedapp.trees.head import HeadRows, Training, fit_head
from fedapp.trees.stacked import Floats, HeadShape, Kind, initial_weights, split_weights
from simulations.bench import apart, peak_bytes, tell

N_ROWS, N_TREES, N_COLUMNS = 50_000, 500, 20
N_PARTIES, CHANNELS, BATCH, SEED = 5, 64, 64, 42
REPEATS, EPOCHS = 5, 1
WORST_RATIO, MOST_BYTES = 1.2, 1 << 30
KINDS: tuple[Kind, ...] = ("cnn", "cnn3", "fcnn")
# 64 channels at each of 500 trees are 32,000 numbers a row.
PARTS_OF: dict[Kind, int] = {"cnn": 1, "cnn3": 20, "fcnn": 1}

console = Console()


class PlainHead(nn.Module):
    """The paper's heads in torch's layers."""

    def __init__(self, shape: HeadShape, weights: Floats) -> None:
        super().__init__()
        self.flat = shape.kind == "fcnn"
        if self.flat:
            self.first: nn.Module = nn.Linear(shape.n_columns, shape.width)
        else:
            stride = shape.patch_size if shape.kind == "cnn" else 1
            padding = 0 if shape.kind == "cnn" else 1
            self.first = nn.Conv1d(1, shape.channels, shape.patch_size, stride, padding)
        self.second = nn.Linear(shape.n_hidden, 1)
        layers = list(split_weights(shape, weights))
        if not self.flat:
            # torch flattens the hidden layer channel by channel, fedapp party by party.
            by_place = layers[2].reshape(1, shape.n_patches, shape.channels)
            layers[2] = by_place.transpose(0, 2, 1)
        for parameter, values in zip(self.parameters(), layers, strict=True):
            parameter.data = torch.tensor(np.ascontiguousarray(values)).reshape(parameter.shape)

    def forward(self, outputs: torch.Tensor) -> torch.Tensor:  # margins, (n_rows, 1)
        hidden = self.first(outputs if self.flat else outputs[:, None])
        margins: torch.Tensor = self.second(torch.relu(hidden).flatten(1))
        return margins

    def biases(self) -> Floats:
        """Biases of both layers, the parameters whose order is the same as in fedapp's head."""
        return np.concatenate([p.detach().numpy() for p in self.parameters() if p.ndim == 1])


def plain_epochs(shape: HeadShape, weights: Floats, rows: HeadRows) -> Floats:
    """Train by the plain loop; return the biases."""
    head = PlainHead(shape, weights)
    outputs, labels = torch.from_numpy(rows.outputs), torch.from_numpy(rows.labels)
    adam = torch.optim.Adam(head.parameters(), lr=0.001, betas=(0.5, 0.999))
    rng = np.random.default_rng(SEED)
    for _ in range(EPOCHS):
        order = torch.from_numpy(rng.permutation(len(labels)))
        for start in range(0, len(order), BATCH):
            batch = order[start : start + BATCH]
            margins = head(outputs[batch])[:, 0]
            loss = nn.functional.binary_cross_entropy_with_logits(margins, labels[batch])
            adam.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            adam.step()
    return head.biases()


def our_epochs(shape: HeadShape, weights: Floats, rows: HeadRows) -> Floats:
    """Train by ``fit_head``; return the biases."""
    training = Training(EPOCHS, BATCH, 0.001, 0.5, 0.999, 0, "cpu")
    rng = np.random.default_rng(SEED)
    fitted, _ = fit_head("binary:logistic", shape, weights, rows, training, rng)
    _, first, _, second = split_weights(shape, fitted)
    return np.concatenate((first, second))


def measure_epoch(kind: Kind, all_rows: int) -> dict[str, float]:
    """Median seconds of an epoch of each loop, run in turn after a warm-up."""
    torch.set_num_threads(1)
    shape = HeadShape(kind, N_PARTIES, N_TREES // N_PARTIES, 1, CHANNELS)
    rng, n_rows = np.random.default_rng(SEED), all_rows // PARTS_OF[kind]
    outputs = rng.normal(scale=0.1, size=(n_rows, N_TREES)).astype(np.float32)
    labels = (outputs[:, :50].sum(axis=1) > 0).astype(np.float32)
    ones, zero, one = np.ones_like(labels), np.zeros(1, np.float32), np.float32(1)
    rows = HeadRows(outputs, labels, ones, zero, one)
    weights = initial_weights(shape, SEED)
    loops = (our_epochs, plain_epochs)
    # Compare after ten steps: over an epoch, rounding errors can move a row across a ReLU's kink.
    n = 10 * BATCH
    few = HeadRows(outputs[:n], labels[:n], ones[:n], zero, one)
    ours, plain = (loop(shape, weights, few) for loop in loops)
    np.testing.assert_allclose(ours, plain, atol=1e-4)
    assert np.abs(ours).max() > 1e-3
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(REPEATS):
        for loop, seconds in zip(loops, times, strict=True):
            start = time.perf_counter()
            loop(shape, weights, rows)
            seconds.append(time.perf_counter() - start)
    ours_took, plain_took = map(statistics.median, times)
    ratio = ours_took / plain_took
    console.print(
        f"{kind}: {ours_took:.3f} s an epoch of {n_rows} rows, plain torch {plain_took:.3f} s, "
        f"ratio {ratio:.2f}"
    )
    return {"rows": n_rows, "seconds": ours_took, "plain_seconds": plain_took, "ratio": ratio}


def train_party(n_rows: int) -> dict[str, Any]:
    """Peak memory and seconds of a run of one party with all rows, in this process."""
    with tempfile.TemporaryDirectory() as folder:
        rng = np.random.default_rng(SEED)
        values = rng.standard_normal((N_COLUMNS, n_rows), dtype=np.float32)
        labels = values[0] - 0.5 * values[1] + values[2] * values[3] > rng.normal(size=n_rows)
        columns = {f"x{place}": column for place, column in enumerate(values)}
        path = Path(folder) / "rows.parquet"
        pa.parquet.write_table(pa.table({**columns, "label": labels.astype(np.float64)}), path)
        del values, columns
        config = {"strategy": "fedxgbllr", "data": str(path), "label": "label", "parties": 1}
        config |= {"test-fraction": 0.0, "valid-fraction": 0.0, "run-dir": f"{folder}/run"}
        config |= {"fedxgbllr.trees": N_TREES, "fedxgbllr.rounds": 2, "fedxgbllr.epochs": 1}
        summary = run_local(load_settings({**config, "seed": SEED})).summary
    return {"peak_bytes": peak_bytes(), "seconds": summary["seconds"]["train"]}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=N_ROWS)
    n_rows = parser.parse_args(words).rows
    memory = apart(train_party, n_rows)
    within = "below" if memory["peak_bytes"] < MOST_BYTES else "ABOVE"
    peak = f"peak memory {memory['peak_bytes'] / 2**20:.0f} MiB"
    console.print(f"{peak}, {within} {MOST_BYTES / 2**30:.0f} GiB")
    epochs = {kind: measure_epoch(kind, n_rows) for kind in KINDS}
    worst = max(epoch["ratio"] for epoch in epochs.values())
    within = "within" if worst <= WORST_RATIO else "ABOVE"
    console.print(f"the worst ratio is {within} {WORST_RATIO}")
    tell(
        "fedxgbllr_epoch",
        ("fedapp", "torch", "xgboost", "numpy"),
        rows=n_rows,
        trees=N_TREES,
        parties=N_PARTIES,
        batch=BATCH,
        seed=SEED,
        repeats=REPEATS,
        outputs_bytes=4 * n_rows * N_TREES,
        **memory,
        epochs=epochs,
    )


if __name__ == "__main__":
    main()
