"""Estimators by scikit-learn's rules, in scikit-learn's own tools."""

import copy
import doctest
import pickle
from functools import partial

import numpy as np
import pytest
import sklearn
import xgboost
from scipy import sparse
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_iris
from sklearn.exceptions import NotFittedError
from sklearn.metrics import log_loss
from sklearn.model_selection import GridSearchCV, GroupKFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import fedapp
from fedapp import (
    FedAvgLinearClassifier,
    FedBaggingClassifier,
    FederatedForestRegressor,
    HorizontalForestClassifier,
    PAXClassifier,
    SecureBoostClassifier,
)
from fedapp.home import home

SHORT = {"n_estimators": 2, "max_depth": 2, "max_bin": 16}
# What an estimator with ``parties=2, **SHORT`` runs, on an array of six columns and the label.
OF_RUN = {
    "num_boost_round": 2,
    "max_depth": 2,
    "max_bin": 16,
    "parties": 2,
    "label": "c6",
    "objective": "binary:logistic",
    "test_fraction": 0,
    "valid_fraction": 0,
}
SMALL_KEY = {"key_bits": 512, "insecure_small_key": True}
# A third of the breast-cancer rows, in a few columns.
X, Y = load_breast_cancer(return_X_y=True)
X, Y = X[::3, :6], Y[::3]
N_ROWS = len(Y)
NAMES = [name for name in fedapp.__all__ if name.endswith(("Classifier", "Regressor"))]
WEIGHTS, MARGINS = 0.5 + np.arange(N_ROWS) / 300, np.linspace(-1, 1, N_ROWS)
BY_CLASS, SECURE = {0: 3.0, 1: 0.5}, {"aggregation": "secure"}
SECURE_RUN = {"pax": SECURE, "eta": 1, "parties": 3}
SAME = {  # parameters, arguments of fit, settings of a run, and its column c7
    "all rows": ({"learning_rate": 0.5}, {}, {"eta": 0.5}, None),
    "margins": ({}, {"base_margin": MARGINS}, {"base_margin": "c7"}, MARGINS),
    "weights": ({}, {"sample_weight": WEIGHTS}, {"weight": "c7"}, WEIGHTS),
    "weights of classes": (
        {"class_weight": BY_CLASS},
        {"sample_weight": WEIGHTS},
        {"weight": "c7"},
        WEIGHTS * np.where(Y, 0.5, 3.0),
    ),
    "settings": ({"aggregation": "secure", "settings": {"eta": 1}}, {}, SECURE_RUN, None),
}


@pytest.mark.parametrize("case", SAME)
def test_a_fit_is_a_run_on_all_rows(case, own_folder):
    parameters, arguments, settings, column = SAME[case]
    fit = PAXClassifier(**SHORT, parties=settings.get("parties", 2), **parameters)
    fit.fit(X, Y, **arguments)
    table = np.column_stack([X, Y, *([] if column is None else [column])])
    run = fedapp.run("pax", data=table, **{**OF_RUN, **settings})
    assert fit.model_text_ == (run.path / "model.json").read_text().replace('"c7"', '"base-margin"')
    assert fit.model_text_ != PAXClassifier(**SHORT, parties=2).fit(X, Y).model_text_
    of_rows = {name: value for name, value in arguments.items() if name == "base_margin"}
    assert np.array_equal(fit.predict_proba(X, **of_rows), run.predict_proba(table))


def test_classes_and_columns_are_those_of_fit():
    names = np.array(["malignant", "benign"])[Y]
    found = PAXClassifier(**SHORT).fit(X, names)
    assert found.classes_.tolist() == ["benign", "malignant"]
    assert (found.predict(X) == names).mean() > 0.8
    many = PAXClassifier(**SHORT).fit(X, np.arange(N_ROWS) % 12 - 3)
    assert many.classes_.tolist() == list(range(-3, 9))
    assert np.allclose(many.predict_proba(X).sum(axis=1), 1, atol=1e-5)
    columns = {"shop": [0, "c1"], "zoo": [2, 3, 4, 5]}
    found = SecureBoostClassifier(**SHORT, **SMALL_KEY, columns=columns).fit(X, Y)
    assert found.run_.summary["active"] == "shop"
    other = SecureBoostClassifier(**SHORT, **SMALL_KEY, parties=2).fit(X, Y)
    assert np.allclose(found.predict_proba(X), other.predict_proba(X), rtol=1e-5)


def test_a_fit_leaves_nothing_but_the_folder_that_it_is_given(tmp_path):
    found = PAXClassifier(**SHORT).fit(X, Y, eval_set=[(X, Y)])
    place, summary, scores = found.run_.path, found.run_.summary, found.evals_result_
    assert place.exists()
    assert not list((home() / "sites").glob("*/*/*"))
    copies = [copy.deepcopy(found), pickle.loads(pickle.dumps(found))]
    expected = found.predict(X)
    del found
    assert not place.exists()
    for each in copies:
        assert np.array_equal(each.predict(X), expected)
        assert np.array_equal(each.run_.predict(X), expected)
        assert (each.run_.summary, each.evals_result_) == (summary, scores)
        assert each.run_.report().is_file()
    kept = PAXClassifier(**SHORT, run_dir=tmp_path / "kept").fit(X, Y)
    assert kept.run_.path == tmp_path / "kept"
    assert (kept.run_.path / "report.html").exists()
    assert not list(kept.run_.path.glob("frame-*"))
    with pytest.raises(ValueError, match=r"^run_dir must be a new folder, got .* holds a run$"):
        kept.fit(X, Y)
    with pytest.raises(ValueError, match=r"^max_depth must"):
        PAXClassifier(max_depth=0, run_dir=tmp_path / "failed").fit(X, Y)
    assert not list((tmp_path / "failed").glob("frame-*"))


PAX, BOOST, FOREST = PAXClassifier, SecureBoostClassifier, FederatedForestRegressor
SET, PAIRS = [(np.ones((2, 6)), [0, 1])], {"shop": [0], "bank": [0, 1]}
TAKEN = "settings must have none that the estimator or its parameters set, got "
REFUSED = [  # a class and its parameters, arguments of fit beside X and y, and the rule
    (PAX, {"max_depth": 0}, {}, "max_depth must be >= 1, or 0 .* with max_leaves"),
    (PAX, {"monotone_constraints": "c0"}, {}, "monotone_constraints must"),
    (PAX, {}, {"sample_weight": -np.ones(N_ROWS)}, "sample_weight must be >= 0 in every row, got"),
    (PAX, {"settings": {"eta": 3}, "learning_rate": 0.3}, {}, f"{TAKEN}eta$"),
    (PAX, {"settings": {"etaa": 3}}, {}, r"etaa is not a setting; did you mean learning_rate\?$"),
    (PAX, SHORT, {"eval_set": [(X, Y + 4)]}, "eval_set must have classes of y, got 2 others$"),
    (PAX, {"valid_fraction": 0.1}, {"eval_set": SET}, "eval_set must be omitted with valid_fra"),
    (FOREST, {"n_estimators": 1}, {"eval_set": SET}, "eval_set must be for boosted trees, got fed"),
    (BOOST, {}, {"groups": Y}, "groups must be omitted where parties have different"),
    (BOOST, {"columns": PAIRS}, {}, "columns must give every column of X to one party, got"),
    (FOREST, {"parties": 3}, {"X": X[:, :2]}, "parties must be at most the .*n_features=2, got 3"),
    (PAX, {}, {"X": {"age": Y}}, "X must be a frame or an array, got dict: pandas.Data"),
    (PAX, {"params": {}}, {}, "params must be omitted: settings are arguments of their own"),
    (PAX, {"verbose": 1}, {}, "verbose must be omitted: progress=True shows progress"),
    (PAX, {"y": "label"}, {}, r"y must be omitted: .*; estimators have fit\(X, y\)"),
]


@pytest.mark.parametrize(("cls", "given", "arguments", "rule"), REFUSED)
def test_what_breaks_a_rule_is_an_error_of_pythons(cls, given, arguments, rule):
    with pytest.raises((ValueError, TypeError), match=f"^{rule}"):
        cls(**given).fit(**{"X": X, "y": Y, **arguments})


def test_what_is_not_fitted_or_without_margins_predicts_nothing():
    for ask in ("predict", "get_booster", "to_onnx"):
        with pytest.raises(NotFittedError):
            getattr(PAXClassifier(), ask)(*[X] * (ask == "predict"))
    rule = r"^base_margin must be given where fit was given one, and only there$"
    for given, other in (({}, {"base_margin": MARGINS}), ({"base_margin": MARGINS}, {})):
        with pytest.raises(ValueError, match=rule):
            PAXClassifier(**SHORT).fit(X, Y, **given).predict(X, **other)


def test_groups_say_whose_a_row_is():
    groups = np.array(["shop", "bank"])[np.arange(len(Y)) % 2]
    found = PAXClassifier(**SHORT).fit(X, Y, groups=groups)
    parties = {party["name"]: party["rows"] for party in found.run_.summary["parties"]}
    assert parties == {name: int((groups == name).sum()) for name in ("bank", "shop")}
    strange = np.array(["a shop", "a bank"])[np.arange(len(Y)) % 2]
    found = PAXClassifier(**SHORT).fit(X, Y, groups=strange)
    assert [each["name"] for each in found.run_.summary["parties"]] == ["party-1", "party-2"]
    with pytest.raises(ValueError, match=r"^parties must be those of groups, 2, got 5$"):
        PAXClassifier(**SHORT, parties=5).fit(X, Y, groups=groups)


@pytest.mark.by_default("FedBagging")
@pytest.mark.parametrize("name", ["PAX", "FedBagging", "FedCyclic"])
def test_a_weight_is_as_many_rows_where_groups_say_whose_they_are(name):
    groups, weights = np.arange(len(Y)) % 3, np.arange(len(Y)) % 4
    more = {"bins": "equal"} if name == "PAX" else {}
    model = getattr(fedapp, f"{name}Regressor")(**SHORT, **more)
    weighted = model.fit(X, Y, sample_weight=weights, groups=groups).predict(X)
    unweighted = model.fit(X, Y, groups=groups).predict(X)
    repeated = np.repeat(np.arange(len(Y)), weights)
    model.fit(X[repeated], Y[repeated], groups=groups[repeated])
    assert model.predict(X) == pytest.approx(weighted, abs=1e-6)
    assert abs(unweighted - weighted).max() > 1e-3


def test_a_forest_is_fitted_also_where_its_roots_are_not_split():
    found = HorizontalForestClassifier(n_estimators=2, min_impurity_decrease=0.9).fit(X, Y)
    assert np.ptp(found.predict_proba(X), axis=0).tolist() == [0, 0]
    assert not hasattr(found, "feature_importances_")
    found = FederatedForestRegressor(n_estimators=3, max_depth=3, parties=2).fit(X, X[:, 0])
    gains = found.run_.summary["importance"]["total_gain"]
    shares = [gains.get(name, 0.0) / sum(gains.values()) for name in found.run_.model.columns]
    assert found.feature_importances_ == pytest.approx(shares)  # of all gain


def test_eval_set_chooses_the_rounds_that_are_kept():
    # One party routes its rows in training as in the model, so scores of rounds are the model's.
    given = {"max_depth": 3, "learning_rate": 1.0, "max_bin": 16, "parties": 1}
    given |= {"eval_metric": "logloss"}
    sets = [(X[::2], Y[::2]), (X[1::2], Y[1::2])]
    found = PAXClassifier(n_estimators=30, early_stopping_rounds=2, **given)
    losses = found.fit(*sets[0], eval_set=sets).evals_result_["validation_1"]["logloss"]
    best = found.best_iteration_
    assert len(losses) == best + 3 < 30
    kept = PAXClassifier(n_estimators=best + 1, **given).fit(*sets[0], eval_set=sets)
    assert kept.model_text_ == found.model_text_
    assert np.array_equal(kept.feature_importances_, found.feature_importances_)
    assert kept.evals_result_["validation_1"]["logloss"] == losses[: best + 1]
    assert losses[best] == pytest.approx(log_loss(Y[1::2], found.predict_proba(X[1::2])), rel=1e-6)
    whole, cut = (each.run_.summary["metrics"]["train"]["logloss"] for each in (kept, found))
    assert cut == pytest.approx(whole, rel=1e-9)
    assert np.array_equal(found.run_.predict(X), kept.predict(X))


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
    np.testing.assert_allclose(
        here.feature_importances_, there.feature_importances_, rtol=0, atol=1e-4
    )
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
    model = FedBaggingClassifier(n_estimators=3, parties=2, **SHAPE).fit(X, Y)
    assert model.apply(X).shape == (N_ROWS, 6)
    assert model.apply(X, iteration_range=(1, 2)).shape == (N_ROWS, 2)


def test_what_has_no_rounds_or_scores_refuses_them():
    pax = PAXClassifier(n_estimators=1, parties=2)
    with pytest.raises(NotFittedError):
        pax.evals_result()
    first = xgboost.XGBClassifier(n_estimators=1, **SHAPE).fit(X, Y)
    linear = FedAvgLinearClassifier(rounds=1, parties=2).fit(X, Y)
    fitted, vertical = pax.fit(X, Y), SecureBoostClassifier(parties=2)
    assert not hasattr(fitted, "best_iteration")
    for call, rule in {
        fitted.evals_result: "evals_result must be of a fit that scored its rounds",
        partial(linear.apply, X): "apply must be of boosted trees, got another model$",
        partial(linear.predict, X, iteration_range=(0, 1)): (
            "iteration_range must be omitted for other models than"
        ),
        partial(linear.fit, X, Y, xgb_model=first): (
            "xgb_model must be omitted for fedavg-linear, which"
        ),
        partial(vertical.fit, X, Y, xgb_model=first): (
            "xgb_model must be omitted where parties have different columns, whose model is divided"
        ),
        partial(pax.fit, X, Y, xgb_model=[1]): (
            "xgb_model must be a path, a fitted estimator or an xgboost.Booster, got list$"
        ),
    }.items():
        with pytest.raises(ValueError, match=f"^{rule}"):
            call()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_scikit_learns_tools_work():
    """A search of many processes, pipelines, and routed metadata."""
    grid = {"learning_rate": [0.1, 1.0], "reg_lambda": [0.5, 1.0]}
    search = GridSearchCV(PAXClassifier(**SHORT), grid, cv=3, n_jobs=4, error_score="raise")
    assert len(search.fit(X, Y).cv_results_["mean_test_score"]) == 4
    assert not list((home() / "sites").glob("*/*/*"))
    piped = make_pipeline(StandardScaler(), PAXClassifier(**SHORT))
    piped.set_output(transform="pandas").fit(X, Y)
    assert piped[-1].feature_names_in_.tolist() == [f"x{place}" for place in range(6)]
    assert clone(piped).fit(X, Y)[-1].model_text_ == piped[-1].model_text_
    groups = np.arange(len(Y)) % 4
    with sklearn.config_context(enable_metadata_routing=True):
        model = FedBaggingClassifier(**SHORT).set_fit_request(groups=True, sample_weight=True)
        model.set_score_request(sample_weight=True)
        given = {"groups": groups, "sample_weight": np.ones(len(Y))}
        scores = cross_val_score(model, X, Y, params=given, cv=GroupKFold(2))
    train, test = next(GroupKFold(2).split(X, Y, groups))
    cell = FedBaggingClassifier(**SHORT).fit(X[train], Y[train], groups=groups[train])
    assert len(cell.run_.summary["parties"]) == 2
    assert scores[0] == cell.score(X[test], Y[test])


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_is_told_and_has_a_setting(name):
    cls = getattr(fedapp, name)
    told = cls.__doc__ or ""
    for parameter in cls().get_params():
        assert f"\n    {parameter} : " in told
    unset = {"columns", "run_dir", "engine", "settings", "progress"}
    given = {key: 1 for key in cls().get_params() if key not in unset}
    assert cls(**given)._settings()


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_examples_of_the_docs_are_true(name):
    if name.startswith("FedXGBllr"):
        pytest.importorskip("torch")
    (examples,) = doctest.DocTestFinder(recurse=False).find(getattr(fedapp, name), name)
    assert examples.examples
    assert doctest.DocTestRunner().run(examples).failed == 0
