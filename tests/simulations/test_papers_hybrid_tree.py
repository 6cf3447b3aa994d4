"""The study of HybridTree: what it trains and how it scores."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from simulations.papers.hybrid_tree import area, main


@pytest.mark.slow
def test_every_model_scores_the_same_test_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(quick=True, data="breast-cancer", output=tmp_path)
    means = json.loads((tmp_path / "tables.json").read_text())["means"]
    scores = {row["model"]: row["all"] for row in means}
    assert list(scores) == [
        *("HybridTree", "host alone", "PAX, host's columns"),
        *("SecureBoost, rows of all", "one place"),
    ]
    assert min(scores.values()) > 0.8
    assert scores["one place"] > scores["host alone"]
    assert "HybridTree" in capsys.readouterr().out


@pytest.mark.slow
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), min_size=2, max_size=30))
def test_areas_are_scikit_learns(pairs: list[tuple[bool, int]]) -> None:
    truth, scores = np.array(pairs, dtype=np.float64).T
    truth[:2] = [0, 1]
    assert area(truth.astype(np.int64), scores) == pytest.approx(roc_auc_score(truth, scores))
