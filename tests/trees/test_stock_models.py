"""Runs that continue a model of stock XGBoost, and files of XGBoost."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import xgboost
from hypothesis import given as drawn
from hypothesis import settings as limits
from hypothesis import strategies as st

import fedapp
from fedapp.errors import ConfigError, DataError
from fedapp.runs.local import run_local
from fedapp.trees.model import Ensemble
from fedapp.trees.objective import LossParameters
from fedapp.trees.predict import predict_margins
from fedapp.trees.stock_xgboost import from_ubj, is_xgboost, stock_ensemble
from tests.federated import model_of
from tests.pooled import assert_same, pooled_booster
from tests.tables import made_columns, made_table, write_rows

BINARY = {"objective": "binary:logistic", "max_depth": 3}
LOSS = LossParameters(scale_pos_weight=1.0, max_delta_step=0.0, tweedie_variance_power=1.5)
PENALTIES = {"lambda": 0.5, "min_child_weight": 5.0}


def bare(objective="binary:logistic", n_columns=3, **more):
    """The model of a run without trees."""
    columns = tuple("abcdefgh"[:n_columns])
    classes = {"binary:logistic": ("no", "yes"), "multi:softprob": ("x", "y", "z")}
    names = classes.get(objective, ())
    score = np.zeros(3 if len(names) == 3 else 1, np.float32)
    return replace(Ensemble(objective, score, columns, names, (), parameters=LOSS), **more)


def rows(n_columns=3):
    """Values with missing ones, and labels 0 and 1."""
    rng = np.random.default_rng(0)
    values = rng.normal(size=(300, n_columns)).astype(np.float32)
    labels = (values[:, 0] + rng.normal(size=300) > 0).astype(np.float32)
    values[rng.random(values.shape) < 0.1] = np.nan
    return values, labels


def booster(n_rounds=2, labels=None, **more):
    values, two = rows()
    matrix = xgboost.DMatrix(values, two if labels is None else labels)
    return xgboost.train({**BINARY, **more}, matrix, n_rounds)


def read(source, run, kind="json"):
    """The model of a booster's file, and the warnings."""
    warnings = []
    return stock_ensemble(bytes(source.save_raw(kind)), run, warnings.append), warnings


def read_document(document, run=None):
    return stock_ensemble(json.dumps(document).encode(), run or bare(), print)


def document_of(source):
    document = json.loads(source.save_raw("json"))
    return document, document["learner"]["gradient_booster"]


def fields_of(source):
    """Trees as XGBoost's JSON has them."""
    return document_of(source)[1]["model"]["trees"]


# Runs


ONE, THREE = {"parties": 1}, {"parties": 3, "pax.bins": "equal", "data": "few"}


@pytest.mark.by_default("bagging*", "*secure*")
@pytest.mark.parametrize(
    ("strategy", "kind", "how"),
    [
        ("bagging", "json", ONE),
        ("pax", "json", THREE),
        ("pax", "ubj", THREE | {"pax.aggregation": "secure"}),
    ],
    ids=lambda each: each if isinstance(each, str) else each.get("pax.aggregation", ""),
)
def test_rounds_of_xgboost_and_rounds_here_are_those_of_xgboost(
    real_data, tmp_path, settings, strategy, kind, how
):
    common = {"objective": "reg:squarederror", "data": "abalone", "max_bin": 64, **how}
    if "data" in how:
        data = made_table(tmp_path / "few.csv", "binary:logistic", 12)
        common |= {"objective": "binary:logistic", "label": "y", "data": str(data)}
    common |= {"strategy": strategy, "max_depth": 5, "valid_fraction": 0.0, **PENALTIES}
    path = tmp_path / f"first.{kind}"
    pooled_booster(settings(num_boost_round=3, **common)).save_model(path)
    model = model_of(run_local(settings(num_boost_round=2, init_model=str(path), **common)))
    once = pooled_booster(settings(num_boost_round=5, **common))
    assert_same(model, once)
    for tree, due in zip(model.trees, fields_of(once), strict=True):
        np.testing.assert_allclose(tree["hessian"], due["sum_hessian"], rtol=1e-6)


def test_a_model_of_other_cuts_is_continued_from_its_rows_own_margins(tmp_path, settings):
    values, labels = rows(8)
    columns = dict(zip("abcdefgh", values.T, strict=True))
    data = write_rows(tmp_path / "rows.csv", {**columns, "y": labels})
    path, held = tmp_path / "first.ubj", {"test_fraction": 0.0, "valid_fraction": 0.0}
    given = {"data": str(data), "label": "y", "parties": 1, "max_depth": 4, "max_bin": 128}
    run = settings(num_boost_round=2, init_model=str(path), **given, **held, **PENALTIES)
    parameters = {**BINARY, "max_depth": 4, "eta": run.eta, **PENALTIES}
    matrix = xgboost.DMatrix(values, labels)
    first = xgboost.train({**parameters, "max_bin": 16}, matrix, 3)
    first.save_model(path)
    theirs = xgboost.train({**parameters, "max_bin": 128}, matrix, 2, xgb_model=first)
    assert_same(model_of(run_local(run)), theirs)


def test_categories_are_recoded_to_those_of_the_run(tmp_path):
    rng, n_rows = np.random.default_rng(0), 500
    towns = pd.Categorical(rng.choice([*"cadb"], n_rows), categories=["d", "a", "c", "b"])
    zones = pd.Categorical(rng.choice([9, 3, 7], n_rows), categories=[9, 3, 7])
    x = rng.normal(size=n_rows).astype(np.float32)
    frame = pd.DataFrame({"town": towns, "zone": zones, "x": x})
    labels = frame.town.isin(["a", "b"]).to_numpy() ^ (rng.random(n_rows) < 0.2)
    matrix = xgboost.DMatrix(frame, labels.astype(int), enable_categorical=True)
    parameters = {**BINARY, "max_cat_to_onehot": 1}
    once = xgboost.train(parameters, matrix, 5)
    xgboost.train(parameters, matrix, 3).save_model(tmp_path / "first.ubj")
    table = frame.assign(zone=frame.zone.astype(str), y=labels.astype(int))
    settings = {"num_boost_round": 2, "max_depth": 3, "max_bin": 256, "eta": 0.3}
    settings |= {"lambda": 1.0, "min_child_weight": 1.0, "test_fraction": 0, "valid_fraction": 0}
    settings |= {"label": "y", "parties": 1, "init_model": tmp_path / "first.ubj"}
    run = fedapp.run("pax", data=table, **settings)
    probabilities = np.asarray(run.predict_proba(table))[:, 1]
    np.testing.assert_allclose(probabilities, once.predict(matrix), rtol=0, atol=1e-7)
    assert run.to_xgboost().num_boosted_rounds() == 5


# Files


@limits(deadline=None, max_examples=25)
@drawn(
    st.sampled_from(["binary:logistic", "reg:squarederror", "multi:softprob", "multi:softmax"]),
    st.sampled_from(
        [{}, {"grow_policy": "lossguide", "max_leaves": 6}, {"tree_method": "exact", "gamma": 2.0}]
    ),
    st.integers(1, 3),
    st.sampled_from(["json", "ubj"]),
)
def test_a_file_of_xgboost_predicts_as_xgboost_does(objective, more, n_rounds, kind):
    values, labels = rows()
    if objective.startswith("multi"):
        labels, more = np.arange(len(labels)) % 3, {**more, "num_class": 3}
    run = bare(objective.replace("softmax", "softprob"))
    source = booster(n_rounds, labels, objective=objective, **more)
    model, warnings = read(source, run, kind)
    rule = "init-model has no names of columns: they must be the table's, in their order"
    assert warnings == [rule]
    margins = source.predict(xgboost.DMatrix(values), output_margin=True, strict_shape=True)
    np.testing.assert_array_equal(predict_margins(model, values), margins)
    # XGBoost reads what is written of it, as it was but for the names of the columns.
    raw = bytes(source.save_raw(kind))
    assert is_xgboost(raw)
    if kind == "ubj":
        ours, due = from_ubj(raw)["learner"]["gradient_booster"], document_of(source)[1]
        assert ours["model"]["tree_info"] == due["model"]["tree_info"]
        trees = zip(ours["model"]["trees"], due["model"]["trees"], strict=True)
        assert all(tree["left_children"] == other["left_children"] for tree, other in trees)


def test_deleted_nodes_are_left_out():
    source = booster(3, tree_method="exact", gamma=2.0)
    sizes = [
        (len(tree["left_children"]), int(tree["tree_param"]["num_deleted"]))
        for tree in fields_of(source)
    ]
    assert sum(n_deleted for _, n_deleted in sizes) > 0
    model, _ = read(source, bare())
    assert [len(tree) for tree in model.trees] == [n - n_deleted for n, n_deleted in sizes]


def test_rounds_after_the_best_one_are_continued_and_named():
    source = booster(5)
    source.set_attr(best_iteration="2")
    model, warnings = read(source, bare())
    assert len(model.trees) == 5
    assert warnings[1] == (
        "init-model is continued after all its 5 rounds, as by XGBoost: "
        "to continue the best one, save booster[:3]"
    )
    further = xgboost.train(BINARY, xgboost.DMatrix(*rows()), 1, xgb_model=source)
    assert further.num_boosted_rounds() == 6


def test_a_base_score_of_one_number_is_that_of_every_class():
    source = booster(1, np.arange(300) % 3, objective="multi:softprob", num_class=3)
    document, fields = document_of(source)
    document["learner"]["learner_model_param"]["base_score"] = "5E-1"  # before XGBoost 3.1
    del fields["model"]["cats"]
    assert read_document(document, bare("multi:softprob")).base_score.tolist() == [0.5] * 3


@pytest.mark.parametrize("place", ["booster", "model"])
def test_dropped_trees_of_later_versions_are_refused_by_name(place):
    """XGBoost 3.3 saves dart as a gbtree with weights beside its model, 3.4 within."""
    document, fields = document_of(booster(3))
    fields = fields["model"] if place == "model" else fields
    fields["weight_drop"] = [1.0, 1.0, 1.0]  # of a rate of 0
    assert len(read_document(document).trees) == 3
    fields["weight_drop"] = [1.0, 0.75, 1.0]
    with pytest.raises(ConfigError, match=r"^booster of init-model must be 'gbtree', got 'dart'$"):
        read_document(document)


def of_two_outputs():
    values, _ = rows()
    matrix = xgboost.DMatrix(values, np.nan_to_num(values[:, :2]))
    return xgboost.train({"multi_strategy": "multi_output_tree"}, matrix, 1)


MULTI = "objective of init-model must be 'multi:softprob', got"


@pytest.mark.parametrize(
    ("source", "run", "rule"),
    [
        ({"booster": "dart"}, bare(), "booster of init-model must be 'gbtree', got 'dart'$"),
        ({"booster": "gblinear"}, bare(), "booster of init-model must be 'gbtree', got 'gblinear'"),
        ({"num_parallel_tree": 3}, bare(), "num_parallel_tree of init-model must be 1, got 3$"),
        (
            {"objective": "rank:pairwise"},
            bare(),
            "objective of init-model must be 'binary:logistic', got 'rank:pairwise'$",
        ),
        (of_two_outputs, bare("reg:squarederror"), "num_target of init-model must be 1, got 2$"),
        ({}, bare(n_columns=4), "num_feature of init-model must be 4, got 3"),
        ({}, bare("multi:softprob"), MULTI),
        ({}, bare("multi:softprob", classes=tuple("wxyz")), MULTI),
    ],
)
def test_a_model_that_no_run_grows_is_refused_by_name(source, run, rule):
    source = source() if callable(source) else booster(**source, verbosity=0)
    with pytest.raises(ConfigError, match=f"^{rule}"):
        read(source, run)


def test_names_of_columns_must_be_the_tables():
    values, labels = rows()
    matrix = xgboost.DMatrix(values, labels, feature_names=["b", "a", "c"])
    rule = "columns of init-model must be the run's, number 1 being 'a', got 'b'"
    with pytest.raises(ConfigError, match=f"^{rule}$"):
        read(xgboost.train(BINARY, matrix, 1), bare())


@pytest.mark.parametrize("names", [None, ["é", "x"]])
def test_categories_must_have_names(names):
    values, labels = rows(1)
    codes = np.nan_to_num(values[:, :1] > 0).astype(int)
    how = {"feature_types": ["c"], "enable_categorical": True}
    if names:
        codes = pd.DataFrame({"a": pd.Categorical(np.array(names)[codes[:, 0]])})
        how = {"enable_categorical": True}
    source = xgboost.train(BINARY, xgboost.DMatrix(codes, labels, **how), 1)
    rule = "init-model must have names of its categories in ASCII, got others or none: train"
    with pytest.raises(ConfigError, match=f"^{rule}"):
        read(source, bare(n_columns=1, categories=(("x", "é"),)))


RAW = {kind: bytes(booster().save_raw(kind)) for kind in ("json", "ubj")}


@limits(deadline=None, max_examples=40)
@drawn(
    st.sampled_from(["json", "ubj"]),
    st.floats(0, 1, exclude_max=True),
    st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), max_size=4),
)
def test_a_damaged_file_is_one_error(kind, share, changes):
    content = bytearray(RAW[kind])
    for place, byte in changes:
        content[int(place * len(content))] = byte
    if not changes:
        content = content[: int(share * len(content))]
    try:
        stock_ensemble(bytes(content), bare(), lambda text: None)
    except (ConfigError, DataError) as error:
        assert "init-model must" in str(error)  # noqa: PT017
    else:
        assert changes


@pytest.mark.parametrize("kind", ["json", "ubj"])
def test_half_a_file_is_refused(kind):
    rule = "^init-model must be a whole file of XGBoost's save_model, got a damaged one$"
    with pytest.raises(DataError, match=rule):
        stock_ensemble(RAW[kind][: len(RAW[kind]) // 2], bare(), print)


def test_numbers_that_are_not_finite_are_refused():
    text = RAW["json"].decode()
    gain = text.split('"loss_changes":[')[1].split(",")[0]
    with pytest.raises(DataError, match=r"got a damaged one: .*numbers of trees must be finite"):
        stock_ensemble(text.replace(gain, "Infinity", 1).encode(), bare(), print)


def test_a_model_of_xgboost_cannot_be_divided(vertical, tmp_path):
    path = tmp_path / "first.json"
    booster().save_model(path)
    data = write_rows(tmp_path / "rows.csv", made_columns("binary:logistic"))
    rule = "^init-model must be the folder of a run of secureboost, got a model of XGBoost: no "
    rule += "model in one piece can be divided among parties; pax, bagging and cyclic take it$"
    with pytest.raises(ConfigError, match=rule):
        run_local(vertical(data=str(data), label="y", init_model=str(path)))
