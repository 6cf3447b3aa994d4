"""A forest over rows beside what else parties with the same columns could do.

``horizontal-forest``, plain and under masks, against scikit-learn's forest on all rows in one place
and on each party's rows, and against the other horizontal methods with their defaults, on the same
test rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedapp.data.datasets import dataset_names
from fedapp.runs.baselines import run_baselines
from fedapp.settings import load_settings
from simulations.paper import Paper, Tables
from simulations.passing import temporary_run
from simulations.study import Row, check_names, costs, grouped, mean_of

FOREST: Row = {"strategy": "horizontal-forest", "max-bin": 64}
METHODS: dict[str, Row] = {
    "horizontal-forest": FOREST,
    "horizontal-forest, secure": {**FOREST, "horizontal-forest.aggregation": "secure"},
    "pax": {"strategy": "pax"},
    "bagging": {"strategy": "bagging"},
    "fedavg-linear": {"strategy": "fedavg-linear"},
}
POOLED, ALONE = "scikit-learn's forest, pooled", "scikit-learn's forest, each party alone"
PARTIES = 3
SCORES = "auc", "mlogloss", "rmse"  # the first that a set has
OUTPUT = Path("runs/papers/forests")
NOTES = """\
Three parties of equal size; 100 trees of depth 10, at most 64
bins a column; the other methods with their defaults. AUC, for several classes log loss, for numbers
RMSE, on the same test rows; mean and standard deviation over the seeds. Alone: mean over the
parties.
MB: both ways, all parties together."""
STUDY = Paper(NOTES)


def rows_of(table: Row) -> list[Row]:
    """Score and costs of every method on one draw of a table."""
    rows = list[Row]()
    for method, how in METHODS.items():
        with temporary_run(load_settings({**table, **how})) as run:
            summary = run.summary
        rows.append({"method": method, **score_of(summary["metrics"]["test"]), **costs(summary)})
    baselines = run_baselines(load_settings({**table, **FOREST}))
    rows.append({"method": POOLED, **score_of(baselines["pooled"])})
    alone = [score_of(scores) for scores in baselines["alone"].values()]
    return [*rows, {"method": ALONE, **alone[0], "value": mean_of(alone, "value")}]


def score_of(scores: Row) -> Row:
    """The score that a table shows."""
    name = next(name for name in SCORES if name in scores)
    return {"score": name, "value": scores[name]}


@STUDY.table(
    "rows",
    "{seeds} seeds",
    "data; method; score; mean:.4f; ±=deviation:.4f; exchanges:.0f; MB=mb:.1f",
    3,
)
def summed_up(rows: Sequence[Row]) -> list[Row]:
    """Mean and deviation over the seeds."""
    return [
        {
            **of_method[0],
            "mean": mean_of(of_method, "value"),
            "deviation": float(
                np.std([row["value"] for row in of_method], ddof=len(of_method) > 1)
            ),
        }
        for of_method in grouped(rows, "data", "method").values()
    ]


@STUDY.command
def main(
    data: tuple[str, ...] = ("spambase", "default-credit", "abalone"),
    seeds: int = 3,
    output: Path = OUTPUT,
) -> Tables:
    """Train all methods, print scores and costs, and write them as JSON."""
    check_names("data", data, dataset_names())
    yield (
        "rows",
        [
            {"data": name, "seed": seed, **row}
            for name in data
            for seed in range(42, 42 + seeds)
            for row in rows_of({"data": name, "parties": PARTIES, "seed": seed})
        ],
    )
