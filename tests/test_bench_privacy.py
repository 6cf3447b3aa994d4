"""How the cost of an epsilon is shown, and how membership is told."""

from __future__ import annotations

import numpy as np
import pytest

from simulations.attacks.membership import advantage, losses
from simulations.bench.privacy import EPSILONS, HOW, NO_NOISE, Cell, drawing, show, test_score
from simulations.scored import Scored

test_score.__test__ = False  # type: ignore[attr-defined]


def cells() -> list[Cell]:
    found = [Cell("adult", "greedy, no noise", 0.0, "auc", 0.92, 0.01)]
    for trees in HOW:
        found += [Cell("adult", trees, e, "auc", 0.9, 0.01) for e in (*EPSILONS, NO_NOISE)]
    return found


def test_every_way_to_draw_trees_has_a_line() -> None:
    (ax,) = drawing(cells()).axes
    assert ax.get_ylabel() == "adult, test auc"
    assert set(ax.get_legend_handles_labels()[1]) == {*HOW, "without noise, greedy"}


def test_the_table_has_a_column_an_epsilon(capsys: pytest.CaptureFixture[str]) -> None:
    show(cells())
    shown = capsys.readouterr().out
    assert "cyclic" in shown
    assert "random" in shown


def test_scores_are_those_of_sklearn() -> None:
    found = Scored(np.array([[0.1], [3], [-2]], np.float32), np.array([0, 1, 0], np.float32))
    assert test_score(found, True) == ("auc", 1.0)
    name, value = test_score(found, False)
    assert (name, value) == ("rmse", pytest.approx(np.sqrt((0.01 + 4 + 4) / 3)))
    np.testing.assert_allclose(losses(found), np.log1p(np.exp([0.1, -3, -2])))


def test_an_advantage_is_what_other_rows_confirm() -> None:
    rng = np.random.default_rng(0)
    same = [advantage(rng.normal(size=100), rng.normal(size=100), rng) for _ in range(5)]
    assert abs(np.mean(same)) < 0.06
    assert advantage(rng.normal(-9, size=100), rng.normal(size=100), rng) > 0.95
