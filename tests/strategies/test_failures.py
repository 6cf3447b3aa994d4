"""Parties that fail, messages that get lost, servers that die: what is left of a run."""

import json
import re
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Error, Message, RecordDict

import fedapp
from fedapp.client_app import SiteApp
from fedapp.errors import ConfigError, DivergedError, FedappError, PartyError, ProtocolError
from fedapp.home import LOCK, home
from fedapp.messages.pax import GrowReply, GrowRequest, SketchReply
from fedapp.messages.wire import from_content, from_records, to_content, to_records
from fedapp.records.document import load
from fedapp.run_folder import RunFolder
from fedapp.runs.local import run_local, simulated_contexts
from fedapp.settings import load_settings
from fedapp.site.answer import find_handler
from fedapp.site.store import LiveStores
from fedapp.trees.model import Ensemble
from tests.federated import lines_of, model_bytes, summary_of
from tests.network import NODE, FaultyApp, die, fails_from, resumed, run

# Three rounds of depth 3: hello 1, sketches 2, trees 3-5, 6-8 and 9-11, scores 12. A checkpoint
# follows each tree.
ROUNDS, DEPTH = 3, 3
STEPS = range(1, 13)
FIRST_TREE, SECOND_TREE, LAST = (3, 4, 5), (6, 7, 8), 12
THREE_ROUNDS = {"num-boost-round": ROUNDS, "max-depth": DEPTH, "max-bin": 16, "subsample": 0.8}


@pytest.fixture(scope="module", autouse=True)
def undisturbed(tmp_path_factory):
    """The model of a run in which nothing happens. It loads what the first message of a process
    loads, so that short deadlines hold."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDAPP_HOME", str(folder / "home"))
        return model_bytes(
            run(load_settings({**THREE_ROUNDS, "eta": 0.3, "run-dir": str(folder / "run")}))
        )


@pytest.fixture
def three_rounds(settings):
    def make(**overrides):
        return settings(**THREE_ROUNDS, **overrides)

    return make


def answers(step, change):
    """Party-2 changes its reply to one step."""

    def fault(now, request, reply):
        if now != step:
            return reply
        envelope, content = from_records(reply.content, "party-2")
        kind = {2: SketchReply}.get(step, GrowReply)
        changed = change(from_content(kind, content, "party-2"))
        return Message(to_records(to_content(changed, "party-2"), envelope), reply_to=request)

    return FaultyApp(fault)


class LosesOneATree(SiteApp):
    """Sites of which one more fails at the second level of each round."""

    def __init__(self, contexts):
        super().__init__()
        self._left = [context.node_id for context in contexts]
        self._lost = {}  # node by round

    def __call__(self, message, context):
        reply, node = super().__call__(message, context), context.node_id
        if message.metadata.message_type != "train.pax_grow":
            return reply
        sent = from_content(GrowRequest, from_records(message.content, "server")[1], "server")
        if sent.level == 1 and sent.round_id == len(self._lost) and self._left[:1] == [node]:
            self._lost[sent.round_id] = self._left.pop(0)
            return Message(Error(1001, f"{node}: broke"), reply_to=message)
        return reply


def refuses(error, match, run_settings, **how):
    """Holds that a run stops with this error, and leaves no model but the reason."""
    with pytest.raises(error, match=match) as caught:
        run(run_settings, **how)
    folder = Path(run_settings.run_dir)
    assert not (folder / "model.json").exists()
    failure = json.loads((folder / "failure.json").read_text())
    del failure["ended"]
    assert failure == {"error": type(caught.value).__name__, "message": str(caught.value)}


# A party that fails stops the run


@pytest.mark.slow
def test_a_node_that_never_speaks_stops_the_run(three_rounds):
    refuses(
        PartyError,
        r"^node 3 \(step 0\): no answer within 1 s$",
        three_rounds(exchange_deadline=1.0, resend_after=0.2, min_parties=1),
        loses_request=lambda step, before: True,
    )


def test_a_site_that_fails_stops_the_run_by_name_and_keeps_its_reason(three_rounds, monkeypatch):
    def fail(*arguments):
        raise ValueError("label of row 17 is 0.3")

    monkeypatch.setattr("clients.pax.build_all_histograms", fail)
    refuses(
        PartyError,
        r"^party-1 \(step 3\): ValueError in train.pax_grow; the site's own log says more$",
        three_rounds(),
    )


@pytest.mark.by_default("1000-*", "2-Traceback*")
@pytest.mark.parametrize(
    ("code", "reason", "told"),
    [
        (
            1000,
            "party-2: table must not be touched, got a finger",
            "table must not be touched, got",
        ),
        (
            2,
            "Traceback (most recent call last):\n  File ...\nMemoryError: full\n",
            "MemoryError: full$",
        ),
        (2, None, ".*code 2$"),
        (2, "", ".*code 2$"),
    ],
)
def test_an_error_of_a_site_stops_the_run_with_its_reason(three_rounds, code, reason, told):
    app = fails_from(4, code, reason)
    refuses(PartyError, rf"^party-2 \(step 4\): {told}", three_rounds(), app=app)


def test_a_reply_of_another_class_stops_the_run_by_name(three_rounds):
    sketch = SketchReply(
        representatives=np.zeros(1, np.float32),
        masses=np.zeros(1, np.float32),
        offsets=np.array([0, 1]),
        maxima=np.zeros(1, np.float32),
        label_sums=np.zeros(1),
        weight_sum=1.0,
        unseen=np.empty(0, np.int64),
    )
    refuses(
        ProtocolError,
        r"^party-2: GrowReply.class must be this one, got SketchReply$",
        three_rounds(),
        app=answers(4, lambda reply: sketch),
    )


def test_a_reply_that_is_no_message_stops_the_run_by_name(three_rounds):
    def fault(step, request, reply):
        return Message(RecordDict(), reply_to=request) if step == 4 else reply

    refuses(
        ProtocolError,
        r"^party-2: message.records must be fedapp's, got KeyError\('envelope'\)$",
        three_rounds(),
        app=FaultyApp(fault),
    )


def test_the_answer_to_another_step_stops_the_run_by_name(three_rounds):
    def fault(step, request, reply):
        if step == 4:
            reply.content.config_records["envelope"]["step"] = 3
        return reply

    refuses(
        PartyError,
        r"^party-2 \(step 4\): answered step 3 of another exchange$",
        three_rounds(),
        app=FaultyApp(fault),
    )


def one_more(array, axis):
    return np.concatenate((array, array.take([0], axis)), axis)


RUBBISH = {
    "bins": (4, lambda reply: replace(reply, histograms=one_more(reply.histograms, 1))),
    "nodes": (
        4,
        lambda reply: replace(
            reply,
            histograms=one_more(reply.histograms, 0),
            missing=one_more(reply.missing, 0),
        ),
    ),
    "columns": (4, lambda reply: replace(reply, missing=one_more(reply.missing, 1))),
    "roots": (6, lambda reply: replace(reply, root_sums=one_more(reply.root_sums, 0))),
    "no roots": (6, lambda reply: replace(reply, root_sums=np.empty((0, 2)))),
    "sums": (
        6,
        lambda reply: replace(
            reply,
            train_sums=one_more(reply.train_sums, 0),
            valid_sums=one_more(reply.valid_sums, 0),
        ),
    ),
    "negative hessians": (4, lambda reply: replace(reply, histograms=-reply.histograms)),
    "offsets": (2, lambda reply: replace(reply, offsets=reply.offsets[:-1])),
    "offsets past the end": (2, lambda reply: replace(reply, offsets=reply.offsets + 1)),
    "falling offsets": (2, lambda reply: replace(reply, offsets=reply.offsets[::-1].copy())),
    "maxima": (2, lambda reply: replace(reply, maxima=reply.maxima[:-1])),
    "falling bins": (
        2,
        lambda reply: replace(reply, representatives=reply.representatives[::-1].copy()),
    ),
    "bins of scores": (
        6,
        lambda reply: replace(
            reply,
            train_scores=np.repeat(reply.train_scores / 2, 2, axis=1),
            valid_scores=np.repeat(reply.valid_scores / 2, 2, axis=1),
        ),
    ),
    "sum of labels": (2, lambda reply: replace(reply, label_sums=np.full(1, -5.0))),
}


@pytest.mark.parametrize(("step", "change"), RUBBISH.values(), ids=RUBBISH)
def test_a_reply_that_does_not_fit_the_request_stops_the_run_by_name(three_rounds, step, change):
    refuses(
        ProtocolError, "^party-2: (Sketch|Grow)Reply", three_rounds(), app=answers(step, change)
    )


# Messages that get lost


def test_a_message_that_is_sent_again_is_in_the_ledger_twice(three_rounds):
    folder = run(
        three_rounds(resend_after=0.2), loses_reply=lambda step, before: step == 4 and not before
    )
    step_4 = [line for line in lines_of(folder.ledger) if line["step"] == 4]
    assert Counter(line["to"] for line in step_4) == {
        "party-1": 1,
        "party-2": 2,
        "party-3": 1,
        "server": 3,
    }


@pytest.mark.slow
def test_a_party_that_is_slow_once_is_asked_again_and_works_once(
    three_rounds, undisturbed, monkeypatch
):
    request_class, grow = find_handler("train.pax_grow", "party-2")
    done = []

    def slow(site, request):
        if site.name == "party-2":
            done.append(request.round_id)
            if len(done) == 2:
                time.sleep(0.3)
        return grow(site, request)

    monkeypatch.setattr("clients.pax.HANDLERS", {**_handlers(), request_class: slow})
    folder = run(three_rounds(resend_after=0.1))
    assert model_bytes(folder) == undisturbed
    assert len(done) == ROUNDS * DEPTH
    sent = [line for line in lines_of(folder.ledger) if line["to"] == "party-2"]
    assert sum(line["step"] == 4 for line in sent) >= 2


def _handlers():
    from clients import pax

    return dict(pax.HANDLERS)


# Going on without a party


@pytest.mark.by_default("2", "12")
@pytest.mark.parametrize("step", [2, FIRST_TREE[0], SECOND_TREE[1], LAST])
def test_a_run_goes_on_without_a_party_where_min_parties_allows(three_rounds, step):
    folder = run(three_rounds(min_parties=2), app=fails_from(step))
    summary = summary_of(folder)
    assert summary["left_out"] == [{"party": "party-2", "step": step, "reason": "broke"}]
    assert [party["name"] for party in summary["parties"]] == ["party-1", "party-3"]
    model = load(folder.path / "model.json", Ensemble)
    assert len(model.trees) == ROUNDS
    for tree in model.trees:
        assert len(tree) > 1
        assert all(np.isfinite(tree[name]).all() for name in ("value", "threshold", "gain"))


@pytest.mark.slow
def test_a_silent_party_is_left_out_after_the_deadline(three_rounds):
    folder = run(
        three_rounds(min_parties=2, exchange_deadline=1.0, resend_after=0.2),
        loses_request=lambda step, before: step >= 4,
    )
    reason = "no answer within 1 s"
    assert summary_of(folder)["left_out"] == [{"party": "party-2", "step": 4, "reason": reason}]


@pytest.mark.parametrize(
    ("node", "steps", "ends"),
    [
        ({}, (4, 9, 14), [False, False, True]),
        ({"least-bin-rows": 5}, (4, 6, 8), [True, True, True]),
    ],
    ids=["twice", "merged bins"],
)
def test_rounds_restart_twice_and_later_trees_end_at_their_depth(
    three_rounds, write_table, sites, node, steps, ends
):
    """Sites answer no third restart, and none where they merge bins."""
    contexts = sites(
        *(
            {"name": f"s{seed}", "data": write_table(f"s{seed}", seed=seed), **node}
            for seed in range(5)
        )
    )
    app = LosesOneATree(contexts[2:])
    folder = run(three_rounds(parties=5, min_parties=2, max_bin=4), contexts, app)
    lost = {gone["party"]: gone["step"] for gone in summary_of(folder)["left_out"]}
    assert lost == dict(zip(("s2", "s3", "s4"), steps, strict=True))
    trees = load(folder.path / "model.json", Ensemble).trees
    assert [len(tree) == 3 for tree in trees] == ends  # after the split of its root


@pytest.mark.slow
def test_a_loss_is_the_same_at_every_level_of_a_tree(three_rounds):
    for steps in (FIRST_TREE, SECOND_TREE):
        models = {model_bytes(run(three_rounds(min_parties=2), app=fails_from(n))) for n in steps}
        assert len(models) == 1


@pytest.mark.slow
def test_trees_that_were_finished_before_a_loss_stay(three_rounds, undisturbed, tmp_path):
    (tmp_path / "model.json").write_bytes(undisturbed)
    whole = load(tmp_path / "model.json", Ensemble)
    left = load(
        run(three_rounds(min_parties=2), app=fails_from(SECOND_TREE[1])).path / "model.json",
        Ensemble,
    )
    assert np.array_equal(left.trees[0], whole.trees[0])
    assert not np.array_equal(left.trees[1], whole.trees[1])


def test_a_loss_after_the_last_tree_leaves_the_model_as_it_is(three_rounds, undisturbed):
    assert model_bytes(run(three_rounds(min_parties=2), app=fails_from(LAST))) == undisturbed


@pytest.mark.slow
def test_a_party_that_is_lost_before_its_sketch_leaves_no_trace_in_the_model(
    three_rounds, write_table, sites
):
    bank, shop, zoo = (
        {"name": name, "data": write_table(name, seed=seed)}
        for seed, name in enumerate(("bank", "shop", "zoo"))
    )
    equal = {"pax__bins": "equal"}  # shares go by the rows of all who said hello
    two = run(three_rounds(parties=2, **equal), sites(bank, zoo))
    three = run(three_rounds(min_parties=2, **equal), sites(bank, shop, zoo), fails_from(2))
    assert [gone["party"] for gone in summary_of(three)["left_out"]] == ["shop"]
    assert model_bytes(three) == model_bytes(two)


def test_too_few_that_are_left_stop_the_run(three_rounds):
    refuses(
        PartyError,
        r"^party-2 \(step 4\): broke$",
        three_rounds(min_parties=3),
        app=fails_from(4),
    )


# A server that dies


# A checkpoint is kept at step 5; then hello is 6 and the second tree 7 to 9.
@pytest.mark.by_default("6-*", "7-dies_before_reading-*")
@pytest.mark.parametrize(
    ("first", "how", "second"),
    [
        (6, "dies_before_sending", 6),
        pytest.param(6, "dies_before_reading", 6, marks=pytest.mark.slow),
        pytest.param(7, "dies_before_sending", 7, marks=pytest.mark.slow),
        (7, "dies_before_reading", 7),
        pytest.param(8, "dies_before_sending", 8, marks=pytest.mark.slow),
        (8, "dies_before_reading", 9),
        (7, "dies_before_sending", 10),
        pytest.param(7, "dies_before_reading", 10, marks=pytest.mark.slow),
    ],
)
def test_a_server_that_dies_twice_goes_on_to_the_same_model(
    three_rounds, undisturbed, first, how, second
):
    settings = three_rounds()
    die(settings, dies_before_reading=first)
    die(resumed(settings), **{how: second})
    assert model_bytes(run(resumed(settings))) == undisturbed


@pytest.mark.slow
def test_a_run_that_may_lose_parties_leaves_no_checkpoint_out(three_rounds, monkeypatch):
    monkeypatch.setattr("strategies.drive.CHECKPOINT_SECONDS", 1e3)
    settings = three_rounds(min_parties=2, start_deadline=0.5)
    with pytest.raises(KeyboardInterrupt):
        run(settings, app=fails_from(SECOND_TREE[0]), dies_before_reading=10)
    others = [one for one in simulated_contexts(settings) if one.node_id != NODE]
    folder = run(resumed(settings), others)  # the lost party is not needed
    assert [gone["party"] for gone in summary_of(folder)["left_out"]] == ["party-2"]


@pytest.mark.slow
@pytest.mark.by_default("11")
@pytest.mark.parametrize("step", [8, 11, LAST])
def test_a_brief_round_leaves_its_checkpoint_out_and_a_resumed_run_ends_in_the_same_model(
    three_rounds, undisturbed, monkeypatch, step
):
    monkeypatch.setattr("strategies.drive.CHECKPOINT_SECONDS", 1e3)
    settings = three_rounds()
    die(settings, dies_before_reading=step)
    state = RunFolder(Path(settings.run_dir)).saved_state
    assert state is not None
    # After the first tree; and before what ends the run at the sites, whatever the time.
    assert state.step == (LAST - 1 if step == LAST else FIRST_TREE[-1])
    assert model_bytes(run(resumed(settings))) == undisturbed


@pytest.mark.slow
def test_a_run_that_was_resumed_has_every_round_exchange_and_byte_once(three_rounds):
    whole = run(three_rounds())
    settings = three_rounds()
    die(settings, dies_before_reading=10)
    folder = run(resumed(settings))
    kept = ("round", "trees", "leaves", "train", "valid")
    rounds = [{key: line[key] for key in kept} for line in lines_of(folder.rounds)]
    assert rounds == [{key: line[key] for key in kept} for line in lines_of(whole.rounds)]
    lines = [line for line in lines_of(folder.ledger) if line["from"] == "server"]
    sent = Counter(line["step"] for line in lines)
    assert sent.pop(0) == 6  # greetings
    assert sent == dict.fromkeys(range(1, len(STEPS) + 2), 3)
    summary = summary_of(folder)
    assert summary["exchanges"] == len(STEPS) + 3  # one more greeting and hello
    assert summary["metrics"] == summary_of(whole)["metrics"]
    assert summary["bytes"]["to_parties"] == sum(line["bytes"] for line in lines)
    left = {path.name for path in folder.path.iterdir()} - {LOCK}  # by which writers take turns
    assert not any(name.startswith(("checkpoint", "failure", ".")) for name in left)


@pytest.mark.slow
def test_a_run_that_had_left_a_party_out_goes_on_without_it(three_rounds):
    whole = model_bytes(run(three_rounds(min_parties=2), app=fails_from(4)))
    settings = three_rounds(min_parties=2)
    with pytest.raises(KeyboardInterrupt):
        run(settings, app=fails_from(4), dies_before_sending=10)
    folder = run(resumed(settings))
    assert [gone["party"] for gone in summary_of(folder)["left_out"]] == ["party-2"]
    assert model_bytes(folder) == whole


def test_a_party_that_was_left_out_need_not_be_there_when_the_run_goes_on(three_rounds):
    settings = three_rounds(min_parties=2, start_deadline=0.2)
    with pytest.raises(KeyboardInterrupt):
        run(settings, app=fails_from(4), dies_before_sending=10)
    others = [one for one in simulated_contexts(settings) if one.node_id != NODE]
    assert len(load(run(resumed(settings), others).path / "model.json", Ensemble).trees) == ROUNDS


@pytest.fixture
def died(three_rounds, write_table, sites):
    """A run of two sites whose server died in the second tree."""
    settings = three_rounds(parties=2)
    contexts = sites(
        {"name": "bank", "data": write_table("bank")},
        {"name": "shop", "data": write_table("shop", seed=1)},
    )
    die(settings, contexts, dies_before_sending=7)
    return settings, contexts


def test_a_run_whose_table_has_changed_does_not_go_on(died, write_table):
    settings, contexts = died
    write_table("shop", seed=2)
    with pytest.raises(PartyError, match=r"^shop \(step 6\): has another table than when the run"):
        run(resumed(settings), contexts)


def test_a_site_that_lost_its_state_cannot_go_on(died):
    settings, contexts = died
    for path in (home() / "sites" / "shop").glob("*/state"):
        path.unlink()
    with pytest.raises(PartyError, match=r"HelloRequest\.step must be 1: the site has no state"):
        run(resumed(settings), contexts)


@pytest.mark.parametrize("exists", [True, False])
def test_a_folder_that_is_no_run_cannot_go_on(tmp_path, exists):
    folder = tmp_path / "folder"
    if exists:
        folder.mkdir()
    with pytest.raises(ConfigError, match=r"^resume must be the folder of a run, got .*folder$"):
        run(load_settings({"resume": str(folder)}))
    assert folder.exists() == exists


def test_a_run_that_has_ended_does_not_begin_again(three_rounds):
    settings = three_rounds()
    folder = run(settings)
    before = {path.name: path.read_bytes() for path in folder.path.iterdir()}
    with pytest.raises(FedappError, match="resume"):
        run(resumed(settings))
    assert {path.name: path.read_bytes() for path in folder.path.iterdir()} == before


class Shifted(SiteApp):
    """Sites of which one has a clock that is off."""

    def __init__(self, seconds):
        super().__init__(stores=LiveStores())
        self._seconds = seconds

    def __call__(self, message, context):
        reply = super().__call__(message, context)
        if message.metadata.dst_node_id == NODE:
            reply.metadata.created_at += self._seconds
        return reply


@pytest.mark.parametrize(("seconds", "side"), [(100.0, "ahead of"), (-200.0, "behind")])
def test_a_party_whose_clock_is_off_is_named(three_rounds, seconds, side):
    folder = run_local(three_rounds(), client_app=Shifted(seconds))
    (text,) = [text for text in folder.summary["warnings"] if "clock" in text]
    found = re.fullmatch(rf"party-2's clock is (\d+) s {side} the coordinator's; (.*)", text)
    assert found
    # The least that is certain: less the time in which the party answered.
    assert abs(seconds) - 60 < int(found[1]) <= abs(seconds)
    assert found[2] == (
        "Flower refuses a site whose clock is 5 s ahead of its SuperLink's, or 305 s behind it"
    )


# Training that diverges


def bursts(margins, labels):
    """Squared error, whose gradients overflow once margins are large."""
    return np.where(np.abs(margins) > 1e3, np.inf, margins - labels), np.ones_like(margins)


@pytest.mark.slow
@pytest.mark.by_default("pax-given0*", "pax-given3*", "secureboost*")
@pytest.mark.parametrize(
    ("strategy", "given", "rule"),
    [
        ("pax", {}, "gains and leaf weights must stay within float32"),
        ("pax", {"seed": 1}, "gains and leaf weights must stay within float32"),
        ("pax", {"objective": bursts}, "party-1: gradients of the objective must be finite"),
        ("pax", {"pax": {"aggregation": "secure"}}, "party-1: every gradient must be <= 512"),
        ("bagging", {}, "party-1: gains and leaf weights must stay within float32"),
        ("cyclic", {}, "party-1: gains and leaf weights must stay within float32"),
        ("secureboost", {}, "party-1: gains and leaf weights must stay within float32"),
    ],
)
def test_a_run_that_diverges_says_so_and_resumed_it_keeps_the_rounds_before(
    tmp_path, monkeypatch, strategy, given, rule
):
    if "seed" in given:  # only the first checkpoint is stored
        monkeypatch.setattr("strategies.drive.CHECKPOINT_SECONDS", 1e3)
    rng = np.random.default_rng(0)
    X = rng.normal(size=(90, 3))
    table = np.column_stack([X, 9 * X[:, 0] + rng.normal(size=90)])
    small = {"secureboost": {"key_bits": 512, "insecure_small_key": True}, "align": "ordered"}
    given = {"objective": "reg:squarederror", "eta": 1e6, "max_depth": 2, "max_bin": 8, **given}
    given |= {"parties": 2, **(small if strategy == "secureboost" else {})}
    asked = {**given, "data": table, "label": "c3", "num_boost_round": 60}
    place = tmp_path / "run"
    with pytest.raises(DivergedError) as caught:
        fedapp.run(strategy, **asked, run_dir=place)
    told = re.fullmatch(
        rf"eta must be smaller, got 1000000.0: training diverges in round (\d+): {re.escape(rule)}"
        r".*; num_boost_round=(\d+) ends before it, and so does the run if it is resumed",
        str(caught.value),
    )
    assert told is not None, caught.value
    kept = int(told[2])
    assert int(told[1]) == kept + 1 > 1
    function = {name: one for name, one in given.items() if callable(one)}
    resumed = fedapp.run(strategy, resume=place, **function)
    whole = fedapp.run(strategy, **{**asked, "num_boost_round": kept}, run_dir=tmp_path / "whole")
    assert resumed.summary["metrics"] == whole.summary["metrics"]
    assert resumed.summary["trees"] == whole.summary["trees"]
    assert len(resumed.rounds) == kept
    if strategy != "secureboost":  # whose parts lie at the parties
        assert resumed.model.trees[-1].tobytes() == whole.model.trees[-1].tobytes()


def test_a_function_that_gives_no_numbers_at_once_is_not_said_to_diverge():
    def broken(margins, labels):
        return margins * np.nan, np.ones_like(margins)

    with pytest.raises(DivergedError, match=r"^party-1: gradients of the objective must be finite"):
        fedapp.run("pax", objective=broken, data=np.eye(60), label="c0", parties=2)
