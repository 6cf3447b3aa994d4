"""A random forest over parties with different rows: that of the pooled rows, node for node."""

from dataclasses import replace

import numpy as np
import pytest

from fedapp.errors import ConfigError, ProtocolError
from fedapp.messages.horizontal_forest import CellsReply
from fedapp.runs.local import run_local
from fedapp.trees.forest.bagged import BaggedForest
from fedapp.trees.forest.summed import CellLayout
from strategies import horizontal_forest
from strategies.horizontal_forest import check_cells
from tests.federated import model_of, summary_of
from tests.forests import assert_pooled
from tests.network import fails_from, run
from tests.tables import made_columns


@pytest.fixture
def make(made):
    """``make(objective, **more)``: settings of a forest whose bins are the values; words after
    ``own_`` are the method's own."""

    def of(objective="binary:logistic", columns=None, **more):
        given = {"own_trees": 5, "own_max_depth": 4, "own_bins": "equal", "max_bin": 256, **more}
        values = {name.replace("own_", "horizontal_forest__", 1): v for name, v in given.items()}
        return made("horizontal-forest", objective, 240, columns, **{"parties": 3, **values})

    return of


# What it computes


@pytest.mark.parametrize("aggregation", ["plain", "secure"])
def test_where_drawn_columns_are_the_same_in_a_node_the_next_one_takes_their_place(
    make, aggregation
):
    """Most columns are the same in most nodes, and one has categories."""
    rng = np.random.default_rng(2)
    values = (rng.random((240, 9)) < 0.08).astype(float)
    kinds = rng.integers(0, 5, 240)
    signal = values @ np.arange(1, 10) + kinds % 2 + rng.normal(0, 0.5, 240)
    columns = {**dict(zip("abcdefghi", values.T, strict=True)), "kind": [f"k{k}" for k in kinds]}
    columns["y"] = signal.round(3)
    objective = "reg:squarederror"
    given = make(objective, columns, own_aggregation=aggregation, own_max_features=0.1)
    found = run_local(given)
    model = assert_pooled(given, found)
    assert any((tree["set"] >= 0).any() for tree in model.trees)
    alone = 3 + 4 * (aggregation == "secure") + 2 * 4 + 1
    assert summary_of(found)["exchanges"] > alone  # some nodes were asked for again


@pytest.mark.parametrize(
    "own",
    [
        {"own_criterion": "entropy"},
        {"own_aggregation": "secure"},
        {"own_min_samples_split": 30, "own_max_features": "all"},
        {"own_min_samples_leaf": 12, "own_bootstrap": False},
        {"own_min_impurity_decrease": 0.01, "own_max_features": 0.5},
        {"own_max_features_per": "tree", "own_max_features": 0.3},
        {"own_trees": 1, "own_max_features": 1.0, "own_bootstrap": False, "weight": "w"},
    ],
)
def test_rules_of_splits_are_those_of_the_pooled_forest(make, monkeypatch, own):
    monkeypatch.setattr(horizontal_forest, "PART_CELLS", 60)  # a level is asked for in parts
    columns = made_columns("multi:softprob", 240)
    if "weight" in own:
        columns["w"] = np.random.default_rng(0).integers(0, 5, 240) / 4
    given = make("multi:softprob", columns, **own)
    model = assert_pooled(given, run_local(given))
    used = [{*tree["column"][tree["left"] >= 0].tolist()} for tree in model.trees]
    assert own.get("own_max_features_per") != "tree" or all(len(each) <= 2 for each in used)


def test_trees_end_at_their_depth_where_a_party_is_lost_under_masks(make):
    given = make(own_aggregation="secure", min_parties=2)
    folder = run(given, app=fails_from(12))
    summary = summary_of(folder)
    assert [one["party"] for one in summary["left_out"]] == ["party-2"]
    model = model_of(folder, BaggedForest)
    whole = model_of(run_local(make(own_aggregation="secure")), BaggedForest)
    for lost, grown in zip(model.trees, whole.trees, strict=True):  # split as far as they grew
        is_split = lost["left"] >= 0
        assert 1 < len(lost) < len(grown)
        assert (lost["column"][is_split] == grown["column"][: len(lost)][is_split]).all()


# What is refused


@pytest.mark.parametrize(
    ("more", "rule"),
    [
        ({"privacy__epsilon": 1.0}, r"privacy\.epsilon must be 0 for horizontal-forest: .* pax"),
        ({"own_criterion": "variance"}, r"horizontal-forest\.criterion must be gini or entropy f"),
        ({"own_max_depth": 16}, r"horizontal-forest\.max-depth must be <= 15, got 16"),
        ({"own_trees": 0}, r"horizontal-forest\.trees must be >= 1, got 0"),
        ({"own_aggregation": "secure", "min_parties": 1}, "min-parties must be 0 or >= 2 of 3"),
    ],
)
def test_settings_that_do_not_fit_are_refused_before_training(make, more, rule):
    with pytest.raises(ConfigError, match=rule):
        run_local(make(**more))


LAYOUT = CellLayout(np.array([[0, 1], [1, 0]], dtype=np.int32), np.array([2, 3]))
REPLY = CellsReply(
    cells=np.array([0, 1, 3, 7, 11]),
    sums=np.array([[1, 0, 1], [0, 2, 1], [1, 2, 2], [0, 3, 2], [0, 3, 2]]),
)


@pytest.mark.parametrize(
    ("cells", "sums", "rule"),
    [
        ([0, 1, 3, 7, 14], REPLY.sums, r"cells must be < 14, got 14"),
        (REPLY.cells, REPLY.sums[:, :2], r"sums must have size 3 \(n_sums\)"),
        (REPLY.cells, REPLY.sums * [1, 1, 0], "sums must be of 1 row or more"),
        (REPLY.cells, REPLY.sums * [1, 1, 3], "sums must be of 1 row or more"),
        (REPLY.cells, REPLY.sums * [2**53, 1, 1], r"sums must be below 2\^53"),
        (REPLY.cells, REPLY.sums * [1, -1, 1], "sums must be of weights > 0"),
        ([0, 1, 3, 7, 8], REPLY.sums, "sums must have the same total in every column of a node"),
    ],
)
def test_sums_that_no_rows_have_are_refused(cells, sums, rule):
    check_cells("bank", REPLY, LAYOUT, 2, 5)
    tampered = replace(REPLY, cells=np.array(cells), sums=sums)
    with pytest.raises(ProtocolError, match=rule):
        check_cells("bank", tampered, LAYOUT, 2, 5)
