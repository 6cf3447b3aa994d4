"""Trees are XGBoost's, node for node: a row for each way to grow them, a test for each property.

Of one party, of several whose bins are those of all rows, also under masks; over random tables; and
stock XGBoost predicts and explains what was exported.
"""

import json

import numpy as np
import pytest
import xgboost

from fedapp.runs.baselines import baseline_rows, run_baselines
from fedapp.runs.local import run_local
from fedapp.trees.categories import NO_SET
from fedapp.trees.model import LEAF
from fedapp.trees.objective import transform
from fedapp.trees.predict import predict_margins
from tests.federated import model_bytes, model_of
from tests.pooled import assert_exact, pooled_booster
from tests.random_tables import differences, random_case
from tests.reference import compare_trees, xgboost_trees
from tests.tables import claims, made_columns, weighted_copy, write_rows
from tests.texts import adult, airline, kddcup

BINARY, CLASSES, NUMBERS = "binary:logistic", "multi:softprob", "reg:squarederror"
POISSON, GAMMA, TWEEDIE, HUBER = "count:poisson", "reg:gamma", "reg:tweedie", "reg:pseudohubererror"
LOG, HINGE, SHARES = "reg:squaredlogerror", "binary:hinge", "reg:logistic"
OF_CLAIMS = [POISSON, GAMMA, TWEEDIE, SHARES, LOG, HUBER, HINGE]
PENALTIES = {"lambda": 0.5, "alpha": 0.3, "gamma": 0.5, "min-child-weight": 5.0}
STEPS = {"max-delta-step": 0.4, "alpha": 0.2}
BY_GAIN = {"grow_policy": "lossguide", "max_leaves": 12, "max_depth": 0}
MONOTONE = {"monotone-constraints": "f2:1,f5:1,f8:-1"}
GROUPS = {"interaction-constraints": "[f1,f2],[f2,f5,f8],[f3,f4]"}


# One party, on real rows


def registry(name, **more):
    return lambda folder, real: {"data": name, **more}


def copied(name, **more):
    """With weights w and margins m, which either have a role or are no features."""
    drop = ",".join({"w", "m"} - set(more.values()))

    def make(folder, real):
        data = weighted_copy(name, folder / "copy.csv")
        return {"data": str(data), "label": "y", "drop_columns": drop, **more}

    return make


def texts(write, n_rows, label, **more):
    return lambda folder, real: {"data": str(write(folder, real, n_rows)), "label": label, **more}


CYCLIC = {"strategy": "cyclic"}
FLIGHTS = {"objective": NUMBERS, "drop_columns": "late"}
REAL = {
    "penalties": registry("default-credit", objective=BINARY, **PENALTIES),
    "classes": registry("waveform", objective=CLASSES, **PENALTIES),
    "weights": copied("waveform", objective=CLASSES, weight="w"),
    "amounts": registry("abalone", objective=GAMMA),
    "logarithms": registry("abalone", objective=LOG, **{"min-child-weight": 0.0}),
    "huber": registry("abalone", objective=HUBER, **{"huber-slope": 10.0}),
    "steps": registry("space-ga", objective=NUMBERS, **{"max-delta-step": 0.1}),
    "tweedie": registry("abalone", objective=TWEEDIE, **{"tweedie-variance-power": 1.2}),
    "counts of margins": copied("default-credit", objective=POISSON, base_margin="m", **CYCLIC),
    "margins": copied("default-credit", objective=BINARY, base_margin="m"),
    "groups": registry("abalone", objective=POISSON, **GROUPS),
    "both": registry("abalone", objective=NUMBERS, **MONOTONE, **GROUPS, **STEPS),
    "by gain": registry("default-credit", objective=BINARY, **BY_GAIN),
    "parallel": registry("default-credit", objective=BINARY, num_parallel_tree=3),
    "texts": texts(adult, 3000, "income", **PENALTIES),
    "few categories": texts(adult, 3000, "income", **{"max-cat-threshold": 3}),
    "missing texts": texts(kddcup, 2500, "label", objective=CLASSES, num_boost_round=2),
    "many texts": texts(airline, 4000, "ArrDelay", **FLIGHTS),
    "all texts": texts(adult, 40_000, "education", objective=CLASSES),
}
SHORT = {"num_boost_round": 4, "max_depth": 5, "max_bin": 64, "valid_fraction": 0.0}


@pytest.mark.by_default(*(REAL.keys() - {"all texts", "by gain", "amounts"}))
@pytest.mark.parametrize("name", REAL)
def test_one_party_grows_xgboosts_trees_of_real_rows(real_data, settings, tmp_path, name):
    run = settings(parties=1, **{**SHORT, **REAL[name](tmp_path, real_data)})
    model = assert_exact(run)
    assert len(model.trees) == run.num_boost_round * run.num_parallel_tree * model.n_outputs
    if run.monotone_constraints or run.interaction_constraints:
        free = {"monotone_constraints": "", "interaction_constraints": ""}
        assert compare_trees(model, pooled_booster(run.model_copy(update=free))).differing


# Several parties, whose cuts are those of all rows


def made_rows(objective, **more):
    def make(folder):
        columns = made_columns(objective, 600)
        columns["m"] = np.random.default_rng(5).normal(size=600).round(3)
        drop = {} if "base_margin" in more else {"drop_columns": "m"}
        data = write_rows(folder / "made.csv", columns)
        return {"data": str(data), "objective": objective, **drop, **more}

    return make


def claimed(objective):
    def make(folder):
        values = np.random.default_rng(3).integers(0, 12, (600, 5)).astype(np.float64)
        columns = {**dict(zip("abcde", values.T, strict=True)), "y": claims(objective, values)}
        data = write_rows(folder / "claims.csv", columns)
        given = {"tweedie-variance-power": 1.3, "max-delta-step": 0.6, "huber-slope": 2.0}
        return {"data": str(data), "objective": objective, **given}

    return make


def towns(folder):
    """Names, some of them missing, that say something of the label."""
    columns = made_columns(BINARY, 600)
    rng = np.random.default_rng(1)
    columns["town"] = [f"t{rng.integers(9)}{'' if y else rng.integers(3)}" for y in columns["y"]]
    columns["town"][::11] = [""] * len(columns["town"][::11])
    return {"data": str(write_rows(folder / "towns.csv", columns)), "objective": BINARY}


DRAWS = {"colsample_bytree": 0.5, "feature_weights": "a:0,b:0.2,c:5"}  # d, e and f: 1
BY_NODE = {"colsample_bynode": 0.5, **BY_GAIN}
MADE = {
    "two classes": made_rows(BINARY),
    "classes": made_rows(CLASSES),
    "numbers": made_rows(NUMBERS),
    "margins": made_rows(NUMBERS, base_margin="m"),
    "texts": towns,
    "by gain": made_rows(CLASSES, **BY_GAIN),
    "of few leaves": made_rows(CLASSES, max_leaves=11, max_depth=5),
    "parallel": made_rows(CLASSES, num_parallel_tree=2),
    "parallel draws": made_rows(BINARY, num_parallel_tree=2, colsample_bytree=0.5),
    "draws": made_rows(BINARY, **DRAWS),
    "draws by level": made_rows(BINARY, colsample_bylevel=0.5),
    "draws by node": made_rows(BINARY, **BY_NODE),
    **{objective: claimed(objective) for objective in OF_CLAIMS},
}


@pytest.mark.by_default(
    *("classes", "numbers", "margins", "texts", "by gain", "parallel draws", "draws", TWEEDIE)
)
@pytest.mark.parametrize("name", MADE)
def test_parties_grow_the_trees_of_all_rows_also_under_masks(settings, tmp_path, name):
    given = {"num_boost_round": 3, "max_depth": 4, "max_bin": 64, "pax__bins": "equal"}
    given |= {"label": "y", "test_fraction": 0.0, **MADE[name](tmp_path)}
    masked = {**given, "pax__aggregation": "secure"}
    one, three = (model_of(run_local(settings(parties=n, **masked))) for n in (1, 3))
    assert_alike(one, three)
    if "draws" in name:
        one, plain = (model_of(run_local(settings(parties=n, **given))) for n in (1, 3))
        assert_alike(one, plain)
    else:
        plain = assert_exact(settings(parties=3, **given))
    assert plain.base_score.tolist() == three.base_score.tolist()
    columns = np.concatenate([tree["column"][tree["left"] != LEAF] for tree in plain.trees])
    assert len(columns) > 8
    assert "feature_weights" not in given or 0 not in columns


def assert_alike(model, other):
    for tree, same in zip(model.trees, other.trees, strict=True):
        for name in ("left", "column", "threshold", "default_left"):
            np.testing.assert_array_equal(tree[name], same[name])
        np.testing.assert_allclose(tree["gain"], same["gain"], rtol=1e-4)
        np.testing.assert_allclose(tree["value"], same["value"], rtol=1e-5, atol=1e-7)


# What stock XGBoost makes of the export


EXPORTED = {
    **{name: MADE[name] for name in MADE if "draws" not in name and name != "texts"},
    "drawn": made_rows(CLASSES, num_parallel_tree=3, subsample=0.6, colsample_bytree=0.5),
}
PARAMETERS = {
    POISSON: ("poisson_regression_param", "max_delta_step"),
    TWEEDIE: ("tweedie_regression_param", "tweedie_variance_power"),
    HUBER: ("pseudo_huber_param", "huber_slope"),
}


@pytest.mark.by_default("numbers", "margins", "drawn", POISSON, HINGE)
@pytest.mark.parametrize("name", EXPORTED)
def test_stock_xgboost_predicts_and_explains_the_export(settings, tmp_path, name):
    given = {"num_boost_round": 4, "max_depth": 3, "label": "y", **EXPORTED[name](tmp_path)}
    run = settings(parties=2, **given)
    folder = run_local(run)
    model, booster = model_of(folder), xgboost.Booster(model_file=folder.path / "model.xgb.json")
    assert (booster.num_boosted_rounds(), booster.feature_names) == (4, list(model.columns))
    rng = np.random.default_rng(2)
    values = rng.integers(0, 40, (300, len(model.columns))).astype(np.float32)
    values[rng.random(values.shape) < 0.1] = np.nan
    margins = rng.normal(size=300).astype(np.float32) if run.base_margin else None
    matrix = xgboost.DMatrix(values, base_margin=margins, feature_names=booster.feature_names)
    for n_rounds in (1, 3, 4):
        rounds = {"iteration_range": (0, n_rounds), "strict_shape": True}
        theirs = booster.predict(matrix, output_margin=True, **rounds)
        ours = predict_margins(model.first_rounds(n_rounds), values, margins)
        np.testing.assert_array_equal(ours, theirs)
    predicted = booster.predict(matrix, strict_shape=True)
    np.testing.assert_allclose(transform(model.objective, ours), predicted, rtol=1e-6)
    contributions = booster.predict(matrix, pred_contribs=True, strict_shape=True)
    assert contributions.shape == (300, model.n_outputs, len(model.columns) + 1)
    np.testing.assert_allclose(contributions.sum(axis=-1), theirs, atol=1e-4)
    assert booster.attr("base_margin") == (run.base_margin or None)
    if run.objective in PARAMETERS:
        block, parameter = PARAMETERS[run.objective]
        config = json.loads(booster.save_config())["learner"]["objective"]
        assert float(config[block][parameter]) == pytest.approx(getattr(run, parameter))


# Random tables and settings


def by_gain(seed):
    """Draws of limits of a tree."""
    rng = np.random.default_rng([7, seed])
    drawn = {"grow-policy": str(rng.choice(["depthwise", "lossguide"]))}
    drawn["max-leaves"] = int(rng.choice([0, 1, 2, 3, 5, 8, 20]))
    no_depth = {"max-depth": 0} if drawn["max-leaves"] and rng.random() < 0.5 else {}
    return {**drawn, **no_depth}


def in_parallel(seed):
    return {"num-parallel-tree": 2 + seed % 4, "grow-policy": "lossguide", "max-leaves": 7}


def divided_in_parallel(seed):
    return {"num-parallel-tree": 2 + seed % 3}


# By way: the method, its first seed, further settings of each seed, how many, and those by default.
FEW, MANY = (0, 1, 2, 150, 210), (*range(4), 150, 151, 152, 210)
RANDOM = {
    "pax": ("pax", 0, None, 240, MANY),
    "secureboost": ("secureboost", 1000, None, 240, MANY),
    "pax by gain": ("pax", 0, by_gain, 240, FEW),
    "secureboost by gain": ("secureboost", 0, by_gain, 240, FEW),
    "pax, parallel": ("pax", 0, in_parallel, 240, FEW),
    "secureboost, parallel": ("secureboost", 3000, divided_in_parallel, 120, (2, 27, 71, 95)),
}


@pytest.mark.parametrize(
    ("way", "seed"),
    [
        pytest.param(way, seed, marks=() if seed in default else pytest.mark.slow)
        for way, (*_, n_seeds, default) in RANDOM.items()
        for seed in range(n_seeds)
    ],
)
def test_random_tables_grow_xgboosts_trees(settings, vertical, tmp_path, way, seed):
    strategy, first, more, *_ = RANDOM[way]
    case = random_case(tmp_path / "random.csv", first + seed, strategy)
    make = vertical if strategy == "secureboost" else settings
    run = make(strategy=strategy, **{**case, **(more(seed) if more else {})})
    folder = run_local(run)
    assert differences(run, folder) == []
    model = model_of(folder)
    assert len(model.trees) == run.num_boost_round * run.num_parallel_tree * model.n_outputs


def test_a_leaf_without_penalty_is_split_as_by_xgboost(settings, tmp_path):
    values = [int(digit) for digit in "346701671263262354006664623602"]
    path = write_rows(tmp_path / "rows.csv", {"a": values, "y": [int(a > 4) for a in values]})
    given = {"lambda": 0.0, "min-child-weight": 0.0, "num-boost-round": 1, "max-depth": 2}
    held = {"test-fraction": 0.0, "valid-fraction": 0.0}
    run = settings(data=str(path), label="y", parties=1, **given, **held)
    model, booster = model_of(run_local(run)), pooled_booster(run)
    assert len(xgboost_trees(booster)[0]["left_children"]) == 5
    assert compare_trees(model, booster).differing == 0


@pytest.mark.by_default("pax")
@pytest.mark.parametrize("strategy", ["pax", "secureboost"])
def test_categories_that_no_training_row_has_go_where_xgboost_sends_them(
    vertical, tmp_path, strategy
):
    rng = np.random.default_rng(2)
    kinds, x = rng.integers(0, 120, 300), rng.normal(size=300).round(1)
    is_missing = rng.random(300) < 0.2
    signal = np.where(is_missing, -3, kinds % 3) + x + rng.normal(0, 0.5, 300)
    names = ["" if gone else f"k{kind:03}" for kind, gone in zip(kinds, is_missing, strict=True)]
    columns = {"kind": names, "x": x, "z": rng.normal(size=300).round(2)}
    path = write_rows(tmp_path / "kinds.csv", {**columns, "y": (signal > 1).astype(int)})
    parties = {"pax": 1, "secureboost": 2}[strategy]
    given = {"data": str(path), "label": "y", "parties": parties, "columns": "sizes:1,2"}
    run = vertical(strategy=strategy, **given, **{"num-boost-round": 3, "min-child-weight": 0.1})
    folder, rows = run_local(run), baseline_rows(run)[0]
    codes = [rows.values[subset, 0] for subset in (rows.split.train, rows.split.test)]
    assert len(np.setdiff1d(codes[1][codes[1] >= 0], codes[0])) > 3
    assert any(((t["set"] != NO_SET) & ~t["default_left"]).any() for t in model_of(folder).trees)
    assert differences(run, folder) == []


# Settings that depend on the table


@pytest.mark.by_default("pax", "secureboost")
@pytest.mark.parametrize("strategy", ["pax", "bagging", "secureboost"])
def test_children_weigh_more_where_a_column_has_many_categories(vertical, write_table, strategy):
    """Of the baseline too, which PAX with one party and SecureBoost equal."""
    rng = np.random.default_rng(4)
    codes = rng.permutation(np.arange(700) % 100)
    labels = (rng.random(700) < (codes % 7 + 1) / 9).astype(int)
    for name, column, due in (("many", codes, 2), ("fewer", np.where(codes == 99, 0, codes), 1)):
        places = [f"place {code:02}" for code in column]
        given = {"data": str(write_table(name, n_rows=700, y=labels, place=places)), "label": "y"}
        given |= {"strategy": strategy, "parties": 1 if strategy == "pax" else 2, "max_depth": 3}
        given |= {"columns": "sizes:2,1"} if strategy == "secureboost" else {}
        runs, folders = [], []
        for weight in ("auto", 1.0, 5.0):
            runs.append(vertical(**given, min_child_weight=weight))
            folders.append(run_local(runs[-1]))
        scores = [run_baselines(run)["pooled"] for run in runs]
        for auto, light, heavy in ([model_bytes(folder) for folder in folders], scores):
            assert light != heavy
            assert auto == (light, heavy)[due - 1]
        assert folders[0].summary["boosting"]["min_child_weight"] == (1.0, 5.0)[due - 1]
        if strategy != "bagging":
            same, every = run_baselines(runs[0], folders[0].path)["same_nodes"]
            assert same == every > 10
