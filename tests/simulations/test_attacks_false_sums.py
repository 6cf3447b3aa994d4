"""What passive parties read of labels by false sums."""

import numpy as np
import pytest

from fedapp.errors import FedappError
from simulations.attacks import false_sums
from simulations.attacks.vertical import FOREST

LABELS = np.random.default_rng(0).integers(0, 2, 300)


def test_labels_are_read_from_exact_figures_and_none_where_they_do_not_leave():
    exact, off = (false_sums.described_once(LABELS, 4, 5, how) for how in ("exact", "off"))
    assert exact["labels"] == exact["right"] == 20
    assert off["labels"] == 0


def test_rounded_figures_tell_no_more_labels_than_the_site_shows():
    labels = np.tile(LABELS, 6)
    line = false_sums.described_once(labels, 4, 8, "rounded")
    assert 0 < line["right"] == line["labels"] < line["tried"] < line["bound"]


def test_false_sums_below_none_are_refused():
    """A cell that claims more rows of a class than there are leaves the other fewer than none."""
    few = (np.random.default_rng(1).random(300) > 0.1).astype(np.int64)
    with pytest.raises(FedappError, match=r"^shop .* must be of at most the rows that each cell"):
        false_sums.described_once(few, 9, 7, "exact")


def test_a_forest_ends_whose_rows_go_elsewhere_than_their_sums():
    config = {**FOREST, "data": "breast-cancer", "federated-forest.trees": 3, "test-fraction": 0.5}
    false, true = (
        false_sums.forest_once(config, false_sums.FalseColumns(7, *how), is_checked=True)
        for how in ((5, False), (1, True))
    )
    assert false["labels"] == false["right"] > 0
    assert false["ended"].startswith("party-2 (step 9): ColumnSums.ciphertexts must be of the rows")
    assert true["labels"] == true["right"] > 0
    assert not true["ended"]  # of columns that a table could have nothing is false
