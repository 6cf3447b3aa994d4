"""What passive parties read of labels by false sums."""

from __future__ import annotations

import numpy as np
import pytest

from fedapp.errors import FedappError
from simulations.attacks import false_sums

LABELS = np.random.default_rng(0).integers(0, 2, 300)


def test_labels_are_read_from_exact_figures_and_none_where_they_do_not_leave() -> None:
    exact, off = (false_sums.described_once(LABELS, 4, 5, how) for how in ("exact", "off"))
    assert exact["labels"] == exact["right"] == 20
    assert off["labels"] == 0


def test_rounded_figures_tell_no_more_labels_than_the_site_shows() -> None:
    labels = np.tile(LABELS, 6)
    line = false_sums.described_once(labels, 4, 8, "rounded")
    assert 0 < line["right"] == line["labels"] < line["tried"] < line["bound"]


def test_false_sums_below_none_are_refused() -> None:
    """A cell that claims more rows of a class than there are leaves the other fewer than none."""
    few = (np.random.default_rng(1).random(300) > 0.1).astype(np.int64)
    with pytest.raises(FedappError, match=r"^shop .* must be of at most the rows that each cell"):
        false_sums.described_once(few, 9, 7, "exact")
