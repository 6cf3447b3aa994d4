"""Federated linear models: the pooled standardisation, scikit-learn's scores."""

from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from fedapp.errors import ProtocolError
from fedapp.messages.fedavg_linear import MomentsReply, check_moments
from fedapp.records.document import from_text, model_text
from fedapp.runs.local import run_local
from fedapp.trees.linear import LinearModel, Moments, merge_moments
from tests.contract.methods import scikit_learn_scores, train_rows
from tests.federated import summary_of
from tests.tables import made_table


@pytest.fixture
def linear(settings, tmp_path):
    """Settings of a run on a table with missing values, by its objective."""
    numbers = count(1)

    def make(objective="binary:logistic", rounds=2, **more):
        data = tmp_path / f"{objective[:5]}.csv"
        if not data.exists():
            made_table(data, objective, n_values=40, n_rows=400)
        given = {
            "run_dir": str(tmp_path / f"run-{next(numbers)}"),
            "data": str(data),
            "label": "y",
            "fedavg_linear__rounds": rounds,
            "fedavg_linear__batch_size": 64,
            **more,
        }
        return settings(strategy="fedavg-linear", objective=objective, **given)

    return make


def model_of(folder):
    return from_text(model_text(folder.path / "model.json"), LinearModel)


# As good as scikit-learn


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "objective", "loss"),
    [
        pytest.param("default-credit", "binary:logistic", "logloss", marks=pytest.mark.slow),
        ("abalone", "reg:squarederror", "rmse"),
        pytest.param("waveform", "multi:softprob", "mlogloss", marks=pytest.mark.slow),
    ],
)
def test_scores_are_those_of_scikit_learn_on_real_rows(real_data, settings, data, objective, loss):
    batch = {"fedavg_linear__batch_size": 256 if data == "default-credit" else 64}
    run = settings(strategy="fedavg-linear", data=data, objective=objective, **batch)
    ours, theirs = scikit_learn_scores(run, model_of(run_local(run)))
    assert ours[loss] <= theirs[loss] * 1.005


def test_a_large_penalty_shrinks_the_weights_but_not_the_bias(linear):
    free, bound = (
        model_of(run_local(linear(rounds=20, fedavg_linear__l2=l2))) for l2 in (0.0, 100.0)
    )
    assert np.abs(bound.weights).max() < 0.02 * np.abs(free.weights).max()
    assert abs(bound.bias[0] - free.bias[0]) < 0.2


def test_labels_far_from_zero_are_no_harder(linear, tmp_path):
    near = linear("reg:squarederror", rounds=10)
    header, *lines = Path(near.data).read_text().splitlines()
    rows = [line.rpartition(",") for line in lines]
    far = tmp_path / "far.csv"
    moved = [f"{values},{1e4 + 100 * float(label)!r}" for values, _, label in rows]
    far.write_text("\n".join([header, *moved]) + "\n")
    scores = [
        summary_of(run_local(settings))["metrics"]["test"]["r2"]
        for settings in (near, linear("reg:squarederror", rounds=10, data=str(far)))
    ]
    assert scores[0] == pytest.approx(scores[1], abs=1e-4)


# Standardisation


def test_the_standardisation_is_the_pooled_one(linear):
    settings = linear(partition="sizes:0.7,0.25,0.05")
    model = model_of(run_local(settings))
    values, _ = train_rows(settings)
    np.testing.assert_allclose(model.means, np.nanmean(values, axis=0, dtype=np.float64))
    np.testing.assert_allclose(model.scales, np.nanstd(values, axis=0, dtype=np.float64))


# Settings


def test_moments_of_other_columns_are_refused():
    three = np.zeros(3)
    reply = MomentsReply(
        label_sums=np.ones(1),
        weight_sum=2.0,
        unseen=np.empty(0, np.int64),
        counts=three,
        means=three,
        squares=three,
    )
    check_moments("bank", reply, 3, 2, 1, 0)
    with pytest.raises(ProtocolError, match=r"counts must have size 2 \(n_inputs\) .* got 3"):
        check_moments("bank", reply, 2, 2, 1, 0)
    with pytest.raises(ProtocolError, match="label_sums must be 0 to 2"):
        check_moments("bank", replace(reply, label_sums=np.full(1, 3.0)), 3, 2, 1, 0)
    with pytest.raises(ProtocolError, match=r"label_sums must have size 3 .* got 1"):
        check_moments("bank", reply, 3, 3, 3, 0)
    check_moments("bank", replace(reply, label_sums=np.float64([0, 2, 0])), 3, 3, 3, 0)
    with pytest.raises(ProtocolError, match="label_sums must be 0 to 2"):
        check_moments("bank", replace(reply, label_sums=np.float64([-1, 2, 1])), 3, 3, 3, 0)


def test_moments_of_a_party_without_a_value_leave_those_of_the_others():
    none = Moments(*(np.zeros(2) for _ in range(3)))
    one = Moments(np.array([2.0, 0]), np.array([1.5, 0]), np.array([0.5, 0]))
    other = Moments(np.array([6.0, 3]), np.array([3.5, -1]), np.array([4.0, 6]))
    merged = merge_moments([none, one, none, other])
    np.testing.assert_array_equal(merged.counts, [8, 3])
    np.testing.assert_array_equal(merged.means, [3, -1])
    # 0.5 + 4 and 2 * 1.5^2 + 6 * 0.5^2 between the parties
    np.testing.assert_array_equal(merged.squares, [10.5, 6])
