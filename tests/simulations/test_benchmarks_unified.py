"""UniFed's vertical scenarios."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest

from fedapp.errors import ConfigError, DataError
from simulations.papers import unified


@pytest.fixture
def scenario(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> unified.Scenario:
    """Two small tables of the same 60 rows, in different orders."""
    monkeypatch.setenv("FEDAPP_DATA", str(tmp_path))
    rng, ids = np.random.default_rng(0), np.arange(60)
    values = rng.normal(size=(60, 4))
    labels = (values[:, 0] + values[:, 2] > 0).astype(int)
    own = {"x0": values[:, 0], "x1": values[:, 1]}
    pa.csv.write_csv(pa.table({"id": ids, "y": labels, **own}), tmp_path / "guest.csv")
    others = {"x0": values[::-1, 2], "x1": values[::-1, 3]}
    pa.csv.write_csv(pa.table({"id": ids[::-1], **others}), tmp_path / "host.csv")
    return unified.Scenario("small", unified.BINARY, 0.9, files=("guest.csv", "host.csv"))


def test_the_settings_are_unifeds(scenario: unified.Scenario) -> None:
    settings = unified.settings_of(scenario, unified.TREES, unified.KEY_BITS)
    grown = settings.num_boost_round, settings.max_depth, settings.max_bin, settings.eta
    assert grown == (64, 6, 64, 0.05)
    assert (settings.parties, settings.test_fraction, settings.valid_fraction) == (2, 0.0, 0.0)
    assert settings.sections["secureboost"]["insecure-small-key"] is False


def test_the_reported_scores_are_of_training_rows_but_for_one_set() -> None:
    assert {one.name for one in unified.SCENARIOS if one.subset == "test"} == {
        "give_credit_vertical"
    }
    assert {one.metric for one in unified.SCENARIOS} == {"auc", "mse"}


def test_training_rows_score_higher_than_rows_held_back(scenario: unified.Scenario) -> None:
    found = unified.pooled_scores(unified.settings_of(scenario, 4, 2048))
    assert set(found) == {"train", "held_out"}
    assert 0.5 < found["held_out"] < found["train"]


def test_the_check_of_rows_sets_both_beside_what_is_reported(
    scenario: unified.Scenario, capsys: pytest.CaptureFixture[str]
) -> None:
    (row,) = unified.row_check([scenario], 2)
    assert row["reported"] == scenario.reported
    assert row["held_out"] < row["train"]
    shown = capsys.readouterr().out
    assert f"{row['train']:.4g}" in shown
    assert f"{row['held_out']:.4g}" in shown


@pytest.mark.slow
def test_a_scenario_scores_what_xgboost_scores_on_the_joined_table(
    scenario: unified.Scenario, tmp_path: Path
) -> None:
    row = unified.run_scenario(scenario, 2, 256, tmp_path / "out")
    assert row["score"] == pytest.approx(row["pooled"], abs=1e-9)
    assert row["pooled"] > row["held_out"]
    assert (row["rows"], row["trees"], row["subset"]) == (60, 2, "train")
    assert row["bytes"] > 0


def test_a_missing_file_and_an_unknown_scenario_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDAPP_DATA", str(tmp_path / "nothing"))
    rule = r"^'breast-hetero-guest.csv' must be in \$FEDAPP_DATA, got no such file"
    with pytest.raises(DataError, match=rule):
        unified.SCENARIOS[0].data()
    with pytest.raises(ConfigError, match=r"^scenarios must be of breast_vertical, "):
        unified.chosen("dvisits_vertical")


def test_scenarios_are_chosen_by_name() -> None:
    names = "student_vertical, motor_vertical"
    assert [one.name for one in unified.chosen(names)] == ["student_vertical", "motor_vertical"]
    assert unified.chosen("") == list(unified.SCENARIOS)
