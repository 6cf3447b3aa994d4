"""SecureBoost when servers die, parties fail, and messages get lost."""

import os
from pathlib import Path

import pytest
from flwr.app import Error, Message

from fedapp.client_app import SiteApp
from fedapp.runs.local import simulated_contexts
from fedapp.site.store import Stores
from tests.federated import lines_of, summary_of
from tests.network import (
    die,
    fails_from,
    kinds_of_steps,
    resumed,
    run,
    step_of,
)
from tests.tables import made_columns, write_rows
from tests.tampering import refuses

# Steps of two rounds of depth 2 with two parties, by what they ask.
SETUP, BEGIN, SUM, SPLIT, PARTITION, FINISH = 6, 7, 8, 9, 12, 21

# A site that has handed over answers the hello of a server started anew with its last reply, where
# the parties were asked last at different steps (fedapp.site.answer, gap 0).


@pytest.fixture
def two_rounds(vertical, tmp_path):
    data = write_rows(tmp_path / "made.csv", made_columns("binary:logistic", n_rows=120))

    def make(**more):
        given = {"secureboost__key_bits": 256, "max_bin": 8, "data": str(data), "align": "psi"}
        return vertical(label="y", **{**given, **more})

    return make


def result_of(folder):
    """A run's model, and what it tells of its rounds."""
    summary, kept = summary_of(folder), ("round", "trees", "leaves", "train", "valid")
    return [
        (folder.path / "model.json").read_bytes(),
        [{key: line[key] for key in kept} for line in lines_of(folder.rounds)],
        *(summary[name] for name in ("metrics", "matched_rows", "trees")),
    ]


@pytest.fixture
def undisturbed(two_rounds):
    """What a run of two parties gives in which nothing happens."""
    done = run(two_rounds())
    kinds, steps = kinds_of_steps(done), (SETUP, BEGIN, SUM, SPLIT, PARTITION, FINISH)
    names = ("train.setup", "train.begin", "train.sum", "train.split", "train.partition")
    expected = [name.replace(".", ".secureboost_") for name in (*names, "evaluate.finish")]
    assert [kinds[step] for step in steps] == expected
    return result_of(done)


# A server that dies; tests/contract has three parties, in order


@pytest.mark.slow
@pytest.mark.by_default("dies_before_sending-steps0")
@pytest.mark.parametrize(
    ("how", "steps"),
    [
        ("dies_before_sending", (3, 5, BEGIN)),
        ("dies_before_sending", (SPLIT, PARTITION + 1, FINISH)),
        pytest.param("dies_before_sending", range(1, FINISH + 1), marks=pytest.mark.slow),
        pytest.param("dies_before_reading", range(1, FINISH + 1), marks=pytest.mark.slow),
    ],
)
def test_a_server_that_dies_goes_on_to_the_same_model(two_rounds, undisturbed, how, steps):
    for step in steps:
        settings = two_rounds()
        die(settings, **{how: step})
        folder = run(resumed(settings), simulated_contexts(settings))
        assert result_of(folder) == undisturbed, step


@pytest.mark.slow
def test_a_server_that_dies_twice_in_a_round_goes_on_to_the_same_model(two_rounds, undisturbed):
    settings = two_rounds()
    contexts = simulated_contexts(settings)
    die(settings, contexts, dies_before_reading=PARTITION)
    die(resumed(settings), contexts, dies_before_sending=PARTITION + 1)
    assert result_of(run(resumed(settings), contexts)) == undisturbed


@pytest.mark.slow
@pytest.mark.by_default("handover")
@pytest.mark.parametrize("last", ["handover", "finish"])
def test_a_server_that_dies_after_it_stopped_early_keeps_the_same_rounds(two_rounds, last):
    more = {"num_boost_round": 30, "early_stopping_rounds": 1, "valid_fraction": 0.4, "eta": 1.0}
    whole, settings = run(two_rounds(**more)), two_rounds(**more)
    kinds = {kind: step for step, kind in kinds_of_steps(whole).items()}
    die(settings, dies_before_sending=kinds[f"evaluate.secureboost_{last}"])
    folder = run(resumed(settings), simulated_contexts(settings))
    assert result_of(folder) == result_of(whole)
    assert len(lines_of(whole.rounds)) < 30


# A site's process that dies


class Killed(BaseException):
    """The end of a site's process."""


class DyingApp(SiteApp):
    """Sites of which one dies once in a step: when half of its state is on the disk."""

    def __init__(self, step, party):
        super().__init__()
        self._step, self._party, self.deaths = step, party, 0

    def __call__(self, message, context):
        is_it = self._party == f"party-{context.node_id - 1}"
        if not is_it or step_of(message) != self._step or self.deaths:
            return super().__call__(message, context)
        write, shorten, is_dead = os.pwrite, os.ftruncate, False

        def die_in_between(descriptor, data, place):
            nonlocal is_dead
            if self._party not in Path(os.readlink(f"/proc/self/fd/{descriptor}")).parts:
                return write(descriptor, data, place)
            write(descriptor, data[: len(data) // 2], place)
            is_dead = True
            raise Killed

        def unless_dead(descriptor, size):
            if is_dead:
                raise Killed
            shorten(descriptor, size)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "pwrite", die_in_between)
            patch.setattr(os, "ftruncate", unless_dead)
            try:
                return super().__call__(message, context)
            except Killed:
                self.deaths += 1
                self.stores = Stores()
                crashed_app = 8
                return Message(Error(crashed_app, "killed"), reply_to=message)


@pytest.mark.slow
@pytest.mark.by_default("8-party-2", "21-party-1")
@pytest.mark.parametrize(
    ("step", "party"),
    [
        (SETUP, "party-1"),
        pytest.param(SETUP, "party-2", marks=pytest.mark.slow),
        (BEGIN, "party-1"),
        (SUM, "party-2"),
        (SPLIT, "party-1"),
        pytest.param(SUM + 2, "party-2", marks=pytest.mark.slow),
        (PARTITION, "party-2"),
        pytest.param(PARTITION + 1, "party-1", marks=pytest.mark.slow),
        (FINISH - 1, "party-2"),
        (FINISH, "party-1"),
    ],
)
def test_a_site_that_dies_in_an_exchange_is_asked_again(
    two_rounds, undisturbed, monkeypatch, step, party
):
    monkeypatch.setattr("strategies.delivery.LONGEST_POLL", 0.01)
    app = DyingApp(step, party)
    assert result_of(run(two_rounds(), app=app)) == undisturbed
    assert app.deaths == 1


# Messages that get lost, parties that fail


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["loses_request", "loses_reply"])
def test_a_message_that_gets_lost_once_in_every_exchange_changes_nothing(
    two_rounds, undisturbed, fault
):
    faults = {fault: lambda step, before: step > 1 and before == 0}
    assert result_of(run(two_rounds(resend_after=0.05), **faults)) == undisturbed


def test_a_passive_party_that_fails_stops_the_run_by_name(two_rounds, monkeypatch):
    def fail(*arguments):
        raise ValueError("row 17 is 0.3")

    monkeypatch.setattr("clients.secureboost.passive.Passive.encrypted_sums", fail)
    match = r"^party-2 \(step 8\): ValueError in train.secureboost_sum; the site's own log says"
    refuses(match, two_rounds())


@pytest.mark.slow
def test_a_passive_party_that_falls_silent_in_a_round_stops_the_run_by_name(two_rounds):
    settings = two_rounds(exchange_deadline=3.0, resend_after=1.0)
    match = rf"^party-2 \(step {PARTITION}\): no answer within 3 s$"
    refuses(match, settings, loses_request=lambda now, before: now >= PARTITION)


def test_no_run_goes_on_without_the_active_party(two_rounds, monkeypatch):
    monkeypatch.setattr("tests.network.NODE", 2)
    app = fails_from(9, reason="party-1: broke")
    refuses(r"^party-1 \(step \d+\): broke$", two_rounds(parties=3, min_parties=2), app=app)
