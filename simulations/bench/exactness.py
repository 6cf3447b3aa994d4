"""Trees beside those of stock XGBoost, node for node: each objective and way of growing.

PAX trains with one party, SecureBoost with two that have half of the columns each. A node is equal
if column, threshold or categories, default side and gain are, gains to the last bit, and leaves
within 1e-6. PAX merges times of ``survival:cox`` to bins, all events of which count for all of its
rows: there XGBoost trains by an objective that does the same. A model whose columns are not
described as XGBoost's are has no equal node.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import xgboost

from fedapp.data.datasets import read_source
from fedapp.histograms.sketch import quantile_cuts
from fedapp.runs.baselines import baseline_rows, same_nodes
from fedapp.settings import Settings, load_settings
from fedapp.trees.c_math import exp32
from simulations.study import SEED, Row, check_names, same_as_xgboost, temporary_run

METHODS: dict[str, Row] = {
    "pax": {"parties": 1},
    "secureboost": {
        "parties": 2,
        "columns": "even",
        "align": "ordered",
        "allow-export": True,
        "secureboost.key-bits": 512,
        "secureboost.insecure-small-key": True,
    },
}
COMMON: Row = {"num-boost-round": 5, "max-depth": 4, "max-bin": 64, "eta": 0.3, "seed": SEED}
COMMON |= {"early-stopping-rounds": 0, "valid-fraction": 0.0}
CLASSES = ("spambase", "breast-cancer")
NUMBERS = ("abalone", "space-ga")
POSITIVE = ("abalone", "diabetes")
TIMES = ("made times 1", "made times 2")
AGES = "ages of give-me-some-credit"
RANKED = ("ranked abalone", "ranked default-credit")
ONE_FOR_ALL = "multi:softprob, one tree for all classes"  # not in PAX
# What is compared: its settings, and the sets.
CASES: dict[str, tuple[Row, tuple[str, ...]]] = {
    "reg:absoluteerror": ({"objective": "reg:absoluteerror"}, NUMBERS),
    "reg:quantileerror": ({"objective": "reg:quantileerror", "quantile-alpha": 0.9}, NUMBERS),
    "binary:logistic": ({}, CLASSES),
    "binary:logistic, scale-pos-weight": ({"scale-pos-weight": 3.5}, CLASSES),
    "binary:hinge": ({"objective": "binary:hinge"}, CLASSES),
    "reg:logistic": ({"objective": "reg:logistic"}, CLASSES),
    "multi:softprob": ({}, ("waveform", "wine")),
    ONE_FOR_ALL: ({"multi-strategy": "multi_output_tree"}, ("waveform", "wine")),
    "reg:squarederror": ({"objective": "reg:squarederror"}, NUMBERS),
    "reg:pseudohubererror": ({"objective": "reg:pseudohubererror", "huber-slope": 5.0}, NUMBERS),
    "reg:squaredlogerror": ({"objective": "reg:squaredlogerror"}, POSITIVE),
    "count:poisson": ({"objective": "count:poisson"}, POSITIVE),
    "reg:gamma": ({"objective": "reg:gamma"}, POSITIVE),
    "reg:tweedie": ({"objective": "reg:tweedie"}, POSITIVE),
    "survival:aft": ({"objective": "survival:aft"}, TIMES),
    "survival:aft, extreme": (
        {"objective": "survival:aft", "aft-loss-distribution": "extreme"},
        TIMES,
    ),
    "survival:cox": ({"objective": "survival:cox"}, (*TIMES, AGES)),
    "rank:ndcg": ({"objective": "rank:ndcg"}, RANKED),
    "rank:pairwise": ({"objective": "rank:pairwise"}, RANKED),
    "lossguide, 9 leaves": ({"grow-policy": "lossguide", "max-leaves": 9}, CLASSES),
    "lossguide, no depth": (
        {"grow-policy": "lossguide", "max-leaves": 12, "max-depth": 0},
        ("spambase", "abalone"),
    ),
    "depthwise, 9 leaves": ({"max-leaves": 9}, CLASSES),
    "3 trees a round": ({"num-parallel-tree": 3}, ("spambase", "abalone")),
}


def write_times(seed: int, path: Path) -> None:
    """Write made times of patients: a hazard of three columns, about 40 % of them censored."""
    rng = np.random.default_rng(seed)
    columns = {name: rng.normal(size=1500).astype(np.float32) for name in ("age", "size", "grade")}
    hazard = np.exp(0.8 * columns["age"] - 0.5 * columns["size"] * (columns["grade"] > 0))
    time, end = rng.exponential(10 / hazard), rng.exponential(15, 1500)
    outcome = {"time": np.minimum(time, end), "event": (time <= end).astype(np.int64)}
    pa.parquet.write_table(pa.table({**columns, **outcome}), path)


def first_rows(data: str) -> tuple[dict[str, Any], Any]:
    """Columns and labels of the first 4,000 rows of a set."""
    source = read_source(data)
    rows = source.take(np.arange(min(source.n_rows, 4000)))
    return dict(zip(rows.columns, rows.values.T, strict=True)), np.asarray(rows.labels)


def write_ages(path: Path) -> None:
    """Write 4,000 borrowers by their age when they were past due, or else censored."""
    columns, labels = first_rows("give-me-some-credit")
    outcome = {"time": columns.pop("age"), "event": labels.astype(np.int64)}
    pa.parquet.write_table(pa.table({**columns, **outcome}), path)


def breslow(labels: Any, cuts: Any) -> Any:
    """An objective for XGBoost: Cox's partial likelihood of signed times that cuts merge to bins,
    with Breslow's ties."""
    _, bins = np.unique(np.searchsorted(cuts, np.abs(labels), "right"), return_inverse=True)

    def objective(margins: Any, _: Any) -> tuple[Any, Any]:
        ratios = exp32(np.asarray(margins, dtype=np.float32)).astype(np.float64)
        at_risk = np.cumsum(np.bincount(bins, ratios)[::-1])[::-1]
        events = np.bincount(bins, labels > 0)
        rate, square = (np.cumsum(events / at_risk**power)[bins] for power in (1, 2))
        hessians = np.maximum(ratios * rate - ratios**2 * square, 0)
        return (ratios * rate - (labels > 0)).astype(np.float32), hessians.astype(np.float32)

    return objective


def breslow_trees(settings: Settings) -> Any:
    """XGBoost's trees of all training rows by ``breslow``, with bins of times like a column's."""
    rows = baseline_rows(settings)[0]
    train = rows.split.train
    labels, weights = rows.labels[train], rows.weights[train]
    cuts = quantile_cuts(np.abs(labels)[:, None], weights, settings.max_bin).edges[:-1]
    how = {"max_depth": settings.max_depth, "eta": settings.eta, "base_score": 0}
    how |= {"max_bin": settings.max_bin}
    matrix = xgboost.QuantileDMatrix(
        rows.values[train], labels, weight=weights, max_bin=settings.max_bin
    )
    return xgboost.train(how, matrix, settings.num_boost_round, obj=breslow(labels, cuts))


def write_ranked(data: str, path: Path) -> None:
    """Write 4,000 rows of a set as queries, in no order: abalones of drawn boxes by age, from 0 to
    4, or credit card holders of one age by default."""
    columns, labels = first_rows(data)
    if data == "abalone":
        grades = np.digitize(labels, [8, 10, 12, 15])
        queries = np.random.default_rng(SEED).integers(0, 150, len(labels))
    else:
        grades = labels.astype(np.int64)
        queries = columns.pop("AGE").astype(np.int64)
    columns |= {"grade": grades, "query": queries}
    pa.parquet.write_table(pa.table(columns), path)


def compared(case: str, method: str, data: str, folder: Path) -> Row:
    """Equal nodes of a model and of XGBoost's."""
    how: Row = {**COMMON, **METHODS[method], **CASES[case][0], "strategy": method, "data": data}
    path = folder / "rows.parquet"
    if data in RANKED:
        write_ranked(data.removeprefix("ranked "), path)
        how |= {"data": str(path), "label": "grade", "qid": "query"}
    elif data in (*TIMES, AGES):
        write_ages(path) if data == AGES else write_times(int(data[-1]), path)
        how |= {"data": str(path), "label": "time", "event": "event"}
    settings = load_settings(how)
    with temporary_run(settings) as run:
        ours = json.loads((run.path / "model.xgb.json").read_text())
        equal, nodes = same_as_xgboost(settings, run.path)
    if (case, method) == ("survival:cox", "pax"):
        equal, nodes = same_nodes(ours, json.loads(breslow_trees(settings).save_raw("json")))
    trees = ours["learner"]["gradient_booster"]["model"]["trees"]
    row: Row = {"case": case, "method": method, "data": data, "trees": len(trees), "nodes": nodes}
    return {**row, "equal": equal if describes_columns(ours) else 0}


def describes_columns(model: Mapping[str, Any]) -> bool:
    """Whether a model has the name and the type of every column, as XGBoost writes them."""
    learner = model["learner"]
    n_columns = int(learner["learner_model_param"]["num_feature"])
    return len(learner["feature_names"]) == len(learner["feature_types"]) == n_columns > 0


def exactness(
    only: tuple[str, ...] = tuple(CASES), methods: tuple[str, ...] = tuple(METHODS)
) -> Iterator[Row]:
    """A line for each objective or way of growing, method and set: nodes, and how many are equal.

    ``--only`` selects some. Any node that is not equal makes the command fail in the end.
    """
    check_names("only", only, CASES)
    check_names("methods", methods, METHODS)
    differing = 0
    with tempfile.TemporaryDirectory() as folder:
        for case in only:
            of_case = [name for name in methods if case != ONE_FOR_ALL or name == "secureboost"]
            for data, method in itertools.product(CASES[case][1], of_case):
                row = compared(case, method, data, Path(folder))
                differing += row["nodes"] - row["equal"]
                yield row
    if differing:
        raise SystemExit(f"nodes must be those of XGBoost, got {differing} others")
