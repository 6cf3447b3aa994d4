"""What a passive party can tell of labels that it cannot read."""

from __future__ import annotations

import numpy as np

from fedapp.config import load_settings
from fedapp.trees.forest.model import BRANCH
from simulations.bench import label_groups as bench
from strategies.federated_forest import FederatedForest

GIVEN = {"strategy": "federated-forest", "data": "breast-cancer", "parties": 2}


def test_groups_have_one_label_and_hold_most_rows_after_ten_trees() -> None:
    lines = list(bench.measured(load_settings({**GIVEN, "federated-forest.trees": 10})))
    assert [line["trees"] for line in lines] == [1, 3, 10]
    assert all(line["in_groups_of_one_label"] == 1.0 for line in lines)
    assert lines[0]["in_two_groups"] < 0.9 < lines[-1]["in_two_groups"]


def test_a_node_counts_where_it_could_have_been_split_and_a_column_differs() -> None:
    tree = np.zeros(5, dtype=BRANCH)
    tree["left"] = [1, 3, -1, -1, -1]  # leaves 3 and 4 lie deeper than 2
    leaves = np.array([2, 2, 2, 3, 3, 4, 4], dtype=np.int32)
    drawn = np.array([True, True, False, True, True, True, True])
    values = np.array([[1.0], [2.0], [9.0], [1.0], [np.nan], [np.nan], [np.nan]], dtype=np.float32)
    own = FederatedForest.own_settings(load_settings({**GIVEN, "federated-forest.max-depth": 3}))
    found = bench.pure_nodes(tree, leaves, drawn, values, own)
    assert [members.tolist() for members in found] == [[0, 1], [3, 4]]
    shallow = own.model_copy(update={"max_depth": 2})
    found = bench.pure_nodes(tree, leaves, drawn, values, shallow)
    assert [members.tolist() for members in found] == [[0, 1]]


def test_groups_that_share_a_row_become_one() -> None:
    groups = bench.joined(bench.joined(np.arange(5), np.array([3, 4])), np.array([0, 4]))
    assert groups.tolist() == [0, 1, 2, 0, 0]
