"""What the defaults give on every data set at hand, beside 50 rounds at XGBoost's own eta.

``python -m simulations.benchmarks.defaults`` prints a JSON line a set: the test score with 50
rounds, eta 0.3 and no early stopping (``fixed``) and with the defaults, each the mean over the
seeds. By default of XGBoost on all rows, which is what PAX with one party trains;
``--parties 3`` trains PAX.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from fedapp.config import load_settings
from fedapp.data.datasets import dataset_names, source_frame
from simulations.baselines import run_baselines
from simulations.bench import tell
from simulations.scored import trained

Row = dict[str, Any]
FIXED: Row = {"num-boost-round": 50, "eta": 0.3, "early-stopping-rounds": 0, "pax.bins": "share"}
SETS = [name for name in dataset_names() if not name.endswith("-test")]
ROWS, SEEDS = 20_000, (42, 1, 2)


def main() -> None:
    """Print the lines."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", nargs="+", default=SETS)
    parser.add_argument("--rows", type=int, default=ROWS, help="at most, drawn from a larger set")
    parser.add_argument("--parties", type=int, default=1)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    given = parser.parse_args()
    for data in given.data:
        line: Row = {"data": data, "parties": given.parties}
        with tempfile.TemporaryDirectory() as folder:
            table = drawn(data, given.rows, Path(folder)) | {"parties": given.parties}
            for name, how in (("fixed", FIXED), ("defaults", {})):
                found = [scores({**table, **how, "seed": seed}) for seed in given.seeds]
                line[name] = {
                    key: round(float(np.mean([o[key] for o in found])), 4) for key in found[0]
                }
        tell("defaults", ("fedapp", "xgboost"), **line)


def drawn(data: str, most: int, folder: Path) -> Row:
    """Settings of a table of at most so many rows of a set."""
    frame, roles, _ = source_frame(data)
    rows = np.random.default_rng(0).permutation(frame.num_rows)[:most]
    pq.write_table(frame.take(np.sort(rows)), folder / "rows.parquet")
    table = {"data": str(folder / "rows.parquet"), "label": roles.label}
    return {**table, "drop-columns": ",".join(roles.drop)}


def scores(settings: Row) -> Row:
    """The first two scores of the test rows, and of a federation what its run takes."""
    if settings["parties"] == 1:
        found, costs = run_baselines(load_settings(settings))["pooled"], {}
    else:
        summary = trained(settings)[2]
        found = summary["metrics"]["test"]
        costs = {name: summary[name] for name in ("trees", "exchanges")}
    return dict(list(found.items())[:2]) | costs


if __name__ == "__main__":
    main()
