"""Tables of tests: columns, files of rows, and their parts by rows and by columns."""

import numpy as np
from pyarrow import csv
from pyarrow import table as arrow_table

from fedapp.data import scratch
from fedapp.data.datasets import read_source
from fedapp.trees import predict


def write_rows(path, columns):
    """A CSV of these columns, NaN as nothing."""
    rows = zip(*columns.values(), strict=True)
    lines = [",".join("" if value != value else str(value) for value in row) for row in rows]
    path.write_text("\n".join([",".join(columns), *lines]) + "\n")
    return path


def made_columns(objective, n_rows=400, seed=3):
    """Six columns with ties and missing values, all of which say something of the label y."""
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 40, (n_rows, 6)).astype(np.float64)
    values[rng.random(values.shape) < 0.1] = np.nan
    signal = np.nan_to_num(values) @ [1, -1, 1, -1, 1, 1] - 39 + rng.normal(0, 3, n_rows)
    labels = {
        "binary:logistic": (signal > 0).astype(int),
        "multi:softprob": np.digitize(signal, [-12, 12]),
        "reg:squarederror": signal.round(3),
    }[objective]
    return {**dict(zip("abcdef", values.T, strict=True)), "y": labels}


def by_parts(monkeypatch):
    """From now on, tables are larger than memory, and read some rows at a time."""
    monkeypatch.setattr(scratch, "LARGEST", 64)
    monkeypatch.setattr(scratch, "BATCH_BYTES", 2000)
    monkeypatch.setattr(predict, "BATCH_ROWS", 7)


def trial(path, n_rows=500, seed=5):
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


def registry(path, n_rows=600, seed=6):
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


def csv_columns(path, drop=""):
    """Columns of a CSV as texts, but for one."""
    names, *rows = [line.split(",") for line in path.read_text().splitlines()]
    return {name: [row[at] for row in rows] for at, name in enumerate(names) if name != drop}


def deal_columns(columns, folder, shares):
    """Files of a table's columns, ``shares[site]`` of which each site has, by site."""
    return {
        name: write_rows(folder / f"{name}.csv", {key: columns[key] for key in share})
        for name, share in shares.items()
    }


def weighted_copy(name, path):
    """A registry table as CSV, with labels y, sample weights w and the margins m of a prior score,
    which is the first column standardised."""
    table = read_source(name)
    weights = np.random.default_rng(7).uniform(0.5, 2, table.n_rows).astype(np.float32)
    columns = {**dict(zip(table.columns, table.values.T, strict=True)), "y": table.labels}
    first = np.nan_to_num(table.values[:, 0].astype(np.float64))
    columns |= {"m": (first - first.mean()) / first.std()}
    csv.write_csv(arrow_table({**columns, "w": weights}), path)
    return path


def claims(objective, values, seed=11):
    """Labels of an objective, as of insurance claims: drawn from Poisson and gamma distributions
    whose means follow the first columns."""
    rng = np.random.default_rng(seed)
    known = np.nan_to_num(values[:, :4].astype(np.float64))
    ranks = known.argsort(axis=0).argsort(axis=0) / len(known)
    means = np.exp(ranks @ [0.8, -0.6, 0.5, -0.4] - 0.5)
    counts = rng.poisson(means)
    amounts = rng.gamma(2.0, means / 2) + 0.01
    return {
        "count:poisson": counts.astype(np.float64),
        "reg:gamma": amounts,
        "reg:tweedie": np.where(counts > 0, counts * amounts, 0.0),
        "reg:logistic": amounts / (1 + amounts),
        "reg:squaredlogerror": amounts - 0.5,
        "reg:pseudohubererror": amounts,
        "binary:hinge": (amounts > 0.8).astype(np.float64),
        **dict.fromkeys(
            ("survival:aft", "survival:cox"), np.where(amounts < 1.5, amounts, -amounts)
        ),
    }[objective]
