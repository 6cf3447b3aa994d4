"""Rows of queries: their codes, NDCG, and whole queries wherever rows are dealt out."""

import json

import numpy as np
import pytest
import xgboost
from sklearn.metrics import ndcg_score

import fedapp
from clients.secureboost.active import Active
from fedapp.data.partition import SUBSETS
from fedapp.data.read import load_table
from fedapp.data.schema import Roles
from fedapp.errors import FedappError
from fedapp.metrics import pooled, scores, statistics
from fedapp.runs.baselines import baseline_rows
from fedapp.runs.local import run_local
from fedapp.runs.tables import stacked_tables
from fedapp.trees.losses import LOSSES, PLAIN
from fedapp.trees.objective import base_score, gradients, label_sums
from fedapp.trees.ranking import (
    N_GRADES,
    grades_of,
    join_queries,
    numbered,
    paired_rows,
    queries_of,
)
from tests.contract.objectives import CASES, arrays_of, ranked
from tests.random_tables import RANKED, differences, random_case
from tests.tables import deal_columns, write_rows
from tests.tampering import refuses, rewrite_letters

NDCG = CASES["ndcg"]


@pytest.mark.parametrize("objective", RANKED)
def test_base_score_and_ndcg_are_xgboosts(objective):
    rng = np.random.default_rng(5)
    queries = np.repeat(np.arange(4), rng.integers(1, 70, 4))
    grades = rng.integers(0, 5, len(queries))
    margins = rng.normal(0, 2, len(queries)).round(1).astype(np.float32)
    n_rows, labels = len(queries), (queries * N_GRADES + grades).astype(np.float32)
    ones = np.ones(n_rows, np.float32)
    matrix = xgboost.DMatrix(margins[:, None], grades, qid=queries)
    trained = xgboost.train({"objective": objective, "nthread": 1}, matrix, 1)
    learner = json.loads(trained.save_config())["learner"]["learner_model_param"]
    (ours,) = base_score(objective, label_sums(objective, labels, ones, 0), n_rows)
    assert ours == np.float32(json.loads(learner["base_score"])[0])
    assert ours != 0
    names, results = ("ndcg", "ndcg@3", "ndcg@100"), {}
    matrix.set_base_margin(margins)
    how = {"objective": objective, "eta": 0, "eval_metric": list(names), "base_score": 0}
    watched = {"evals": [(matrix, "all")], "evals_result": results, "verbose_eval": False}
    xgboost.train(how, matrix, 1, **watched)
    # Rows in turns of the queries, in the order within each.
    order = np.lexsort((queries, np.arange(n_rows) - np.searchsorted(queries, queries)))
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
        powers = LOSSES[objective].powers(5, PLAIN)
        pairs = np.abs(gradients(objective, margins[:, None], labels, np.ones(4000, np.float32)))
        assert (pairs[:, 0].max(axis=0) < np.exp2(powers)).all()
        assert (pairs[:, 0].max(axis=0) > 1e-3).all()


SEEDS = [240, 241, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(242, 252))]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("strategy", ["pax", "secureboost"])
def test_random_tables_grow_xgboosts_trees(vertical, tmp_path, strategy, seed):
    run = vertical(strategy=strategy, **random_case(tmp_path / "random.csv", seed, strategy))
    assert differences(run, run_local(run)) == []


# Whole queries


@pytest.mark.parametrize("partition", ["iid", "column:region"])
def test_parties_get_whole_queries_of_one_table(settings, tmp_path, partition):
    region = numbered(arrays_of(ranked(tmp_path / "plain.csv"))["query"]) // 5
    data = str(ranked(tmp_path / "regions.csv", region=region))
    run = NDCG.run(settings, tmp_path, data=data, partition=partition, parties=3)
    table, parts = stacked_tables(run)
    queries = queries_of(table.labels)
    dealt = [set(queries[rows].tolist()) for part in parts.values() for rows in part.values()]
    assert sum(map(len, dealt)) == len(set.union(*dealt)) == len(np.unique(queries))


@pytest.mark.parametrize(
    ("partition", "rule"),
    [
        ("column:a", "qid must name queries whose rows are all of one group with column:a, got 2"),
        ("dirichlet:0.5", "partition must be iid or column:NAME where rows are of queries"),
    ],
)
def test_queries_are_not_divided(settings, tmp_path, partition, rule):
    rows = {"a": [1, 2, 3, 4] * 5, "grade": [3, 2, 0, 1] * 5, "query": ["x", "x", "y", "y"] * 5}
    data = str(write_rows(tmp_path / "rows.csv", {**rows, "b": range(20), "w": range(20)}))
    with pytest.raises(FedappError, match=rule):
        run_local(NDCG.run(settings, tmp_path, data=data, parties=2, partition=partition))


def of_two_sites(make, folder, **more):
    """A run on tables of ranked rows, of which the second site lacks some."""
    columns = {**arrays_of(ranked(folder / "whole.csv")), "id": np.arange(300)}
    shares = {"bank": ("id", "a", "b", "grade", "query"), "shop": ("id", "c", "d")}
    files = deal_columns(columns, folder, shares)
    shared = np.random.default_rng(4).random(300) < 0.9
    write_rows(files["shop"], {name: columns[name][shared] for name in shares["shop"]})
    data = ",".join(f"{name}={path}" for name, path in files.items())
    how = {"data": data, "id": "id", "align": "psi", "max_bin": 16, "drop_columns": ""}
    return NDCG.run(make, folder, **how, num_boost_round=2, valid_fraction=0.3, **more)


@pytest.mark.by_default("left")
@pytest.mark.parametrize("join", ["inner", "left"])
def test_rows_are_matched_and_held_back_by_query(vertical, tmp_path, join):
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


def test_rows_without_a_pair_look_like_others(vertical, tmp_path, monkeypatch):
    columns = arrays_of(ranked(tmp_path / "whole.csv"))
    grades = np.where(columns["query"] == "q1", "3", columns["grade"])
    data = str(write_rows(tmp_path / "flat.csv", {**columns, "grade": grades}))
    drawn, send = [], Active._new_round

    def sent(self, *arguments):
        letters = send(self, *arguments)
        drawn.extend(np.unpackbits(letter.drawn, count=self.n_train) for _, letter in letters)
        return letters

    monkeypatch.setattr(Active, "_new_round", sent)
    how = {"columns": "even", "test_fraction": 0.0, "num_boost_round": 2}
    folder = run_local(NDCG.run(vertical, tmp_path, data=data, **how))
    assert len(drawn) == 2
    assert all(rows.all() for rows in drawn)
    (note,) = [text for text in folder.summary["warnings"] if "queries" in text]
    assert "1 of 24 queries have one row, or one label in all rows, so they train nothing" in note


# Codes


def test_queries_are_numbered_as_they_occur():
    names = np.array(["b", "9", "b", "10", "9"])
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
    assert table.columns == load_table(path, Roles("label")).columns == ("f1", "f2")
    assert queries_of(table.labels).tolist() == [0, 0, 1]
    assert grades_of(table.labels).tolist() == [2, 0, 1]


def test_estimators_name_the_way_out():
    model = fedapp.PAXRegressor(objective="rank:ndcg", parties=2)
    with pytest.raises(ValueError, match=r"objective must be one without queries, .*fedapp\.run"):
        model.fit(np.ones((9, 2)), np.arange(9))
