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
    if (active := _active_part(run_dir)) is None:
        return None
    parts = {name: _part(run_dir, name) for name in active.n_columns}
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
    active = _active_part(run_dir)
    if active is None or not isinstance(active.model, Ensemble):
        return {}
    gains = dict.fromkeys(active.n_columns, 0.0)
    for number, tree in enumerate(active.model.trees):
        names = np.array(active.owners(number))
        for name in gains:
            splits = (names == name) & (tree["left"] != LEAF)
            gains[name] += float(tree["gain"][splits].sum(dtype=np.float64))
    total = sum(gains.values())
    return {name: gain / total for name, gain in gains.items()} if total else {}


def _active_part(run_dir: Path) -> ActivePart | None:
    divided = parts_of(run_dir)
    part = _part(run_dir, divided.active) if divided else None
    return part if isinstance(part, ActivePart) else None


def _part(run_dir: Path, name: str) -> Any:
    """A party's part of a run's model; None if it is not here."""
    divided = parts_of(run_dir)
    assert divided is not None
    try:
        return read_part(home() / "sites" / name / divided.model_id, *PARTS)
    except DataError:
        return None
