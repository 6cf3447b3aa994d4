"""SecureBoost's objectives, steps, weights and constraints are XGBoost's, on real rows.

The labels of claims are simulated over real columns: see ``tests.claims``.
"""

import pytest

from fedapp.data.datasets import read_source
from fedapp.records.document import load
from fedapp.runs.local import run_local
from fedapp.trees.model import Ensemble
from tests.claims import claims_table
from tests.pooled import Pooled, assert_xgboosts
from tests.reference import compare_trees
from tests.tables import write_rows
from tests.trees.test_exactness import HELD

SHORT = {"num_boost_round": 2, "max_depth": 3, "max_bin": 8}
LONG = {"num_boost_round": 4, "max_depth": 5, "max_bin": 32}


def sizes():
    """Few rows by default, and many in the slow tests."""
    many = pytest.param(4000, LONG, marks=pytest.mark.slow, id="many rows")
    return pytest.mark.parametrize(
        ("n_rows", "size"), [pytest.param(400, SHORT, id="few rows"), many]
    )


@pytest.fixture
def real(real_data, vertical, tmp_path):
    """``real(data, n_rows, **settings)``: a run on the first rows of a registry set; label y."""

    def make(data, n_rows, **more):
        table = read_source(data)
        assert table.labels is not None
        columns = dict(zip(table.columns, table.values[:n_rows].T, strict=True))
        path = write_rows(tmp_path / "rows.csv", {**columns, "y": table.labels[:n_rows]})
        return vertical(**{"data": str(path), "label": "y", "columns": "random", **more})

    return make


@pytest.mark.by_default("give-me-some-credit-reg:tweedie-few rows")
@sizes()
@pytest.mark.parametrize(
    ("data", "objective"),
    [
        ("default-credit", "count:poisson"),
        ("default-credit", "reg:gamma"),
        ("give-me-some-credit", "reg:tweedie"),
        ("give-me-some-credit", "reg:logistic"),
        ("default-credit", "reg:squaredlogerror"),
        ("default-credit", "binary:hinge"),
        pytest.param("give-me-some-credit", "count:poisson", marks=pytest.mark.slow),
        pytest.param("give-me-some-credit", "reg:gamma", marks=pytest.mark.slow),
        pytest.param("default-credit", "reg:tweedie", marks=pytest.mark.slow),
        pytest.param("default-credit", "reg:logistic", marks=pytest.mark.slow),
    ],
)
def test_claims_over_real_columns_grow_xgboosts_trees(
    real_data, vertical, tmp_path, data, objective, n_rows, size
):
    path = claims_table(tmp_path / "claims.csv", data, objective, n_rows)
    given = {"label": "y", "drop_columns": "log_exposure", "objective": objective}
    parties = 2 if n_rows < 1000 else 3
    run = vertical(data=str(path), columns="random", parties=parties, **given, **size)
    assert_xgboosts(run_local(run), Pooled(run))


@pytest.mark.by_default("default-credit-binary:logistic-more4-few rows")
@sizes()
@pytest.mark.parametrize(
    ("data", "objective", "more"),
    [
        ("abalone", "count:poisson", {}),
        ("abalone", "reg:gamma", {}),
        ("abalone", "reg:tweedie", {"tweedie-variance-power": 1.2}),
        ("space-ga", "reg:pseudohubererror", {"huber-slope": 0.5}),
        ("default-credit", "binary:logistic", {"scale-pos-weight": 3.5}),
        ("give-me-some-credit", "binary:logistic", {"scale-pos-weight": 0.4}),
        ("default-credit", "binary:logistic", {"max-delta-step": 0.4, "alpha": 0.2}),
        ("waveform", "multi:softprob", {"max-delta-step": 0.4}),
    ],
)
def test_objectives_and_steps_are_xgboosts_on_real_rows(real, data, objective, more, n_rows, size):
    run = real(data, n_rows, objective=objective, **size, **more)
    assert_xgboosts(run_local(run), Pooled(run))


@pytest.mark.by_default("*abalone-reg:squarederror-few rows")
@sizes()
@pytest.mark.parametrize(
    ("data", "objective"),
    [("default-credit", "binary:logistic"), ("abalone", "reg:squarederror")],
)
@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param(("monotone",), marks=pytest.mark.slow),
        pytest.param(("interaction",), marks=pytest.mark.slow),
        ("monotone", "interaction"),
    ],
    ids=",".join,
)
def test_constraints_hold_as_in_xgboost_on_real_rows(real, data, objective, kinds, n_rows, size):
    held = {f"{kind}-constraints": HELD[data][f"{kind}-constraints"] for kind in kinds}
    # Both of two parties have columns that are worth a split under each kind of constraints.
    given = {**size, **held, "columns": "even", "parties": 2, "max_bin": 32}
    run = real(data, n_rows, objective=objective, **given)
    folder, whole = run_local(run), Pooled(run)
    assert_xgboosts(folder, whole)
    free = Pooled(run.model_copy(update={f"{kind}_constraints": "" for kind in kinds}))
    assert compare_trees(load(folder.path / "model.json", Ensemble), free.booster()).differing
