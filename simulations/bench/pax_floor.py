"""What merged bins cost PAX: the test AUC where bins have so many of a party's rows, or none.

``python -m simulations.bench.pax_floor`` prints a JSON line a data set, aggregation and floor.
"""

from __future__ import annotations

import argparse
import json
import tempfile

from fedapp.config import load_settings
from simulations.local import run_local

SETS = ("breast-cancer", "ionosphere", "spambase", "higgs-11k", "default-credit")
FLOORS = (0, 5, 20)


def main() -> None:
    """Print the lines."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", nargs="+", default=SETS, help="of two classes")
    parser.add_argument("--aggregation", nargs="+", default=("plain", "secure"))
    parser.add_argument("--parties", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=50)
    given = parser.parse_args()
    for data in given.data:
        for aggregation in given.aggregation:
            for least in FLOORS:
                auc = _auc(data, aggregation, least, given.parties, given.rounds)
                line = {"bench": "pax_floor", "data": data, "aggregation": aggregation}
                line |= {"parties": given.parties, "rounds": given.rounds}
                print(json.dumps({**line, "least_bin_rows": least, "auc": auc}), flush=True)


def _auc(data: str, aggregation: str, least: int, parties: int, rounds: int) -> float:
    """Of the test rows."""
    with tempfile.TemporaryDirectory() as folder:
        settings = load_settings(
            {
                "data": data,
                "objective": "binary:logistic",
                "parties": parties,
                "num-boost-round": rounds,
                "preset": "xgboost",
                "least-bin-rows": least,
                "pax.aggregation": aggregation,
                "run-dir": f"{folder}/run",
            }
        )
        summary = run_local(settings).summary
    return float(summary["metrics"]["test"]["auc"])


if __name__ == "__main__":
    main()
