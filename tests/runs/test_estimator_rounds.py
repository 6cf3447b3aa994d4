"""Estimators beside XGBoost's: models to continue, parts of a model, leaves, sparse rows."""

import pickle
from functools import partial

import numpy as np
import pytest
import xgboost
from scipy import sparse
from sklearn.datasets import load_breast_cancer, load_iris
from sklearn.exceptions import NotFittedError

from fedapp import (
    FedAvgLinearClassifier,
    FedBaggingClassifier,
    PAXClassifier,
    SecureBoostClassifier,
)

SHAPE = {"max_depth": 3, "learning_rate": 0.3, "reg_lambda": 1.0}


def test_a_model_is_continued_and_its_rounds_predict_as_in_xgboost(tmp_path):
    ours, theirs = PAXClassifier, xgboost.XGBClassifier
    X, y = load_iris(return_X_y=True)
    first = theirs(n_estimators=2, **SHAPE).fit(X, y)
    there = theirs(n_estimators=3, **SHAPE).fit(X, y, xgb_model=first)
    here = ours(n_estimators=3, parties=1, **SHAPE).fit(X, y, xgb_model=first)
    for part in (here, pickle.loads(pickle.dumps(here))):
        for rounds in (None, (0, 1), (0, 3), (2, 5), (4, 5), (0, 0), (3, 0)):
            expected = there.predict_proba(X, iteration_range=rounds)
            predicted = part.predict_proba(X, iteration_range=rounds)
            np.testing.assert_allclose(predicted, expected, rtol=0, atol=1e-4)
    rule = r"^iteration_range must be two numbers of rounds, the first <= the second <= 5, got"
    for rounds in ((0, 6), (3, 2), (-1, 2)):
        with pytest.raises(ValueError, match=rule):
            here.predict(X, iteration_range=rounds)
    leaves = here.apply(X)
    np.testing.assert_array_equal(leaves, there.apply(X))
    n_trees = leaves.shape[1] // 5
    of_rounds = here.apply(X, iteration_range=(1, 4))
    np.testing.assert_array_equal(of_rounds, leaves[:, n_trees : 4 * n_trees])
    first.save_model(path := tmp_path / "first.json")
    for model in (first.get_booster(), path, str(path)):
        other = ours(n_estimators=3, parties=1, **SHAPE).fit(X, y, xgb_model=model)
        assert other.model_text_ == here.model_text_
    further = ours(n_estimators=1, parties=1, **SHAPE).fit(X, y, xgb_model=here)
    assert further.get_booster().num_boosted_rounds() == 6


@pytest.mark.parametrize("form", ["csr", "coo"])
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


def test_what_has_no_rounds_or_scores_refuses_them():
    X, y = load_breast_cancer(return_X_y=True)
    pax = PAXClassifier(n_estimators=1, parties=2)
    with pytest.raises(NotFittedError):
        pax.evals_result()
    first = xgboost.XGBClassifier(n_estimators=1, **SHAPE).fit(X, y)
    linear = FedAvgLinearClassifier(rounds=1, parties=2).fit(X, y)
    fitted, vertical = pax.fit(X, y), SecureBoostClassifier(parties=2)
    assert not hasattr(fitted, "best_iteration")
    for call, rule in {
        fitted.evals_result: "evals_result must be of a fit that scored its rounds",
        partial(linear.apply, X): "apply must be of boosted trees, got another model$",
        partial(linear.predict, X, iteration_range=(0, 1)): (
            "iteration_range must be omitted for other models than"
        ),
        partial(linear.fit, X, y, xgb_model=first): (
            "xgb_model must be omitted for fedavg-linear, which"
        ),
        partial(vertical.fit, X, y, xgb_model=first): (
            "xgb_model must be omitted where parties have different columns, whose model is divided"
        ),
        partial(pax.fit, X, y, xgb_model=[1]): (
            "xgb_model must be a path, a fitted estimator or an xgboost.Booster, got list$"
        ),
    }.items():
        with pytest.raises(ValueError, match=f"^{rule}"):
            call()
