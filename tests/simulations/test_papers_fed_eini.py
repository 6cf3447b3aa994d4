"""The table and the figure of the Fed-EINI paper."""

import json
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from fedapp.errors import ConfigError
from fedapp.runs.local import run_local
from fedapp.runs.series import Series
from fedapp.settings import load_settings
from simulations import paper as every
from simulations.papers import fed_eini as paper

SMALL = {"secureboost.key-bits": 256, "max-bin": 8, "max-depth": 2}
SMALL |= {"federated-forest.max-depth": 2}


@pytest.fixture
def _short(monkeypatch):
    """Runs of a fraction of a second."""
    monkeypatch.setattr(
        paper, "CREDITS", dict.fromkeys(paper.CREDITS, ("breast-cancer", "sizes:5,25"))
    )
    monkeypatch.setattr(paper, "TRAINING", {**paper.TRAINING, **SMALL})
    monkeypatch.setattr(paper, "ENGINES", dict.fromkeys(paper.ENGINES, run_local))
    sizes = {"KEY_BITS": 256, "TREES": 3, "ROWS": (10, 30)}
    for name, value in sizes.items():
        monkeypatch.setattr(paper, name, value)


def test_what_comes_before_the_inference_is_left_out(tmp_path, monkeypatch):
    kinds = ["query.vertical_hello", "query.alignment_open", "evaluate.eini_step"]
    ledger = [
        {"step": step, "type": kind, "bytes": 10**step, "seconds": step + late}
        for step, kind in enumerate(kinds)
        for late in (0.0, 0.25)
    ]
    monkeypatch.setattr(Series, "run", lambda *_: {"entries": 7})
    monkeypatch.setattr(every, "read_run", lambda folder: SimpleNamespace(ledger=ledger))
    found = every.inferred(load_settings({"seed": 3}), run_local, tmp_path, "what")
    assert found.pop("folder") == str(tmp_path / "pax-3")
    costs = {"seconds": 0.25, "bytes": 200, "exchanges": 1}
    assert found == {**costs, "entries": 7, "batches": 0}


@pytest.mark.usefixtures("_short")
def test_a_difference_between_the_two_ways_is_seen(tmp_path):
    rng, runs = np.random.default_rng(0), []
    scores = rng.uniform(0.1, 0.9, 100)
    for name, last in (("a", scores[-1]), ("b", scores[-1] + 1e-6)):
        (tmp_path / name).mkdir()
        column = np.append(scores[:-1], last)
        parquet.write_table(pa.table({"p": column}), tmp_path / name / "predictions.parquet")
        runs.append({"credit": "Credit 1", "rows": 100, "folder": str(tmp_path / name)})
    found = paper.table_2("boosted", *runs)
    assert [row["rows"] for row in found] == [10, 20, 40, 80, 100]
    assert [row["difference"] > 1e-9 for row in found] == [False] * 4 + [True]
    assert found[0]["auc"][0] == found[0]["auc"][1]


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"engine": ("cloud",)}, "engine must be of local, simulation, got 'cloud'"),
        ({"key_bits": (512, 64)}, r"eini.key-bits must be >= 256, got 64"),
    ],
)
def test_what_cannot_be_run_is_refused_before_the_first_run(tmp_path, given, match):
    with pytest.raises(ConfigError, match=match):
        paper.main(output=tmp_path / "out", **{"key_bits": (512,), **given})
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("_short")
@pytest.mark.slow
def test_all_is_written_and_finished_runs_are_not_run_again(tmp_path, monkeypatch, capsys):
    output = tmp_path / "out"
    given = {"credit": ("Credit 1",), "key_bits": (256,), "rows": 40}
    paper.main(**given, output=output)
    first = json.loads((output / "tables.json").read_text())
    assert len(first["table_2"]) == 2 * len(paper.SHARES)
    assert {row["model"] for row in first["table_2"]} == {"boosted", "forest"}
    assert all(row["difference"] <= 1e-9 for row in first["table_2"])
    points = [(row["engine"], row["way"], row["rows"]) for row in first["figure_10"]]
    ways = ("at once", "tree by tree", 256)
    assert points == [
        *(("local", way, rows) for way in ways for rows in (10, 30)),
        *(("simulation", way, rows) for way in ways for rows in (10, 30)),
        *(("local", way, 40) for way in ways),
    ]
    at_once, slowly = (
        [row["exchanges"] for row in first["figure_10"] if row["way"] == way] for way in ways[:2]
    )
    assert all(more > fewer for more, fewer in zip(slowly, at_once, strict=True))
    encrypted = [row for row in first["figure_10"] if row["key_bits"]]
    # 64 bytes each, which pass the server
    assert all(row["bytes"] > 2 * 64 * row["rows"] * row["entries"] > 0 for row in encrypted)
    assert not list(output.glob("*.parquet"))
    # SecureBoost's trees are XGBoost's, so a column gains as much in both.
    assert sum(row["divided"] for row in first["figure_9"]) == pytest.approx(1)
    for row in first["figure_9"]:
        assert row["divided"] == pytest.approx(row["pooled"])
    # The parts of all models stay, of the predictions nothing.
    assert len(list((tmp_path / "home" / "sites" / "party-1").glob("*/"))) == 3

    def fail(*_):
        raise AssertionError("must not run again")

    monkeypatch.setattr(every, "run_and_keep", fail)
    capsys.readouterr()
    paper.main(**given, output=output)
    shown = capsys.readouterr().out
    assert f"{paper.PRINTED['Credit 1', 10][0]:.6f}" in shown
    assert ": done" not in shown
    again = json.loads((output / "tables.json").read_text())
    assert again["figure_10"] == first["figure_10"]
