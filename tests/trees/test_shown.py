"""What a finished model shows of few rows."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from fedapp.report.card import model_card
from fedapp.run_folder import read_run
from fedapp.runs.local import run_local
from fedapp.trees.categories import RARE
from fedapp.trees.shown import few_rows
from tests.federated import model_bytes, summary_of

LEAST = 10
N_ROWS = 600
FOREST = {"federated_forest__trees": 3, "federated_forest__master_keeps_model": True}
METHODS = {
    "pax": {},
    "pax, masked": {"pax__aggregation": "secure"},
    "bagging": {},
    "fedxgbllr": {"fedxgbllr__trees": 3, "fedxgbllr__rounds": 1},
    "fedavg-linear": {},
    "secureboost": {"allow_export": True},
    "federated-forest": {"allow_export": True, **FOREST},
}


@examples(deadline=None, max_examples=60)
@given(st.integers(0, 2**32 - 1), st.integers(1, 30))
def test_counts_are_those_of_a_loop_over_names_and_cuts(seed, least):
    rng = np.random.default_rng(seed)
    numbers = rng.integers(-4, 5, 80).astype(np.float32)
    codes = rng.integers(0, 4, 80).astype(np.float32)
    values = np.stack([numbers, codes], axis=1)
    values[rng.random(values.shape) < 0.1] = np.nan
    cuts = np.unique(rng.integers(-5, 6, rng.integers(0, 5))).astype(np.float32)
    names = (RARE, "a", "b", "c")
    none = np.empty(0, np.float32)
    got = few_rows(np.array_split(values, 3), [cuts, none], (None, names), least)

    def few(rows):
        return 0 < int(rows.sum()) < least

    column = values[:, 0]
    ends = [-np.inf, *cuts, np.inf]
    sides = [few((column >= low) & (column < high)) for low, high in itertools.pairwise(ends)]
    n_names = sum(few(values[:, 1] == code) for code in (1, 2, 3))
    n_cuts = sum(a or b for a, b in itertools.pairwise(sides))
    n_ends = (sides[0] + sides[-1]) if len(cuts) else 0
    assert got.tolist() == [n_names, n_cuts, n_ends]


@pytest.fixture
def train(made):
    """Runs on a table with two names of 4 rows each, and two rows that are far from all others."""
    rng = np.random.default_rng(1)
    city = np.array(["lima", "oslo", "warsaw"])[rng.integers(0, 3, N_ROWS)]
    city[:4], city[4:8] = "rare-a", "rare-b"
    x = rng.normal(size=N_ROWS)
    x[:2] = 50, 51
    y = x + (city == "oslo") + rng.normal(size=N_ROWS) / 2 > 0
    columns = {"city": city, "x": x, "z": rng.normal(size=N_ROWS), "y": y.astype(int)}

    def run(method, **more):
        given = {"parties": 2, "align": "ordered", "num_boost_round": 3, **METHODS[method], **more}
        return run_local(made(method.partition(",")[0], columns=columns, **given))

    return run


@pytest.mark.by_default("pax, masked")
@pytest.mark.parametrize("method", METHODS)
def test_names_of_few_rows_are_counted_and_merged(train, method):
    folder = train(method)
    assert summary_of(folder)["few"]["names of categories"] >= 2
    assert b"rare-a" in model_bytes(folder)
    merged = train(method, least_rows_per_name=LEAST)
    assert summary_of(merged)["few"]["names of categories"] == 0
    assert b"rare-" not in model_bytes(merged)
    assert json.dumps(RARE).encode() in model_bytes(merged)
    card = model_card(read_run(merged.path))
    assert "## What the model holds of rows" in card
    assert f"of fewer than {LEAST} rows" in card


def test_a_cut_that_sets_two_rows_apart_is_counted(train):
    few = summary_of(train("pax", max_depth=6, max_bin=256, min_child_weight=0.0))["few"]
    assert few["cut points"] >= 1


@pytest.mark.parametrize(
    ("method", "how"),
    [
        ("pax", {"pax__aggregation": "secure", "privacy__epsilon": 1.0, "num_boost_round": 1}),
        ("secureboost", {"allow_export": False}),
    ],
    ids=["noise protects rows", "parts stay at their parties"],
)
def test_nothing_is_counted_where_rows_are_not_shown(train, method, how):
    assert summary_of(train(method, **how))["few"] == {}
