"""The head of FedXGBllr: its maths against XGBoost, and the paper's network in torch."""

import zlib

import numpy as np
import pytest
import torch
import xgboost
from torch import nn

from fedapp import metrics
from fedapp.data.datasets import read_source
from fedapp.records.document import from_text, model_text
from fedapp.runs.local import run_local
from fedapp.site.table import Holdout, share_rows
from fedapp.trees.head import HeadRows, Training, fit_head, forward
from fedapp.trees.objective import base_margin, n_outputs
from fedapp.trees.stacked import (
    HeadShape,
    StackedModel,
    head_margins,
    initial_weights,
    learned_rates,
    split_weights,
    tree_outputs,
    weights_in_unit,
)
from fedapp.trees.xgboost import trees_from_xgboost

BINARY, MULTI, REGRESSION = metrics.OBJECTIVES[:3]
DATA = {BINARY: "breast-cancer", MULTI: "wine", REGRESSION: "diabetes"}
KINDS = ("cnn", "cnn3", "fcnn")

# The head


TABLE_5 = [("cnn", 2, 16193), ("cnn", 5, 6785), ("cnn", 10, 3905)]


@pytest.mark.parametrize(
    ("kind", "n_parties", "n_weights"), [*TABLE_5, ("cnn3", 5, 32257), ("fcnn", 5, 128513)]
)
def test_a_head_has_the_parameters_of_the_papers_table_5(kind, n_parties, n_weights):
    shape = HeadShape(kind, n_parties, 500 // n_parties, 1, 64)
    assert shape.n_weights == n_weights
    assert initial_weights(shape, 0).shape == (n_weights,)


class PaperHead(nn.Module):
    """The heads as the paper draws them, in torch's own layers."""

    def __init__(self, shape, weights):
        super().__init__()
        self.shape, k = shape, shape.n_outputs
        if shape.kind == "fcnn":
            self.first = nn.Linear(shape.n_columns, 256)
        else:
            kernel, stride = (shape.n_trees, shape.n_trees) if shape.kind == "cnn" else (3 * k, k)
            padding = 0 if shape.kind == "cnn" else k
            self.first = nn.Conv1d(1, shape.channels, kernel, stride, padding)
        self.second = nn.Linear(shape.n_hidden, k)
        layers = map(torch.tensor, split_weights(shape, weights))
        for parameter, values in zip(self.parameters(), layers, strict=True):
            parameter.data = values.reshape(parameter.shape)

    def forward(self, outputs):
        if self.shape.kind == "fcnn":
            return self.second(torch.relu(self.first(outputs)))
        hidden = torch.relu(self.first(outputs[:, None]))
        return self.second(hidden.transpose(1, 2).flatten(1))  # party by party


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [1, 3])
def test_a_head_is_the_papers_network_and_learned_rates_its_mean_derivatives(kind, width):
    shape = HeadShape(kind, 3, 5, width, 4)
    rng = np.random.default_rng(1)
    weights = initial_weights(shape, 0) + np.float32(0.01)  # so that biases count
    weights += rng.normal(0, 0.3, shape.n_weights).astype(np.float32)
    outputs = rng.normal(size=(50, shape.n_columns)).astype(np.float32)
    inputs = torch.tensor(outputs, requires_grad=True)
    margins = PaperHead(shape, weights)(inputs)
    layers = [torch.tensor(layer) for layer in split_weights(shape, weights)]
    for found in (head_margins(shape, weights, outputs), forward(shape, layers, inputs).detach()):
        np.testing.assert_allclose(found, margins.detach().numpy(), rtol=1e-5, atol=1e-5)
    expected = np.empty((shape.n_columns,))
    for output in range(width):
        (slopes,) = torch.autograd.grad(margins[:, output].sum(), inputs, retain_graph=True)
        expected[output::width] = slopes.mean(axis=0).numpy()[output::width]
    found = learned_rates(shape, weights, outputs)
    np.testing.assert_allclose(found, expected.reshape(3, 5 * width), rtol=1e-5, atol=1e-5)


def test_a_head_in_another_unit_scales_its_inputs_and_its_margins():
    shape = HeadShape("cnn", 2, 4, 1, 8)
    weights = np.random.default_rng(2).normal(size=shape.n_weights).astype(np.float32)
    outputs = np.random.default_rng(3).normal(size=(6, 8)).astype(np.float32)
    unit = np.float32(40)
    found = head_margins(shape, weights_in_unit(shape, weights, unit), outputs)
    expected = unit * head_margins(shape, weights, outputs / unit)
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_kaiming_weights_have_variance_two_over_fan_in():
    shape = HeadShape("cnn", 2, 250, 1, 64)
    first, bias, second, last = split_weights(shape, initial_weights(shape, 5))
    assert first.var() == pytest.approx(2 / 250, rel=0.05)
    assert second.var() == pytest.approx(2 / 128, rel=0.4)
    assert not bias.any()
    assert not last.any()


# Trees and their outputs


NUMBERS = np.zeros(30, dtype=np.int64)  # categories of each column


@pytest.mark.parametrize("objective", [BINARY, MULTI, REGRESSION])
def test_tree_outputs_and_the_base_margin_add_up_to_the_ensembles_margin(objective):
    table, width = read_source(DATA[objective]), n_outputs(objective, 3)
    values = table.values.copy()
    values[np.random.default_rng(0).random(values.shape) < 0.1] = np.nan
    parameters = {"objective": objective, "max_depth": 5, "base_score": 0.4, "nthread": 1}
    parameters |= {"num_class": 3} if objective == MULTI else {}
    matrix = xgboost.DMatrix(values, table.labels.astype(np.float32))
    booster = xgboost.train(parameters, matrix, 12)
    trees = trees_from_xgboost(booster, NUMBERS).trees
    outputs = tree_outputs([trees], 12 * width, values)
    margins = base_margin(objective, np.float32([0.4])) + outputs.reshape(-1, 12, width).sum(axis=1)
    expected = booster.predict(matrix, output_margin=True).reshape(-1, width)
    np.testing.assert_allclose(margins, expected, atol=1e-5, rtol=1e-5)
    # A party with fewer trees is padded with zeros.
    padded = tree_outputs([trees[: 3 * width], trees], 12 * width, values)
    np.testing.assert_array_equal(padded[:, 12 * width :], outputs)
    np.testing.assert_array_equal(padded[:, : 3 * width], outputs[:, : 3 * width])
    assert not padded[:, 3 * width : 12 * width].any()


# Training


def plain_loop(shape, weights, rows, seed):
    """Line 14 to 19 of Algorithm 1 as anybody would write them in torch: 2 rounds of 3 epochs."""
    outputs, truth = torch.tensor(rows.outputs), torch.tensor(rows.labels)
    for round_id in range(2):
        head = PaperHead(shape, weights)
        adam = torch.optim.Adam(head.parameters(), lr=0.001, betas=(0.5, 0.999))
        rng = np.random.default_rng([seed, round_id, zlib.crc32(b"party-1")])
        for _ in range(3):
            for batch in torch.tensor(rng.permutation(len(truth))).split(64):
                margins = head(outputs[batch])[:, 0] + float(rows.base_margin[0])
                adam.zero_grad()
                nn.functional.binary_cross_entropy_with_logits(margins, truth[batch]).backward()
                adam.step()
        weights = torch.cat([each.detach().flatten() for each in head.parameters()]).numpy()
    return weights


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_one_party_alone_trains_the_head_as_a_plain_torch_loop_does(settings, kind):
    own = {"trees": 6, "max_depth": 3, "rounds": 2, "epochs": 3, "channels": 8, "head": kind}
    given = {f"fedxgbllr__{name}": value for name, value in own.items()}
    run = settings(strategy="fedxgbllr", parties=1, valid_fraction=0.0, seed=3, **given)
    model = from_text(model_text(run_local(run).path / "model.json"), StackedModel)
    table = read_source("breast-cancer")
    rows = share_rows(table, Holdout(0.2, 0.0, 3), "iid", 1)["train"][0]
    assert table.labels is not None
    truth = table.labels[rows].astype(np.float32)
    outputs = tree_outputs(model.ensembles, 6, table.values[rows])
    base, one = base_margin(BINARY, model.base_score), np.float32(1)
    head_rows = HeadRows(outputs, truth, np.ones_like(truth), base, one)
    start = initial_weights(model.shape, 3)
    expected = plain_loop(model.shape, start, head_rows, 3)
    np.testing.assert_allclose(model.weights, expected, atol=2e-5)
    assert np.abs(model.weights - start).max() > 0.01


@pytest.mark.slow
def test_rows_held_back_choose_the_epoch():
    shape = HeadShape("cnn", 2, 4, 1, 8)
    rng = np.random.default_rng(4)
    truth = (rng.random(300) < 0.5).astype(np.float32)  # nothing to learn
    outputs = rng.normal(size=(300, 8)).astype(np.float32)
    base, one = np.float32(0), np.float32(1)
    every = [
        HeadRows(outputs[part], truth[part], np.ones(150, np.float32), base, one)
        for part in (slice(150), slice(150, None))
    ]

    def loss(weights):
        margins = head_margins(shape, weights, every[1].outputs)
        found = metrics.statistics(BINARY, margins, every[1].labels, every[1].weights, 2)
        return metrics.scores(BINARY, found)["logloss"]

    def fit(epochs, patience):
        training = Training(epochs, 16, 0.02, 0.5, 0.999, patience, "cpu")
        start, rng = initial_weights(shape, 1) / 10, np.random.default_rng(0)
        return fit_head(BINARY, shape, start, every[0], training, rng, every[1])[0]

    by_epoch = [loss(fit(epochs, 0)) for epochs in range(12)]
    assert by_epoch[-1] > min(by_epoch)
    assert loss(fit(11, 11)) == pytest.approx(min(by_epoch))
    first_rise = next(e for e in range(1, 12) if by_epoch[e] > min(by_epoch[:e]))
    assert loss(fit(11, 1)) == pytest.approx(min(by_epoch[:first_rise]))


@pytest.mark.parametrize("objective", [BINARY, "count:poisson"])
def test_a_row_counts_by_its_weight(objective):
    shape = HeadShape("cnn", 1, 4, 1, 8)
    rng = np.random.default_rng(5)
    outputs, truth = rng.normal(size=(40, 4)).astype(np.float32), np.float32([0, 1] * 20)
    base, one = np.float32(0), np.float32(1)
    weights = np.float32([0, 3] * 20)  # as if the rows of class 0 were not there
    training = Training(5, 40, 0.01, 0.5, 0.999, 0, "cpu")
    every = HeadRows(outputs, truth, weights, base, one)
    others = HeadRows(outputs[1::2], truth[1::2], np.ones(20, np.float32), base, one)
    start = initial_weights(shape, 0)
    found = [
        fit_head(objective, shape, start, rows, training, np.random.default_rng(0))
        for rows in (every, others)
    ]
    np.testing.assert_allclose(found[0][0], found[1][0], atol=1e-4)
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-3)
