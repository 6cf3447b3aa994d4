"""What a label holder of SecureBoost reads that encrypts no gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedapp.crypto.packing import grouped_layouts, readable_rows
from simulations.attacks import crafted

SMALL: dict[str, Any] = {"data": "breast-cancer", "columns": "sizes:25,5", "test-fraction": 0.8}
SMALL = {**crafted.SECUREBOOST, **SMALL, "max-bin": 8, "num-boost-round": 2, "max-depth": 3}
SMALL |= {"allow-export": True, "secureboost.key-bits": 384, "seed": 1}


@pytest.mark.slow
def test_all_rows_that_have_a_bit_are_read_in_one_round_and_no_other() -> None:
    deep, root = (
        crafted.attack_once({**SMALL, "max-depth": depth, **more}, crafted.REMEDIES["none"])
        for depth, more in ((3, {}), (1, {"test-fraction": 0.5}))
    )
    assert deep["rows"] < deep["readable"] == readable_rows(grouped_layouts(384, 114, 1), 3)
    assert deep["cells"] == deep["all_cells"] == 114 * 5
    assert root["readable"] == readable_rows(grouped_layouts(384, 285, 1), 1) == 126
    assert root["cells"] == 126 * 5 < root["all_cells"]


@pytest.mark.slow
def test_noise_changes_the_model_and_leaves_the_attack_its_higher_bits() -> None:
    plain, noised = crafted.compared(SMALL, ("none", "noise 40"), 384)
    assert plain["differ"] == 0 < noised["differ"]
    assert plain["readable"] - noised["readable"] == 2 * 40 * 4
    assert plain["cells"] == noised["cells"] == 570


def test_fewer_bits_of_precision_are_as_many_rows_fewer() -> None:
    line = crafted.attack_once(SMALL, crafted.REMEDIES["precision 28"])
    assert (line["bits"], line["readable"]) == (2 * (28 + 7 + 1), 4 * 72)
    assert line["cells"] == 570


def test_groups_of_bins_have_enough_rows() -> None:
    counts = np.array([1, 5, 0, 2, 3, 6, 1])
    assert crafted.groups_of(counts, 5).tolist() == [0, 0, 2, 2, 2, 5, 5]
    assert crafted.groups_of(counts, 1).tolist() == [0, 1, 2, 2, 4, 5, 6]
    assert crafted.groups_of(counts, 99).tolist() == [0] * 7


@pytest.mark.slow
def test_bins_that_are_joined_hide_bins_of_few_rows_only() -> None:
    remedy = crafted.REMEDIES["cells of 5"]
    deep, root = (crafted.attack_once({**SMALL, "max-depth": depth}, remedy) for depth in (3, 1))
    assert 0 < deep["cells"] < root["cells"] == root["all_cells"]


def test_a_proof_of_the_form_of_a_row_costs_far_more_than_its_encryption() -> None:
    assert crafted.proof_cost(384)["ratio"] > 2
