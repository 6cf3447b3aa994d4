"""Bagging: the model moves by the mean of the parties' steps, and is XGBoost's for one party."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xgboost

from fedapp.data.labels import class_ids, class_names
from fedapp.data.read import load_table
from fedapp.data.schema import Roles
from fedapp.errors import ConfigError, PartyError
from fedapp.run_folder import RunFolder
from fedapp.runs.baselines import xgboost_parameters
from fedapp.runs.local import run_local, simulated_contexts
from fedapp.settings import Settings
from fedapp.site.settings import SiteConfig
from fedapp.site.table import Holdout, read_subsets
from fedapp.trees.model import Ensemble, load_model
from fedapp.trees.objective import base_score, label_sums
from fedapp.trees.predict import predict_margins
from strategies.local_boosting import Bagging
from tests.network import die, fails_from, resumed, run
from tests.reference import compare_trees
from tests.transcript import arrays_of, lines_of, listen, summary_of
from tests.trees.test_exactness import pooled_booster, weighted_copy

MakeSettings = Callable[..., Settings]
Simulate = Callable[[Settings], RunFolder]
OBJECTIVES = ["binary:logistic", "multi:softprob", "reg:squarederror"]


@pytest.fixture
def bag(boosted: MakeSettings) -> MakeSettings:
    """Settings of a run of bagging, by its objective."""
    return partial(boosted, "bagging")


def model_of(folder: RunFolder) -> Ensemble:
    return load_model(folder.path / "model.json")


# One party


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_one_party_is_xgboost_tree_by_tree(bag: MakeSettings, objective: str) -> None:
    run = bag(objective, parties=1, num_boost_round=6, max_depth=4)
    found = compare_trees(model_of(run_local(run)), pooled_booster(run))
    assert found.n_trees == (18 if objective == "multi:softprob" else 6)
    assert found.differing == 0
    assert found.leaf_error <= 1e-6


def test_one_party_is_xgboost_with_penalties_and_local_rounds(bag: MakeSettings) -> None:
    penalties = {"lambda": 0.5, "alpha": 0.3, "gamma": 0.2, "min_child_weight": 3.0}
    once = bag(parties=1, num_boost_round=6, **penalties)
    twice = bag(parties=1, num_boost_round=3, bagging__local_rounds=2, **penalties)
    for settings in (once, twice):
        found = compare_trees(model_of(run_local(settings)), pooled_booster(once))
        assert (found.n_trees, found.differing) == (6, 0)
        assert found.leaf_error <= 1e-6


def test_one_party_is_xgboost_with_sample_weights_on_real_rows(
    real_data: Path, settings: MakeSettings, tmp_path: Path
) -> None:
    data = str(weighted_copy("abalone", tmp_path / "weighted.csv"))
    run = settings(
        strategy="bagging",
        data=data,
        label="y",
        weight="w",
        objective="reg:squarederror",
        parties=1,
        num_boost_round=5,
        max_depth=5,
    )
    found = compare_trees(model_of(run_local(run)), pooled_booster(run))
    assert (found.n_trees, found.differing) == (5, 0)
    assert found.leaf_error <= 1e-6


# Several parties


class Reference:
    """Bagging as its docstring says it, with XGBoost's own predictions as the parties' steps."""

    def __init__(self, settings: Settings, n_rounds: int) -> None:
        tables = self._tables(settings)
        names = class_names(np.concatenate([t.labels for t in tables]), settings.objective)
        self.labels = [class_ids(table.labels, names) for table in tables]
        self.values = [table.values for table in tables]
        every = np.concatenate(self.labels)
        ones = np.ones(len(every), np.float32)
        self.parameters = xgboost_parameters(settings, every, ones, every)
        self.width = int(self.parameters.get("num_class", 1))
        sums = label_sums(settings.objective, every, ones, len(names))
        score = base_score(settings.objective, sums, len(every))
        nothing = Ensemble(settings.objective, score, (), (), ())
        self.margins = np.tile(nothing.base_margin, (len(every), 1))
        for _ in range(n_rounds):
            self._round()

    @staticmethod
    def _tables(settings: Settings) -> list[Any]:
        holdout = Holdout(settings.test_fraction, settings.valid_fraction, settings.seed)
        n = settings.parties
        return [
            read_subsets(
                SiteConfig(
                    f"party-{share + 1}",
                    settings.data,
                    settings.label,
                    partition=settings.partition,
                    share=share,
                    n_shares=n,
                ),
                holdout,
            )["train"]
            for share in range(n)
        ]

    def _round(self) -> None:
        ends = np.cumsum([len(table) for table in self.values])
        parts = np.split(self.margins, ends[:-1])
        mean = np.zeros_like(self.margins, dtype=np.float64)
        for values, truth, margins in zip(self.values, self.labels, parts, strict=True):
            matrix = xgboost.DMatrix(values, truth, base_margin=margins)
            trained = xgboost.train(self.parameters, matrix, 1)
            whole = xgboost.DMatrix(np.concatenate(self.values), base_margin=self.margins)
            after = trained.predict(whole, output_margin=True).reshape(self.margins.shape)
            mean += (after - self.margins) * (len(values) / len(self.margins))
        self.margins = (self.margins + mean).astype(np.float32)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_margins_move_by_the_mean_of_the_parties_steps(bag: MakeSettings, objective: str) -> None:
    settings = bag(objective, partition="sizes:0.6,0.3,0.1", num_boost_round=3)
    model, reference = model_of(run_local(settings)), Reference(settings, 3)
    margins = predict_margins(model, np.concatenate(reference.values))
    np.testing.assert_allclose(margins, reference.margins, atol=2e-5)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_step_of_three_equal_parties_is_no_longer_than_that_of_one(
    bag: MakeSettings, objective: str
) -> None:
    one, three = (
        model_of(run_local(bag(objective, parties=n, num_boost_round=1, valid_fraction=0.0)))
        for n in (1, 3)
    )
    values = load_table(Path(bag(objective).data), Roles(label="y")).values
    steps = [np.abs(predict_margins(m, values) - m.base_margin).mean() for m in (one, three)]
    assert 0.7 < steps[1] / steps[0] < 1.2


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_stock_xgboost_predicts_the_same_from_the_export(bag: MakeSettings, objective: str) -> None:
    settings = bag(objective, num_boost_round=4, bagging__local_rounds=2)
    folder = run_local(settings)
    table = load_table(Path(settings.data), Roles(label="y"))
    stock = xgboost.Booster(model_file=folder.path / "model.xgb.json")
    matrix = xgboost.DMatrix(table.values, feature_names=list(table.columns))
    theirs = stock.predict(matrix, output_margin=True).reshape(table.n_rows, -1)
    ours = predict_margins(model_of(folder), table.values)
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    shap = stock.predict(matrix, pred_contribs=True)
    np.testing.assert_allclose(shap.sum(axis=-1).reshape(theirs.shape), theirs, atol=1e-4)


@pytest.mark.parametrize(
    ("data", "objective", "score", "least"),
    [
        ("breast-cancer", "binary:logistic", "auc", 0.97),
        ("digits", "multi:softprob", "accuracy", 0.93),
        ("diabetes", "reg:squarederror", "r2", 0.3),
    ],
)
def test_every_objective_is_learned(
    settings: MakeSettings, data: str, objective: str, score: str, least: float
) -> None:
    run = settings(
        strategy="bagging", data=data, objective=objective, num_boost_round=12, max_depth=3
    )
    assert summary_of(run_local(run))["metrics"]["test"][score] > least


def test_a_party_of_one_class_and_one_of_no_weight_train(
    settings: MakeSettings, write_table: Callable[..., Path], sites: Callable[..., Any]
) -> None:
    tables = [
        write_table("both", w=[1] * 40),
        write_table("one", seed=1, y=[1] * 40, w=[1] * 40),
        write_table("none", seed=2, w=[0] * 40),
    ]
    nodes = sites(*({"name": path.stem, "data": path, "weight": "w"} for path in tables))
    folder = run_local(settings(strategy="bagging", weight="w"), nodes)
    trees = model_of(folder).trees
    assert len(trees) == 6
    assert all((tree["value"] == 0).all() for tree in trees[1::3])  # names: both, none, one
    assert all((tree["value"] != 0).any() for tree in trees[2::3])


def test_rows_and_columns_are_drawn_anew_and_the_same_for_a_seed(bag: MakeSettings) -> None:
    def model(**more: Any) -> bytes:
        draws = {"subsample": 0.5, "colsample_bytree": 0.5}
        return (run_local(bag(**draws, **more)).path / "model.json").read_bytes()

    assert model() == model()
    assert model() != model(seed=7)


# Exchanges and messages


@pytest.mark.parametrize("rounds", [1, 4])
def test_a_round_takes_one_exchange(bag: MakeSettings, rounds: int) -> None:
    folder = run_local(bag("multi:softprob", num_boost_round=rounds, bagging__local_rounds=2))
    summary = summary_of(folder)
    assert summary["exchanges"] == 3 + rounds + 1
    assert summary["trees"] == rounds * 3 * 3 * 2
    lines = lines_of(folder.rounds)
    assert [line["round"] for line in lines] == list(range(1, rounds + 1))
    total = {key: sum(line["bytes"][key] for line in lines) for key in lines[0]["bytes"]}
    assert total == summary["bytes"]


def test_a_tree_travels_to_a_party_once_and_without_gains(bag: MakeSettings) -> None:
    folder, app = listen(bag(num_boost_round=3))
    told = [arrays_of(request) for kind, request, _ in app.heard if kind == "train.bagging_boost"]
    assert not {"gains", "hessians", "weights"} & set(told[0])
    nodes = sum(len(tree) for tree in model_of(folder).trees[:6])  # the last round's: at the end
    assert sum(len(arrays["lefts"]) for arrays in told) == 3 * nodes


# Early stopping, losses, resumption


def test_early_stopping_cuts_the_model_back_to_its_best_round(bag: MakeSettings) -> None:
    run = bag(num_boost_round=40, eta=1.0, early_stopping_rounds=3, valid_fraction=0.3)
    folder = run_local(run)
    summary, lines = summary_of(folder), lines_of(folder.rounds)
    losses = [line["valid"]["logloss"] for line in lines]
    assert len(lines) < 40
    assert summary["best_round"] == int(np.argmin(losses)) + 1
    assert summary["trees"] == 3 * summary["best_round"]
    assert summary["metrics"]["valid"]["logloss"] == pytest.approx(min(losses), abs=1e-6)


def test_the_best_round_is_known_where_rounds_run_out(bag: MakeSettings) -> None:
    run = bag(num_boost_round=3, early_stopping_rounds=3, valid_fraction=0.3)
    summary = summary_of(run_local(run))
    assert summary["exchanges"] == 3 + 3 + 1 + 1
    assert summary["trees"] == 3 * summary["best_round"]


def test_a_lost_party_is_left_out_and_the_others_weigh_more(bag: MakeSettings) -> None:
    left = model_of(run(bag(num_boost_round=3, min_parties=2), app=fails_from(4)))
    whole = model_of(run_local(bag(num_boost_round=3)))
    assert len(left.trees) == 3 + 2 + 2
    for ours, theirs in zip(left.trees[:3], whole.trees[:3], strict=True):
        np.testing.assert_array_equal(ours, theirs)
    # In the second round the first party grew the same tree, for 1/2 in place of about 1/3.
    leaf = int(np.argmax(np.abs(whole.trees[3]["value"])))
    ratio = left.trees[3]["value"][leaf] / whole.trees[3]["value"][leaf]
    assert ratio == pytest.approx(1.5, abs=0.02)


def test_a_lost_party_stops_a_run_that_needs_all(bag: MakeSettings) -> None:
    with pytest.raises(PartyError, match=r"^party-2 \(step 4\): broke$"):
        run(bag(num_boost_round=3), app=fails_from(4))


@pytest.mark.each_value_once
@pytest.mark.parametrize("how", ["dies_before_sending", "dies_before_reading"])
@pytest.mark.parametrize("step", [2, 3, 5, 6])
def test_a_resumed_run_ends_in_the_same_model(bag: MakeSettings, how: str, step: int) -> None:
    whole = run_local(bag(num_boost_round=3, subsample=0.7))
    settings = bag(num_boost_round=3, subsample=0.7)
    die(settings, **{how: step})
    folder = run_local(resumed(settings), simulated_contexts(settings))
    assert (folder.path / "model.json").read_bytes() == (whole.path / "model.json").read_bytes()
    assert [line["round"] for line in lines_of(folder.rounds)] == [1, 2, 3]


@pytest.mark.slow
def test_flowers_simulation_gives_the_model_of_the_local_engine(
    bag: MakeSettings, simulate: Simulate
) -> None:
    local, simulated = run_local(bag()), simulate(bag())
    ours = (local.path / "model.json").read_bytes()
    assert (simulated.path / "model.json").read_bytes() == ours


# Settings


@pytest.mark.parametrize(
    ("value", "rule"),
    [
        (0, "bagging.local-rounds must be >= 1, got 0"),
        (1.5, "bagging.local-rounds must be a whole number, got 1.5"),
        ("two", "bagging.local-rounds must be a whole number, got 'two'"),
        (10**7, "bagging.local-rounds must be <= 1000000, got 10000000"),
    ],
)
def test_a_bad_setting_is_refused(bag: MakeSettings, value: object, rule: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Bagging.section_settings(bag(bagging__local_rounds=value))
    assert str(caught.value) == rule
