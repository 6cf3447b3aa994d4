"""Which of two classes counts as 1: by default the later, or the one that is named."""

import json

import numpy as np
import pytest

from fedapp.data.labels import positive_last
from fedapp.errors import ConfigError, DataError
from fedapp.runs.baselines import run_baselines
from fedapp.runs.local import run_local
from fedapp.runs.predict import predict_table
from fedapp.runs.tables import check_tables
from fedapp.settings import load_settings
from tests.strategies.test_auto_objective import METHODS


def labelled(write_table, name, low, high):
    """The same rows, whatever their two classes are called."""
    rng = np.random.default_rng(7)
    a = rng.normal(size=80).round(3)
    labels = np.where(a + rng.normal(size=80) > 0, high, low)
    return write_table(name, 80, a=a, y=labels)


@pytest.mark.slow
@pytest.mark.by_default("pax", "secureboost")
@pytest.mark.parametrize("method", METHODS)
def test_the_class_named_is_the_one_that_counts(method, write_table):
    # By text "bad" comes before "good"; counted as 1 it is the later of "0" and "1".
    found = []
    for names, positive in ((("good", "bad"), "bad"), (("0", "1"), "")):
        data = labelled(write_table, f"{names[0]}-rows", *names)
        own = {"strategy": method, "data": str(data), "label": "y", **METHODS[method]}
        settings = load_settings({**own, "positive-label": positive})
        check_tables(settings)
        found.append(json.loads((run_local(settings).path / "summary.json").read_text()))
    named, numbered = found
    # Between parties with different columns the server is not told of the classes.
    assert named.get("classes", ["good", "bad"]) == ["good", "bad"]
    assert numbered.get("classes", ["0", "1"]) == ["0", "1"]
    assert named["positive_label"] == "bad"
    assert named["metrics"] == numbered["metrics"]


def test_baselines_and_predictions_follow_it(write_table, tmp_path):
    data = labelled(write_table, "rows", "good", "bad")
    given = {"data": str(data), "label": "y", **METHODS["pax"], "positive-label": "bad"}
    settings = load_settings({**given, "run-dir": str(tmp_path / "run")})
    folder = run_local(settings)
    predicted = predict_table(folder.path, str(data), "", tmp_path / "scores.csv", "y")
    header = (tmp_path / "scores.csv").read_text().splitlines()[0]
    assert "probability_bad" in header
    assert predicted.scores["auc"] > 0.5
    numbers = {**given, "data": str(labelled(write_table, "numbers", "0", "1"))}
    plain = load_settings({**numbers, "positive-label": ""})
    assert run_baselines(settings)["pooled"] == run_baselines(plain)["pooled"]


def test_a_schema_says_it_too(write_table, tmp_path):
    schema = tmp_path / "schema.toml"
    schema.write_text('label = "y"\npositive-label = "bad"\n')
    data = labelled(write_table, "rows", "good", "bad")
    settings = load_settings({"data": str(data), "schema": str(schema), **METHODS["pax"]})
    summary = json.loads((run_local(settings).path / "summary.json").read_text())
    assert summary["classes"] == ["good", "bad"]


@pytest.mark.parametrize("method", ["pax", "secureboost"])
def test_a_name_that_is_no_class_is_refused(method, write_table):
    data = labelled(write_table, "rows", "good", "bad")
    own = {"strategy": method, "data": str(data), "label": "y", **METHODS[method]}
    settings = load_settings({**own, "positive-label": "worse"})
    rule = "positive-label must be one of the two classes, 'bad' or 'good', got 'worse'"
    with pytest.raises(DataError, match=rule):
        check_tables(settings)


def test_others_are_not_told_of_the_classes():
    with pytest.raises(DataError) as caught:
        positive_last(("bad", "good"), "worse", "binary:logistic")
    told = str(caught.value.for_others(shares_names=True))
    assert told.startswith("positive-label must be one of the two classes, got another name")
    assert not any(name in told for name in ("bad", "good", "worse"))


def test_without_two_classes_there_is_none_to_name():
    settings = load_settings({"data": "wine", "positive-label": "1", **METHODS["pax"]})
    with pytest.raises(DataError, match="positive-label must be empty for multi:softprob"):
        run_local(settings)


def test_sites_that_name_different_classes_are_refused(write_table, sites):
    data = labelled(write_table, "rows", "good", "bad")
    contexts = sites(
        {"name": "bank", "data": data, "positive-label": "bad"},
        {"name": "shop", "data": data, "positive-label": "good"},
    )
    with pytest.raises(DataError, match=r"positive-label must be the same .* 'bad' of bank"):
        run_local(load_settings({**METHODS["pax"], "parties": 2}), contexts)


def test_between_sites_with_different_columns_the_owner_of_the_label_names_it(write_table, sites):
    data = labelled(write_table, "rows", "good", "bad")
    contexts = sites({"name": "bank", "data": data}, {"name": "shop", "data": data, "label": ""})
    given = {"strategy": "secureboost", **METHODS["secureboost"], "positive-label": "bad"}
    with pytest.raises(ConfigError, match="positive-label must be in the node config or schema"):
        run_local(load_settings({**given, "align": "ordered"}), contexts)
