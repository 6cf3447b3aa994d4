"""Labels of insurance claims, drawn from Poisson and gamma distributions whose mean depends on the
columns of a table."""

import numpy as np


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
