"""Parties that fail, messages that get lost, servers that die: what is left of a run."""

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Error, Message, RecordDict

import fedapp
from fedapp.client_app import SiteApp
from fedapp.errors import ConfigError, DivergedError, FedappError, PartyError
from fedapp.home import home
from fedapp.messages.handshake import GreetReply
from fedapp.messages.pax import GrowReply, GrowRequest, SketchReply
from fedapp.messages.wire import from_content, from_records, to_bytes, to_content, to_records
from fedapp.run_folder import RunFolder
from fedapp.runs.local import run_local, simulated_contexts
from fedapp.settings import load_settings
from fedapp.site.store import LiveStores
from tests.federated import model_bytes, model_of, summary_of
from tests.network import NODE, FaultyApp, die, error_from, fails_from, resumed, run
from tests.tampering import refuses

# Three rounds of depth 3: hello 1, sketches 2, trees 3-5, 6-8 and 9-11, scores 12. A checkpoint
# follows each tree.
ROUNDS, DEPTH = 3, 3
FIRST_TREE, SECOND_TREE, LAST = (3, 4, 5), (6, 7, 8), 12
THREE_ROUNDS = {"num-boost-round": ROUNDS, "max-depth": DEPTH, "max-bin": 16, "subsample": 0.8}


@pytest.fixture(scope="module", autouse=True)
def undisturbed(tmp_path_factory):
    """A run in which nothing happens. It loads what the first message of a process loads, so that
    short deadlines hold."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDAPP_HOME", str(folder / "home"))
        return run(load_settings({**THREE_ROUNDS, "eta": 0.3, "run-dir": str(folder / "run")}))


@pytest.fixture
def three_rounds(settings):
    def make(**overrides):
        return settings(**THREE_ROUNDS, **overrides)

    return make


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


# A party that fails stops the run


def test_a_site_that_fails_stops_the_run_by_name_and_keeps_its_reason(three_rounds, monkeypatch):
    def fail(*arguments):
        raise ValueError("label of row 17 is 0.3")

    monkeypatch.setattr("clients.cuts.build_all_histograms", fail)
    rule = r"^party-1 \(step 3\): ValueError in train.pax_grow; the site's own log says more$"
    refuses(rule, three_rounds())


def changes(step, kind=None, **fields):
    """A fault: fields of the reply to one step are others, or a message of another kind comes."""

    def fault(now, request, reply):
        if now != step:
            return reply
        envelope, content = from_records(reply.content, "party-2")
        sent = from_content(SketchReply if step == 2 else GrowReply, content, "party-2")
        others = {name: change(getattr(sent, name)) for name, change in fields.items()}
        changed = kind("party-2", "") if kind else replace(sent, **others)
        return Message(
            to_records(to_bytes(to_content(changed, "party-2")), envelope), reply_to=request
        )

    return fault


def one_more(axis):
    return lambda array: np.concatenate((array, array.take([0], axis)), axis)


def of_another_step(step, request, reply):
    if step == 4:
        reply.content.config_records["envelope"]["step"] = 3
    return reply


def of_two_halves(scores):
    return np.repeat(scores / 2, 2, axis=1)


FAILED = r"^party-2 \(step 4\): "
FITS_NOT = {
    "bins": changes(4, histograms=one_more(1)),
    "nodes": changes(4, histograms=one_more(0), missing=one_more(0)),
    "columns": changes(4, missing=one_more(1)),
    "roots": changes(6, root_sums=one_more(0)),
    "sums": changes(6, train_sums=one_more(0), valid_sums=one_more(0)),
    "negative hessians": changes(4, histograms=np.negative),
    "offsets": changes(2, offsets=lambda offsets: offsets[:-1]),
    "maxima": changes(2, maxima=lambda maxima: maxima[:-1]),
    "falling bins": changes(2, representatives=np.flip),
    "bins of scores": changes(6, train_scores=of_two_halves, valid_scores=of_two_halves),
    "sum of labels": changes(2, label_sums=lambda _: np.full(1, -5.0)),
}
STOPS = {  # the fault of party-2, and what the run stops with
    "its reason": (error_from(4, 1000, "party-2: table must be"), f"{FAILED}table must be$"),
    "a traceback": (
        error_from(4, 2, "Traceback (most recent call last):\n  File ...\nMemoryError: full\n"),
        f"{FAILED}MemoryError: full$",
    ),
    "no reason": (error_from(4, 2, None), f"{FAILED}.*code 2$"),
    "another class": (changes(4, GreetReply), "^party-2: GrowReply.class must .*, got GreetReply$"),
    "no message": (
        lambda step, request, reply: (
            Message(RecordDict(), reply_to=request) if step == 4 else reply
        ),
        r"^party-2: message.records must be .*, got KeyError\('envelope'\)$",
    ),
    "another step": (of_another_step, f"{FAILED}answered step 3 of another exchange$"),
    **{name: (fault, "^party-2: (Sketch|Grow)Reply") for name, fault in FITS_NOT.items()},
}


@pytest.mark.parametrize(("fault", "rule"), STOPS.values(), ids=STOPS)
def test_an_answer_that_fits_no_request_stops_the_run_by_name(three_rounds, fault, rule):
    refuses(rule, three_rounds(), app=FaultyApp(fault))


# Going on without a party


@pytest.mark.parametrize("step", [2, SECOND_TREE[1], LAST])
def test_a_run_goes_on_without_a_party_where_min_parties_allows(three_rounds, undisturbed, step):
    folder = run(three_rounds(min_parties=2), app=fails_from(step))
    assert [gone["step"] for gone in summary_of(folder)["left_out"]] == [step]
    trees, whole = model_of(folder).trees, model_of(undisturbed).trees
    assert len(trees) == ROUNDS
    for tree in trees:
        assert len(tree) > 1
        assert all(np.isfinite(tree[name]).all() for name in ("value", "threshold", "gain"))
    same = [np.array_equal(tree, other) for tree, other in zip(trees, whole, strict=True)]
    assert same == [step > FIRST_TREE[-1], step == LAST, step == LAST]  # those finished before


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
    names = [f"s{seed}" for seed in range(5)]
    tables = [write_table(name, seed=seed) for seed, name in enumerate(names)]
    contexts = sites(
        *({"name": name, "data": data, **node} for name, data in zip(names, tables, strict=True))
    )
    app = LosesOneATree(contexts[2:])
    folder = run(three_rounds(parties=5, min_parties=2, max_bin=4), contexts, app)
    lost = {gone["party"]: gone["step"] for gone in summary_of(folder)["left_out"]}
    assert lost == dict(zip(("s2", "s3", "s4"), steps, strict=True))
    assert [len(tree) == 3 for tree in model_of(folder).trees] == ends  # after its root's split


def test_too_few_that_are_left_stop_the_run(three_rounds):
    refuses(f"{FAILED}broke$", three_rounds(min_parties=3), app=fails_from(4))


# A server that dies


def test_a_server_that_dies_twice_goes_on_to_the_same_model(three_rounds, undisturbed):
    """Every round, exchange and byte is in the run's files once."""
    settings = three_rounds()
    die(settings, dies_before_reading=6)  # after a checkpoint at step 5
    die(resumed(settings), dies_before_sending=6)
    folder = run(resumed(settings))
    assert model_bytes(folder) == model_bytes(undisturbed)
    assert [line["round"] for line in folder.rounds] == [1, 2, 3]
    summary, before = summary_of(folder), summary_of(undisturbed)
    lines = [line for line in folder.ledger if line["from"] == "server"]
    sent = Counter(line["step"] for line in lines)
    n_hellos = len(sent) - 1 - LAST  # beyond the first
    assert sent.pop(0) == 9  # greetings, by three servers
    assert sent == dict.fromkeys(range(1, LAST + n_hellos + 1), 3)
    assert summary["exchanges"] == before["exchanges"] + 2 * n_hellos
    assert summary["metrics"] == before["metrics"]
    # Greetings of a server that died before a checkpoint are not counted.
    of_one = sum(line["bytes"] for line in lines if line["step"] == 0) // 3
    counted = sum(line["bytes"] for line in lines) - (2 - n_hellos) * of_one
    assert summary["bytes"]["to_parties"] == counted


@pytest.mark.parametrize("step", [11, LAST])
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
    assert model_bytes(run(resumed(settings))) == model_bytes(undisturbed)


@pytest.mark.parametrize("is_there", [False, True])
def test_a_run_goes_on_without_a_party_that_it_had_left_out(three_rounds, monkeypatch, is_there):
    """A run that may lose parties leaves no checkpoint out."""
    monkeypatch.setattr("strategies.drive.CHECKPOINT_SECONDS", 1e3)
    lost = SECOND_TREE[0]
    whole = run(three_rounds(min_parties=2), app=fails_from(lost))
    settings = three_rounds(min_parties=2, start_deadline=0.2)
    with pytest.raises(KeyboardInterrupt):
        run(settings, app=fails_from(lost), dies_before_reading=10)
    contexts = simulated_contexts(settings)
    others = [one for one in contexts if is_there or one.node_id != NODE]
    folder = run(resumed(settings), others, fails_from(0))
    assert [gone["party"] for gone in summary_of(folder)["left_out"]] == ["party-2"]
    assert model_bytes(folder) == model_bytes(whole)


def another_table(write_table):
    write_table("shop", seed=2)


def no_state(write_table):
    (state,) = (home() / "sites" / "shop").glob("*/state")
    state.unlink()


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (another_table, r"^shop \(step 6\): has another table than when the run"),
        (no_state, r"HelloRequest\.step must be 1: the site has no state"),
    ],
)
def test_a_site_that_has_changed_cannot_go_on(three_rounds, write_table, sites, change, rule):
    settings, places = three_rounds(parties=2), enumerate(("bank", "shop"))
    contexts = sites(*({"name": n, "data": write_table(n, seed=seed)} for seed, n in places))
    die(settings, contexts, dies_before_sending=7)
    change(write_table)
    with pytest.raises(PartyError, match=rule):
        run(resumed(settings), contexts)


def test_a_folder_that_is_no_run_cannot_go_on(tmp_path):
    with pytest.raises(ConfigError, match=r"^resume must be the folder of a run, got .*folder$"):
        run(load_settings({"resume": str(tmp_path / "folder")}))
    assert not (tmp_path / "folder").exists()


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


FLOATS = "gains and leaf weights must stay within float32"
SMALL = {"secureboost": {"key_bits": 512, "insecure_small_key": True}, "align": "ordered"}


@pytest.mark.by_default("pax-given0*", "pax-given1*")
@pytest.mark.parametrize(
    ("strategy", "given", "rule"),
    [
        ("pax", {}, FLOATS),
        ("pax", {"objective": bursts}, "party-1: gradients of the objective must be finite"),
        ("pax", {"pax": {"aggregation": "secure"}}, "party-1: every gradient must be <= 512"),
        ("bagging", {}, f"party-1: {FLOATS}"),
        ("secureboost", SMALL, f"party-1: {FLOATS}"),
    ],
)
def test_a_run_that_diverges_says_so_and_resumed_it_keeps_the_rounds_before(
    tmp_path, strategy, given, rule
):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(90, 3))
    table = np.column_stack([X, 9 * X[:, 0] + rng.normal(size=90)])
    given = {"objective": "reg:squarederror", "eta": 1e6, "max_depth": 2, "max_bin": 8, **given}
    asked = {**given, "parties": 2, "data": table, "label": "c3", "num_boost_round": 60}
    place = tmp_path / "run"
    with pytest.raises(DivergedError) as caught:
        fedapp.run(strategy, **asked, run_dir=place)
    told = re.fullmatch(
        rf"eta must be smaller, got 1000000.0: training diverges in round (\d+): {re.escape(rule)}"
        r".*; num_boost_round=(\d+) ends before it, and so does the run if it is resumed"
        r"; resume=.+ resumes the run",
        str(caught.value),
    )
    assert told is not None, caught.value
    kept = int(told[2])
    assert int(told[1]) == kept + 1 > 1
    function = {name: one for name, one in given.items() if callable(one)}
    ended = fedapp.run(strategy, resume=place, **function)
    whole = fedapp.run(strategy, **{**asked, "num_boost_round": kept}, run_dir=tmp_path / "whole")
    for name in ("metrics", "trees"):
        assert ended.summary[name] == whole.summary[name]
    assert len(ended.rounds) == kept
    if strategy != "secureboost":  # whose parts lie at the parties
        assert ended.model.trees[-1].tobytes() == whole.model.trees[-1].tobytes()


def test_a_function_that_gives_no_numbers_at_once_is_not_said_to_diverge():
    def broken(margins, labels):
        return margins * np.nan, np.ones_like(margins)

    with pytest.raises(DivergedError, match=r"^party-1: gradients of the objective must be finite"):
        fedapp.run("pax", objective=broken, data=np.eye(60), label="c0", parties=2)


def of_disk(*_):
    raise OSError(28, "No space left on device")


FAILURES = {  # a fault from a step on, or a patch of what fails then
    "a lost site": fails_from,
    "a dead node of Ray": lambda step: fails_from(
        step, 0, "<class 'ray.exceptions.ActorUnavailableError'>:<'The actor 17 is unavailable'>"
    ),
    "a refusal": lambda step: fails_from(step, 1000, "party-2: a rule"),
    "another answer": lambda step: FaultyApp(
        lambda now, request, reply: (
            Message(RecordDict(), reply_to=request) if now >= step else reply
        )
    ),
}


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("step", [FIRST_TREE[0], SECOND_TREE[1]])
def test_a_failure_after_a_checkpoint_ends_with_how_the_run_is_resumed(
    three_rounds, undisturbed, failure, step
):
    """Before one it does not; and the way on, carried out, leads to the undisturbed model."""
    given = three_rounds()
    with pytest.raises(FedappError) as caught:
        run(given, app=FAILURES[failure](step))
    is_saved = step > FIRST_TREE[-1]
    way_on = f"; resume={given.run_dir} resumes the run"
    assert str(caught.value).endswith(way_on) == is_saved
    assert ("resume" in str(caught.value)) == is_saved
    message = RunFolder(Path(given.run_dir)).failure["message"]
    assert message == str(caught.value).removesuffix(way_on)
    if is_saved:
        folder = run(load_settings({"resume": given.run_dir}))
        assert model_bytes(folder) == model_bytes(undisturbed)
        assert folder.way_on == ""


def test_a_failure_of_the_machine_has_the_way_on_as_a_note(three_rounds, monkeypatch):
    given = three_rounds()
    folder = RunFolder(Path(given.run_dir))
    add_round = RunFolder.add_round
    monkeypatch.setattr(
        RunFolder, "add_round", lambda it, line: (of_disk if folder.way_on else add_round)(it, line)
    )
    with pytest.raises(OSError, match="No space left") as caught:
        run(given)
    assert caught.value.__notes__ == [f"resume={folder.path} resumes the run"]
