"""What a passive party of a Federated Forest learns about labels from rows that share tree nodes.

With ``labels=paillier`` it sees no labels, but which rows are in which nodes, except where other
parties split at ``max-depth``. Nodes need not be pure: rows with the same label tend to stay
together. The attack is that of ``shared_nodes``, which defines success and chance.
"""

from __future__ import annotations

import numpy as np

from fedapp.messages.federated_forest import PartitionRequest
from fedapp.trees.predict import Nodes
from simulations.attacks import label_groups
from simulations.attacks.frame import Attack, Outcome, Overrides, command
from simulations.attacks.heard import Heard, trained
from simulations.attacks.label_groups import COMMON
from simulations.attacks.shared_nodes import KNOWN, outcome
from simulations.attacks.targets import PASSIVE


class Passive:
    """A passive party that records the nodes of rows when the forest is grown."""

    def __init__(self) -> None:
        self.nodes: list[Nodes] = []  # shape (n_trees, n_train)

    def note(self, heard: Heard) -> None:
        store = heard.site.store  # after this message, the rows are deleted
        if isinstance(heard.request, PartitionRequest) and heard.request.last:
            self.nodes.append(np.array(store["nodes"][:, : store.facts["n_train"]]))


def attacked(overrides: Overrides) -> Outcome:
    passive = Passive()
    with trained({**COMMON, **overrides}, [PASSIVE], passive.note) as run:
        return outcome(passive.nodes, run)


ATTACK = Attack(
    name="forest_nodes",
    holder="a passive party of a Federated Forest with labels=paillier, from nodes of rows and "
    f"{KNOWN} known labels",
    measure="AUC of guessed labels; chance: of its own columns",
    data=label_groups.ATTACK.data,
    ways=label_groups.ATTACK.ways,
    run=attacked,
)

if __name__ == "__main__":
    command(ATTACK)
