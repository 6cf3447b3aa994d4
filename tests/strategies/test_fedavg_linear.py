"""Federated linear models: the pooled standardisation, scikit-learn's scores."""

from contextlib import nullcontext

import numpy as np
import pytest

from fedapp.errors import ProtocolError
from fedapp.messages.fedavg_linear import MomentsReply, check_moments
from fedapp.runs.local import run_local
from fedapp.trees.linear import LinearModel, Moments, merge_moments, moments
from tests.contract.methods import train_rows
from tests.federated import model_of
from tests.tables import made_columns


@pytest.fixture
def linear(made):
    """Settings of a run on a table with missing values, by its objective."""

    def make(objective="binary:logistic", rounds=2, **more):
        own = {"fedavg_linear__rounds": rounds, "fedavg_linear__batch_size": 64}
        return made("fedavg-linear", objective, **{**own, **more})

    return make


def test_a_large_penalty_shrinks_the_weights_but_not_the_bias(linear):
    settings = [linear(rounds=20, fedavg_linear__l2=l2) for l2 in (0.0, 100.0)]
    free, bound = (model_of(run_local(one), LinearModel) for one in settings)
    assert np.abs(bound.weights).max() < 0.02 * np.abs(free.weights).max()
    share = train_rows(settings[0])[1].mean()
    assert bound.bias[0] == pytest.approx(np.log(share / (1 - share)), abs=0.1)


def test_labels_far_from_zero_are_no_harder(linear):
    columns, scores = made_columns("reg:squarederror"), []
    for labels in (columns["y"], 1e4 + 100 * columns["y"]):
        run = linear("reg:squarederror", rounds=10, columns={**columns, "y": labels})
        scores.append(run_local(run).summary["metrics"]["test"]["r2"])
    assert scores[0] == pytest.approx(scores[1], abs=1e-4)


def test_the_standardisation_is_the_pooled_one(linear):
    settings = linear(partition="sizes:0.7,0.25,0.05")
    model = model_of(run_local(settings), LinearModel)
    values, _ = train_rows(settings)
    np.testing.assert_allclose(model.means, np.nanmean(values, axis=0, dtype=np.float64))
    np.testing.assert_allclose(model.scales, np.nanstd(values, axis=0, dtype=np.float64))


@pytest.mark.parametrize(
    ("label_sums", "sizes", "rule"),
    [
        ([1.0], (3, 2, 1), ""),
        ([1.0], (2, 2, 1), r"counts must have size 2 \(n_inputs\) .* got 3"),
        ([3.0], (3, 2, 1), "label_sums must be 0 to 2"),
        ([1.0], (3, 3, 3), r"label_sums must have size 3 .* got 1"),
        ([-1.0, 2, 1], (3, 3, 3), "label_sums must be 0 to 2"),
    ],
)
def test_moments_of_other_columns_are_refused(label_sums, sizes, rule):
    three, sums = np.zeros(3), {"label_sums": np.array(label_sums), "weight_sum": 2.0}
    of_columns = {"counts": three, "means": three, "squares": three}
    reply = MomentsReply(**sums, unseen=np.empty(0, np.int64), **of_columns)
    with pytest.raises(ProtocolError, match=rule) if rule else nullcontext():
        check_moments("bank", reply, *sizes, 0)


def test_moments_of_a_party_without_a_value_leave_those_of_the_others():
    none = Moments(*(np.zeros(2) for _ in range(3)))
    one = Moments(np.array([2.0, 0]), np.array([1.5, 0]), np.array([0.5, 0]))
    other = Moments(np.array([6.0, 3]), np.array([3.5, -1]), np.array([4.0, 6]))
    merged = merge_moments([none, one, none, other])
    np.testing.assert_array_equal(merged.counts, [8, 3])
    np.testing.assert_array_equal(merged.means, [3, -1])
    # 0.5 + 4 and 2 * 1.5^2 + 6 * 0.5^2 between the parties
    np.testing.assert_array_equal(merged.squares, [10.5, 6])


@pytest.mark.parametrize("categories", [(), (None, ("a", "b"), None)])
def test_moments_do_not_depend_on_the_order_in_memory(categories):
    rows = np.random.default_rng(0).normal(size=(500, 3)).astype(np.float32)
    weights = np.ones(500, np.float32)
    by_rows, by_columns = (
        moments(values, weights, categories) for values in (rows, np.asfortranarray(rows))
    )
    for name in ("counts", "means", "squares"):
        np.testing.assert_array_equal(getattr(by_rows, name), getattr(by_columns, name))
