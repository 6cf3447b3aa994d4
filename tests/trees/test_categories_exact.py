"""Trees over columns of text are XGBoost's: in every node, the categories of every split too."""

import numpy as np
import pytest
import xgboost

from fedapp.data.labels import class_ids, class_names
from fedapp.records.document import load
from fedapp.run_folder import RunFolder
from fedapp.runs.baselines import run_baselines, xgboost_parameters
from fedapp.runs.local import run_local
from fedapp.settings import Settings
from fedapp.site.settings import SiteConfig
from fedapp.site.table import Holdout, read_subsets
from fedapp.trees.model import LEAF, Ensemble
from fedapp.trees.predict import predict_margins
from fedapp.trees.sets import category_counts
from fedapp.trees.xgboost import typed_columns
from tests.reference import compare_trees
from tests.texts import adult, airline, kddcup

SMALL = {"num-boost-round": 4, "max-depth": 5, "max-bin": 64, "valid-fraction": 0.0}
PENALTIES = {"lambda": 0.5, "alpha": 0.3, "gamma": 0.5, "min-child-weight": 5.0}


def matrix(table):
    """Rows as XGBoost takes them, codes as categories."""
    widths = category_counts(table.categories, len(table.columns))
    names = {"feature_names": list(table.columns)}
    return xgboost.DMatrix(table.values, **names, **typed_columns(widths))


def pooled_booster(settings):
    """XGBoost on all training rows of a run, and the test rows."""
    site = SiteConfig("all", settings.data, settings.label, dropped=settings.dropped)
    holdout = Holdout(settings.test_fraction, settings.valid_fraction, settings.seed)
    subsets = read_subsets(site, holdout)
    table = subsets["train"]
    assert table.labels is not None
    every = [each.labels for each in subsets.values() if each.labels is not None]
    classes = class_names(np.concatenate(every), settings.objective)  # rare ones may be held back
    labels = class_ids(table.labels, classes)
    weights = np.ones(table.n_rows, np.float32)
    widths = category_counts(table.categories, len(table.columns))
    given = {"feature_names": list(table.columns), "max_bin": settings.max_bin}
    rows = xgboost.QuantileDMatrix(table.values, labels, **given, **typed_columns(widths))
    settings = settings.splitting(widths.tolist())
    parameters = xgboost_parameters(settings, labels, weights, labels)
    return xgboost.train(parameters, rows, settings.num_boost_round), subsets["test"]


def assert_xgboosts(settings, folder):
    """Hold a run against XGBoost on its pooled rows: trees, and what its export predicts."""
    model, (booster, test) = load(folder.path / "model.json", Ensemble), pooled_booster(settings)
    found = compare_trees(model, booster)
    assert found.n_nodes > 3 * found.n_trees
    assert found.differing == 0
    assert found.leaf_error <= 1e-6
    stock = xgboost.Booster(model_file=folder.path / "model.xgb.json")
    rows = matrix(test)
    theirs = stock.predict(rows, output_margin=True).reshape(test.n_rows, -1)
    np.testing.assert_allclose(predict_margins(model, test.values), theirs, atol=1e-6, rtol=1e-6)
    whole = booster.predict(rows, output_margin=True).reshape(test.n_rows, -1)
    np.testing.assert_allclose(theirs, whole, atol=1e-5, rtol=1e-5)
    return model


def split_columns(model):
    """Names of the columns that split anywhere."""
    return {model.columns[c] for t in model.trees for c in t["column"][t["left"] != LEAF]}


def test_adult_is_xgboosts(real_data, tmp_path, settings):
    data = adult(tmp_path, real_data, 4000)
    run = settings(data=str(data), label="income", parties=1, **SMALL)
    model = assert_xgboosts(run, run_local(run))
    assert {"relationship", "occupation", "age"} <= split_columns(model)


@pytest.mark.by_default("lambda*", "max-cat-threshold")
@pytest.mark.parametrize(
    "more",
    [
        PENALTIES,
        {"max-cat-to-onehot": 10},
        {"max-cat-threshold": 3},
        {"max-cat-to-onehot": 100, "min-child-weight": 0.0},
    ],
    ids=lambda more: ",".join(more),
)
def test_adult_is_xgboosts_with_other_settings(real_data, tmp_path, settings, more):
    data = adult(tmp_path, real_data, 3000)
    run = settings(data=str(data), label="income", parties=1, **SMALL | more)
    assert_xgboosts(run, run_local(run))


def test_classes_with_missing_text_are_xgboosts(real_data, tmp_path, settings):
    data = kddcup(tmp_path, real_data, 2500)
    more = {"objective": "multi:softprob", "num-boost-round": 2}
    run = settings(data=str(data), label="label", parties=1, **SMALL | more)
    model = assert_xgboosts(run, run_local(run))
    assert "service" in split_columns(model)


def test_numbers_by_text_of_many_values_are_xgboosts(real_data, tmp_path, settings):
    data = airline(tmp_path, real_data, 4000)
    given = {"label": "ArrDelay", "drop-columns": "late", "objective": "reg:squarederror"}
    run = settings(data=str(data), parties=1, **SMALL | given)
    model = assert_xgboosts(run, run_local(run))
    assert {"Origin", "Dest", "UniqueCarrier"} <= split_columns(model)
    assert model.sets.widths.max() > 200


WAYS = {
    "pax": {"parties": 1},
    "secure": {"parties": 2, "pax.aggregation": "secure"},
    "bagging": {"strategy": "bagging", "parties": 2},
    "secureboost": {"columns": "sizes:2,1"},
}


@pytest.mark.slow
@pytest.mark.by_default("pax", "secureboost")
@pytest.mark.parametrize("way", WAYS)
def test_children_weigh_more_where_a_column_has_many_categories(
    settings, vertical, write_table, way
):
    """Of the baseline too, which PAX with one party and SecureBoost equal."""
    make = vertical if way == "secureboost" else settings
    rng = np.random.default_rng(4)
    codes = rng.permutation(np.arange(700) % 100)
    labels = (rng.random(700) < (codes % 7 + 1) / 9).astype(int)
    weight_of = {"many": 5.0, "fewer": 1.0}
    for name, column in {"many": codes, "fewer": np.where(codes == 99, 0, codes)}.items():
        places = [f"place {code:02}" for code in column]
        data = write_table(name, n_rows=700, y=labels, place=places)
        given = {"data": str(data), "label": "y", "max_depth": 3, **WAYS[way]}
        runs, folders = list[Settings](), list[RunFolder]()
        for weight in ("auto", 1.0, 5.0):
            runs.append(make(**given, min_child_weight=weight))
            folders.append(run_local(runs[-1]))
        models = [(folder.path / "model.json").read_bytes() for folder in folders]
        assert models[1] != models[2]
        assert models[0] == models[1 if name == "fewer" else 2]
        assert folders[0].summary["boosting"]["min_child_weight"] == weight_of[name]
        found = run_baselines(runs[0], folders[0].path)
        if way in ("pax", "secureboost"):
            assert found["same_nodes"][0] == found["same_nodes"][1] > 10
        scores = [run_baselines(run)["pooled"] for run in runs]
        assert scores[1] != scores[2]
        assert scores[0] == scores[1 if name == "fewer" else 2]


@pytest.mark.slow
@pytest.mark.parametrize("more", [{}, PENALTIES, {"max-cat-to-onehot": 50}], ids=str)
@pytest.mark.parametrize(
    ("write", "label", "drop", "objective"),
    [
        (adult, "income", "", "binary:logistic"),
        (adult, "age", "", "reg:squarederror"),
        (adult, "education", "", "multi:softprob"),
        (airline, "late", "ArrDelay", "binary:logistic"),
        (airline, "ArrDelay", "late", "reg:squarederror"),
        (airline, "UniqueCarrier", "late", "multi:softprob"),
        (kddcup, "label", "", "multi:softprob"),
    ],
)
def test_large_tables_are_xgboosts(
    real_data, tmp_path, settings, write, label, drop, objective, more
):
    data = write(tmp_path, real_data, 40_000)
    given = {"label": label, "drop-columns": drop, "objective": objective, "max-bin": 256}
    run = settings(data=str(data), parties=1, **SMALL | given | more)
    assert_xgboosts(run, run_local(run))


def test_three_parties_are_one_where_their_cuts_agree(real_data, tmp_path, settings):
    data = adult(tmp_path, real_data, 3000)
    # Without fnlwgt no column has more than 256 values, so all parties together know every cut.
    few = {"drop-columns": "fnlwgt", "max-bin": 256, "pax.bins": "equal", "eta": 0.25}
    given = {"label": "income", "test-fraction": 0.0, **SMALL, **few}
    run = settings(data=str(data), parties=3, **given)
    folder = run_local(run)
    model = load(folder.path / "model.json", Ensemble)
    found = compare_trees(model, pooled_booster(run)[0])
    assert found.differing == 0
    assert len(model.sets) > 20
