"""Linear models whose coordinator sees means over all parties alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedapp.crypto.masking import unmasked_sum
from fedapp.errors import ConfigError, FedappError, PartyError, ProtocolError
from fedapp.messages import fedavg_linear, handshake, secagg
from fedapp.messages.fedavg_linear import (
    AverageSumsRequest,
    MeansRequest,
    OpenRequest,
    SpreadsRequest,
)
from fedapp.run_folder import RunFolder
from fedapp.runs.local import run_local, simulated_contexts
from fedapp.settings import Settings
from fedapp.site.settings import site_config
from fedapp.trees.linear import LinearModel, linear_from_json
from fedapp.trees.model import model_text
from strategies.fedavg_linear import FedAvgLinear
from tests.conftest import MakeSettings, Simulate, WriteTable
from tests.network import die, fails_from, resumed, run
from tests.pooled import made_columns, write_rows
from tests.test_masks import GREETING, N_TRAIN, NAMES, Coordinator
from tests.test_pairwise import MOST_CHI2, chi_squared
from tests.transcript import (
    check_declared,
    check_no_rows,
    label_ranges,
    lines_of,
    listen,
    masked_in,
    summary_of,
)

OBJECTIVES = ["binary:logistic", "multi:softprob", "reg:squarederror"]
SETTING = "fedavg_linear__aggregation"
# One step of all rows a round, of the same length everywhere: the mean is that step of all rows.
ONE_STEP = {
    "fedavg_linear__local_epochs": 1,
    "fedavg_linear__batch_size": 10**6,
    "fedavg_linear__learning_rate": 0.05,
    "fedavg_linear__rounds": 4,
}
MakeRun = Callable[..., Settings]


@pytest.fixture
def made(settings: MakeSettings, tmp_path: Path) -> MakeRun:
    """``made(objective, **overrides)``: a short run under masks, on rows with missing values."""

    def make(objective: str = "binary:logistic", **more: Any) -> Settings:
        data = more.get("data") or tmp_path / f"{objective[:5]}.csv"
        if not more.get("data") and not data.exists():
            write_rows(data, made_columns(objective))
        given = {"label": "y", "objective": objective, SETTING: "secure", **more, "data": str(data)}
        return settings(strategy="fedavg-linear", **{"fedavg_linear__rounds": 2, **given})

    return make


def model_of(folder: RunFolder) -> LinearModel:
    return linear_from_json(model_text(folder.path / "model.json"))


def assert_close(found: LinearModel, expected: LinearModel) -> None:
    """What README promises of both."""
    np.testing.assert_allclose(found.means, expected.means, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(found.scales, expected.scales, rtol=1e-9)
    for own, other in ((found.weights, expected.weights), (found.bias, expected.bias)):
        np.testing.assert_allclose(own, other, rtol=0, atol=1e-6 * np.abs(expected.weights).max())
    assert np.abs(found.weights).max() > 0.01


# Sums have no order


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_model_is_the_same_for_any_split_of_the_rows(made: MakeRun, objective: str) -> None:
    whole = model_of(run_local(made(objective, parties=1, **ONE_STEP)))
    for split in ({"parties": 2}, {"parties": 5, "partition": "sizes:0.7,0.2,0.06,0.03,0.01"}):
        found = model_of(run_local(made(objective, **split, **ONE_STEP)))
        assert found.means.tobytes() == whole.means.tobytes()
        assert found.scales.tobytes() == whole.scales.tobytes()
        assert_close(found, whole)


def test_the_order_of_the_parties_does_not_matter(made: MakeRun, tmp_path: Path) -> None:
    columns, runs = made_columns("binary:logistic"), []
    for order in ("abc", "cab"):
        files = [
            f"{name}={write_rows(tmp_path / f'{name}-{begin}.csv', own)}"
            for name, begin in zip(order, (0, 150, 180), strict=True)
            for own in [{key: one[begin:] for key, one in columns.items()}]
        ]
        held = {"parties": 3, "test_fraction": 0.0, "valid_fraction": 0.0}
        runs.append(model_of(run_local(made(data=",".join(sorted(files)), **held, **ONE_STEP))))
    assert runs[0].means.tobytes() == runs[1].means.tobytes()
    assert_close(*runs)


# Nothing changes but who sees what


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_model_and_its_scores_are_those_of_plain_averages(
    made: MakeRun, objective: str
) -> None:
    found, plain = (run_local(made(objective, **{SETTING: how})) for how in ("secure", "plain"))
    assert_close(model_of(found), model_of(plain))
    scores, expected = (summary_of(each)["metrics"] for each in (found, plain))
    assert scores.pop("by_party") == {}
    for subset, own in scores.items():
        assert own == pytest.approx(expected[subset], rel=1e-5, abs=1e-5)
    rounds = [lines_of(each.rounds)[-1]["valid"] for each in (found, plain)]
    assert rounds[0] == pytest.approx(rounds[1], rel=1e-5, abs=1e-5)


def test_weights_and_categories_are_those_of_all_rows(made: MakeRun, tmp_path: Path) -> None:
    columns = made_columns("binary:logistic")
    rng = np.random.default_rng(4)
    columns["c"] = rng.choice(["oslo", "rome", "bonn", "york", "lima"], 400)
    columns["w"] = rng.uniform(0, 3, 400).round(3)
    columns["w"][::17] = 0
    columns["g"] = 1e9 + 1e4 * columns["a"]
    path = write_rows(tmp_path / "weighted.csv", columns)
    given = {"data": str(path), "weight": "w", "partition": "column:c", "parties": 5}
    found, plain = (run_local(made(**given, **{SETTING: how})) for how in ("secure", "plain"))
    assert_close(model_of(found), model_of(plain))


def test_a_run_takes_three_exchanges_more(made: MakeRun) -> None:
    found, plain = (summary_of(run_local(made(**{SETTING: how}))) for how in ("secure", "plain"))
    assert found["exchanges"] == plain["exchanges"] + 3


def test_early_stopping_keeps_the_model_of_the_best_round(made: MakeRun) -> None:
    given = {"early_stopping_rounds": 2, "valid_fraction": 0.3, "fedavg_linear__rounds": 30}
    folder = run_local(made(**given))
    summary, lines = summary_of(folder), lines_of(folder.rounds)
    assert len(lines) == summary["best_round"] + 2 < 30
    best = lines[summary["best_round"] - 1]["valid"]["logloss"]
    assert summary["metrics"]["valid"]["logloss"] == pytest.approx(best, rel=1e-9)


@pytest.mark.slow
def test_flowers_simulation_gives_the_model_of_the_local_engine(
    made: MakeRun, simulate: Simulate
) -> None:
    local, simulated = run_local(made()), simulate(made())
    names = [each.path / "model.json" for each in (local, simulated)]
    assert names[0].read_bytes() == names[1].read_bytes()
    assert summary_of(simulated)["metrics"] == summary_of(local)["metrics"]


# A server that dies, a party that is lost


# Hello 1, keys 2, sums of columns 3 to 5, rounds 6 to 8, scores 9.
@pytest.mark.parametrize(
    "how",
    [
        {"dies_before_reading": 7},
        {"dies_before_sending": 8},
        {"dies_before_reading": 9},
        *(pytest.param({"dies_before_reading": step}, marks=pytest.mark.slow) for step in (3, 5)),
    ],
)
def test_a_server_that_dies_goes_on_to_the_same_model(made: MakeRun, how: dict[str, int]) -> None:
    rounds = {"fedavg_linear__rounds": 3}
    expected = (run_local(made(**rounds)).path / "model.json").read_bytes()
    run_settings = made(**rounds)
    die(run_settings, **how)
    folder = run(resumed(run_settings), simulated_contexts(run_settings))
    assert (folder.path / "model.json").read_bytes() == expected


# Of four parties hello 1, keys 2; then sums in two exchanges each: columns 3 to 8, rounds 9 on.
FIRST = 9


@pytest.mark.parametrize("round_id", [0, 2])
def test_a_run_goes_on_without_a_party_that_is_lost(made: MakeRun, round_id: int) -> None:
    given = {"parties": 4, "min_parties": 3, **ONE_STEP}
    folder = run(made(**given), app=fails_from(FIRST + 2 * round_id))
    plain = run(made(**given, **{SETTING: "plain"}), app=fails_from(3 + round_id))
    for each in (folder, plain):
        assert [gone["party"] for gone in summary_of(each)["left_out"]] == ["party-2"]
    assert_close(model_of(folder), model_of(plain))


def test_a_run_that_loses_none_gives_the_model_of_one_mask_a_pair(made: MakeRun) -> None:
    shares, none = (run_local(made(parties=4, min_parties=fewest)) for fewest in (3, 0))
    assert (shares.path / "model.json").read_bytes() == (none.path / "model.json").read_bytes()
    found, expected = (summary_of(each)["exchanges"] for each in (shares, none))
    assert found - 3 == 2 * (expected - 3)


def test_a_party_that_is_lost_before_the_first_round_ends_the_run(made: MakeRun) -> None:
    for step in (3, 5, 7):
        with pytest.raises(PartyError, match=rf"^party-2 \(step {step}\): broke$"):
            run(made(parties=4, min_parties=3), app=fails_from(step))


def test_a_resumed_run_goes_on_without_those_it_had_lost(made: MakeRun) -> None:
    given = {"parties": 4, "min_parties": 3, **ONE_STEP}
    whole = run(made(**given), app=fails_from(FIRST))
    run_settings, lost = made(**given), fails_from(FIRST)
    with pytest.raises(KeyboardInterrupt):
        run(run_settings, app=lost, dies_before_sending=FIRST + 4)
    folder = run(resumed(run_settings), simulated_contexts(run_settings), lost)
    assert (folder.path / "model.json").read_bytes() == (whole.path / "model.json").read_bytes()


# What is sent


KINDS = {
    "query.greet": (handshake.GreetRequest, handshake.GreetReply),
    "query.hello": (handshake.HelloRequest, handshake.HelloReply),
    "query.secure_keys": (secagg.KeysRequest, secagg.KeysReply),
    "train.fedavg_linear_open": (fedavg_linear.OpenRequest, secagg.MaskedReply),
    "train.fedavg_linear_means": (fedavg_linear.MeansRequest, secagg.MaskedReply),
    "train.fedavg_linear_spreads": (fedavg_linear.SpreadsRequest, secagg.MaskedReply),
    "train.fedavg_linear_sums": (fedavg_linear.AverageSumsRequest, secagg.MaskedReply),
    "evaluate.fedavg_linear_sums": (fedavg_linear.ScoreSumsRequest, secagg.MaskedReply),
}


def test_messages_hold_what_their_modules_list_and_nothing_else(made: MakeRun) -> None:
    folder, app = listen(made(partition="sizes:0.6,0.3,0.1"))
    check_declared(app, KINDS)
    check_no_rows(app, summary_of(folder))


def test_what_a_party_sends_is_uniform(made: MakeRun) -> None:
    _, app = listen(made())
    masked = masked_in(app)
    assert len(masked) == 3 * 6
    assert chi_squared(np.concatenate(masked)) < MOST_CHI2


def test_the_range_of_labels_is_told_to_powers_of_two(made: MakeRun) -> None:
    _, app = listen(made("reg:squarederror"))
    ranges = label_ranges(app)
    assert {float(np.log2(value)) % 1 for value in ranges} == {0.0}


# Who is refused


def test_settings_that_masks_cannot_keep_are_refused(made: MakeRun) -> None:
    rule = r"^min-parties must be 0 or >= 3 of 4 with fedavg-linear\.aggregation=secure, got 2"
    with pytest.raises(ConfigError, match=rule):
        FedAvgLinear.check_settings(made(parties=4, min_parties=2))
    with pytest.raises(ConfigError, match=r"^min-parties must be 0 with fedavg-linear\.aggreg"):
        FedAvgLinear.check_settings(made(parties=4, min_parties=3, early_stopping_rounds=2))
    with pytest.raises(ConfigError, match=r"^fedavg-linear\.aggregation must be .*got 'half'"):
        FedAvgLinear.check_settings(made(**{SETTING: "half"}))


def test_two_parties_are_told_what_each_sees(made: MakeRun) -> None:
    warnings = summary_of(run_local(made(parties=2)))["warnings"]
    assert any("fedavg-linear.aggregation=secure hides little among 2" in one for one in warnings)


@pytest.mark.parametrize(
    ("node", "aggregation", "rule"),
    [
        ({"least-parties": 4}, "secure", r"parties must be >= 4 \(least-parties of bank\), got 3"),
        ({"least-parties": 2}, "plain", r"aggregation must be secure for bank, whose node config"),
        ({"trusted": f"shop:{'0' * 32}"}, "secure", r"key must be one bank trusts \(none is pin"),
        ({"min-rows": 50}, "secure", r"at least 50 training rows, got \d+ \(min-rows of bank\)"),
        ({"run-epsilon": 1}, "secure", r"privacy\.epsilon must be > 0 and <= 1 for bank"),
        ({"score-bins": 100}, "secure", r"score-bins must be <= 100 \(score-bins in the node"),
    ],
)
def test_a_site_refuses_what_its_node_config_does(
    made: MakeRun,
    three: Callable[..., Any],
    node: dict[str, Any],
    aggregation: str,
    rule: str,
) -> None:
    run_settings = made(parties=3, **{SETTING: aggregation})
    with pytest.raises(FedappError, match=rule):
        run_local(run_settings, three(bank=node))


def test_sites_with_tables_of_their_own_train(made: MakeRun, three: Callable[..., Any]) -> None:
    run_settings = made(objective="auto", data="breast-cancer", parties=3)
    model = model_of(run_local(run_settings, three(bank={"least-parties": 3})))
    assert model.objective == "binary:logistic"
    assert (model.weights > 0).all()


def test_a_model_beyond_what_holds_for_all_is_refused(
    made: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedapp.trees.linear.MODEL_POWER", -5)
    rule = r"every weight of the model must be <= 0\.03125 in size, got a larger one; a smaller fed"
    with pytest.raises(PartyError, match=rule):
        run_local(made())


# A coordinator that breaks the rules


@pytest.fixture
def coordinator(write_table: WriteTable) -> Coordinator:
    nodes = {
        name: {"name": name, "data": str(write_table(name, seed=seed)), "label": "y"}
        for seed, name in enumerate(NAMES)
    }
    allow = {"allow": "fedavg-linear"}
    configs = {name: site_config({**node, **allow}, {}) for name, node in nodes.items()}
    found = Coordinator(configs, method="fedavg-linear", opens=OpenRequest)
    found.ask(found.opening, 3)
    return found


POWERS = MeansRequest(np.array([4, 4]))
MIDDLE = SpreadsRequest(np.zeros(2))
TRAIN = AverageSumsRequest(
    round_id=0,
    classes=("0", "1"),
    means=np.zeros(2),
    scales=np.ones(2),
    weights=np.zeros((2, 1)),
    bias=np.zeros(1),
    epochs=1,
    batch_size=10,
    learning_rate=0.1,
    decay=1.0,
    l2=0.0,
    seed=GREETING.seed,
    score_bins=16,
    among=(),
    weight_power=7,
)


@pytest.mark.parametrize(
    ("asked", "rule"),
    [
        ([MeansRequest(np.array([4]))], r"MeansRequest\.powers must be 2, got 1"),
        ([MeansRequest(np.array([-9, 4]))], r"powers must be no less than those of bank"),
        ([POWERS, POWERS], r"MeansRequest\.powers must be sent once"),
        ([MIDDLE], r"must come later: the site has no powers"),
        ([POWERS, SpreadsRequest(np.zeros(3))], r"SpreadsRequest\.means must be 2, got 3"),
        ([POWERS, SpreadsRequest(np.array([0.0, 17]))], r"means must be within the largest"),
        ([POWERS, MIDDLE, MIDDLE], r"SpreadsRequest\.means must be sent once"),
        ([replace(TRAIN, weight_power=4)], r"weight_power must be no less than that of bank"),
        ([replace(TRAIN, weight_power=-100)], r"weight_power must be no less than that of bank"),
        (
            [replace(TRAIN, weights=np.zeros((2, 2)), bias=np.zeros(2))],
            r"weights must be of shape \(2, 1\)",
        ),
    ],
)
def test_what_breaks_the_rules_is_refused(
    coordinator: Coordinator, asked: list[Any], rule: str
) -> None:
    *before, last = asked
    for step, request in enumerate(before, start=4):
        coordinator.ask(request, step)
    with pytest.raises(ProtocolError, match=rule):
        coordinator.ask(last, 4 + len(before))


def test_a_run_that_has_begun_under_masks_asks_no_party_for_its_own(
    coordinator: Coordinator,
) -> None:
    own = {name: getattr(TRAIN, name) for name in fedavg_linear.AverageRequest.forms}
    with pytest.raises(ProtocolError, match=r"must be one for sums over all parties"):
        coordinator.ask(fedavg_linear.AverageRequest(**own), 4)


def test_parties_that_are_asked_for_different_models_give_noise_from_there_on(
    coordinator: Coordinator,
) -> None:
    second, n_values = replace(TRAIN, round_id=1), 4 + 2 * (5 + 2 * 16)
    other = replace(second, weights=np.ones((2, 1)))

    def weight(asked: Any, step: int) -> float:
        return float(unmasked_sum(coordinator.masked(asked, step).values(), n_values)[0]) / 2**55

    assert weight(TRAIN, 4) == 3 * N_TRAIN
    assert weight({"bank": other, "insurer": second, "shop": second}, 5) != 3 * N_TRAIN
    assert weight(replace(TRAIN, round_id=2), 6) != 3 * N_TRAIN
