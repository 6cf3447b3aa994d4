"""Cyclic training: turns in the order of the names, the full step at each."""

from functools import partial

import numpy as np
import pytest

from fedapp.runs.local import run_local, simulated_contexts
from strategies.local_boosting import next_turn
from tests.federated import lines_of, model_of, summary_of
from tests.network import fails_from, resumed, run, step_of
from tests.transcript import arrays_of, listen


@pytest.fixture
def turns(made):
    """Settings of a cyclic run, by its objective."""
    return partial(made, "cyclic")


def test_turns_go_by_name_and_begin_anew():
    names, turn, taken = ["bank", "shop", "zoo"], "", []
    for _ in range(5):
        turn = next_turn(names, turn)
        taken.append(turn)
    assert taken == ["bank", "shop", "zoo", "bank", "shop"]
    assert next_turn(["bank", "zoo"], "shop") == "zoo"
    assert next_turn(["bank", "shop"], "zoo") == "bank"


def test_one_party_boosts_at_a_time_and_all_hear_of_it(turns):
    _, app = listen(turns("multi:softprob", num_boost_round=4))
    steps = {}
    for request, reply in app.of_kind("cyclic_turn"):
        told, grown = (len(arrays_of(message)["sizes"]) for message in (request, reply))
        party = request.metadata.dst_node_id
        steps.setdefault(step_of(request), []).append((party, told, grown))
    for turn, replies in enumerate(steps[step] for step in sorted(steps)):
        assert len(replies) == 3
        assert {told for _, told, _ in replies} == {3 if turn else 0}
        assert [grown for _, _, grown in sorted(replies)] == [
            3 if party == turn % 3 else 0 for party in range(3)
        ]


def test_a_tree_is_the_one_its_party_grows_from_the_model_before_it(turns):
    shorter, whole = (model_of(run_local(turns(num_boost_round=n))) for n in (2, 3))
    for tree, other in zip(shorter.trees, whole.trees, strict=False):
        np.testing.assert_array_equal(tree, other)
    roots = [float(tree["hessian"][0]) for tree in whole.trees]
    assert 3 * max(roots) < 400 / 4  # a third of the rows, hessians of 1/4 at most


def test_the_next_party_takes_the_turn_of_one_that_fails(turns):
    settings = turns(num_boost_round=4, min_parties=2, valid_fraction=0.0)
    folder = run(settings, app=fails_from(4))
    summary = summary_of(folder)
    assert [gone["party"] for gone in summary["left_out"]] == ["party-2"]
    assert summary["trees"] == 4
    assert summary["exchanges"] == 3 + 5 + 1
    assert [line["round"] for line in lines_of(folder.rounds)] == [1, 2, 3, 4]


def test_a_party_that_fails_beside_the_turn_changes_no_tree(turns):
    # Party-2 fails while party-3 has its turn.
    settings, whole = turns(num_boost_round=3, min_parties=2), turns(num_boost_round=3)
    run(settings, app=fails_from(5))
    run_local(whole)
    assert_same(settings, whole)


def assert_same(first, second):
    for tree, other in zip(model_of(first).trees, model_of(second).trees, strict=True):
        np.testing.assert_array_equal(tree, other)


def test_a_resumed_run_goes_on_with_the_turns(turns):
    whole, settings = (turns(num_boost_round=5, min_parties=2) for _ in range(2))
    run(whole, app=fails_from(4))
    with pytest.raises(KeyboardInterrupt):
        run(settings, app=fails_from(4), dies_before_sending=7)
    run(resumed(settings), simulated_contexts(settings), app=fails_from(4))
    assert_same(settings, whole)
