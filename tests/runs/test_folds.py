"""Cross-validation: each row is held back once, whoever has it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as drawing
from hypothesis import strategies as st

from fedapp.data.partition import Holdout
from fedapp.errors import ConfigError
from fedapp.settings import load_settings


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
    of_fraction = Holdout(0.25, 0.0, 3).split(40)  # without folds
    assert (len(of_fraction.test), len(of_fraction.train)) == (10, 30)
    with pytest.raises(ConfigError, match=r"^folds must be at most the 3 rows of a table, got 4$"):
        Holdout(0.2, 0.0, 0, 1, 4).split(3)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"folds": 1}, r"^folds must be 0 \(none\) or >= 2, got 1$"),
        ({"folds": 3}, r"^fold must be in .*, got 0; fedapp compare --folds runs all of them$"),
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
