"""Bagging: the model moves by the mean of the parties' steps, and is XGBoost's for one party."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import xgboost

from fedapp.data.labels import class_ids, class_names
from fedapp.data.read import load_table
from fedapp.data.schema import Roles
from fedapp.runs.baselines import xgboost_parameters
from fedapp.runs.local import run_local
from fedapp.site.settings import SiteConfig
from fedapp.site.table import Holdout, read_subsets
from fedapp.trees.model import Ensemble
from fedapp.trees.objective import base_score, label_sums
from fedapp.trees.predict import predict_margins
from tests.federated import model_of, summary_of
from tests.network import fails_from, run
from tests.pooled import pooled_booster
from tests.reference import compare_trees
from tests.tables import weighted_copy
from tests.transcript import arrays_of, listen

OBJECTIVES = ["binary:logistic", "multi:softprob", "reg:squarederror"]


@pytest.fixture
def bag(made):
    """Settings of a run of bagging, by its objective."""
    return partial(made, "bagging")


# One party


def test_one_party_is_xgboost_with_penalties_and_local_rounds(bag):
    penalties = {"lambda": 0.5, "alpha": 0.3, "gamma": 0.2, "min_child_weight": 3.0}
    once = bag(parties=1, num_boost_round=6, **penalties)
    twice = bag(parties=1, num_boost_round=3, bagging__local_rounds=2, **penalties)
    for settings in (once, twice):
        found = compare_trees(model_of(run_local(settings)), pooled_booster(once))
        assert (found.n_trees, found.differing) == (6, 0)
        assert found.leaf_error <= 1e-6


def test_one_party_is_xgboost_with_sample_weights_on_real_rows(real_data, settings, tmp_path):
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

    def __init__(self, settings, n_rounds):
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
    def _tables(settings):
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

    def _round(self):
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


@pytest.mark.by_default("multi:softprob")
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_margins_move_by_the_mean_of_the_parties_steps(bag, objective):
    settings = bag(objective, partition="sizes:0.6,0.3,0.1", num_boost_round=3)
    model, reference = model_of(run_local(settings)), Reference(settings, 3)
    margins = predict_margins(model, np.concatenate(reference.values))
    np.testing.assert_allclose(margins, reference.margins, atol=2e-5)


@pytest.mark.by_default("multi:softprob")
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_step_of_three_equal_parties_is_no_longer_than_that_of_one(bag, objective):
    one, three = (
        model_of(run_local(bag(objective, parties=n, num_boost_round=1, valid_fraction=0.0)))
        for n in (1, 3)
    )
    values = load_table(Path(bag(objective).data), Roles(label="y")).values
    steps = [np.abs(predict_margins(m, values) - m.base_margin).mean() for m in (one, three)]
    assert 0.7 < steps[1] / steps[0] < 1.2


@pytest.mark.slow
@pytest.mark.by_default("digits*-cyclic")
@pytest.mark.parametrize("strategy", ["bagging", "cyclic"])
@pytest.mark.parametrize(
    ("data", "objective", "score", "least"),
    [
        ("breast-cancer", "binary:logistic", "auc", 0.97),
        ("digits", "multi:softprob", "accuracy", 0.93),
        ("diabetes", "reg:squarederror", "r2", 0.25),
    ],
)
def test_every_objective_is_learned(settings, strategy, data, objective, score, least):
    run = settings(
        strategy=strategy, data=data, objective=objective, num_boost_round=12, max_depth=3
    )
    assert summary_of(run_local(run))["metrics"]["test"][score] > least


def test_a_party_of_one_class_and_one_of_no_weight_train(settings, write_table, sites):
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


# Exchanges and messages


def test_a_tree_travels_to_a_party_once_and_without_gains(bag):
    folder, app = listen(bag(num_boost_round=3))
    told = [arrays_of(request) for kind, request, _ in app.heard if kind == "train.bagging_boost"]
    assert not {"gains", "hessians", "weights"} & set(told[0])
    nodes = sum(len(tree) for tree in model_of(folder).trees[:6])  # the last round's: at the end
    assert sum(len(arrays["lefts"]) for arrays in told) == 3 * nodes


# Early stopping, losses, resumption


def test_a_lost_party_is_left_out_and_the_others_weigh_more(bag):
    left = model_of(run(bag(num_boost_round=3, min_parties=2), app=fails_from(4)))
    whole = model_of(run_local(bag(num_boost_round=3)))
    assert len(left.trees) == 3 + 2 + 2
    for ours, theirs in zip(left.trees[:3], whole.trees[:3], strict=True):
        np.testing.assert_array_equal(ours, theirs)
    # In the second round the first party grew the same tree, for 1/2 in place of about 1/3.
    leaf = int(np.argmax(np.abs(whole.trees[3]["value"])))
    ratio = left.trees[3]["value"][leaf] / whole.trees[3]["value"][leaf]
    assert ratio == pytest.approx(1.5, abs=0.02)
