"""What a passive party of a Federated Forest can tell of labels by rows that share tree nodes.

With ``labels=paillier`` it is told no label, but which rows are in which nodes, but for what others
split at ``max-depth``. Whether nodes are pure does not matter: rows of one label tend to stay
together. It is the attack of ``shared_nodes``, which says what success and chance are.
"""

from __future__ import annotations

import numpy as np

from fedapp.messages.federated_forest import PartitionRequest
from fedapp.trees.sides import Nodes
from simulations.attacks import label_groups
from simulations.attacks.frame import Attack, Outcome, Overrides, command
from simulations.attacks.heard import Heard, trained
from simulations.attacks.label_groups import COMMON
from simulations.attacks.shared_nodes import KNOWN, outcome
from simulations.attacks.targets import PASSIVE


class Passive:
    """A passive party that keeps where rows are when the forest is grown."""

    def __init__(self) -> None:
        self.nodes: list[Nodes] = []  # shape (n_trees, n_train)

    def note(self, heard: Heard) -> None:
        """Look before the rows are forgotten."""
        store = heard.site.store
        if isinstance(heard.request, PartitionRequest) and heard.request.last:
            self.nodes.append(np.array(store["nodes"][:, : store.facts["n_train"]]))


def attacked(overrides: Overrides) -> Outcome:
    """Guess labels by what the passive party has seen, and by its own columns."""
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
