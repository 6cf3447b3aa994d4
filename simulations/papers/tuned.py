"""Where the defaults lose: fedapp's defaults on divided rows, beside tuned learners on pooled rows.

Each set has a random split of its rows and a skewed one (Dirichlet 0.3). Every learner trains on
the same rows, stops early by the same validation rows, and is scored on the same test rows.
XGBoost and scikit-learn's HistGradientBoosting choose among the same number of random draws of
their parameters by validation log loss. "PAX, tuned" has the same budget: XGBoost's draws, as PAX
with one party is XGBoost.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.metrics import log_loss, roc_auc_score

from fedapp.data.datasets import source_frame
from fedapp.runs.baselines import Pooled, baseline_rows, run_baselines
from fedapp.settings import load_settings
from simulations.paper import Paper, Tables
from simulations.study import Row, averaged, console, run_summary

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
HGB: Ranges = {
    "learning_rate": (0.02, 0.3, True),
    "max_leaf_nodes": (7, 127, True),
    "min_samples_leaf": (5, 200, True),
    "l2_regularization": (0.1, 30.0, True),
    "max_features": (0.5, 1.0, False),
}
NOTES = """\
Test AUC, means of the seeds. Rows: at most --rows of a set; a fifth tests, a fifth of the others
validates. SecureBoost: pooled XGBoost with SecureBoost's settings, whose trees are the same node
for node (tests/contract), so that no keys are needed; two parties with half of the columns each.
Tuned: the best of --draws by validation log loss; up to 300 rounds, early stopping after 20."""
STUDY = Paper(Path("runs/papers/tuned"), NOTES)

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
    """Codes are read as categories, as in fedapp."""
    import xgboost

    model = xgboost.XGBClassifier(
        n_estimators=MOST_ROUNDS,
        early_stopping_rounds=PATIENCE,
        eval_metric="logloss",
        random_state=seed,
        n_jobs=1,
        **rows.types,
        **parameters,
    )
    model.fit(*subset(rows, "train"), eval_set=[subset(rows, "valid")], verbose=False)
    return lambda values: model.predict_proba(values)[:, 1].astype(np.float64)


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


LEARNERS: dict[str, tuple[Fit, Ranges]] = {
    "XGBoost": (fit_xgboost, XGBOOST),
    "scikit-learn's HGB": (fit_hgb, HGB),
}


def tuned(rows: Pooled, name: str, draws: int, seed: int) -> tuple[float, Row]:
    """Test AUC of the best draw by validation log loss, and its parameters."""
    fit, ranges = LEARNERS[name]
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


def write_sample(data: str, most: int, folder: Path) -> Row:
    """Draw at most ``most`` rows of a set; the settings of their table."""
    frame, roles, *_ = source_frame(data)
    rows = np.random.default_rng(0).permutation(frame.num_rows)[:most]
    pq.write_table(frame.take(np.sort(rows)), folder / "rows.parquet")
    table = {"data": str(folder / "rows.parquet"), "label": roles.label}
    return {**table, "drop-columns": ",".join(roles.drop)}


def beside(data: str, most: int, draws: int, seed: int) -> list[Row]:
    """All methods on one set: test AUC."""
    aucs, best = dict[str, float](), dict[str, Any]()
    with tempfile.TemporaryDirectory() as folder:
        config = {**COMMON, **write_sample(data, most, Path(folder)), "strategy": "pax"}
        config |= {"seed": seed, "parties": PARTIES}
        rows = baseline_rows(load_settings(config))[0]
        for name in LEARNERS:
            aucs[f"{name}, tuned"], parameters = tuned(rows, name, draws, seed)
            best = parameters if name == "XGBoost" else best
        as_settings = {name.replace("_", "-"): value for name, value in best.items()}
        ways = {
            f"{name}, {split}": {**how, "partition": partition}
            for name, how in DIVIDED.items()
            for split, partition in SPLITS.items()
        }
        ways["PAX, tuned"] = {"strategy": "pax", **as_settings, "num-boost-round": MOST_ROUNDS}
        for name, how in ways.items():
            aucs[name] = run_summary({**config, **how})["metrics"]["test"]["auc"]
        vertical = {**config, "parties": 2, "strategy": "secureboost", "columns": "even"}
        pooled = run_baselines(load_settings({**vertical, "align": "ordered"}))["pooled"]
        aucs["SecureBoost"] = pooled["auc"]
    return [{"data": data, "method": name, "seed": seed, "auc": aucs[name]} for name in aucs]


@STUDY.table(
    "rows",
    f"Test AUC, {{rows}} rows, {{draws}} draws, {{seeds}} seeds from {FIRST_SEED}",
    "data; method; AUC=auc:.4f",
    2,
)
def by_method(rows: Sequence[Row]) -> list[Row]:
    """Means over the seeds."""
    return averaged(rows, "data", "method")


@STUDY.command
def main(
    data: tuple[str, ...] = DATA, rows: int = 10_000, draws: int = 10, seeds: int = 3
) -> Tables:
    """Test AUC of all.

    ``--rows`` are drawn of a larger set; ``--draws`` is the budget of each tuned learner;
    ``--seeds`` are averaged over.
    """
    results: list[Row] = []
    for name in data:
        for seed in range(FIRST_SEED, FIRST_SEED + seeds):
            asked = load_settings({"data": name, "seed": seed})
            cell = f"{name}-{rows}-{draws}-{seed}"
            scored = STUDY.rows(cell, asked, partial(beside, name, rows, draws, seed))
            console.print(f"{cell}: {len(scored)} methods")
            results += scored
    yield "rows", results
