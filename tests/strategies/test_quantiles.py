"""Leaves that are quantiles of residuals, at one party and from digits of all parties' rows."""

from dataclasses import replace

import numpy as np
import pytest

import strategies.pax
from clients import pax
from clients.secureboost import model as boosted_model
from fedapp.errors import PartyError
from fedapp.messages.pax import GrowRequest, QuantilesRequest
from fedapp.runs.local import run_local, simulated_contexts
from fedapp.trees.model import LEAF
from fedapp.trees.quantiles import (
    QuantileSearch,
    as_base_score,
    leaf_digit_counts,
    leaf_quantiles,
    ranks_around,
)
from tests.contract.objectives import CASES, LEVELS, MEDIAN, QUANTILE, has_xgboosts_trees, skewed
from tests.federated import model_bytes, model_of, summary_of
from tests.histograms.test_bounds import asks
from tests.network import die, fails_from, resumed, run
from tests.tampering import refuses
from tests.transcript import arrays_of, listen

MASKED = {"pax__aggregation": "secure"}
BOTH = pytest.mark.parametrize("name", ["median", "quantile"])


@pytest.fixture
def made(settings, tmp_path):
    """``made(name, **more)``: a run of PAX among three parties, with a bin for each value."""

    def make(name="quantile", **more):
        size = {"parties": 3, "max_bin": 64, "pax__bins": "equal", "pax__fusion": "finest"}
        size |= {"num_boost_round": 3, "max_depth": 3}
        return CASES[name].run(settings, tmp_path, **{**size, **more})

    return make


# XGBoost's numbers


WAYS = [  # by seed
    {"eta": 0.1, "base_margin": "m"},
    {"weight": "w"},
    {"grow_policy": "lossguide", "max_leaves": 5, "max_depth": 4, "weight": "w", "eta": 1.0},
    {"reg_alpha": 0.5, "gamma": 1.0, "min_child_weight": 4, "max_delta_step": 0.5},
    {"grow_policy": "lossguide", "max_leaves": 4, "max_depth": 0, "weight": "w"},
    {"max_leaves": 5, "num_parallel_tree": 2, "reg_lambda": 1.0},
]


@pytest.mark.by_default("1-quantile", "4-median")
@BOTH
@pytest.mark.parametrize("seed", range(6))
def test_random_tables_grow_xgboosts_trees(vertical, tmp_path, name, seed):
    margins = {"m": np.random.default_rng(1).normal(0, 9, 400).round(2)} if seed == 0 else {}
    more = {"parties": 2 + seed % 2, "columns": "random", "seed": seed}
    more |= {"quantile_alpha": LEVELS[seed]} if name == "quantile" else {}
    more |= {"num_boost_round": 3, "max_depth": 3, **WAYS[seed]}
    data = str(skewed(tmp_path / "seed.csv", seed=seed, **margins))
    run = CASES[name].run(vertical, tmp_path, data=data, **more)
    judge = has_xgboosts_trees if margins else CASES[name].judge
    judge(run, run_local(run))


# Only drawn rows


def test_a_quantile_lies_between_two_rows_or_is_the_first_or_last():
    n_rows = np.array([4, 9])
    for level, ranks, shares in (
        (0.5, [[1, 2], [4, 5]], [0.5, 0.0]),
        (0.15, [[0, 0], [0, 1]], [0.0, 0.5]),
        (0.95, [[3, 3], [8, 8]], [0.0, 0.0]),
    ):
        got, distances = ranks_around(n_rows, level)
        assert got.tolist() == ranks
        assert distances.tolist() == shares


def test_a_median_is_multiplied_and_divided_by_the_weight_as_xgboost_does():
    median = np.float32(0.71428573)
    assert as_base_score(MEDIAN, median, 3.0).tolist() == [np.float32(0.7142857)] != [median]
    assert as_base_score(QUANTILE, median, 3.0).tolist() == [median]


@pytest.mark.by_default("secureboost-quantile", "pax-quantile")
@BOTH
@pytest.mark.parametrize("strategy", ["pax", "secureboost"])
def test_only_drawn_rows_count_in_leaves(vertical, tmp_path, monkeypatch, strategy, name):
    asked = []
    module, called = (
        (pax, "leaf_digit_counts") if strategy == "pax" else (boosted_model, "leaf_quantiles")
    )
    honest = getattr(module, called)

    def recorded(leaves, residuals, *more):
        if strategy != "pax" or more[-1] == 0:
            asked.append((leaves, residuals))
        return honest(leaves, residuals, *more)

    monkeypatch.setattr(module, called, recorded)
    how = {"subsample": 0.5, "eta": 1.0, "strategy": strategy, "num_boost_round": 3, "max_depth": 3}
    how |= {"quantile_alpha": 0.5} if name == "quantile" else {}
    how |= {"parties": 1} if strategy == "pax" else {"max_bin": 16}
    model = model_of(run_local(CASES[name].run(vertical, tmp_path, **how)))
    if strategy == "pax":
        labels, *asked = asked  # all labels come first
        assert len(labels[0]) > 2 * len(asked[0][0]) - 30
    for tree, (leaves, residuals) in zip(model.trees, asked, strict=True):
        is_leaf = tree["left"] == LEAF
        places = np.arange(is_leaf.sum()) if strategy == "pax" else np.flatnonzero(is_leaf)
        for place, hessian, value in zip(
            places, tree["hessian"][is_leaf], tree["value"][is_leaf], strict=True
        ):
            of_leaf = residuals[leaves == place]
            assert len(of_leaf) == hessian  # a row counts 1
            assert value == pytest.approx(np.median(of_leaf), rel=1e-6, abs=1e-6)
    assert len({len(leaves) for leaves, _ in asked}) > 1


@pytest.mark.parametrize("objective", [MEDIAN, QUANTILE])
def test_constraints_of_a_site_are_refused_before_the_first_tree(
    vertical, sites, write_table, objective
):
    ids, columns = [f"customer {number}" for number in range(90)], np.arange(180.0).reshape(2, 90)
    shop = write_table("shop", 90, id=ids, a=None, b=None, y=None, c=columns[0], d=columns[1])
    bank = {"name": "bank", "data": write_table("bank", 90, id=ids, y=columns[0]), "id": "id"}
    own = {"name": "shop", "data": shop, "id": "id", "label": "", "monotone-constraints": "c:1"}
    rule = f"monotone-constraints must be empty in all node configs for {objective}"
    with pytest.raises(PartyError, match=rule):
        run(vertical(objective=objective), sites(bank, own))


# Digits of all parties' rows


@pytest.mark.parametrize("seed", range(4))
def test_digits_of_several_parties_rows_give_the_quantiles_of_all(seed):
    rng = np.random.default_rng(seed)
    n_leaves, n_rows = 9, int(rng.choice([3, 40, 2000]))
    leaves = rng.integers(0, n_leaves - 1, n_rows)  # the last leaf has no row
    residuals = (rng.standard_cauchy(n_rows) * 10).round(int(rng.integers(0, 6)))
    residuals = residuals.astype(np.float32)
    owners = rng.integers(0, 3, n_rows)
    for level in LEVELS:
        search = QuantileSearch(n_leaves, level)
        while search.digit < 4:
            prefixes, offsets = search.wanted()
            assert np.diff(offsets).max() <= 2
            parts = [(leaves[owners == one], residuals[owners == one]) for one in range(3)]
            wanted = prefixes, offsets, search.digit
            counts = [leaf_digit_counts(*part, *wanted) for part in parts]
            for owner, each in enumerate(counts):
                search.check(f"party-{owner}", each)
            search.take(sum(counts))
        expected = leaf_quantiles(leaves, residuals, None, level, n_leaves)
        np.testing.assert_array_equal(search.values(), expected)


@pytest.mark.parametrize("may_be_lost", [False, True])
def test_counts_of_other_rows_than_the_digit_before_are_refused(made, monkeypatch, may_be_lost):
    honest = pax.HANDLERS[QuantilesRequest]

    def doubled(site, request):
        sums = honest(site, request)
        reply = sums.reply(*sums.arrays)
        if site.name != "party-2" or not len(request.split_trees) or request.digit:
            return reply
        return replace(reply, counts=reply.counts * 2)

    monkeypatch.setitem(pax.HANDLERS, QuantilesRequest, doubled)
    rule = "QuantilesReply.counts must be of the rows that were counted by the digit before"
    if may_be_lost:
        (lost,) = summary_of(run(made(min_parties=2)))["left_out"]
        assert lost["party"] == "party-2"
        assert rule in lost["reason"]
    else:
        refuses(rf"^party-2\b.*{rule}", made())


# Hello 1, sketch 2, digits of the labels 3 to 6; then three levels and four digits a round.
FIRST, DIGITS = 7, 4


def test_a_server_that_dies_between_two_digits_ends_in_the_same_model(made):
    whole, run_ = run_local(made()), made()
    die(run_, dies_before_reading=FIRST + 3 + DIGITS + 4)
    assert model_bytes(whole) == model_bytes(run(resumed(run_), simulated_contexts(run_)))


def test_a_round_restarts_without_a_party_that_is_lost_between_two_digits(made):
    begin = FIRST + 3 + DIGITS
    late, early = (
        run(made(min_parties=2), app=fails_from(step)) for step in (begin + 3 + 2, begin)
    )
    assert summary_of(late)["left_out"][0]["step"] == begin + 3 + 2
    assert model_bytes(late) == model_bytes(early)
    with pytest.raises(PartyError, match="broke"):
        run(made(min_parties=2), app=fails_from(FIRST - 1))


def three(sent):
    n_leaves = len(sent.offsets) - 1
    prefixes = np.tile(np.arange(3, dtype=np.uint32), n_leaves)
    return replace(sent, prefixes=prefixes, offsets=np.arange(n_leaves + 1) * 3)


def many(sent):
    names = [name for name in type(sent).forms if name.startswith("split_")]
    return replace(sent, **{name: np.repeat(getattr(sent, name), 9) for name in names})


def two_nodes(sent):
    return replace(sent, grown_offsets=np.array([0, 2]), leaf_ids=sent.leaf_ids[:2])


ONE_TREE = {"n_trees": 2, "grown_offsets": np.arange(3), "leaf_ids": np.zeros(2, np.int32)}


@pytest.mark.parametrize(
    ("skip", "change", "rule"),
    [
        (1, lambda sent: replace(sent, digit=0), "digit must be 1: a tree's rows are counted by"),
        (4, lambda sent: replace(sent, digit=3), "digit must be 0: a tree's rows are counted by"),
        (2, three, "offsets must give a leaf two prefixes at most"),
        (4, two_nodes, "leaf_ids must be one a node"),
        (0, lambda sent: replace(sent, **ONE_TREE), "n_trees must be 1, got 2"),
        (4, many, "split_nodes must be . at most"),
    ],
)  # fmt: skip
def test_each_digit_of_a_trees_leaves_is_counted_once(made, monkeypatch, skip, change, rule):
    asks(monkeypatch, QuantilesRequest, change, skip)
    refuses(rf"^party-1\b.*: QuantilesRequest.{rule}", made(parties=1))


def test_labels_are_counted_for_no_other_objective(made, monkeypatch):
    monkeypatch.setattr(strategies.pax, "has_quantile_leaves", lambda objective: True)
    rule = "QuantilesRequest.class must be for leaves that are quantiles, got reg:squarederror"
    refuses(rule, made(objective="reg:squarederror", quantile_alpha=0.5, parties=1))


def test_a_tree_whose_leaves_were_counted_grows_no_further(made, monkeypatch):
    asks(monkeypatch, GrowRequest, lambda sent: replace(sent, level=3), skip=3)
    refuses("GrowRequest.level must be 0", made(parties=1))


def test_no_site_sends_counts_under_masks_but_as_sums(made):
    _, app = listen(made(**MASKED))
    counted = [arrays_of(reply) for kind, _, reply in app.heard if kind == "train.pax_leaves"]
    assert len(counted) == 3 * (4 + 3 * 4)
    assert all(reply.keys() == {"masked", "sealed"} for reply in counted)
