"""SecureBoost when servers die, parties fail, and messages get lost."""

import os
from pathlib import Path

import pytest
from flwr.app import Error, Message

from fedapp.client_app import SiteApp
from fedapp.runs.local import simulated_contexts
from fedapp.site.store import Stores
from tests.federated import lines_of, model_bytes, summary_of
from tests.network import die, fails_from, kinds_of_steps, resumed, run, step_of
from tests.tables import made_columns, write_rows
from tests.tampering import refuses

# Steps of two rounds of depth 2 with two parties, by what they ask.
SETUP, BEGIN, SUM, SPLIT, PARTITION, FINISH = 6, 7, 8, 9, 12, 21


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
        model_bytes(folder),
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


# A server that dies; tests/contract has all other steps


@pytest.mark.slow
def test_a_server_that_dies_after_it_stopped_early_keeps_the_same_rounds(two_rounds):
    more = {"num_boost_round": 30, "early_stopping_rounds": 1, "valid_fraction": 0.4, "eta": 1.0}
    whole, settings = run(two_rounds(**more)), two_rounds(**more)
    kinds = {kind: step for step, kind in kinds_of_steps(whole).items()}
    die(settings, dies_before_sending=kinds["evaluate.secureboost_handover"])
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
@pytest.mark.parametrize(
    ("step", "party"),
    [
        (SETUP, "party-1"),
        (BEGIN, "party-1"),
        (SUM, "party-2"),
        (SPLIT, "party-1"),
        (PARTITION, "party-2"),
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


def test_no_run_goes_on_without_the_active_party(two_rounds, monkeypatch):
    monkeypatch.setattr("tests.network.NODE", 2)
    app = fails_from(9, reason="party-1: broke")
    refuses(r"^party-1 \(step \d+\): broke$", two_rounds(parties=3, min_parties=2), app=app)
