"""SecureBoost with a passive party that tells of no bin with few rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clients.secureboost import active as active_round
from clients.secureboost import passive
from fedapp.errors import ConfigError, ProtocolError
from fedapp.histograms.sketch import cell_starts
from fedapp.messages.secureboost import Splits
from fedapp.runs.local import run_local
from fedapp.settings import Settings
from fedapp.site.answer import Site
from fedapp.site.settings import SiteConfig, check_policy, site_config
from fedapp.site.store import Store
from fedapp.trees.model import LEAF, load_model
from fedapp.trees.objective import gradients
from fedapp.trees.predict import find_leaves
from fedapp.trees.sets import NO_SETS
from tests.pooled import Pooled, assert_xgboosts, made_columns, splits_of, write_rows

LEAST = 12
MakeSettings = Callable[..., Settings]


@pytest.fixture
def made(vertical: MakeSettings, tmp_path: Path) -> MakeSettings:
    """``vertical`` with a small table of an objective, a column of categories in it."""

    def make(objective: str = "reg:squarederror", parties: int = 2, **more: Any) -> Settings:
        columns = made_columns(objective)
        columns["f"] = np.random.default_rng(8).choice([*"klmnop"], len(columns["f"]))
        data = write_rows(tmp_path / "made.csv", columns)
        given = {"num_boost_round": 2, "max_depth": 4, "max_bin": 16, **more}
        return vertical(data=str(data), label="y", objective=objective, parties=parties, **given)

    return make


def test_a_floor_of_one_row_changes_nothing(made: MakeSettings) -> None:
    run = made("binary:logistic", parties=3, least_bin_rows=1)
    assert_xgboosts(run_local(run), Pooled(run))


def test_every_sum_that_is_told_is_of_so_many_rows_or_none(
    made: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    read = active_round.read_party_sums

    def looked_at(view: Any, mail: Any, party: str, growth: Any) -> Any:
        found = read(view, mail, party, growth)
        told.append((growth.wanted_pairs, *found))
        return found

    monkeypatch.setattr("clients.secureboost.active.read_party_sums", looked_at)
    run_local(made(least_bin_rows=LEAST, num_boost_round=3))
    n_few = 0
    for wanted, histograms, missing in told:
        counts = np.rint(histograms[..., 1])  # the hessian of a row is 1
        for rows in (counts, missing):
            n_few += ((rows > 0) & (rows < LEAST)).sum()
        assert len(wanted) == len(counts)
    assert len(told) == 12
    assert n_few == 0
    # Both children of a split are told, in groups of their parent's.
    for (_, before, _), (wanted, after, _) in pairwise(told):
        if len(wanted) == 2 and len(before) == 1:
            assert not (after.any(axis=(0, 2)) & ~before.any(axis=(0, 2))).any()


@pytest.mark.each_value_once
@pytest.mark.parametrize("objective", ["binary:logistic", "multi:softprob", "reg:squarederror"])
@pytest.mark.parametrize("parties", [2, 3])
def test_leaves_are_those_of_the_rows_that_reach_them(
    made: MakeSettings, objective: str, parties: int
) -> None:
    run = made(objective, parties, least_bin_rows=LEAST, allow_export=True)
    whole, model = Pooled(run), load_model(run_local(run).path / "model.json")
    whole.code_as(model)
    values, labels = whole.values[whole.train], whole.labels[whole.train]
    ones, eta, penalty = np.ones(len(labels), np.float32), np.float32(run.eta), run.reg_lambda
    margins = np.tile(model.base_margin, (len(labels), 1))
    leaves = np.zeros((len(model.trees), len(values)), np.int32)
    for place, tree in enumerate(model.trees):
        find_leaves(tree, values, leaves[place], model.sets)
    for first in range(0, len(model.trees), model.n_outputs):
        pairs = gradients(model.objective, margins, labels, ones).astype(np.float64)
        for output in range(model.n_outputs):
            tree, reached = model.trees[first + output], leaves[first + output]
            for leaf in np.flatnonzero(tree["left"] == LEAF):
                gradient, hessian = pairs[reached == leaf, output].sum(axis=0)
                weight = -eta * gradient / (hessian + penalty)
                assert tree["value"][leaf] == pytest.approx(weight, rel=1e-4, abs=1e-6)
            margins[:, output] += tree["value"][reached]
    assert set(whole.owners(splits_of(model)["column"])) == set(range(parties))


def test_both_sides_of_a_passive_partys_split_have_so_many_rows(made: MakeSettings) -> None:
    run = made(least_bin_rows=LEAST, allow_export=True, max_depth=5)
    whole, model = Pooled(run), load_model(run_local(run).path / "model.json")
    n_passive = 0
    for tree in model.trees:
        is_passive = (tree["left"] != LEAF) & (whole.owners(tree["column"]) > 0)
        children = tree["left"][is_passive]
        # The hessian of a node is its number of rows.
        sizes = np.concatenate([tree["hessian"][children], tree["hessian"][children + 1]])
        assert (sizes >= LEAST).all()
        n_passive += len(children)
    assert n_passive > 3


# What a party may be told of its splits


@pytest.fixture
def site() -> Site:
    """A passive party of a column with a bin for each of 20 rows, and a group of all 5 of them;
    three more rows have no value."""
    store = Store(Path())
    store["offsets"], store["set_widths"] = np.array([0, 20]), np.zeros(1, np.int64)
    store["codes"] = np.append(np.arange(20), [20] * 3)[:, None].astype(np.uint8)
    store["drawn"], store["nodes"] = np.arange(23), np.zeros((1, 23), np.int32)
    store.facts["active"] = "bank"
    found = Site(SiteConfig("shop", data="", least_bin_rows=5), store)
    passive.begin_round(found, 1)
    return found


def own_split(first_right: int, default: int) -> Splits:
    one, nothing = np.zeros(1, np.int32), np.empty(0, np.int64)
    return Splits(
        *(1, one, one, one + 1, np.zeros(1, np.int64), np.array([first_right])),
        *(np.array([default], np.uint8), nothing.astype(np.uint8), nothing),
        *(nothing.astype(np.uint8), nothing.astype(np.int32), nothing.astype(np.int32)),
    )


def test_groups_are_told_as_their_last_bin_with_rows_that_have_no_value(site: Site) -> None:
    told = passive.grouped_codes(site.store, 0, np.array([0]))[:, 0].tolist()
    assert told == [1] * 2 + [6] * 5 + [11] * 5 + [19] * 8 + [1] * 3


@pytest.mark.parametrize(
    ("first_right", "default", "expected"), [(1, 0, 0), (2, 0, 2), (4, 0, 2), (7, 1, 7)]
)
def test_a_split_goes_between_groups_and_missing_values_with_theirs(
    site: Site, first_right: int, default: int, expected: int
) -> None:
    given = own_split(first_right, default), np.array([0]), NO_SETS
    if not expected:
        with pytest.raises(ProtocolError, match=r"^bank: Splits.columns must leave 5 rows on each"):
            passive.between_groups(site, *given)
        return
    found, _ = passive.between_groups(site, *given)
    assert found.first_rights.tolist() == [expected]
    assert found.defaults.tolist() == [1]


def test_below_a_child_of_few_rows_a_column_is_one_group(site: Site) -> None:
    store = site.store
    store["nodes"] = np.array([[1] * 3 + [2] * 20], np.int32)
    passive.divide(site, own_split(3, 0))
    assert len(np.unique(passive.grouped_codes(store, 0, np.array([0])))) == 1
    store["nodes"] = np.array([[1] * 3 + [3] * 10 + [4] * 10], np.int32)
    later = replace(own_split(0, 0), nodes=np.array([2], np.int32), lefts=np.array([3], np.int32))
    passive.divide(site, later)
    assert (store[passive.FLOOR_ENDS] == cell_starts(np.array([20]))[1] - 1).all()
    with pytest.raises(ProtocolError, match=r"^bank: Splits.nodes must be nodes that were open"):
        passive.divide(site, later)


def test_a_site_with_a_floor_takes_part() -> None:
    allow = "secureboost,federated-forest"
    node = {"name": "shop", "data": "x.csv", "allow": allow, "least-bin-rows": 5}
    shop = site_config(node, {})
    check_policy(shop, "train.secureboost_sum", "secureboost")
    with pytest.raises(ConfigError, match=r"one that merges bins \(pax, secureboost\), got fed"):
        check_policy(shop, "train.federated_forest_sum", "federated-forest")
