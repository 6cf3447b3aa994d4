"""Labels that a site randomises: nothing of a run sees the others."""

import json
from hashlib import blake2b

import numpy as np
import pytest

from fedapp.crypto.noise import randomised_classes, randomised_measures
from fedapp.errors import ConfigError, PartyError
from fedapp.home import home
from fedapp.runs.local import run_local
from fedapp.site import labels as site_labels
from fedapp.site.settings import label_bounds
from simulations.bench.sites import Sites
from tests.federated import model_bytes
from tests.serve.standing import tables
from tests.tables import made_columns

FOREST = {"trees": 4, "max_depth": 4, "master_keeps_model": True}
METHODS = {
    "secureboost": {"num_boost_round": 3},
    "federated-forest": {f"federated_forest__{name}": value for name, value in FOREST.items()},
}
OBJECTIVES = ("binary:logistic", "multi:softprob", "reg:squarederror")


@pytest.fixture
def train(made):
    """``train(method, columns, ...)``: the whole model, and the summary."""

    def make(method, columns, **more):
        given = {"columns": columns, "parties": 2, "align": "ordered", "allow_export": True}
        folder = run_local(made(method, **{**given, **METHODS[method], **more}))
        return model_bytes(folder), folder.summary

    return make


@pytest.mark.by_default(
    "binary:logistic-secureboost",
    "multi:softprob-federated-forest",
    "reg:squarederror-federated-forest",
)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_model_is_that_of_the_randomised_labels_node_for_node(train, method, objective):
    columns = made_columns(objective, n_rows=200)
    epsilon, bounds = 1.0, "-80,80"
    more = {"objective": objective, "label_epsilon": epsilon}
    more |= {"label_range": bounds} if objective.startswith("reg") else {}
    model, summary = train(method, columns, **more)
    ids, key = [str(row) for row in range(200)], party_key("party-1")
    labels = columns["y"].astype(np.float32)
    if objective.startswith("reg"):
        drawn = randomised_measures(labels, *label_bounds(bounds), epsilon, ids, key)
    else:
        classes = [str(label) for label in sorted(set(columns["y"].tolist()))]
        drawn = randomised_classes(labels, classes, epsilon, ids, key).astype(int)
    assert (drawn != columns["y"]).mean() > 0.1
    expected, plain = train(method, {**columns, "y": drawn}, objective=objective)
    assert model == expected
    assert summary["metrics"] == plain["metrics"]
    assert any("all labels are randomised" in text for text in summary["warnings"])


def party_key(name):
    return blake2b(name.encode(), digest_size=site_labels.KEY_BYTES).digest()


@pytest.mark.by_default("federated-forest")
@pytest.mark.parametrize("method", METHODS)
def test_nothing_but_the_draw_sees_the_true_labels(train, method, monkeypatch):
    columns, drawn = made_columns("binary:logistic", n_rows=200), {}
    fixed = np.random.default_rng(5).integers(0, 2, 200).astype(np.float32)

    def draw(numbers, classes, epsilon, ids, key):
        drawn[numbers.tobytes()] = True
        return fixed[[int(name) for name in ids]]

    monkeypatch.setattr(site_labels, "randomised_classes", draw)
    results = []
    for labels in (columns["y"], 1 - columns["y"]):
        model, summary = train(method, {**columns, "y": labels}, label_epsilon=1.0)
        results.append((model, summary["metrics"], summary.get("importance")))
    assert len(drawn) == 2
    assert results[0] == results[1]


# At a site


@pytest.fixture
def sites(tmp_path):
    return Sites(tmp_path / "sites", tables("binary:logistic", 2, 120), "y")


BOOSTED = {"num-boost-round": 1, "max-depth": 1, "early-stopping-rounds": 0}


def test_a_site_draws_by_a_secret_of_its_own_once(sites):
    sites.configure("bank", {"label-epsilon": 1.0})
    sites.train(**BOOSTED)
    path = home() / "sites" / "bank" / "labels.json"
    first = json.loads(path.read_text())
    assert path.stat().st_mode & 0o777 == 0o600
    assert (first["label-epsilon"], first["classes"]) == (1.0, ["0", "1"])
    sites.configure("bank", {"label-epsilon": 2.0})
    rule = "label-epsilon must be that by which labels of bank were drawn, got another: two draws"
    with pytest.raises(PartyError, match=rule):
        sites.train(**BOOSTED)
    assert not (home() / "sites" / "insurer" / "labels.json").exists()


def test_a_site_without_ids_cannot_draw(sites):
    for name in sites.names:
        sites.configure(name, {"id": "", "drop-columns": "id", "label-epsilon": 1.0})
    with pytest.raises(PartyError, match="id in the node config of bank must name the column"):
        sites.train(**BOOSTED, align="ordered")


@pytest.mark.parametrize("text", ["1", "2,1", "1,1", "a,b", "0,inf", "nan,1", "0,1,2"])
def test_ranges_that_are_none_are_refused(text):
    with pytest.raises(ConfigError, match="label-range must be low,high, as 0,100, got"):
        label_bounds(text)


@pytest.mark.parametrize(
    ("labels", "objective", "bounds", "rule"),
    [
        ("binary:logistic", "reg:squarederror", "", "must be low,high, as 0,100, got none"),
        ("binary:logistic", "binary:logistic", "0,1", "must be empty for binary:logistic in the"),
    ],
)
def test_measures_need_a_range_and_classes_have_none(train, labels, objective, bounds, rule):
    how = {"objective": objective, "label_range": bounds, "label_epsilon": 1.0}
    with pytest.raises(PartyError, match=f"label-range {rule}"):
        train("secureboost", made_columns(labels, n_rows=100), **how)
