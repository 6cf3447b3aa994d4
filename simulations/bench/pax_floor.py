"""What merged bins cost PAX: the test AUC where bins have so many of a party's rows, or none.

``python -m simulations.bench.pax_floor`` prints a JSON line a data set, aggregation and floor.
"""

from __future__ import annotations

import argparse

from fedapp.runs.baselines import run_and_load
from simulations.bench import tell

SETS = ("breast-cancer", "ionosphere", "spambase", "higgs-11k", "default-credit")
FLOORS = (0, 5, 20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", nargs="+", default=SETS, help="of two classes")
    parser.add_argument("--aggregation", nargs="+", default=("plain", "secure"))
    parser.add_argument("--parties", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=50)
    options = parser.parse_args()
    for data in options.data:
        for aggregation in options.aggregation:
            for min_rows in FLOORS:
                settings = {
                    "data": data,
                    "objective": "binary:logistic",
                    "parties": options.parties,
                    "num-boost-round": options.rounds,
                    "preset": "xgboost",
                    "least-bin-rows": min_rows,
                    "pax.aggregation": aggregation,
                }
                auc = run_and_load(settings)[2]["metrics"]["test"]["auc"]
                line = {"data": data, "aggregation": aggregation, "parties": options.parties}
                line |= {"rounds": options.rounds, "least_bin_rows": min_rows, "auc": auc}
                tell("pax_floor", ("fedapp", "numpy"), **line)


if __name__ == "__main__":
    main()
