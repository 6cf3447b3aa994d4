"""FedXGBllr: its maths against XGBoost and torch, what it sends, and what comes out."""

import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from fedapp import metrics
from fedapp.data.datasets import read_source
from fedapp.data.schema import Roles
from fedapp.errors import DataError, PartyError
from fedapp.records.document import from_text, model_text
from fedapp.report import write_report
from fedapp.runs.local import run_local
from fedapp.site.table import Holdout, share_rows
from fedapp.trees.model import pack_trees
from fedapp.trees.stacked import StackedModel
from strategies.common_table import parties_without_class
from tests.federated import lines_of, summary_of
from tests.network import fails_from, run
from tests.transcript import Listener, arrays_of, scalars_of

BINARY, MULTI, REGRESSION = metrics.OBJECTIVES[:3]
DATA = {BINARY: "breast-cancer", MULTI: "wine", REGRESSION: "diabetes"}

# hello 1, labels 2, fit 3, share 4, rounds 5 and 6, scores of the last head 7, final 8
ROUNDS, FIRST_ROUND = 2, 5


@pytest.fixture
def short(settings):
    """Settings of a short run: 6 trees a party, 2 rounds of 3 epochs."""

    def make(**overrides):
        own = {"trees": 6, "max-depth": 3, "rounds": ROUNDS, "epochs": 3, "channels": 8}
        given = {f"fedxgbllr.{name}": value for name, value in own.items()}
        return settings(**{"strategy": "fedxgbllr", **given, **overrides})

    return make


def model_of(folder):
    return from_text(model_text(folder.path / "model.json"), StackedModel)


# What is sent


@pytest.mark.slow
def test_trees_cross_the_wire_once_each_way(short):
    folder = run_local(short(fedxgbllr__trees=60))
    lines = lines_of(folder.ledger)
    counts = {
        kind: [line for line in lines if line["type"].endswith(kind)] for kind in ("fit", "share")
    }
    assert [len(found) for found in counts.values()] == [6, 6]
    model = model_of(folder)
    packed = pack_trees(model.trees)
    n_bytes, n_splits = sum(array.nbytes for array in packed.values()), len(packed["columns"])
    up = sum(line["bytes"] for line in counts["fit"] if line["to"] == "server")
    down = [line["bytes"] for line in counts["share"] if line["from"] == "server"]
    assert n_bytes + 4 * n_splits < up < 1.1 * (n_bytes + 4 * n_splits)
    assert all(n_bytes < size < 1.1 * n_bytes for size in down)
    others = [line for line in lines if line["type"].endswith(("average", "final"))]
    largest = max(line["bytes"] for line in others if line["from"] == "server")
    assert largest < 4 * model.shape.n_weights + 1000


@pytest.mark.slow
def test_the_base_score_is_that_of_all_parties(short, sites, write_table):
    truth = {"a": [0] * 30 + [1] * 10, "b": [1] * 55 + [0] * 5}
    contexts = sites(
        *(
            {"name": name, "data": write_table(name, len(y), seed=len(y), y=y)}
            for name, y in truth.items()
        )
    )
    app = Listener()
    folder = run(short(parties=2, test_fraction=0.0, valid_fraction=0.0), contexts, app)
    asked = {tuple(arrays_of(request)["base_score"]) for request, _ in app.of_kind("fit")}
    assert asked == {(np.float32(65 / 100),)}
    assert model_of(folder).base_score == np.float32(65 / 100)


def test_heads_are_averaged_by_rows(short):
    app = Listener()
    run(short(partition="sizes:0.7,0.2,0.1", valid_fraction=0.0), app=app)
    rounds = {0: [], 1: []}
    for request, reply in app.of_kind("average"):
        rounds[scalars_of(request)["round_id"]].append((request, reply))
    replies = [reply for _, reply in rounds[0]]
    n_rows = [scalars_of(reply)["n_rows"] for reply in replies]
    assert max(n_rows) > 5 * min(n_rows)
    mean = np.average([arrays_of(reply)["weights"] for reply in replies], axis=0, weights=n_rows)
    sent = arrays_of(rounds[1][0][0])["weights"]
    np.testing.assert_allclose(sent, mean, atol=1e-6)


# What comes out


def test_a_model_that_is_broken_is_refused(short):
    text = (run_local(short()).path / "model.json").read_text()
    document = json.loads(text)
    document["weights"].pop()
    for broken, rule in (
        ("{}", "got another: model must have format"),
        (text[:-20], "got JSONDecodeError"),
        (json.dumps(document), r"weights must be of shape \(\d+,\), got \(\d+,\)"),
    ):
        with pytest.raises(DataError, match=f"^model must be JSON.*, {rule}|another: {rule}"):
            from_text(broken, StackedModel)


@pytest.mark.slow
@pytest.mark.by_default("multi:*")
@pytest.mark.parametrize(
    ("objective", "metric", "least"), [(BINARY, "auc", 0.95), (MULTI, "accuracy", 0.9)]
)
def test_classes_are_learned(short, objective, metric, least):
    more = {"fedxgbllr__trees": 20, "fedxgbllr__epochs": 20, "fedxgbllr__eta": 0.3}
    folder = run_local(short(data=DATA[objective], objective=objective, **more))
    assert summary_of(folder)["metrics"]["test"][metric] > least
    assert model_of(folder).shape.n_outputs == (3 if objective == MULTI else 1)


@pytest.mark.slow
def test_regression_is_learned_in_whatever_unit(short, write_table):
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


@pytest.mark.slow
def test_test_labels_choose_nothing(short, write_table):
    rng = np.random.default_rng(1)
    target = rng.normal(size=200).round(3)
    permuted = target.copy()
    path = write_table("as-is", 200, y=target)
    table = read_source(str(path), Roles(label="y"))
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


@pytest.mark.slow
def test_the_round_with_the_lowest_loss_on_validation_rows_is_kept(short):
    more = {"fedxgbllr__learning_rate": 0.1, "fedxgbllr__patience": 0, "fedxgbllr__rounds": 5}
    folder = run_local(short(valid_fraction=0.3, **more))
    losses = [line["valid"]["logloss"] for line in lines_of(folder.rounds)]
    summary = summary_of(folder)
    assert len(losses) == 5
    assert summary["best_round"] == int(np.argmin(losses)) + 1
    assert summary["metrics"]["valid"]["logloss"] == pytest.approx(min(losses), rel=1e-6)


def test_a_party_with_one_class_takes_part(short, sites, write_table):
    contexts = sites(
        {"name": "a", "data": write_table("a", 80)},
        {"name": "b", "data": write_table("b", 40, seed=1, y=[1] * 40)},
    )
    summary = summary_of(run(short(parties=2, early_stopping_rounds=2), contexts))
    assert summary["trees"] >= 2
    assert summary["metrics"]["test"]["logloss"] < 1
    warning, few = summary["warnings"]
    assert "validation rows are of the rarer class" in few
    assert warning.startswith("no training row of class '0' at b: trees and heads of such a party ")


def test_classes_are_named_with_the_parties_that_do_not_train_them():
    def hello(classes, untrained=""):
        return SimpleNamespace(classes=tuple(classes), untrained=tuple(untrained))

    parties = {"bank": hello("abd", "d"), "shop": hello("bcd", "d"), "post": hello("abc", "b")}
    found = parties_without_class(parties, "abcd")
    assert found == {"a": ("shop",), "b": ("post",), "c": ("bank",)}  # d is trained nowhere
    assert parties_without_class({"bank": hello("ab"), "shop": hello("ab")}, "ab") == {}


def test_parties_that_stop_early_have_fewer_trees(short, sites, write_table):
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


def test_a_party_without_weight_is_refused(short, sites, write_table):
    contexts = sites(
        {"name": "a", "data": write_table("a", 40, w=[1.0] * 40), "weight": "w"},
        {"name": "b", "data": write_table("b", 40, w=[0.0] * 40), "weight": "w"},
    )
    with pytest.raises(PartyError, match=r"^b \(step 3\): weight must be > 0 in some training row"):
        run(short(parties=2), contexts)


@pytest.mark.slow
def test_a_party_that_disappears_between_rounds_leaves_its_trees(short):
    app = Listener(fails_from(FIRST_ROUND + 1))
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


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_rates_of_all_trees_are_in_the_summary_and_on_the_page(short):
    folder = run_local(short())
    summary = summary_of(folder)
    rates = summary["learning_rates"]
    assert {name: len(found) for name, found in rates["trees"].items()} == {
        f"party-{place}": 6 for place in (1, 2, 3)
    }
    for name, weight in rates["parties"].items():
        assert weight == pytest.approx(np.mean(rates["trees"][name]))
    assert summary["head"] == {"kind": "cnn", "parameters": model_of(folder).shape.n_weights}
    assert "Learned rate of each tree" in write_report(folder.path).read_text()


@pytest.mark.slow
def test_the_paper_shares_500_trees_among_the_parties(short):
    model = model_of(run_local(short(parties=5, fedxgbllr__trees=0, fedxgbllr__channels=64)))
    assert model.counts.tolist() == [100] * 5
    assert model.shape.n_weights == 6785


@pytest.mark.slow
def test_neither_torch_nor_xgboost_is_imported_before_it_is_used():
    code = (
        "import sys, fedapp.client_app, fedapp.server_app, fedapp.runs.predict,"
        " strategies.fedxgbllr, clients.fedxgbllr;"
        " assert not {'torch', 'xgboost'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
