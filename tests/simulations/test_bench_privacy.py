"""How the cost of an epsilon is shown, and how membership is told."""

from __future__ import annotations

import numpy as np
import pytest

from fedapp.runs.baselines import Scored
from simulations.attacks.horizontal import ScoredRows, above_usual, advantage, caught, own_margins
from simulations.bench.trees import (
    EPSILONS,
    NO_NOISE,
    Cell,
    draw_privacy,
    show_privacy,
    test_score,
)

test_score.__test__ = False  # type: ignore[attr-defined]


def cells() -> list[Cell]:
    found = [Cell("adult", 0.0, "auc", 0.92, 0.01)]
    return found + [Cell("adult", e, "auc", 0.9, 0.01) for e in (*EPSILONS, NO_NOISE)]


def test_drawn_trees_are_plotted_beside_those_without_noise() -> None:
    (ax,) = draw_privacy(cells()).axes
    assert ax.get_ylabel() == "adult, test auc"
    assert set(ax.get_legend_handles_labels()[1]) == {"drawn", "without noise, greedy"}


def test_the_table_has_a_column_an_epsilon(capsys: pytest.CaptureFixture[str]) -> None:
    show_privacy(cells())
    shown = capsys.readouterr().out
    assert all(f"{epsilon:g}" in shown for epsilon in EPSILONS)


def test_scores_are_those_of_sklearn() -> None:
    found = Scored(np.array([[0.1], [3], [-2]], np.float32), np.array([0, 1, 0], np.float32))
    assert test_score(found, True) == ("auc", 1.0)
    name, value = test_score(found, False)
    assert (name, value) == ("rmse", pytest.approx(np.sqrt((0.01 + 4 + 4) / 3)))
    np.testing.assert_allclose(own_margins(found), [-0.1, 3, 2], rtol=1e-6)


def rows(shift: float, rng: np.random.Generator) -> ScoredRows:
    """200 rows, of which half are members, whose margins are larger by a shift."""
    members = np.arange(200) < 100
    return ScoredRows(rng.normal(size=200) + shift * members, members)


def test_an_advantage_is_what_other_rows_confirm() -> None:
    rng = np.random.default_rng(0)
    same = [advantage(rows(0, rng), rng) for _ in range(5)]
    assert abs(np.mean(same)) < 0.06
    assert advantage(rows(9, rng), rng) > 0.95
    tied = ScoredRows(np.zeros(200), np.arange(200) < 100)
    assert advantage(tied, rng) == 0.0


def test_members_are_caught_above_all_but_one_in_a_hundred_others() -> None:
    rng = np.random.default_rng(0)
    assert np.mean([caught(rows(0, rng)) for _ in range(20)]) < 0.05
    assert caught(rows(9, rng)) == 1.0
    assert caught(ScoredRows(np.zeros(200), np.arange(200) < 100)) == 0.0


def test_a_margin_is_held_against_models_with_and_without_the_row() -> None:
    flags = np.array([[True, True, False], [False, True, True], [True, True, False]])
    margins = np.array([[5.0, 9.0, 1.0], [1.0, 9.0, 2.0], [7.0, 9.0, 1.0]])
    shadows = [ScoredRows(*each) for each in zip(margins, flags, strict=True)]
    found = above_usual(ScoredRows(np.array([6.0, 9.0, 1.0]), flags[0]), shadows)
    # The row that has trained all models says nothing.
    assert found.margins.tolist() == [6.0 - (6.0 + 1.0) / 2, 1.0 - (2.0 + 1.0) / 2]
    assert found.members.tolist() == [True, False]
