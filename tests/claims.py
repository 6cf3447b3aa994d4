"""Labels of insurance claims, simulated from a fixed seed over the columns of a real table.

There is no public table of claims at hand, so their numbers and amounts are drawn: from Poisson and
gamma distributions whose mean depends on the columns.
"""

import numpy as np
from pyarrow import csv, table

from fedapp.data.datasets import read_source


def claims(objective, values, seed=11):
    """Labels of an objective, shape (n_rows,), that follow the first columns."""
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


def claims_table(path, data, objective, n_rows=6000):
    """A CSV of the first rows of a registry set with such a label y, an exposure and its logarithm
    ``log_exposure``, and no other columns than the set's."""
    values = read_source(data).values[:n_rows]
    exposures = np.random.default_rng(12).uniform(0.1, 1.0, len(values))
    columns = {f"c{place}": column for place, column in enumerate(values.T)}
    labels = {"y": claims(objective, values), "log_exposure": np.log(exposures)}
    csv.write_csv(table({**columns, **labels}), path)
    return path
