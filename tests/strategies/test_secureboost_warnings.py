"""What a run of SecureBoost says before it trains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedapp.runs.local import run_local
from fedapp.settings import Settings
from tests.transcript import summary_of

MakeSettings = Callable[..., Settings]
WriteTable = Callable[..., Path]
N_TRAIN = 32  # a round of depth 4 tells 16 sums, half as many


def warnings_of(run: Settings) -> list[str]:
    found: list[str] = summary_of(run_local(run))["warnings"]
    return found


@pytest.fixture
def made(vertical: MakeSettings) -> MakeSettings:
    """``vertical`` of one round, whose rows all train."""

    def make(**more: Any) -> Settings:
        given = {"test_fraction": 0.0, "valid_fraction": 0.0, "num_boost_round": 1, "label": "y"}
        return vertical(**{**given, "max_depth": 4, **more})

    return make


def test_a_run_that_tells_half_as_many_sums_as_rows_says_so(
    made: MakeSettings, write_table: WriteTable
) -> None:
    (told,) = warnings_of(made(data=str(write_table(n_rows=N_TRAIN))))
    assert told.startswith("the active party may find the bin of nearly every training row")
    assert "up to 16 sums of each bin, and half as many as the 32 rows are enough" in told


@pytest.mark.parametrize(
    "more",
    [
        {"max_depth": 3},
        {"n_rows": N_TRAIN + 1},
        {"secureboost__first_trees": 1},
    ],
)
def test_a_run_that_tells_fewer_sums_says_nothing(
    made: MakeSettings, write_table: WriteTable, more: dict[str, Any]
) -> None:
    path = write_table(n_rows=more.pop("n_rows", N_TRAIN))
    assert warnings_of(made(data=str(path), **more)) == []


def test_sums_of_each_class_count(made: MakeSettings, write_table: WriteTable) -> None:
    path = write_table(n_rows=N_TRAIN, y=[0, 1, 2, 1] * (N_TRAIN // 4))
    run = made(data=str(path), objective="multi:softprob", max_depth=3)
    (told,) = warnings_of(run)
    assert "up to 8 sums a class of each bin" in told
