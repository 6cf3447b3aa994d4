"""The tables and the figure of the SecureBoost paper."""

import json

import numpy as np
import pytest

from simulations.papers import secureboost as paper


@pytest.fixture
def _short(monkeypatch):
    """Runs of a fraction of a second."""
    small = {**paper.COMMON, "max-bin": 4, "secureboost.key-bits": 256}
    monkeypatch.setattr(paper, "COMMON", small)
    monkeypatch.setattr(paper, "CREDITS", dict.fromkeys(paper.CREDITS, "breast-cancer"))


def test_further_columns_are_products_of_the_tables():
    values = np.array([[2, 3], [5, 7]], np.float32)
    found = paper.product_columns(values, 6)
    assert found.tolist() == [[2, 3, 4, 6, 9, 8], [5, 7, 25, 35, 49, 125]]


@pytest.mark.parametrize(("n_first", "n_second"), [(30, 12), (12, 30), (20, 20)])
def test_an_alignment_finds_the_ids_that_were_made_common(tmp_path, n_first, n_second):
    (found,) = paper.alignment(n_first, n_second)
    assert found["common"] == min(n_first, n_second) // 2
    assert found["seconds"] > 0
    # Points of 32 bytes: each list goes to the other party and back, each time past the server.
    assert found["bytes"] > 4 * 32 * (n_first + n_second)
    assert not list((tmp_path / "home" / "sites").glob("*/*/state"))


@pytest.mark.parametrize(("max_depth", "seen"), [(2, [3, 4, 2, 2]), (3, [3, 4, 5, 6])])
def test_the_active_partys_splits_of_the_last_level_are_not_seen(max_depth, seen):
    none = 2**31 - 1  # XGBoost's parent of a root
    tree = {"parents": [none, 0, 0, 1, 1, 2, 2], "split_indices": [0, 2, 1, 0, 0, 0, 0]}
    leaves = np.array([3, 4, 5, 6])
    assert paper.last_seen(leaves, tree, slice(0, 2), max_depth).tolist() == seen


def test_purity_is_the_share_of_the_larger_class_over_nodes():
    labels, nodes = np.array([0, 0, 1, 1, 1, 0]), np.array([3, 3, 3, 4, 4, 6])
    assert paper.purity(labels, nodes) == pytest.approx(5 / 6)


@pytest.mark.slow
@pytest.mark.usefixtures("_short")
def test_a_first_tree_of_the_active_party_shows_the_passive_one_nothing(tmp_path):
    found = paper.trained("Credit 1", "Completely SecureBoost", 3, tmp_path)
    assert found["seen"][0] == pytest.approx(found["larger_class"])
    assert found["purity"][0] > found["larger_class"]


@pytest.mark.usefixtures("_short")
@pytest.mark.slow
def test_all_is_written_and_finished_runs_are_not_run_again(tmp_path, monkeypatch, capsys):
    sizes = {"N_IDS": (20, 30), "DEPTHS": (2,), "N_COLUMNS": (32,), "N_ROWS": (100, 0)}
    for name, value in {**sizes, "TREES": 3, "STAGES": 3}.items():
        monkeypatch.setattr(paper, name, value)
    paper.main(output=tmp_path / "out")
    first = json.loads((tmp_path / "out" / "tables.json").read_text())
    assert [row["ids"] for row in first["table_1"]] == [[20, 20], [20, 30], [30, 20], [30, 30]]
    assert [row["value"] for row in first["figure_5"]] == [2, 32, 100, 569]
    for row in first["tables_2_and_3"]:
        run = f"breast-cancer-{paper.METHODS[row['method']]}-3/secureboost-42/summary.json"
        summary = json.loads((tmp_path / "out" / run).read_text())
        for name, value in row["all_trees"].items():
            assert value == pytest.approx(summary["metrics"]["test"][name])

    monkeypatch.setattr(paper, "run_and_tidy", None)
    capsys.readouterr()
    paper.main(output=tmp_path / "out")
    again = json.loads((tmp_path / "out" / "tables.json").read_text())
    assert again["figure_5"] == first["figure_5"]
    assert capsys.readouterr().out.count("finished before") == 8
