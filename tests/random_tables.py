"""Random tables and settings, and XGBoost on the same rows."""

import numpy as np
import pytest
from pyarrow import csv, table

from fedapp.runs.baselines import baseline_rows, train_boosted
from fedapp.trees.categories import recoded
from fedapp.trees.predict import predict_margins
from tests.federated import model_of
from tests.reference import compare_trees, xgboost_trees

OBJECTIVES = (
    *("binary:logistic", "multi:softprob", "reg:squarederror", "reg:logistic"),
    *("count:poisson", "reg:gamma", "reg:tweedie"),
)
NEWTON = ("reg:squaredlogerror", "reg:pseudohubererror", "binary:hinge")  # from seed 150 on
TIMES = ("survival:aft", "survival:cox")  # from seed 210 on; of PAX the first
RANKED = ("rank:ndcg", "rank:pairwise")  # from seed 240 on


def objective_of(seed):
    """The objective of a seed below 1000, or that plus 1000."""
    if seed % 1000 >= 240:
        return RANKED[seed % len(RANKED)]
    if seed % 1000 >= 210:
        return TIMES[seed % len(TIMES) if seed >= 1000 else 0]
    return (*OBJECTIVES, *NEWTON)[seed % 7 if seed % 1000 < 150 else 7 + seed % 3]


def random_labels(objective, signal, rng):
    """Labels of an objective, shape (n_rows,), that follow a signal in part."""
    noisy = signal + rng.normal(0, 1, len(signal))
    if objective in RANKED:
        return np.digitize(noisy, np.quantile(noisy, np.linspace(0, 1, rng.integers(3, 32))[1:-1]))
    positive = np.exp(noisy / 3)
    return {
        "binary:logistic": (noisy > np.median(noisy)).astype(float),
        "multi:softprob": np.digitize(noisy, np.quantile(noisy, [0.3, 0.8])).astype(float),
        "reg:squarederror": noisy.round(rng.integers(0, 5)),
        "reg:logistic": positive / (1 + positive),
        "count:poisson": rng.poisson(positive).astype(float),
        "reg:gamma": positive + 0.01,
        "reg:squaredlogerror": positive - 0.5,
        "reg:pseudohubererror": noisy,
        "binary:hinge": (noisy > np.median(noisy)).astype(float),
        "reg:tweedie": positive * rng.poisson(1, len(signal)),
        **dict.fromkeys(TIMES, (positive * 20).round() + 0.5),  # with ties
    }[objective]


def random_column(kind, n_rows, rng):
    """Numbers of a kind, shape (n_rows,)."""
    if kind == "few":
        return rng.integers(0, rng.integers(2, 12), n_rows).astype(float)
    if kind == "skewed":
        return np.exp(rng.normal(0, 3, n_rows))
    if kind == "constant":
        return np.full(n_rows, 7.0)
    return rng.normal(0, 1, n_rows).round(rng.integers(1, 7))


def random_case(path, seed, strategy):
    """Write a table; returns settings of a run on it, all by draws from the seed."""
    rng = np.random.default_rng(seed)
    objective = objective_of(seed)
    n_rows = int(rng.choice([20, 60, 150, 400]))
    n_columns = int(rng.integers(3, 8))
    kinds = rng.choice(["few", "normal", "skewed", "constant"], n_columns, p=[0.5, 0.3, 0.15, 0.05])
    columns = {f"x{n}": random_column(kind, n_rows, rng) for n, kind in enumerate(kinds)}
    signal = sum(column / (1 + column.std()) for column in columns.values())
    monotone = rng.random() < 0.2
    has_categories = not monotone and rng.random() < 0.5
    if has_categories:
        codes = rng.integers(0, rng.integers(2, 30), n_rows) ** 2 % 31
        columns["kind"] = np.array([f"k{code:02}" for code in codes], dtype=object)
        signal = signal + codes % 3
    for name, column in columns.items():
        if rng.random() < 0.4:
            empty = rng.random(n_rows) < rng.choice([0.05, 0.3, 0.9])
            columns[name] = np.where(empty, None if name == "kind" else np.nan, column)
    columns["y"] = random_labels(objective, signal, rng)
    settings = {
        "data": str(path),
        "label": "y",
        "objective": objective,
        "seed": seed,
        "num-boost-round": int(rng.integers(1, 5)),
        "max-depth": int(rng.integers(1, 6)),
        "max-bin": int(rng.choice([2, 5, 16, 64, 256])),
        "eta": float(rng.choice([0.1, 0.3, 1.0])),
        "lambda": float(rng.choice([0.0, 0.0, 0.5, 1.0, 3.0])),
        "alpha": float(rng.choice([0.0, 0.0, 0.3])),
        "gamma": float(rng.choice([0.0, 0.0, 0.2])),
        "min-child-weight": float(rng.choice([0.0, 0.1, 1.0, 5.0])),
        "max-cat-to-onehot": int(rng.choice([2, 4, 40])),
        "max-cat-threshold": int(rng.choice([3, 64])),
    }
    if rng.random() < 0.2:
        settings["max-delta-step"] = float(rng.choice([0.2, 1.0]))
    if objective in RANKED:  # queries of a row, a few, or nearly all
        columns["query"] = rng.integers(0, rng.choice([2, 9, 40]), n_rows) ** 2
        settings["qid"] = "query"
    elif rng.random() < 0.3 and objective != "survival:cox":
        columns["w"] = rng.choice([0.0, 0.5, 1.0, 2.5, 1 / 3], n_rows)
        settings["weight"] = "w"
    if objective == "reg:pseudohubererror":
        settings["huber-slope"] = float(rng.choice([0.3, 1.0, 5.0]))
    if objective in TIMES:
        columns["seen"] = (rng.random(n_rows) < rng.choice([0.1, 0.5, 0.9, 1.0])).astype(int)
        columns["seen"][rng.integers(n_rows, size=9)] = 1  # also of few training rows
        settings["event"] = "seen"
        settings["aft-loss-distribution"] = str(rng.choice(["normal", "logistic", "extreme"]))
        settings["aft-loss-distribution-scale"] = float(rng.choice([0.2, 1.0, 1.7]))
    if objective == "binary:logistic" and rng.random() < 0.3:
        settings["scale-pos-weight"] = 2.5
    names = [name for name in columns if name.startswith("x")]
    shared = {}
    if monotone:
        chosen = rng.choice(names, 2, replace=False)
        shared["monotone-constraints"] = f"{chosen[0]}:1,{chosen[1]}:-1"
    if rng.random() < 0.2:
        shared["interaction-constraints"] = f"[{','.join(names[:2])}],[{','.join(names[1:])}]"
    csv.write_csv(table({name: list(column) for name, column in columns.items()}), path)
    if strategy == "pax":
        return {**settings, **shared, "parties": 1}
    parties = int(rng.integers(2, 4))
    layout = {"parties": parties, "columns": "random", "align": "ordered", "max-bin": 16}
    told = {"share-column-names": True} if shared else {}
    return {**settings, **shared, **told, **layout, "num-boost-round": 2, "max-depth": 3}


def is_rounded(trees):
    """Whether rounding chooses splits of XGBoost's trees.

    A child's sums are the parent's less its sibling's. In float64 fewer than a float32's 24 bits
    are left of hessians below 2^-29 of their tree's."""
    hessians = [np.array(tree["sum_hessian"]) for tree in trees]
    return any(sums.min() < sums[0] * 2.0**-29 for sums in hessians)


def differences(settings, folder):
    """How a run differs from XGBoost on its joined rows; nothing where it does not.

    Skips the test where rounding chooses XGBoost's splits."""
    model, rows = model_of(folder), baseline_rows(settings)[0]
    trained = train_boosted(settings, rows)
    agreement = compare_trees(model, trained.booster)
    if agreement.differing and is_rounded(xgboost_trees(trained.booster)):
        pytest.skip("rounding chooses XGBoost's splits")
    found = []
    if agreement.differing:
        found.append(f"{agreement.differing} of {agreement.n_nodes} nodes differ")
    if agreement.leaf_error > 1e-6:
        found.append(f"leaves differ by {agreement.leaf_error}")
    values = recoded(rows.values, rows.categories, model.categories, rows.columns)[0]
    ours = predict_margins(model, values, rows.base_margins)
    theirs = trained.margins(np.arange(len(values)))
    if not np.allclose(ours, theirs, rtol=1e-5, atol=1e-5):
        found.append(f"margins differ by {np.abs(ours - theirs).max()}")
    scores, of_rounds = folder.summary["metrics"], folder.rounds[-1]
    for subset in ("train", "valid"):
        for name in {"logloss", "mlogloss", "rmse", "accuracy"} & set(of_rounds[subset]):
            last, final = of_rounds[subset][name], scores[subset][name]
            if last != final and not np.isclose(last, final, rtol=1e-6):  # NaN is null in JSON
                found.append(f"{subset} {name} is {last} in the last round, {final} in the end")
    for name, score in trained.scores().items():
        ours, theirs = np.float64(scores["test"][name]), np.float64(score)
        # Times of either model are divided where its margins are.
        most = folder.summary.get("binning_errors", {}).get("c-index", 1e-9)
        most = most if name == "c-index" else 1e-9
        if not np.isclose(ours, theirs, rtol=1e-6, atol=most, equal_nan=True):
            found.append(f"test {name} is {ours}, of pooled XGBoost {theirs}")
    return found
