"""What every method must do, whatever it trains or predicts with."""

import json
from operator import attrgetter
from pathlib import Path

import numpy as np
import pytest

from fedapp.data import scratch
from fedapp.data.datasets import read_source
from fedapp.data.schema import Roles
from fedapp.errors import ConfigError, PartyError
from fedapp.home import LOCK, home
from fedapp.messages.methods import all_methods
from fedapp.records.codec import Array, fields_of
from fedapp.run_folder import Checkpoints
from fedapp.runs.local import run_local, simulated_contexts
from fedapp.runs.predict import predict_table
from fedapp.site.log import LOG
from fedapp.site.store import PART_FILE, STATE
from fedapp.site.table import Holdout, share_rows
from strategies.run import all_strategies
from tests.contract.methods import METHODS, OBJECTIVES, ROUNDS
from tests.federated import lines_of, summary_of
from tests.forests import move_thresholds
from tests.letters import raw_of, written
from tests.network import die, fails_from, one_of_each_kind, resumed, run
from tests.stored import store_of, with_arrays
from tests.transcript import check_declared, check_no_rows

SLOW = pytest.mark.slow


def methods(where=lambda row: True):
    """A test for each method, or for those of which something holds."""
    return pytest.mark.parametrize("name", [name for name, row in METHODS.items() if where(row)])


every_method = methods()
trains = methods(lambda row: not row.trained)
predicts = methods(lambda row: row.trained)


def test_every_method_has_a_row():
    computing = {name for name, method in all_methods().items() if method.trains or method.predicts}
    assert {row.strategy for row in METHODS.values()} == computing


# What it computes


@pytest.mark.each_value_once
@pytest.mark.parametrize(
    ("name", "objective"),
    [(name, objective) for name, row in METHODS.items() for objective in row.objectives],
)
def test_a_run_equals_its_pooled_reference(trained, name, objective):
    METHODS[name].equals_pooled(*trained(name, objective))


@pytest.mark.by_default(
    "pax, secure",
    "fedxgbllr",
    "cyclic",
    "secureboost",
    "federated-forest, encoded",
    "eini",
    "fedavg-linear",
)
@every_method
def test_two_runs_with_one_seed_are_equal_whatever_the_order_of_the_parties_and_of_values(
    made, recorded, name, monkeypatch
):
    monkeypatch.setattr(scratch, "LARGEST", 0)  # tables are mapped from files, by columns
    settings = made(name)
    again = run(settings, reversed(simulated_contexts(settings)))
    assert METHODS[name].result(again) == recorded(name).result
    assert summary_of(again)["metrics"] == recorded(name).summary["metrics"]


@pytest.mark.by_default("pax", "fedxgbllr", "horizontal-forest", "secureboost")
@trains
def test_another_seed_gives_another_model(made, recorded, name):
    other = run_local(made(name, seed=7))
    assert METHODS[name].result(other) != recorded(name).result


@pytest.mark.by_default("True-pax", "True-cyclic", "True-fedavg-linear", "*-secureboost")
@methods(lambda row: row.stops_early)
@pytest.mark.parametrize("stops", [True, False])
def test_the_best_round_is_kept_also_where_rounds_run_out(made, name, stops):
    given = {"early_stopping_rounds": 3, "valid_fraction": 0.3}
    if stops and name == "fedavg-linear":
        given |= {"fedavg_linear__rounds": 200, "fedavg_linear__local_epochs": 30}
    elif stops:
        given |= {"eta": 1.0, "num_boost_round": 40}
    folder = run_local(made(name, "binary:logistic", **given))
    summary, lines = summary_of(folder), folder.rounds
    losses = [line["valid"]["logloss"] for line in lines]
    assert summary["best_round"] == int(np.argmin(losses)) + 1
    assert summary["metrics"]["valid"]["logloss"] == pytest.approx(min(losses), abs=1e-6)
    if stops:
        assert summary["best_round"] == len(lines) - 3 < 150
    else:
        assert len(lines) == ROUNDS


@methods(lambda row: not row.is_vertical and "privacy__epsilon" not in row.settings)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_summary_scores_the_model_that_was_written(trained, tmp_path, name, objective):
    settings, folder = trained(name, objective)
    table = read_source(settings.data, Roles(label="y"))
    holdout = Holdout(settings.test_fraction, settings.valid_fraction, settings.seed)
    shares = share_rows(table, holdout, settings.partition, settings.parties)
    lines = Path(settings.data).read_text().splitlines()
    rows = [lines[1 + row] for row in np.concatenate(shares["test"])]
    (tmp_path / "test.csv").write_text("\n".join([lines[0], *rows]) + "\n")
    scored = predict_table(folder.path, str(tmp_path / "test.csv"), "", tmp_path / "out.csv")
    scores = summary_of(folder)["metrics"]["test"]
    loss = {"binary:logistic": "logloss", "multi:softprob": "mlogloss"}.get(objective, "rmse")
    for one in {loss, "accuracy", "f1"} & set(scores):
        assert scores[one] == pytest.approx(scored.scores[one], rel=1e-4), one


# What it says


@every_method
@pytest.mark.each_value_once
@pytest.mark.parametrize(("parties", "depth"), [(2, 3), (3, 1)])
def test_a_run_takes_the_exchanges_it_is_known_for(made, name, parties, depth):
    folder = run_local(made(name, parties=parties, depth=depth))
    expected = METHODS[name].exchanges(parties, depth)
    found = summary_of(folder)["exchanges"]
    steps = {line["step"] for line in folder.ledger}
    assert found == len(steps)
    if name == "interactive":  # rows ask for no more levels than their ways have passive splits
        assert expected - 2 * depth < found <= expected
    else:
        assert found == expected


@every_method
def test_messages_have_their_declared_fields(recorded, name):
    check_declared(recorded(name).app, METHODS[name].kinds)


@every_method
def test_nothing_of_rows_leaves_a_party_in_the_clear(recorded, name):
    """No message has an array as long as a party's rows, or neighbouring values of a column."""
    run = recorded(name)
    if not METHODS[name].trained:
        check_no_rows(run.app, run.summary)
    secrets = secrets_of(run.settings, METHODS[name].is_vertical)
    sent = b"|".join({raw_of(message) for _, *pair in run.app.heard for message in pair})
    assert len(secrets) > 300
    assert not [secret for secret in secrets if secret in sent]


def secrets_of(settings, is_vertical):
    """Some values of neighbouring rows of each column and of the labels, as they may be written."""
    table = read_source(settings.data, Roles(label="y"))
    assert table.labels is not None
    columns = [*table.values.T, table.labels.astype(np.float32)]
    orders = [np.arange(table.n_rows)]
    if not is_vertical:
        holdout = Holdout(settings.test_fraction, settings.valid_fraction, settings.seed)
        orders = share_rows(table, holdout, settings.partition, settings.parties)["train"]
    places = [order[first : first + 6] for order in orders for first in range(0, len(order) - 6, 9)]
    runs = [column[rows] for column in columns for rows in places]
    kept = [run for run in runs if len(np.unique(run[~np.isnan(run)])) >= 4]
    return set[bytes]().union(*(written(np.nan_to_num(run), 6) for run in kept))


@every_method
def test_the_ledger_has_every_byte_of_the_summary_and_rounds_their_scores(recorded, name):
    run = recorded(name)
    lines = run.folder.ledger
    to_server = sum(line["bytes"] for line in lines if line["to"] == "server")
    to_parties = sum(line["bytes"] for line in lines if line["from"] == "server")
    assert run.summary["bytes"] == {"to_parties": to_parties, "to_server": to_server}
    assert len(lines) == 2 * len(run.app.heard)
    assert to_server > sum(len(raw_of(reply)) for _, _, reply in run.app.heard) / 2
    if METHODS[name].trained:
        return
    assert [line["round"] for line in run.rounds] == [1, 2]
    for key, total in run.summary["bytes"].items():
        of_rounds = sum(line["bytes"][key] for line in run.rounds)
        assert 0 < of_rounds <= total
        assert of_rounds == total or not METHODS[name].counts_all
    assert all(line["train"] for line in run.rounds) == (name != "pax, private")


@trains
def test_a_checkpoint_has_all_of_the_state(made, name, monkeypatch):
    """What was changed in place would be missing: only fields that were assigned are written."""
    settings, save, steps = made(name), Checkpoints.save, list[int]()

    def save_and_read(checkpoints, state, of_method):
        save(checkpoints, state, of_method)
        read = Checkpoints(Path(settings.run_dir)).read(type(of_method))
        for field, codec in fields_of(type(of_method)).items():
            here, there = (in_bytes(codec, attrgetter(field)(one)) for one in (of_method, read))
            assert here == there, field
        steps.append(state.step)

    monkeypatch.setattr(Checkpoints, "save", save_and_read)
    run_local(settings)
    assert len(steps) >= 2


def in_bytes(codec, value):
    arrays = list[Array]()
    tree = json.dumps(codec.encode(value, arrays))
    return tree, *((one.dtype, one.shape, one.tobytes()) for one in arrays)


@every_method
def test_a_finished_run_leaves_no_checkpoint_no_rows_and_its_model(recorded, tmp_path, name):
    run = recorded(name)
    left = {path.name for path in run.folder.path.iterdir()}
    assert not any(one.startswith(("checkpoint", "failure", ".")) for one in left - {LOCK})
    states = [content for path, content in run.sites.items() if Path(path).name == STATE]
    assert states
    for number, content in enumerate(states):
        store = store_of(tmp_path / str(number), content)
        assert store.finished
        assert not store.may_roll_back
        assert with_arrays(store) <= {"reply", "ended", "ended_masks"}
    if not METHODS[name].is_vertical:
        models = [content for path, content in run.sites.items() if "/model.json" in path]
        assert models == [run.result] * 3
    if METHODS[name].trained:
        folder = f"{run.summary['active']}/{run.summary['model_id']}/predictions"
        kept = {path for path in run.sites if run.summary["model_id"] in path}
        kept = {path for path in kept if Path(path).name not in {STATE, "lock"}}
        assert kept == {f"{folder}.csv", f"{folder}.json"}


@every_method
def test_a_run_at_sites_that_are_not_simulated_ends_within_their_policies(
    made, sites, write_table, name
):
    """Only there is each request compared with the plan, and counted."""
    row, names, ids = METHODS[name], ("bank", "insurer", "shop"), [f"c{row}" for row in range(40)]
    nodes = [
        {"name": site, "id": "id", "allow": row.strategy, "most-rounds": ROUNDS} for site in names
    ]
    for seed, node in enumerate(nodes):
        passive = {"y": None} if row.is_vertical and seed else {}
        node |= {"data": write_table(names[seed], seed=seed, id=ids, **passive)}
        node |= {"label": ""} if passive else {}
        node |= {"least-parties": 3} if "secure" in row.settings.values() else {}
    more = {}
    if row.trained:
        trainer = METHODS[row.trained].strategy
        trained = run(
            made(row.trained, "binary:logistic"),
            sites(*({**node, "allow": trainer} for node in nodes)),
        )
        more = {"model": summary_of(trained)["model_id"]}
    folder = run(made(name, "binary:logistic", **more), sites(*nodes))
    assert {line["type"] for line in folder.ledger} == row.kinds
    model_id = summary_of(folder)["model_id"]
    for site in names:
        lines = lines_of(home() / "sites" / site / LOG)
        events = [line["event"] for line in lines if line.get("run") == model_id]
        assert (events.count("opened"), events.count("ended")) == (1, 1)
        assert "refused" not in events


# What may go wrong


@pytest.mark.by_default(
    "reading-one_of_each_kind-pax, secure",
    "reading-one_of_each_kind-fedxgbllr",
    "reading-one_of_each_kind-cyclic",
    "reading-one_of_each_kind-horizontal-forest",
    "reading-one_of_each_kind-secureboost",
    "reading-one_of_each_kind-federated-forest, encoded",
    "reading-one_of_each_kind-interactive",
)
@every_method
@pytest.mark.parametrize("steps_of", [one_of_each_kind, pytest.param(sorted, marks=SLOW)])
@pytest.mark.parametrize("how", ["reading", pytest.param("sending", marks=SLOW)])
def test_a_server_that_dies_goes_on_to_the_same_result(made, recorded, name, steps_of, how):
    whole = recorded(name)
    steps = {step: kind for step, kind in whole.steps.items() if step}
    for step in steps_of(steps):
        settings = made(name)
        die(settings, **{f"dies_before_{how}": step})
        folder = run(resumed(settings), simulated_contexts(settings))
        assert METHODS[name].result(folder) == whole.result, step
        summary = summary_of(folder)
        assert summary["metrics"] == whole.summary["metrics"], step
        if not METHODS[name].trained:
            assert [line["round"] for line in folder.rounds] == [1, 2], step


@pytest.mark.by_default(
    "request lost-pax",
    "reply lost-pax, secure",
    "reply twice-fedxgbllr",
    "request lost-secureboost",
    "reply lost-federated-forest, encoded",
    "reply twice-cyclic",
    "request lost-interactive",
    "reply twice-eini",
)
@every_method
@pytest.mark.parametrize(
    "fault",
    [
        {"loses_request": lambda step, before: step > 1 and before == 0},
        {"loses_reply": lambda step, before: step > 1 and before == 0},
        {"repeats_replies": True},
    ],
    ids=["request lost", "reply lost", "reply twice"],
)
def test_messages_that_are_lost_once_or_come_twice_change_nothing(made, recorded, name, fault):
    again = {} if "repeats_replies" in fault else {"resend_after": 0.05}
    folder = run(made(name, **again), **fault)
    assert METHODS[name].result(folder) == recorded(name).result
    assert summary_of(folder)["left_out"] == []


@pytest.mark.by_default(
    "broke-pax",
    "broke-fedxgbllr",
    "broke-cyclic",
    "broke-secureboost",
    "broke-federated-forest, encoded",
    "broke-interactive",
    "broke-eini",
    "silent-pax",
)
@every_method
@pytest.mark.parametrize("what", ["broke", "silent"])
def test_a_party_that_fails_or_is_silent_stops_the_run_by_name(made, recorded, name, what):
    last = recorded(name).last_step
    spare = {"min_parties": 2} if METHODS[name].is_vertical else {}  # of columns all are needed
    settings, how, reason = made(name, **spare), {"app": fails_from(last)}, "broke"
    if what == "silent":
        seconds = 3 if "key_bits" in str(METHODS[name].settings) else 1  # to encrypt in
        settings = made(name, exchange_deadline=float(seconds), resend_after=0.2)
        how = {"loses_request": lambda step, before: step >= last}
        reason = f"no answer within {seconds} s"
    with pytest.raises(
        PartyError, match=rf"^party-2 \(step {last}\): {reason}(; resume=.+ resumes the run)?$"
    ):
        run(settings, **how)
    assert_stopped(settings)


def assert_stopped(settings):
    """The run's folder has the reason, and no model."""
    names = {path.name for path in Path(settings.run_dir).iterdir()}
    assert "failure.json" in names
    assert not {"model.json", "summary.json"} & names


@methods(lambda row: row.may_lose)
def test_a_lost_party_is_left_out_where_others_may_go_on(made, recorded, name):
    (first,) = [min(s for s, kind in recorded(name).steps.items() if kind.startswith("train"))]
    folder = run(made(name, min_parties=2), app=fails_from(first + 1))
    summary = summary_of(folder)
    assert summary["left_out"] == [{"party": "party-2", "step": first + 1, "reason": "broke"}]
    assert [party["name"] for party in summary["parties"]] == ["party-1", "party-3"]
    asked = [line["step"] for line in folder.ledger if line["to"] == "party-2"]
    assert max(asked) == first + 1
    assert len(folder.rounds) == ROUNDS


# Flower, and settings


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "secureboost" else SLOW)
        for name in METHODS
        if name != "pax, private"  # whose noise cannot be silenced there
    ],
)
def test_flowers_simulation_gives_the_result_of_the_local_engine(made, simulate, name):
    settings = made(name)
    local = run_local(settings)
    expected, summary = METHODS[name].result(local), summary_of(local)
    folder = simulate(settings.model_copy(update={"run_dir": settings.run_dir + "-simulated"}))
    assert METHODS[name].result(folder) == expected
    assert summary_of(folder)["engine"] == "simulation"
    assert summary_of(folder)["metrics"] == summary["metrics"]


# With what it predicts


@predicts
@pytest.mark.parametrize(
    ("damage", "rule"),
    [
        (lambda path: move_thresholds(path.parent), ": model must be the one this run was trained"),
        (Path.unlink, r" \(step 1\): model must have a part at this"),
    ],
    ids=["of another model", "missing"],
)
def test_a_part_that_is_not_the_models_is_refused_by_the_partys_name(made, name, damage, rule):
    settings = made(name)
    damage(home() / "sites" / "party-2" / settings.model / PART_FILE)
    with pytest.raises(PartyError, match=f"party-2{rule}"):
        run_local(settings)


# Settings


REFUSED = [
    ("bagging", "local-rounds", 1.5, "must be a whole number, got 1.5"),
    ("bagging", "local-rounds", 10**7, "must be <= 1000000, got 10000000"),
    ("fedavg-linear", "rounds", 0, "must be >= 1, got 0"),
    ("fedavg-linear", "learning-rate", 0, "must be > 0.0, got 0"),
    ("fedavg-linear", "batch-size", 2**31, "must be < 2147483648, got 2147483648"),
    ("fedavg-linear", "l2", float("nan"), "must be a number, got nan"),
    ("federated-forest", "criterion", "variance", "must be gini or entropy for binary:logistic"),
    ("federated-forest", "max-features", 1.5, "must be "),
    ("pax", "bins", "half", "must be one of 'auto', 'share' or 'equal', got 'half'"),
]


@pytest.mark.parametrize(("strategy", "name", "value", "rule"), REFUSED)
def test_a_value_that_a_method_does_not_take_is_refused(settings, strategy, name, value, rule):
    given = settings(strategy=strategy, **{f"{strategy}.{name}": value})
    with pytest.raises(ConfigError) as caught:
        all_strategies()[strategy].section_settings(given)
    assert str(caught.value).startswith(f"{strategy}.{name} {rule}")


@pytest.mark.parametrize(
    "strategy", [name for name, method in all_methods().items() if method.uses_model]
)
def test_a_prediction_without_a_model_is_refused(settings, strategy):
    with pytest.raises(ConfigError, match="model must be the id of a trained model"):
        all_strategies()[strategy].section_settings(settings(strategy=strategy))
