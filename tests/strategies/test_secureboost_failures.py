"""SecureBoost when servers die, parties fail, and messages get lost."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, Error, Message

from fedapp.client_app import SiteApp
from fedapp.errors import FedappError, PartyError
from fedapp.run_folder import RunFolder
from fedapp.runs.local import simulated_contexts
from fedapp.settings import Settings, load_settings
from fedapp.site import store
from tests.network import (
    NODE,
    die,
    fails_from,
    kinds_of_steps,
    one_of_each_kind,
    resumed,
    run,
    step_of,
)
from tests.pooled import made_columns, write_rows
from tests.transcript import lines_of, summary_of

MakeSettings = Callable[..., Settings]
WriteTable = Callable[..., Path]
MakeSites = Callable[..., list[Context]]

TRAIN = "train.secureboost_"
# Two rounds of depth 2: hello, alignment, and then with two parties ...
SETUP, BEGIN, SUM, SPLIT = 6, 7, 8, 9
STEPS = {2: range(1, 22), 3: range(1, 25)}
# Steps that ask what a later one asks too: a server's death there is tried under slow.
ASKED_AGAIN = {2: {*range(7, 16)}, 3: {3, *range(8, 19)}}
PARTITION, FINISH = 12, 21

# A site that has handed over answers the hello of a server started anew with its last reply, where
# the parties were asked last at different steps (fedapp.site.answer, gap 0).


@pytest.fixture
def two_rounds(vertical: MakeSettings, tmp_path: Path) -> MakeSettings:
    data = write_rows(tmp_path / "made.csv", made_columns("binary:logistic", n_rows=120))

    def make(**more: Any) -> Settings:
        given = {"secureboost__key_bits": 256, "max_bin": 8, "data": str(data), "align": "psi"}
        return vertical(label="y", **{**given, **more})

    return make


def model_of(folder: RunFolder) -> bytes:
    return (folder.path / "model.json").read_bytes()


def go_on(settings: Settings, contexts: list[Context] | None = None) -> RunFolder:
    """Start the server of a run anew."""
    return run(resumed(settings), contexts or simulated_contexts(settings))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, bytes]]:
    """Models of runs in which nothing happens, by the number of parties."""
    folder, found = tmp_path_factory.mktemp("undisturbed"), {}
    data = write_rows(folder / "made.csv", made_columns("binary:logistic", n_rows=120))
    given = {"strategy": "secureboost", "allow-export": True, "data": str(data), "label": "y"}
    given |= {"secureboost.key-bits": 256, "secureboost.insecure-small-key": True}
    given |= {"num-boost-round": 2, "max-depth": 2, "max-bin": 8, "eta": 0.3}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDAPP_HOME", str(folder / "home"))
        for parties in STEPS:
            run_dir = str(folder / f"run-{parties}")
            done = run(load_settings({**given, "run-dir": run_dir, "parties": parties}))
            kinds = kinds_of_steps(done)
            assert list(kinds) == [0, *STEPS[parties]]
            assert set(STEPS[parties]) - {*one_of_each_kind(kinds)} == ASKED_AGAIN[parties]
            if parties == 2:
                steps = (SETUP, BEGIN, SUM, SPLIT, PARTITION)
                names = ("setup", "begin", "sum", "split", "partition")
                assert [kinds[step] for step in steps] == [TRAIN + name for name in names]
            found[parties] = model_of(done)
        yield found


# A server that dies


def steps_once(parties: int) -> list[int]:
    """One step for each kind of message, in the same order whatever the number of parties; by
    default a server dies at every second one of each."""
    return [step for step in STEPS[parties] if step not in ASKED_AGAIN[parties]]


@pytest.mark.parametrize(
    ("parties", "how", "step"),
    [
        pytest.param(
            *(parties, how, step),
            marks=() if step in steps_once(parties)[parties - 2 :: 2] else pytest.mark.slow,
        )
        for parties, how in [(2, "dies_before_sending"), (3, "dies_before_reading")]
        for step in STEPS[parties]
    ],
)
def test_a_server_that_dies_goes_on_to_the_same_model(
    two_rounds: MakeSettings, undisturbed: dict[int, bytes], parties: int, how: str, step: int
) -> None:
    settings = two_rounds(parties=parties)
    die(settings, **{how: step})
    assert model_of(go_on(settings)) == undisturbed[parties]


def test_a_server_that_dies_twice_in_a_round_goes_on_to_the_same_model(
    two_rounds: MakeSettings, undisturbed: dict[int, bytes]
) -> None:
    settings = two_rounds()
    die(settings, dies_before_reading=PARTITION)
    die(resumed(settings), simulated_contexts(settings), dies_before_sending=PARTITION + 1)
    assert model_of(go_on(settings)) == undisturbed[2]


def test_a_resumed_run_tells_of_every_round_once(two_rounds: MakeSettings) -> None:
    whole, settings = run(two_rounds()), two_rounds()
    die(settings, dies_before_reading=PARTITION + 3)
    folder = go_on(settings)
    kept = ("round", "trees", "leaves", "train", "valid")
    rounds = [{key: line[key] for key in kept} for line in lines_of(folder.rounds)]
    assert rounds == [{key: line[key] for key in kept} for line in lines_of(whole.rounds)]
    for name in ("metrics", "leaf_purity", "matched_rows", "trees"):
        assert summary_of(folder)[name] == summary_of(whole)[name]


@pytest.mark.parametrize(
    "last",
    [
        "evaluate.secureboost_handover",
        "evaluate.secureboost_finish",
    ],
)
def test_a_server_that_dies_after_it_stopped_early_keeps_the_same_rounds(
    two_rounds: MakeSettings, last: str
) -> None:
    more = {"num_boost_round": 30, "early_stopping_rounds": 1, "valid_fraction": 0.4, "eta": 1.0}
    whole = run(two_rounds(**more))
    step = next(line["step"] for line in lines_of(whole.ledger) if line["type"] == last)
    settings = two_rounds(**more)
    die(settings, dies_before_sending=step)
    folder = go_on(settings)
    assert model_of(folder) == model_of(whole)
    assert len(lines_of(folder.rounds)) == len(lines_of(whole.rounds)) < 30
    assert summary_of(folder)["leaf_purity"] == summary_of(whole)["leaf_purity"]


# A site's process that dies


class Killed(BaseException):
    """The end of a site's process."""


class DyingApp(SiteApp):
    """Sites of which one dies once in a step: before its state is whole on disk."""

    def __init__(self, step: int, party: str) -> None:
        super().__init__()
        self._step, self._party, self.deaths = step, party, 0

    def __call__(self, message: Message, context: Context) -> Message:
        is_it = self._party == f"party-{context.node_id - 1}"
        if not is_it or step_of(message) != self._step or self.deaths:
            return super().__call__(message, context)
        write_atomically = store.write_atomically

        def die_in_between(path: Path, data: bytes, **how: Any) -> None:
            if self._party in path.parts:
                raise Killed
            write_atomically(path, data, **how)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(store, "write_atomically", die_in_between)
            try:
                return super().__call__(message, context)
            except Killed:
                self.deaths += 1
                store._OPEN.clear()
                crashed_app = 8
                return Message(Error(crashed_app, "killed"), reply_to=message)


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
    two_rounds: MakeSettings,
    undisturbed: dict[int, bytes],
    monkeypatch: pytest.MonkeyPatch,
    step: int,
    party: str,
) -> None:
    monkeypatch.setattr("strategies.delivery.LONGEST_POLL", 0.01)
    app = DyingApp(step, party)
    assert model_of(run(two_rounds(), app=app)) == undisturbed[2]
    assert app.deaths == 1


# Messages that get lost, parties that fail


@pytest.mark.each_value_once
@pytest.mark.parametrize("fault", ["loses_request", "loses_reply"])
@pytest.mark.parametrize("parties", [2, 3])
def test_a_message_that_gets_lost_once_in_every_exchange_changes_nothing(
    two_rounds: MakeSettings, undisturbed: dict[int, bytes], fault: str, parties: int
) -> None:
    faults = {fault: lambda step, before: step > 1 and before == 0}
    folder = run(two_rounds(resend_after=0.05, parties=parties), **faults)
    assert model_of(folder) == undisturbed[parties]


def refuses(
    error: type[FedappError], match: str, settings: Settings, *contexts: Context, **how: Any
) -> None:
    """Holds that a run stops with this error, and leaves no model but the reason."""
    with pytest.raises(error, match=match) as caught:
        run(settings, contexts or None, **how)
    folder = Path(settings.run_dir)
    assert not (folder / "model.json").exists()
    failure = json.loads((folder / "failure.json").read_text())
    assert failure == {"error": type(caught.value).__name__, "message": str(caught.value)}


def test_a_passive_party_that_fails_stops_the_run_by_name(
    two_rounds: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise ValueError("row 17 is 0.3")

    monkeypatch.setattr("clients.secureboost.passive.Passive.encrypted_sums", fail)
    match = r"^party-2 \(step 8\): ValueError in train.secureboost_sum; the site's own log says"
    refuses(PartyError, match, two_rounds())


@pytest.mark.parametrize(
    "step", [pytest.param(SETUP, marks=pytest.mark.slow), SUM, PARTITION, FINISH - 1]
)
def test_a_passive_party_that_falls_silent_stops_the_run_by_name(
    two_rounds: MakeSettings, step: int
) -> None:
    refuses(
        PartyError,
        rf"^party-2 \(step {step}\): no answer within 3 s$",
        two_rounds(exchange_deadline=3.0, resend_after=1.0),
        loses_request=lambda now, before: now >= step,
    )


@pytest.mark.parametrize("node", [2, NODE])
def test_no_vertical_run_goes_on_without_a_party(
    two_rounds: MakeSettings, monkeypatch: pytest.MonkeyPatch, node: int
) -> None:
    monkeypatch.setattr("tests.network.NODE", node)
    refuses(
        PartyError,
        rf"^party-{node - 1} \(step \d+\): broke$",
        two_rounds(parties=3, min_parties=2),
        app=fails_from(9, reason=f"party-{node - 1}: broke"),
    )
