"""Differences of a run's model to the baselines, paired by test rows."""

import numpy as np
import pytest

import fedapp
from fedapp import metrics
from fedapp.report.certainty import certainty_notes, score_text, span_text
from fedapp.runs.baselines import baseline_rows, decoded, encoded, run_baselines
from fedapp.runs.compare import compare
from fedapp.runs.differences import mean_span, model_margins
from fedapp.runs.local import run_local
from fedapp.settings import load_settings
from tests.tables import made_columns, write_rows

SHORT = {"num_boost_round": 3, "early_stopping_rounds": 0, "max_depth": 3, "eta": 0.3}
SMALL_KEY = {"key_bits": 512, "insecure_small_key": True}


@pytest.fixture
def given(tmp_path):
    """A table split among parties."""
    columns = made_columns("binary:logistic", 400)
    data = write_rows(tmp_path / "rows.csv", {**columns, "w": [1 + row % 2 for row in range(400)]})
    more = {"data": str(data), "label": "y", "drop_columns": "w", "parties": 2}
    return {**SHORT, **more, "run_dir": str(tmp_path / "run"), "progress": False}


def test_margins_are_the_same_from_a_file():
    margins = np.random.default_rng(1).normal(size=(7, 3)).astype(np.float32)
    np.testing.assert_array_equal(decoded(encoded(margins), 7), margins)


@pytest.mark.by_default("pax")
@pytest.mark.parametrize("strategy", ["pax", "fedavg-linear"])
def test_a_run_differs_from_its_baselines_by_their_scores(given, strategy):
    if strategy == "fedavg-linear":
        given = {name: given[name] for name in given if name not in SHORT}
    run = fedapp.run(strategy, baselines=True, **given)
    baselines, test = run.summary["baselines"], run.summary["metrics"]["test"]
    assert "test_margins" not in baselines
    spans = {"pooled": baselines["differences"]["pooled"], **baselines["differences"]["alone"]}
    scores = {"pooled": baselines["pooled"], **baselines["alone"]}
    assert set(spans) == set(scores) == {"pooled", "party-1", "party-2"}
    for name, each in spans.items():
        assert set(each) == {"auc", "logloss", "accuracy"}
        for metric, (value, low, high) in each.items():
            # Scores of areas come from bins.
            bound = 0.01 if metric == "auc" else 1e-6
            assert value == pytest.approx(test[metric] - scores[name][metric], abs=bound)
            assert low <= value <= high
    lines = certainty_notes(run.summary, "auc")
    shown = span_text(spans["pooled"]["auc"])
    assert any(
        f"test auc less that of a baseline, with 95 % intervals: pooled {shown}, party-1 alo"
        in line
        for line in lines
    )


def test_a_lossless_method_does_not_differ_from_pooled_training(given):
    run = fedapp.run(
        "secureboost", baselines=True, allow_export=True, secureboost=SMALL_KEY, **given
    )
    spans = run.summary["baselines"]["differences"]["pooled"]
    assert {"auc", "logloss", "accuracy"} == set(spans)
    np.testing.assert_allclose([*spans.values()], 0, atol=1e-6)


def test_weighted_rows_have_no_differences(given):
    weighted = {"allow_export": True, "secureboost": SMALL_KEY, "drop_columns": "", "weight": "w"}
    run = fedapp.run("secureboost", baselines=True, **given | weighted)
    assert run.summary["baselines"]["differences"] == {} == run.summary["intervals"]


@pytest.mark.slow
def test_scores_of_a_divided_model_have_intervals(given):
    for strategy, more in (
        ("secureboost", {"secureboost": SMALL_KEY}),
        ("federated-forest", {"federated_forest": {"trees": 5}}),
    ):
        of_method = {**given, "run_dir": f"{given['run_dir']}-{strategy}"}
        if strategy == "federated-forest":
            of_method = {name: of_method[name] for name in of_method if name not in SHORT}
        summary = fedapp.run(strategy, **of_method, **more).summary
        spans, test = summary["intervals"], summary["metrics"]["test"]
        names = {"auc", "logloss", "accuracy", "f1", "precision", "recall", "pr_auc"}
        assert set(spans) == names
        assert all(low < test[name] < high for name, (low, high) in spans.items())


@pytest.mark.slow
def test_a_comparison_has_the_mean_difference_of_its_draws(tmp_path):
    overrides = {"data": "breast-cancer", "parties": 2, "num-boost-round": 2, "max-depth": 2}
    overrides |= {"secureboost.key-bits": 512, "secureboost.insecure-small-key": True}
    found = compare(["pax", "secureboost"], overrides, 2, tmp_path / "cells", run_local)
    assert set(found.differences) == {"pax", "secureboost"}  # divided parts are all here
    spans = found.differences["pax"]
    alone = {f"{party}'s rows alone, XGBoost" for party in ("party-1", "party-2")}
    of_labels = "party-1's columns alone, XGBoost"
    assert set(spans) == {"pooled XGBoost", "secureboost", of_labels, *alone}
    value = spans["pooled XGBoost"][0]
    means = {line.name: line.mean for line in found.lines}
    assert value == pytest.approx(means["pax"] - means["pooled XGBoost"], abs=0.01)
    of_seeds = []
    for seed in (found.seeds[0], found.seeds[1]):
        run = load_settings({**overrides, "strategy": "pax", "seed": seed})
        run = run.settled("binary:logistic")
        rows = baseline_rows(run)[0].in_table_order()
        test = rows.split.test
        pair = (
            model_margins(tmp_path / "cells" / f"pax-{seed}", rows),
            decoded(run_baselines(run)["test_margins"]["pooled"], len(test)),
        )
        of_rows = rows.labels[test], rows.weights[test]
        of_seeds.append(metrics.paired(run.objective, *pair, *of_rows)["auc"])
    np.testing.assert_allclose(spans["pooled XGBoost"], mean_span(of_seeds), atol=1e-12)
    # Differences of the best method have a table of their own, those of others a line.
    shown = found.facts.get("pax, paired")
    if found.best.name == "pax":
        assert shown is None
    else:
        pooled = f"pooled XGBoost {span_text(spans['pooled XGBoost'])}"
        assert shown is not None
        assert pooled in shown


def test_a_summary_names_the_error_of_binning():
    errors = {"auc": 0.0003, "ks": 0.01231, "pr_auc": 0.1, "cost@5": 0.0}
    (line,) = certainty_notes({"binning_errors": errors}, "auc")
    near = "auc 0.0003, ks 0.013, pr_auc 0.1"
    assert line == f"scores from bins are this near those of rows: {near}"
    assert certainty_notes({}, "auc") == []
    assert score_text(None) == "–"  # noqa: RUF001
