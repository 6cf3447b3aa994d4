"""Boosted forests: several trees a round on the same gradients, as ``num_parallel_tree``.

That they are XGBoost's is in ``test_exactness``, that runs continue them in ``test_warm_start``.
"""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import xgboost

from clients.secureboost.round import by_tree, draw_rows
from fedapp.errors import ConfigError
from fedapp.runs.local import run_local
from fedapp.settings import load_settings
from fedapp.trees.objective import gradients
from fedapp.trees.predict import predict_margins
from strategies.pax import PAX
from strategies.secureboost import SecureBoost
from tests.federated import model_of
from tests.network import run as run_sites
from tests.pooled import Pooled
from tests.reference import compare_trees
from tests.tampering import refuses, rewrite_letters


def test_trees_of_a_round_draw_rows_and_columns_of_their_own(made):
    draws = {"subsample": 0.5, "colsample_bytree": 0.5, "num_boost_round": 1}
    trees = model_of(run_local(made("pax", parties=2, num_parallel_tree=4, **draws))).trees
    assert len({tree["hessian"][0] for tree in trees}) == 4
    assert len({frozenset(tree["column"][tree["left"] > 0].tolist()) for tree in trees}) > 1


@pytest.mark.by_default("multi:softprob")
@pytest.mark.parametrize("objective", ["binary:logistic", "multi:softprob", "reg:squarederror"])
def test_each_tree_is_that_of_the_rows_it_has_drawn(made, objective):
    """XGBoost on each draw's gradients grows the same trees, in the second round too."""
    small = {"max_bin": 8, "secureboost__key_bits": 256}
    draws = {"num_parallel_tree": 3, "subsample": 0.5, "min_child_weight": 0.0}
    run = made("secureboost", objective, 240, **small, **draws)
    model, whole = model_of(run_local(run)), Pooled(run)
    matrix, width = whole.matrix(whole.values), model.n_outputs
    parameters = {**whole.parameters, "subsample": 1.0, "num_parallel_tree": 1, "eta": run.eta / 3}
    for number in range(2):
        margins = predict_margins(model.first_rounds(number), whole.values[whole.train])
        of_round = whole.labels[whole.train], whole.weights[whole.train]
        pairs = np.tile(gradients(objective, margins, *of_round), (1, 3, 1))
        how = SimpleNamespace(goss=False, subsample=0.5, num_parallel_tree=3)
        rng = np.random.default_rng([run.seed, number, 1])
        drawn = by_tree(draw_rows(pairs, how, rng), 3)
        assert 0 < drawn.any(axis=(2, 3)).sum() < 3 * len(pairs)
        for place in range(3):
            matrix.set_base_margin(margins)
            each = drawn[:, place]
            booster = xgboost.train(
                parameters, matrix, 1, obj=lambda *_, each=each: (each[..., 0], each[..., 1])
            )
            first = (3 * number + place) * width
            grown = replace(model, trees=model.trees[first : first + width], num_parallel_tree=1)
            agreement = compare_trees(grown, booster)
            assert (agreement.n_trees, agreement.differing) == (width, 0)
            assert agreement.leaf_error < 1e-6


def test_a_draw_of_too_few_rows_for_one_tree_is_refused(vertical, sites, write_table, monkeypatch):
    """A round draws enough rows, and its second tree does not."""
    bank = {"name": "bank", "data": write_table("bank", 80)}
    shop = {"name": "shop", "data": write_table("shop", 80, y=None), "label": ""}
    limits = {**shop, "min-rows": 60}

    def of_few(drawn):
        bits = np.unpackbits(drawn)
        bits[80:152] = 0
        return np.packbits(bits)

    rewrite_letters(monkeypatch, "EncryptedGradients", "drawn", of_few)
    run = vertical(num_parallel_tree=2, test_fraction=0.0, valid_fraction=0.0)
    refuses(
        r".*drawn must be at least 60 rows \(min-rows of shop\), got 8", run, sites(bank, limits)
    )


# Sites with tables and limits of their own


def nodes(sites, write_table, **more):
    names = ("bank", "shop")
    return sites(*({"name": name, "data": write_table(name, 80), **more} for name in names))


def test_sites_take_what_their_plan_says(settings, sites, write_table):
    limits = {"grow_policy": "lossguide", "max_depth": 0, "min_child_weight": 0.0, "max_leaves": 9}
    run = settings(num_parallel_tree=2, **limits)
    trees = model_of(run_sites(run, nodes(sites, write_table))).trees
    assert len(trees) == 4
    assert max(map(len, trees)) > 3


def test_a_site_limits_the_trees_of_a_round(settings, sites, write_table):
    limited = nodes(sites, write_table, **{"most-trees": 4})
    refuses(r".*must be <= 4 \(most-trees.*got 5", settings(num_parallel_tree=5), limited)


def test_a_server_that_asks_for_more_trees_than_planned_is_refused(
    settings, sites, write_table, monkeypatch
):
    planned = PAX.planned.__func__
    monkeypatch.setattr(
        PAX, "planned", classmethod(lambda cls, run: {**planned(cls, run), "trees": 1})
    )
    rule = r"GrowRequest\.num_parallel_tree must be <= 1 by the plan .*, got 2"
    refuses(f".*{rule}", settings(num_parallel_tree=2), nodes(sites, write_table))


def test_settings_refuse_what_is_no_forest():
    with pytest.raises(ConfigError, match="num-parallel-tree must be >= 1, got 0"):
        load_settings({"strategy": "pax", "num-parallel-tree": 0})
    assert not SecureBoost.takes("feature-weights")
    for more in ({"secureboost.goss": True}, {"multi-strategy": "multi_output_tree"}):
        divided = {"strategy": "secureboost", "num-parallel-tree": 2, **more}
        with pytest.raises(ConfigError, match="num-parallel-tree must be 1 with "):
            SecureBoost.section_settings(load_settings(divided))
    private = {"pax.aggregation": "secure", "privacy.epsilon": 1.0, "num-parallel-tree": 2}
    with pytest.raises(ConfigError, match=r"num-parallel-tree must be 1 with privacy\.epsilon"):
        PAX.section_settings(load_settings({"strategy": "pax", **private}))
