"""What a passive party can tell of labels that it cannot read."""

from __future__ import annotations

import numpy as np
import pytest

from fedapp.trees.model import LEAF
from simulations.attacks import vertical
from simulations.attacks.vertical import attack_label_groups, joined, label_auc, pure_nodes

SMALL = {"data": "breast-cancer", "columns": "sizes:15,15", "federated-forest.key-bits": 256}
SMALL |= {"test-fraction": 0.85, "federated-forest.trees": 4}


def test_nodes_that_stay_whole_tell_labels_and_those_of_a_shallow_forest_fewer() -> None:
    deep = attack_label_groups({**SMALL, "seed": 1})
    shallow = attack_label_groups({**SMALL, "seed": 1, "federated-forest.max-depth": 1})
    assert deep.success > deep.chance + 0.1 == shallow.chance + 0.1
    assert shallow.success < deep.success


def test_a_node_counts_where_it_has_rows_enough_and_a_column_differs() -> None:
    lefts = np.array([1, 3, LEAF, LEAF, LEAF])
    leaves = np.array([2, 2, 2, 3, 3, 4, 4, -1, -1], dtype=np.int32)
    drawn = np.array([True, True, False, *[True] * 6])
    column = [1.0, 2.0, 9.0, 1.0, np.nan, np.nan, np.nan, 1.0, 2.0]
    values = np.array(column, dtype=np.float32)[:, None]
    found = pure_nodes(lefts, leaves, drawn, values, fewest=2)
    assert [members.tolist() for members in found] == [[0, 1], [3, 4]]
    assert not list(pure_nodes(lefts, leaves, drawn, values, fewest=3))


def test_groups_that_share_a_row_become_one() -> None:
    groups = joined(joined(np.arange(5), np.array([3, 4])), np.array([0, 4]))
    assert groups.tolist() == [0, 1, 2, 0, 0]


def test_the_two_largest_groups_are_named_and_others_lie_between() -> None:
    labels = np.array([0, 0, 1, 1, 1, 0], dtype=np.float32)
    assert label_auc(np.array([0, 0, 2, 2, 4, 5]), labels) == pytest.approx(8.5 / 9)
    assert label_auc(np.array([0, 0, 0, 3, 4, 5]), labels) == pytest.approx(7.5 / 9)


def test_impure_nodes_of_a_forest_tell_labels_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vertical, "FOLDS", 2)
    monkeypatch.setattr(vertical, "DRAWS", 2)
    few = {**SMALL, "columns": "sizes:28,2", "seed": 1, "federated-forest.max-depth": 2}
    few |= {"federated-forest.trees": 10}
    found = vertical.attack_forest_nodes(few)
    assert found.success > found.chance + 0.1
