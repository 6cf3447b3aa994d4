"""Scores in a run's summary are those of the written model on the same rows, within the bounds that
the summary has."""

import numpy as np
import pytest

from fedapp import metrics
from fedapp.data.partition import SUBSETS
from fedapp.metrics.names import EVAL_METRICS, NAMES, objective_metrics
from fedapp.runs.baselines import baseline_rows
from fedapp.runs.local import run_local
from fedapp.runs.predict import predicted_rows
from fedapp.trees.custom import CUSTOM
from fedapp.trees.losses import PLAIN
from fedapp.trees.objective import margins_of
from tests.tables import write_rows

OBJECTIVES = tuple(objective for objective in NAMES if objective != CUSTOM)
BINARY, MULTI, NUMBERS = "binary:logistic", "multi:softprob", "reg:squarederror"
# Settings of methods, and objectives that are scored; tests/contract has the other methods.
METHODS = {
    "pax": ({}, OBJECTIVES),
    "pax, secure": ({"pax__aggregation": "secure"}, (BINARY, MULTI, NUMBERS, "survival:aft")),
    "pax, floors": ({"least_bin_rows": 3}, (BINARY, NUMBERS, "survival:cox")),
    "pax, calibrated": ({"calibration": "platt"}, (BINARY,)),
    "fedavg-linear": ({"fedavg_linear__rounds": 3}, (BINARY, MULTI, NUMBERS)),
    "horizontal-forest": ({"horizontal_forest__trees": 4}, (BINARY, MULTI, NUMBERS)),
    "secureboost": ({}, (BINARY, MULTI, NUMBERS, "survival:aft", "survival:cox")),
}
CASES = [
    pytest.param(name, objective, 1 + place % 3, id=f"{name}-{objective}")
    for name, (_, objectives) in METHODS.items()
    for place, objective in enumerate(objectives, 1)
]
DEFAULT = (
    *("pax-binary:logistic", "pax-survival:aft", "pax-survival:cox", "pax, secure-survival:aft"),
    *("pax-reg:quantileerror", "pax, floors-binary:logistic", "horizontal-forest-multi:softprob"),
)
# Numbers behind an @, where the metric needs one that is not the run's.
NUMBERED = {"tweedie-nloglik": "@1.3", "error": "@0.4", "ndcg": "@5"}


def made(path, objective, n_rows=300, seed=4):
    """Four columns of many values, and labels of an objective that follow from them."""
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(n_rows, 4)).round(3)
    values[rng.random(values.shape) < 0.05] = np.nan
    signal = np.nan_to_num(values) @ [1, -1, 0.5, 0.2] + rng.normal(0, 0.7, n_rows)
    kind, _, name = objective.partition(":")
    y = signal.round(3)
    if objective in (BINARY, "binary:hinge"):
        y = (signal > 0).astype(int)
    elif kind in ("multi", "rank"):
        y = np.digitize(signal, [-0.7, 0.7])
    elif kind == "count":
        y = rng.poisson(np.exp(signal / 2)) + 1
    elif name == "logistic":
        y = (1 / (1 + np.exp(-signal))).round(3)
    elif kind != "reg" or name in ("gamma", "tweedie", "squaredlogerror"):
        y = (np.exp(signal) + 0.01).round(2)
    more = {"died": (rng.random(n_rows) < 0.6).astype(int)} if kind == "survival" else {}
    more |= {"query": np.arange(n_rows) // 10} if kind == "rank" else {}
    return write_rows(path, {**dict(zip("abcd", values.T, strict=True)), **more, "y": y})


def requested(objective):
    """Every metric that may be requested of an objective."""
    due = {name.partition("@")[0]: name for name in objective_metrics(objective, PLAIN)}
    return tuple(due.get(kind, kind + NUMBERED.get(kind, "")) for kind in EVAL_METRICS[objective])


def roles_of(objective):
    """Settings that name the columns of ``made``."""
    event = {"event": "died"} if "survival" in objective else {}
    return {"label": "y", **event, **({"qid": "query"} if "rank" in objective else {})}


@pytest.mark.by_default(*DEFAULT)
@pytest.mark.parametrize(("name", "objective", "parties"), CASES)
def test_scores_of_a_run_are_those_of_its_predictions(vertical, tmp_path, name, objective, parties):
    strategy = name.partition(",")[0]
    data = made(tmp_path / "rows.csv", objective)
    how = {"strategy": strategy, "data": str(data), **roles_of(objective)}
    how |= {"num_boost_round": 3, "max_depth": 3} if "pax" in name or "boost" in name else {}
    if strategy == "secureboost":
        parties, how = 2, {**how, "columns": "even", "max_bin": 16}
    extra = requested(objective) if strategy in ("pax", "secureboost") else ()
    given = {**METHODS[name][0], "parties": parties, "objective": objective}
    run = vertical(**how, **given, eval_metric=",".join(extra), valid_fraction=0.2)
    folder, extra = run_local(run), run.eval_metrics
    rows, errors = baseline_rows(run)[0], folder.summary.get("binning_errors") or {}
    predictions = predicted_rows(folder.path, run.data, label="y").predictions
    margins = margins_of(objective, predictions.astype(np.float64))
    threshold = (folder.summary.get("threshold") or {}).get("value")
    for subset in SUBSETS:
        of = getattr(rows.split, subset)
        arrays = margins[of], rows.labels[of], rows.weights[of]
        exact = metrics.pooled(objective, *arrays, extra)
        if threshold:
            least = float(np.log(threshold) - np.log1p(-threshold))
            exact |= metrics.scores_from_margin(*arrays, least)
        scores = folder.summary["metrics"][subset]
        assert scores.keys() - {"uncalibrated-logloss"} == exact.keys()
        for score, value in exact.items():
            most = errors.get(score, 0.0) + 2e-6 * max(1.0, abs(value))
            assert abs(scores[score] - value) <= most, (subset, score)
