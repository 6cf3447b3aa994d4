"""What PAX costs beside XGBoost: seconds, bytes, and scores under masks, floors and noise.

Each bench is the function of its name, whose docstring says what it measures, and has its sizes
above it.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from fedapp.run_folder import RunFolder
from fedapp.runs.baselines import Pooled, baseline_rows, train_boosted, xgboost_parameters
from fedapp.settings import Settings, load_settings
from simulations.study import (
    BINARY,
    Bench,
    Row,
    auc_or_rmse,
    check_names,
    compare_with_xgboost,
    measured,
    run_and_load,
    run_once,
    score,
    show,
    write_numbers,
)

# pax_speed

SPEED_DATA, SPEED_DEPTHS, SPEED_REPEATS = "default-credit", (4, 6), 9
SPEED: Row = {"parties": 3, "num-boost-round": 20, "max-bin": 255, "eta": 0.3}
SPEED |= {"test-fraction": 1 / 3}  # 20,000 rows train
POOLED, SHARE, EQUAL = "XGBoost, pooled", "PAX, share", "PAX, equal"
# The test AUC of pooled XGBoost varies by 0.007 as max-bin goes from 251 to 259, so the AUC of PAX
# is compared with the mean over these values.
WORST_AUC_DIFFERENCE, NEARBY_BINS = 0.003, range(251, 260)


def speed_settings(method: str, depth: int, **more: object) -> Settings:
    bins = "share" if method == SHARE else "equal"
    config: Row = {"strategy": "pax", "data": SPEED_DATA, **BINARY, **SPEED, "max-depth": depth}
    return load_settings({**config, "pax.bins": bins, **more})


@cache
def pooled_rows() -> Pooled:
    """All rows, with the test rows of all parties."""
    return baseline_rows(speed_settings(EQUAL, 1))[0]


@cache  # outside of what is timed: XGBoost is slower right after other compiled code
def pooled_at(depth: int) -> tuple[Row, float]:
    """XGBoost's parameters at a depth, and its AUC."""
    settings, rows = speed_settings(POOLED, depth), pooled_rows()
    auc = train_boosted(settings, rows).scores()["auc"]
    settings = settings.watching(0).splitting(rows.category_counts(of_training=False).tolist())
    return xgboost_parameters(settings, rows), auc


def train_speed(method: str, depth: int) -> Row:
    """Seconds and score of PAX, or of XGBoost on all rows."""
    settings = speed_settings(method, depth)
    if method != POOLED:
        return run_once(settings)
    import xgboost

    rows, (parameters, auc) = pooled_rows(), pooled_at(depth)
    start, cpu_start = time.perf_counter(), time.process_time()
    matrix = rows.matrix(
        xgboost.QuantileDMatrix, rows.split.train, settings.objective, max_bin=settings.max_bin
    )
    xgboost.train(parameters, matrix, settings.num_boost_round)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "auc": auc}


def check_speed() -> Row:
    """Compare one party's nodes with those of XGBoost, and the AUC of three."""
    n_nodes = 0
    for depth in SPEED_DEPTHS:
        settings = speed_settings(EQUAL, depth, parties=1)
        with measured(settings) as (run, _):
            n_nodes += compare_with_xgboost(settings, run.path)
        nearby = [speed_settings(EQUAL, depth, **{"max-bin": n_bins}) for n_bins in NEARBY_BINS]
        aucs = [train_boosted(each, pooled_rows()).scores()["auc"] for each in nearby]
        for method in (SHARE, EQUAL):
            difference = run_once(speed_settings(method, depth))["auc"] - np.mean(aucs)
            if abs(difference) > (limit := WORST_AUC_DIFFERENCE):
                rule = f"AUC of {method} must be within {limit} of pooled"
                raise ValueError(f"{rule}, got {difference:+.5f}")
    return {"same_nodes": n_nodes}


def pax_speed(repeats: int = SPEED_REPEATS) -> Bench:
    """How fast PAX trains, beside pooled XGBoost.

    PAX: ``seconds.train`` of a run in this process: sketches and all trees, with messages encoded
    and checked, and the states of all written to disk now and then. XGBoost:
    ``QuantileDMatrix`` and ``train``. Reading the table does not count. All take turns.
    """
    methods = (POOLED, SHARE, EQUAL)
    return Bench(
        reference=check_speed,
        cases=[{"depth": depth, "method": each} for depth in SPEED_DEPTHS for each in methods],
        measure=train_speed,
        repeats=repeats,
        base={"method": POOLED},
        sizes={"data": SPEED_DATA, "parties": 3, "rows": 20_000, "trees": 20, "max_bin": 255},
        title="20,000 rows, 20 trees",
        columns="method; depth; sec.=seconds:.3f; CPU=cpu_seconds:.3f; / pooled=ratio of seconds"
        ":.2f; / pooled, CPU=ratio of cpu_seconds:.2f; AUC=auc:.5f; messages; MB=mb:.1f",
    )


# pax_secure

PLAIN, SECURE = "plain, share", "secure"
AGGREGATIONS = {
    PLAIN: {"pax.aggregation": "plain", "pax.bins": "share"},
    "plain, equal": {"pax.aggregation": "plain", "pax.bins": "equal"},
    SECURE: {"pax.aggregation": "secure"},
}


@contextmanager
def measured_secure(
    sums: str, parties: int, trees: int, rows: int, columns: int
) -> Iterator[tuple[RunFolder, Row]]:
    """A run on a made table."""
    config: Row = {"label": "label", **BINARY, "parties": parties, "num-boost-round": trees}
    config |= {"max-depth": 6, "max-bin": 255, "test-fraction": 0.1, **AGGREGATIONS[sums]}
    with TemporaryDirectory() as folder:
        data = write_numbers(Path(folder) / "rows.parquet", rows, columns)
        with measured(load_settings({**config, "data": data})) as run_and_figures:
            yield run_and_figures


def train_secure(sums: str, sizes: Mapping[str, int]) -> Row:
    """Costs of a run, also of what comes before its trees."""
    with measured_secure(sums, **sizes) as (_, figures):
        for name in ("seconds", "bytes"):
            figures[f"begin_{name}"] = figures[name] - sizes["trees"] * figures[f"{name}_a_tree"]
        return figures


def check_secure(sizes: Mapping[str, int]) -> Row:
    """Check that the model under masks is that of one party with all rows."""
    models = []
    for parties in (1, sizes["parties"]):
        with measured_secure(SECURE, **{**sizes, "parties": parties, "trees": 2}) as (run, _):
            models.append((run.path / "model.xgb.json").read_text())
    if models[0] != models[1]:
        raise ValueError(f"the model must be that of one party, got another with {parties}")
    return {}


def pax_secure(
    rows: int = 20_000, columns: int = 23, parties: int = 3, trees: int = 20, repeats: int = 5
) -> Bench:
    """What secure aggregation costs PAX: seconds and bytes a tree, beside plain sums.

    Bins by shares of the rows (``share``) send less than ``max-bin`` bins at every party
    (``equal``), which masked sums need. Runs of all three variants take turns, so that other load
    on the machine affects all alike. First, the model under masks is checked to equal that of one
    party with all rows. At least 5 columns and 3 trees.
    """
    sizes = {"parties": parties, "trees": trees, "rows": rows, "columns": columns}
    return Bench(
        reference=partial(check_secure, sizes),
        cases=[{"sums": sums} for sums in AGGREGATIONS],
        measure=partial(train_secure, sizes=sizes),
        repeats=repeats,
        base={"sums": PLAIN},
        figures=("seconds_a_tree", "bytes_a_tree"),
        sizes=sizes,
        title=f"{parties} parties, {rows:,} x {columns}, depth 6",
        columns="sums; s a tree=seconds_a_tree:.4f; / share=ratio of seconds_a_tree:.2f; bytes a "
        "tree=bytes_a_tree:.0f; s before=begin_seconds:.2f; bytes before=begin_bytes:.0f; "
        "exchanges; AUC=auc:.4f",
    )


# pax_floor

SETS = ("breast-cancer", "ionosphere", "spambase", "higgs-11k", "default-credit")
FLOORS = (0, 5, 20)


def pax_floor(
    data: tuple[str, ...] = SETS,
    aggregation: tuple[str, ...] = ("plain", "secure"),
    parties: int = 3,
    rounds: int = 50,
) -> Iterator[Row]:
    """What merged bins cost PAX: the test AUC by the fewest rows of a non-empty bin.

    A line for each data set (of two classes), aggregation and floor.
    """
    for name, sums, min_rows in itertools.product(data, aggregation, FLOORS):
        settings: Row = {"data": name, "objective": "binary:logistic", "parties": parties}
        settings |= {"num-boost-round": rounds, "preset": "xgboost", "least-bin-rows": min_rows}
        auc = run_once(load_settings({**settings, "pax.aggregation": sums}))["auc"]
        line = {"data": name, "aggregation": sums, "parties": parties, "rounds": rounds}
        yield {**line, "least_bin_rows": min_rows, "auc": auc}


# privacy

PRIVATE_DATA: dict[str, Row] = {
    "adult": {},
    "default-credit": {},
    "abalone": {"objective": "reg:squarederror", "privacy.clip": 5.0},
}
EPSILONS, NO_NOISE = (0.5, 1.0, 2.0, 4.0, 8.0), 1000.0
PRIVATE_ROUNDS, PRIVATE_DEPTH, PRIVATE_ETA, DELTA, PRIVATE_PARTIES = 100, 4, 0.2, 1e-5, 3


def private_score(how: Row, seeds: int) -> Row:
    """Mean score on test rows over seeds, and its standard deviation if there are several."""
    scores = []
    for seed in range(seeds):
        common = {"parties": PRIVATE_PARTIES, "seed": seed, "pax.aggregation": "secure"}
        loaded, model, _ = run_and_load({**common, **how})
        test = score(loaded, model)["test"]
        metric, value = auc_or_rmse(test.labels, test.margins[:, 0], bool(model.classes))
        scores.append(value)
    spread = statistics.stdev(scores) if seeds > 1 else None
    return {"metric": metric, "mean": statistics.mean(scores), "deviation": spread}


def privacy(
    data: tuple[str, ...] = tuple(PRIVATE_DATA),
    epsilons: tuple[float, ...] = EPSILONS,
    seeds: int = 5,
    rounds: int = PRIVATE_ROUNDS,
    depth: int = PRIVATE_DEPTH,
) -> Iterator[Row]:
    """What an epsilon costs PAX: scores on test rows by epsilon.

    Each cell trains the private model with several seeds, each of which holds out other rows, and
    scores it on these rows without noise (the scores that a run reports are noisy). References: the
    model under secure aggregation without noise, with PAX's usual settings; and the same trees at
    an epsilon of 1000, which shows what drawing them costs.
    """
    check_names("data", data, PRIVATE_DATA)
    usual = {"num-boost-round": 50, "max-depth": 6, "eta": 0.3}
    shape = {"num-boost-round": rounds, "max-depth": depth, "eta": PRIVATE_ETA}
    sizes: Row = {"seeds": seeds, "parties": PRIVATE_PARTIES, "rounds": rounds, "depth": depth}
    sizes |= {"eta": PRIVATE_ETA, "delta": DELTA}
    lines = list[Row]()
    for name in data:
        private = {"data": name, **PRIVATE_DATA[name]}
        open_settings = {key: private[key] for key in private if key != "privacy.clip"}
        private |= {**shape, "privacy.delta": DELTA}
        ways = {epsilon: {**private, "privacy.epsilon": epsilon} for epsilon in epsilons}
        ways = {0.0: open_settings | usual, **ways}
        ways[NO_NOISE] = {**private, "privacy.epsilon": NO_NOISE}
        for epsilon, how in ways.items():
            lines.append({"data": name, "epsilon": epsilon, **private_score(how, seeds)})
            yield {**lines[-1], **sizes}
    columns = "data; metric; epsilon:g; mean:.4f; deviation:.4f"
    show("an epsilon of 0 has no noise, one of 1000 next to none", lines, columns, 2)
