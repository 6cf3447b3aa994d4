"""All attacks, one after the other, and one table: ``python -m simulations.attacks --quick``."""

from __future__ import annotations

from simulations.attacks import (
    eini_paths,
    forest_nodes,
    label_groups,
    reverse_sums,
    shared_nodes,
    solved_bins,
    timberstrike,
)
from simulations.attacks.frame import command

MODULES = (
    shared_nodes,
    reverse_sums,
    solved_bins,
    eini_paths,
    label_groups,
    forest_nodes,
    timberstrike,
)

if __name__ == "__main__":
    command(*(module.ATTACK for module in MODULES))
