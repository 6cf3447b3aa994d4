"""SecureBoost: XGBoost's own trees over columns of several parties, under encryption."""

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import xgboost

from clients.secureboost.round import draw_rows
from fedapp.data.read import read_frame
from fedapp.data.schema import Roles
from fedapp.errors import ConfigError
from fedapp.metrics import stopping_metric
from fedapp.records.document import load
from fedapp.run_folder import RunFolder
from fedapp.runs.local import run_local
from fedapp.trees.model import LEAF, Ensemble
from fedapp.trees.predict import predict_margins
from fedapp.trees.rounds import Sampling
from fedapp.trees.sets import NO_SET, category_counts
from fedapp.trees.xgboost import typed_columns
from strategies.secureboost import SecureBoost
from tests.claims import claims
from tests.federated import lines_of, summary_of
from tests.pooled import Pooled, assert_xgboosts, splits_of
from tests.tables import made_columns, write_rows
from tests.texts import adult, airline, kddcup
from tests.trees.test_exactness import PENALTIES

OBJECTIVES = ["binary:logistic", "multi:softprob", "reg:squarederror"]
# By default the one with a tree for each class.
MOSTLY_CLASSES = [
    pytest.param("binary:logistic", marks=pytest.mark.slow),
    "multi:softprob",
    pytest.param("reg:squarederror", marks=pytest.mark.slow),
]


@pytest.fixture
def made(vertical, tmp_path):
    """``vertical`` with a small table of an objective."""

    def make(objective="binary:logistic", parties=2, **more):
        data = write_rows(tmp_path / "made.csv", made_columns(objective))
        given = {"num_boost_round": 3, "max_depth": 3, "max_bin": 16, **more}
        return vertical(data=str(data), label="y", objective=objective, parties=parties, **given)

    return make


# The same trees


@pytest.mark.by_default("3-multi:softprob")
@pytest.mark.each_value_once
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("parties", [2, 3])
def test_the_joined_model_is_xgboosts_on_the_joined_table(made, objective, parties):
    run = made(objective, parties, num_boost_round=4)
    assert_xgboosts(run_local(run), Pooled(run))


DRAWN = {"columns": "random", "seed": 3}
FLIGHTS = {"drop-columns": "late", **DRAWN}
TEXTS = [
    (adult, "income", "binary:logistic", 800, 2, {"seed": 1}),
    (adult, "income", "binary:logistic", 800, 3, {"seed": 1, "max-cat-to-onehot": 10}),
    (kddcup, "label", "multi:softprob", 400, 2, DRAWN),
    (airline, "ArrDelay", "reg:squarederror", 600, 3, FLIGHTS),
]
MANY_TEXTS = [
    (adult, "education", "multi:softprob", 2000, 2, {"drop-columns": "education-num", **DRAWN}),
    (adult, "income", "binary:logistic", 10_000, 3, PENALTIES),
    (kddcup, "label", "multi:softprob", 3000, 3, DRAWN),
    (airline, "ArrDelay", "reg:squarederror", 10_000, 2, FLIGHTS),
    (airline, "late", "binary:logistic", 10_000, 3, {**FLIGHTS, "drop-columns": "ArrDelay"}),
]


@pytest.mark.by_default("adult-income-*-3-more1")
@pytest.mark.parametrize(
    ("write", "label", "objective", "n_rows", "parties", "more"),
    [*TEXTS, *(pytest.param(*each, marks=pytest.mark.slow) for each in MANY_TEXTS)],
)
def test_columns_of_text_are_split_as_by_xgboost(
    vertical, real_data, tmp_path, write, label, objective, n_rows, parties, more
):
    data, few = write(tmp_path, real_data, n_rows), n_rows < 1000
    size = {"num_boost_round": 2, "max_depth": 3 if few else 5, "max_bin": 8 if few else 32}
    given = {"label": label, "objective": objective, "align": "ordered", **size, **more}
    run = vertical(data=str(data), parties=parties, **given)
    folder, whole = run_local(run), Pooled(run)
    assert_xgboosts(folder, whole)
    model = load(folder.path / "model.json", Ensemble)
    splits = splits_of(model)
    owners = whole.owners(splits["column"])
    assert (owners[splits["set"] != NO_SET] > 0).any()  # some at passive parties
    matrix = xgboost.DMatrix(
        whole.values, **typed_columns(category_counts(model.categories, len(model.columns)))
    )
    theirs = whole.booster().predict(matrix, output_margin=True)
    margins = predict_margins(model, whole.values).reshape(theirs.shape)
    np.testing.assert_allclose(margins, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_penalties_count_as_in_xgboost(made):
    run = made(**PENALTIES)
    assert_xgboosts(run_local(run), Pooled(run))


@pytest.mark.slow
@pytest.mark.parametrize("objective", MOSTLY_CLASSES)
def test_weights_of_rows_count_as_in_xgboost(made, tmp_path, objective):
    columns, run = made_columns(objective), made(objective, weight="w")
    weights = np.random.default_rng(7).choice([0.0, 0.5, 1.0, 2.5], len(columns["y"]))
    write_rows(Path(run.data), {**columns, "w": weights})
    assert_xgboosts(run_local(run), Pooled(run))


@pytest.mark.by_default("binary:hinge*")
@pytest.mark.parametrize(
    ("objective", "more"),
    [
        ("count:poisson", {}),
        pytest.param("reg:gamma", {}, marks=pytest.mark.slow),
        pytest.param("reg:tweedie", {"tweedie_variance_power": 1.3}, marks=pytest.mark.slow),
        ("reg:logistic", {"max_delta_step": 0.3}),
        ("reg:squaredlogerror", {}),
        ("reg:pseudohubererror", {"huber_slope": 0.5}),
        ("binary:hinge", {}),
    ],
)
def test_claims_grow_xgboosts_trees(vertical, tmp_path, objective, more):
    columns = made_columns("reg:squarederror")
    values = np.stack([columns[name] for name in "abcdef"], axis=1)
    data = write_rows(tmp_path / "claims.csv", {**columns, "y": claims(objective, values)})
    given = {"num_boost_round": 3, "max_depth": 3, "max_bin": 16, **more}
    run = vertical(data=str(data), label="y", objective=objective, **given)
    assert_xgboosts(run_local(run), Pooled(run))


@pytest.mark.slow
def test_positive_rows_count_more_as_in_xgboost(made):
    run = made(scale_pos_weight=3.0, eval_metric="logloss,aucpr,error", early_stopping_rounds=3)
    folder = run_local(run)
    booster = Pooled(run).booster(verbose_eval=False)
    assert_xgboosts(folder, Pooled(run), booster[: summary_of(folder)["best_round"]])
    valid = summary_of(folder)["metrics"]["valid"]
    assert {"aucpr", "error"} <= valid.keys()


@pytest.mark.slow
def test_columns_that_are_almost_or_all_missing_split_as_in_xgboost(vertical, tmp_path):
    rng = np.random.default_rng(5)
    values = rng.normal(size=(300, 5)).round(2)
    labels = (values.sum(axis=1) + rng.normal(size=300) > 0).astype(int)
    # Label 0 is missing often; label 1 is large in c and small in d.
    values[:, 2] += 1.5 * labels
    values[:, 3] -= 1.5 * labels
    values[(labels == 0)[:, None] & (rng.random((300, 5)) < [0, 0.6, 0.5, 0.5, 0])] = np.nan
    values[:, 4] = np.nan
    path = write_rows(
        tmp_path / "holes.csv", {**dict(zip("abcde", values.T, strict=True)), "y": labels}
    )
    more = {"num_boost_round": 3, "max_depth": 3, "columns": "sizes:2,3", "seed": 0}
    run = vertical(data=str(path), label="y", **more)
    folder, whole = run_local(run), Pooled(run)
    assert_xgboosts(folder, whole)
    splits = splits_of(load(folder.path / "model.json", Ensemble))
    assert set(splits["default_left"][splits["column"] >= 2]) == {True, False}


@pytest.mark.slow
@pytest.mark.parametrize("objective", MOSTLY_CLASSES)
def test_the_exported_model_predicts_xgboosts_rows(made, objective):
    run = made(objective, 3)
    folder, whole = run_local(run), Pooled(run)
    exported = xgboost.Booster(model_file=folder.path / "model.xgb.json")
    model = load(folder.path / "model.json", Ensemble)
    assert model.columns == whole.columns
    named = xgboost.DMatrix(whole.values, feature_names=list(model.columns))
    ours = exported.predict(named, output_margin=True)
    theirs = whole.booster().predict(xgboost.DMatrix(whole.values), output_margin=True)
    np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)
    margins = predict_margins(model, whole.values).reshape(theirs.shape)
    np.testing.assert_allclose(margins, theirs, rtol=1e-6, atol=1e-6)


# Exchanges


@pytest.mark.by_default("2-8")
@pytest.mark.parametrize(("parties", "most"), [(2, 2 + 2 * 3), (3, 1 + 3 * 3)])
def test_a_round_takes_few_exchanges(made, parties, most):
    ledger = lines_of(run_local(made(parties=parties)).ledger)
    steps = {line["step"]: line["type"].removeprefix("train.secureboost_") for line in ledger}
    begun = sorted(step for step, kind in steps.items() if kind == "begin")
    assert len(begun) == 4  # the last one finds nothing more to begin
    assert np.diff(begun).max() == most
    kinds = Counter(steps.values())
    assert kinds["sum"] == kinds["split"] == 3 * 3


@pytest.mark.slow
def test_parties_are_aligned_in_two_exchanges_more_than_there_are(made):
    ledger = lines_of(run_local(made(parties=3, align="psi")).ledger)
    steps = {line["step"] for line in ledger if line["type"].startswith("query.alignment")}
    assert len(steps) == 3 + 2


# Trees of the active party alone


@pytest.fixture
def first_alone(made):
    """A run of three rounds whose first is the active party's."""
    run = made(secureboost__first_trees=1)
    return Pooled(run), run_local(run).path


@pytest.mark.slow
def test_a_first_tree_has_no_split_of_a_passive_party(first_alone):
    whole, folder = first_alone
    first, *later = load(folder / "model.json", Ensemble).trees
    assert set(whole.owners(first["column"][first["left"] != LEAF])) == {0}
    for tree in later:
        assert 1 in whole.owners(tree["column"][tree["left"] != LEAF])


@pytest.mark.slow
def test_later_trees_are_xgboosts_after_a_first_one_of_the_active_columns(first_alone):
    whole, folder = first_alone
    own = whole.owners(np.arange(6)) == 0
    alone = np.where(own, whole.values, np.float32(np.nan))
    first = xgboost.train(whole.parameters, whole.matrix(alone), 1)
    later = xgboost.train(whole.parameters, whole.matrix(whole.values), 2, xgb_model=first)
    assert_xgboosts(RunFolder(folder), whole, later)


def test_rounds_of_the_active_party_alone_ask_no_other(made):
    run = made(secureboost__first_trees=3)
    ledger = lines_of(run_local(run).ledger)
    assert "train.secureboost_sum" not in {line["type"] for line in ledger}
    assert summary_of(RunFolder(Path(run.run_dir)))["trees"] == 3


# Rows and columns that are drawn


@pytest.mark.slow
def test_a_run_stops_early_and_keeps_xgboosts_best_round(made):
    more = {"num_boost_round": 30, "early_stopping_rounds": 3, "eta": 1.0, "valid_fraction": 0.3}
    run = made(**more)
    folder, whole = run_local(run), Pooled(run)
    valid = xgboost.DMatrix(whole.values[whole.valid], whole.labels[whole.valid])
    stopped = whole.booster(evals=[(valid, "valid")], early_stopping_rounds=3, verbose_eval=False)
    summary, metric = summary_of(folder), stopping_metric(run.objective)
    assert 1 < summary["best_round"] == stopped.best_iteration + 1 < 27
    assert summary["metrics"]["valid"][metric] == pytest.approx(stopped.best_score, rel=1e-5)
    assert len(lines_of(folder.rounds)) == stopped.num_boosted_rounds()
    assert_xgboosts(folder, whole, stopped[: stopped.best_iteration + 1])


@pytest.mark.parametrize("parties", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_tree_splits_none_but_the_columns_drawn_for_it(made, parties):
    run = made("multi:softprob", parties, colsample_bytree=0.5)
    model = load(run_local(run).path / "model.json", Ensemble)
    drawn = [Sampling(run.seed, 0.5).columns(round_id, 3, 6) for round_id in range(3)]
    for tree, allowed in zip(model.trees, np.concatenate(drawn), strict=True):
        columns = tree["column"][tree["left"] != LEAF]
        assert len(columns)
        assert allowed[columns].all()


def test_a_round_counts_none_but_the_rows_drawn_for_it(made):
    run = made("reg:squarederror", subsample=0.5)
    model = load(run_local(run).path / "model.json", Ensemble)
    # Hessians are 1, so that the root's is the number of rows; of 288 about half are drawn.
    counts = [float(tree["hessian"][0]) for tree in model.trees]
    assert all(count.is_integer() and 115 < count < 173 for count in counts)
    assert len(set(counts)) == 3


@pytest.mark.slow
@pytest.mark.by_default("more0")
@pytest.mark.parametrize("more", [{"subsample": 0.7}, {"secureboost__goss": True}])
def test_the_same_seed_draws_the_same_rows(made, more):
    models = [(run_local(made(**more, seed=s)).path / "model.json").read_text() for s in (1, 1, 2)]
    trees = [json.loads(model)["trees"] for model in models]
    assert trees[0] == trees[1] != trees[2]


def test_goss_keeps_large_gradients_and_makes_up_for_the_others_it_leaves_out():
    boost = SimpleNamespace(
        num_parallel_tree=1, subsample=1.0, goss=True, top_rate=0.2, other_rate=0.1
    )
    rng = np.random.default_rng(1)
    pairs = rng.normal(size=(1000, 3, 2)).astype(np.float32)
    drawn = draw_rows(pairs.copy(), boost, rng)
    sizes = np.abs(pairs[..., 0]).sum(axis=1)
    top = sizes >= np.sort(sizes)[-200]
    rest = ~top & (drawn != 0).any(axis=(1, 2))
    assert np.array_equal(drawn[top], pairs[top])
    assert rest.sum() == 100
    # Ke et al. 2017, Algorithm 2: the sampled others stand for all of them, by (1 - a) / b.
    np.testing.assert_allclose(drawn[rest], pairs[rest] * 8, rtol=1e-6)


@pytest.mark.slow
def test_goss_learns_from_a_share_of_the_rows(made):
    run = made("reg:squarederror", secureboost__goss=True, num_boost_round=8)
    folder = run_local(run)
    model = load(folder.path / "model.json", Ensemble)
    # Of 288 rows 57 count once and 28 count 8 times.
    assert [float(tree["hessian"][0]) for tree in model.trees] == [57 + 28 * 8] * 8
    assert summary_of(folder)["metrics"]["train"]["r2"] > 0.5


# Real rows


def first_rows(source, n_rows, target, drop=""):
    """The first rows of a table, as CSV."""
    from pyarrow import csv

    frame = read_frame(source, Roles()).slice(0, n_rows)
    csv.write_csv(frame.drop_columns([drop]) if drop else frame, target)
    return str(target)


CREDIT = ("give-me-some-credit.csv.gz", "SeriousDlqin2yrs", "unnamed-1")
DEFAULT = ("default-credit.csv.gz", "default.payment.next.month", "ID")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "parties"),
    [
        (CREDIT, 2),
        pytest.param(DEFAULT, 3, marks=pytest.mark.slow),
        pytest.param(CREDIT, 3, marks=pytest.mark.slow),
        pytest.param(DEFAULT, 2, marks=pytest.mark.slow),
    ],
)
def test_the_joined_model_is_xgboosts_on_real_rows(real_data, vertical, tmp_path, source, parties):
    name, label, numbers = source
    data = first_rows(real_data / name, 1000, tmp_path / "rows.csv", drop=numbers)
    run = vertical(data=data, label=label, parties=parties, num_boost_round=4, max_depth=4)
    assert_xgboosts(run_local(run), Pooled(run))


HETERO = [
    pytest.param("breast-hetero", "y", "id", "binary:logistic", marks=pytest.mark.slow),
    pytest.param("motor-hetero", "motor_speed", "idx", "reg:squarederror", marks=pytest.mark.slow),
    ("student-hetero", "y", "id", "reg:squarederror"),
]


@pytest.mark.parametrize(("name", "label", "ids", "objective"), HETERO)
def test_the_joined_model_is_xgboosts_on_files_of_two_parties(
    real_data, vertical, name, label, ids, objective
):
    files = f"{real_data / name}-guest.csv,{real_data / name}-host.csv"
    more = {"label": label, "id": ids, "objective": objective, "align": "psi", "max_depth": 4}
    run = vertical(data=files, num_boost_round=4, **more)
    assert_xgboosts(run_local(run), Pooled(run))


def test_rounds_grown_alone_are_no_more_than_early_stopping_waits_for(made):
    more = {"secureboost__first_trees": 4, "early_stopping_rounds": 3, "valid_fraction": 0.3}
    rule = "^secureboost.first-trees must be at most early-stopping-rounds where that is set, got 4"
    with pytest.raises(ConfigError, match=rule):
        SecureBoost.section_settings(made(**more))
