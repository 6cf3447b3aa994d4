"""The whole of a divided model, where all of its parts are on this machine.

That is so after a simulation only. Between sites nobody has more than one part.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np

from fedapp.errors import DataError
from fedapp.home import home
from fedapp.runs.predict import parts_of
from fedapp.site.store import read_part
from fedapp.trees.divided import PARTS, ActivePart, joint_names, whole_model
from fedapp.trees.forest.bagged import BaggedForest
from fedapp.trees.model import LEAF, Ensemble


def joined_model(run_dir: Path) -> Ensemble | BaggedForest | None:
    """The whole model of a run; None if it is not divided, or a part is elsewhere."""
    if (divided := parts_of(run_dir)) is None:
        return None
    active = _part(divided.model_id, divided.active)
    if not isinstance(active, ActivePart):
        return None
    parts = {name: _part(divided.model_id, name) for name in active.n_columns}
    if None in parts.values():
        return None
    numbers = {name: number for number, name in enumerate(parts)}
    owners = [
        np.array([numbers[name] for name in active.owners(tree)], np.int64)
        for tree in range(len(active.records))
    ]
    return whole_model(
        cast(Ensemble, active.model),  # or a forest
        active.records,
        owners,
        [(part.lookup, part.categories) for part in parts.values()],
        [len(part.columns) for part in parts.values()],
        joint_names({name: part.columns for name, part in parts.items()}),
    )


def gains_by_party(run_dir: Path) -> dict[str, float]:
    """Share of the total gain that the splits of each party have; {} if nobody here knows it."""
    divided = parts_of(run_dir)
    active = divided and _part(divided.model_id, divided.active)
    if not isinstance(active, ActivePart) or not isinstance(active.model, Ensemble):
        return {}
    gains = dict.fromkeys(active.n_columns, 0.0)
    for number, tree in enumerate(active.model.trees):
        names = np.array(active.owners(number))
        for name in gains:
            splits = (names == name) & (tree["left"] != LEAF)
            gains[name] += float(tree["gain"][splits].sum(dtype=np.float64))
    total = sum(gains.values())
    return {name: gain / total for name, gain in gains.items()} if total else {}


def _part(model_id: str, name: str) -> Any:
    """A party's part of a model; None if it is not here."""
    try:
        return read_part(home() / "sites" / name / model_id, *PARTS)
    except DataError:
        return None
