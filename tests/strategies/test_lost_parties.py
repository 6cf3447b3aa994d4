"""PAX under masks that goes on when a party is lost."""

import numpy as np
import pytest
from flwr.app import Error, Message

from fedapp.errors import PartyError, ProtocolError
from fedapp.runs.local import run_local, simulated_contexts
from fedapp.trees.model import LEAF
from tests.crypto.test_pairwise import MOST_CHI2, chi_squared
from tests.federated import model_bytes, model_of, summary_of
from tests.network import NODE, FaultyApp, die, fails_from, resumed, run, step_of
from tests.tables import made_columns, write_rows
from tests.transcript import arrays_of, check_declared, listen, masked_in

# Hello 1, keys 2; then sums in two exchanges each: counts 3 to 10, trees 11 to 16 and 17 to 22,
# scores 23 and 24. A checkpoint follows each tree.
COUNTS, FIRST, SECOND, SCORES = 3, 11, 17, 23
DEPTH = 3


@pytest.fixture
def made(made):
    """``made(**overrides)``: a run of four parties of which one may be lost."""
    columns = {name: column[:160] for name, column in made_columns("binary:logistic").items()}
    usual = {"columns": columns, "parties": 4, "min_parties": 3, "max_bin": 16, "max_depth": DEPTH}
    return lambda **more: made(**{**usual, "pax__aggregation": "secure", **more})


def go_on(settings, app=None):
    return run(resumed(settings), simulated_contexts(settings), app)


def depth_of(tree):
    depths = np.zeros(len(tree), int)
    for node in np.flatnonzero(tree["left"] != LEAF):
        depths[tree["left"][node] : tree["left"][node] + 2] = depths[node] + 1
    return int(depths.max())


def test_a_run_that_loses_none_tells_no_seed_and_gives_the_model_of_one_mask_a_pair(made):
    folder, app = listen(made())
    without = run_local(made(min_parties=0))
    assert model_bytes(folder) == model_bytes(without)
    found, expected = summary_of(folder), summary_of(without)
    assert found["metrics"] == expected["metrics"]
    # Greeting, hello and keys are no sums.
    assert found["exchanges"] - 3 == 2 * (expected["exchanges"] - 3)
    steps = {f"train.pax_{step}" for step in ("open", "count", "grow")}
    opening = {f"query.{step}" for step in ("greet", "hello", "secure_keys", "secure_unmask")}
    check_declared(app, {*opening, *steps, "evaluate.scoring_scores"})
    assert chi_squared(np.concatenate(masked_in(app))) < MOST_CHI2
    told = [arrays_of(reply) for _, _, reply in app.heard]
    assert not any(one["seeds"].size for one in told if "seeds" in one)


# How a run goes on


# Lost before its answer: the tree ends above the level; after it: below.
@pytest.mark.by_default("12-*")
@pytest.mark.parametrize(
    ("step", "depths"),
    [(FIRST, [3, 3]), (FIRST + 1, [1, 3]), (FIRST + 4, [2, 3]), (SECOND + 3, [3, 2])],
)
def test_a_tree_in_which_a_party_is_lost_ends_at_the_depth_it_has(made, step, depths):
    folder, whole = run(made(), app=fails_from(step)), model_of(run_local(made()))
    assert summary_of(folder)["left_out"] == [{"party": "party-2", "step": step, "reason": "broke"}]
    trees = model_of(folder).trees
    assert [depth_of(tree) for tree in trees] == depths
    if step > FIRST:  # the root was split before
        for name in ("column", "threshold"):
            assert trees[0][name][0] == whole.trees[0][name][0]


@pytest.fixture
def split_anew(made, tmp_path):
    """``split_anew(starts)``: the rows after the first 60 among further parties; of the others
    party ``b`` has 20, which the run loses."""

    def make(starts):
        columns = {name: one[:200] for name, one in made_columns("binary:logistic").items()}
        files, edges = [], [0, 40, 60, *starts, 200]
        for name, begin, end in zip("abcdefg", edges, edges[1:], strict=False):
            own = {column: one[begin:end] for column, one in columns.items()}
            files.append(f"{name}={write_rows(tmp_path / f'{name}-{begin}-{end}.csv', own)}")
        given = {"parties": len(files), "min_parties": len(files) - 1, "data": ",".join(files)}
        return made(**given, test_fraction=0.0, valid_fraction=0.0)

    return make


@pytest.mark.by_default("12")
@pytest.mark.parametrize("step", [FIRST + 1, SECOND, SCORES])
def test_sums_after_a_loss_are_exactly_those_of_the_rest(split_anew, step):
    four, five = (run(split_anew(starts), app=fails_from(step)) for starts in ([150], [90, 130]))
    assert model_bytes(four) == model_bytes(five)
    scores = summary_of(four)["metrics"]["train"]
    assert scores == summary_of(five)["metrics"]["train"]
    assert scores != summary_of(run_local(split_anew([150])))["metrics"]["train"]


@pytest.mark.parametrize("step", [COUNTS, COUNTS + 1, COUNTS + 4])
def test_a_party_that_is_lost_before_the_first_tree_ends_the_run(made, step):
    with pytest.raises(PartyError, match=rf"^party-2 \(step {step}\): broke$"):
        run(made(), app=fails_from(step))


# Two that are lost in one sum, and runs that are resumed


def test_two_lost_in_one_sum_stop_the_run_until_the_one_that_is_needed_is_back(made):
    five = {"parties": 5, "min_parties": 3}
    lost = {NODE: SECOND, NODE + 1: SECOND + 1}

    class TwoFail(FaultyApp):
        def __call__(self, message, context):
            if step_of(message) >= lost.get(context.node_id, 10**6):
                return Message(Error(1001, "a party: broke"), reply_to=message)
            return super().__call__(message, context)

    settings = made(**five)
    rule = r"^party-3: UnmaskReply\.seeds must have the masks shared with party-2; "
    with pytest.raises(ProtocolError, match=rule):
        run(settings, app=TwoFail(lambda step, request, reply: reply))
    folder = go_on(settings)
    summary = summary_of(folder)
    assert any("party-2 was lost" in text for text in summary["warnings"])
    assert [party["name"][-1] for party in summary["parties"]] == list("1345")
    expected = run(made(**five), app=fails_from(SECOND))
    assert model_of(folder).trees[1].tobytes() == model_of(expected).trees[1].tobytes()


def test_what_was_summed_before_a_resumption_is_summed_for_the_same_parties_alone(made):
    """Else the sums of before, less those of after, would be the party's own."""
    settings = made()
    die(settings, dies_before_sending=SECOND + 2)
    first = SECOND + 2  # hello, who is left, and the level again
    with pytest.raises(PartyError, match="must have party-2, with whom this was summed before"):
        go_on(settings, fails_from(first))
    whole = model_of(run_local(made()))
    assert model_of(go_on(settings)).trees[1].tobytes() == whole.trees[1].tobytes()


@pytest.mark.by_default("21")
@pytest.mark.parametrize("dies", [SECOND + 4, SCORES + 1])
def test_a_party_that_was_lost_does_not_come_back_with_a_server_that_does(made, dies):
    lost = SCORES if dies > SCORES else SECOND
    expected = run(made(), app=fails_from(lost))
    settings = made()
    with pytest.raises(KeyboardInterrupt):
        run(settings, app=fails_from(lost), dies_before_reading=dies)
    folder = go_on(settings)
    assert model_bytes(folder) == model_bytes(expected)
    assert summary_of(folder)["metrics"] == summary_of(expected)["metrics"]


def test_a_run_is_not_resumed_with_another_number_of_parties_that_must_be_left(made):
    settings = made(min_parties=0)
    die(settings, dies_before_sending=12)
    rule = r"HelloRequest\.threshold must be 0, as when the run was opened, got 3; begin a new run$"
    with pytest.raises(PartyError, match=rule):
        run(resumed(settings).model_copy(update={"min_parties": 3}), simulated_contexts(settings))
