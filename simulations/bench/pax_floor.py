"""What merged bins cost PAX: the test AUC where bins have so many of a party's rows, or none.

``python -m simulations.bench.pax_floor`` prints a JSON line a data set, aggregation and floor.
"""

from __future__ import annotations

import argparse

from simulations.bench import tell
from simulations.scored import trained

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
                settings = {
                    "data": data,
                    "objective": "binary:logistic",
                    "parties": given.parties,
                    "num-boost-round": given.rounds,
                    "preset": "xgboost",
                    "least-bin-rows": least,
                    "pax.aggregation": aggregation,
                }
                auc = trained(settings)[2]["metrics"]["test"]["auc"]
                line = {"data": data, "aggregation": aggregation, "parties": given.parties}
                line |= {"rounds": given.rounds, "least_bin_rows": least, "auc": auc}
                tell("pax_floor", ("fedapp", "numpy"), **line)


if __name__ == "__main__":
    main()
