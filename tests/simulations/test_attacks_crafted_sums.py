"""Labels that a passive party of SecureBoost reads by sums and columns that it makes up."""

import pytest

from simulations.attacks import crafted_sums

STUMPS = {**crafted_sums.SECUREBOOST, **crafted_sums.STUMPS, "test-fraction": 0.97}
STUMPS |= {"num-boost-round": 5, "eta": 0.1}
DEEP = {**crafted_sums.SECUREBOOST, **crafted_sums.DEEP, "test-fraction": 0.99}
DEEP |= {"num-boost-round": 4, "max-depth": 5}


@pytest.mark.by_default("sums of other rows-16")
@pytest.mark.parametrize(
    ("lie", "n_labels"),
    [("sums of no rows", 5), ("sums of other rows", 16)],
    ids=lambda value: value,
)
def test_sums_that_are_not_checked_show_labels_and_checked_ones_end_the_run(
    real_data, lie, n_labels
):
    before, after = (crafted_sums.lied(STUMPS, lie, checks) for checks in ("nothing", "all"))
    assert before == {"rounds": 5, "labels": n_labels, "right": n_labels, "ended": ""}
    assert after["rounds"] <= 2
    assert after["labels"] <= 4
    assert "of column" in after["ended"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lie", "config"), [("made-up columns", STUMPS), ("made-up categories", DEEP)]
)
def test_columns_that_are_made_up_with_their_rows_show_labels_all_the_same(real_data, lie, config):
    line = crafted_sums.lied(config, lie, "all")
    assert not line["ended"]
    assert line["right"] == line["labels"] > 10


def test_a_label_a_round_is_read_by_the_sides_of_validation_rows():
    line, *_ = crafted_sums.held_out_sides(rounds=6)
    assert line["labels"] == line["right"] == 6
