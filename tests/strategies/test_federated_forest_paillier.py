"""Federated Forest with labels under Paillier: the same forest, and nobody else reads a label."""

import numpy as np
import pytest

from fedapp.errors import PartyError
from fedapp.home import home
from fedapp.records.document import to_text
from fedapp.runs.local import run_local
from tests.federated import lines_of, summary_of
from tests.forests import encrypted_forest, joined, parts_of, pooled
from tests.network import run
from tests.tables import made_columns, write_rows

ACTIVE = "clients.federated_forest.paillier"
BINARY, CLASSES, NUMBERS = "binary:logistic", "multi:softprob", "reg:squarederror"


@pytest.fixture
def made(settings, tmp_path):
    """``made(objective, parties, **more)``: see ``forests.encrypted_forest``."""
    return encrypted_forest(settings, tmp_path)


# The same forest


def assert_the_same(made, objective, parties, **more):
    """Under encryption the forest, its parts and its scores are those with labels in codes."""
    encrypted = run_local(made(objective, parties, **more))
    encoded = run_local(made(objective, parties, own_labels="encoded", **more))
    assert parts_of(encrypted) == parts_of(encoded)
    for name in ("metrics", "oob", "importance", "matched_rows", "trees"):
        assert summary_of(encrypted)[name] == summary_of(encoded)[name]
    whole = pooled(made(objective, parties, **more))[0]
    assert to_text(joined(encrypted)) == to_text(whole)
    assert sum(map(len, whole.trees)) > 4 * len(whole.trees)
    return encrypted


@pytest.mark.slow
@pytest.mark.by_default("multi:softprob-*")
@pytest.mark.each_value_once
@pytest.mark.parametrize("parties", [2, 3])
@pytest.mark.parametrize("bootstrap", [True, False])
@pytest.mark.parametrize("objective", [BINARY, CLASSES, NUMBERS])
def test_the_forest_is_that_of_labels_in_codes(made, objective, bootstrap, parties):
    assert_the_same(made, objective, parties, own_bootstrap=bootstrap)


@pytest.mark.slow
@pytest.mark.by_default("reg:*")
@pytest.mark.parametrize(
    ("objective", "more"),
    [
        (CLASSES, {"own_criterion": "entropy", "own_max_features": "all"}),
        (BINARY, {"own_max_features": 0.2, "own_max_depth": 6}),
        pytest.param(
            *(NUMBERS, {"own_min_samples_leaf": 7, "own_min_samples_split": 20}),
            marks=pytest.mark.slow,
        ),
        (BINARY, {"own_min_impurity_decrease": 0.02, "own_min_samples_leaf": 4}),
        (NUMBERS, {"own_min_impurity_decrease": 0.5, "max_bin": 256}),
    ],
)
def test_limits_count_as_with_labels_in_codes(made, objective, more):
    assert_the_same(made, objective, 3, **more)


@pytest.mark.slow
@pytest.mark.by_default("few-binary:logistic")
@pytest.mark.each_value_once
@pytest.mark.parametrize("objective", [BINARY, CLASSES, NUMBERS])
@pytest.mark.parametrize("kind", ["few", "any"])
def test_sample_weights_count_as_with_labels_in_codes(made, tmp_path, objective, kind):
    rng = np.random.default_rng(7)
    weights = rng.choice([0.0, 0.5, 1.0, 2.5], 200) if kind == "few" else rng.exponential(1e3, 200)
    columns = {**made_columns(objective, n_rows=200), "w": weights.astype(np.float32)}
    data = write_rows(tmp_path / "weighted.csv", columns)
    # Deep trees have small nodes, in which columns of two parties tie.
    more = {"data": str(data), "weight": "w", "own_max_depth": 7}
    assert_the_same(made, objective, 3, **more)


@pytest.mark.slow
def test_ties_and_close_values_are_cut_as_with_labels_in_codes(made, tmp_path):
    rng = np.random.default_rng(5)
    tie = rng.integers(0, 3, 120).astype(np.float64)
    step = 2.0**-24  # between neighbours of float32 at 0.5; what is at most 1e-7 apart is not cut
    close = 0.5 + rng.choice([0, 1, 2, 5, 6, 9], 120) * step
    chain = 0.5 + rng.integers(0, 8, 120) * step
    gaps = np.where(rng.random(120) < 0.3, np.nan, 1.0)  # nothing but missing or not
    columns = {"a": tie, "b": gaps, "c": chain, "d": tie, "e": close, "f": gaps}
    signal = tie + np.isnan(gaps) + (close > 0.5 + 3 * step) + rng.normal(size=120)
    data = write_rows(tmp_path / "ties.csv", {**columns, "y": (signal > 2).astype(int)})
    more = {"data": str(data), "own_max_depth": 5, "own_max_features": "all"}
    folder = assert_the_same(made, BINARY, 2, **more)
    first, second = (
        dict(zip(part["lookup"]["columns"], part["lookup"]["thresholds"], strict=True))
        for part in parts_of(folder)
    )
    assert first[1] == np.finfo(np.float32).min  # what is missing against what is not
    assert {0, 1} <= set(first)
    assert set(second) == {1}  # of equal columns the first party's wins


@pytest.mark.slow
def test_a_key_of_the_default_size_grows_the_same_forest(made):
    more = {"own_key_bits": 2048, "own_insecure_small_key": False, "own_trees": 2}
    assert_the_same(made, CLASSES, 2, **more)


# Exchanges


@pytest.mark.slow
def test_a_forest_that_cannot_grow_further_stops(made):
    folder = assert_the_same(made, BINARY, 2, own_max_depth=50, own_min_samples_leaf=15)
    assert len(lines_of(folder.rounds)) < 9


def test_every_level_is_told_of_with_its_scores(made):
    rounds = [
        [{n: line[n] for n in ("round", "leaves", "train", "valid")} for line in lines_of(f.rounds)]
        for f in (run_local(made()), run_local(made(own_labels="encoded")))
    ]
    assert rounds[0] == rounds[1]
    assert len(rounds[0]) == 3


# The same predictions


@pytest.mark.slow
@pytest.mark.by_default("one-round")
@pytest.mark.parametrize("strategy", ["interactive", "one-round"])
def test_the_parts_predict_as_those_of_labels_in_codes(made, settings, strategy):
    found = []
    for labels in ("paillier", "encoded"):
        trained = made(CLASSES, 3, own_labels=labels)
        model = summary_of(run_local(trained))["model_id"]
        given = {"data": trained.data, "parties": 3, "model": model, "align": "ordered"}
        summary = summary_of(run_local(settings(strategy=strategy, **given)))
        path = home() / "sites" / "party-1" / summary["model_id"] / "predictions.csv"
        found.append(path.read_text())
    assert found[0] == found[1]
    assert len(found[0].splitlines()) == 201


@pytest.mark.slow
def test_a_site_that_wants_its_labels_encrypted_refuses_codes(settings, sites, write_table):
    ids = [f"p{row}" for row in range(60)]
    bank = {"name": "bank", "data": write_table("bank", 60, id=ids), "id": "id"}
    columns = {"a": None, "b": None, "y": None, "c": range(60), "id": ids}
    shop = {"name": "shop", "data": write_table("shop", 60, **columns), "id": "id", "label": ""}
    contexts = sites({**bank, "encrypted-labels": "true"}, shop)
    given = {"strategy": "federated-forest", "parties": 2, "federated_forest__trees": 2}
    small = {"federated_forest__key_bits": 512, "federated_forest__insecure_small_key": True}
    rule = r"^bank \(step \d+\): federated-forest.labels must be paillier where a node config has"
    with pytest.raises(PartyError, match=rule):
        run(settings(**given), contexts)
    hidden = settings(**given, **small, federated_forest__labels="paillier")
    assert summary_of(run(hidden, contexts))["trees"] == 2


def test_more_rows_than_a_letter_carries_are_refused_before_they_are_encrypted(made, monkeypatch):
    monkeypatch.setattr(f"{ACTIVE}.LARGEST_CONTENT", 2**24 + 6400)
    monkeypatch.setattr(f"{ACTIVE}.encrypt", None)
    rule = "rows must be <= 100 with labels=paillier and key-bits=256, got more: they travel in"
    with pytest.raises(PartyError, match=rf"^party-1 \(step 5\): {rule} one letter; secureboost "):
        run(made())
