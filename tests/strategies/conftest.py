"""What tests of prediction train."""

import pytest

from tests.encrypted import SMALL_KEY
from tests.tables import made_columns, write_rows


@pytest.fixture
def divided(settings, tmp_path, trained_once):
    """``divided(strategy, objective, n_rows, **more)``: settings and folder of a short run, whose
    model is divided."""

    def make(strategy="secureboost", objective="binary:logistic", n_rows=300, **more):
        data = write_rows(tmp_path / f"{objective[:5]}.csv", made_columns(objective, n_rows))
        run = {"data": str(data), "label": "y", "objective": objective, "parties": 2}
        run |= {"max_depth": 3, "num_boost_round": 3, "align": "ordered", **SMALL_KEY}
        run |= {"federated_forest__trees": 5, "federated_forest__max_depth": 3}
        trained = settings(strategy=strategy, **{**run, **more})
        return trained, trained_once(trained)

    return make


@pytest.fixture(params=[pytest.param("secureboost", marks=pytest.mark.slow), "federated-forest"])
def strategy(request):
    """Both kinds of models; by default the kind that is trained sooner."""
    return str(request.param)


@pytest.fixture
def train(divided, strategy):
    """``train(objective, **more)``: a model of 6 trees of random columns, and its settings."""

    def make(objective="binary:logistic", **more):
        few = {"num_boost_round": 6, "federated_forest__trees": 6, "columns": "random"}
        return divided(strategy, objective, 60, **{**few, **more})

    return make
