"""SecureBoost in a Flower app: hospitals with different columns of the same patients.

``flwr run simulations/examples/secureboost --stream``
"""

from typing import Any

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from sklearn.datasets import load_breast_cancer

from fedapp.client_app import SiteApp
from fedapp.strategies import SecureBoost

server = ServerApp()


@server.main()
def main(grid: Grid, context: Context) -> None:
    """Train, and print the scores."""
    strategy = SecureBoost(num_boost_round=context.run_config["rounds"], max_depth=3)
    result = strategy.start(grid, initial_arrays=ArrayRecord())
    print(list(result.evaluate_metrics_clientapp.values())[-1])


def columns(hospital: int, n_hospitals: int) -> dict[str, Any]:
    """Columns of one hospital: every ``n_hospitals``-th; the first hospital has the label."""
    data = load_breast_cancer()
    names, values = data.feature_names, data.data.T
    table = dict(zip(names[hospital::n_hospitals], values[hospital::n_hospitals], strict=True))
    table["patient"] = [f"patient {number}" for number in range(len(data.target))]
    return table if hospital else {**table, "benign": data.target}


client = SiteApp(table=columns, label="benign", id="patient")
