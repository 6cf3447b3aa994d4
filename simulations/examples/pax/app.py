"""PAX in a Flower app: hospitals with different patients.

``flwr run simulations/examples/pax --stream``
"""

from typing import Any

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from sklearn.datasets import load_breast_cancer

from fedapp.client_app import SiteApp
from fedapp.strategies import PAX

server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Train, and print the scores."""
    strategy = PAX(num_boost_round=context.run_config["rounds"], eta=0.3, bins="equal")
    result = strategy.start(grid, initial_arrays=ArrayRecord())
    print(list(result.evaluate_metrics_clientapp.values())[-1])


def patients(hospital: int, n_hospitals: int) -> dict[str, Any]:
    """Rows of one hospital: every ``n_hospitals``-th, with all columns."""
    data = load_breast_cancer()
    table = dict(zip(data.feature_names, data.data[hospital::n_hospitals].T, strict=True))
    return {**table, "benign": data.target[hospital::n_hospitals]}


client = SiteApp(table=patients, label="benign")
