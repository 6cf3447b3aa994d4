"""A site's state on disk: what a crash, a resend and a second server start leave of it."""

import dataclasses
import os
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
import pytest

from fedapp.errors import DataError, ProtocolError
from fedapp.home import home
from fedapp.messages.fields import AT_ANY_TIME, Array, Form, Range, Reply, Request, message, request
from fedapp.messages.handshake import Plan
from fedapp.messages.wire import Content, Envelope, from_content, to_content
from fedapp.records.codec import codec_of
from fedapp.site.account import note
from fedapp.site.database import DATABASE
from fedapp.site.settings import SiteConfig
from fedapp.site.store import PART_FILE, STATE, LiveStores, Store, Stores, drop_abandoned, locked
from tests.disk import full_disk
from tests.plans import planned
from tests.site.office import declare_group
from tests.sites import answer

MODEL = "0123456789abcdef"
LARGE = 65
NO_REPLY = b""


DOUBLES = codec_of(Array)


def get(store, name):
    return store.read(name, DOUBLES)


def put(store, name, value):
    store.write(name, DOUBLES, value)


@request("train.testmethod_add", times=AT_ANY_TIME)
class AddRequest(Request):
    """Add to the site's running sums."""

    amount: Annotated[int, Range(0, 100)]


@request("train.testmethod_open")
class OpenRequest(Plan, Request):
    """The first of them, which opens the run."""

    wire_name: ClassVar[str] = "AddRequest"
    number: Annotated[int, Range(0, 100)]

    @property
    def amount(self):
        """As in the others."""
        return self.number


FIRST = OpenRequest(number=1)


@message
class SumReply(Reply):
    """The sums so far, and how often the handler ran."""

    sums: Annotated[Array, Form("float64", "n_sums")]
    n_calls: int


@dataclass(slots=True)
class Party:
    """A site whose method adds numbers up, as the server talks to it."""

    calls: list[int]
    config: SiteConfig
    stores: Stores = field(default_factory=Stores)

    @property
    def folder(self):
        return home() / "sites" / self.config.name / MODEL

    def add(self, amount, step, checkpoint=0, attempt=0):
        asked = AddRequest(amount)
        if step == 1:  # what is asked after a step back may differ
            asked = OpenRequest(number=amount, **planned(("bank",), restarts=9))
        envelope = Envelope(MODEL, step, checkpoint, attempt, method="testmethod")
        content = to_content(asked, "bank")
        found = answer(self.config, asked.kind, envelope, content, self.stores)
        return from_content(SumReply, found, "bank")


@pytest.fixture
def party(monkeypatch):
    calls = []

    def add(site, request):
        calls.append(request.amount)
        if request.amount == 13:
            raise DataError("amount must not be 13, got 13")
        before = get(site.store, "sums") if "sums" in site.store else np.zeros(LARGE)
        put(site.store, "sums", before + request.amount)
        return SumReply(get(site.store, "sums"), len(calls))

    declare_group(monkeypatch, "testmethod", {AddRequest: add, OpenRequest: add})
    return Party(calls, SiteConfig("bank", "rows.csv", allowed=frozenset({"testmethod"})))


@pytest.fixture(params=[Stores, LiveStores], ids=["on disk", "live"])
def either(request, party):
    """The party with its state on the disk from step to step, or in memory."""
    party.stores = request.param()
    return party


def test_the_end_keeps_what_has_no_arrays_and_no_checkpoint(tmp_path):
    store = Store.open(tmp_path)
    put(store, "rows", np.full(9, 7777.0))
    store.write("name", codec_of(str), "the result")
    store.commit(1, 0, NO_REPLY)
    store.commit(2, 0, NO_REPLY, mark=1)
    store.forget()
    store.commit(3, 0, NO_REPLY)
    found = Store.open(tmp_path)
    assert ("rows" in found, found.read("name", codec_of(str))) == (False, "the result")
    assert found.roll_back(1) is None
    assert np.float64(7777.0).tobytes() not in (tmp_path / STATE).read_bytes()


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_full_disk_leaves_the_step_undone(either, share):
    either.add(1, step=1)
    with full_disk(share=share), pytest.raises(OSError, match="No space left"):
        either.add(2, step=2, checkpoint=1)  # a checkpoint is written at once
    assert Store.open(either.folder).step == 1
    assert either.add(4, step=2, checkpoint=1).sums.tolist() == [5] * LARGE
    assert either.add(8, step=2, checkpoint=1, attempt=1).sums.tolist() == [9] * LARGE


def test_a_step_is_on_the_disk_before_its_reply_leaves(party, monkeypatch):
    """The entry, and the folder after a new file."""
    events, sync = [], os.fsync

    def fsync(descriptor):
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    party.add(1, step=1)
    party.add(1, step=2)
    events = [event for event in events if not event.startswith(DATABASE)]
    assert events[-3:] == [STATE, MODEL, STATE]


def test_a_repeated_step_gets_the_stored_reply_and_runs_nothing(either):
    first = either.add(5, step=1)
    again = either.add(5, step=1)
    assert either.calls == [5]
    assert again.n_calls == first.n_calls == 1
    assert again.sums.tolist() == first.sums.tolist() == [5] * LARGE
    with pytest.raises(DataError, match=r"^amount must not be 13, got 13$"):
        either.add(13, step=2)  # a handler that fails leaves the state as it was
    either.add(2, step=2, checkpoint=1)
    for _ in range(2):
        assert either.add(4, step=2, checkpoint=1, attempt=1).sums[0] == 9
    assert either.calls == [5, 13, 2, 4]
    if type(either.stores) is Stores:
        assert {path.name for path in either.folder.iterdir()} == {STATE, "lock"}
        assert either.folder.stat().st_mode & 0o077 == 0


# Steps by amount, number, checkpoint and attempt; what the last one comes to, or why it is refused.
SEQUENCES = {
    "back to the checkpoint": ([(1, 1), (2, 2), (4, 3, 2), (8, 4, 2), (16, 3, 2, 1)], 19),
    "back twice to it": ([(1, 1), (2, 2, 1), (4, 2, 1, 1), (8, 3, 1, 1), (16, 2, 1, 2)], 17),
    "not in the same attempt": ([(1, 1), (2, 2, 1), (4, 3, 1), (8, 2, 1)], "step must be 4, got 2"),
    "not past it": ([(1, 1), (2, 2), (4, 3, 2), (8, 2, 0, 1)], "step must be 4, got 2"),
    "not to the start": ([(1, 1), (2, 2), (4, 1, 0, 1)], "step must be 3, got 1"),
    "an older attempt": ([(1, 1, 0, 2), (1, 2, 0, 1)], "attempt must be 2 or more, got 1"),
    "past the next one": ([(1, 1), (1, 2), (1, 4)], "step must be 3, got 4"),
    "a first step that is not the first": (
        [(1, 2)],
        "step must be 1, which opens a run: the site has no",
    ),
}


@pytest.mark.parametrize(("steps", "outcome"), SEQUENCES.values(), ids=SEQUENCES)
def test_a_step_is_the_next_one_or_follows_a_step_back_to_the_checkpoint(either, steps, outcome):
    *before, last = steps
    for step in before:
        either.add(*step)
    if isinstance(outcome, int):
        assert either.add(*last).sums.tolist() == [outcome] * LARGE
        return
    with pytest.raises(ProtocolError, match=rf"^bank: AddRequest\.{outcome}"):
        either.add(*last)
    assert either.calls == [step[0] for step in before]
    if before:
        assert either.stores.open(either.folder, lasting=False).step == before[-1][1]


def test_a_live_state_is_written_at_first_at_checkpoints_and_at_the_end(party):
    party.stores = LiveStores()
    on_disk = []
    for step, checkpoint in ((1, 0), (2, 0), (3, 0), (4, 3), (5, 3)):
        party.add(1, step, checkpoint)
        store = Store.open(party.folder)
        on_disk.append((store.step, get(store, "sums")[0]))
    assert on_disk == [(1, 1), (1, 1), (1, 1), (4, 4), (4, 4)]
    back = Store.open(party.folder).roll_back(3)
    assert (back.step, get(back, "sums")[0]) == (3, 3)
    store = party.stores.open(party.folder, lasting=False)
    assert (store.step, get(store, "sums")[0]) == (5, 5)
    party.stores.write()
    assert Store.open(party.folder).step == 5
    party.stores = LiveStores()  # as the process has died
    assert party.add(10, step=4, checkpoint=3, attempt=1).sums[0] == 3 + 10
    store = party.stores.open(party.folder, lasting=False)
    store.forget()
    store.commit(6, 0, NO_REPLY, defers=True)
    assert Store.open(party.folder).finished


ONE, STEP = to_content(AddRequest(1), "bank"), Envelope(MODEL, 1, method="testmethod")
MANY = Content("AddRequest", {**ONE.scalars, "amount": 101}, {})
ID_RULE = "AddRequest.model-id must be 16 hex digits"
# Messages, and why they are refused.
REFUSED = [
    *(
        (AddRequest.kind, dataclasses.replace(STEP, model_id=model_id), ONE, ID_RULE)
        for model_id in ("", "../../../etc", "0123456789ABCDEF", MODEL + "\n")
    ),
    *(
        (kind, STEP, ONE, f"message.kind must be known, got '{kind}'$")
        for kind in ("train.testmethod_drop", "train.os.path")
    ),
    (
        *(OpenRequest.kind, dataclasses.replace(STEP, step=0), to_content(FIRST, "bank")),
        "AddRequest.step must be 1 or more, got ",
    ),
    (AddRequest.kind, STEP, MANY, "AddRequest.amount must be 0 to 100, got 101$"),
]


@pytest.mark.parametrize(("kind", "envelope", "content", "rule"), REFUSED)
def test_a_message_that_is_none_of_the_run_is_refused(party, kind, envelope, content, rule):
    with pytest.raises(ProtocolError, match=f"^bank: {rule}"):
        answer(party.config, kind, envelope, content)
    assert party.calls == []


@pytest.mark.parametrize(
    ("add", "rule"),
    [
        (lambda *_: SumReply(np.array([np.nan]), 1), "SumReply.sums must be finite$"),
        (lambda site, _: get(site.store, "margins"), "AddRequest.step .* the site has no margins"),
    ],
)
def test_a_handler_that_breaks_a_rule_is_named_and_nothing_committed(party, monkeypatch, add, rule):
    monkeypatch.setattr(sys.modules["clients.testmethod"], "HANDLERS", {OpenRequest: add})
    with pytest.raises(ProtocolError, match=f"^bank: {rule}"):
        party.add(1, step=1)
    assert Store.open(party.folder).step == 0


def test_a_model_is_of_one_method(party):
    party.add(1, step=1)
    store = Store.open(party.folder)
    note(store, method="pax")
    store.commit(1, 0, NO_REPLY)
    rule = r"^bank: AddRequest.method must be pax, which has begun this run$"
    with pytest.raises(ProtocolError, match=rule):
        party.add(1, step=2)


def test_what_another_process_has_answered_is_read_first(party):
    one, other = Stores(), Stores()
    for step in range(1, 9):
        party.stores = one if step % 2 else other
        assert party.add(1, step, checkpoint=3 * (step > 3)).sums[0] == step
    party.stores = other
    assert party.add(1, step=4, checkpoint=3, attempt=1).sums[0] == 4
    party.stores = one
    assert party.add(1, step=5, checkpoint=3, attempt=1).sums[0] == 5


def test_a_lock_that_was_deleted_meanwhile_is_taken_again(tmp_path, monkeypatch):
    same = iter([False, True])  # first it is that of a folder which a refused message deleted
    monkeypatch.setattr("fedapp.site.store.os.path.samestat", lambda *stats: next(same))
    with locked(tmp_path / "run"):
        assert next(same, None) is None


def test_a_step_sent_twice_at_once_runs_once(party, monkeypatch):
    entered, leave = threading.Event(), threading.Event()

    def slow(site, request):
        party.calls.append(request.amount)
        entered.set()
        leave.wait(5)
        return SumReply(np.zeros(1), len(party.calls))

    monkeypatch.setattr(sys.modules["clients.testmethod"], "HANDLERS", {OpenRequest: slow})
    replies = []
    threads = [
        threading.Thread(target=lambda: replies.append(party.add(1, step=1))) for _ in range(2)
    ]
    threads[0].start()
    entered.wait(5)
    threads[1].start()
    threads[1].join(0.1)
    leave.set()
    for thread in threads:
        thread.join(5)
    assert [reply.n_calls for reply in replies] == [1, 1]
    assert party.calls == [1]


def test_old_states_go_but_parts_of_models_and_what_another_process_deletes(monkeypatch):
    site = home() / "sites" / "bank"
    old, part = (site / name / STATE for name in ("old", "part"))
    for path in (old, part):
        path.parent.mkdir(parents=True)
        path.touch()
        os.utime(path, (0, 0))
    (part.parent / PART_FILE).touch()
    listed = [site / "gone" / STATE, old, part]
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter(listed))
    drop_abandoned(site, days=1)
    assert (old.parent.exists(), part.exists()) == (False, True)
