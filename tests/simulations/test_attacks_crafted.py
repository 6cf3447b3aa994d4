"""What a label holder of SecureBoost reads that encrypts no gradients."""

import pytest

from fedapp.crypto.packing import grouped_layouts, readable_rows
from simulations.attacks import crafted

SMALL = {"data": "breast-cancer", "columns": "sizes:25,5", "test-fraction": 0.8}
SMALL = {**crafted.SECUREBOOST, **SMALL, "max-bin": 8, "num-boost-round": 2, "max-depth": 3}
SMALL |= {"allow-export": True, "secureboost.key-bits": 384, "seed": 1}


@pytest.mark.slow
def test_all_rows_that_have_a_bit_are_read_in_one_round_and_no_other():
    deep, root = (
        crafted.attack_once({**SMALL, "max-depth": depth, **more}, "none")
        for depth, more in ((3, {}), (1, {"test-fraction": 0.5}))
    )
    assert deep["rows"] < deep["readable"] == readable_rows(grouped_layouts(384, 114, 1), 3)
    assert deep["cells"] == deep["all_cells"] == 114 * 5
    assert root["readable"] == readable_rows(grouped_layouts(384, 285, 1), 1) == 126
    assert root["cells"] == 126 * 5 < root["all_cells"]


def test_fewer_bits_of_precision_are_as_many_rows_fewer():
    line = crafted.attack_once(SMALL, "precision 28")
    assert (line["bits"], line["readable"]) == (2 * (28 + 7 + 1), 4 * 72)
    assert line["cells"] == 570


@pytest.mark.slow
def test_a_remedy_is_compared_with_the_model_without_it():
    plain, rough = crafted.compared({**SMALL, "num-boost-round": 1}, ("none", "hessians 32"), 384)
    assert plain["differ"] == rough["differ"] == 0 < plain["nodes"]
    assert plain["readable"] == rough["readable"]
