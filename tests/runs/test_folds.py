"""Cross-validation: each row is held back once, whoever has it."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as drawing
from hypothesis import strategies as st
from typer.testing import CliRunner

import fedapp
from fedapp.commands import cli
from fedapp.data.partition import Holdout
from fedapp.errors import ConfigError
from fedapp.runs.compare import compare
from fedapp.runs.local import run_local
from fedapp.settings import load_settings
from fedapp.site.store import Store

SHORT = {"num_boost_round": 2, "max_depth": 2, "max_bin": 16}
pytestmark = pytest.mark.usefixtures("own_folder")


@given(st.integers(2, 300), st.integers(2, 20), st.floats(0, 0.9), st.integers(0, 2**32))
@drawing(max_examples=50, deadline=None)
def test_each_row_tests_in_one_fold(n_rows, folds, valid, seed):
    folds = min(folds, n_rows)
    splits = [Holdout(0.2, valid, seed, fold, folds).split(n_rows) for fold in range(1, folds + 1)]
    assert sorted(np.concatenate([split.test for split in splits])) == list(range(n_rows))
    assert np.ptp([len(split.test) for split in splits]) <= 1
    for split in splits:
        rows = np.concatenate([split.train, split.valid, split.test])
        assert sorted(rows) == list(range(n_rows))
        assert len(split.train)


def test_without_folds_the_fraction_decides():
    split = Holdout(0.25, 0.0, 3).split(40)
    assert (len(split.test), len(split.train)) == (10, 30)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"folds": 1}, r"^folds must be 0 \(none\) or >= 2, got 1$"),
        (
            {"folds": 3},
            r"^fold must be in .*, got 0; fedapp compare --folds runs all of them$",
        ),
        ({"folds": 3, "fold": 4}, r"^fold must be in \[1, 3\] with folds=3, got 4"),
        ({"fold": 1}, r"^fold must be 0 without folds, got 1"),
        (
            {"folds": 3, "fold": 1, "test-fraction": 0.5},
            r"^test-fraction must be omitted with folds, of which one is held back, got 0.5$",
        ),
    ],
)
def test_a_fold_is_one_of_several(given, match):
    with pytest.raises(ConfigError, match=match):
        load_settings(given)


def test_more_folds_than_rows_are_refused():
    with pytest.raises(ConfigError, match=r"^folds must be at most the 3 rows of a table, got 4$"):
        Holdout(0.2, 0.0, 0, 1, 4).split(3)


@pytest.fixture
def test_rows(monkeypatch):
    """What the parties keep in column c of their test rows, by party."""
    found, seen = dict[str, list[float]](), dict[int, Any]()
    written = Store.write

    def note(store, name, codec, value):
        if name == "values" and "test" in value and id(value["test"]) not in seen:
            seen[id(value["test"])] = value["test"]
            found.setdefault(store.folder.parent.name, []).extend(value["test"][:, -1].tolist())
        written(store, name, codec, value)

    monkeypatch.setattr(Store, "write", note)
    return found


@pytest.mark.slow
def test_horizontal_parties_with_tables_of_their_own_hold_back_each_row_once(
    write_table, test_rows
):
    files = {
        name: write_table(name, n_rows=n, seed=n, c=range(n)) for name, n in (("a", 41), ("b", 30))
    }
    fedapp.compare(["pax"], data=files, label="y", folds=3, **SHORT)
    assert {name: sorted(rows) for name, rows in test_rows.items()} == {
        "a": list(range(41)),
        "b": list(range(30)),
    }


@pytest.mark.slow
def test_the_shares_of_a_table_hold_back_each_row_once(write_table, test_rows):
    path = write_table(n_rows=70, c=range(70))
    fedapp.compare(["pax"], data=path, label="y", folds=4, parties=2, **SHORT)
    assert sorted(row for rows in test_rows.values() for row in rows) == list(range(70))


@pytest.mark.slow
@pytest.mark.by_default("True")
@pytest.mark.parametrize("own_tables", [False, True])
def test_vertical_parties_hold_back_each_row_once(vertical, write_table, monkeypatch, own_tables):
    from clients.vertical.opening import Opening

    ids = [f"r{row}" for row in range(40)]
    given = {"data": str(write_table(n_rows=40, key=ids)), "columns": "even"}
    if own_tables:
        bank = write_table("bank", n_rows=40, key=ids)
        shop = write_table("shop", n_rows=40, key=ids[::-1], a=None, c=range(40), y=None)
        given = {"data": f"bank={bank},shop={shop}", "align": "psi"}
    held = {}
    keep = Opening._keep

    def note(party, rows, split=None):
        keep(party, rows, split)
        held.setdefault(party.name, []).append(party.ids[-party.n_test :].tolist())

    monkeypatch.setattr(Opening, "_keep", note)
    for fold in (1, 2, 3):
        run_local(vertical(label="y", id="key", num_boost_round=1, folds=3, fold=fold, **given))
    first, second = held.values()
    assert first == second  # the same rows in the same order
    assert sorted(row for rows in first for row in rows) == sorted(ids)


@pytest.mark.slow
def test_one_fold_is_a_run_like_any_other(write_table):
    path = write_table(n_rows=60)
    given = {"data": path, "label": "y", "parties": 2, **SHORT}
    all_folds = fedapp.compare(["pax"], folds=3, **given)
    one = fedapp.run("pax", folds=3, fold=2, **given)
    models = [(run.path / "model.json").read_text() for run in (one, all_folds.runs["pax"][1])]
    assert models[0] == models[1]


def test_a_frame_is_cross_validated_and_not_kept(write_table):
    frame = pytest.importorskip("pandas").read_csv(write_table(n_rows=60))
    found = fedapp.compare(["pax"], data=frame, label="y", folds=2, parties=2, **SHORT)
    assert found.summary["data"] == "frame"
    assert {run.summary["data"] for run in found.runs["pax"]} == {"frame"}
    assert not list(found.path.rglob("*.parquet"))


def test_a_run_of_all_folds_is_refused_with_the_command_that_makes_them():
    with pytest.raises(
        ConfigError, match=r"^fold must be in \[1, 3\] with folds=3, got 0; fedapp c"
    ):
        fedapp.run("pax", folds=3)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ("fold=2", "^fold must be omitted to compare: --folds runs all folds, got 2$"),
        ("init-model=runs/x", "^init-model must be empty in a comparison"),
    ],
)
def test_what_does_not_go_with_folds_is_refused(given, match):
    found = CliRunner().invoke(cli, ["compare", "pax", "--folds", "3", "-c", given])
    with pytest.raises(ConfigError, match=match):
        raise found.exception or AssertionError


@pytest.mark.slow
def test_methods_are_compared_on_each_fold(write_table, tmp_path):
    given = {"data": str(write_table(n_rows=60)), "label": "y", "parties": 2, "max-bin": 16}
    given |= {"num-boost-round": 2, "max-depth": 2, "folds": 3, "fold": 1}
    found = compare(["pax"], given, 1, tmp_path / "out", run_local)
    line = next(line for line in found.lines if line.name == "pax")
    summaries = [
        json.loads((tmp_path / "out" / f"pax-42-fold-{fold}" / "summary.json").read_text())
        for fold in (1, 2, 3)
    ]
    assert line.scores == tuple(each["metrics"]["test"]["auc"] for each in summaries)
    assert all(len(each.scores) == 3 for each in found.lines)
    assert not {"fold", "folds"} & set(found.changed)
    assert found.facts["seeds"].startswith("42, each with 3 folds that are held back in turn; ±")
