"""Rounds that leave few rows out: a round of all rows, less one of most, would be those rows."""

import math
from dataclasses import replace

import numpy as np
import pytest

from fedapp.errors import ConfigError, FedappError
from fedapp.runs.local import run_local
from fedapp.site.answer import Site
from fedapp.site.policy import check_sample_size, check_share
from fedapp.site.settings import SiteConfig
from tests.federated import model_bytes

SMALL_KEY = {"secureboost__key_bits": 512, "secureboost__insecure_small_key": True}
GOSS = {"goss": True, "top_rate": 0.6, "other_rate": 0.3}
FEW_LEFT = {
    **{name: (name, {"subsample": 0.9}) for name in ("pax", "bagging", "cyclic")},
    "fedxgbllr": ("fedxgbllr", {"subsample": 0.9, "fedxgbllr__trees": 2, "fedxgbllr__rounds": 1}),
    "secureboost": ("secureboost", {"subsample": 0.9, **SMALL_KEY}),
    "goss": ("secureboost", {**{f"secureboost__{name}": GOSS[name] for name in GOSS}, **SMALL_KEY}),
}
ALL = {"subsample": 1.0, "secureboost__goss": False}


@pytest.fixture
def trained(settings, sites, write_table):
    """``trained(strategy, overrides, **node)``: a run of two sites with such node configs."""

    def train(strategy, overrides, **node):
        is_vertical, nodes = strategy in ("secureboost", "federated-forest"), []
        for seed, name in enumerate(("bank", "shop")):
            without = {"y": None} if is_vertical and seed else {}
            data = write_table(name, 100, seed, id=range(100), **without)
            own = {"name": name, "data": data, "id": "id", "label": "" if without else "y"}
            nodes.append({**own, "allow": strategy, "allow-export": "true", **node})
        given = {"strategy": strategy, "parties": 2, "num_boost_round": 3, **overrides}
        given |= {"test_fraction": 0.0, "valid_fraction": 0.0}
        return run_local(settings(**given), sites(*nodes))

    return train


@pytest.mark.by_default("pax")
@pytest.mark.parametrize("name", FEW_LEFT)
def test_a_draw_that_leaves_out_few_rows_draws_all(trained, name):
    strategy, few = FEW_LEFT[name]
    everything = {**few, **{key: value for key, value in ALL.items() if key in few}}
    model, whole, drawn = (
        model_bytes(folder)
        for folder in (
            trained(strategy, few, **{"min-rows": 30}),
            trained(strategy, everything, **{"min-rows": 30}),
            trained(strategy, few),
        )
    )
    assert model == whole != drawn


@pytest.mark.slow
def test_a_forest_whose_trees_leave_out_few_rows_is_refused(trained):
    """Its parties draw the same rows, so one cannot draw all by itself."""
    rule = (
        r"federated-forest\.bootstrap must be false where a tree draws or leaves out fewer than 45 "
        r"training rows \(min-rows of (bank|shop)\), got true and \d+"
    )
    few, node = {"federated_forest__trees": 3}, {"min-rows": 45}
    with pytest.raises(FedappError, match=rule):
        trained("federated-forest", few, **node)
    trained("federated-forest", {**few, "federated_forest__bootstrap": False}, **node)


def test_draws_of_two_shares_have_nothing_in_common_at_a_site_that_is_not_simulated():
    """Else draws of nearly the same share would differ by single rows."""
    config = SiteConfig("bank", "rows.csv")
    site, simulated = (Site(replace(config, simulated=is_one), None) for is_one in (False, True))
    drawn = [site.random(1, 2, share).random(100) < share for share in (0.7, 0.7 + 1e-6)]
    assert (drawn[0] != drawn[1]).sum() > 10
    assert site.entropy(1, 2, share=0.7) == site.entropy(1, 2, share=0.7) != [1, 2]
    assert simulated.entropy(1, 2, share=0.7) == [1, 2]


# How many rows are too few


def test_a_sample_leaves_out_enough_rows_or_none():
    for min_rows, least, n_drawn, expected in (
        (20, 0, 80, 80),
        (20, 0, 81, 100),
        (3, 5, 95, 95),
        (3, 5, 96, 100),
        (0, 0, 99, 99),
    ):
        config = SiteConfig("bank", "rows.csv", min_rows=min_rows, least_bin_rows=least)
        assert check_sample_size(config, 100, n_drawn) == expected
    config = SiteConfig("bank", "rows.csv", min_rows=20)
    rule = r"must draw at least 20 training rows a round \(min-rows of bank\), got 19; "
    with pytest.raises(ConfigError, match=rule):
        check_sample_size(config, 100, 19)
    with pytest.raises(ConfigError, match=rule):
        check_share(config, np.ones(100), 0.199)


@pytest.mark.parametrize("n_rows", [100, 10**5])
def test_a_share_that_is_drawn_leaves_out_enough_rows_however_it_falls(n_rows):
    """Rows without weight count for nothing."""
    config = SiteConfig("bank", "rows.csv", min_rows=20)
    weights = np.concatenate([np.ones(n_rows), np.zeros(n_rows)])
    shares = [check_share(config, weights, share) for share in np.linspace(0.5, 0.9999, 50)]
    taken = [share for share in shares if share < 1]
    n_left = np.random.default_rng(2).binomial(n_rows, 1 - max(taken), 20_000)
    assert n_left.min() >= 20
    assert math.isclose(min(taken), 0.5)
    assert check_share(replace(config, min_rows=0), weights, 0.9999) == 0.9999
