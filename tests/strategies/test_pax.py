"""PAX as a whole: what it sends, how often, and what comes out."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message

from fedapp.conversation import Checkpoint, Parties, SavedModel
from fedapp.errors import ConfigError
from fedapp.home import LOCK
from fedapp.messages import pax
from fedapp.messages import scoring as booster
from fedapp.messages.handshake import HelloReply
from fedapp.run_folder import RunFolder
from fedapp.runs.local import run_local
from fedapp.settings import Settings
from fedapp.site.store import RAW
from fedapp.trees.model import LEAF, load_model
from fedapp.trees.predict import predict_margins
from strategies.pax import PAX
from strategies.pax_sums import share_bins
from tests.transcript import (
    arrays_of,
    lines_of,
    listen,
    scalars_of,
    summary_of,
)

MakeSettings = Callable[..., Settings]
WriteTable = Callable[..., Path]
Simulate = Callable[[Settings], RunFolder]


def test_the_smaller_child_alone_is_asked_for(settings: MakeSettings) -> None:
    _, app = listen(settings(max_depth=3, parties=1))
    wanted: dict[int, list[int]] = {}
    for kind, request, _ in app.heard:
        if kind == "train.pax_grow":
            scalars = scalars_of(request)
            if scalars["round_id"] == 0:
                wanted[int(scalars["level"])] = arrays_of(request)["wanted_nodes"].tolist()
    assert wanted[0] == [0]
    assert len(wanted[1]) == 1
    assert len(wanted[2]) == 2


@pytest.mark.parametrize(("rounds", "depth"), [(1, 1), (3, 2), (2, 5)])
def test_a_round_takes_max_depth_exchanges(settings: MakeSettings, rounds: int, depth: int) -> None:
    summary = summary_of(run_local(settings(num_boost_round=rounds, max_depth=depth)))
    assert summary["exchanges"] <= 3 + rounds * depth + 1
    assert summary["exchanges"] >= 3 + rounds + 1
    assert summary["trees"] == rounds


def test_trees_that_grow_fully_take_exactly_max_depth_exchanges(settings: MakeSettings) -> None:
    run = settings(data="digits", objective="multi:softprob", num_boost_round=2, max_depth=2)
    summary = summary_of(run_local(run))
    assert summary["exchanges"] == 3 + 2 * 2 + 1
    assert summary["trees"] == 20


def test_the_ledger_has_every_byte_that_was_sent(settings: MakeSettings) -> None:
    folder, app = listen(settings())
    lines = lines_of(folder.ledger)
    summary = summary_of(folder)

    def size(message: Message) -> int:
        return sum(array.nbytes for array in arrays_of(message).values())

    to_server = sum(line["bytes"] for line in lines if line["to"] == "server")
    to_parties = sum(line["bytes"] for line in lines if line["from"] == "server")
    assert summary["bytes"] == {"to_parties": to_parties, "to_server": to_server}
    assert len(lines) == 2 * len(app.heard)
    assert to_server >= sum(size(reply) for _, _, reply in app.heard)
    biggest = max(app.heard, key=lambda heard: size(heard[2]))
    assert max(line["bytes"] for line in lines) >= size(biggest[2])


def test_rounds_are_written_with_scores_and_bytes(settings: MakeSettings) -> None:
    folder = run_local(settings(num_boost_round=4, max_depth=3))
    lines = lines_of(folder.rounds)
    assert [line["round"] for line in lines] == [1, 2, 3, 4]
    losses = [line["train"]["logloss"] for line in lines]
    assert losses == sorted(losses, reverse=True)
    total = {key: sum(line["bytes"][key] for line in lines) for key in lines[0]["bytes"]}
    assert total == summary_of(folder)["bytes"]


def test_the_summary_scores_the_model_that_was_written(settings: MakeSettings) -> None:
    from fedapp import metrics
    from fedapp.data.datasets import read_source
    from fedapp.site.table import Holdout, share_rows

    run = settings(num_boost_round=5, max_depth=3, max_bin=64)
    folder = run_local(run)
    table = read_source("breast-cancer")
    shares = share_rows(table, Holdout(0.2, 0.1, 42), "iid", 3)
    for subset in ("test", "valid"):
        rows = np.concatenate(shares[subset])
        margins = predict_margins(load_model(folder.path / "model.json"), table.values[rows])
        assert table.labels is not None
        labels = table.labels[rows].astype(np.float32)
        exact = metrics.pooled("binary:logistic", margins, labels, np.ones(len(rows), np.float32))
        found = summary_of(folder)["metrics"][subset]
        for name in ("logloss", "accuracy", "f1", "precision", "recall"):
            assert found[name] == pytest.approx(exact[name], rel=1e-6)
        assert found["auc"] == pytest.approx(exact["auc"], abs=1e-4)


def test_the_share_rule_divides_bins_by_rows() -> None:
    assert share_bins(255, {"a": 2721, "b": 265, "c": 13}) == {"a": 231, "b": 23, "c": 2}


def test_a_small_party_gets_few_bins(settings: MakeSettings) -> None:
    run = settings(partition="sizes:0.9,0.08,0.02", max_bin=50, valid_fraction=0.0)
    _, app = listen(run)
    asked = sorted(
        int(scalars_of(request)["n_bins"])
        for kind, request, _ in app.heard
        if kind == "train.pax_sketch"
    )
    assert asked == [2, 4, 45]


def test_classification_keeps_the_finest_resolution_and_regression_the_coarsest(
    settings: MakeSettings,
) -> None:
    n_bins = {}
    for data, objective in [
        ("breast-cancer", "binary:logistic"),
        ("diabetes", "reg:squarederror"),
    ]:
        run = settings(
            data=data, objective=objective, partition="sizes:0.75,0.25", parties=2, max_bin=40
        )
        n_bins[objective] = most_bins(run)
    assert n_bins["binary:logistic"] == 30
    assert n_bins["reg:squarederror"] == 10


def most_bins(run: Settings) -> int:
    """Most bins of a column after the fusion, from a run that writes its checkpoint."""
    kept: list[Checkpoint] = []
    original = RunFolder.save

    def save(self: RunFolder, checkpoint: Checkpoint, facts: Mapping[str, Any]) -> None:
        kept.append(checkpoint)
        original(self, checkpoint, facts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunFolder, "save", save)
        run_local(run)
    return int(np.diff(kept[0].arrays["offsets"]).max())


def test_the_conversation_runs_on_replies_given_by_hand(settings: MakeSettings) -> None:
    """Two rows of one column at two parties, one tree of one level, computed on paper."""
    run = settings(
        parties=2,
        num_boost_round=1,
        max_depth=1,
        eta=1.0,
        valid_fraction=0.0,
        max_bin=4,
        min_child_weight=0.0,
        pax__bins="equal",
    )
    strategy = PAX.of_run(run)
    hellos = {
        name: HelloReply(
            *(name, 2, 0, 0, ("x",), ("0", "1"), "", "", 0.0, 0.0, True, "0" * 32, (), ()),
            *(np.empty(0, np.int32), (), (), ()),
        )
        for name in ("a", "b")
    }
    talk = strategy.conversation(Parties(hellos), None)
    exchange = next(talk)
    assert {type(request) for request in exchange.requests.values()} == {pax.SketchRequest}
    exchange = talk.send({"a": _sketch(1.0, 2.0, 0.0), "b": _sketch(2.0, 3.0, 2.0)})
    request = exchange.requests["a"]
    assert (request.level, request.base_margin, request.wanted_nodes.tolist()) == (0, [0.0], [0])
    # Gradients at margin 0 are -1/2 and 1/2, hessians 1/4; labels are 0 at a, 1 at b.
    event = talk.send({"a": _grow([0.5, 0.5]), "b": _grow([-0.5, -0.5])})
    assert isinstance(event, Checkpoint)
    assert isinstance(next(talk), Checkpoint)
    assert isinstance(next(talk), SavedModel)
    exchange = next(talk)
    assert {type(request) for request in exchange.requests.values()} == {booster.EvaluateRequest}
    model = json.loads(exchange.requests["a"].model.tobytes())
    tree = model["trees"][0]
    # x < 2: G = 1/2, H = 1/4; x >= 2: G = -1/2, H = 3/4.
    assert tree["threshold"][0] == 2.0
    np.testing.assert_allclose(tree["value"][1:], [-0.5 / 1.25, 0.5 / 1.75], rtol=1e-6)
    assert tree["left"] == [1, LEAF, LEAF]


def _sketch(low: float, high: float, label_sum: float) -> pax.SketchReply:
    return pax.SketchReply(
        label_sums=np.array([label_sum]),
        weight_sum=2.0,
        unseen=np.empty(0, np.int64),
        representatives=np.float32([low, high]),
        masses=np.ones(2, np.float32),
        offsets=np.array([0, 2]),
        maxima=np.float32([high]),
    )


def _grow(gradients: list[float]) -> pax.GrowReply:
    histogram = np.array([[[gradient, 0.25] for gradient in gradients]])
    sums = np.array([2.0, 1.0])
    scores = np.array([[1.0, 0.0], [0.0, 1.0]])
    return pax.GrowReply(
        histogram,
        np.zeros((1, 1), np.int32),
        histogram.sum(axis=1),
        sums,
        scores,
        np.zeros(2),
        np.zeros((2, 2)),
    )


def test_early_stopping_cuts_the_model_back_to_its_best_round(settings: MakeSettings) -> None:
    run = settings(
        num_boost_round=60,
        max_depth=4,
        eta=1.0,
        max_bin=32,
        early_stopping_rounds=3,
        valid_fraction=0.3,
    )
    folder = run_local(run)
    summary, lines = summary_of(folder), lines_of(folder.rounds)
    losses = [line["valid"]["logloss"] for line in lines]
    assert len(lines) < 60
    assert summary["best_round"] == int(np.argmin(losses)) + 1
    assert summary["trees"] == summary["best_round"]
    assert len(lines) == summary["best_round"] + 3
    assert summary["metrics"]["valid"]["logloss"] == pytest.approx(min(losses), abs=1e-6)


def test_the_best_round_is_kept_where_rounds_run_out(settings: MakeSettings) -> None:
    run = settings(num_boost_round=3, max_depth=3, early_stopping_rounds=3, valid_fraction=0.3)
    folder = run_local(run)
    losses = [line["valid"]["logloss"] for line in lines_of(folder.rounds)]
    assert len(losses) == 3
    assert summary_of(folder)["trees"] == int(np.argmin(losses)) + 1


DEFAULT = {"early_stopping_rounds": "auto", "valid_fraction": 0.5, "test_fraction": 0.0}


@pytest.mark.parametrize("strategy", ["pax", "bagging", "cyclic"])
def test_a_default_run_stops_by_the_loss_of_enough_validation_rows(
    settings: MakeSettings, write_table: WriteTable, strategy: str
) -> None:
    given = {"data": str(write_table(n_rows=400)), "label": "y", "num_boost_round": "auto"}
    folder = run_local(settings(strategy=strategy, eta=1.0, **DEFAULT, **given))
    summary, lines = summary_of(folder), lines_of(folder.rounds)
    losses = [line["valid"]["logloss"] for line in lines]
    assert summary["best_round"] == int(np.argmin(losses)) + 1 == len(lines) - 20
    boosting = {"num_boost_round": 300, "eta": 1.0, "early_stopping_rounds": 20}
    assert summary["boosting"] == boosting


@pytest.mark.parametrize("strategy", ["pax", "bagging", "cyclic"])
def test_a_default_run_with_few_validation_rows_has_all_its_rounds(
    settings: MakeSettings, write_table: WriteTable, strategy: str
) -> None:
    given = {"data": str(write_table(n_rows=198)), "label": "y", "num_boost_round": "auto"}
    folder = run_local(settings(strategy=strategy, eta=1.0, **DEFAULT, **given, max_depth=1))
    summary = summary_of(folder)
    assert (len(lines_of(folder.rounds)), summary["best_round"]) == (100, None)
    assert summary["boosting"]["early_stopping_rounds"] == 0


def test_a_default_run_goes_on_where_there_is_nothing_to_stop_by(
    settings: MakeSettings, write_table: WriteTable, caplog: pytest.LogCaptureFixture
) -> None:
    labels = [0] * 398 + [1] * 2
    given = {"data": str(write_table(n_rows=400, y=labels)), "label": "y", "parties": 1, "seed": 5}
    folder = run_local(settings(**DEFAULT, **given, num_boost_round=25, eval_metric="auc"))
    summary = summary_of(folder)
    assert summary["metrics"]["valid"]["auc"] is None
    assert (summary["trees"], summary["best_round"]) == (25, None)
    assert "early stopping is off: it must have a validation auc to look at" in caplog.text


@pytest.mark.parametrize(("parties", "bins"), [(9, "share"), (10, "equal")])
def test_bins_are_equal_from_ten_parties_on(
    settings: MakeSettings, parties: int, bins: str
) -> None:
    given = {"parties": parties, "num_boost_round": 1, "max_bin": 64}
    folder = run_local(settings(**given))
    other = run_local(settings(**given, pax__bins=bins))
    assert summary_of(folder)["bins"] == bins
    models = [(each.path / "model.json").read_bytes() for each in (folder, other)]
    assert models[0] == models[1]


def test_early_stopping_needs_rows_to_look_at(settings: MakeSettings, tmp_path: Path) -> None:
    table = tmp_path / "tiny.csv"
    table.write_text("x,y\n1,0\n2,1\n3,0\n4,1\n")
    run = settings(
        data=str(table),
        label="y",
        parties=1,
        test_fraction=0.0,
        valid_fraction=0.01,
        early_stopping_rounds=2,
    )
    with pytest.raises(ConfigError, match="valid-fraction must leave validation rows"):
        run_local(run)


def columns_of_trees(folder: RunFolder) -> list[set[int]]:
    model = load_model(folder.path / "model.json")
    return [set(tree["column"][tree["left"] != LEAF].tolist()) for tree in model.trees]


def test_a_tree_splits_only_the_columns_it_drew(settings: MakeSettings) -> None:
    folder = run_local(settings(num_boost_round=6, max_depth=4, colsample_bytree=0.1))
    used = columns_of_trees(folder)
    assert all(1 <= len(columns) <= 3 for columns in used)
    assert len(set().union(*used)) > 3


def test_subsampling_draws_other_rows_every_round_and_the_same_for_a_seed(
    settings: MakeSettings,
) -> None:
    def root_hessians(**more: Any) -> list[float]:
        folder = run_local(settings(num_boost_round=2, subsample=0.5, **more))
        return [tree["hessian"][0] for tree in load_model(folder.path / "model.json").trees]

    first, again, other = root_hessians(), root_hessians(), root_hessians(seed=7)
    assert first == again
    assert first != other
    whole = load_model(run_local(settings()).path / "model.json").trees[0]["hessian"][0]
    assert 0.35 * whole < first[0] < 0.65 * whole


@pytest.mark.parametrize("partition", ["iid", "dirichlet:0.3", "sizes:0.91,0.086,0.004"])
def test_every_partition_trains(settings: MakeSettings, partition: str) -> None:
    summary = summary_of(run_local(settings(partition=partition, num_boost_round=5)))
    assert summary["metrics"]["test"]["auc"] > 0.9


def test_whole_sizes_hold_back_rows_beside_them(settings: MakeSettings) -> None:
    run = settings(partition="sizes:200,100,13", test_fraction=0.2, valid_fraction=0.1)
    assert [party["rows"] for party in summary_of(run_local(run))["parties"]] == [200, 100, 13]


def test_text_classes_are_named_in_the_model(settings: MakeSettings, tmp_path: Path) -> None:
    table = tmp_path / "text.csv"
    rows = [f"{x},{'good' if x > 20 else 'bad'}" for x in range(60)]
    table.write_text("\n".join(["x,y", *rows]) + "\n")
    folder = run_local(settings(data=str(table), label="y", parties=2))
    assert load_model(folder.path / "model.json").classes == ("bad", "good")
    assert summary_of(folder)["metrics"]["train"]["accuracy"] > 0.95


def test_each_party_keeps_the_model_and_forgets_the_rows(
    settings: MakeSettings, tmp_path: Path
) -> None:
    folder = run_local(settings())
    kept = sorted((tmp_path / "home" / "sites").glob("*/*/model.json"))
    assert len(kept) == 3
    assert {path.read_text() for path in kept} == {(folder.path / "model.json").read_text()}
    arrays = [path.name for path in (tmp_path / "home" / "sites").rglob(f"*{RAW}*")]
    assert arrays
    assert all(name.startswith(("reply-", "kept-")) for name in arrays)


def test_a_finished_run_keeps_no_checkpoint(settings: MakeSettings) -> None:
    folder = run_local(settings())
    assert not list(folder.path.glob("checkpoint*"))
    names = {path.name for path in folder.path.iterdir()}
    assert names == {
        LOCK,
        "columns.json",
        "config.toml",
        "ledger.jsonl",
        "model.json",
        "model.xgb.json",
        "rounds.jsonl",
        "summary.json",
    }


@pytest.mark.slow
def test_flowers_simulation_gives_the_model_of_the_local_engine(
    settings: MakeSettings, simulate: Simulate
) -> None:
    local = run_local(settings(num_boost_round=2, max_depth=3))
    simulated = simulate(settings(num_boost_round=2, max_depth=3))
    ours = (local.path / "model.json").read_bytes()
    assert (simulated.path / "model.json").read_bytes() == ours
    assert summary_of(simulated)["engine"] == "simulation"
    assert summary_of(simulated)["metrics"] == summary_of(local)["metrics"]
