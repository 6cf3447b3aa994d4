"""Two made clinical tables of survival times, by hazards that are stated here."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.pooled import write_rows


def trial(path: Path, n_rows: int = 500, seed: int = 5) -> Path:
    """A trial: Weibull times of two arms, a fixed end of follow-up, and weights."""
    rng = np.random.default_rng(seed)
    columns = {
        "age": rng.integers(40, 80, n_rows).astype(float),
        "stage": rng.integers(1, 5, n_rows).astype(float),
        "treated": rng.integers(0, 2, n_rows).astype(float),
        "marker": rng.normal(0, 1, n_rows).round(1),
    }
    columns["marker"][rng.random(n_rows) < 0.15] = np.nan
    signal = 0.03 * (columns["age"] - 60) + 0.5 * columns["stage"] - 0.8 * columns["treated"]
    years = 2.5 * (-np.log(rng.random(n_rows)) / np.exp(signal)) ** (1 / 1.4)
    seen = years < 2
    years = np.minimum(years, 2).round(3) + 0.001
    weights = rng.choice([0.5, 1.0, 2.0], n_rows)
    return write_rows(path, {**columns, "time": years, "died": seen.astype(int), "w": weights})


def registry(path: Path, n_rows: int = 600, seed: int = 6) -> Path:
    """A registry: log-normal times in whole months, so with ties; most rows are censored."""
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 9, (n_rows, 6)).astype(float)
    values[rng.random(values.shape) < 0.1] = np.nan
    signal = np.nan_to_num(values) @ [0.2, -0.2, 0.1, -0.1, 0.1, 0]
    times = np.exp(3.5 + signal + 0.7 * rng.normal(size=n_rows))
    ends = rng.uniform(1, 40, n_rows)
    columns = {**dict(zip("abcdef", values.T, strict=True)), "w": rng.uniform(0.2, 3, n_rows)}
    columns["time"] = np.maximum(np.minimum(times, ends).round(), 1)
    return write_rows(path, {**columns, "died": (times <= ends).astype(int)})
