"""Where the defaults lose: fedapp's defaults on divided rows, beside tuned learners on pooled rows.

Each set has a random split of its rows and a skewed one (Dirichlet 0.3). Every learner trains on
the same rows, stops early by the same validation rows, and is scored on the same test rows.
XGBoost, LightGBM and scikit-learn's HistGradientBoosting choose among the same number of random
draws of their parameters by validation log loss. "PAX, tuned" has the same budget: XGBoost's draws,
as PAX with one party is XGBoost.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.metrics import log_loss, roc_auc_score

from fedapp.runs.baselines import Pooled, baseline_rows, run_baselines
from fedapp.settings import load_settings
from simulations.papers.noniid import write_sample
from simulations.study import (
    Row,
    averaged,
    console,
    grouped,
    mean_of,
    run_and_tidy,
    series,
    show,
    write_tables,
)

DATA = ("airline", "default-credit", "give-me-some-credit", "higgs-11k", "adult")
SPLITS = {"random": "iid", "skewed": "dirichlet:0.3"}
FIRST_SEED = 42
PARTIES = 3
MOST_ROUNDS = 300
PATIENCE = 20
COMMON: Row = {"test-fraction": 0.2, "valid-fraction": 0.2}
# Settings of the federated methods: all defaults.
DIVIDED: dict[str, Row] = {"PAX": {"strategy": "pax"}, "bagging": {"strategy": "bagging"}}
# Of draws, by parameter: low, high, and whether uniform on a logarithmic scale.
Ranges = Mapping[str, tuple[float, float, bool]]
XGBOOST: Ranges = {
    "eta": (0.02, 0.3, True),
    "max_depth": (3, 10, False),
    "min_child_weight": (0.5, 30.0, True),
    "subsample": (0.5, 1.0, False),
    "colsample_bytree": (0.5, 1.0, False),
    "reg_lambda": (0.1, 30.0, True),
}
LIGHTGBM: Ranges = {
    "learning_rate": (0.02, 0.3, True),
    "num_leaves": (7, 127, True),
    "min_child_samples": (5, 200, True),
    "subsample": (0.5, 1.0, False),
    "colsample_bytree": (0.5, 1.0, False),
    "reg_lambda": (0.1, 30.0, True),
}
HGB: Ranges = {
    "learning_rate": (0.02, 0.3, True),
    "max_leaf_nodes": (7, 127, True),
    "min_samples_leaf": (5, 200, True),
    "l2_regularization": (0.1, 30.0, True),
    "max_features": (0.5, 1.0, False),
}
# The defaults, and changes that take no more rounds and levels.
DEFAULTS: Row = {"eta": 0.1, "max_depth": 6}
BOTH: Row = {"subsample": 0.8, "colsample_bytree": 0.8}
ALTERNATIVES: dict[str, Row] = {
    "max-depth 5": {"max_depth": 5},
    "max-depth 4": {"max_depth": 4},
    "max-depth 3": {"max_depth": 3},
    "eta 0.05": {"eta": 0.05},
    "lambda 5": {"reg_lambda": 5.0},
    "min-child-weight 5": {"min_child_weight": 5.0},
    "subsample, colsample-bytree 0.8": BOTH,
    "both, max-depth 4": {**BOTH, "max_depth": 4},
    "both, max-depth 4, eta 0.05": {**BOTH, "max_depth": 4, "eta": 0.05},
}
OUTPUT = Path("runs/papers/tuned")
NOTES = """\
Test AUC, means of the seeds. Rows: at most --rows of a set; a fifth tests, a fifth of the others
validates. SecureBoost: pooled XGBoost with SecureBoost's settings, whose trees are the same node
for node (tests/contract), so that no keys are needed; two parties with half of the columns each.
Tuned: the best of --draws by validation log loss; up to 300 rounds, early stopping after 20.
LightGBM is left out where it is not installed: pip install lightgbm."""

Shares = npt.NDArray[np.float64]
Fit = Callable[[Row, Pooled, int], Callable[[npt.NDArray[Any]], Shares]]


def draw(ranges: Ranges, rng: np.random.Generator) -> Row:
    """Random parameters; whole numbers where both ends are."""
    drawn: Row = {}
    for name, (low, high, is_log) in ranges.items():
        value = rng.uniform(math.log(low), math.log(high)) if is_log else rng.uniform(low, high)
        value = math.exp(value) if is_log else value
        drawn[name] = round(value) if isinstance(low, int) else value
    return drawn


def subset(rows: Pooled, name: str) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    row_ids = getattr(rows.split, name)
    return rows.values[row_ids], rows.labels[row_ids]


def fit_xgboost(parameters: Row, rows: Pooled, seed: int) -> Callable[[npt.NDArray[Any]], Shares]:
    import xgboost

    model = xgboost.XGBClassifier(
        n_estimators=MOST_ROUNDS,
        early_stopping_rounds=PATIENCE,
        eval_metric="logloss",
        random_state=seed,
        n_jobs=1,
        **parameters,
    )
    model.fit(*subset(rows, "train"), eval_set=[subset(rows, "valid")], verbose=False)
    return lambda values: model.predict_proba(values)[:, 1].astype(np.float64)


def fit_lightgbm(parameters: Row, rows: Pooled, seed: int) -> Callable[[npt.NDArray[Any]], Shares]:
    import lightgbm

    model = lightgbm.LGBMClassifier(
        n_estimators=MOST_ROUNDS, subsample_freq=1, random_state=seed, n_jobs=1, verbose=-1
    ).set_params(**parameters)
    stop = lightgbm.early_stopping(PATIENCE, verbose=False)
    valid = [subset(rows, "valid")]
    model.fit(*subset(rows, "train"), eval_set=valid, eval_metric="logloss", callbacks=[stop])
    return lambda values: model.booster_.predict(values)


def fit_hgb(parameters: Row, rows: Pooled, seed: int) -> Callable[[npt.NDArray[Any]], Shares]:
    """It stops early by rows passed as ``X_val``."""
    model = HistGradientBoostingClassifier(
        max_iter=MOST_ROUNDS,
        early_stopping=True,
        n_iter_no_change=PATIENCE,
        random_state=seed,
        **parameters,
    )
    values, labels = subset(rows, "valid")
    model.fit(*subset(rows, "train"), X_val=values, y_val=labels)
    return lambda values: model.predict_proba(values)[:, 1]


def learners() -> dict[str, tuple[Fit, Ranges]]:
    """The tuned learners that are installed."""
    import importlib.util

    installed: dict[str, tuple[Fit, Ranges]] = {
        "XGBoost": (fit_xgboost, XGBOOST),
        "scikit-learn's HGB": (fit_hgb, HGB),
    }
    if importlib.util.find_spec("lightgbm"):
        installed["LightGBM"] = (fit_lightgbm, LIGHTGBM)
    return installed


def tuned(rows: Pooled, name: str, draws: int, seed: int) -> tuple[float, Row]:
    """Test AUC of the best draw by validation log loss, and its parameters."""
    fit, ranges = learners()[name]
    rng = np.random.default_rng(seed)
    best: tuple[float, float, Row] = (math.inf, 0.0, {})
    for _ in range(draws):
        parameters = draw(ranges, rng)
        predict = fit(parameters, rows, seed)
        values, labels = subset(rows, "valid")
        loss = float(log_loss(labels, predict(values)))
        if loss < best[0]:
            values, labels = subset(rows, "test")
            best = (loss, float(roc_auc_score(labels, predict(values))), parameters)
    return best[1:]


def beside(data: str, most: int, draws: int, seed: int) -> list[Row]:
    """All methods on one set."""
    results = []
    with tempfile.TemporaryDirectory() as folder:
        table = {**COMMON, **write_sample(data, most, Path(folder)), "seed": seed}
        parties = {**table, "parties": PARTIES}
        rows = baseline_rows(load_settings({**parties, "strategy": "pax"}))[0]
        best: Row = {}
        for name in learners():
            auc, parameters = tuned(rows, name, draws, seed)
            results.append({"data": data, "method": f"{name}, tuned", "seed": seed, "auc": auc})
            best = parameters if name == "XGBoost" else best
        as_settings = {name.replace("_", "-"): value for name, value in best.items()}
        ways = {
            **{
                f"{name}, {split}": {**how, "partition": partition}
                for name, how in DIVIDED.items()
                for split, partition in SPLITS.items()
            },
            "PAX, tuned": {"strategy": "pax", **as_settings, "num-boost-round": MOST_ROUNDS},
        }
        for name, how in ways.items():
            test = run_and_tidy(load_settings({**parties, **how})).summary["metrics"]["test"]
            row = {"data": data, "method": name, "seed": seed, "auc": test["auc"]}
            results.append(row)
        vertical = {**table, "parties": 2, "strategy": "secureboost", "columns": "even"}
        pooled = run_baselines(load_settings({**vertical, "align": "ordered"}))["pooled"]
        results.append({"data": data, "method": "SecureBoost", "seed": seed, "auc": pooled["auc"]})
    return results


def show_scores(rows: Sequence[Row], heading: str) -> None:
    """Print a row for each method, a column for each set."""
    means = averaged(rows, "method", "data")
    sets = list(dict.fromkeys(row["data"] for row in means))
    shown = [
        {"method": method, **{row["data"]: row["auc"] for row in means if row["method"] == method}}
        for method in dict.fromkeys(row["method"] for row in means)
    ]
    show(heading, shown, "; ".join(["method", *(f"{name}:.4f" for name in sets)]))


def main(
    data: tuple[str, ...] = DATA,
    rows: int = 10_000,
    draws: int = 10,
    seeds: int = 3,
    output: Path = OUTPUT,
) -> None:
    """Train all, print test AUC, and write it as JSON.

    ``--rows`` are drawn of a larger set; ``--draws`` is the budget of each tuned learner;
    ``--seeds`` are averaged over. Finished rows in ``--output`` are not made again.
    """
    start = time.monotonic()
    results: list[Row] = []
    for name in data:
        for seed in range(FIRST_SEED, FIRST_SEED + seeds):
            asked = load_settings({"data": name, "seed": seed})
            cell = f"{name}-{rows}-{draws}-{seed}"
            scored = series(output).rows(cell, asked, partial(beside, name, rows, draws, seed))
            console.print(f"{cell}: {len(scored)} methods")
            results += scored
    show_scores(results, f"Test AUC, {rows} rows, {draws} draws, {seeds} seeds from {FIRST_SEED}")
    write_tables(output, "tuned", start, {"rows": results, "notes": NOTES})


def alternatives(
    data: tuple[str, ...] = (*DATA, "spambase", "ijcnn1", "cod-rna"),
    rows: int = 10_000,
    seeds: int = 3,
) -> None:
    """What other defaults would gain: test scores of pooled XGBoost less those of the defaults.

    Each line is one change of the defaults, averaged over the sets and ``--seeds``, with its gain
    on the set where that is largest and where it is smallest.
    """
    lines: list[Row] = []
    for name in data:
        with tempfile.TemporaryDirectory() as folder:
            table = {**COMMON, **write_sample(name, rows, Path(folder)), "strategy": "pax"}
            for seed in range(FIRST_SEED, FIRST_SEED + seeds):
                pooled = baseline_rows(load_settings({**table, "seed": seed}))[0]
                values, labels = subset(pooled, "test")
                scores = {
                    change: fit_xgboost({**DEFAULTS, **how}, pooled, seed)(values)
                    for change, how in {"": {}, **ALTERNATIVES}.items()
                }
                lines += [
                    {"change": change, "data": name}
                    | {
                        key: measure(labels, scores[change]) - measure(labels, scores[""])
                        for key, measure in (("auc", roc_auc_score), ("logloss", log_loss))
                    }
                    for change in ALTERNATIVES
                ]
    shown = []
    for change, of_change in grouped(lines, "change").items():
        by_set = [mean_of(of_set, "auc") for of_set in grouped(of_change, "data").values()]
        means = {key: mean_of(of_change, key) for key in ("auc", "logloss")}
        shown.append({"change": change[0], **means, "least": min(by_set), "most": max(by_set)})
    columns = "change; AUC=auc:+.4f; least:+.4f; most:+.4f; log loss=logloss:+.4f"
    show(f"Against the defaults: {len(data)} sets, {seeds} seeds", shown, columns)
