"""What a run is compared with: pooled XGBoost, parties alone, and the joined parts of a model."""

import logging
import shutil
from pathlib import Path

import numpy as np
import pytest

import fedapp
from fedapp.home import home
from fedapp.report.summary import certainty_notes, score_notes, score_text, span_text
from fedapp.run_folder import read_run
from fedapp.runs.baselines import order_range, run_baselines, same_nodes
from fedapp.runs.local import run_local
from fedapp.runs.predict import gains_by_party, joined_model
from fedapp.runs.session import warnings_of_parties
from fedapp.trees.model import Ensemble
from tests.report.test_page import SMALL_KEY, run
from tests.tables import write_rows


@pytest.mark.parametrize("kind", ["vertical", "one party of PAX"])
def test_a_run_of_the_same_trees_scores_as_pooled_xgboost_to_the_last_digit(
    vertical, settings, tmp_path, kind
):
    """Columns have many values, so that cuts follow the order of the rows."""
    rng = np.random.default_rng(4)
    columns = {name: rng.normal(size=2000) for name in "abcd"}
    signal = columns["a"] * columns["b"] + columns["c"] + rng.normal(0, 0.5, 2000)
    data = write_rows(tmp_path / "smooth.csv", {**columns, "y": (signal > 0).astype(int)})
    given = {"data": str(data), "label": "y", "num_boost_round": 3, "max_depth": 4, "max_bin": 8}
    made = vertical(**given) if kind == "vertical" else settings(**given, parties=1)
    folder = run_local(made)
    found, scores = run_baselines(made, folder.path), folder.summary["metrics"]["test"]
    of_run = {name: scores[name] for name in found["pooled"]}
    assert of_run == pytest.approx(found["pooled"], rel=1e-9)
    n_same, n_nodes = found["same_nodes"]
    assert n_same == n_nodes > 30
    if kind == "vertical":
        folder.add_to_summary({"baselines": found})
        line = f"trees: XGBoost's on the joined table, {n_nodes} of {n_nodes} nodes equal"
        assert line in score_notes(folder.summary)
        low, high = order_range(made, "logloss", 4)
        assert high - low > 1e-6  # other orders, other cuts


def test_nodes_below_one_that_differs_are_not_counted():
    def model(gain):
        tree = {
            "tree_param": {"size_leaf_vector": "1"},
            "left_children": [1, -1, -1],
            "right_children": [2, -1, -1],
            "split_conditions": [0.5, 1.0, 2.0],
            "loss_changes": [gain, 0, 0],
            "split_indices": [0, 0, 0],
            "default_left": [0, 0, 0],
            **{f"categories{part}": [] for part in ("", "_nodes", "_segments", "_sizes")},
        }
        return {"learner": {"gradient_booster": {"model": {"trees": [tree]}}}}

    other = float(np.nextafter(np.float32(3), np.float32(4)))
    assert same_nodes(model(3.0), model(3.0)) == (3, 3)
    assert same_nodes(model(3.0), model(other)) == (0, 3)


METHODS = {
    "pax": {"parties": 2},
    "secureboost": {**SMALL_KEY, "num-boost-round": 2, "max-depth": 2},
    "federated-forest": {"federated-forest.trees": 2, "align": "ordered"},
}


@pytest.fixture(scope="module", params=METHODS)
def done(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDAPP_HOME", str(folder / "home"))
        yield run(folder / "run", request.param, "--baselines", **METHODS[request.param])


def test_a_run_has_paired_intervals_that_its_scores_agree_with(done):
    summary = read_run(done).summary
    baselines, test = summary["baselines"], summary["metrics"]["test"]
    assert "test_margins" not in baselines
    compared = {"pooled": baselines["pooled"], **baselines["alone"]}
    spans = {"pooled": baselines["differences"]["pooled"], **baselines["differences"]["alone"]}
    strategy = summary["strategy"]
    assert spans.keys() == compared.keys()
    assert len(spans) == (3 if strategy == "pax" else 2)
    for name, scores in compared.items():
        for metric, (value, low, high) in spans[name].items():
            # Between parties with rows, scores of areas come from bins.
            bound = 0.01 if (strategy, metric) == ("pax", "auc") else 1e-6
            assert value == pytest.approx(test[metric] - scores[metric], abs=bound)
            assert low <= value <= high
    if strategy == "secureboost":  # which is lossless
        np.testing.assert_allclose([*spans["pooled"].values()], 0, atol=1e-6)
    assert {*baselines["intervals"]["alone"]} == {*baselines["alone"]}
    shown = f"with 95 % intervals: pooled {span_text(spans['pooled']['auc'])}, party-"
    lines = certainty_notes(summary, "auc")
    assert any(f"test auc less that of a baseline, {shown}" in line for line in lines)


def test_shares_of_the_gain_are_those_of_the_joined_trees(done, monkeypatch):
    monkeypatch.setenv("FEDAPP_HOME", str(done.parent / "home"))
    shares = gains_by_party(done)
    assert read_run(done).summary.get("gain_by_party", {}) == shares
    if read_run(done).summary["strategy"] == "secureboost":
        model = joined_model(done)
        assert isinstance(model, Ensemble)
        gains = np.concatenate([tree["gain"][tree["left"] >= 0] for tree in model.trees])
        columns = np.concatenate([tree["column"][tree["left"] >= 0] for tree in model.trees])
        of_first = columns < len(model.columns) // 2
        assert shares["party-1"] == pytest.approx(gains[of_first].sum() / gains.sum())
        assert sum(shares.values()) == pytest.approx(1)


def test_what_a_party_warns_of_in_its_log_is_in_the_report_once(done):
    found = [text for text in read_run(done).summary["warnings"] if "rarer class" in text]
    assert len(found) == 1
    assert read_run(done).summary["threshold"].get("few")
    assert f'<p class="warning">{found[0]}' in (done / "report.html").read_text()


@pytest.mark.parametrize("done", ["secureboost"], indirect=True)
def test_a_model_of_which_a_part_is_elsewhere_is_not_joined(done, monkeypatch, tmp_path):
    shutil.copytree(done.parent / "home", tmp_path / "home")
    monkeypatch.setenv("FEDAPP_HOME", str(tmp_path / "home"))
    assert joined_model(done) is not None
    for party in ("party-2", "party-1"):
        shutil.rmtree(home() / "sites" / party)
        assert joined_model(done) is None
    assert gains_by_party(done) == {}


@pytest.mark.parametrize(
    ("source", "text"),
    [("clients/a.py", "b: of 3"), ("fedapp/site/a.py", "b: of 3"), ("strategies/a.py", "")],
)
def test_only_parties_warnings_are_noted(source, text):
    log, source = logging.getLogger("fedapp"), str(Path(fedapp.__file__).parents[1] / source)
    with warnings_of_parties() as texts:
        for _ in range(2):
            log.handle(log.makeRecord("fedapp", logging.WARNING, source, 1, "b: of %d", (3,), None))
        log.handle(log.makeRecord("fedapp", logging.INFO, source, 1, "rows", (), None))
    log.handle(log.makeRecord("fedapp", logging.WARNING, source, 1, "later", (), None))
    assert texts == ([text] if text else [])


def test_a_summary_names_the_error_of_binning():
    errors = {"auc": 0.0003, "ks": 0.01231, "pr_auc": 0.1, "aucpr": 0.0}
    (line,) = certainty_notes({"binning_errors": errors}, "auc")
    near = "auc 0.0003, ks 0.013, pr_auc 0.1"
    assert line == f"scores from bins are this near those of rows: {near}"
    assert certainty_notes({}, "auc") == []
    assert score_text(None) == "–"  # noqa: RUF001
