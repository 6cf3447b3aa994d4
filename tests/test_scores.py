"""The scores of finished runs, as the summary has them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fedapp.config import Settings
from simulations.engines import run_local
from tests.transcript import summary_of

MakeSettings = Callable[..., Settings]
WINE = {"data": "wine", "objective": "multi:softprob", "partition": "iid", "parties": 2}


@pytest.mark.parametrize("strategy", ["pax", "bagging", "fedavg-linear"])
def test_the_summary_names_the_classes_of_the_confusion_matrix(
    settings: MakeSettings, write_table: Callable[..., Path], strategy: str
) -> None:
    names = ["no", "perhaps", "yes"]
    data = write_table("answers", 60, y=[names[place % 3] for place in range(60)])
    given = WINE | {"data": str(data), "label": "y", "fedavg_linear__rounds": 1}
    summary = summary_of(run_local(settings(strategy=strategy, **given)))
    assert summary["classes"] == names
    assert len(summary["curves"]["confusion"]) == 3
