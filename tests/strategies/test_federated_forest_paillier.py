"""Federated Forest with labels under Paillier: the same forest, and nobody else reads a label."""

import numpy as np
import pytest

from fedapp.errors import PartyError
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


def weighted(weights):
    def columns(objective):
        # Deep trees have small nodes, in which columns of two parties tie.
        of_rows = weights(np.random.default_rng(7)).astype(np.float32)
        return {**made_columns(objective, n_rows=200), "w": of_rows}

    return columns


def ties(objective):
    """Columns of both parties that tie, values too close to be cut, and missing values."""
    rng = np.random.default_rng(5)
    tie = rng.integers(0, 3, 120).astype(np.float64)
    step = 2.0**-24  # between neighbours of float32 at 0.5; what is at most 1e-7 apart is not cut
    close = 0.5 + rng.choice([0, 1, 2, 5, 6, 9], 120) * step
    chain = 0.5 + rng.integers(0, 8, 120) * step
    gaps = np.where(rng.random(120) < 0.3, np.nan, 1.0)  # nothing but missing or not
    signal = tie + np.isnan(gaps) + (close > 0.5 + 3 * step) + rng.normal(size=120)
    columns = {"a": tie, "b": gaps, "c": chain, "d": tie, "e": close, "f": gaps}
    return {**columns, "y": (signal > 2).astype(int)}


FEW = weighted(lambda rng: rng.choice([0.0, 0.5, 1.0, 2.5], 200))
ANY = weighted(lambda rng: rng.exponential(1e3, 200))
WEIGHTS = {"weight": "w", "own_max_depth": 7}
LEAVES = {"own_min_samples_leaf": 7, "own_min_samples_split": 20}
GAINS = {"own_min_impurity_decrease": 0.5, "max_bin": 256}
SAME = {  # columns, if not the usual ones; objective, parties, settings
    "two parties": (None, BINARY, 2, {"own_bootstrap": False}),
    "classes": (None, CLASSES, 3, {}),
    "entropy": (None, CLASSES, 3, {"own_criterion": "entropy", "own_max_features": "all"}),
    "few columns": (None, BINARY, 3, {"own_max_features": 0.2, "own_max_depth": 6}),
    "least leaves": (None, NUMBERS, 3, LEAVES),
    "least gains": (None, NUMBERS, 3, GAINS),
    "few weights": (FEW, BINARY, 3, WEIGHTS),
    "any weights": (ANY, NUMBERS, 3, WEIGHTS),
    "ties": (ties, BINARY, 2, {"own_max_depth": 5, "own_max_features": "all"}),
}


@pytest.mark.by_default("two parties", "classes", "least gains", "few weights", "ties")
@pytest.mark.parametrize(("columns", "objective", "parties", "more"), SAME.values(), ids=SAME)
def test_the_forest_is_that_of_labels_in_codes(made, tmp_path, columns, objective, parties, more):
    """Under encryption the forest, its parts and its scores are those with labels in codes."""
    if columns:
        more = {**more, "data": str(write_rows(tmp_path / "rows.csv", columns(objective)))}
    encrypted = run_local(made(objective, parties, **more))
    encoded = run_local(made(objective, parties, own_labels="encoded", **more))
    assert parts_of(encrypted) == parts_of(encoded)
    for name in ("metrics", "oob", "importance", "matched_rows", "trees"):
        assert summary_of(encrypted)[name] == summary_of(encoded)[name]
    whole = pooled(made(objective, parties, **more))[0]
    assert to_text(joined(encrypted)) == to_text(whole)
    assert sum(map(len, whole.trees)) > 4 * len(whole.trees)


def test_every_level_is_told_of_with_its_scores(made):
    rounds = [
        [{n: line[n] for n in ("round", "leaves", "train", "valid")} for line in lines_of(f.rounds)]
        for f in (run_local(made()), run_local(made(own_labels="encoded")))
    ]
    assert rounds[0] == rounds[1]
    assert len(rounds[0]) == 3


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
