"""Defaults on divided rows beside tuned learners."""

import json

import numpy as np
import pytest
from sklearn.metrics import log_loss, roc_auc_score

from fedapp.runs.baselines import baseline_rows
from fedapp.settings import load_settings
from simulations.papers import tuned as study


@pytest.fixture(scope="module")
def rows():
    return baseline_rows(load_settings({"data": "breast-cancer", "valid-fraction": 0.2}))[0]


@pytest.mark.parametrize("ranges", [study.XGBOOST, study.LIGHTGBM, study.HGB])
def test_draws_are_within_their_ranges_and_follow_the_seed(ranges):
    draws = [study.draw(ranges, np.random.default_rng(7)) for _ in range(2)]
    assert draws[0] == draws[1]
    assert draws[0] != study.draw(ranges, np.random.default_rng(8))
    for name, (low, high, _) in ranges.items():
        assert low <= draws[0][name] <= high
        assert isinstance(draws[0][name], type(low))


@pytest.mark.slow
@pytest.mark.by_default("XGBoost")
@pytest.mark.parametrize("name", ["XGBoost", "scikit-learn's HGB"])
def test_the_draw_with_the_least_validation_loss_is_scored(rows, name):
    fit, ranges = study.learners()[name]
    rng, scores = np.random.default_rng(3), []
    for _ in range(3):
        predict = fit(study.draw(ranges, rng), rows, 3)
        losses_and_auc = [
            measure(rows.labels[of], predict(rows.values[of]))
            for measure, of in ((log_loss, rows.split.valid), (roc_auc_score, rows.split.test))
        ]
        scores.append(losses_and_auc)
    assert len({loss for loss, _ in scores}) == 3
    assert study.tuned(rows, name, 3, 3)[0] == pytest.approx(min(scores)[1])


@pytest.mark.slow
def test_every_method_has_a_score_of_the_same_rows(tmp_path):
    study.main(data=("breast-cancer",), rows=300, draws=1, seeds=1, output=tmp_path)
    table = json.loads((tmp_path / "tables.json").read_text())["rows"]
    methods = {row["method"]: row["auc"] for row in table}
    assert {"PAX, random", "PAX, skewed", "PAX, tuned", "bagging, random", "SecureBoost"} <= set(
        methods
    )
    assert methods["PAX, random"] > 0.9
    assert methods["SecureBoost"] > 0.9


def test_xgboost_splits_sets_of_categories(tmp_path):
    table = study.write_table("made", 600, tmp_path)
    rows = baseline_rows(load_settings({**table, "valid-fraction": 0.2, "strategy": "pax"}))[0]
    model = study.xgboost_of({"max_cat_to_onehot": 1}, rows, 3)
    assert len(rows.categories[2]) > 128
    assert model.get_booster().feature_types == [*"ccc", *["float"] * 6]
    fields = json.loads(model.get_booster().save_raw("json"))["learner"]["gradient_booster"]
    assert any(tree["categories_nodes"] for tree in fields["model"]["trees"])


@pytest.mark.slow
def test_alternatives_are_compared_on_the_same_rows(capsys):
    (line,) = study.changed("made", 400, [42], {"the same": {"eta": 0.1}})
    assert (line["auc"], line["low"], line["high"], line["logloss"]) == (0, 0, 0, 0)
    lines = study.changed_when_skewed("made", 400, [42])
    assert [line["change"] for line in lines] == list(study.WHEN_SKEWED)
    assert all(line["low"] < line["auc"] < line["high"] for line in lines)
    for line in lines:
        assert line["after"] - line["before"] == pytest.approx(line["auc"], abs=2e-3)
        assert min(line["mb_before"], line["mb_after"]) > 0
    study.alternatives(("breast-cancer",), ("made",), ("made",), rows=300, seeds=1)
    assert "made min-child-weight 5" in capsys.readouterr().out
