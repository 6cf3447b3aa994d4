"""Random tables and settings grow XGBoost's trees: node for node, and every bit of the gains."""

import numpy as np
import pytest

from fedapp.records.document import load
from fedapp.runs.baselines import baseline_rows, train_boosted
from fedapp.runs.local import run_local
from fedapp.trees.model import Ensemble
from fedapp.trees.sets import NO_SET
from tests.random_tables import differences, random_case, seeds
from tests.reference import compare_trees, xgboost_trees
from tests.tables import write_rows

DEFAULT = (*range(4), 150, 151, 152, 210)


@pytest.mark.parametrize("seed", seeds(240, DEFAULT))
def test_pax_with_one_party_grows_xgboosts_trees(settings, tmp_path, seed):
    run = settings(**random_case(tmp_path / "random.csv", seed, "pax"))
    assert differences(run, run_local(run)) == []


@pytest.mark.parametrize("seed", seeds(240, DEFAULT))
def test_secureboost_grows_xgboosts_trees(vertical, tmp_path, seed):
    run = vertical(**random_case(tmp_path / "random.csv", 1000 + seed, "secureboost"))
    assert differences(run, run_local(run)) == []


def test_a_leaf_without_penalty_is_split_as_by_xgboost(settings, tmp_path):
    values = [
        3,
        4,
        6,
        7,
        0,
        1,
        6,
        7,
        1,
        2,
        6,
        3,
        2,
        6,
        2,
        3,
        5,
        4,
        0,
        0,
        6,
        6,
        6,
        4,
        6,
        2,
        3,
        6,
        0,
        2,
    ]
    path = write_rows(tmp_path / "rows.csv", {"a": values, "y": [int(a > 4) for a in values]})
    given = {"lambda": 0.0, "min-child-weight": 0.0, "num-boost-round": 1, "max-depth": 2}
    held = {"test-fraction": 0.0, "valid-fraction": 0.0}
    run = settings(data=str(path), label="y", parties=1, **given, **held)
    folder = run_local(run)
    booster = train_boosted(run, baseline_rows(run)[0]).booster
    assert len(xgboost_trees(booster)[0]["left_children"]) == 5
    assert compare_trees(load(folder.path / "model.json", Ensemble), booster).differing == 0


@pytest.mark.by_default("pax")
@pytest.mark.parametrize("strategy", ["pax", "secureboost"])
def test_categories_that_no_training_row_has_go_where_xgboost_sends_them(
    vertical, tmp_path, strategy
):
    rng = np.random.default_rng(2)
    kinds, x = rng.integers(0, 120, 300), rng.normal(size=300).round(1)
    is_missing = rng.random(300) < 0.2
    signal = np.where(is_missing, -3, kinds % 3) + x + rng.normal(0, 0.5, 300)
    names = ["" if gone else f"k{kind:03}" for kind, gone in zip(kinds, is_missing, strict=True)]
    columns = {"kind": names, "x": x, "z": rng.normal(size=300).round(2)}
    path = write_rows(tmp_path / "kinds.csv", {**columns, "y": (signal > 1).astype(int)})
    parties = {"pax": 1, "secureboost": 2}[strategy]
    given = {"data": str(path), "label": "y", "parties": parties, "columns": "sizes:1,2"}
    run = vertical(strategy=strategy, **given, **{"num-boost-round": 3, "min-child-weight": 0.1})
    folder, rows = run_local(run), baseline_rows(run)[0]
    model = load(folder.path / "model.json", Ensemble)
    codes = [rows.values[subset, 0] for subset in (rows.split.train, rows.split.test)]
    assert len(np.setdiff1d(codes[1][codes[1] >= 0], codes[0])) > 3
    assert any(((t["set"] != NO_SET) & ~t["default_left"]).any() for t in model.trees)
    assert differences(run, folder) == []
