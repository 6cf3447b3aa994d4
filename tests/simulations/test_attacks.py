"""Attacks rebuild what they say, from transcripts of honest runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fedapp.errors import ConfigError
from fedapp.settings import Settings
from simulations.attacks.horizontal import attack_masked_sums, attack_plain_sums

MakeSettings = Callable[..., Settings]
WriteTable = Callable[..., Path]
SECURE = {"pax__aggregation": "secure"}
SMALL = {"label": "y", "parties": 2, "num_boost_round": 10, "max_depth": 6}


def test_rows_are_rebuilt_from_honest_sums_and_none_that_is_nobodys(
    settings: MakeSettings, write_table: WriteTable
) -> None:
    data = str(write_table(n_rows=100))
    own, pooled = attack_plain_sums(settings(data=data, max_bin=256, **SMALL))
    assert own["rows"] == pooled["rows"] == 72
    assert own["rebuilt"] > 36
    assert own["wrong"] == pooled["wrong"] == 0
    masked = attack_masked_sums(
        settings(data=data, max_bin=256, **{**SMALL, **SECURE, "num_boost_round": 3})
    )
    assert masked["rows"] == own["rows"]
    assert masked["wrong"] == 0
    # A sum of both parties' rows gives away less than the sums of each.
    assert masked["rebuilt"] < own["rebuilt"]
    coarse, _ = attack_plain_sums(settings(data=data, max_bin=8, **SMALL))
    assert coarse["rebuilt"] < own["rebuilt"]
    assert coarse["wrong"] == 0


@pytest.mark.parametrize("aggregation", ["plain", "secure"])
def test_no_row_is_rebuilt_where_bins_have_five_rows(
    settings: MakeSettings, write_table: WriteTable, aggregation: str
) -> None:
    data = str(write_table(n_rows=60))
    few = {**SMALL, "num_boost_round": 3}
    run = settings(data=data, pax__aggregation=aggregation, least_bin_rows=5, **few)
    found = attack_masked_sums(run) if aggregation == "secure" else next(attack_plain_sums(run))
    assert found == {**found, "rows": 43, "rebuilt": 0, "wrong": 0}


def test_runs_that_the_attack_is_not_for_are_refused(settings: MakeSettings) -> None:
    for other in ({"objective": "multi:softprob"}, {"colsample_bytree": 0.5}):
        with pytest.raises(ConfigError, match="the attacked run must have two classes"):
            next(attack_plain_sums(settings(**other)))
