"""What a finished model shows of few rows."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from fedapp.report.card import model_card
from fedapp.run_files import read_run
from fedapp.runs.local import run_local
from fedapp.settings import load_settings
from fedapp.trees.categories import RARE
from fedapp.trees.shown import few_rows
from tests.federated import summary_of

LEAST = 10
N_ROWS = 600
SMALL = {"key-bits": 512, "insecure-small-key": True}
METHODS = {
    "pax": {"num-boost-round": 3},
    "pax, masked": {"num-boost-round": 3, "pax.aggregation": "secure"},
    "bagging": {"num-boost-round": 3},
    "fedxgbllr": {"fedxgbllr.trees": 3, "fedxgbllr.rounds": 1},
    "fedavg-linear": {},
    "secureboost": {"num-boost-round": 3, **{f"secureboost.{k}": v for k, v in SMALL.items()}},
    "federated-forest": {"federated-forest.trees": 3, "federated-forest.master-keeps-model": True},
}
VERTICAL = ("secureboost", "federated-forest")


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


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Two names of 4 rows each; two rows are far from all others."""
    rng = np.random.default_rng(1)
    city = np.array(["lima", "oslo", "warsaw"])[rng.integers(0, 3, N_ROWS)]
    city[:4], city[4:8] = "rare-a", "rare-b"
    x = rng.normal(size=N_ROWS)
    x[:2] = 50, 51
    y = x + (city == "oslo") + rng.normal(size=N_ROWS) / 2 > 0
    path = tmp_path_factory.mktemp("shown") / "rows.csv"
    rows = [
        f"{c},{a},{b},{int(d)}"
        for c, a, b, d in zip(city, x, rng.normal(size=N_ROWS), y, strict=False)
    ]
    path.write_text("\n".join(["city,x,z,y", *rows]) + "\n")
    return path


@pytest.fixture
def train(table):
    def run(method, **more):
        asked = {"strategy": method.partition(",")[0], "data": str(table), "label": "y"}
        asked |= {"parties": 2, "objective": "binary:logistic", **METHODS[method], **more}
        if method in VERTICAL:
            asked |= {"align": "ordered", "allow-export": True}
        return run_local(load_settings(asked))

    return run


@pytest.mark.by_default("pax, masked")
@pytest.mark.parametrize("method", METHODS)
def test_names_of_few_rows_are_counted_and_merged(train, method):
    folder = train(method)
    summary = summary_of(folder)
    assert summary["few"]["names of categories"] >= 2
    assert "rare-a" in (folder.path / "model.json").read_text()
    merged = train(method, **{"least-rows-per-name": LEAST})
    summary = summary_of(merged)
    assert summary["few"]["names of categories"] == 0
    text = (merged.path / "model.json").read_text()
    assert "rare-" not in text
    assert json.dumps(RARE) in text
    card = model_card(read_run(merged.path))
    assert "## What the model holds of rows" in card
    assert f"of fewer than {LEAST} rows" in card


def test_a_cut_that_sets_two_rows_apart_is_counted(train):
    few = summary_of(train("pax", **{"max-depth": 6, "min-child-weight": 0.0}))["few"]
    assert few["cut points"] >= 1


def test_nothing_is_counted_where_noise_protects_rows(train):
    private = {"pax.aggregation": "secure", "privacy.epsilon": 1.0, "num-boost-round": 1}
    assert summary_of(train("pax", **private))["few"] == {}


def test_a_part_that_stays_at_its_party_is_not_counted(table):
    asked = {"strategy": "secureboost", "data": str(table), "label": "y", "parties": 2}
    asked |= {"align": "ordered", "objective": "binary:logistic", **METHODS["secureboost"]}
    assert summary_of(run_local(load_settings(asked)))["few"] == {}
