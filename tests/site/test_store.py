"""A site's state on disk: what a crash, a resend and a second server start leave of it."""

import dataclasses
import errno
import gc
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
from fedapp.records.journal import PREFIX
from fedapp.site.account import note
from fedapp.site.answer import answer
from fedapp.site.database import DATABASE
from fedapp.site.settings import SiteConfig
from fedapp.site.store import REPLY, STATE, LiveStores, Store, Stores, drop_abandoned, locked
from tests.groups import declare_group
from tests.plans import planned

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


@pytest.mark.slow
def test_many_sites_work_at_once_in_one_process(tmp_path):
    # Threads change places in the middle of whatever takes memory. With files of numpy's own form,
    # whose headers are parsed with ast, CPython 3.11 fails here at almost every run.
    n_steps, names, errors = 40, "abcdefgh", []

    def work(folder):
        try:
            folder.mkdir()
            for step in range(1, n_steps + 1):
                store = Store.open(folder)
                found = [get(store, name)[0] for name in names if step > 1]
                assert found == [step - 1] * len(found)
                for name in names:
                    put(store, name, np.full(LARGE, step))
                store.commit(step, 0, NO_REPLY)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(tmp_path / str(n),)) for n in range(8)]
    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
    gc.callbacks.append(take_a_while)
    gc.set_threshold(1)
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(take_a_while)
    assert errors == []
    assert all(Store.open(tmp_path / str(n)).step == n_steps for n in range(8))


def take_a_while(phase, info):
    """Python's own code between two objects, at which another thread may go on."""
    sum(range(50))


def test_a_change_is_seen_before_it_is_committed_and_by_nobody_else(tmp_path):
    store = Store.open(tmp_path)
    put(store, "values", np.arange(3))
    assert get(store, "values").tolist() == [0, 1, 2]
    assert "values" not in Store.open(tmp_path)


def test_a_new_folder_is_before_the_first_step(tmp_path):
    store = Store.open(tmp_path / "none")
    assert (store.step, store.attempt, store.role, store.last) == (0, 0, "", "")
    assert "values" not in store


@pytest.mark.parametrize("reply", [b"", b"small", bytes(range(256)) * 1000])
def test_the_reply_comes_back_as_it_was_committed(tmp_path, reply):
    store = Store.open(tmp_path)
    store.role, store.last = "a role", "a request"
    store.commit(1, 2, reply)
    found = Store.open(tmp_path)
    assert (found.step, found.attempt, found.role, found.last) == (1, 2, "a role", "a request")
    assert found.read_bytes(REPLY) == reply


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


@pytest.mark.parametrize("is_torn", [False, True], ids=["nothing written", "half written"])
def test_a_full_disk_leaves_the_step_undone(either, monkeypatch, is_torn):
    either.add(1, step=1)
    honest = os.pwrite

    def full(descriptor, data, place):
        if is_torn and len(data) > 1:
            honest(descriptor, data[: len(data) // 2], place)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(OSError, match="No space left"):
            either.add(2, step=2, checkpoint=1)  # a checkpoint is written at once
    assert Store.open(either.folder).step == 1
    assert either.add(4, step=2, checkpoint=1).sums.tolist() == [5] * LARGE
    assert either.add(8, step=2, checkpoint=1, attempt=1).sums.tolist() == [9] * LARGE


def test_a_process_that_dies_while_it_writes_leaves_the_state_before(party):
    sizes, sums = [], []
    for step in range(1, 5):
        sums.append(party.add(step, step, checkpoint=2 * (step > 2)).sums[0])
        sizes.append((party.folder / STATE).stat().st_size)
    whole = (party.folder / STATE).read_bytes()
    for step, end in enumerate(sizes, start=1):
        for cut in (1, PREFIX.size, (end - (sizes[step - 2] if step > 1 else 0)) - 1):
            (party.folder / STATE).write_bytes(whole[: end - cut])
            found = Store.open(party.folder)
            assert found.step == step - 1
            if step > 1:
                party.stores = Stores()
                again = party.add(step, step, checkpoint=2 * (step > 2))
                assert again.sums[0] == sums[step - 1]


def test_a_step_is_on_the_disk_before_its_reply_leaves(party, monkeypatch):
    """The entry, and the folder after a new file; nothing in a simulation."""
    events = []
    sync = os.fsync

    def fsync(descriptor):
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    party.add(1, step=1)
    assert [event for event in events if not event.startswith(DATABASE)][-2:] == [STATE, MODEL]
    events.clear()
    party.add(1, step=2)
    assert events == [STATE]
    events.clear()
    party.config = dataclasses.replace(party.config, simulated=True)
    party.stores = Stores()
    party.add(1, step=3)
    assert not events


def test_a_handler_that_fails_leaves_the_state_as_it_was(either):
    either.add(1, step=1)
    with pytest.raises(DataError, match=r"^amount must not be 13, got 13$"):
        either.add(13, step=2)
    assert either.add(2, step=2).sums[0] == 3


def test_a_repeated_step_gets_the_stored_reply_and_runs_nothing(either):
    first = either.add(5, step=1)
    again = either.add(5, step=1)
    assert either.calls == [5]
    assert again.n_calls == first.n_calls == 1
    assert again.sums.tolist() == first.sums.tolist() == [5] * LARGE


# Steps by amount, number, checkpoint and attempt; what the last one comes to, or why it is refused.
SEQUENCES = {
    "back to the checkpoint": ([(1, 1), (2, 2), (4, 3, 2), (8, 4, 2), (16, 3, 2, 1)], 19),
    "back twice to it": ([(1, 1), (2, 2, 1), (4, 2, 1, 1), (8, 3, 1, 1), (16, 2, 1, 2)], 17),
    "not in the same attempt": ([(1, 1), (2, 2, 1), (4, 3, 1), (8, 2, 1)], "step must be 4, got 2"),
    "not past it": ([(1, 1), (2, 2), (4, 3, 2), (8, 2, 0, 1)], "step must be 4, got 2"),
    "not to the start": ([(1, 1), (2, 2), (4, 1, 0, 1)], "step must be 3, got 1"),
    "an older attempt": ([(1, 1, 0, 2), (1, 2, 0, 1)], "attempt must be 2 or more, got 1"),
    **{
        f"step {step} after 2": ([(1, 1), (1, 2), (1, step)], f"step must be 3, got {step}")
        for step in (4, 1, 9)
    },
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


def test_a_model_is_of_one_method(party):
    party.add(1, step=1)
    store = Store.open(party.folder)
    note(store, method="pax")
    store.commit(1, 0, NO_REPLY)
    rule = r"^bank: AddRequest.method must be pax, which has begun this run$"
    with pytest.raises(ProtocolError, match=rule):
        party.add(1, step=2)


def test_a_handler_that_misses_what_was_to_come_before_is_named(party, monkeypatch):
    def add(site, request):
        return SumReply(get(site.store, "margins"), 0)

    monkeypatch.setattr(sys.modules["clients.testmethod"], "HANDLERS", {OpenRequest: add})
    with pytest.raises(ProtocolError, match=r"^bank: AddRequest.step .* the site has no margins"):
        party.add(1, step=1)


@pytest.mark.parametrize("step", [0, -1])
@pytest.mark.parametrize("gap", [0, 1])
def test_a_step_before_the_first_is_refused(party, step, gap):
    envelope = Envelope(MODEL, step, 0, 0, gap=gap, method="testmethod")
    with pytest.raises(ProtocolError, match=r"^bank: AddRequest.step must be 1 or more, got "):
        answer(party.config, OpenRequest.kind, envelope, to_content(FIRST, "bank"))
    assert party.calls == []


def test_a_later_attempt_repeats_a_step_it_has_done(either):
    either.add(1, step=1)
    either.add(2, step=2, checkpoint=1)
    either.add(4, step=2, checkpoint=1, attempt=1)
    assert either.add(4, step=2, checkpoint=1, attempt=1).sums[0] == 5
    assert either.calls == [1, 2, 4]


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
    store.forget()
    store.commit(6, 0, NO_REPLY, defers=True)
    assert Store.open(party.folder).finished


def test_what_another_process_has_answered_is_read_first(party):
    one, other = Stores(), Stores()
    for step in range(1, 9):
        party.stores = one if step % 2 else other
        assert party.add(1, step, checkpoint=3 * (step > 3)).sums[0] == step
    party.stores = other
    assert party.add(1, step=4, checkpoint=3, attempt=1).sums[0] == 4
    party.stores = one
    assert party.add(1, step=5, checkpoint=3, attempt=1).sums[0] == 5


def test_what_lived_in_a_process_that_died_goes_on_from_its_checkpoint(party):
    party.stores = LiveStores()
    for step, checkpoint in ((1, 0), (2, 0), (3, 2), (4, 2)):
        party.add(step, step, checkpoint)
    party.stores = LiveStores()
    assert party.add(10, step=3, checkpoint=2, attempt=1).sums[0] == 1 + 2 + 10


def test_a_run_leaves_one_file_of_its_state(party):
    party.add(1, step=1)
    party.add(2, step=2, checkpoint=1)
    assert {path.name for path in party.folder.iterdir()} == {STATE, "lock"}


def test_a_state_is_for_its_owner_alone(party):
    party.add(1, step=1)
    assert party.folder.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "model_id", ["", "../../../etc", "0123456789ABCDEF", MODEL + "0", MODEL + "\n"]
)
def test_a_model_id_is_no_path(party, model_id):
    content = to_content(AddRequest(1), "bank")
    with pytest.raises(ProtocolError, match=r"^bank: AddRequest.model-id must be 16 hex digits"):
        answer(party.config, AddRequest.kind, Envelope(model_id, 1, method="testmethod"), content)


@pytest.mark.parametrize(
    "kind",
    ["train.testmethod_drop", "train.nothing", "train.", "", "train.os.path", "train.__init___x"],
)
def test_a_kind_that_no_method_has_is_refused(party, kind):
    content = to_content(AddRequest(1), "bank")
    with pytest.raises(ProtocolError, match=rf"^bank: message.kind must be known, got '{kind}'$"):
        answer(party.config, kind, Envelope(MODEL, 1, method="testmethod"), content)


def test_a_reply_that_breaks_its_form_is_not_committed(party, monkeypatch):
    def add(site, request):
        return SumReply(np.array([np.nan]), 1)

    handlers = {OpenRequest: add}
    monkeypatch.setattr(sys.modules["clients.testmethod"], "HANDLERS", handlers)
    with pytest.raises(ProtocolError, match=r"^bank: SumReply.sums must be finite$"):
        party.add(1, step=1)
    assert Store.open(party.folder).step == 0


def test_a_request_is_checked_before_the_handler_runs(party):
    with pytest.raises(ProtocolError, match=r"^bank: AddRequest.amount must be 0 to 100, got 101$"):
        answer(
            party.config,
            AddRequest.kind,
            Envelope(MODEL, 1, method="testmethod"),
            Content("AddRequest", {**to_content(AddRequest(1), "bank").scalars, "amount": 101}, {}),
        )
    assert party.calls == []


def test_a_locked_folder_is_held_by_one_thread_at_a_time(tmp_path):
    events = []
    entered, leave = threading.Event(), threading.Event()

    def first():
        with locked(tmp_path):
            entered.set()
            leave.wait(5)
            events.append("first leaves")

    def second():
        entered.wait(5)
        with locked(tmp_path):
            events.append("second enters")

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    for thread in threads:
        thread.start()
    entered.wait(5)
    threads[1].join(0.1)
    assert events == []
    leave.set()
    for thread in threads:
        thread.join(5)
    assert events == ["first leaves", "second enters"]


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


def test_a_state_that_another_process_deletes_meanwhile_is_passed_over(tmp_path, monkeypatch):
    old = tmp_path / "old" / STATE
    old.parent.mkdir()
    old.touch()
    os.utime(old, (0, 0))
    listed = [tmp_path / "gone" / STATE, old]
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter(listed))
    drop_abandoned(tmp_path, days=1)
    assert not old.parent.exists()
