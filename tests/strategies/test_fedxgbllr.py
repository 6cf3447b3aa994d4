"""FedXGBllr: its maths against XGBoost and torch, what it sends, and what comes out."""

import numpy as np
import pytest

from fedapp.errors import PartyError
from fedapp.runs.baselines import baseline_rows
from fedapp.runs.local import run_local
from fedapp.trees.stacked import StackedModel
from tests.federated import model_of, summary_of
from tests.network import fails_from, run
from tests.transcript import Listener, arrays_of, scalars_of

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


# What is sent


def test_trees_and_a_base_score_are_sent_once_and_heads_are_averaged_by_rows(short):
    app, settings = Listener(), short(partition="sizes:0.7,0.2,0.1", valid_fraction=0.0)
    run(settings, app=app)
    assert len(app.of_kind("fit")) == len(app.of_kind("share")) == 3
    rows = baseline_rows(settings)[0]
    mean = np.float32(rows.labels[rows.split.train].mean())
    asked = {tuple(arrays_of(request)["base_score"]) for request, _ in app.of_kind("fit")}
    assert asked == {(mean,)}
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


def test_the_round_with_the_lowest_loss_on_validation_rows_is_kept(short):
    more = {"fedxgbllr__learning_rate": 0.1, "fedxgbllr__patience": 0, "fedxgbllr__rounds": 5}
    folder = run_local(short(valid_fraction=0.3, **more))
    losses = [line["valid"]["logloss"] for line in folder.rounds]
    assert len(losses) == 5
    assert folder.summary["best_round"] == int(np.argmin(losses)) + 1
    valid = folder.summary["metrics"]["valid"]
    assert valid["logloss"] == pytest.approx(min(losses), rel=1e-6)


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


def test_parties_that_stop_early_have_fewer_trees(short, sites, write_table):
    noise = np.random.default_rng(7).integers(0, 2, 90)
    contexts = sites(
        {"name": "a", "data": write_table("a", 200)},
        {"name": "b", "data": write_table("b", 90, seed=1, y=noise)},
    )
    how = {"early_stopping_rounds": 1, "valid_fraction": 0.3, "fedxgbllr__trees": 40}
    folder = run(short(parties=2, **how), contexts)
    model, rates = model_of(folder, StackedModel), summary_of(folder)["learning_rates"]["trees"]
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


def test_a_party_that_disappears_between_rounds_leaves_its_trees(short):
    folder = run(short(min_parties=2, valid_fraction=0.0), app=fails_from(FIRST_ROUND + 1))
    summary, model = summary_of(folder), model_of(folder, StackedModel)
    assert [gone["party"] for gone in summary["left_out"]] == ["party-2"]
    assert model.counts.tolist() == [6, 6, 6]
    assert list(summary["learning_rates"]["trees"]) == ["party-1", "party-2", "party-3"]
