"""PAX and SecureBoost in an app of your own, on tables of your own.

``python -m simulations.examples.own_app`` runs both in Flower's simulation, three hospitals with
different patients, then two with different columns of the same patients. In an app's folder the
two functions marked below are its components ``serverapp`` and ``clientapp``.
"""

from __future__ import annotations

import numpy as np
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Result
from flwr.simulation import run_simulation
from sklearn.datasets import load_breast_cancer

from fedapp.client_app import SiteApp
from strategies import PAX, SecureBoost
from strategies.base import TreeStrategy

Table = dict[str, np.ndarray]


def patients(hospital: int, n_hospitals: int) -> Table:
    """Every ``n_hospitals``-th row, with all columns."""
    data = load_breast_cancer()
    rows = slice(hospital, None, n_hospitals)
    table = dict(zip(data.feature_names, data.data[rows].T, strict=True))
    return {**table, "benign": data.target[rows]}


def columns(hospital: int, n_hospitals: int) -> Table:
    """All rows, with every ``n_hospitals``-th column; the first hospital has the label."""
    data = load_breast_cancer()
    own = slice(hospital, None, n_hospitals)
    table = dict(zip(data.feature_names[own], data.data.T[own], strict=True))
    table["patient"] = np.arange(len(data.target))
    return table if hospital else {**table, "benign": data.target}


def train(strategy: TreeStrategy, app: SiteApp, n_parties: int) -> Result:
    """Have Flower simulate the parties."""
    server, results = ServerApp(), list[Result]()  # serverapp

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        results.append(strategy.start(grid, initial_arrays=ArrayRecord()))

    run_simulation(server, app, n_parties)
    return results[0]


def main() -> None:
    """Train both and print their scores."""
    rows = SiteApp(table=patients, label="benign")  # clientapp
    print(train(PAX(num_boost_round=20, eta=0.3), rows, n_parties=3).evaluate_metrics_clientapp)
    parts = SiteApp(table=columns, label="benign", id="patient")
    boost = SecureBoost(num_boost_round=5, max_depth=3)
    print(train(boost, parts, n_parties=2).evaluate_metrics_clientapp)


if __name__ == "__main__":
    main()
