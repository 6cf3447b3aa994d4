"""How many training rows a passive party of a Federated Forest can group by label, unread.

With ``labels=paillier`` a passive party is told no label, but the structure of the trees and which
rows are where. CART splits a node above ``max-depth`` that is impure wherever some column differs
in it, so one that stays whole, though a column of the party's own differs in it, has one label.
Rows of such nodes are joined, tree after tree. ``python -m simulations.bench.label_groups`` prints
a JSON line for so many trees: the share of rows in the two largest groups, and the share of rows
whose group has one label. The forest is grown in one place; the parties' is the same.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from fedapp.config import Settings, load_settings
from fedapp.trees.forest.cart import fewest_rows
from fedapp.trees.forest.model import Branches
from fedapp.trees.model import LEAF
from simulations.baselines import join_tables, pooled_forest
from strategies.federated_forest import FederatedForest, FederatedForestSettings

DATA, COLUMNS = "breast-cancer", "sizes:15,15"
TREES, SHOWN = 100, (1, 3, 10, 30, 100)

Ints = npt.NDArray[np.int64]


def main() -> None:
    """Print a JSON line for each number of trees."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", default=DATA)
    parser.add_argument("--columns", default=COLUMNS, help="of the active party first")
    parser.add_argument("--max-depth", type=int, default=10)
    parser.add_argument("--min-samples-leaf", type=int, default=1)
    given = parser.parse_args()
    settings = load_settings(
        {
            "strategy": "federated-forest",
            "data": given.data,
            "objective": "binary:logistic",
            "columns": given.columns,
            "parties": 2,
            "align": "ordered",
            "federated-forest.trees": TREES,
            "federated-forest.max-depth": given.max_depth,
            "federated-forest.min-samples-leaf": given.min_samples_leaf,
        }
    )
    for line in measured(settings):
        print(json.dumps({"bench": "label_groups", **vars(given), **line}))


def measured(settings: Settings) -> Iterator[dict[str, Any]]:
    """What is known of the rows after so many trees."""
    own = FederatedForest.own_settings(settings)
    table, _, active_columns = join_tables(settings)
    train = table.split.train
    values, labels = table.values[train], table.labels[train]
    names = [str(column) for column in range(values.shape[1])]
    forest, rows, leaves = pooled_forest(settings, names, values, labels, table.weights[train])
    passive = np.delete(values, np.arange(values.shape[1])[active_columns], axis=1)
    groups, n_nodes = np.arange(len(labels)), 0
    for number, (tree, inside) in enumerate(zip(forest.trees, leaves, strict=True), start=1):
        drawn = rows.counts[number - 1] > 0
        for members in pure_nodes(tree, inside, drawn, passive, own):
            groups, n_nodes = joined(groups, members), n_nodes + 1
        if number in SHOWN:
            yield {"trees": number, "nodes": n_nodes, **described(groups, labels)}


def pure_nodes(
    tree: Branches,
    leaves: npt.NDArray[np.int32],
    drawn: npt.NDArray[np.bool_],
    values: npt.NDArray[np.float32],
    own: FederatedForestSettings,
) -> Iterator[Ints]:
    """Drawn rows of each leaf that would have been split, were it not pure.

    Parameters
    ----------
    leaves : shape (n_rows,): leaf of each row.
    drawn : which rows the tree draws.
    values : float32, shape (n_rows, n_columns): the passive party's columns.
    """
    depths = depths_of(tree)
    fewest = fewest_rows(own.min_samples_split, own.min_samples_leaf)
    for leaf in np.flatnonzero((tree["left"] == LEAF) & (depths < own.max_depth)):
        members = np.flatnonzero((leaves == leaf) & drawn)
        known = np.nan_to_num(values[members], nan=-np.inf)  # missing is a value of its own
        if len(members) >= fewest and (known != known[:1]).any():
            yield members


def depths_of(tree: Branches) -> Ints:
    """Depth of each node; children stand behind their parents."""
    depths = np.zeros(len(tree), dtype=np.int64)
    for node in np.flatnonzero(tree["left"] != LEAF):
        depths[tree["left"][node] : tree["left"][node] + 2] = depths[node] + 1
    return depths


def joined(groups: Ints, members: Ints) -> Ints:
    """Groups with those of some rows made one."""
    found = groups[members]
    return np.where(np.isin(groups, found), found.min(), groups)


def described(groups: Ints, labels: npt.NDArray[np.float32]) -> dict[str, float]:
    """How large the groups are, and whether they have one label each."""
    _, numbers, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    lows, highs = np.full(len(sizes), np.inf), np.full(len(sizes), -np.inf)
    np.minimum.at(lows, numbers, labels)
    np.maximum.at(highs, numbers, labels)
    two = np.sort(sizes)[-2:].sum()
    return {
        "rows": len(labels),
        "in_two_groups": round(float(two / len(labels)), 4),
        "in_groups_of_one_label": float((lows == highs)[numbers].mean()),
    }


if __name__ == "__main__":
    main()
