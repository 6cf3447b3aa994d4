"""What a run of SecureBoost says before it trains."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context

from fedapp.runs.local import run_local
from fedapp.settings import Settings
from tests.transcript import summary_of

MakeSettings = Callable[..., Settings]
MakeSites = Callable[..., list[Context]]
WriteTable = Callable[..., Path]
N_TRAIN = 32  # a round of depth 4 tells 16 sums, half as many


def warnings_of(run: Settings, contexts: list[Context] | None = None) -> list[str]:
    found: list[str] = summary_of(run_local(run, contexts))["warnings"]
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
    assert "least-bin-rows at the passive parties merges bins" in told


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


def test_a_floor_does_not_silence_that(made: MakeSettings, write_table: WriteTable) -> None:
    (told,) = warnings_of(made(data=str(write_table(n_rows=N_TRAIN)), least_bin_rows=2))
    assert told.startswith("the active party may find the merged bins of most training rows")


def test_sums_of_each_class_count(made: MakeSettings, write_table: WriteTable) -> None:
    path = write_table(n_rows=N_TRAIN, y=[0, 1, 2, 1] * (N_TRAIN // 4))
    run = made(data=str(path), objective="multi:softprob", max_depth=3)
    (told,) = warnings_of(run)
    assert "up to 8 sums a class of each bin" in told


def test_whether_sites_merge_bins_is_theirs_to_know(
    made: MakeSettings, sites: MakeSites, write_table: WriteTable
) -> None:
    ids = [f"customer {number}" for number in range(N_TRAIN)]
    bank = {"name": "bank", "data": write_table("bank", N_TRAIN, id=ids), "id": "id"}
    table = write_table("shop", N_TRAIN, id=ids, a=None, b=None, y=None, c=range(N_TRAIN, 0, -1))
    shop = {"name": "shop", "data": table, "id": "id", "label": ""}
    run = made(label="", align="psi", allow_export=False)
    told = warnings_of(run, sites(bank, shop))
    assert "at the passive parties (which may have it) merges bins" in told[-1]
