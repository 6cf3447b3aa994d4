"""Objectives whose labels or leaves are not sums over single rows: a table, a case a row.

A case has a table, the columns that are its labels, and who judges its models. What all of them
must do is in ``test_objectives``; what one of them does alone is in ``tests/strategies``.
"""

import json
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import xgboost

from fedapp.metrics import pooled
from fedapp.runs.baselines import baseline_rows, train_boosted
from fedapp.trees.ranking import N_GRADES, numbered
from fedapp.trees.survival import concordance
from simulations.bench.exactness import breslow_trees
from tests.federated import model_of
from tests.random_tables import differences
from tests.reference import compare_trees, xgboost_trees
from tests.tables import csv_columns, registry, trial, write_rows

AFT, COX, NDCG, PAIRWISE = "survival:aft", "survival:cox", "rank:ndcg", "rank:pairwise"
MEDIAN, QUANTILE = "reg:absoluteerror", "reg:quantileerror"
LEVELS = [0.5, 0.1, 0.9, 0.25, 0.0625, 1 / 3]
TIMES, GRADES = {"label": "time", "event": "died"}, {"label": "grade", "qid": "query"}


# Tables, each of which has a column w of weights


def ranked(path, n_rows=300, seed=5, **more):
    """Rows of 24 queries in no order, with grades 0 to 4."""
    rng = np.random.default_rng(seed)
    columns = {name: rng.normal(size=n_rows).round(1) for name in "abcd"}
    signal = columns["a"] + columns["b"] * columns["c"] + rng.normal(0, 0.5, n_rows)
    columns["grade"] = np.digitize(signal, [-1, 0, 1, 2])
    columns["query"] = np.array([f"q{number}" for number in rng.integers(0, 24, n_rows)])
    return write_rows(path, {**columns, "w": rng.uniform(1, 2, n_rows), **more})


def skewed(path, seed=4, **more):
    """Columns with ties and missing values, labels with ties and outliers."""
    rng = np.random.default_rng(seed)
    n_rows = int(rng.choice([40, 150, 400]))
    values = rng.integers(0, rng.choice([5, 40]), (n_rows, 5)).astype(float)
    values[rng.random(values.shape) < rng.choice([0, 0.2])] = np.nan
    signal = np.nan_to_num(values) @ [1, -1, 1, 2, 1] + rng.standard_cauchy(n_rows)
    labels = signal.round(int(rng.integers(0, 5)))
    weights = rng.choice([0.0, 0.3, 1.0, 2.5, 1 / 3], n_rows)
    columns = dict(zip("abcde", values.T, strict=True))
    return write_rows(path, {**columns, "w": weights, "y": labels, **more})


def arrays_of(path):
    return {name: np.array(values) for name, values in csv_columns(path).items()}


# Judges of a run's model, and of scores of new rows


def is_xgboosts(run, folder):
    """Node for node, on the joined rows; and so are its scores."""
    assert differences(run, folder) == []


def is_xgboosts_to_the_bit(run, folder):
    is_xgboosts(run, folder)
    trained = has_xgboosts_trees(run, folder)
    config = json.loads(trained.booster.save_config())["learner"]["learner_model_param"]
    base_score = np.float32(json.loads(config["base_score"])[0])
    assert model_of(folder).base_score.tolist() == [base_score]


def has_xgboosts_trees(run, folder):
    """With leaves that are equal in every bit."""
    trained = train_boosted(run, baseline_rows(run)[0])
    agreement = compare_trees(model_of(folder), trained.booster)
    assert (agreement.differing, agreement.leaf_error) == (0, 0)
    return trained


def is_breslows(run, folder):
    """XGBoost's on the pooled rows by the same likelihood, with times in bins."""
    agreement = compare_trees(model_of(folder), breslow_trees(run))
    assert agreement.n_nodes > 50
    assert agreement.differing == 0
    assert agreement.leaf_error <= 1e-6


def of_times(columns, predicted):
    times, died = columns["time"].astype(float), columns["died"] == "1"
    return {"c-index": concordance(np.where(died, times, -times), predicted, np.ones(len(times)))}


def of_queries(columns, predicted):
    labels = numbered(columns["query"]) * N_GRADES + columns["grade"].astype(int)
    margins, ones = predicted.astype(np.float32)[:, None], np.ones(len(labels), np.float32)
    return pooled(NDCG, margins, labels.astype(np.float32), ones)


@dataclass(frozen=True)
class Case:
    """``roles`` and ``how`` are settings; without the column ``extra`` rows have no scores;
    ``written`` is what XGBoost's file has of the objective's parameters."""

    write: object
    roles: dict
    how: dict
    score: object = None
    extra: str = ""
    metric: str = ""
    written: tuple = ()
    judges: dict = field(default_factory=lambda: {"pax": is_xgboosts, "secureboost": is_xgboosts})

    def run(self, make, folder, **more):
        """Settings of a run on the case's table."""
        path = folder / f"{self.write.__name__}.csv"
        how = {"data": str(path if path.exists() else self.write(path)), "num_boost_round": 4}
        given = {**how, "max_depth": 4, **self.roles, **self.how, **more}
        return make(**{**({} if "weight" in given else {"drop_columns": "w"}), **given})

    def judge(self, run, folder):
        self.judges[run.strategy](run, folder)


def _quantiles(objective, metric, **more):
    exact = dict.fromkeys(("pax", "secureboost"), is_xgboosts_to_the_bit)
    how = {"objective": objective, **more}
    return partial(Case, skewed, {"label": "y"}, how, metric=metric, judges=exact)


_aft = partial(Case, score=of_times, extra="died")
CASES = {
    "aft": _aft(registry, TIMES, {"objective": AFT, "aft_loss_distribution": "logistic"}),
    "aft, weighted": _aft(
        trial,
        {**TIMES, "weight": "w"},
        {"objective": AFT, "aft_loss_distribution": "extreme", "aft_loss_distribution_scale": 0.3},
        written=("aft_loss_param", "aft_loss_distribution_scale", "0.300000012"),
    ),
    "cox": Case(
        registry, TIMES, {"objective": COX}, judges={"pax": is_breslows, "secureboost": is_xgboosts}
    ),
    "ndcg": Case(
        ranked, GRADES, {"objective": NDCG, "eval_metric": "ndcg@5"}, of_queries, "query", "ndcg@5"
    ),
    "pairwise": Case(ranked, GRADES, {"objective": PAIRWISE}, of_queries, "query", "ndcg"),
    "median": _quantiles(MEDIAN, "mae")(),
    "quantile": _quantiles(QUANTILE, "quantile@0.3", quantile_alpha=0.3)(
        written=("quantile_loss_param", "quantile_alpha", "[3E-1]")
    ),
}


def federation(case, strategy, folder, **how):
    """A run of two sites with tables of their own: its settings, what its simulation adds to them,
    and the node configs."""
    columns = arrays_of(case.write(folder / "whole.csv"))
    columns["id"] = np.arange(len(columns["w"]))
    of_labels = [*case.roles.values(), "w"]
    names = [name for name in columns if name not in (*of_labels, "id")]
    if strategy == "pax":
        parts = [{name: values[at::2] for name, values in columns.items()} for at in (0, 1)]
        roles = [{**case.roles, "drop-columns": "id" if "weight" in case.roles else "w,id"}] * 2
    else:
        shares = ("id", *names[::2], *of_labels), ("id", *names[1::2])
        parts = [{name: columns[name] for name in share} for share in shares]
        drop = {} if "weight" in case.roles else {"drop-columns": "w"}
        roles = [{**case.roles, "id": "id", **drop}, {"label": "", "id": "id"}]
    own, nodes = {"allow-export": True, "draws-secret": "none"}, []
    for name, part, role in zip(("bank", "shop"), parts, roles, strict=True):
        table = write_rows(folder / f"{name}.csv", part)
        nodes.append({"name": name, "data": table, **role, **own})
    how = {"strategy": strategy, "parties": 2, "num_boost_round": 2, **case.how, **how}
    simulated = {key.replace("-", "_"): value for key, value in roles[0].items()}
    simulated["data"] = ",".join(f"{node['name']}={node['data']}" for node in nodes)
    return how, simulated, nodes


def one_row_trees(parameters, matrix_of, n_rows, step):
    """Number, hessian and weight in XGBoost of each ``step``-th row that a split sets apart."""
    for row in range(0, n_rows, step):
        is_row = (np.arange(n_rows) == row).astype(np.float32)[:, None]
        how = {"nthread": 1, "lambda": 0, "min_child_weight": 0, "eta": 1, "max_depth": 1}
        (tree,) = xgboost_trees(xgboost.train({**how, **parameters}, matrix_of(is_row), 1))
        if len(tree["sum_hessian"]) > 1:
            yield row, np.float32(tree["sum_hessian"][2]), np.float32(tree["base_weights"][2])
