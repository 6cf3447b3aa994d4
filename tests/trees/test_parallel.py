"""Boosted forests: several trees a round on the same gradients, as ``num_parallel_tree``."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import xgboost

from clients.secureboost.round import by_tree, draw_rows
from fedapp.errors import ConfigError, PartyError
from fedapp.records.document import from_text, load, to_text
from fedapp.runs.local import run_local
from fedapp.settings import load_settings
from fedapp.trees.model import Ensemble
from fedapp.trees.objective import gradients
from fedapp.trees.predict import predict_margins
from strategies.pax import PAX
from strategies.secureboost import SecureBoost
from tests.network import run as run_sites
from tests.pooled import Pooled
from tests.random_tables import differences, random_case, seeds
from tests.reference import compare_trees
from tests.strategies.test_secureboost import CREDIT, DEFAULT, first_rows
from tests.tables import made_columns, write_rows
from tests.tampering import refuses, rewrite_letters


@pytest.mark.parametrize("seed", seeds(240, (0, 1, 2, 150, 210)))
def test_random_tables_grow_xgboosts_trees(settings, tmp_path, seed):
    n_parallel = 2 + seed % 4
    case = random_case(tmp_path / "random.csv", seed, "pax")
    run = settings(**case, num_parallel_tree=n_parallel, grow_policy="lossguide", max_leaves=7)
    folder = run_local(run)
    assert differences(run, folder) == []
    model = load(folder.path / "model.json", Ensemble)
    assert len(model.trees) == run.num_boost_round * n_parallel * model.n_outputs


@pytest.mark.by_default("source0")
@pytest.mark.parametrize("source", [CREDIT, DEFAULT])
def test_real_rows_grow_xgboosts_trees(real_data, settings, tmp_path, source):
    name, label, drop = source
    data = first_rows(real_data / name, 1000, tmp_path / "rows.csv", drop)
    run = settings(data=data, label=label, parties=1, num_parallel_tree=3, max_depth=4)
    assert differences(run, run_local(run)) == []


@pytest.mark.by_default("multi:softprob")
@pytest.mark.parametrize("objective", ["binary:logistic", "multi:softprob"])
def test_stock_xgboost_predicts_the_same_bits_round_by_round(made, objective):
    draws = {"subsample": 0.6, "colsample_bytree": 0.5}
    run = made("pax", objective, parties=2, num_parallel_tree=3, num_boost_round=4, **draws)
    folder = run_local(run)
    model = load(folder.path / "model.json", Ensemble)
    again = from_text(to_text(model), Ensemble)
    assert (again.num_parallel_tree, len(again.trees)) == (3, 12 * model.n_outputs)
    booster = xgboost.Booster(model_file=folder.path / "model.xgb.json")
    assert booster.num_boosted_rounds() == 4
    values = np.random.default_rng(2).integers(0, 40, (300, 6)).astype(np.float32)
    matrix = xgboost.DMatrix(values, feature_names=booster.feature_names)
    for n_rounds in (1, 3, 4):
        theirs = booster.predict(matrix, output_margin=True, iteration_range=(0, n_rounds))
        ours = predict_margins(model.first_rounds(n_rounds), values)
        np.testing.assert_array_equal(theirs.reshape(ours.shape), ours)


def test_trees_of_a_round_draw_rows_and_columns_of_their_own(made):
    draws = {"subsample": 0.5, "colsample_bytree": 0.5, "num_boost_round": 1}
    folder = run_local(made("pax", parties=2, num_parallel_tree=4, **draws))
    trees = load(folder.path / "model.json", Ensemble).trees
    assert len({tree["hessian"][0] for tree in trees}) == 4
    assert len({frozenset(tree["column"][tree["left"] > 0].tolist()) for tree in trees}) > 1


@pytest.mark.by_default("secure")
@pytest.mark.parametrize("aggregation", ["plain", "secure"])
def test_three_parties_grow_the_trees_of_one(made, aggregation):
    trees = []
    for parties in (1, 3):
        more = {"pax__aggregation": aggregation, "pax__bins": "equal"}
        more |= {"max_bin": 64, "colsample_bytree": 0.5, "test_fraction": 0.0}
        run = made("pax", "multi:softprob", parties=parties, num_parallel_tree=2, **more)
        trees.append(load(run_local(run).path / "model.json", Ensemble).trees)
    for tree, other in zip(*trees, strict=True):
        for name in ("left", "column", "threshold", "default_left"):
            np.testing.assert_array_equal(tree[name], other[name])
        np.testing.assert_allclose(tree["value"], other["value"], rtol=1e-5, atol=1e-7)


def test_rounds_are_scored_by_all_their_trees(made):
    more = {"num_boost_round": 30, "early_stopping_rounds": 2, "eta": 1.0}
    folder = run_local(made("pax", parties=2, num_parallel_tree=3, subsample=0.5, **more))
    lines = [json.loads(line) for line in (folder.path / "rounds.jsonl").read_text().splitlines()]
    best = folder.summary["best_round"]
    assert 0 < best < 30
    assert len(load(folder.path / "model.json", Ensemble).trees) == 3 * best
    scores = folder.summary["metrics"]["valid"]
    assert lines[best - 1]["valid"]["logloss"] == pytest.approx(scores["logloss"], rel=1e-6)


@pytest.mark.slow
def test_a_run_continues_a_model_of_as_many_trees(made):
    first = run_local(made("pax", parties=2, num_parallel_tree=2, num_boost_round=2))
    more = {"init_model": str(first.path), "num_boost_round": 3, "parties": 2}
    whole = run_local(made("pax", num_parallel_tree=2, num_boost_round=5, parties=2))
    continued = run_local(made("pax", num_parallel_tree=2, **more))
    models = [load(each.path / "model.json", Ensemble) for each in (whole, continued)]
    assert [len(model.trees) for model in models] == [10, 10]
    for tree, other in zip(models[0].trees, models[1].trees, strict=True):
        np.testing.assert_array_equal(tree, other)
    for n_parallel, strategy in ((1, "pax"), (3, "pax"), (1, "bagging")):
        parallel = {"num_parallel_tree": n_parallel} if n_parallel > 1 else {}
        with pytest.raises(ConfigError, match=r"^num_parallel_tree of init-model must be the run"):
            run_local(made(strategy, **parallel, **more))


# Divided columns


@pytest.mark.parametrize("seed", seeds(120, (2, 27, 71, 95)))
def test_divided_columns_grow_xgboosts_trees(vertical, tmp_path, seed):
    case = random_case(tmp_path / "random.csv", 3000 + seed, "secureboost")
    run = vertical(**case, num_parallel_tree=2 + seed % 3)
    folder = run_local(run)
    assert differences(run, folder) == []
    model = load(folder.path / "model.json", Ensemble)
    assert len(model.trees) == run.num_boost_round * run.num_parallel_tree * model.n_outputs


@pytest.mark.by_default("multi:softprob")
@pytest.mark.parametrize("objective", ["binary:logistic", "multi:softprob", "reg:squarederror"])
def test_each_tree_is_that_of_the_rows_it_has_drawn(vertical, tmp_path, objective):
    """XGBoost on each draw's gradients grows the same trees, in the second round too."""
    columns = made_columns(objective, n_rows=240)
    data = write_rows(tmp_path / "made.csv", columns)
    small = {"num_boost_round": 2, "max_depth": 3, "max_bin": 8, "secureboost__key_bits": 256}
    draws = {"num_parallel_tree": 3, "subsample": 0.5, "min_child_weight": 0.0}
    run = vertical(data=str(data), label="y", objective=objective, **small, **draws)
    model, whole = load(run_local(run).path / "model.json", Ensemble), Pooled(run)
    matrix, width = whole.matrix(whole.values), model.n_outputs
    parameters = {**whole.parameters, "subsample": 1.0, "num_parallel_tree": 1, "eta": run.eta / 3}
    for number in range(2):
        margins = predict_margins(model.first_rounds(number), whole.values[whole.train])
        of_round = whole.labels[whole.train], whole.weights[whole.train]
        pairs = np.tile(gradients(objective, margins, *of_round), (1, 3, 1))
        drawn = by_tree(draw_rows(pairs, run_of(run), generator(run, number)), 3)
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


def run_of(run):
    return SimpleNamespace(
        goss=False, subsample=run.subsample, num_parallel_tree=run.num_parallel_tree
    )


def generator(run, number):
    return np.random.default_rng([run.seed, number, 1])


def test_parts_of_forests_predict_stop_and_go_on(made):
    more = {"align": "ordered", "secureboost__key_bits": 256, "parties": 2}
    more |= {"secureboost__insecure_small_key": True, "num_parallel_tree": 2, "max_depth": 2}
    more |= {"allow_export": True}
    whole = run_local(made("secureboost", num_boost_round=4, **more))
    first = run_local(made("secureboost", num_boost_round=1, **more))
    init = {"init_model": str(first.path)}
    continued = run_local(made("secureboost", num_boost_round=3, **init, **more))
    models = [load(each.path / "model.json", Ensemble) for each in (whole, continued)]
    assert [len(model.trees) for model in models] == [8, 8]
    for tree, other in zip(models[0].trees, models[1].trees, strict=True):
        np.testing.assert_array_equal(tree, other)
    with pytest.raises(PartyError, match="num-parallel-tree of init-model must be the run"):
        run_local(made("secureboost", **init, **{**more, "num_parallel_tree": 3}))


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


@pytest.mark.slow
def test_sites_take_what_their_plan_says(settings, sites, write_table):
    limits = {"grow_policy": "lossguide", "max_leaves": 9, "max_depth": 0}
    run = settings(num_parallel_tree=2, min_child_weight=0.0, **limits)
    folder = run_sites(run, nodes(sites, write_table))
    trees = load(folder.path / "model.json", Ensemble).trees
    assert len(trees) == 4
    assert max(map(len, trees)) > 3


@pytest.mark.slow
def test_divided_trees_grow_by_gain_at_sites(vertical, sites, write_table):
    ids = range(120)
    bank = {"name": "bank", "data": write_table("bank", 120, id=ids), "id": "id"}
    shop = {"name": "shop", "data": write_table("shop", 120, y=None, id=ids), "id": "id"}
    both = sites(*({**each, "allow-export": True} for each in (bank, {**shop, "label": ""})))
    limits = {"grow_policy": "lossguide", "max_leaves": 6, "max_depth": 0}
    folder = run_sites(vertical(min_child_weight=0.0, align="psi", **limits), both)
    assert {len(tree) for tree in load(folder.path / "model.json", Ensemble).trees} <= {9, 11}


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
