"""Splits whose sides both have so many rows of all parties."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedapp.errors import ConfigError, FedappError
from fedapp.histograms.bins import Cuts, ragged, with_categories
from fedapp.histograms.split import CategoryRules, Penalties, best_splits
from fedapp.run_folder import RunFolder
from fedapp.runs.local import run_local
from fedapp.settings import Settings
from fedapp.site.settings import check_policy, site_config
from fedapp.trees.model import LEAF, Ensemble, load_model
from strategies.run import check_read
from tests.conftest import MakeSettings
from tests.pooled import made_columns, write_rows
from tests.reference import compare_trees
from tests.test_exactness import assert_exact, pooled_booster
from tests.test_pax_secure import assert_same_trees
from tests.transcript import arrays_of, listen

FEWEST = 20
RNG = np.random.default_rng(5)
MakeRun = Callable[..., Settings]


@pytest.fixture
def made(settings: MakeSettings, tmp_path: Path) -> MakeRun:
    """``made(objective, **overrides)``: a short run on rows with missing values and categories."""

    def make(objective: str = "binary:logistic", **more: Any) -> Settings:
        data = tmp_path / f"{objective[:5]}.csv"
        if not data.exists():
            columns = made_columns(objective)
            columns["c"] = np.random.default_rng(4).choice(["oslo", "rome", "bonn", "york"], 400)
            write_rows(data, columns)
        given = {"label": "y", "objective": objective, "max_depth": 5, "max_bin": 64}
        given |= {"min_child_rows": FEWEST, "subsample": 1.0, "max_cat_to_onehot": 100}
        return settings(**{**given, "data": str(data), **more})

    return make


def model_of(folder: RunFolder) -> Ensemble:
    return load_model(folder.path / "model.json")


# The rule


def by_hand(histogram: Any, total: Any, counts: Any, n_missing: int, offsets: Any) -> Any:
    """Largest gain of all splits of columns of numbers whose sides have ``FEWEST`` rows."""
    best = 0.0
    for column, (first, end) in enumerate(pairwise(offsets)):
        n_rows = counts[first:end].sum() + n_missing
        for cut in range(first, end):
            for sums, rows in (
                (histogram[first : cut + 1], counts[first : cut + 1]),
                (histogram[cut:end], counts[cut:end]),
            ):
                near, n_near = sums.sum(axis=0), rows.sum()
                far = total[column] - near
                if min(n_near, n_rows - n_near) < FEWEST or not near[1] or not far[1]:
                    continue
                sides = (near, far, total[column])
                gains = [gradient**2 / (hessian + 1) for gradient, hessian in sides]
                best = max(best, gains[0] + gains[1] - gains[2])
    return best


@pytest.mark.parametrize("n_missing", [0, 7, 30])
def test_the_split_of_largest_gain_is_among_those_whose_sides_have_so_many_rows(
    n_missing: int,
) -> None:
    cuts = Cuts(*ragged([np.arange(width, dtype=np.float32) for width in (1, 5, 12)]), np.zeros(3))
    n_found = 0
    for _ in range(20):
        # The rows of a node are the same in every column.
        columns = RNG.integers(0, np.diff(cuts.offsets), (60, 3)) + cuts.offsets[:-1]
        pairs = np.stack([RNG.normal(size=60), RNG.uniform(0.1, 1, 60)], axis=1)
        extra = RNG.normal(size=2) ** 2
        total = pairs.sum(axis=0) + (extra if n_missing else 0)
        counts = np.bincount(columns.ravel(), minlength=18)
        histogram = np.zeros((18, 2))
        np.add.at(histogram, columns, pairs[:, None])
        split = best_splits(
            histogram[None],
            total[None],
            np.full((1, 3), n_missing, np.int32),
            np.ones((1, 3), dtype=bool),
            cuts,
            Penalties(1.0, 0.0, 0.0, 0.0),
            CategoryRules(4, 64),
            rows=counts[None],
            min_child_rows=FEWEST,
        )[0]
        expected = by_hand(histogram, [total] * 3, counts, n_missing, cuts.offsets)
        n_found += expected > 1e-3
        assert split["gain"] == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert n_found > 3


@pytest.mark.parametrize(
    ("to_onehot", "few", "cut"), [(9, [3, 20, 30, 5], 1), (1, [3, 20, 5, 30], 3)]
)
def test_a_category_of_few_rows_is_not_split_from_the_rest(
    to_onehot: int, few: list[int], cut: int
) -> None:
    histogram = np.array([[9.0, 1], [-4, 2], [5, 2], [0.5, 2]])
    cuts = Cuts(np.arange(1, 5, dtype=np.float32), np.array([0, 4]), np.zeros(1, np.float32))
    cuts = with_categories(cuts, np.array([4]), np.array([4]))

    def split(rows: list[int], fewest: int) -> np.void:
        return best_splits(
            histogram[None],
            histogram.sum(axis=0)[None],
            np.zeros((1, 1), np.int32),
            np.ones((1, 1), dtype=bool),
            cuts,
            Penalties(1.0, 0.0, 0.0, 0.0),
            CategoryRules(to_onehot, 64),
            rows=np.array([rows]),
            min_child_rows=fewest,
        )[0]

    assert split(few, 1)["gain"] > split(few, 10)["gain"] > 0
    assert split(few, 10)["cut"] == cut
    assert split(few, 30)["column"] == -1


# Trees of runs


@pytest.mark.parametrize("more", [{}, {"monotone_constraints": "a:1,b:-1", "drop_columns": "c"}])
def test_of_squared_errors_it_is_xgboosts_least_weight(made: MakeRun, more: dict[str, Any]) -> None:
    """The hessian of a row is 1, so sums of hessians are numbers of rows."""
    objective = "reg:squarederror"
    model = model_of(run_local(made(objective, parties=1, **more)))
    least = {"min_child_rows": 0, "min_child_weight": float(FEWEST), **more}
    weighed = made(objective, parties=1, **least)
    assert to_text(model) == to_text(model_of(run_local(weighed)))
    if not more:
        return
    assert_exact(compare_trees(model, pooled_booster(weighed)), 2)


def to_text(model: Ensemble) -> bytes:
    return b"".join(tree.tobytes() for tree in model.trees) + model.sets.bits.tobytes()


@pytest.mark.parametrize("data", ["abalone", pytest.param("space-ga", marks=pytest.mark.slow)])
def test_real_rows_give_xgboosts_trees(real_data: Path, settings: MakeSettings, data: str) -> None:
    given = {"data": data, "objective": "reg:squarederror", "parties": 1, "max_depth": 6}
    given |= {"max_bin": 64, "valid_fraction": 0.0}
    model = model_of(run_local(settings(**given, min_child_rows=50)))
    assert_exact(compare_trees(model, pooled_booster(settings(**given, min_child_weight=50.0))), 2)


@pytest.mark.each_value_once
@pytest.mark.parametrize("objective", ["binary:logistic", "multi:softprob", "reg:squarederror"])
@pytest.mark.parametrize("fewest", [5, FEWEST])
def test_sums_under_masks_give_the_trees_of_plain_ones(
    made: MakeRun, objective: str, fewest: int
) -> None:
    given = {"min_child_rows": fewest, "subsample": 0.8 if fewest == 5 else 1.0}
    several = 1 if fewest == 5 else 3  # parties draw rows of their own
    masked = run_local(made(objective, parties=several, pax__aggregation="secure", **given))
    plain = run_local(made(objective, parties=1, **given))
    assert_same_trees(model_of(masked), model_of(plain))


@pytest.mark.parametrize("aggregation", ["plain", "secure"])
def test_no_leaf_has_fewer_rows_than_said(made: MakeRun, aggregation: str) -> None:
    given = {"objective": "reg:squarederror", "max_bin": 32, "pax__aggregation": aggregation}
    given["parties"] = 2
    free, held = (
        model_of(run_local(made(min_child_rows=fewest, **given))) for fewest in (0, FEWEST)
    )
    # The hessian of a node is its number of rows.
    sizes = [
        np.concatenate([tree["hessian"][tree["left"] == LEAF] for tree in model.trees])
        for model in (free, held)
    ]
    assert sizes[0].min() < FEWEST <= sizes[1].min()
    assert all(len(tree) > 3 for tree in held.trees)


# What is sent


@pytest.mark.parametrize("floor", [0, 4])
def test_rows_are_counted_where_they_are_asked_for_alone(made: MakeRun, floor: int) -> None:
    for fewest in (0, 3):
        _, app = listen(made(min_child_rows=fewest, least_bin_rows=floor, parties=2))
        replies = [arrays_of(reply) for _, reply in app.of_kind("pax_grow")]
        assert len(replies) > 10
        for reply in replies:
            assert len(reply["rows"]) == (len(reply["histograms"]) if fewest else 0)
            # A bin of rows has hessians, and none has none.
            assert not len(reply["rows"]) or (
                ((reply["rows"] > 0) == (reply["histograms"][..., 1] > 0)).all()
            )


# Who is refused


def test_a_site_refuses_a_run_that_may_make_smaller_children(
    made: MakeRun, three: Callable[..., Any]
) -> None:
    contexts = three(bank={"min-child-rows": FEWEST})
    for aggregation in ("plain", "secure"):
        run = made(data="breast-cancer", min_child_rows=10, pax__aggregation=aggregation)
        rule = r"min-child-rows must be >= 20 \(min-child-rows in the node config of bank\), got 10"
        with pytest.raises(FedappError, match=rule):
            run_local(run, contexts)
    kept = run_local(made(data="breast-cancer", label=""), contexts)
    assert len(model_of(kept).trees) == 2


def test_methods_that_do_not_count_rows_refuse_it(made: MakeRun) -> None:
    with pytest.raises(ConfigError, match=r"^min-child-rows must be omitted for bagging, which do"):
        check_read(made(strategy="bagging"))
    with pytest.raises(ConfigError, match=r"^min-child-rows must be 0 with privacy\.epsilon: row"):
        run_local(made(pax__aggregation="secure", privacy__epsilon=1.0))
    bank = site_config(
        {"name": "bank", "data": "x.csv", "allow": "pax,bagging", "min-child-rows": 5}, {}
    )
    check_policy(bank, "train.pax_grow", "pax")
    with pytest.raises(ConfigError, match=r"^min-child-rows must be 0 in the node config, or str"):
        check_policy(bank, "train.bagging_fit", "bagging")
    with pytest.raises(ConfigError, match=r"^min-child-rows must be a whole number >= 0, got 'x'"):
        site_config({"name": "bank", "data": "x.csv", "min-child-rows": "x"}, {})
