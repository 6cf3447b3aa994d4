"""The study of forests over rows: every method on the same rows, and what its table shows."""

import json

import pytest

from simulations.papers import forests


@pytest.mark.slow
def test_every_method_has_a_score_on_every_set(tmp_path, monkeypatch, capsys):
    small = {"horizontal-forest.trees": 5, "horizontal-forest.max-depth": 3}
    small |= {"num-boost-round": 3, "fedavg-linear.rounds": 2}
    methods = {name: {**how, **small} for name, how in forests.METHODS.items()}
    monkeypatch.setattr(forests, "METHODS", methods)
    monkeypatch.setattr(forests, "FOREST", {**forests.FOREST, **small})
    forests.main(seeds=1, data=("breast-cancer", "diabetes"), output=tmp_path)
    tables = json.loads((tmp_path / "tables.json").read_text())
    names = [*methods, forests.POOLED, forests.ALONE]
    assert [row["method"] for row in tables["rows"]] == 2 * names
    by_set = {row["data"]: row["score"] for row in tables["rows"]}
    assert by_set == {"breast-cancer": "auc", "diabetes": "rmse"}
    assert all(row["value"] > 0.9 for row in tables["rows"] if row["score"] == "auc")
    assert "horizontal-forest, secure" in capsys.readouterr().out


def test_seeds_are_averaged():
    rows = [{"data": "a", "method": "m", "score": "auc", "value": v} for v in (0.5, 0.7)]
    (row,) = forests.summed_up(rows)
    assert (row["mean"], row["deviation"]) == (pytest.approx(0.6), pytest.approx(0.02**0.5))
