"""TimberStrike (arXiv:2506.07605): our attack on its authors' rows, beside their own figures.

Their public code (github.com/necst/TimberStrike) has the rows of the diabetes set as it was dealt
to three clients, and the accuracies of the paper's Figures 4 and 5.
"""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd

from fedapp.audit.listening import trained
from fedapp.audit.timberstrike import Target, target_of
from fedapp.errors import DataError
from fedapp.settings import load_settings
from simulations.attacks.horizontal import shares_by_values
from simulations.paper import Paper, Tables
from simulations.study import Row

ROUNDS, DEPTHS = 100, (3, 4, 5, 6, 7, 8)
CLIENTS, COMPROMISED = 3, 2  # the victim is client 0
ROWS = "data/diabetes/nc_3/data"
FIGURES = "paper_visualization/diabetes/csv/diabetes_no_top.csv"
# Our methods, and the systems that the authors attacked.
SYSTEMS: dict[str, tuple[Row, tuple[str, ...]]] = {
    "bagging": ({"strategy": "bagging"}, ("Flower XGBoost Bagging",)),
    "cyclic": ({"strategy": "cyclic"}, ("Flower XGBoost Cyclic",)),
    "fedxgbllr": ({"strategy": "fedxgbllr", "fedxgbllr.rounds": 1}, ("FedXGBLLR",)),
    "pax": ({"strategy": "pax"}, ("FedTree", "NVFlare")),
}
OUTPUT = Path("runs/papers/timberstrike")
NOTES = f"""\
Share of values, labels included, within .319 deviations of the true ones, rows matched. Theirs:
{FIGURES}, columns Accuracy
and Baseline Accuracy. 100 rounds, eta .3, lambda 1. The victim is client 0; of PAX, FedTree and
NVFlare, whose trees are of all rows, ours attacks all rows.
Bounds, values: what ours knows of each column from client 2, with whose values theirs fills in
what trees leave open. Theirs solves an integer problem for each tree, ours a linear one."""
STUDY = Paper(NOTES)


STUDY.table(
    "rows",
    "Accuracy in % of rebuilt values",
    "system; depth; theirs; their baseline:.1f; bounds:.1f; bounds, a guess:.1f; values:.1f; "
    "values, a guess:.1f",
    3,
)(list)


@STUDY.command
def main(code: str = "", output: Path = OUTPUT) -> Tables:
    """Attack every system at every depth, print accuracies beside the authors', and write them.

    ``--code`` is a checkout of github.com/necst/TimberStrike, whose rows and figures are read.
    """
    folder = Path(code)
    if not code or not (folder / ROWS).is_dir():
        rule = "must be a checkout of github.com/necst/TimberStrike, of which it reads"
        raise DataError(f"--code {code!r} {rule} {ROWS} and {FIGURES}")
    clients = [rows_of(folder / ROWS, client) for client in range(CLIENTS)]
    figures = pd.read_csv(folder / FIGURES).set_index(["System", "Depth"])
    yield (
        "rows",
        [
            {"system": system, "depth": depth, **attacked(clients, system, depth)}
            | {
                "theirs": " / ".join(
                    f"{figures.loc[(name, depth), 'Accuracy']:.1f}" for name in named
                )
            }
            | {"their baseline": float(figures.loc[(named[0], depth), "Baseline Accuracy"])}
            for system, (_, named) in SYSTEMS.items()
            for depth in DEPTHS
        ],
    )


def rows_of(folder: Path, client: int) -> pd.DataFrame:
    """A client's training rows, their label last."""
    values, labels = (np.load(folder / f"client_{client}/train/{name}_train.npy") for name in "xy")
    columns = {f"x{index}": column for index, column in enumerate(values.T)}
    return pd.DataFrame({**columns, "label": labels.ravel().astype(int)})


def attacked(clients: list[pd.DataFrame], system: str, depth: int) -> Row:
    """Accuracies of the attack on one system, and of guesses without trees, in percent."""
    method, _ = SYSTEMS[system]
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "rows.csv"
        dealt = [rows.assign(site=f"client-{index}") for index, rows in enumerate(clients)]
        pd.concat(dealt).to_csv(table, index=False)
        settings = load_settings(
            {"data": str(table), "label": "label", "partition": "column:site"}
            | {"objective": "binary:logistic", "test-fraction": 0.0, "valid-fraction": 0.0}
            | {"num-boost-round": ROUNDS, "eta": 0.3, "reg-lambda": 1.0, "max-depth": depth}
            | ({"fedxgbllr.max-depth": depth} if system == "fedxgbllr" else {})
            | method
        )
        with trained(settings) as run:
            target = target_of(run, has_hessians=True)
    target = knowing(target, clients[COMPROMISED])
    accuracies: Row = {}
    by_bounds = target.shares(settings.reg_lambda, np.random.default_rng(settings.seed))
    by_values = shares_by_values(target, settings.reg_lambda)
    for name, shares in (("bounds", by_bounds), ("values", by_values)):
        accuracies[name], accuracies[f"{name}, a guess"] = (100 * share.mean() for share in shares)
    return accuracies


def knowing(target: Target, rows: pd.DataFrame) -> Target:
    """The same target of an attacker who has these rows."""
    values = np.resize(rows.to_numpy(np.float64), target.truth.shape)
    return dataclasses.replace(target, known=values)
