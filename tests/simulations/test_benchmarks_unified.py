"""UniFed's vertical scenarios."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest

from fedapp.errors import ConfigError, DataError
from simulations.papers import unified


@pytest.fixture
def scenario(tmp_path, monkeypatch):
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


def test_the_settings_are_unifeds(scenario):
    settings = unified.settings_of(scenario)
    grown = settings.num_boost_round, settings.max_depth, settings.max_bin, settings.eta
    assert grown == (64, 6, 64, 0.05)
    assert (settings.parties, settings.test_fraction, settings.valid_fraction) == (2, 0.0, 0.0)
    assert settings.sections["secureboost"]["insecure-small-key"] is False


def test_the_reported_scores_are_of_training_rows_but_for_one_set():
    assert {one.name for one in unified.SCENARIOS.values() if one.subset == "test"} == {
        "give_credit_vertical"
    }
    assert {one.metric for one in unified.SCENARIOS.values()} == {"auc", "mse"}


def test_training_rows_score_higher_than_rows_held_back(scenario):
    found = unified.pooled_scores(unified.settings_of(scenario))
    assert set(found) == {"train", "held_out"}
    assert 0.5 < found["held_out"] < found["train"]


@pytest.mark.slow
@pytest.mark.parametrize("rows_only", [False, True])
def test_a_scenario_scores_what_xgboost_scores_on_the_joined_table(
    scenario, tmp_path, monkeypatch, rows_only
):
    monkeypatch.setattr(unified, "TREES", 2)
    monkeypatch.setattr(unified, "KEY_BITS", 256)
    small = {"secureboost.insecure-small-key": True}
    monkeypatch.setattr(unified, "COMMON", {**unified.COMMON, **small})
    monkeypatch.setattr(unified, "SCENARIOS", {"small": scenario})
    unified.main(("small",), rows_only=rows_only, output=tmp_path / "out")
    (row,) = json.loads((tmp_path / "out/tables.json").read_text())["rows"]
    assert row["pooled"] == row["train"] > row["held_out"]
    assert (row["reported"], row["subset"]) == (scenario.reported, "train")
    assert ("score" in row) != rows_only
    if not rows_only:
        assert row["score"] == pytest.approx(row["pooled"], abs=1e-9)
        assert (row["rows"], row["trees"]) == (60, 2)
        assert row["bytes"] > 0


def test_a_missing_file_and_an_unknown_scenario_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDAPP_DATA", str(tmp_path / "nothing"))
    rule = r"^'breast-hetero-guest.csv' must be in \$FEDAPP_DATA, got no such file"
    with pytest.raises(DataError, match=rule):
        unified.SCENARIOS["breast_vertical"].data()
    with pytest.raises(ConfigError, match=r"^scenarios must be of breast_vertical, "):
        unified.main(("dvisits_vertical",))
