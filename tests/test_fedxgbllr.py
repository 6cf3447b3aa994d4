"""FedXGBllr: its maths against XGBoost and torch, what it sends, and what comes out."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xgboost
from flwr.app import Context, Error, Message
from torch import nn

from fedapp import metrics
from fedapp.client_app import SiteApp
from fedapp.config import Settings
from fedapp.data.datasets import read_source
from fedapp.errors import DataError, PartyError
from fedapp.messages import fedxgbllr, hello, labels
from fedapp.predict import predict_table
from fedapp.report.page import write_report
from fedapp.run_folder import RunFolder
from fedapp.server_app import train
from fedapp.site.rows import Holdout, share_rows
from fedapp.trees.fit_head import HeadRows, Training, fit_head, forward
from fedapp.trees.from_xgboost import trees_from_xgboost
from fedapp.trees.head import (
    HeadShape,
    head_margins,
    initial_weights,
    learned_rates,
    split_weights,
    weights_in_unit,
)
from fedapp.trees.model import Tree
from fedapp.trees.objective import base_margin, n_outputs
from fedapp.trees.outputs import tree_outputs
from fedapp.trees.packed import pack_trees, unpack_trees
from fedapp.trees.stacked import StackedModel, from_json, load_stacked
from simulations.engines import LocalGrid, run_local, run_simulation, simulated_contexts

BINARY, MULTI, REGRESSION = metrics.OBJECTIVES
DATA = {BINARY: "breast-cancer", MULTI: "wine", REGRESSION: "diabetes"}
KINDS = ("cnn", "cnn3", "fcnn")
MakeSettings = Callable[..., Settings]
MakeSites = Callable[..., list[Context]]
WriteTable = Callable[..., Path]

# hello 1, labels 2, fit 3, share 4, rounds 5 and 6, scores of the last head 7, final 8
ROUNDS, FIRST_ROUND, LAST = 2, 5, 8
MESSAGES = {
    "query.hello": (hello.HelloRequest, hello.HelloReply),
    "query.labels": (labels.LabelsRequest, labels.LabelsReply),
    "train.fedxgbllr_fit": (fedxgbllr.FitRequest, fedxgbllr.FitReply),
    "train.fedxgbllr_share": (fedxgbllr.ShareRequest, fedxgbllr.ShareReply),
    "train.fedxgbllr_average": (fedxgbllr.AverageRequest, fedxgbllr.AverageReply),
    "evaluate.fedxgbllr_final": (fedxgbllr.FinalRequest, fedxgbllr.FinalReply),
}


@pytest.fixture
def short(settings: MakeSettings) -> MakeSettings:
    """Settings of a short run: 6 trees a party, 2 rounds of 3 epochs."""

    def make(**overrides: Any) -> Settings:
        own = {"trees": 6, "max-depth": 3, "rounds": ROUNDS, "epochs": 3, "channels": 8}
        given = {f"fedxgbllr.{name}": value for name, value in own.items()}
        return settings(**{"strategy": "fedxgbllr", **given, **overrides})

    return make


def model_of(folder: RunFolder) -> StackedModel:
    return load_stacked(folder.path / "model.json")


def summary_of(folder: RunFolder) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder.path / "summary.json").read_text())
    return found


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def arrays_of(message: Message) -> dict[str, np.ndarray]:
    found = message.content.array_records["arrays"]
    return {
        name: np.frombuffer(array.data, dtype=array.dtype).reshape(array.shape)
        for name, array in found.items()
    }


def scalars_of(message: Message) -> dict[str, Any]:
    return dict(message.content.config_records["scalars"])


class Listener(SiteApp):
    """A site's app that keeps every message, and may fail at one node from a step on."""

    def __init__(self, fails_from: int | None = None) -> None:
        super().__init__()
        self.heard: list[tuple[str, Message, Message]] = []
        self._fails_from = fails_from

    def __call__(self, message: Message, context: Context) -> Message:
        step = int(message.content.config_records["envelope"]["step"])  # type: ignore[arg-type]
        if self._fails_from and step >= self._fails_from and context.node_id == 3:
            return Message(Error(1001, "party-2: broke"), reply_to=message)
        reply = super().__call__(message, context)
        self.heard.append((message.metadata.message_type, message, reply))
        return reply

    def of_kind(self, name: str) -> list[tuple[Message, Message]]:
        return [(sent, back) for kind, sent, back in self.heard if kind.endswith(name)]


class MortalGrid(LocalGrid):
    """A grid whose server dies before it sends, or before it reads, the messages of a step."""

    sends_until = reads_until = 10**6

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        every = list(messages)
        self._step = int(every[0].content.config_records["envelope"]["step"])  # type: ignore[arg-type]
        if self._step >= self.sends_until:
            raise KeyboardInterrupt
        return super().push_messages(every)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        if self._step >= self.reads_until:
            for running in self._running.values():
                running.result()
            raise KeyboardInterrupt
        return super().pull_messages(message_ids)


def run(
    settings: Settings,
    contexts: Iterable[Context] | None = None,
    app: SiteApp | None = None,
    **ends: int,
) -> RunFolder:
    grid = MortalGrid(contexts or simulated_contexts(settings), app or SiteApp())
    for name, step in ends.items():
        setattr(grid, name, step)
    try:
        return train(grid, settings)
    finally:
        grid.close()


# The head


@pytest.mark.parametrize(
    ("kind", "n_parties", "n_weights"),
    [
        ("cnn", 2, 16193),
        ("cnn", 5, 6785),
        ("cnn", 10, 3905),
        ("cnn3", 5, 32257),
        ("fcnn", 5, 128513),
    ],
)
def test_a_head_has_the_parameters_of_the_papers_table_5(
    kind: Any, n_parties: int, n_weights: int
) -> None:
    shape = HeadShape(kind, n_parties, 500 // n_parties, 1, 64)
    assert shape.n_weights == n_weights
    assert initial_weights(shape, 0).shape == (n_weights,)


class PaperHead(nn.Module):
    """The heads as the paper draws them, in torch's own layers."""

    def __init__(self, shape: HeadShape, weights: np.ndarray) -> None:
        super().__init__()
        self.shape, k = shape, shape.n_outputs
        if shape.kind == "fcnn":
            self.first: nn.Module = nn.Linear(shape.n_columns, 256)
        else:
            kernel, stride = (shape.n_trees, shape.n_trees) if shape.kind == "cnn" else (3 * k, k)
            padding = 0 if shape.kind == "cnn" else k
            self.first = nn.Conv1d(1, shape.channels, kernel, stride, padding)
        self.second = nn.Linear(shape.n_hidden, k)
        layers = map(torch.tensor, split_weights(shape, weights))
        for parameter, values in zip(self.parameters(), layers, strict=True):
            parameter.data = values.reshape(parameter.shape)

    def forward(self, outputs: torch.Tensor) -> torch.Tensor:
        if self.shape.kind == "fcnn":
            return self.second(torch.relu(self.first(outputs)))
        hidden = torch.relu(self.first(outputs[:, None]))
        return self.second(hidden.transpose(1, 2).flatten(1))  # party by party


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [1, 3])
def test_a_head_is_the_papers_network_in_numpy_and_in_torch(kind: Any, width: int) -> None:
    shape = HeadShape(kind, 3, 5, width, 4)
    weights = initial_weights(shape, 0) + np.float32(0.01)  # so that biases count
    outputs = np.random.default_rng(0).normal(size=(7, shape.n_columns)).astype(np.float32)
    expected = PaperHead(shape, weights)(torch.tensor(outputs)).detach().numpy()
    layers = [torch.tensor(layer) for layer in split_weights(shape, weights)]
    np.testing.assert_allclose(head_margins(shape, weights, outputs), expected, atol=1e-5)
    np.testing.assert_allclose(forward(shape, layers, torch.tensor(outputs)), expected, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [1, 3])
def test_learned_rates_are_mean_derivatives_of_the_margin(kind: Any, width: int) -> None:
    shape = HeadShape(kind, 3, 5, width, 4)
    rng = np.random.default_rng(1)
    weights = rng.normal(size=shape.n_weights).astype(np.float32)
    outputs = torch.tensor(rng.normal(size=(50, shape.n_columns)).astype(np.float32))
    outputs.requires_grad_()
    margins = PaperHead(shape, weights)(outputs)
    expected = np.empty((shape.n_columns,))
    for output in range(width):
        (slopes,) = torch.autograd.grad(margins[:, output].sum(), outputs, retain_graph=True)
        expected[output::width] = slopes.mean(axis=0).numpy()[output::width]
    found = learned_rates(shape, weights, outputs.detach().numpy())
    np.testing.assert_allclose(found, expected.reshape(3, 5 * width), atol=1e-5)


def test_a_head_in_another_unit_scales_its_inputs_and_its_margins() -> None:
    shape = HeadShape("cnn", 2, 4, 1, 8)
    weights = np.random.default_rng(2).normal(size=shape.n_weights).astype(np.float32)
    outputs = np.random.default_rng(3).normal(size=(6, 8)).astype(np.float32)
    unit = np.float32(40)
    found = head_margins(shape, weights_in_unit(shape, weights, unit), outputs)
    np.testing.assert_allclose(
        found, unit * head_margins(shape, weights, outputs / unit), rtol=1e-4
    )


def test_kaiming_weights_have_variance_two_over_fan_in() -> None:
    shape = HeadShape("cnn", 2, 250, 1, 64)
    first, bias, second, last = split_weights(shape, initial_weights(shape, 5))
    assert first.var() == pytest.approx(2 / 250, rel=0.05)
    assert second.var() == pytest.approx(2 / 128, rel=0.4)
    assert not bias.any()
    assert not last.any()


# Trees and their outputs


def boosted(objective: Any, n_rounds: int = 12) -> tuple[xgboost.Booster, np.ndarray, np.ndarray]:
    """XGBoost's model of a built-in table with missing values, the table, its labels."""
    table = read_source(DATA[objective])
    assert table.labels is not None
    values, truth = table.values.copy(), table.labels.astype(np.float32)
    values[np.random.default_rng(0).random(values.shape) < 0.1] = np.nan
    parameters = {"objective": objective, "max_depth": 5, "base_score": 0.4, "nthread": 1}
    if objective == MULTI:
        parameters["num_class"] = 3
    matrix = xgboost.QuantileDMatrix(values, truth)
    return xgboost.train(parameters, matrix, n_rounds), values, truth


@pytest.mark.parametrize("objective", metrics.OBJECTIVES)
def test_tree_outputs_and_the_base_margin_add_up_to_the_ensembles_margin(objective: Any) -> None:
    booster, values, _ = boosted(objective)
    width = n_outputs(objective, 3)
    outputs = tree_outputs([trees_from_xgboost(booster)], 12 * width, values)
    margins = base_margin(objective, np.float32(0.4)) + outputs.reshape(-1, 12, width).sum(axis=1)
    expected = booster.predict(xgboost.DMatrix(values), output_margin=True).reshape(-1, width)
    np.testing.assert_allclose(margins, expected, atol=1e-5, rtol=1e-5)


def test_a_party_with_fewer_trees_is_padded_with_zeros() -> None:
    booster, values, _ = boosted(BINARY)
    trees = trees_from_xgboost(booster)
    outputs = tree_outputs([trees[:3], trees], 12, values)
    np.testing.assert_array_equal(outputs[:, :3], outputs[:, 12:15])
    assert not outputs[:, 3:12].any()
    assert outputs[:, 15:].any()


@pytest.fixture
def some_trees() -> tuple[Tree, ...]:
    return trees_from_xgboost(boosted(BINARY)[0])


def test_trees_survive_packing(some_trees: tuple[Tree, ...]) -> None:
    back = unpack_trees(pack_trees(some_trees, with_gains=True), 30)
    assert len(back) == len(some_trees)
    for tree, again in zip(some_trees, back, strict=True):
        for name in ("left", "column", "threshold", "default_left", "value"):
            np.testing.assert_array_equal(tree[name], again[name])
        inner = tree["left"] > 0
        np.testing.assert_array_equal(tree["gain"][inner], again["gain"][inner])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"sizes": np.int32([5])}, "sizes must divide"),
        ({"values": np.float32([1.0])}, "values must be"),
        ({"defaults": np.uint8([1])}, "columns and defaults must be"),
        ({"gains": np.float32([1.0])}, "gains must be"),
        ({"columns": lambda was: was + 30}, "columns must be 0 to 29"),
        ({"lefts": lambda was: np.where(was > 0, 1, 0).astype(np.uint16)}, "lefts must lead"),
        ({"lefts": lambda was: np.where(was > 0, 999, 0).astype(np.uint16)}, "lefts must lead"),
    ],
)
def test_trees_that_would_lead_astray_are_refused(
    some_trees: tuple[Tree, ...], change: dict[str, Any], match: str
) -> None:
    packed = pack_trees(some_trees, with_gains=True)
    found = {
        name: new(getattr(packed, name)) if callable(new) else new for name, new in change.items()
    }
    with pytest.raises(ValueError, match=match):
        unpack_trees(replace(packed, **found), 30)


def test_a_model_that_is_broken_is_refused(short: MakeSettings) -> None:
    text = (run_local(short()).path / "model.json").read_text()
    document = json.loads(text)
    document["head"]["weights"].pop()
    for broken in ("{}", text[:-20], json.dumps(document)):
        with pytest.raises(DataError, match="model must be JSON of fedapp's format 1"):
            from_json(broken)


# Training


def plain_loop(shape: HeadShape, weights: np.ndarray, rows: HeadRows, seed: int) -> np.ndarray:
    """Line 14 to 19 of Algorithm 1 as anybody would write them in torch: 2 rounds of 3 epochs."""
    outputs, truth = torch.tensor(rows.outputs), torch.tensor(rows.labels)
    for round_id in range(ROUNDS):
        head = PaperHead(shape, weights)
        adam = torch.optim.Adam(head.parameters(), lr=0.001, betas=(0.5, 0.999))
        rng = np.random.default_rng([seed, round_id, zlib.crc32(b"party-1")])
        for _ in range(3):
            for batch in torch.tensor(rng.permutation(len(truth))).split(64):
                margins = head(outputs[batch])[:, 0] + float(rows.base_margin)
                adam.zero_grad()
                nn.functional.binary_cross_entropy_with_logits(margins, truth[batch]).backward()
                adam.step()
        weights = torch.cat([each.detach().flatten() for each in head.parameters()]).numpy()
    return weights


@pytest.mark.parametrize("kind", KINDS)
def test_one_party_alone_trains_the_head_as_a_plain_torch_loop_does(
    short: MakeSettings, kind: Any
) -> None:
    settings = short(parties=1, valid_fraction=0.0, fedxgbllr__head=kind, seed=3)
    model = model_of(run_local(settings))
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


def test_rows_held_back_choose_the_epoch() -> None:
    shape = HeadShape("cnn", 2, 4, 1, 8)
    rng = np.random.default_rng(4)
    truth = (rng.random(300) < 0.5).astype(np.float32)  # nothing to learn
    outputs = rng.normal(size=(300, 8)).astype(np.float32)
    base, one = np.float32(0), np.float32(1)
    every = [
        HeadRows(outputs[part], truth[part], np.ones(150, np.float32), base, one)
        for part in (slice(150), slice(150, None))
    ]

    def loss(weights: np.ndarray) -> float:
        margins = head_margins(shape, weights, every[1].outputs)
        found = metrics.statistics(BINARY, margins, every[1].labels, every[1].weights, 2)
        return metrics.scores(BINARY, found)["logloss"]

    def fit(epochs: int, patience: int) -> np.ndarray:
        training = Training(epochs, 16, 0.02, 0.5, 0.999, patience, "cpu")
        start = initial_weights(shape, 1) / 10
        return fit_head(
            BINARY, shape, start, every[0], training, np.random.default_rng(0), every[1]
        )[0]

    by_epoch = [loss(fit(epochs, 0)) for epochs in range(12)]
    assert by_epoch[-1] > min(by_epoch)
    assert loss(fit(11, 11)) == pytest.approx(min(by_epoch))
    first_rise = next(e for e in range(1, 12) if by_epoch[e] > min(by_epoch[:e]))
    assert loss(fit(11, 1)) == pytest.approx(min(by_epoch[:first_rise]))


def test_a_row_counts_by_its_weight() -> None:
    shape = HeadShape("cnn", 1, 4, 1, 8)
    rng = np.random.default_rng(5)
    outputs, truth = rng.normal(size=(40, 4)).astype(np.float32), np.float32([0, 1] * 20)
    base, one = np.float32(0), np.float32(1)
    weights = np.float32([0, 3] * 20)  # as if the rows of class 0 were not there
    training = Training(5, 40, 0.01, 0.5, 0.999, 0, "cpu")
    found = [
        fit_head(BINARY, shape, initial_weights(shape, 0), rows, training, np.random.default_rng(0))
        for rows in (
            HeadRows(outputs, truth, weights, base, one),
            HeadRows(outputs[1::2], truth[1::2], np.ones(20, np.float32), base, one),
        )
    ]
    np.testing.assert_allclose(found[0][0], found[1][0], atol=1e-4)
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-3)


# What is sent


def test_messages_hold_what_their_module_lists_and_nothing_else(short: MakeSettings) -> None:
    app = Listener()
    run(short(), app=app)
    assert {kind for kind, _, _ in app.heard} == set(MESSAGES)
    for kind, request, reply in app.heard:
        for message, declared in zip((request, reply), MESSAGES[kind], strict=True):
            names = {*scalars_of(message), *arrays_of(message)}
            assert names == {field.name for field in fields(declared)}


def test_no_reply_is_as_long_as_the_rows(short: MakeSettings) -> None:
    app = Listener()
    summary = summary_of(run(short(), app=app))
    n_rows = {party["rows"] for party in summary["parties"]}
    for kind, _, reply in app.heard:
        for name, array in arrays_of(reply).items():
            assert not n_rows & set(array.shape), (kind, name)


def test_trees_cross_the_wire_once_each_way(short: MakeSettings) -> None:
    folder = run_local(short(fedxgbllr__trees=60))
    lines = lines_of(folder.ledger)
    counts = {
        kind: [line for line in lines if line["type"].endswith(kind)] for kind in ("fit", "share")
    }
    assert [len(found) for found in counts.values()] == [6, 6]
    model = model_of(folder)
    packed = pack_trees(model.trees, with_gains=False)
    n_bytes = sum(getattr(packed, name).nbytes for name in fedxgbllr.TREES)
    n_splits = len(packed.columns)
    up = sum(line["bytes"] for line in counts["fit"] if line["to"] == "server")
    down = [line["bytes"] for line in counts["share"] if line["from"] == "server"]
    assert n_bytes + 4 * n_splits < up < 1.1 * (n_bytes + 4 * n_splits)
    assert all(n_bytes < size < 1.1 * n_bytes for size in down)
    others = [line for line in lines if line["type"].endswith(("average", "final"))]
    largest = max(line["bytes"] for line in others if line["from"] == "server")
    assert largest < 4 * model.shape.n_weights + 1000


def test_one_exchange_a_round_and_six_beside(short: MakeSettings) -> None:
    assert summary_of(run_local(short()))["exchanges"] == LAST
    without = summary_of(run_local(short(valid_fraction=0.0)))
    assert without["exchanges"] == LAST - 1
    assert without["best_round"] is None


def test_the_base_score_is_that_of_all_parties(
    short: MakeSettings, sites: MakeSites, write_table: WriteTable
) -> None:
    truth = {"a": [0] * 30 + [1] * 10, "b": [1] * 55 + [0] * 5}
    contexts = sites(
        *(
            {"name": name, "data": write_table(name, len(y), seed=len(y), y=y)}
            for name, y in truth.items()
        )
    )
    app = Listener()
    folder = run(short(parties=2, test_fraction=0.0, valid_fraction=0.0), contexts, app)
    asked = {scalars_of(request)["base_score"] for request, _ in app.of_kind("fit")}
    assert asked == {float(np.float32(65 / 100))}
    assert model_of(folder).base_score == np.float32(65 / 100)


def test_heads_are_averaged_by_rows(short: MakeSettings) -> None:
    app = Listener()
    run(short(partition="sizes:0.7,0.2,0.1", valid_fraction=0.0), app=app)
    rounds: dict[int, list[tuple[Message, Message]]] = {0: [], 1: []}
    for request, reply in app.of_kind("average"):
        rounds[scalars_of(request)["round_id"]].append((request, reply))
    replies = [reply for _, reply in rounds[0]]
    n_rows = [scalars_of(reply)["n_rows"] for reply in replies]
    assert max(n_rows) > 5 * min(n_rows)
    mean = np.average([arrays_of(reply)["weights"] for reply in replies], axis=0, weights=n_rows)
    sent = arrays_of(rounds[1][0][0])["weights"]
    np.testing.assert_allclose(sent, mean, atol=1e-6)


# What comes out


@pytest.mark.parametrize(
    ("objective", "metric", "least"), [(BINARY, "auc", 0.95), (MULTI, "accuracy", 0.9)]
)
def test_classes_are_learned(
    short: MakeSettings, objective: str, metric: str, least: float
) -> None:
    more = {"fedxgbllr__trees": 20, "fedxgbllr__epochs": 20, "fedxgbllr__eta": 0.3}
    folder = run_local(short(data=DATA[objective], objective=objective, **more))
    assert summary_of(folder)["metrics"]["test"][metric] > least
    assert model_of(folder).shape.n_outputs == (3 if objective == MULTI else 1)


def test_regression_is_learned_in_whatever_unit(
    short: MakeSettings, write_table: WriteTable
) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 400)).round(3)
    target = a + np.abs(b)
    more = {"fedxgbllr__trees": 20, "fedxgbllr__eta": 0.3, "fedxgbllr__epochs": 100}
    more["fedxgbllr__channels"] = 64
    found = []
    for unit, offset in ((1.0, 0.0), (1e5, 3e6)):
        table = write_table(f"u{unit:g}", 400, a=a, b=b, y=target * unit + offset)
        run_settings = short(data=str(table), label="y", objective=REGRESSION, **more)
        found.append(summary_of(run_local(run_settings))["metrics"]["test"]["r2"])
    assert found[0] > 0.8
    assert found[1] == pytest.approx(found[0], abs=0.02)


@pytest.mark.parametrize("objective", metrics.OBJECTIVES)
def test_predict_gives_the_scores_of_the_run(
    short: MakeSettings, tmp_path: Path, objective: Any
) -> None:
    folder = run_local(short(data=DATA[objective], objective=objective))
    output = tmp_path / "predictions.csv"
    n_rows = predict_table(folder.path, DATA[objective], "", output)
    with output.open() as file:
        written = [list(map(float, row[1:])) for row in list(csv.reader(file))[1:]]
    table = read_source(DATA[objective])
    assert table.labels is not None
    assert n_rows == len(written) == table.n_rows
    rows = np.concatenate(share_rows(table, Holdout(0.2, 0.1, 42), "iid", 3)["test"])
    predictions, truth = np.array(written)[rows], table.labels[rows].astype(np.float32)
    if objective == BINARY:
        margins = np.log(predictions / (1 - predictions))
    else:
        margins = predictions if objective == REGRESSION else np.log(predictions)
    weights = np.ones(len(rows), np.float32)
    exact = metrics.pooled(objective, margins.astype(np.float32), truth, weights)
    name = {BINARY: "logloss", MULTI: "mlogloss", REGRESSION: "rmse"}[objective]
    assert summary_of(folder)["metrics"]["test"][name] == pytest.approx(exact[name], rel=1e-4)


def test_test_labels_choose_nothing(short: MakeSettings, write_table: WriteTable) -> None:
    rng = np.random.default_rng(1)
    target = rng.normal(size=200).round(3)
    permuted = target.copy()
    path = write_table("as-is", 200, y=target)
    table = read_source(str(path), label="y")
    rows = np.concatenate(share_rows(table, Holdout(0.2, 0.1, 42), "iid", 3)["test"])
    permuted[rows] = rng.permutation(target[rows])
    assert (permuted != target).sum() > 20
    other = write_table("permuted", 200, y=permuted)
    how = {"label": "y", "objective": REGRESSION}
    folders = [run_local(short(data=str(data), **how)) for data in (path, other)]
    texts = [(folder.path / "model.json").read_bytes() for folder in folders]
    assert texts[0] == texts[1]
    scores = [summary_of(folder)["metrics"]["test"]["rmse"] for folder in folders]
    assert scores[0] != scores[1]


def test_the_round_with_the_lowest_loss_on_validation_rows_is_kept(short: MakeSettings) -> None:
    more = {"fedxgbllr__learning_rate": 0.1, "fedxgbllr__patience": 0, "fedxgbllr__rounds": 5}
    folder = run_local(short(valid_fraction=0.3, **more))
    losses = [line["valid"]["logloss"] for line in lines_of(folder.rounds)]
    summary = summary_of(folder)
    assert len(losses) == 5
    assert summary["best_round"] == int(np.argmin(losses)) + 1
    assert summary["metrics"]["valid"]["logloss"] == pytest.approx(min(losses), rel=1e-6)


def test_a_party_with_one_class_takes_part(
    short: MakeSettings, sites: MakeSites, write_table: WriteTable
) -> None:
    contexts = sites(
        {"name": "a", "data": write_table("a", 80)},
        {"name": "b", "data": write_table("b", 40, seed=1, y=[1] * 40)},
    )
    summary = summary_of(run(short(parties=2, early_stopping_rounds=2), contexts))
    assert summary["trees"] >= 2
    assert summary["metrics"]["test"]["logloss"] < 1


def test_parties_that_stop_early_have_fewer_trees(
    short: MakeSettings, sites: MakeSites, write_table: WriteTable
) -> None:
    noise = np.random.default_rng(7).integers(0, 2, 90)
    contexts = sites(
        {"name": "a", "data": write_table("a", 200)},
        {"name": "b", "data": write_table("b", 90, seed=1, y=noise)},
    )
    how = {"early_stopping_rounds": 1, "valid_fraction": 0.3, "fedxgbllr__trees": 40}
    folder = run(short(parties=2, **how), contexts)
    model, rates = model_of(folder), summary_of(folder)["learning_rates"]["trees"]
    counts = model.counts.tolist()
    assert counts[1] < counts[0] < 40
    assert model.shape.n_rounds == counts[0]
    assert [len(rates[name]) for name in ("a", "b")] == counts
    assert summary_of(folder)["trees"] == sum(counts)


def test_a_party_without_weight_is_refused(
    short: MakeSettings, sites: MakeSites, write_table: WriteTable
) -> None:
    contexts = sites(
        {"name": "a", "data": write_table("a", 40, w=[1.0] * 40), "weight": "w"},
        {"name": "b", "data": write_table("b", 40, w=[0.0] * 40), "weight": "w"},
    )
    with pytest.raises(PartyError, match=r"^b \(step 3\): weight must be > 0 in some training row"):
        run(short(parties=2), contexts)


def test_a_party_that_disappears_between_rounds_stops_the_run_by_name(short: MakeSettings) -> None:
    with pytest.raises(PartyError, match=r"^party-2 \(step 6\): broke"):
        run(short(), app=Listener(fails_from=FIRST_ROUND + 1))


def test_a_party_that_disappears_between_rounds_leaves_its_trees(short: MakeSettings) -> None:
    app = Listener(fails_from=FIRST_ROUND + 1)
    folder = run(short(min_parties=2, valid_fraction=0.0), app=app)
    summary, model = summary_of(folder), model_of(folder)
    assert [gone["party"] for gone in summary["left_out"]] == ["party-2"]
    assert model.counts.tolist() == [6, 6, 6]
    assert list(summary["learning_rates"]["trees"]) == ["party-1", "party-2", "party-3"]
    last = [r for q, r in app.of_kind("average") if scalars_of(q)["round_id"] == ROUNDS - 1]
    assert len(last) == 2
    n_rows = [scalars_of(reply)["n_rows"] for reply in last]
    mean = np.average([arrays_of(reply)["weights"] for reply in last], axis=0, weights=n_rows)
    np.testing.assert_allclose(model.weights, mean, atol=1e-6)


@pytest.mark.parametrize(
    "death",
    [
        {"sends_until": FIRST_ROUND},
        {"reads_until": FIRST_ROUND},
        {"sends_until": FIRST_ROUND + 1},
        {"reads_until": LAST - 1},
        {"sends_until": LAST},
        {"reads_until": LAST},
    ],
)
def test_a_resumed_run_ends_in_the_same_model(short: MakeSettings, death: dict[str, int]) -> None:
    whole = run(short())
    first = short()
    with pytest.raises(KeyboardInterrupt):
        run(first, **death)
    again = run(short(resume=first.run_dir))
    assert (again.path / "model.json").read_bytes() == (whole.path / "model.json").read_bytes()
    assert summary_of(again)["metrics"] == summary_of(whole)["metrics"]
    assert summary_of(again)["learning_rates"] == summary_of(whole)["learning_rates"]
    assert [line["round"] for line in lines_of(again.rounds)] == [1, 2]


def test_a_site_keeps_the_servers_model_and_forgets_the_rows(
    short: MakeSettings, tmp_path: Path
) -> None:
    folder = run_local(short())
    kept = list((tmp_path / "home" / "sites").glob("*/*/model.json"))
    assert len(kept) == 3
    assert {path.read_bytes() for path in kept} == {(folder.path / "model.json").read_bytes()}
    names = {path.name.partition("-")[0] for path in (tmp_path / "home").rglob("*.npy")}
    assert not {name for name in names if name.startswith(("train.o", "valid.o", "test.o"))}
    assert not {name for name in names if name.endswith((".values", ".labels"))}


def test_rates_of_all_trees_are_in_the_summary_and_on_the_page(short: MakeSettings) -> None:
    folder = run_local(short())
    summary = summary_of(folder)
    rates = summary["learning_rates"]
    assert {name: len(found) for name, found in rates["trees"].items()} == {
        f"party-{place}": 6 for place in (1, 2, 3)
    }
    for name, weight in rates["parties"].items():
        assert weight == pytest.approx(np.mean(rates["trees"][name]))
    assert summary["head"] == {"kind": "cnn", "parameters": model_of(folder).shape.n_weights}
    assert "Learned rate of each tree" in write_report([folder.path]).read_text()


def test_the_paper_shares_500_trees_among_the_parties(short: MakeSettings) -> None:
    model = model_of(run_local(short(parties=5, fedxgbllr__trees=0, fedxgbllr__channels=64)))
    assert model.counts.tolist() == [100] * 5
    assert model.shape.n_weights == 6785


def test_torch_is_imported_where_a_head_is_trained_and_nowhere_else() -> None:
    code = (
        "import sys, fedapp.client_app, fedapp.server_app, fedapp.predict, strategies.fedxgbllr,"
        " clients.fedxgbllr; assert not {'torch', 'xgboost'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_flowers_simulation_gives_the_model_of_the_local_engine(short: MakeSettings) -> None:
    local, simulated = run_local(short()), run_simulation(short())
    ours = (local.path / "model.json").read_bytes()
    assert (simulated.path / "model.json").read_bytes() == ours
    assert summary_of(simulated)["metrics"] == summary_of(local)["metrics"]
