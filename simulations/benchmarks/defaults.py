"""What the defaults give on every data set at hand, beside 50 rounds at XGBoost's own eta.

``python -m simulations.benchmarks.defaults`` prints a JSON line a set: the test score with 50
rounds, eta 0.3 and no early stopping (``fixed``) and with the defaults, each averaged over the
seeds. The default is XGBoost on all rows, which equals PAX with one party; ``--parties 3`` trains
PAX.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from fedapp.data.datasets import dataset_names, source_frame
from fedapp.runs.baselines import run_and_load, run_baselines
from fedapp.settings import load_settings
from simulations.bench import tell

Row = dict[str, Any]
FIXED: Row = {"num-boost-round": 50, "eta": 0.3, "early-stopping-rounds": 0, "pax.bins": "share"}
SETS = [name for name in dataset_names() if not name.endswith("-test")]
ROWS, SEEDS = 20_000, (42, 1, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", nargs="+", default=SETS)
    parser.add_argument("--rows", type=int, default=ROWS, help="at most, drawn from a larger set")
    parser.add_argument("--parties", type=int, default=1)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    options = parser.parse_args()
    for data in options.data:
        line: Row = {"data": data, "parties": options.parties}
        with tempfile.TemporaryDirectory() as folder:
            table = drawn(data, options.rows, Path(folder)) | {"parties": options.parties}
            for name, how in (("fixed", FIXED), ("defaults", {})):
                all_scores = [scores({**table, **how, "seed": seed}) for seed in options.seeds]
                line[name] = {
                    key: round(float(np.mean([o[key] for o in all_scores])), 4)
                    for key in all_scores[0]
                }
        tell("defaults", ("fedapp", "xgboost"), **line)


def drawn(data: str, most: int, folder: Path) -> Row:
    """Draw at most ``most`` rows of a set; the settings of their table."""
    frame, roles, _ = source_frame(data)
    rows = np.random.default_rng(0).permutation(frame.num_rows)[:most]
    pq.write_table(frame.take(np.sort(rows)), folder / "rows.parquet")
    table = {"data": str(folder / "rows.parquet"), "label": roles.label}
    return {**table, "drop-columns": ",".join(roles.drop)}


def scores(settings: Row) -> Row:
    """The first two test scores, and the costs of a federated run."""
    if settings["parties"] == 1:
        test_scores, costs = run_baselines(load_settings(settings))["pooled"], {}
    else:
        summary = run_and_load(settings)[2]
        test_scores = summary["metrics"]["test"]
        costs = {name: summary[name] for name in ("trees", "exchanges")}
    return dict(list(test_scores.items())[:2]) | costs


if __name__ == "__main__":
    main()
