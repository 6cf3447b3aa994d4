"""How many training rows a passive party of a Federated Forest can group by label.

With ``labels=paillier`` a passive party sees no labels, but it sees the structure of the trees and
which rows are in which nodes. CART splits every impure node above ``max-depth`` in which some
column varies. So a node that is not split, although a column of this party varies in it, has a
single label. The attack joins the rows of such nodes, tree after tree.

Success is the AUC of an attacker who knows one label of each of the two largest groups, assigns it
to the group, and ranks all other rows between them; chance, 0.5, is without messages. A forest
whose nodes are left impure has no such groups, but is open to ``forest_nodes``.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
from sklearn.metrics import roc_auc_score

from fedapp.messages.federated_forest import PartitionRequest
from fedapp.runs.baselines import join_tables
from fedapp.trees.forest.cart import fewest_rows
from fedapp.trees.forest.levels import Splits
from fedapp.trees.model import LEAF
from simulations.attacks.frame import PLAIN, Attack, Outcome, Overrides, command
from simulations.attacks.heard import Heard, trained
from simulations.attacks.targets import CREDIT, PASSIVE, VERTICAL

Ints = npt.NDArray[np.int64]
Labels = npt.NDArray[np.float32]
NOWHERE = -1  # the leaf of a row that was split once more; its child is not sent
COMMON = {
    **VERTICAL,
    "strategy": "federated-forest",
    "federated-forest.trees": 30,
    "federated-forest.labels": "paillier",
    "federated-forest.key-bits": 512,
    "federated-forest.insecure-small-key": True,
}


class Passive:
    """A passive party that joins rows when the forest is grown."""

    def __init__(self) -> None:
        self.groups = np.empty(0, dtype=np.int64)  # of each training row

    def note(self, heard: Heard) -> None:
        """Read structure and nodes of rows before the rows are deleted."""
        request, store = heard.request, heard.site.store
        if not isinstance(request, PartitionRequest) or not request.last:
            return
        # A leaf counts if CART would have split it: above max-depth and with enough rows.
        n_train, forest = store.facts["n_train"], store.facts["forest"]
        rules = fewest_rows(forest["min_samples_split"], forest["min_samples_leaf"])
        splits = store.record(Splits, "splits")
        lefts = splits.spread(splits.lefts, np.asarray(store["n_nodes"]), LEAF)
        self.groups = np.arange(n_train)
        for number, tree in enumerate(lefts):
            leaves = np.array(store["nodes"][number, :n_train])
            leaves[np.isin(leaves, request.nodes[request.trees == number])] = NOWHERE
            drawn, values = store["counts"][number] > 0, np.asarray(store["values"][:n_train])
            for members in pure_nodes(tree, leaves, drawn, values, rules):
                self.groups = joined(self.groups, members)


def pure_nodes(
    lefts: Ints,
    leaves: npt.NDArray[np.int32],
    drawn: npt.NDArray[np.bool_],
    values: npt.NDArray[np.float32],
    fewest: int,
) -> Iterator[Ints]:
    """Yield the drawn rows of each leaf that would have been split were it not pure.

    Parameters
    ----------
    lefts : left child of each node above ``max-depth`` of a tree, ``LEAF`` at a leaf.
    leaves : shape (n_rows,): leaf of each row.
    values : shape (n_rows, n_columns): the passive party's columns.
    fewest : rows that a node needs to be split.
    """
    for leaf in np.flatnonzero(lefts == LEAF):
        members = np.flatnonzero((leaves == leaf) & drawn)
        filled = np.nan_to_num(values[members], nan=-np.inf)  # missing counts as a value
        if len(members) >= fewest and (filled != filled[:1]).any():
            yield members


def joined(groups: Ints, members: Ints) -> Ints:
    """Merge the groups of some rows."""
    merged = groups[members]
    return np.where(np.isin(groups, merged), merged.min(), groups)


def guessed(groups: Ints, labels: Labels) -> float:
    """AUC of the two largest groups; ``labels`` are 0 and 1."""
    scores = np.full(len(labels), 0.5)
    names, sizes = np.unique(groups, return_counts=True)
    for name in names[np.argsort(sizes)[-2:]]:
        members = groups == name
        scores[members] = labels[members][0]
    return float(roc_auc_score(labels, scores))


def attacked(overrides: Overrides) -> Outcome:
    passive = Passive()
    with trained({**COMMON, **overrides}, [PASSIVE], passive.note) as run:
        table, _, _ = join_tables(run.settings)
        auc = guessed(passive.groups, table.labels[table.split.train])
        return Outcome(auc, 0.5, run.score)


ATTACK = Attack(
    name="label_groups",
    holder="a passive party of a Federated Forest with labels=paillier, from nodes that stay whole",
    measure="AUC of guessed labels; chance: 0.5",
    data={
        "breast-cancer": {"data": "breast-cancer", "columns": "sizes:15,15"},
        "default-credit": {**CREDIT, "columns": "sizes:5,18"},
    },
    ways={
        PLAIN: {},
        "10 trees": {"federated-forest.trees": 10},
        "max-depth=3": {"federated-forest.max-depth": 3},
        "min-samples-leaf=10": {"federated-forest.min-samples-leaf": 10},
    },
    run=attacked,
)

if __name__ == "__main__":
    command(ATTACK)
