"""Divided models are joined where all parts are: after a simulation."""

import logging
import shutil
from pathlib import Path

import numpy as np
import pytest

import fedapp
from fedapp.home import home
from fedapp.run_files import read_run
from fedapp.runs.joined import gains_by_party, joined_model
from fedapp.runs.session import warnings_of_parties
from fedapp.trees.model import Ensemble
from tests.report.test_page import SMALL_KEY, run

METHODS = {
    "secureboost": {**SMALL_KEY, "num-boost-round": 2, "max-depth": 2},
    "federated-forest": {"federated-forest.trees": 2, "align": "ordered"},
}


@pytest.fixture(scope="module", params=METHODS)
def done(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDAPP_HOME", str(folder / "home"))
        yield run(folder / "run", request.param, "--baselines", **METHODS[request.param])


def test_a_run_of_a_divided_model_has_paired_intervals_that_its_scores_agree_with(done):
    summary = read_run(done).summary
    baselines, test = summary["baselines"], summary["metrics"]["test"]
    compared = {"pooled": baselines["pooled"], **baselines["alone"]}
    spans = {"pooled": baselines["differences"]["pooled"], **baselines["differences"]["alone"]}
    assert len(spans) == len(compared) == 2
    for name, scores in compared.items():
        value, low, high = spans[name]["auc"]
        assert value == pytest.approx(test["auc"] - scores["auc"], abs=1e-6)
        assert low <= value <= high
    assert {*baselines["intervals"]["alone"]} == {*baselines["alone"]}


def test_shares_of_the_gain_are_those_of_the_joined_trees(done, monkeypatch):
    monkeypatch.setenv("FEDAPP_HOME", str(done.parent / "home"))
    shares, model = gains_by_party(done), joined_model(done)
    assert read_run(done).summary.get("gain_by_party", {}) == shares
    if isinstance(model, Ensemble):
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


def test_a_model_of_which_a_part_is_elsewhere_is_not_joined(done, monkeypatch, tmp_path):
    shutil.copytree(done.parent / "home", tmp_path / "home")
    monkeypatch.setenv("FEDAPP_HOME", str(tmp_path / "home"))
    assert joined_model(done) is not None
    active = read_run(done).summary["active"]
    other = next(
        party["name"] for party in read_run(done).summary["parties"] if party["name"] != active
    )
    shutil.rmtree(home() / "sites" / other)
    assert joined_model(done) is None
    shutil.rmtree(home() / "sites" / active)
    assert joined_model(done) is None
    assert gains_by_party(done) == {}
