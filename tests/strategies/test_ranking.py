"""Rows of queries: XGBoost's rank:ndcg and rank:pairwise in PAX and SecureBoost, and NDCG."""

import json
from typing import Any

import numpy as np
import pytest
import xgboost
from sklearn.metrics import ndcg_score
from typer.testing import CliRunner

import fedapp
from clients.secureboost.active import Active
from fedapp.commands import cli
from fedapp.data.partition import SUBSETS, Holdout, split_queries
from fedapp.data.read import load_table
from fedapp.data.schema import Roles
from fedapp.errors import ConfigError, FedappError
from fedapp.messages.secureboost import EncryptedGradients
from fedapp.metrics import pooled, scores, statistics
from fedapp.records.document import load
from fedapp.runs.baselines import baseline_rows
from fedapp.runs.local import run_local
from fedapp.runs.predict import predict_table
from fedapp.runs.tables import stacked_tables
from fedapp.settings import load_settings
from fedapp.site.policy import check_event
from fedapp.site.settings import SiteConfig
from fedapp.site.table import common_order
from fedapp.trees.losses import LOSSES, PLAIN
from fedapp.trees.model import Ensemble
from fedapp.trees.objective import base_score, gradients, label_sums, row_bounds
from fedapp.trees.predict import predict_margins
from fedapp.trees.queries import (
    N_GRADES,
    grades_of,
    join_queries,
    numbered,
    paired_rows,
    queries_of,
)
from tests.random_tables import RANKED, differences, random_case
from tests.reference import compare_trees
from tests.strategies.test_pax_secure import assert_same_trees
from tests.tables import write_rows
from tests.tampering import refuses, rewrite_letters

Columns = dict[str, Any]


def made(n_rows=300, n_queries=24, seed=5):
    """Columns of ranked rows, whose queries are in no order."""
    rng = np.random.default_rng(seed)
    columns = {name: rng.normal(size=n_rows).round(1) for name in "abcd"}
    signal = columns["a"] + columns["b"] * columns["c"] + rng.normal(0, 0.5, n_rows)
    columns["grade"] = np.digitize(signal, [-1, 0, 1, 2])
    columns["query"] = np.array([f"q{number}" for number in rng.integers(0, n_queries, n_rows)])
    return columns


def rows_of(columns, rows):
    return {name: np.array(values)[rows] for name, values in columns.items()}


def run_of(make, folder, rows=None, **more):
    """A run on one table."""
    how = {"label": "grade", "qid": "query", "objective": "rank:ndcg", "max_depth": 4, **more}
    if "data" not in more:
        how["data"] = str(write_rows(folder / "ranked.csv", rows or made()))
    return make(**how)


def model_of(run):
    path = run_local(run).path / "model.json"
    return load(path, Ensemble), path.read_bytes()


# XGBoost's numbers


def coded(n_grades):
    """Queries in order, grades, and margins with ties."""
    rng = np.random.default_rng(n_grades)
    queries = np.repeat(np.arange(4), rng.integers(1, 70, 4))
    margins = rng.normal(0, 2, len(queries)).round(1).astype(np.float32)
    return queries, rng.integers(0, n_grades, len(queries)), margins


def mixed(queries):
    """An order of rows in turns of the queries, which keeps the order within each."""
    return np.lexsort((queries, np.arange(len(queries)) - np.searchsorted(queries, queries)))


@pytest.mark.parametrize("objective", RANKED)
@pytest.mark.parametrize("n_grades", [2, 5, 32])
def test_gradients_are_xgboosts_to_the_last_bit(objective, n_grades):
    queries, grades, margins = coded(n_grades)
    labels = (queries * N_GRADES + grades).astype(np.float32)
    order, ones = mixed(queries), np.ones(len(queries), np.float32)
    ours = np.empty((len(queries), 2), np.float32)
    ours[order] = gradients(objective, margins[order][:, None], labels[order], ones)[:, 0]
    given = {"objective": objective, "nthread": 1, "lambda": 0, "min_child_weight": 0, "eta": 1}
    checked = 0
    for row in range(0, len(queries), 9):
        is_row = (np.arange(len(queries)) == row).astype(np.float32)[:, None]
        matrix = xgboost.DMatrix(is_row, grades, qid=queries, base_margin=margins)
        booster = xgboost.train({**given, "max_depth": 1, "base_score": 0.0}, matrix, 1)
        learner = json.loads(booster.save_raw("json"))["learner"]
        (tree,) = learner["gradient_booster"]["model"]["trees"]
        if len(tree["sum_hessian"]) > 1:
            gradient, hessian = ours[row]
            assert np.float32(tree["sum_hessian"][2]) == hessian
            weight = np.float32(-np.float64(gradient) / np.float64(hessian))
            assert np.float32(tree["base_weights"][2]) == weight
            checked += 1
    assert checked > 5


@pytest.mark.parametrize("objective", RANKED)
def test_base_score_and_ndcg_are_xgboosts(objective):
    queries, grades, margins = coded(5)
    n_rows, labels = len(queries), (queries * N_GRADES + grades).astype(np.float32)
    ones = np.ones(n_rows, np.float32)
    matrix = xgboost.DMatrix(margins[:, None], grades, qid=queries)
    trained = xgboost.train({"objective": objective, "nthread": 1}, matrix, 1)
    learner = json.loads(trained.save_config())["learner"]["learner_model_param"]
    (theirs,) = json.loads(learner["base_score"])
    (ours,) = base_score(objective, label_sums(objective, labels, ones, 0), n_rows)
    assert ours == np.float32(theirs)
    assert ours != 0
    names, results = ("ndcg", "ndcg@3", "ndcg@100"), dict[str, Any]()
    matrix.set_base_margin(margins)
    how = {"objective": objective, "eta": 0, "eval_metric": list(names), "base_score": 0}
    watched = {"evals": [(matrix, "all")], "evals_result": results, "verbose_eval": False}
    xgboost.train(how, matrix, 1, **watched)
    order = mixed(queries)
    rows = margins[order][:, None], labels[order], ones
    exact, summed = pooled(objective, *rows, names), statistics(objective, *rows, 64, extra=names)
    for name in names:
        assert exact[name] == pytest.approx(results["all"][name][0], abs=1e-12)
        assert scores(objective, summed, names)[name] == pytest.approx(exact[name], abs=1e-12)


def test_ndcg_is_that_of_scikit_learn_and_1_without_relevant_rows():
    margins = np.float32([0.1, 3, 2, -1, 5, 0])[:, None]
    grades = np.array([0, 1, 4, 2, 0, 0])
    labels = (np.array([0, 0, 0, 0, 1, 1]) * N_GRADES + grades).astype(np.float32)
    first = ndcg_score([2.0 ** grades[:4] - 1], [margins[:4, 0]], k=2)
    score = pooled("rank:ndcg", margins, labels, np.ones(6, np.float32), ("ndcg@2",))["ndcg@2"]
    assert score == pytest.approx((first + 1) / 2)


def test_gradients_stay_within_their_bounds():
    rng = np.random.default_rng(3)
    labels = rng.integers(0, N_GRADES, 4000).astype(np.float32)
    margins = (rng.normal(0, 1e-4, 4000) * rng.choice([1, 1e6], 4000)).astype(np.float32)
    for objective in RANKED:
        gradient, hessian = LOSSES[objective].powers(5, PLAIN)
        name = objective
        pairs = np.abs(gradients(name, margins[:, None], labels, np.ones(4000, np.float32)))[:, 0]
        assert (pairs.max(axis=0) < [2.0**gradient, 2.0**hessian]).all()
        assert (pairs.max(axis=0) > 1e-3).all()


# Trees

SEEDS = [240, 241, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(242, 252))]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("strategy", ["pax", "secureboost"])
def test_random_tables_grow_xgboosts_trees(vertical, tmp_path, strategy, seed):
    case = random_case(tmp_path / "random.csv", seed, strategy)
    run = vertical(strategy=strategy, **case)
    assert differences(run, run_local(run)) == []


@pytest.mark.parametrize("objective", RANKED)
def test_one_party_grows_the_trees_of_stock_xgboost(settings, tmp_path, objective):
    columns = made()
    columns = rows_of(columns, np.argsort(numbered(columns["query"]), kind="stable"))
    held = {"test_fraction": 0.0, "valid_fraction": 0.0}
    run = run_of(settings, tmp_path, columns, parties=1, objective=objective, **held)
    values = np.stack([columns[name] for name in "abcd"], axis=1).astype(np.float32)
    qid = numbered(columns["query"])
    how = {"objective": objective, "eta": 0.3, "max_depth": 4, "max_bin": 16, "nthread": 1}
    matrix = xgboost.QuantileDMatrix(values, columns["grade"], qid=qid, max_bin=16)
    booster = xgboost.train(how, matrix, 2)
    folder = run_local(run)
    model = load(folder.path / "model.json", Ensemble)
    agreement = compare_trees(model, booster)
    assert (agreement.differing, agreement.n_trees) == (0, 2)
    assert agreement.leaf_error <= 1e-6
    written = xgboost.Booster(model_file=folder.path / "model.xgb.json")
    rows = xgboost.DMatrix(values, feature_names=list(model.columns))
    np.testing.assert_array_equal(written.predict(rows), predict_margins(model, values)[:, 0])
    assert json.loads(written.save_config())["learner"]["objective"]["name"] == objective


@pytest.mark.slow
@pytest.mark.parametrize("objective", RANKED)
def test_parties_with_queries_of_equal_names_grow_the_trees_of_all_rows(
    settings, tmp_path, objective
):
    columns = made()
    names = np.unique(columns["query"])
    data = ""
    for at, party in enumerate(("bank", "clinic", "shop")):
        of_party = rows_of(columns, np.isin(columns["query"], names[at::3]))
        of_party["query"] = numbered(of_party["query"])  # from 0 at each
        data += f",{party}={write_rows(tmp_path / f'{party}.csv', of_party)}"
    how = {"data": data[1:], "parties": 3, "max_bin": 256, "objective": objective}
    run = run_of(settings, tmp_path, **how, pax__bins="equal")
    folder = run_local(run)
    assert differences(run, folder) == []
    table, _ = stacked_tables(run)
    assert len(np.unique(queries_of(table.labels))) == len(names)
    secure, _ = model_of(run_of(settings, tmp_path, **how, pax__aggregation="secure"))
    assert_same_trees(secure, load(folder.path / "model.json", Ensemble))


@pytest.mark.slow
def test_under_masks_rows_give_the_model_of_one_table(settings, tmp_path):
    more = {"pax__aggregation": "secure", "objective": "rank:pairwise"}
    models = [
        model_of(run_of(settings, tmp_path, parties=parties, **more))[1] for parties in (1, 3)
    ]
    assert models[0] == models[1]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["pax", "secureboost"])
def test_early_stopping_watches_the_metric_as_xgboost_does(vertical, tmp_path, strategy):
    more = {"early_stopping_rounds": 1, "num_boost_round": 20, "eta": 1.0}
    parties = {"pax": 1, "secureboost": 2}[strategy]
    how = {"strategy": strategy, "parties": parties, "columns": "even", **more}
    run = run_of(vertical, tmp_path, eval_metric="ndcg@5", valid_fraction=0.4, **how)
    folder = run_local(run)
    assert folder.summary["best_round"] < 19
    assert differences(run, folder) == []
    assert set(folder.summary["metrics"]["valid"]) == {"ndcg", "ndcg@5"}


# Whole queries


def test_subsets_have_whole_queries():
    queries = np.random.default_rng(2).integers(0, 40, 500)
    split = split_queries(np.arange(500), queries, Holdout(0.25, 0.5, seed=1))
    subsets = [set(queries[getattr(split, subset)].tolist()) for subset in SUBSETS]
    assert [len(each) for each in subsets] == [15, 15, 10]
    assert len(set.union(*subsets)) == 40
    assert sum(len(getattr(split, subset)) for subset in SUBSETS) == 500


@pytest.mark.parametrize("partition", ["iid", "column:region"])
def test_parties_get_whole_queries_of_one_table(settings, tmp_path, partition):
    columns = made()
    columns["region"] = numbered(columns["query"]) // 5
    how = {"partition": partition, "parties": 3}
    run = run_of(settings, tmp_path, columns, **how)
    table, parts = stacked_tables(run)
    queries = queries_of(table.labels)
    dealt = [set(queries[rows].tolist()) for part in parts.values() for rows in part.values()]
    assert sum(map(len, dealt)) == len(set.union(*dealt)) == len(np.unique(queries))


def of_two_sites(make, folder, **more):
    """A run on tables of ranked rows, of which the second site lacks some."""
    columns = {**made(), "id": np.arange(300)}
    order = np.random.default_rng(4).permutation(320) % 300
    others = {name: columns[name][np.unique(order[:280])] for name in ("id", "c", "d")}
    first = {name: columns[name] for name in ("id", "a", "b", "grade", "query")}
    bank, shop = (
        write_rows(folder / f"{name}.csv", one) for name, one in (("bank", first), ("shop", others))
    )
    how = {"data": f"bank={bank},shop={shop}", "id": "id", "align": "psi", "max_bin": 16}
    return run_of(make, folder, **how, valid_fraction=0.3, **more)


@pytest.mark.slow
def test_rows_are_matched_and_held_back_by_query(vertical, tmp_path):
    for join in ("inner", "left"):
        run = of_two_sites(vertical, tmp_path, join=join)
        folder, rows = run_local(run), baseline_rows(run)[0]
        subsets = [queries_of(rows.labels[getattr(rows.split, each)]) for each in SUBSETS]
        assert all(len(each) for each in subsets)
        assert len(np.unique(np.concatenate(subsets))) == sum(len(np.unique(s)) for s in subsets)
        assert [folder.summary["matched_rows"][each] for each in SUBSETS] == list(map(len, subsets))
        assert differences(run, folder) == []


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda rows: rows[1:].copy(), r"CommonRows\.subsets must be of all rows, or empty"),
        (lambda rows: rows[::-1].copy(), r"CommonRows\.digest must be of the ids of shop"),
    ],
    ids=["one too few", "of other rows"],
)
def test_false_subsets_of_ranked_rows_stop_the_run(vertical, tmp_path, monkeypatch, change, rule):
    rewrite_letters(monkeypatch, "CommonRows", "subsets", change)
    refuses(rule, of_two_sites(vertical, tmp_path))


@pytest.mark.slow
def test_rows_without_a_pair_look_like_others(vertical, tmp_path, monkeypatch):
    columns = made()
    columns["grade"] = np.where(columns["query"] == "q1", 3, columns["grade"])
    drawn, send = list[Any](), Active._encrypt

    def sent(self, *arguments):
        letters = send(self, *arguments)
        for _, letter in letters:
            assert isinstance(letter, EncryptedGradients)
            drawn.append(np.unpackbits(letter.drawn, count=self.n_train))
        return letters

    monkeypatch.setattr(Active, "_encrypt", sent)
    folder = run_local(run_of(vertical, tmp_path, columns, columns="even", test_fraction=0.0))
    assert len(drawn) == 2
    assert all(rows.all() for rows in drawn)
    (note,) = [text for text in folder.summary["warnings"] if "queries" in text]
    assert note.endswith(
        "1 of 24 queries have one row, or one label in all rows, so they train nothing"
    )


# Codes


def test_queries_are_numbered_as_they_occur():
    names = np.array(["9", "10", "9", "b", "10"])
    assert numbered(names).tolist() == [0, 1, 0, 2, 1]
    labels = numbered(names) * N_GRADES + np.array([0, 31, 2, 5, 31])
    assert queries_of(labels).tolist() == [0, 1, 0, 2, 1]
    assert grades_of(labels).tolist() == [0, 31, 2, 5, 31]
    assert paired_rows(labels) == (3, 1)
    both = join_queries([labels, labels])
    assert queries_of(both).tolist() == [0, 1, 0, 2, 1, 3, 4, 3, 5, 4]
    assert grades_of(both[5:]).tolist() == grades_of(labels).tolist()


def test_queries_of_a_libsvm_file_are_read_where_qid_names_them(tmp_path):
    path = tmp_path / "ranked.svm"
    path.write_text("2 qid:7 1:0.5\n0 qid:7 2:1\n1 qid:3 1:0.1\n")
    table = load_table(path, Roles("label", qid="qid"))
    assert table.labels is not None
    assert table.columns == ("f1", "f2")
    assert queries_of(table.labels).tolist() == [0, 0, 1]
    assert grades_of(table.labels).tolist() == [2, 0, 1]
    assert load_table(path, Roles("label")).columns == ("f1", "f2")


# A finished model


def test_new_rows_are_scored_where_the_table_has_queries(settings, tmp_path):
    folder = run_local(run_of(settings, tmp_path, parties=3))
    new, output = made(seed=8), tmp_path / "predictions.csv"
    path = str(write_rows(tmp_path / "new.csv", new))
    scored = predict_table(folder.path, path, "", output)
    predictions = np.loadtxt(output, delimiter=",", skiprows=1, quotechar=chr(34))[:, 1].astype(
        np.float32
    )
    labels = (numbered(new["query"]) * N_GRADES + new["grade"]).astype(np.float32)
    due = pooled("rank:ndcg", predictions[:, None], labels, np.ones(300, np.float32))
    assert scored.scores == pytest.approx(due)
    without = {name: values for name, values in new.items() if name != "query"}
    path = str(write_rows(tmp_path / "without.csv", without))
    assert predict_table(folder.path, path, "", output).scores == {}


@pytest.mark.slow
def test_parties_score_new_rows_of_a_divided_model(vertical, tmp_path):
    run = run_of(vertical, tmp_path, made(120), columns="even", allow_export=False)
    folder, output = run_local(run), tmp_path / "predictions.csv"
    words = ["predict", str(folder.path), "--data", run.data, "--output", str(output), "--json"]
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 0, done.exception
    lines = np.loadtxt(output, delimiter=",", skiprows=1, quotechar=chr(34))
    # As ties count in their order, that of the parties.
    lines = lines[common_order(list(map(str, range(120))), run.seed)]
    columns = rows_of(made(120), lines[:, 0].astype(np.int64))
    labels = (numbered(columns["query"]) * N_GRADES + columns["grade"]).astype(np.float32)
    margins, ones = lines[:, 1:].astype(np.float32), np.ones(120, np.float32)
    due = pooled("rank:ndcg", margins, labels, ones)["ndcg"]
    assert json.loads(done.stdout)["scores"]["ndcg"] == pytest.approx(due, abs=1e-6)


@pytest.mark.slow
def test_a_model_is_continued(settings, tmp_path):
    begun = run_local(run_of(settings, tmp_path, parties=1))
    for file in ("model.json", "model.xgb.json"):
        more = {"parties": 1, "init_model": str(begun.path / file), "num_boost_round": 1}
        model, _ = model_of(run_of(settings, tmp_path, **more))
        whole, _ = model_of(run_of(settings, tmp_path, parties=1, num_boost_round=3))
        assert_same_trees(model, whole)


# Refusals


@pytest.mark.parametrize(
    ("more", "rule"),
    [
        ({"objective": "reg:gamma"}, "qid must be empty unless rows are ranked, .*with reg:gamma"),
        ({"objective": "auto"}, "qid must be empty unless rows are ranked, .*with auto"),
        (
            {"objective": "rank:map"},
            "objective .*this ranking is not supported; nearest is rank:nd",
        ),
        ({"weight": "w"}, "weight must be empty for rank:ndcg, in which all queries count alike"),
        ({"label-epsilon": 1.0}, "label-epsilon must be 0 for rank:ndcg"),
        ({"eval-metric": "rmse"}, "eval-metric must be one or several of ndcg for rank:ndcg"),
        (
            {"eval-metric": "ndcg@0"},
            "eval-metric must name the number of the first ranks .*ndcg@10",
        ),
        ({"eval-metric": "ndcg@2.5"}, "eval-metric must name the number of the first ranks"),
        ({"eval-metric": "ndcg-"}, "eval-metric must be one or several of ndcg"),
        (
            {"lambdarank-pair-method": "mean"},
            "pairs, gains and normalization .* XGBoost's defaults",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(more, rule):
    with pytest.raises(ConfigError, match=rule):
        load_settings({"label": "y", "qid": "query", "objective": "rank:ndcg", **more})


@pytest.mark.parametrize("strategy", ["bagging", "fedxgbllr", "federated-forest"])
def test_other_methods_refuse_queries(settings, tmp_path, strategy):
    run = run_of(settings, tmp_path, strategy=strategy)
    with pytest.raises(ConfigError, match=f"objective must be one of .* for {strategy}, got rank"):
        run_local(run)


def test_noise_is_refused(settings, tmp_path):
    how = {"pax__aggregation": "secure", "privacy__epsilon": 1.0}
    with pytest.raises(ConfigError, match=r"one without times, queries or quantiles with privacy"):
        run_local(run_of(settings, tmp_path, parties=3, **how))
    with pytest.raises(ValueError, match="must be for labels that are no times or ranks"):
        row_bounds("rank:ndcg", PLAIN, 0.0)


def test_estimators_name_the_way_out():
    model = fedapp.PAXRegressor(objective="rank:ndcg", parties=2)
    with pytest.raises(ValueError, match=r"objective must be one without queries, .*fedapp\.run"):
        model.fit(np.ones((9, 2)), np.arange(9))


def test_a_site_checks_that_objective_and_queries_fit():
    site = SiteConfig("bank", "a.csv", "grade", qid="query")
    check_event(site, "rank:ndcg")
    with pytest.raises(ConfigError, match=r"objective must be rank:ndcg or .* for bank.*got auto"):
        check_event(site, "auto")
    with pytest.raises(ConfigError, match="qid must name the column of queries at bank for rank:p"):
        check_event(SiteConfig("bank", "a.csv", "grade"), "rank:pairwise")
    with pytest.raises(ConfigError, match="weight must be empty at bank for rank:ndcg"):
        check_event(SiteConfig("bank", "a.csv", "grade", weight="w", qid="query"), "rank:ndcg")
    check_event(SiteConfig("shop", "a.csv"), "rank:ndcg")  # a passive party


ROWS = {"a": [1, 2, 3, 4] * 5, "grade": [3, 2, 0, 1] * 5, "query": ["x", "y"] * 10}


@pytest.mark.by_default("pax-columns3-*")
@pytest.mark.parametrize(
    ("columns", "how", "rule"),
    [
        ({"grade": [3, -2, 0.5, 40] * 5}, {}, "label column 'grade' must be whole .* got 15 of 20"),
        ({"grade": ["good", "bad", "", "x"] * 5}, {}, "label column '?grade'? must"),
        ({"query": ["x", ""] * 10}, {}, "qid column 'query' must have no missing values, got 10"),
        ({"grade": [1, 1, 1, 1] * 5}, {}, "label must differ between training rows of some query"),
        ({"query": range(20)}, {}, "label must differ between training rows of some query"),
        ({}, {"qid": "session"}, "qid column 'session' must be in the table"),
        ({}, {"qid": ""}, "qid must name the column of queries at .* for rank:ndcg, got none"),
        ({}, {"folds": 3, "fold": 1}, "folds must be at most the 2 rows"),
    ],
)
@pytest.mark.parametrize("strategy", ["pax", "secureboost"])
def test_queries_and_grades_are_checked(vertical, tmp_path, columns, how, rule, strategy):
    rows = {**ROWS, "b": range(20), **columns}
    more = {"parties": {"pax": 1, "secureboost": 2}[strategy], "columns": "even", **how}
    run = run_of(vertical, tmp_path, rows, strategy=strategy, **more)
    with pytest.raises(FedappError, match=rule):
        run_local(run)


@pytest.mark.parametrize(
    ("partition", "rule"),
    [
        ("column:a", "qid must name queries whose rows are all of one group with column:a, got 2"),
        ("dirichlet:0.5", "partition must be iid or column:NAME where rows are of queries"),
    ],
)
def test_queries_are_not_divided(settings, tmp_path, partition, rule):
    rows = {**ROWS, "b": range(20), "query": ["x", "x", "y", "y"] * 5}
    with pytest.raises(FedappError, match=rule):
        run_local(run_of(settings, tmp_path, rows, parties=2, partition=partition))


@pytest.mark.parametrize("strategy", ["pax", "secureboost"])
def test_sites_train_the_model_of_a_simulation(vertical, sites, tmp_path, strategy):
    columns, is_pax = {**made(), "id": np.arange(300)}, strategy == "pax"
    parts = [rows_of(columns, np.arange(300) // 150 == at) for at in (0, 1)]
    if not is_pax:
        names = ("id", "a", "b", "grade", "query"), ("id", "c", "d")
        parts = [{name: columns[name] for name in each} for each in names]
    tables = {
        name: write_rows(tmp_path / f"{name}.csv", one)
        for name, one in zip(("bank", "shop"), parts, strict=True)
    }
    how = {"strategy": strategy, "objective": "rank:ndcg", "parties": 2, "num_boost_round": 2}
    roles = {"label": "grade", "qid": "query"} | (
        {"drop_columns": "id"} if is_pax else {"id": "id"}
    )
    data = ",".join(f"{name}={path}" for name, path in tables.items())
    simulated = run_local(vertical(data=data, **how, **roles))
    own = {key.replace("_", "-"): value for key, value in roles.items()}
    nodes = [{"name": name, "data": path, **own} for name, path in tables.items()]
    if not is_pax:
        nodes[1] = {key: nodes[1][key] for key in ("name", "data", "id")} | {"label": ""}
    for node in nodes:
        node |= {"allow-export": True, "draws-secret": "none"}
    deployed = run_local(vertical(**how), sites(*nodes))
    models = [(folder.path / "model.json").read_bytes() for folder in (simulated, deployed)]
    assert models[0] == models[1]
