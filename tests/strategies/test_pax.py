"""PAX as a whole: what it sends, how often, and what comes out."""

import json

import numpy as np
import pytest

from fedapp.conversation import Checkpoint, Parties, SavedModel
from fedapp.errors import ConfigError
from fedapp.home import LOCK
from fedapp.messages import pax
from fedapp.messages import scoring as booster
from fedapp.messages.handshake import HelloReply
from fedapp.records.document import load
from fedapp.run_folder import Checkpoints
from fedapp.runs.local import run_local
from fedapp.trees.model import LEAF, Ensemble
from strategies.pax import PAX
from strategies.pax_sums import share_bins
from tests.federated import lines_of, summary_of
from tests.transcript import arrays_of, listen, scalars_of


def test_the_smaller_child_alone_is_asked_for(settings):
    _, app = listen(settings(max_depth=3, parties=1))
    wanted = {}
    for kind, request, _ in app.heard:
        if kind == "train.pax_grow":
            scalars = scalars_of(request)
            if scalars["round_id"] == 0:
                wanted[int(scalars["level"])] = arrays_of(request)["wanted_nodes"].tolist()
    assert wanted[0] == [0]
    assert len(wanted[1]) == 1
    assert len(wanted[2]) == 2


def test_the_share_rule_divides_bins_by_rows():
    assert share_bins(255, {"a": 2721, "b": 265, "c": 13}) == {"a": 231, "b": 23, "c": 2}


def test_a_small_party_gets_few_bins(settings):
    sizes = {"partition": "sizes:0.9,0.08,0.02", "pax__bins": "share"}
    run = settings(**sizes, max_bin=50, valid_fraction=0.0)
    _, app = listen(run)
    asked = sorted(
        int(scalars_of(request)["n_bins"])
        for kind, request, _ in app.heard
        if kind == "train.pax_sketch"
    )
    assert asked == [2, 4, 45]


def test_classification_keeps_the_finest_resolution_and_regression_the_coarsest(settings):
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


def most_bins(run):
    """Most bins of a column after the fusion, from a run that writes its checkpoint."""
    states = []
    original = Checkpoints.save

    def save(self, state, of_method):
        states.append(of_method)
        original(self, state, of_method)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, "save", save)
        run_local(run)
    return int(states[0].boosting.cuts.widths.max())


def test_the_conversation_runs_on_replies_given_by_hand(settings):
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
            *(2, 0, 0, ("x",), ("0", "1"), "", "", 0.0, 0.0, (), np.empty(0, np.int32), (), (), ()),
            name=name,
            simulated=True,
            fingerprint="0" * 32,
            notes=(),
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


def _sketch(low, high, label_sum):
    return pax.SketchReply(
        label_sums=np.array([label_sum]),
        weight_sum=2.0,
        unseen=np.empty(0, np.int64),
        representatives=np.float32([low, high]),
        masses=np.ones(2, np.float32),
        offsets=np.array([0, 2]),
        maxima=np.float32([high]),
    )


def _grow(gradients):
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


DEFAULT = {"early_stopping_rounds": "auto", "valid_fraction": 0.5, "test_fraction": 0.0}
DEFAULT |= {"parties": 2}


@pytest.mark.slow
@pytest.mark.by_default("pax", "cyclic")
@pytest.mark.parametrize("strategy", ["pax", "bagging", "cyclic"])
def test_a_default_run_stops_by_the_loss_of_enough_validation_rows(settings, write_table, strategy):
    given = {"data": str(write_table(n_rows=400)), "label": "y", "num_boost_round": "auto"}
    folder = run_local(settings(strategy=strategy, eta=1.0, **DEFAULT, **given))
    summary, lines = summary_of(folder), lines_of(folder.rounds)
    losses = [line["valid"]["logloss"] for line in lines]
    assert summary["best_round"] == int(np.argmin(losses)) + 1 == len(lines) - 20
    boosting = {"num_boost_round": 300, "eta": 1.0, "early_stopping_rounds": 20}
    assert summary["boosting"] == {**boosting, "scale_pos_weight": 1.0, "min_child_weight": 1.0}


@pytest.mark.slow
@pytest.mark.by_default("pax")
@pytest.mark.parametrize("strategy", ["pax", "bagging", "cyclic"])
def test_a_default_run_with_few_validation_rows_has_all_its_rounds(settings, write_table, strategy):
    given = {"data": str(write_table(n_rows=198)), "label": "y", "num_boost_round": "auto"}
    folder = run_local(settings(strategy=strategy, eta=1.0, **DEFAULT, **given, max_depth=1))
    summary = summary_of(folder)
    assert (len(lines_of(folder.rounds)), summary["best_round"]) == (100, None)
    assert summary["boosting"]["early_stopping_rounds"] == 0


def test_a_default_run_goes_on_where_there_is_nothing_to_stop_by(settings, write_table, caplog):
    labels = [0] * 398 + [1] * 2
    given = {"data": str(write_table(n_rows=400, y=labels)), "label": "y", "seed": 5}
    one = {**DEFAULT, "parties": 1}
    folder = run_local(settings(**one, **given, num_boost_round=25, eval_metric="auc"))
    summary = summary_of(folder)
    assert summary["metrics"]["valid"]["auc"] is None
    assert (summary["trees"], summary["best_round"]) == (25, None)
    assert "early stopping is off: it must have a validation auc to look at" in caplog.text


@pytest.mark.slow
@pytest.mark.by_default("4-iid-share", "2-*")
@pytest.mark.parametrize(
    ("parties", "partition", "bins"),
    [(4, "iid", "share"), (5, "iid", "equal"), (2, "sizes:0.81,0.19", "equal")],
)
def test_bins_are_shared_where_no_party_is_small(settings, parties, partition, bins):
    given = {"parties": parties, "partition": partition, "num_boost_round": 1, "max_bin": 64}
    folder = run_local(settings(**given))
    other = run_local(settings(**given, pax__bins=bins))
    assert summary_of(folder)["bins"] == bins
    models = [(each.path / "model.json").read_bytes() for each in (folder, other)]
    assert models[0] == models[1]


def test_early_stopping_needs_rows_to_look_at(settings, tmp_path):
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


def columns_of_trees(folder):
    model = load(folder.path / "model.json", Ensemble)
    return [set(tree["column"][tree["left"] != LEAF].tolist()) for tree in model.trees]


def test_a_tree_splits_only_the_columns_it_drew(settings):
    folder = run_local(settings(num_boost_round=6, max_depth=4, colsample_bytree=0.1))
    used = columns_of_trees(folder)
    assert all(1 <= len(columns) <= 3 for columns in used)
    assert len(set().union(*used)) > 3


@pytest.mark.slow
def test_subsampling_draws_other_rows_every_round_and_the_same_for_a_seed(settings):
    def root_hessians(**more):
        folder = run_local(settings(num_boost_round=2, subsample=0.5, **more))
        return [tree["hessian"][0] for tree in load(folder.path / "model.json", Ensemble).trees]

    first, again, other = root_hessians(), root_hessians(), root_hessians(seed=7)
    assert first == again
    assert first != other
    whole = load(run_local(settings()).path / "model.json", Ensemble).trees[0]["hessian"][0]
    assert 0.35 * whole < first[0] < 0.65 * whole


@pytest.mark.by_default("dirichlet*", "sizes*")
@pytest.mark.parametrize("partition", ["iid", "dirichlet:0.3", "sizes:0.91,0.086,0.004"])
def test_every_partition_trains(settings, partition):
    summary = summary_of(run_local(settings(partition=partition, num_boost_round=5)))
    assert summary["metrics"]["test"]["auc"] > 0.9


def test_whole_sizes_hold_back_rows_beside_them(settings):
    run = settings(partition="sizes:200,100,13", test_fraction=0.2, valid_fraction=0.1)
    assert [party["rows"] for party in summary_of(run_local(run))["parties"]] == [200, 100, 13]


def test_text_classes_are_named_in_the_model(settings, tmp_path):
    table = tmp_path / "text.csv"
    rows = [f"{x},{'good' if x > 20 else 'bad'}" for x in range(60)]
    table.write_text("\n".join(["x,y", *rows]) + "\n")
    folder = run_local(settings(data=str(table), label="y", parties=2))
    assert load(folder.path / "model.json", Ensemble).classes == ("bad", "good")
    assert summary_of(folder)["metrics"]["train"]["accuracy"] > 0.95


def test_a_finished_run_keeps_no_checkpoint(settings):
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
        "started",
        "summary.json",
    }
