"""Federated linear models: the pooled standardisation, scikit-learn's scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.linear_model import LinearRegression, LogisticRegression

from fedapp import metrics
from fedapp.data.datasets import read_source
from fedapp.data.labels import class_ids, class_names
from fedapp.data.schema import Roles
from fedapp.errors import ConfigError, PartyError, ProtocolError
from fedapp.messages.fedavg_linear import MomentsReply, check_moments
from fedapp.run_folder import RunFolder
from fedapp.runs.local import run_local, simulated_contexts
from fedapp.runs.predict import predict_table
from fedapp.settings import Settings
from fedapp.site.table import Holdout, share_rows
from fedapp.trees.linear import (
    LinearModel,
    Moments,
    linear_from_json,
    merge_moments,
    predict_linear,
    standardised,
)
from fedapp.trees.model import model_text
from fedapp.trees.objective import transform
from strategies.fedavg_linear import FedAvgLinear
from tests.network import die, fails_from, resumed, run
from tests.transcript import lines_of, summary_of
from tests.trees.test_exactness import made_table

MakeSettings = Callable[..., Settings]
OBJECTIVES = ["binary:logistic", "multi:softprob", "reg:squarederror"]


@pytest.fixture
def linear(settings: MakeSettings, tmp_path: Path) -> MakeSettings:
    """Settings of a run on a table with missing values, by its objective."""
    numbers = count(1)

    def make(objective: str = "binary:logistic", rounds: int = 2, **more: Any) -> Settings:
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


def model_of(folder: RunFolder) -> LinearModel:
    return linear_from_json(model_text(folder.path / "model.json"))


def train_rows(settings: Settings) -> tuple[Any, Any]:
    """Values and labels of all parties' training rows."""
    table = read_source(settings.data, Roles(label=settings.label))
    assert table.labels is not None
    holdout = Holdout(settings.test_fraction, settings.valid_fraction, settings.seed)
    shares = share_rows(table, holdout, settings.partition, settings.parties)
    rows = np.sort(np.concatenate(shares["train"]))
    names = class_names(table.labels, settings.objective)
    return table.values[rows], class_ids(table.labels, names)[rows]


def sklearn_scores(settings: Settings, model: LinearModel) -> tuple[dict[str, float], ...]:
    """Scores of a model on the rows it was trained on, and of scikit-learn's."""
    values, truth = train_rows(settings)
    inputs, ones = standardised(values, model.means, model.scales), np.ones(len(values), np.float32)
    if settings.objective == "reg:squarederror":
        margins = LinearRegression().fit(inputs, truth).predict(inputs)
    else:
        l2 = settings.sections["fedavg-linear"]["l2"]
        logistic = LogisticRegression(C=1 / (float(l2) * len(values)), max_iter=3000)
        margins = logistic.fit(inputs, truth).decision_function(inputs)
    theirs = margins.reshape(len(values), -1).astype(np.float32)
    ours = predict_linear(model, values)
    return tuple(metrics.pooled(settings.objective, found, truth, ones) for found in (ours, theirs))


# As good as scikit-learn


@pytest.mark.each_value_once
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("parties", [1, 3])
def test_scores_are_those_of_scikit_learn(
    linear: MakeSettings, objective: str, parties: int
) -> None:
    settings = linear(objective, rounds=40, parties=parties)
    ours, theirs = sklearn_scores(settings, model_of(run_local(settings)))
    for name in {"logloss", "mlogloss", "rmse"} & set(ours):
        assert ours[name] <= theirs[name] * (1.001 if parties == 1 else 1.01)
    for name in {"auc", "accuracy", "r2"} & set(ours):
        assert ours[name] == pytest.approx(theirs[name], abs=0.01)


@pytest.mark.parametrize(
    ("data", "objective", "loss"),
    [
        pytest.param("default-credit", "binary:logistic", "logloss", marks=pytest.mark.slow),
        ("abalone", "reg:squarederror", "rmse"),
        pytest.param("waveform", "multi:softprob", "mlogloss", marks=pytest.mark.slow),
    ],
)
def test_scores_are_those_of_scikit_learn_on_real_rows(
    real_data: Path, settings: MakeSettings, data: str, objective: str, loss: str
) -> None:
    batch = {"fedavg_linear__batch_size": 256 if data == "default-credit" else 64}
    run = settings(strategy="fedavg-linear", data=data, objective=objective, **batch)
    ours, theirs = sklearn_scores(run, model_of(run_local(run)))
    assert ours[loss] <= theirs[loss] * 1.005


def test_a_large_penalty_shrinks_the_weights_but_not_the_bias(linear: MakeSettings) -> None:
    free, bound = (
        model_of(run_local(linear(rounds=20, fedavg_linear__l2=l2))) for l2 in (0.0, 100.0)
    )
    assert np.abs(bound.weights).max() < 0.02 * np.abs(free.weights).max()
    assert abs(bound.bias[0] - free.bias[0]) < 0.2


def test_labels_far_from_zero_are_no_harder(linear: MakeSettings, tmp_path: Path) -> None:
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


def test_the_standardisation_is_the_pooled_one(linear: MakeSettings) -> None:
    settings = linear(partition="sizes:0.7,0.25,0.05")
    model = model_of(run_local(settings))
    values, _ = train_rows(settings)
    np.testing.assert_allclose(model.means, np.nanmean(values, axis=0, dtype=np.float64))
    np.testing.assert_allclose(model.scales, np.nanstd(values, axis=0, dtype=np.float64))


# Exchanges, messages, failures


@pytest.mark.parametrize("rounds", [1, 4])
def test_a_round_takes_one_exchange(linear: MakeSettings, rounds: int) -> None:
    folder = run_local(linear("multi:softprob", rounds=rounds))
    assert summary_of(folder)["exchanges"] == 3 + rounds + 1
    lines = lines_of(folder.rounds)
    assert [line["round"] for line in lines] == list(range(1, rounds + 1))
    assert {line["rounds"] for line in lines} == {rounds}
    assert lines[-1]["train"]["mlogloss"] < np.log(3)


def test_the_summary_scores_the_model_that_was_written(linear: MakeSettings) -> None:
    settings = linear(rounds=5)
    folder = run_local(settings)
    values, truth = train_rows(settings)
    margins = predict_linear(model_of(folder), values)
    ones = np.ones(len(values), np.float32)
    exact = metrics.pooled("binary:logistic", margins, truth, ones)
    found = summary_of(folder)["metrics"]["train"]
    assert found["logloss"] == pytest.approx(exact["logloss"], rel=1e-6)
    assert found["auc"] == pytest.approx(exact["auc"], abs=1e-3)


def test_early_stopping_keeps_the_model_of_the_best_round(linear: MakeSettings) -> None:
    settings = linear(rounds=40, early_stopping_rounds=3, valid_fraction=0.3)
    folder = run_local(settings)
    summary, lines = summary_of(folder), lines_of(folder.rounds)
    losses = [line["valid"]["logloss"] for line in lines]
    assert len(lines) == summary["best_round"] + 3 < 40
    assert summary["best_round"] == int(np.argmin(losses)) + 1
    best = lines[summary["best_round"] - 1]["valid"]["logloss"]
    assert summary["metrics"]["valid"]["logloss"] == pytest.approx(best, rel=1e-9)


def test_the_best_round_is_known_where_rounds_run_out(linear: MakeSettings) -> None:
    folder = run_local(linear(rounds=3, early_stopping_rounds=5, valid_fraction=0.3))
    summary, lines = summary_of(folder), lines_of(folder.rounds)
    assert summary["exchanges"] == 3 + 3 + 1 + 1
    best = lines[summary["best_round"] - 1]["valid"]["logloss"]
    assert summary["metrics"]["valid"]["logloss"] == pytest.approx(best, rel=1e-9)


def test_a_lost_party_is_left_out(linear: MakeSettings) -> None:
    folder = run(linear(rounds=3, min_parties=2), app=fails_from(4))
    assert [gone["party"] for gone in summary_of(folder)["left_out"]] == ["party-2"]
    assert summary_of(folder)["exchanges"] == 3 + 3 + 1
    with pytest.raises(PartyError, match=r"^party-2 \(step 4\): broke$"):
        run(linear(rounds=3), app=fails_from(4))


@pytest.mark.each_value_once
@pytest.mark.parametrize("how", ["dies_before_sending", "dies_before_reading"])
@pytest.mark.parametrize("step", [2, 4, 6])
def test_a_resumed_run_ends_in_the_same_model(linear: MakeSettings, how: str, step: int) -> None:
    more = {"early_stopping_rounds": 5, "valid_fraction": 0.2}
    whole, settings = (linear(rounds=3, **more) for _ in range(2))
    same = (run_local(whole).path / "model.json").read_bytes()
    die(settings, **{how: step})
    folder = run_local(resumed(settings), simulated_contexts(settings))
    assert (folder.path / "model.json").read_bytes() == same
    assert [line["round"] for line in lines_of(folder.rounds)] == [1, 2, 3]


def test_the_same_seed_gives_the_same_model(linear: MakeSettings) -> None:
    first, again, other = (
        (run_local(linear(seed=seed, test_fraction=0.0, valid_fraction=0.0)).path / "model.json")
        for seed in (1, 1, 2)
    )
    assert first.read_bytes() == again.read_bytes()
    assert first.read_bytes() != other.read_bytes()


def test_predict_gives_the_models_predictions(linear: MakeSettings, tmp_path: Path) -> None:
    settings = linear()
    model, output = model_of(run_local(settings)), tmp_path / "scores.csv"
    table = read_source(settings.data, Roles(label=settings.label))
    assert predict_table(Path(settings.run_dir), settings.data, "", output).n_rows == table.n_rows
    written = np.array([line.split(",")[1:] for line in output.read_text().splitlines()[1:]])
    expected = transform(model.objective, predict_linear(model, table.values))
    np.testing.assert_allclose(written.astype(float), expected, rtol=1e-5)


# Settings


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("rounds", 0, ">= 1, got 0"),
        ("rounds", 2.5, "a whole number, got 2.5"),
        ("local-epochs", 0, ">= 1, got 0"),
        ("learning-rate", 0, "> 0.0, got 0"),
        ("learning-rate", -0.1, "> 0.0, got -0.1"),
        ("learning-rate", "fast", "a number, got 'fast'"),
        ("batch-size", 0, ">= 1, got 0"),
        ("batch-size", 2**31, "< 2147483648, got 2147483648"),
        ("l2", -1.0, ">= 0.0, got -1.0"),
        ("l2", float("nan"), "a number, got nan"),
    ],
)
def test_a_bad_setting_is_refused(
    settings: MakeSettings, name: str, value: object, rule: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        FedAvgLinear.section_settings(settings(**{f"fedavg-linear.{name}": value}))
    assert str(caught.value) == f"fedavg-linear.{name} must be {rule}"


def test_moments_of_other_columns_are_refused() -> None:
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
    with pytest.raises(ProtocolError, match=r"counts must be of shape \(2,\), got \(3,\)"):
        check_moments("bank", reply, 2, 2, 1, 0)
    with pytest.raises(ProtocolError, match="label_sums must be 0 to 2"):
        check_moments("bank", replace(reply, label_sums=np.full(1, 3.0)), 3, 2, 1, 0)
    with pytest.raises(ProtocolError, match="label_sums must be 3, one an output, got 1"):
        check_moments("bank", reply, 3, 3, 3, 0)
    check_moments("bank", replace(reply, label_sums=np.float64([0, 2, 0])), 3, 3, 3, 0)
    with pytest.raises(ProtocolError, match="label_sums must be 0 to 2"):
        check_moments("bank", replace(reply, label_sums=np.float64([-1, 2, 1])), 3, 3, 3, 0)


def test_moments_of_a_party_without_a_value_leave_those_of_the_others() -> None:
    none = Moments(*(np.zeros(2) for _ in range(3)))
    one = Moments(np.array([2.0, 0]), np.array([1.5, 0]), np.array([0.5, 0]))
    other = Moments(np.array([6.0, 3]), np.array([3.5, -1]), np.array([4.0, 6]))
    merged = merge_moments([none, one, none, other])
    np.testing.assert_array_equal(merged.counts, [8, 3])
    np.testing.assert_array_equal(merged.means, [3, -1])
    # 0.5 + 4 and 2 * 1.5^2 + 6 * 0.5^2 between the parties
    np.testing.assert_array_equal(merged.squares, [10.5, 6])
