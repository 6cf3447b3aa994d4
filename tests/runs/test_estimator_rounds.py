"""Estimators beside XGBoost's: models to continue, parts of a model, leaves, sparse rows."""

import pickle

import numpy as np
import pytest
import xgboost
from scipy import sparse
from sklearn.datasets import load_breast_cancer, load_diabetes, load_iris
from sklearn.exceptions import NotFittedError

from fedapp import (
    FedAvgLinearClassifier,
    FedBaggingClassifier,
    PAXClassifier,
    PAXRegressor,
    SecureBoostClassifier,
)

SHAPE = {"max_depth": 3, "learning_rate": 0.3, "reg_lambda": 1.0}
DATA = {
    "binary": (load_breast_cancer, PAXClassifier, xgboost.XGBClassifier),
    "classes": (load_iris, PAXClassifier, xgboost.XGBClassifier),
    "numbers": (load_diabetes, PAXRegressor, xgboost.XGBRegressor),
}


@pytest.fixture(params=DATA)
def pair(request):
    """Rows, labels, and estimators of fedapp and XGBoost with three rounds after two."""
    loaded, ours, theirs = DATA[request.param]
    X, y = loaded(return_X_y=True)
    first = theirs(n_estimators=2, **SHAPE).fit(X, y)
    there = theirs(n_estimators=3, **SHAPE).fit(X, y, xgb_model=first)
    here = ours(n_estimators=3, parties=1, **SHAPE).fit(X, y, xgb_model=first)
    return X, y, here, there, first


@pytest.mark.slow
@pytest.mark.by_default("classes", "numbers")
def test_fit_continues_a_model_as_xgboost_does(pair, tmp_path):
    X, y, here, there, first = pair
    predict = "predict_proba" if hasattr(there, "predict_proba") else "predict"
    expected = getattr(there, predict)(X)
    np.testing.assert_allclose(getattr(here, predict)(X), expected, rtol=0, atol=1e-4)
    first.save_model(tmp_path / "first.json")
    for model in (first.get_booster(), tmp_path / "first.json", str(tmp_path / "first.json")):
        other = type(here)(n_estimators=3, parties=1, **SHAPE).fit(X, y, xgb_model=model)
        assert other.model_text_ == here.model_text_
    further = type(here)(n_estimators=1, parties=1, **SHAPE).fit(X, y, xgb_model=here)
    assert further.get_booster().num_boosted_rounds() == 6


@pytest.mark.slow
@pytest.mark.by_default("classes")
def test_rounds_of_a_model_predict_as_in_xgboost(pair):
    X, _, here, there, _ = pair
    predict = "predict_proba" if hasattr(there, "predict_proba") else "predict"
    for part in (here, pickle.loads(pickle.dumps(here))):
        for rounds in ((0, 1), (0, 3), (2, 5), (4, 5), (0, 0), (3, 0)):
            expected = getattr(there, predict)(X, iteration_range=rounds)
            predicted = getattr(part, predict)(X, iteration_range=rounds)
            np.testing.assert_allclose(predicted, expected, rtol=0, atol=1e-4)
    for rounds in ((0, 6), (3, 2), (-1, 2)):
        rule = r"^iteration_range must be two numbers of rounds, the first <= the second <= 5, got"
        with pytest.raises(ValueError, match=rule):
            here.predict(X, iteration_range=rounds)


@pytest.mark.by_default("classes")
def test_leaves_are_numbered_as_in_xgboost(pair):
    X, _, here, there, _ = pair
    leaves = here.apply(X)
    np.testing.assert_array_equal(leaves, there.apply(X))
    trees = leaves.shape[1] // 5
    np.testing.assert_array_equal(
        here.apply(X, iteration_range=(1, 4)), leaves[:, trees : 4 * trees]
    )


@pytest.mark.by_default("csr", "coo")
@pytest.mark.parametrize("form", ["csr", "csc", "coo"])
def test_absent_entries_of_sparse_rows_are_missing_as_in_xgboost(form):
    rng = np.random.default_rng(0)
    rows = sparse.random_array((400, 8), density=0.4, format="csr", rng=rng, dtype=np.float32)
    labels = (np.asarray(rows.sum(axis=1)).ravel() > 1.5).astype(int)
    rows.data[::7] = 0  # entries of 0 are values
    rows.data[3::50] = np.nan
    there = xgboost.XGBClassifier(n_estimators=3, **SHAPE).fit(rows, labels)
    here = PAXClassifier(n_estimators=3, parties=1, **SHAPE).fit(rows.asformat(form), labels)
    expected = there.predict_proba(rows)
    np.testing.assert_allclose(here.predict_proba(rows.asformat(form)), expected, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(here.apply(rows.asformat(form)), there.apply(rows))
    assert not np.allclose(here.predict_proba(rows.toarray()), expected)


def test_rounds_of_bagging_are_those_of_all_parties():
    X, y = load_breast_cancer(return_X_y=True)
    model = FedBaggingClassifier(n_estimators=3, parties=2, **SHAPE).fit(X, y)
    assert model.apply(X).shape == (len(y), 6)
    assert model.apply(X, iteration_range=(1, 2)).shape == (len(y), 2)


@pytest.mark.slow
def test_the_best_round_counts_those_of_the_model_before():
    X, y = load_diabetes(return_X_y=True)
    first = xgboost.XGBRegressor(n_estimators=3, **SHAPE).fit(X[::2], y[::2])
    options = {"n_estimators": 30, "early_stopping_rounds": 2, **SHAPE}
    sets = [(X[1::2], y[1::2])]
    there = xgboost.XGBRegressor(**options)
    there.fit(X[::2], y[::2], eval_set=sets, xgb_model=first, verbose=False)
    here = PAXRegressor(**options, parties=1).fit(X[::2], y[::2], eval_set=sets, xgb_model=first)
    assert here.best_iteration_ == there.best_iteration > 3
    assert here.apply(X).shape == (len(y), here.best_iteration_ + 1)


def test_scores_of_rounds_and_the_best_one_have_xgboosts_names():
    X, y = load_breast_cancer(return_X_y=True)
    options = {"n_estimators": 6, "early_stopping_rounds": 2, **SHAPE}
    sets = [(X[::2], y[::2]), (X[1::2], y[1::2])]
    there = xgboost.XGBClassifier(**options, eval_metric="logloss")
    there.fit(*sets[0], eval_set=sets, verbose=False)
    here = PAXClassifier(**options, parties=1).fit(*sets[0], eval_set=sets)
    assert here.best_iteration == there.best_iteration
    found, expected = here.evals_result(), there.evals_result()
    assert list(found) == list(expected) == ["validation_0", "validation_1"]
    for name, scores in expected.items():
        np.testing.assert_allclose(found[name]["logloss"], scores["logloss"], rtol=0, atol=1e-5)


def test_scores_of_rounds_are_refused_where_there_are_none():
    X, y = load_breast_cancer(return_X_y=True)
    model = PAXClassifier(n_estimators=1, parties=2)
    with pytest.raises(NotFittedError):
        model.evals_result()
    model.fit(X, y)
    assert not hasattr(model, "best_iteration")
    with pytest.raises(ValueError, match=r"^evals_result must be of a fit that scored its rounds"):
        model.evals_result()


def test_what_has_no_rounds_refuses_them():
    X, y = load_breast_cancer(return_X_y=True)
    linear = FedAvgLinearClassifier(rounds=1, parties=2).fit(X, y)
    with pytest.raises(ValueError, match=r"^apply must be of boosted trees, got another model$"):
        linear.apply(X)
    with pytest.raises(ValueError, match=r"^iteration_range must be omitted for other models than"):
        linear.predict(X, iteration_range=(0, 1))
    first = xgboost.XGBClassifier(n_estimators=1, **SHAPE).fit(X, y)
    with pytest.raises(ValueError, match=r"^xgb_model must be omitted for fedavg-linear, which"):
        linear.fit(X, y, xgb_model=first)
    rule = "^xgb_model must be omitted where parties have different columns, whose model is divided"
    with pytest.raises(ValueError, match=rule):
        SecureBoostClassifier(parties=2).fit(X, y, xgb_model=first)
    rule = r"^xgb_model must be a path, a fitted estimator or an xgboost.Booster, got list$"
    with pytest.raises(ValueError, match=rule):
        PAXClassifier(parties=2).fit(X, y, xgb_model=[1])
