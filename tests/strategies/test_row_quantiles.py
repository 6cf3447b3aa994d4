"""Leaves that are quantiles of the residuals of all parties' rows: XGBoost's, in PAX."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import strategies.pax
from clients import pax
from fedapp.errors import ConfigError, PartyError
from fedapp.messages.handshake import HelloRequest
from fedapp.messages.pax import GrowRequest, QuantilesRequest
from fedapp.runs.local import run_local, simulated_contexts
from fedapp.site.policy import check_message
from fedapp.site.settings import SiteConfig
from fedapp.trees.model import LEAF
from fedapp.trees.quantiles import QuantileSearch, leaf_digit_counts, leaf_quantiles
from tests.federated import summary_of
from tests.histograms.test_bounds import asks
from tests.messages.declared import example
from tests.network import die, fails_from, resumed, run
from tests.strategies.test_quantiles import (
    BOTH,
    LEVELS,
    MEDIAN,
    QUANTILE,
    assert_equal,
    model_of,
    run_of,
    table,
)
from tests.tampering import refuses
from tests.transcript import listen

MASKED = {"pax__aggregation": "secure"}


@pytest.fixture
def made(settings, tmp_path):
    """``made(objective, seed, **more)``: a run of three parties, with a bin for each value."""

    def make(objective=QUANTILE, seed=4, **more):
        path = tmp_path / f"rows-{seed}.csv"
        if not path.exists():
            table(path, seed)
        size = {"parties": 3, "max_bin": 64, "pax__bins": "equal", "pax__fusion": "finest"}
        return run_of(settings, path, objective, **{**size, **more})

    return make


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
        reply = honest(site, request)
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


# The same trees


@pytest.mark.by_default("more1-4-reg:absoluteerror")
@BOTH
@pytest.mark.parametrize("seed", [1, 4])
@pytest.mark.parametrize(
    "more",
    [
        {"eta": 1.0, "max_delta_step": 0.5, "reg_alpha": 0.5},
        {
            "grow_policy": "lossguide",
            "max_leaves": 5,
            "max_depth": 4,
            "num_parallel_tree": 2,
            "quantile_alpha": 0.9,
        },
    ],
)
def test_three_parties_grow_the_trees_of_pooled_rows_also_under_masks(made, objective, seed, more):
    plain = made(objective, seed, **more)
    model = assert_equal(plain, run_local(plain))
    masked = model_of(run_local(made(objective, seed, **more, **MASKED)))
    assert sum((tree["left"] != LEAF).sum() for tree in model.trees) > 9
    assert masked.base_score == model.base_score
    for ours, theirs in zip(model.trees, masked.trees, strict=True):
        for name in ("left", "column", "gain", "value"):
            np.testing.assert_array_equal(ours[name], theirs[name])


@pytest.mark.by_default("reg:quantileerror")
@BOTH
def test_real_rows_give_xgboosts_trees_and_under_masks_those_of_one_party(
    settings, real_data, objective
):
    size = {"data": "abalone", "objective": objective, "max_bin": 32, "max_depth": 4}
    one = settings(**size, parties=1)
    assert_equal(one, run_local(one))
    together, apart = (
        (run_local(settings(**size, **MASKED, parties=parties)).path / "model.json").read_bytes()
        for parties in (1, 3)
    )
    assert together == apart


def test_only_drawn_rows_count_in_leaves(made, monkeypatch):
    asked = []

    def recorded(leaves, residuals, *more):
        if more[-1] == 0:
            asked.append((leaves, residuals))
        return leaf_digit_counts(leaves, residuals, *more)

    monkeypatch.setattr(pax, "leaf_digit_counts", recorded)
    model = model_of(run_local(made(subsample=0.5, eta=1.0, quantile_alpha=0.5, parties=1)))
    for tree, (leaves, residuals) in zip(model.trees, asked[1:], strict=True):
        is_leaf = tree["left"] == LEAF
        counts = np.bincount(leaves, minlength=is_leaf.sum())
        np.testing.assert_array_equal(counts, tree["hessian"][is_leaf])  # a row counts 1
        values = leaf_quantiles(leaves, residuals, None, 0.5, len(counts))
        np.testing.assert_array_equal(tree["value"][is_leaf], values)
    assert len(asked[0][0]) > 2 * len(asked[1][0]) - 30  # all labels come first


# Lost parties and servers

# Hello 1, sketch 2, digits of the labels 3 to 6; then three levels and four digits a round.
FIRST, DIGITS = 7, 4


def test_a_server_that_dies_between_two_digits_ends_in_the_same_model(made):
    whole, run_ = run_local(made()), made()
    die(run_, dies_before_reading=FIRST + 3 + DIGITS + 4)
    again = run(resumed(run_), simulated_contexts(run_))
    assert (whole.path / "model.json").read_bytes() == (again.path / "model.json").read_bytes()


def test_a_round_restarts_without_a_party_that_is_lost_between_two_digits(made):
    begin = FIRST + 3 + DIGITS
    late, early = (
        run(made(min_parties=2), app=fails_from(step)) for step in (begin + 3 + 2, begin)
    )
    assert summary_of(late)["left_out"][0]["step"] == begin + 3 + 2
    assert (late.path / "model.json").read_bytes() == (early.path / "model.json").read_bytes()
    with pytest.raises(PartyError, match="broke"):
        run(made(min_parties=2), app=fails_from(FIRST - 1))


def test_sites_train_the_model_of_a_simulation(made, sites, tmp_path):
    head, *lines = Path(made().data).read_text().splitlines()
    nodes = []
    for number, name in enumerate(("bank", "clinic", "shop")):
        path = tmp_path / f"{name}.csv"
        path.write_text("\n".join([head, *lines[number::3]]) + "\n")
        site = {"name": name, "data": path, "drop-columns": "w", "draws-secret": "none"}
        nodes.append({**site, "allow-export": True, "least-parties": 2})
    data = ",".join(f"{node['name']}={node['data']}" for node in nodes)
    how = {**MASKED, "parties": 3, "subsample": 0.8}
    simulated = run_local(made(**how).model_copy(update={"data": data}))
    deployed = run_local(made(**how), sites(*nodes))
    models = [(folder.path / "model.json").read_bytes() for folder in (simulated, deployed)]
    assert models[0] == models[1]
    nodes[1] = {**nodes[1], "weight": "w", "drop-columns": ""}
    rule = "weight must be empty at clinic for reg:quantileerror with pax: weighted rows have quant"
    with pytest.raises(PartyError, match=rule):
        run_local(made(**how), sites(*nodes))


# What a server may ask


def vars_of(message):
    return [*type(message).forms]


def three(sent):
    n_leaves = len(sent.offsets) - 1
    prefixes = np.tile(np.arange(3, dtype=np.uint32), n_leaves)
    return replace(sent, prefixes=prefixes, offsets=np.arange(n_leaves + 1) * 3)


@pytest.mark.parametrize(
    ("skip", "change", "rule"),
    [
        (1, lambda sent: replace(sent, digit=0), "digit must be 1: a tree's rows are counted by"),
        (4, lambda sent: replace(sent, digit=3), "digit must be 0: a tree's rows are counted by"),
        (2, three, "offsets must give a leaf two prefixes at most"),
        (4, lambda sent: replace(sent, grown_offsets=np.array([0, 2]),
         leaf_ids=sent.leaf_ids[:2]), "leaf_ids must be one a node"),
        (0, lambda sent: replace(sent, n_trees=2, grown_offsets=np.arange(3),
         leaf_ids=np.zeros(2, np.int32)), "n_trees must be 1, got 2"),
        (4, lambda sent: replace(sent, **{name: np.repeat(getattr(sent, name), 9)
         for name in vars_of(sent) if name.startswith("split_")}), "split_nodes must be . at most"),
    ],
)  # fmt: skip
def test_each_digit_of_a_trees_leaves_is_counted_once(made, monkeypatch, skip, change, rule):
    asks(monkeypatch, QuantilesRequest, change, skip)
    refuses(rf"^party-1\b.*: QuantilesRequest.{rule}", made(parties=1))


def test_labels_are_counted_for_no_other_objective(made, monkeypatch):
    monkeypatch.setattr(strategies.pax, "has_quantile_leaves", lambda objective: True)
    rule = "QuantilesRequest.class must be for leaves that are quantiles, got reg:squarederror"
    refuses(rule, made("reg:squarederror", parties=1))


def test_a_tree_whose_leaves_were_counted_grows_no_further(made, monkeypatch):
    asks(monkeypatch, GrowRequest, lambda sent: replace(sent, level=3), skip=3)
    refuses("GrowRequest.level must be 0", made(parties=1))


def test_no_site_sends_counts_under_masks_but_as_sums(made):
    _, app = listen(made(**MASKED))
    kinds = [kind for kind, _, _ in app.heard]
    assert kinds.count("train.pax_leafsums") == 3 * (4 + 3 * 4)
    assert "train.pax_leaves" not in kinds


# Refusals


@pytest.mark.parametrize(
    ("more", "rule"),
    [
        ({"weight": "w"}, "weight must be empty at party-1 for reg:quantileerror with pax: weight"),
        ({"least_bin_rows": 5}, "least-bin-rows must be 0 at party-1 for reg:quantileerror, whose"),
        (MASKED | {"privacy__epsilon": 1.0}, "must be one without times, queries or quantiles wi"),
        (MASKED | {"min_parties": 2}, "min-parties must be 0 with pax.aggregation=secure and reg"),
        ({"monotone_constraints": "a:1"}, "monotone-constraints must be empty for reg:quantile"),
    ],
)
def test_runs_without_quantiles_of_all_rows_are_refused(made, more, rule):
    with pytest.raises((ConfigError, PartyError), match=rule):
        run_local(made(**more))


def test_a_site_with_weights_or_a_least_number_of_rows_refuses():
    site = SiteConfig("bank", "a.csv", "y", simulated=True)
    request = HelloRequest(**{**example(HelloRequest), "objective": MEDIAN})
    check_message(site, request, "bank", "pax")
    for field, value in (("weight", "w"), ("least_bin_rows", 5)):
        with pytest.raises(ConfigError, match=f"{field.replace('_', '-')} must be"):
            check_message(replace(site, **{field: value}), request, "bank", "pax")
