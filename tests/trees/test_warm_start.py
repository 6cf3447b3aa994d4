"""Runs that go on from a model: of a finished run, or of stock XGBoost, and files of XGBoost."""

import json
import logging
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import xgboost
from hypothesis import given as drawn
from hypothesis import settings as limits
from hypothesis import strategies as st

import fedapp
from clients.secureboost.columns import check_setup
from fedapp.errors import ConfigError, DataError, PartyError, ProtocolError
from fedapp.home import home
from fedapp.records.document import to_text
from fedapp.runs.local import run_local, simulated_contexts
from fedapp.trees.categories import NO_SET
from fedapp.trees.model import LEAF, NODE, Ensemble, pack_trees
from fedapp.trees.objective import LossParameters
from fedapp.trees.predict import predict_margins
from fedapp.trees.xgboost import is_xgboost, stock_ensemble
from strategies import pax
from strategies.handshake import InitialModel
from strategies.horizontal import read_init_model
from strategies.local_boosting import last_turn, next_turn
from tests.federated import model_bytes, model_of, summary_of
from tests.network import die, resumed, run
from tests.pooled import assert_same
from tests.tables import made_columns, write_rows

DRAWS = {"subsample": 0.7, "colsample_bytree": 0.7, "colsample_bynode": 0.8}
BINARY, CLASSES, NUMBERS = "binary:logistic", "multi:softprob", "reg:squarederror"
log = logging.getLogger("fedapp")
NO_MODEL = Ensemble(NUMBERS, np.zeros(1, np.float32), (), (), ())


@pytest.fixture
def continued(made):
    """``continued(strategy, objective, **more)``: a short run over rows with names and margins,
    which draws rows and columns."""

    def make(strategy="pax", objective=BINARY, **more):
        columns = made_columns(objective)
        rng = np.random.default_rng(5)
        labels = np.asarray(columns["y"])
        columns["town"] = [f"t{rng.integers(4)}{label}" for label in labels.round().astype(int)]
        columns["m"] = rng.normal(size=len(labels)).round(3)
        dropped = ",".join({"m", "town"} - {more.get("base_margin"), more.pop("text", "")})
        parties = {"pax": 3, "bagging": 3, "cyclic": 3}.get(strategy, 2)
        given = {"parties": parties, "drop_columns": dropped, **DRAWS, **more}
        return made(strategy, objective, columns=columns, **given)

    return make


TEXTS, MARGINS, PARALLEL = {"text": "town"}, {"base_margin": "m"}, {"num_parallel_tree": 2}
SMALL = {"max_bin": 8, "max_depth": 2}
ALONE = {**SMALL, "secureboost__first_trees": 1}
CONTINUED = {
    "pax": ("pax", CLASSES, {}),
    "pax, numbers": ("pax", NUMBERS, {}),
    "pax, texts and margins": ("pax", BINARY, TEXTS | MARGINS),
    "pax, parallel": ("pax", BINARY, PARALLEL),
    "bagging": ("bagging", CLASSES, {}),
    "cyclic": ("cyclic", BINARY, {}),
    "secureboost": ("secureboost", NUMBERS, ALONE),
    "secureboost, classes": ("secureboost", CLASSES, SMALL),
    "secureboost, texts and margins": ("secureboost", BINARY, TEXTS | MARGINS | SMALL),
    "secureboost, parallel": ("secureboost", BINARY, PARALLEL | SMALL),
}


@pytest.mark.by_default("pax", "pax, texts*", "cyclic", "secureboost", "secureboost, parallel")
@pytest.mark.parametrize("name", CONTINUED)
def test_a_run_that_goes_on_ends_in_the_model_of_all_rounds_at_once(continued, name):
    strategy, objective, how = CONTINUED[name]
    in_parts = {"allow_export": False} if strategy == "secureboost" else {}
    n_more = 1 if strategy == "secureboost" else 3
    first = run_local(continued(strategy, objective, **{**how, **in_parts}))
    init = {"init_model": str(first.path), "num_boost_round": n_more}
    second = run_local(continued(strategy, objective, **how, **init))
    once = run_local(continued(strategy, objective, num_boost_round=2 + n_more, **how))
    assert model_bytes(second) == model_bytes(once)
    model = model_of(once)
    assert bool(len(model.sets.bits)) == ("texts" in name)
    n_trees = 2 * model.n_outputs * model.num_parallel_tree * (3 if name == "bagging" else 1)
    begun = summary_of(second)["init_model"]
    assert begun == {"path": str(first.path), "rounds": 2, "trees": n_trees}
    assert "init_model" not in summary_of(once)
    lines, of_once = (each.rounds for each in (second, once))
    assert [line["round"] for line in lines] == [*range(1, n_more + 1)]
    assert [line["valid"] for line in lines] == [line["valid"] for line in of_once[2:]]
    assert summary_of(second)["metrics"] == summary_of(once)["metrics"]


@pytest.mark.by_default("pax")
@pytest.mark.parametrize("strategy", ["pax", "bagging", "secureboost"])
def test_early_stopping_looks_at_the_new_rounds(continued, strategy):
    first = run_local(continued(strategy, **SMALL))
    given = {"early_stopping_rounds": 2, "valid_fraction": 0.3, "eta": 1.0, "num_boost_round": 20}
    second = run_local(continued(strategy, init_model=str(first.path), **given, **SMALL))
    best, begun = summary_of(second)["best_round"], summary_of(second)["init_model"]
    assert len(second.rounds) == best + 2 < 20
    added = best * begun["trees"] // begun["rounds"]
    assert len(model_of(second).trees) == begun["trees"] + added


@pytest.mark.by_default("pax")
@pytest.mark.parametrize(("strategy", "step"), [("pax", 5), ("cyclic", 5), ("secureboost", 14)])
def test_a_run_that_goes_on_can_be_resumed(continued, strategy, step):
    first = run_local(continued(strategy, num_boost_round=1, **SMALL))
    n_more = 1 if strategy == "secureboost" else 3
    init = {"init_model": str(first.path), "num_boost_round": n_more}
    settings = continued(strategy, **init, **SMALL)
    die(settings, dies_before_sending=step)
    folder = run(resumed(settings), simulated_contexts(settings))
    once = run_local(continued(strategy, num_boost_round=1 + n_more, **SMALL))
    assert model_bytes(folder) == model_bytes(once)
    assert summary_of(folder)["init_model"]["rounds"] == 1


# What fits by its names


@pytest.mark.parametrize("model", ["own", "xgboost"])
def test_columns_are_matched_by_name_in_any_order(made, model):
    columns = made_columns(BINARY)
    if model == "own":  # what fedapp exports has no names of categories
        columns["town"] = [
            f"t{row % 3}{label if row % 4 else 2}" for row, label in enumerate(columns["y"])
        ]
    first = run_local(made("pax", columns=columns, parties=2))
    path = first.path / {"own": "model.json", "xgboost": "model.xgb.json"}[model]
    backwards = {name: columns[name] for name in reversed(columns)}
    second = run_local(made("pax", columns=backwards, parties=2, init_model=str(path)))
    begun, longer = model_of(first), model_of(second)
    assert longer.columns == begun.columns[::-1]
    again = longer.first_rounds(len(begun.trees)).in_order(begun.columns)
    np.testing.assert_array_equal(again.sets.bits, begun.sets.bits)
    assert (len(again.sets.bits) > 0) == (model == "own")
    for tree, other in zip(again.trees, begun.trees, strict=True):
        for field in ("left", "column", "threshold", "default_left", "value", "set"):
            np.testing.assert_array_equal(tree[field], other[field])


@pytest.mark.parametrize("file", ["model.json", "model.xgb.json"])
def test_rows_that_lack_a_class_are_trained_on_where_the_objective_is_set(settings, tmp_path, file):
    columns = {name: np.asarray(each) for name, each in made_columns(CLASSES).items()}
    few = columns["y"] != 1
    whole, lacking = (
        write_rows(tmp_path / name, {key: each[rows] for key, each in columns.items()})
        for name, rows in (("all.csv", few | ~few), ("few.csv", few))
    )
    given = {"label": "y", "parties": 2, "num_boost_round": 1}
    first = run_local(settings(data=str(whole), objective="auto", **given))
    given |= {"data": str(lacking), "init_model": str(first.path / file)}
    rule = r"^objective of init-model must be .*; where the rows lack classes of it, set objective="
    with pytest.raises(ConfigError, match=rf"{rule}multi:softprob$"):
        run_local(settings(objective="auto", **given))
    begun, longer = model_of(first), model_of(run_local(settings(objective=CLASSES, **given)))
    assert longer.classes == begun.classes == ("0", "1", "2")
    assert len(longer.trees) == 2 * len(begun.trees) == 6


# What does not fit


LEAVES = np.zeros(1, NODE)
LEAVES["left"], LEAVES["parent"], LEAVES["set"] = LEAF, -1, NO_SET
STUMP = Ensemble(BINARY, np.float32([0.5]), tuple("abcdef"), ("0", "1"), (LEAVES,))


def of_model(**changes):
    return {"changes": changes}


@pytest.mark.parametrize(
    ("field", "given", "rule"),
    [
        ("objective", of_model(objective="reg:logistic", classes=()), ", .* got 'reg:logistic'$"),
        ("columns", of_model(columns=tuple("abcdeg")), ", number 6 being 'f', got 'g'$"),
        ("columns", of_model(columns=tuple("abcde")), ", 6 in number, got 5$"),
        ("classes", of_model(classes=("0", "2")), ", number 2 being '1', got '2'$"),
        ("categories", of_model(categories=(None,) * 5 + (("x",),)), ", 0 in number, got 6$"),
        ("parameters", {"scale_pos_weight": 2.0}, ""),
        ("base-margin", MARGINS, ", 'm', got ''$"),
        ("num_parallel_tree", PARALLEL, ""),
    ],
)
def test_a_model_that_is_not_of_the_run_is_refused_by_the_field(
    continued, tmp_path, field, given, rule
):
    path, given = tmp_path / "other.json", dict(given)
    path.write_text(to_text(replace(STUMP, **given.pop("changes", {}))))
    with pytest.raises(ConfigError, match=f"^{field} of init-model must be the run's{rule}"):
        run_local(continued(init_model=str(path), **given))


def test_bagging_goes_on_from_rounds_of_single_trees(continued, tmp_path):
    path = tmp_path / "other.json"
    path.write_text(to_text(replace(STUMP, trees=(LEAVES,) * 2, num_parallel_tree=2)))
    rule = "^num_parallel_tree of init-model must be the run's"
    with pytest.raises(ConfigError, match=rule):
        run_local(continued("bagging", init_model=str(path)))


def test_a_file_that_is_not_there_is_named_and_a_model_in_parts_refused(settings, tmp_path):
    rule = r"init-model must be a run's folder, .*, got .*nowhere"
    with pytest.raises(ConfigError, match=rule):
        read_init_model(settings(init_model=str(tmp_path / "nowhere")), NO_MODEL, log.warning)
    (tmp_path / "model.json").write_text('{"format": 1, "kind": "divided"}')
    with pytest.raises(DataError, match=r"^model must be"):
        read_init_model(settings(init_model=str(tmp_path)), NO_MODEL, log.warning)


def test_turns_go_on_where_they_stopped():
    names, turn = ["a", "b", "c"], ""
    for n_rounds in range(7):
        assert last_turn(names, n_rounds) == turn
        turn = next_turn(names, turn)


def test_rounds_are_counted_by_their_trees():
    model = replace(NO_MODEL, trees=(LEAVES,) * 6)
    assert InitialModel.with_model(model, 3) == InitialModel(2, 6)
    with pytest.raises(ConfigError, match="must have whole rounds of 4 trees, got 6 trees"):
        InitialModel.with_model(model, 4)


# At a party


def last(array, value):
    return np.append(array[:-1], np.array([value], array.dtype))


@pytest.mark.parametrize(
    ("objective", "change", "rule"),
    [
        (BINARY, lambda p: {**p, "columns": last(p["columns"], 6)}, r"\w* ?columns must be 0 to 5"),
        (BINARY, lambda p: {**p, "sets": last(p["sets"], 0)}, "trees .*"),
        (CLASSES, lambda p: None, r"trees must be a multiple of 3, got 2$"),
    ],
    ids=["columns", "sets", "half a round"],
)
def test_trees_that_do_not_fit_are_refused_by_a_party(
    continued, monkeypatch, objective, change, rule
):
    first = run_local(continued(objective=objective, num_boost_round=1))

    def packed(trees, *given, **more):
        whole = pack_trees(trees, *given, **more)
        return change(whole) or pack_trees(trees[:2], *given, **more)

    monkeypatch.setattr(pax, "pack_trees", packed)
    with pytest.raises(PartyError, match=f"InitRequest.{rule}"):
        run_local(continued(objective=objective, init_model=str(first.path)))


def change_part(folder):
    part = home() / "sites" / "party-2" / summary_of(folder)["model_id"] / "part.json"
    part.write_text(part.read_text().replace('"format": 3', '"format":  3'))


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"objective": "reg:logistic"}, "objective of init-model must be the run's at party-1"),
        ({"asked_scale_pos_weight": 2.0}, "parameters of init-model must be the run's at party-1"),
        ({"num_parallel_tree": 3}, "num-parallel-tree of init-model must be the run's at party-1"),
        ({"base_margin": "", "drop_columns": "m"}, "base-margin of init-model must be the run's"),
        ({"asked_parties": 3}, "(parties must be those of init-mod|must have a part|columns of i)"),
        ({"seed": 7}, "categories of init-model must be those of .* rows, .* same table and seed"),
        (None, "model must be the one this run was trained with"),
    ],
    ids=["objective", "parameters", "parallel", "margins", "parties", "seed", "part"],
)
def test_parts_that_are_not_of_the_run_are_refused(continued, trained_once, changes, rule):
    how = {**TEXTS, **MARGINS, **SMALL, "num_boost_round": 1}
    first = trained_once(continued("secureboost", **how))
    if changes is None:
        change_part(first)
    run = continued("secureboost", init_model=str(first.path), **how)
    with pytest.raises(PartyError, match=rule):
        run_local(run.model_copy(update=changes or {}))


def test_a_model_to_go_on_from_is_named_by_its_id_alone():
    plain = {"multi_strategy": "one_output_per_tree", "calibration": "none"}
    request = SimpleNamespace(init_model="../../../../x", objective="binary:logistic", **plain)
    with pytest.raises(ProtocolError, match=r"^bank: SetupRequest.init_model must be 16 hex"):
        check_setup("bank", request)


def test_models_of_other_methods_are_not_gone_on_from(continued, tmp_path, monkeypatch):
    first = run_local(continued(num_boost_round=1, **SMALL))
    for path, rule in (
        (first.path, "must be a run of secureboost, .*, got one of pax$"),
        (tmp_path / "no", f"must be the folder of a finished run, got {re.escape(str(tmp_path))}"),
    ):
        with pytest.raises(ConfigError, match=f"^init-model {rule}"):
            run_local(continued("secureboost", init_model=str(path)))
    forest = {"federated_forest__trees": 2, "allow_export": True, "align": "ordered"}
    usual = dict.fromkeys(("subsample", "colsample_bytree", "colsample_bynode"), 1.0)
    forest = run_local(continued("federated-forest", **forest, **usual))
    model_id = summary_of(forest)["model_id"]
    # No server makes a party go on from it, either.
    monkeypatch.setattr("strategies.secureboost.init_model_id", lambda _: model_id)
    with pytest.raises(PartyError, match="init-model must be a boosted model, got a forest"):
        run_local(continued("secureboost"))


# Models of stock XGBoost


TRAINED = {"objective": "binary:logistic", "max_depth": 3}
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
    return xgboost.train({**TRAINED, **more}, matrix, n_rounds)


def read(source, run, kind="json"):
    """The model of a booster's file, and the warnings."""
    warnings = []
    return stock_ensemble(bytes(source.save_raw(kind)), run, warnings.append), warnings


def document_of(source):
    document = json.loads(source.save_raw("json"))
    return document, document["learner"]["gradient_booster"]


# Runs


def test_a_model_of_other_cuts_is_continued_from_its_rows_own_margins(tmp_path, settings):
    values, labels = rows(8)
    columns = dict(zip("abcdefgh", values.T, strict=True))
    data = write_rows(tmp_path / "rows.csv", {**columns, "y": labels})
    path, held = tmp_path / "first.ubj", {"test_fraction": 0.0, "valid_fraction": 0.0}
    given = {"data": str(data), "label": "y", "parties": 1, "max_depth": 4, "max_bin": 128}
    run = settings(num_boost_round=2, init_model=str(path), **given, **held, **PENALTIES)
    parameters = {**TRAINED, "max_depth": 4, "eta": run.eta, **PENALTIES}
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
    parameters = {**TRAINED, "max_cat_to_onehot": 1}
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
    assert is_xgboost(bytes(source.save_raw(kind)))


def test_deleted_nodes_are_left_out():
    source = booster(3, tree_method="exact", gamma=2.0)
    sizes = [
        (len(tree["left_children"]), int(tree["tree_param"]["num_deleted"]))
        for tree in document_of(source)[1]["model"]["trees"]
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


def test_a_base_score_of_one_number_is_that_of_every_class():
    source = booster(1, np.arange(300) % 3, objective="multi:softprob", num_class=3)
    document, fields = document_of(source)
    document["learner"]["learner_model_param"]["base_score"] = "5E-1"  # before XGBoost 3.1
    del fields["model"]["cats"]
    text = json.dumps(document).encode()
    assert stock_ensemble(text, bare("multi:softprob"), print).base_score.tolist() == [0.5] * 3


@pytest.mark.parametrize("place", ["booster", "model"])
def test_dropped_trees_of_later_versions_are_refused_by_name(place):
    """XGBoost 3.3 saves dart as a gbtree with weights beside its model, 3.4 within."""
    document, fields = document_of(booster(3))
    fields = fields["model"] if place == "model" else fields
    fields["weight_drop"] = [1.0, 1.0, 1.0]  # of a rate of 0
    whole = json.dumps(document).encode()
    assert len(stock_ensemble(whole, bare(), print).trees) == 3
    fields["weight_drop"] = [1.0, 0.75, 1.0]
    with pytest.raises(ConfigError, match=r"^booster of init-model must be 'gbtree', got 'dart'$"):
        stock_ensemble(json.dumps(document).encode(), bare(), print)


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


@pytest.mark.parametrize("names", [None, ["é", "x"]])
def test_categories_must_have_names(names):
    values, labels = rows(1)
    codes = np.nan_to_num(values[:, :1] > 0).astype(int)
    how = {"feature_types": ["c"], "enable_categorical": True}
    if names:
        codes = pd.DataFrame({"a": pd.Categorical(np.array(names)[codes[:, 0]])})
        how = {"enable_categorical": True}
    source = xgboost.train(TRAINED, xgboost.DMatrix(codes, labels, **how), 1)
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


def test_half_a_file_is_refused():
    rule = "^init-model must be a whole file of XGBoost's save_model, got a damaged one$"
    for content in RAW.values():
        with pytest.raises(DataError, match=rule):
            stock_ensemble(content[: len(content) // 2], bare(), print)


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
