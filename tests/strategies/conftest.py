"""What both files of tests of Fed-EINI train."""

import pytest

from tests.encrypted import SMALL
from tests.tables import made_table


@pytest.fixture(params=[pytest.param("secureboost", marks=pytest.mark.slow), "federated-forest"])
def strategy(request):
    """Both kinds of models; by default the kind that is trained sooner."""
    return str(request.param)


@pytest.fixture
def train(settings, strategy, tmp_path, trained_once):
    """``train(objective, **more)``: a trained model of 6 trees of depth 3, and its settings."""

    def make(objective="binary:logistic", **more):
        data = tmp_path / f"{objective[:5]}.csv"
        if not data.exists():
            made_table(data, objective, n_values=40, n_rows=60)
        run = {"data": str(data), "label": "y", "objective": objective, "parties": 2}
        run |= {"max_depth": 3, "num_boost_round": 6, "align": "ordered", "columns": "random"}
        run |= {f"secureboost__{name}": value for name, value in SMALL.items()}
        run |= {"federated_forest__trees": 6, "federated_forest__max_depth": 3}
        trained = settings(strategy=strategy, **{**run, **more})
        return trained, trained_once(trained)

    return make
