"""Estimators by scikit-learn's rules, in scikit-learn's own tools."""

import copy
import doctest
import pickle

import numpy as np
import pandas
import pyarrow as pa
import pytest
import sklearn
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import load_breast_cancer, load_diabetes, make_classification
from sklearn.exceptions import NotFittedError
from sklearn.inspection import permutation_importance
from sklearn.metrics import log_loss
from sklearn.model_selection import GridSearchCV, GroupKFold, KFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.class_weight import compute_sample_weight

import fedapp
from fedapp import (
    FedBaggingClassifier,
    FederatedForestRegressor,
    HorizontalForestClassifier,
    PAXClassifier,
    PAXRegressor,
    SecureBoostClassifier,
)
from fedapp.home import home

SHORT = {"n_estimators": 2, "max_depth": 2, "max_bin": 16}
# What an estimator with ``parties=2, **SHORT`` runs, on an array of six columns and the label.
SAME_RUN = {
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
NAMES = [name for name in fedapp.__all__ if name.endswith(("Classifier", "Regressor"))]


@pytest.fixture(scope="module")
def rows():
    """A third of the breast-cancer rows, in a few columns."""
    X, y = load_breast_cancer(return_X_y=True)
    return X[::3, :6], y[::3]


def model_of(estimator):
    return str(estimator.model_text_)


# What fit does


@pytest.mark.slow
def test_fit_is_a_run_on_all_rows(rows, tmp_path, monkeypatch):
    X, y = rows
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "kept"
    found = PAXClassifier(**SHORT, learning_rate=0.5, parties=2, run_dir=folder).fit(X, y)
    run = fedapp.run("pax", data=np.column_stack([X, y]), eta=0.5, **SAME_RUN)
    assert model_of(found) == (run.path / "model.json").read_text()
    assert np.array_equal(found.predict_proba(X), run.predict_proba(X))
    assert (folder / "report.html").exists()
    assert found.run_.path == folder
    with pytest.raises(ValueError, match=r"^run_dir must be a new folder, got .* holds a run$"):
        found.fit(X, y)
    assert not list(folder.glob("frame-*"))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"params": {"eta": 0.1}}, "params must be omitted: settings are arguments of their own"),
        ({"verbose": 1}, "verbose must be omitted: progress=True shows progress"),
        ({"y": "label"}, r"y must be omitted: .*; estimators have fit\(X, y\)"),
    ],
)
def test_parameters_of_another_library_get_the_call_that_is_right(given, told):
    with pytest.raises(TypeError, match=f"^{told}"):
        PAXClassifier(**given)


def test_rows_that_are_no_table_get_the_call_that_is_right():
    with pytest.raises(ValueError, match=r"^data must be a table, which a column's to_frame\(\)"):
        PAXClassifier().fit(pandas.Series([1, 2]), [0, 1])
    with pytest.raises(TypeError, match=r"^X must be a frame or an array, got dict: pandas.Data"):
        PAXClassifier().fit({"age": [1, 2]}, [0, 1])


def test_a_fit_leaves_nothing_behind(rows):
    found = PAXClassifier(**SHORT).fit(*rows)
    place = found.run_.path
    assert place.exists()
    assert not list((home() / "sites").glob("*/*/*"))
    copies = [copy.deepcopy(found), pickle.loads(pickle.dumps(found))]
    expected = found.predict(rows[0])
    del found
    assert not place.exists()
    assert all(np.array_equal(each.predict(rows[0]), expected) for each in copies)


@pytest.mark.slow
def test_labels_of_any_kind_come_back(rows):
    X, y = rows
    names = np.array(["malignant", "benign"])[y]
    found = PAXClassifier(**SHORT).fit(X, names)
    assert found.classes_.tolist() == ["benign", "malignant"]
    assert (found.predict(X) == names).mean() > 0.8
    three = PAXClassifier(**SHORT).fit(X, np.arange(len(y)) % 12 - 3)
    assert three.classes_.tolist() == list(range(-3, 9))
    assert three.predict_proba(X).shape == (len(y), 12)
    assert np.allclose(three.predict_proba(X).sum(axis=1), 1, atol=1e-5)


def test_groups_say_whose_a_row_is(rows):
    X, y = rows
    groups = np.array(["shop", "bank"])[np.arange(len(y)) % 2]
    found = PAXClassifier(**SHORT).fit(X, y, groups=groups)
    parties = {party["name"]: party["rows"] for party in found.run_.summary["parties"]}
    assert parties == {name: int((groups == name).sum()) for name in ("bank", "shop")}
    strange = np.array(["a shop", "a bank"])[np.arange(len(y)) % 2]
    found = PAXClassifier(**SHORT).fit(X, y, groups=strange)
    assert [each["name"] for each in found.run_.summary["parties"]] == ["party-1", "party-2"]
    with pytest.raises(ValueError, match=r"^parties must be those of groups, 2, got 5$"):
        PAXClassifier(**SHORT, parties=5).fit(X, y, groups=groups)


@pytest.mark.slow
def test_weights_count(rows):
    X, y = rows
    plain, ones, some = (
        PAXClassifier(**SHORT).fit(X, y, sample_weight=weights)
        for weights in (None, np.ones(len(y)), np.linspace(0, 1, len(y)))
    )
    assert model_of(plain) == model_of(ones)
    assert model_of(plain) != model_of(some)


@pytest.mark.by_default("FedBagging")
@pytest.mark.parametrize("name", ["PAX", "FedBagging", "FedCyclic"])
def test_a_weight_is_as_many_rows_where_groups_say_whose_they_are(rows, name):
    X, y = rows
    groups, weights = np.arange(len(y)) % 3, np.arange(len(y)) % 4
    more = {"bins": "equal"} if name == "PAX" else {}
    model = getattr(fedapp, f"{name}Regressor")(**SHORT, **more)
    weighted = model.fit(X, y, sample_weight=weights, groups=groups).predict(X)
    unweighted = model.fit(X, y, groups=groups).predict(X)
    repeated = np.repeat(np.arange(len(y)), weights)
    model.fit(X[repeated], y[repeated], groups=groups[repeated])
    assert model.predict(X) == pytest.approx(weighted, abs=1e-6)
    assert abs(unweighted - weighted).max() > 1e-3


def test_a_forest_whose_roots_are_not_split_is_fitted(rows):
    X, y = rows
    found = HorizontalForestClassifier(n_estimators=2, min_impurity_decrease=0.9).fit(X, y)
    assert np.ptp(found.predict_proba(X), axis=0).tolist() == [0, 0]
    assert not hasattr(found, "feature_importances_")


def test_a_frame_may_have_categories_and_missing_values():
    rng = np.random.default_rng(0)
    towns = rng.choice(["Oslo", "Rome", "Bern"], 90)
    frame = pa.table({"town": towns, "age": [None, *rng.integers(20, 60, 89).tolist()]})
    found = PAXRegressor(**SHORT, learning_rate=1).fit(frame, (towns == "Rome") * 10.0)
    assert found.feature_names_in_.tolist() == ["town", "age"]
    assert found.n_features_in_ == 2
    assert np.allclose(found.predict(frame), (towns == "Rome") * 10.0, atol=1)
    assert found.feature_importances_[0] == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("n_classes", [2, 3])
def test_importance_is_that_of_xgboost(tmp_path, n_classes):
    xgboost = pytest.importorskip("xgboost")
    X, y = make_classification(150, 6, n_informative=4, n_classes=n_classes, random_state=0)
    found = PAXClassifier(n_estimators=3, max_depth=3, parties=2).fit(X, y)
    stock = xgboost.XGBClassifier()
    stock.load_model(found.run_.path / "model.xgb.json")
    assert found.feature_importances_ == pytest.approx(stock.feature_importances_, rel=1e-5)
    names = {"gain": "gain", "total_gain": "total_gain", "count": "weight"}
    for ours, theirs in names.items():
        score = found.run_.to_xgboost().get_score(importance_type=theirs)
        assert found.run_.summary["importance"][ours] == pytest.approx(score, rel=1e-5)


def test_importance_of_a_forest_is_each_columns_share_of_all_gain():
    X, y = load_diabetes(return_X_y=True)
    found = FederatedForestRegressor(n_estimators=3, max_depth=3, parties=2).fit(X[:150], y[:150])
    gains = found.run_.summary["importance"]["total_gain"]
    shares = [gains.get(name, 0.0) / sum(gains.values()) for name in found.run_.model.columns]
    assert found.feature_importances_ == pytest.approx(shares)
    assert found.predict(X[:150]).std() > 10  # a forest is joined


@pytest.mark.slow
def test_columns_say_whose_a_column_is(rows):
    X, y = rows
    columns = {"shop": [0, "c1"], "zoo": [2, 3, 4, 5]}
    found = SecureBoostClassifier(**SHORT, **SMALL_KEY, columns=columns).fit(X, y)
    assert found.run_.summary["active"] == "shop"
    other = SecureBoostClassifier(**SHORT, **SMALL_KEY, parties=2).fit(X, y)
    assert np.allclose(found.predict_proba(X), other.predict_proba(X), rtol=1e-5)
    with pytest.raises(ValueError, match=r"^columns must give every column of X to one party, got"):
        SecureBoostClassifier(**SHORT, columns={"shop": [0], "bank": [0, 1]}).fit(X, y)


def test_columns_are_dealt_to_three_parties_or_to_two_where_there_are_two(rows):
    X, y = rows
    for n_columns, n_parties in ((2, 2), (6, 3)):
        found = FederatedForestRegressor(n_estimators=1, max_depth=1).fit(X[:, :n_columns], y)
        assert len(found.run_.summary["parties"]) == n_parties
    for parties, n_columns, rule in (
        (3, 2, "n_features=2, got 3"),
        (None, 1, "n_features=1, got 2"),
    ):
        with pytest.raises(ValueError, match=f"^parties must be at most the .*{rule}$"):
            FederatedForestRegressor(parties=parties).fit(X[:, :n_columns], y)


@pytest.mark.slow
@pytest.mark.by_default("PAX")
@pytest.mark.parametrize("name", ["PAX", "FedBagging", "FedCyclic", "SecureBoost"])
def test_eval_set_chooses_the_rounds_that_are_kept(name, tmp_path):
    X, y = load_breast_cancer(return_X_y=True)
    X, y = X[::2, :6], y[::2]
    given = {"max_depth": 3, "learning_rate": 1.0, "max_bin": 16, "parties": 2}
    given |= SMALL_KEY if name == "SecureBoost" else {}
    given |= {"eval_metric": "logloss"}
    cls = getattr(fedapp, f"{name}Classifier")
    sets = [(X[::2], y[::2]), (X[1::2], y[1::2])]
    stopping = {"early_stopping_rounds": 2, "run_dir": tmp_path / "run"}
    found = cls(n_estimators=9, **given, **stopping).fit(*sets[0], eval_set=sets)
    losses = found.evals_result_["validation_1"]["logloss"]
    best = found.best_iteration_
    assert best == np.argmin(losses)
    assert len(losses) == best + 3 < 9
    kept = cls(n_estimators=best + 1, **given).fit(*sets[0], eval_set=sets)
    assert model_of(kept) == model_of(found)
    assert np.array_equal(kept.feature_importances_, found.feature_importances_)
    assert kept.evals_result_["validation_1"]["logloss"] == losses[: best + 1]
    for estimator in (kept, found):
        expected = log_loss(y[1::2], estimator.predict_proba(sets[1][0]))
        assert losses[best] == pytest.approx(expected, rel=1e-6)
        whole, cut = (each.run_.summary["metrics"]["train"] for each in (kept, estimator))
        assert cut["logloss"] == pytest.approx(whole["logloss"], rel=1e-9)
        assert np.array_equal(estimator.run_.predict(X), kept.predict(X))


@pytest.mark.slow
def test_validation_rows_give_the_scores_of_the_rounds(rows):
    X, y = rows
    found = PAXClassifier(**SHORT, valid_fraction=0.3, eval_metric="error").fit(X, y)
    lines = found.run_.rounds
    assert found.evals_result_["validation_0"]["error"] == lines["valid_error"].tolist()
    assert found.best_iteration_ == lines["valid_error"].argmin()
    assert not hasattr(found.set_params(valid_fraction=0.0).fit(X, y), "best_iteration_")


@pytest.mark.slow
def test_margins_that_rows_start_from_are_those_of_a_run(rows, tmp_path):
    X, y = rows
    margins = np.linspace(-1, 1, len(y))
    found = PAXClassifier(**SHORT, parties=2).fit(X, y, base_margin=margins)
    table = np.column_stack([X, y, margins])
    run = fedapp.run("pax", data=table, run_dir=tmp_path / "run", base_margin="c7", **SAME_RUN)
    assert np.array_equal(found.predict_proba(X, base_margin=margins), run.predict_proba(table))
    rule = r"^base_margin must be given where fit was given one, and only there$"
    with pytest.raises(ValueError, match=rule):
        found.predict(X)
    with pytest.raises(ValueError, match=rule):
        PAXClassifier(**SHORT).fit(X, y).predict(X, base_margin=margins)


@pytest.mark.slow
def test_weights_of_classes_multiply_those_of_rows(rows):
    X, y = rows
    weights = np.linspace(0.5, 1, len(y))
    for by_class in ("balanced", {0: 3.0, 1: 0.5}):
        found = PAXClassifier(**SHORT, class_weight=by_class).fit(X, y, sample_weight=weights)
        product = weights * compute_sample_weight(by_class, y)
        assert model_of(found) == model_of(PAXClassifier(**SHORT).fit(X, y, sample_weight=product))
        assert model_of(found) != model_of(PAXClassifier(**SHORT).fit(X, y, sample_weight=weights))


@pytest.mark.slow
def test_settings_reach_the_run(rows):
    X, y = rows
    given = {"pax.aggregation": "secure", "min_child_weight": 9.0}
    found = PAXClassifier(**SHORT, parties=3, settings=given).fit(X, y)
    same = PAXClassifier(**SHORT, parties=3, aggregation="secure", min_child_weight=9.0).fit(X, y)
    assert model_of(found) == model_of(same)
    assert model_of(found) != model_of(PAXClassifier(**SHORT, parties=3).fit(X, y))


def test_a_pickled_estimator_has_its_model_and_its_run(rows):
    pytest.importorskip("xgboost")
    pytest.importorskip("onnx")
    X, y = rows
    found = PAXClassifier(**SHORT).fit(X, y, eval_set=[(X, y)])
    place, scores, best = found.run_.path, found.evals_result_, found.best_iteration_
    booster, onnx, summary = found.get_booster(), found.to_onnx(), found.run_.summary
    expected, pickled = found.predict_proba(X), pickle.dumps(found)
    del found
    again = pickle.loads(pickled)
    assert not place.exists()
    assert np.array_equal(again.predict_proba(X), expected)
    assert again.get_booster().save_raw("json") == booster.save_raw("json")
    assert len(again.to_onnx()) == len(onnx)
    assert (again.evals_result_, again.best_iteration_) == (scores, best)
    assert again.run_.summary == summary
    assert np.array_equal(again.run_.predict_proba(X), expected)
    assert again.run_.report().is_file()
    place = again.run_.path
    del again
    assert not place.exists()


@pytest.mark.slow
def test_what_breaks_a_rule_is_a_value_error(rows):
    X, y = rows
    with pytest.raises(ValueError, match=r"^max_depth must be >= 1, or 0 .* with max_leaves"):
        PAXClassifier(max_depth=0).fit(X, y)
    with pytest.raises(ValueError, match=r"^learning_rate must be > 0.0 or 'auto', got 0.0$"):
        PAXClassifier(learning_rate=0.0).fit(X, y)
    with pytest.raises(ValueError, match=r"^n_estimators must be >= 1, got 0$"):
        FederatedForestRegressor(n_estimators=0).fit(X, y)
    with pytest.raises(ValueError, match=r"^monotone_constraints must"):
        PAXClassifier(monotone_constraints="c0").fit(X, y)
    with pytest.raises(ValueError, match=r"^sample_weight must be >= 0 in every row, got"):
        PAXClassifier().fit(X, y, sample_weight=-np.ones(len(y)))
    for given in ({"eta": 3}, {"test_fraction": 0.5}, {"label": "y"}, {"objective": "custom"}):
        rule = "^settings must have none that the estimator or its parameters set, got "
        with pytest.raises(ValueError, match=f"{rule}{next(iter(given))}$"):
            PAXClassifier(learning_rate=0.3, settings=given).fit(X, y)
    with pytest.raises(ValueError, match=r"^etaa is not a setting; did you mean learning_rate\?$"):
        PAXClassifier(settings={"etaa": 3}).fit(X, y)
    with pytest.raises(ValueError, match=r"^eval_set must have classes of y, got 2 others$"):
        PAXClassifier(**SHORT).fit(X, y, eval_set=[(X, y + 4)])
    with pytest.raises(ValueError, match=r"^eval_set must be omitted with valid_fraction or base_"):
        PAXClassifier(valid_fraction=0.1).fit(X, y, eval_set=[(X, y)])
    with pytest.raises(ValueError, match=r"^eval_set must be for boosted trees, got federated-for"):
        FederatedForestRegressor(n_estimators=1, parties=2).fit(X, y, eval_set=[(X, y)])
    with pytest.raises(ValueError, match=r"^groups must be omitted where parties have different"):
        SecureBoostClassifier().fit(X, y, groups=y)
    for ask in ("predict", "get_booster", "to_onnx"):
        with pytest.raises(NotFittedError):
            getattr(PAXClassifier(), ask)(*[X] * (ask == "predict"))


# scikit-learn's tools


@pytest.mark.slow
def test_a_grid_search_is_a_loop_over_its_cells(rows):
    X, y = rows
    grid = {"learning_rate": [0.1, 1.0]}
    folds = KFold(2, shuffle=True, random_state=0)
    search = GridSearchCV(PAXClassifier(**SHORT), grid, cv=folds).fit(X, y)
    expected = []
    for learning_rate in grid["learning_rate"]:
        scores = []
        for train, test in folds.split(X):
            cell = PAXClassifier(**SHORT, learning_rate=learning_rate)
            scores.append(cell.fit(X[train], y[train]).score(X[test], y[test]))
        expected.append(np.mean(scores))
    assert np.array_equal(search.cv_results_["mean_test_score"], expected)
    assert search.best_score_ == max(expected)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_grid_search_of_many_processes_loses_no_fit(rows):
    X, y = rows
    grid = {"learning_rate": np.linspace(0.1, 1, 10).tolist(), "reg_lambda": [0.5, 1.0]}
    model = PAXClassifier(**SHORT, parties=2)
    search = GridSearchCV(model, grid, cv=3, n_jobs=4, error_score="raise").fit(X, y)
    assert len(search.cv_results_["mean_test_score"]) == 20
    assert not list((home() / "sites").glob("*/*/*"))


@pytest.mark.slow
def test_pipelines_copies_and_importance_work(rows):
    X, y = rows
    piped = make_pipeline(StandardScaler(), PAXClassifier(**SHORT))
    pytest.importorskip("pandas")
    piped.set_output(transform="pandas").fit(X, y)
    assert piped[-1].feature_names_in_.tolist() == [f"x{place}" for place in range(6)]
    found = permutation_importance(piped, X, y, n_repeats=1, random_state=0).importances_mean
    best = piped[-1].feature_importances_.argmax()
    assert found[best] > 0
    again = clone(piped).fit(X, y)
    assert model_of(again[-1]) == model_of(piped[-1])
    assert cross_val_score(PAXClassifier(**SHORT, learning_rate=0.3), X, y, cv=2).min() > 0.7


@pytest.mark.slow
def test_calibration_works(rows):
    found = CalibratedClassifierCV(PAXClassifier(**SHORT), cv=2).fit(*rows)
    assert found.score(*rows) > 0.8


@pytest.mark.slow
def test_weights_and_groups_are_routed(rows):
    X, y = rows
    groups = np.arange(len(y)) % 4
    with sklearn.config_context(enable_metadata_routing=True):
        model = FedBaggingClassifier(**SHORT).set_fit_request(groups=True, sample_weight=True)
        model.set_score_request(sample_weight=True)
        given = {"groups": groups, "sample_weight": np.ones(len(y))}
        scores = cross_val_score(model, X, y, params=given, cv=GroupKFold(2))
    train, test = next(GroupKFold(2).split(X, y, groups))
    cell = FedBaggingClassifier(**SHORT).fit(X[train], y[train], groups=groups[train])
    assert len(cell.run_.summary["parties"]) == 2
    assert scores[0] == cell.score(X[test], y[test])


def test_a_warning_is_logged_by_the_first_fit_alone(rows, caplog, monkeypatch):
    monkeypatch.setattr("fedapp.sklearn.base._WARNED", set())
    X, y = rows
    model = FederatedForestRegressor(n_estimators=1, max_depth=1, parties=2)
    for _ in range(2):
        model.fit(X, y)
        assert any("labels=encoded" in text for text in model.run_.summary["warnings"])
    warned = [each for each in caplog.messages if "labels=encoded" in each]
    assert len(warned) == 1


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
