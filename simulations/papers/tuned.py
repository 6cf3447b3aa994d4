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
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.metrics import log_loss, roc_auc_score

from fedapp import metrics
from fedapp.records.document import load
from fedapp.runs.baselines import Pooled, baseline_rows, run_baselines
from fedapp.settings import load_settings
from fedapp.trees.model import Ensemble
from fedapp.trees.predict import predict_margins
from simulations.paper import Paper, Tables, run_and_tidy, series
from simulations.papers.noniid import write_sample
from simulations.study import Row, averaged, console, grouped, mean_of, show

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
# Changes where a column has 100 categories or more, as in these sets, from min-child-weight 1.
MANY = ("airline", "departures", "made")
AT_DEPARTURE = ("DepTime", "DepDelay", "TaxiOut")
OF_CATEGORIES: dict[str, Row] = {
    **{f"min-child-weight {least}": {"min_child_weight": float(least)} for least in (2, 5, 10, 20)},
    "max-cat-threshold 16": {"max_cat_threshold": 16},
    "max-cat-to-onehot 1000": {"max_cat_to_onehot": 1000},
    "lambda 20": {"reg_lambda": 20.0},
}
# Changes on skewed splits: settings before and after.
BINS, CHILD_WEIGHT = "pax.bins", "min-child-weight"
WHEN_SKEWED: dict[str, tuple[Row, Row]] = {
    "pax.bins share, equal": ({BINS: "share"}, {BINS: "equal"}),
    "min-child-weight 1, 5": ({CHILD_WEIGHT: 1.0}, {CHILD_WEIGHT: 5.0}),
}
OUTPUT = Path("runs/papers/tuned")
NOTES = """\
Test AUC, means of the seeds. Rows: at most --rows of a set; a fifth tests, a fifth of the others
validates. SecureBoost: pooled XGBoost with SecureBoost's settings, whose trees are the same node
for node (tests/contract), so that no keys are needed; two parties with half of the columns each.
Tuned: the best of --draws by validation log loss; up to 300 rounds, early stopping after 20.
LightGBM is left out where it is not installed: pip install lightgbm."""
STUDY = Paper(NOTES)

Floats = npt.NDArray[np.float32]
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


def xgboost_of(parameters: Row, rows: Pooled, seed: int) -> Any:
    """A trained XGBClassifier; codes are read as categories, as in fedapp."""
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
    return model.fit(*subset(rows, "train"), eval_set=[subset(rows, "valid")], verbose=False)


def fit_xgboost(parameters: Row, rows: Pooled, seed: int) -> Callable[[npt.NDArray[Any]], Shares]:
    model = xgboost_of(parameters, rows, seed)
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


def drawn(name: str, most: int, seeds: Sequence[int], **how: Any) -> Iterator[tuple[Row, Pooled]]:
    """Settings of a run of PAX on a set, and its rows, by seed."""
    with tempfile.TemporaryDirectory() as folder:
        table = {**COMMON, **write_table(name, most, Path(folder)), "strategy": "pax", **how}
        for seed in seeds:
            config = {**table, "seed": seed}
            yield config, baseline_rows(load_settings(config))[0]


def beside(data: str, most: int, draws: int, seed: int) -> list[Row]:
    """All methods on one set."""
    results = []
    for config, rows in drawn(data, most, [seed], parties=PARTIES):
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
            test = run_and_tidy(load_settings({**config, **how})).summary["metrics"]["test"]
            row = {"data": data, "method": name, "seed": seed, "auc": test["auc"]}
            results.append(row)
        vertical = {**config, "parties": 2, "strategy": "secureboost", "columns": "even"}
        pooled = run_baselines(load_settings({**vertical, "align": "ordered"}))["pooled"]
        results.append({"data": data, "method": "SecureBoost", "seed": seed, "auc": pooled["auc"]})
    return results


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
    data: tuple[str, ...] = DATA,
    rows: int = 10_000,
    draws: int = 10,
    seeds: int = 3,
    output: Path = OUTPUT,
) -> Tables:
    """Train all, print test AUC, and write it as JSON.

    ``--rows`` are drawn of a larger set; ``--draws`` is the budget of each tuned learner;
    ``--seeds`` are averaged over. Finished rows in ``--output`` are not made again.
    """
    results: list[Row] = []
    for name in data:
        for seed in range(FIRST_SEED, FIRST_SEED + seeds):
            asked = load_settings({"data": name, "seed": seed})
            cell = f"{name}-{rows}-{draws}-{seed}"
            scored = series(output).rows(cell, asked, partial(beside, name, rows, draws, seed))
            console.print(f"{cell}: {len(scored)} methods")
            results += scored
    yield "rows", results


def alternatives(
    data: tuple[str, ...] = (*DATA, "spambase", "ijcnn1", "cod-rna"),
    many: tuple[str, ...] = MANY,
    skewed: tuple[str, ...] = (*DATA, *MANY[1:]),
    rows: int = 10_000,
    seeds: int = 3,
) -> None:
    """What other defaults would gain: test scores of a change less those without it.

    Pooled XGBoost: a line for each change, averaged over ``--data`` and ``--seeds``, with its gain
    on the set where that is smallest and where it is largest; and one for each set of ``--many``,
    which have columns of 100 categories and more. Then PAX with three parties and skewed splits of
    ``--skewed``, before and after. From and to: the seeds' mean 95 % interval of the difference on
    the same test rows. MB: sent, both ways.
    """
    drawn = range(FIRST_SEED, FIRST_SEED + seeds)
    lines = [line for name in data for line in changed(name, rows, drawn, ALTERNATIVES)]
    shown = []
    for change, of_change in grouped(lines, "change").items():
        by_set = [mean_of(of_set, "auc") for of_set in grouped(of_change, "data").values()]
        means = {key: mean_of(of_change, key) for key in ("auc", "logloss")}
        shown.append({"change": change[0], **means, "least": min(by_set), "most": max(by_set)})
    columns = "change; AUC=auc:+.4f; least:+.4f; most:+.4f; log loss=logloss:+.4f"
    show(f"Against the defaults: {len(data)} sets, {seeds} seeds", shown, columns)
    lines = [line for name in many for line in changed(name, rows, drawn, OF_CATEGORIES)]
    spans = "AUC=auc:+.4f; from=low:+.4f; to=high:+.4f; log loss=logloss:+.4f"
    head = "Columns of many categories, against min-child-weight 1"
    show(head, averaged(lines, "data", "change"), f"data; change; {spans}", 2)
    lines = [line for name in skewed for line in changed_when_skewed(name, rows, drawn)]
    costs = "before=before:.4f; MB=mb_before:.0f; after=after:.4f; MB=mb_after:.0f"
    head = f"PAX, {PARTIES} parties, {SPLITS['skewed']}"
    show(head, averaged(lines, "data", "change"), f"data; change; {costs}; {spans}", 2)


def write_table(name: str, most: int, folder: Path) -> Row:
    """Write a set's rows; the settings of their table.

    ``departures``: of ``airline``, only what is known before departure. ``made``: labels that
    follow columns of 20, 128 and 300 categories, some frequent and most rare, and of six numbers
    three.
    """
    if name == "departures":
        table = write_sample("airline", most, folder)
        return {**table, "drop-columns": f"{table['drop-columns']},{','.join(AT_DEPARTURE)}"}
    if name != "made":
        return write_sample(name, most, folder)
    rng, columns = np.random.default_rng(0), dict[str, Any]()
    margins = np.full(most, -0.5)
    for number in (20, 128, 300):
        shares = 1 / np.arange(1, number + 1) ** 0.8
        codes = rng.choice(number, most, p=shares / shares.sum())
        margins += rng.normal(0, 0.5, number)[codes]
        columns[f"of {number}"] = [f"name {code}" for code in codes]
    for number, slope in enumerate((0.5, 0.3, 0.2, 0.0, 0.0, 0.0)):
        columns[f"number {number}"] = values = rng.normal(size=most)
        margins += slope * values
    columns["y"] = (rng.random(most) < 1 / (1 + np.exp(-margins))).astype(np.int64)
    pq.write_table(pa.table(columns), folder / "rows.parquet")
    return {"data": str(folder / "rows.parquet"), "label": "y"}


def difference(after: Floats, before: Floats, labels: npt.NDArray[Any]) -> Row:
    """Test scores of margins less those of others, with the interval of the AUC."""
    pair = after.reshape(-1, 1), before.reshape(-1, 1)
    spans = metrics.paired("binary:logistic", *pair, labels, np.ones_like(labels))
    auc, low, high = spans["auc"]
    return {"auc": auc, "low": low, "high": high, "logloss": spans["logloss"][0]}


def changed(name: str, most: int, seeds: Sequence[int], changes: Mapping[str, Row]) -> list[Row]:
    """Differences of pooled XGBoost to the defaults, by change and seed."""
    lines: list[Row] = []
    for config, rows in drawn(name, most, seeds):
        values, labels = subset(rows, "test")
        models = {
            change: xgboost_of({**DEFAULTS, **how}, rows, config["seed"])
            for change, how in {"": {}, **changes}.items()
        }
        margins = {of: model.predict(values, output_margin=True) for of, model in models.items()}
        lines += [
            {"change": change, "data": name} | difference(margins[change], margins[""], labels)
            for change in changes
        ]
    return lines


def changed_when_skewed(name: str, most: int, seeds: Sequence[int]) -> list[Row]:
    """Differences of PAX on skewed splits, and bytes before and after, by change and seed."""
    lines: list[Row] = []
    how = {"parties": PARTIES, "partition": SPLITS["skewed"]}
    for config, rows in drawn(name, most, seeds, **how):
        values, labels = subset(rows, "test")
        for change, (before, after) in WHEN_SKEWED.items():
            if CHILD_WEIGHT in after and name not in MANY:
                continue
            line: Row = {"change": change, "data": name}
            margins = []
            for key, changed_to in (("before", before), ("after", after)):
                run = run_and_tidy(load_settings({**config, **changed_to}))
                margins.append(predict_margins(load(run.path / "model.json", Ensemble), values))
                line[key] = run.summary["metrics"]["test"]["auc"]
                line[f"mb_{key}"] = sum(run.summary["bytes"].values()) / 1e6
            lines.append(line | difference(margins[1], margins[0], labels))
    return lines
