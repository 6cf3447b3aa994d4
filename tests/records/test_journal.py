"""A journal has what was appended, whatever dies, goes back or reads beside it."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fedapp.errors import DataError
from fedapp.records.codec import Array, codec_of
from fedapp.records.journal import LARGE, MANY, PREFIX, SPARE, Journal, State, Stored
from tests.disk import full_disk

ARRAYS = codec_of(Mapping[str, Array])
NAMES = "abc"


def content_of(state):
    return {
        name: {key: tuple(one.ravel().tolist()) for key, one in stored.read(ARRAYS).items()}
        for name, stored in state.values.items()
    }


def opened(folder):
    journal = Journal(folder / "state")
    journal.refresh()
    return journal


def step(journal, number, mark=None, **value):
    """The next state, of one value."""
    journal.append(State({"n": number}, {"a": Stored(ARRAYS, value)}), mark)


class Journals(RuleBasedStateMachine):
    """One journal, beside a model of it in dicts; it is opened again at any time."""

    @initialize(defers=st.booleans())
    def begin(self, defers):
        self.folder = Path(os.environ["JOURNALS"]) / os.urandom(6).hex()
        self.folder.mkdir()
        self.defers = defers
        self.journal = Journal(self.folder / "state")
        self.now = {}
        self.base = None
        self.n = 0

    def teardown(self):
        shutil.rmtree(self.folder)

    def _next(self, state, before, name, shares, drops=False):
        """The values after a step, and the same by the model."""
        values, after, self.n = dict(state.values), dict(before), self.n + 1
        if drops:
            values.pop(name, None)
            after.pop(name, None)
            return values, after
        is_shared = shares and name in values
        old = values[name].read(ARRAYS) if is_shared else {}
        new, key = np.full((self.n % 5, 2), self.n, dtype=np.int32, order="F"), str(self.n % 3)
        values[name] = Stored(ARRAYS, {**old, key: new})
        after[name] = {**(before[name] if is_shared else {}), key: tuple(new.ravel().tolist())}
        return values, after

    @rule(
        name=st.sampled_from(NAMES), shares=st.booleans(), drops=st.booleans(), marks=st.booleans()
    )
    def append(self, name, shares, drops, marks):
        values, after = self._next(self.journal.now, self.now, name, shares, drops)
        mark = self.n if marks else None
        self.journal.append(State({"n": self.n}, values), mark, defers=self.defers)
        self.base, self.now = self.now if marks else self.base, after

    @precondition(lambda self: self.journal.base is not None)
    @rule(name=st.sampled_from(NAMES), keeps=st.sets(st.sampled_from(NAMES)))
    def go_back(self, name, keeps):
        before = {one: each for one, each in self.base.items() if one not in keeps}
        before |= {one: each for one, each in self.now.items() if one in keeps}
        state = self.journal.since_base(sorted(keeps))
        values, after = self._next(state, before, name, shares=True)
        self.journal.append(State({"n": self.n}, values), kept=sorted(keeps), defers=self.defers)
        self.now = after

    @rule(is_torn=st.booleans())
    def fail(self, is_torn):
        """The disk is full, maybe in the middle of an entry: the state is the one before."""
        values, _ = self._next(self.journal.now, self.now, "a", shares=True)
        self.journal.write()
        with full_disk(share=0.5 * is_torn), pytest.raises(OSError, match="No space left"):
            self.journal.append(State({"n": 0}, values))

    @rule(n_lost=st.integers(0, 30))
    def die(self, n_lost):
        """The process dies in the middle of an entry; another one goes on."""
        self.journal.write()
        whole = (self.folder / "state").read_bytes() if (self.folder / "state").exists() else b""
        values, after = self._next(self.journal.now, self.now, "b", shares=True)
        self.journal.append(State({"n": self.n}, values))
        written = (self.folder / "state").read_bytes()
        if n_lost and written.startswith(whole):
            (self.folder / "state").write_bytes(written[:-n_lost])
        else:
            self.now = after
        self.journal = opened(self.folder)

    @rule()
    def open_again(self):
        self.journal.write()
        self.journal = opened(self.folder)

    @rule()
    def compact(self):
        self.journal.write()
        if self.journal.now.facts:
            self.journal.compact()

    @invariant()
    def has_what_was_appended(self):
        assert content_of(self.journal.now) == self.now
        if self.journal.base is not None:
            assert content_of(self.journal.base) == self.base

    @rule()
    def read_beside(self):
        self.journal.write()
        other = opened(self.folder)
        assert content_of(other.now) == self.now
        assert (other.base is None) == (self.journal.base is None)
        if other.base is not None:
            assert content_of(other.base) == self.base
            assert other.mark == self.journal.mark


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("large", [16, LARGE], ids=["mapped", "in memory"])
def test_a_journal_has_what_was_appended(tmp_path, monkeypatch, large):
    monkeypatch.setenv("JOURNALS", str(tmp_path))
    monkeypatch.setattr("fedapp.records.journal.LARGE", large)
    case = Journals.TestCase
    case.settings = settings(max_examples=20, stateful_step_count=20, deadline=None)
    case().runTest()


def test_arrays_are_aligned_and_read_only(tmp_path):
    journal = Journal(tmp_path / "state")
    value = {"a": np.ones(3, np.uint8), "b": np.asfortranarray(np.arange(6.0).reshape(2, 3))}
    step(journal, 1, **value)
    for state in (journal.now, opened(tmp_path).now):
        for name, array in state.values["a"].read(ARRAYS).items():
            assert array.flags.c_contiguous
            assert array.ctypes.data % 8 == 0
            assert not array.flags.writeable
            assert np.array_equal(array, value[name])


def test_a_large_array_is_in_the_file_and_has_the_order_that_it_had(tmp_path, monkeypatch):
    monkeypatch.setattr("fedapp.records.journal.LARGE", 100)
    written, value = Journal(tmp_path / "state"), np.asfortranarray(np.arange(60.0).reshape(6, 10))
    step(written, 1, a=value)
    for state in (written.now, opened(tmp_path).now):
        array = state.values["a"].read(ARRAYS)["a"]
        assert array is not value
        assert array.flags.f_contiguous
        assert np.array_equal(array, value)


def test_an_array_that_did_not_change_is_not_written_again(tmp_path):
    journal, large = Journal(tmp_path / "state"), np.zeros(10_000)
    for number in range(4):
        step(journal, number, large=large, n=np.array([number]))
    assert (tmp_path / "state").stat().st_size < large.nbytes + 4 * 500
    read = opened(tmp_path)
    before = (tmp_path / "state").stat().st_size
    step(read, 5, large=read.now.values["a"].read(ARRAYS)["large"], n=np.array([5]))
    assert (tmp_path / "state").stat().st_size < before + 500


def test_a_file_that_is_mostly_unused_is_replaced(tmp_path):
    journal = Journal(tmp_path / "state")
    for number in range(50):
        step(journal, number, a=np.full(SPARE // 80, number))  # a tenth of what may be unused
        assert (tmp_path / "state").stat().st_size < 2 * SPARE
        assert len(journal._arrays) <= MANY + 2
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_the_end_leaves_nothing_of_the_checkpoint(tmp_path, monkeypatch):
    journal, secret = Journal(tmp_path / "state"), np.full(4, 0x5EC2E7)
    step(journal, 1, a=secret)
    step(journal, 2, mark=1)
    assert secret.tobytes() in (tmp_path / "state").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", lambda *given: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            journal.end(State({"n": 3}))
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    for one in (journal, opened(tmp_path)):
        assert (one.now.facts, one.base is None) == ({"n": 2}, False)
    journal.end(State({"n": 3}))
    assert secret.tobytes() not in (tmp_path / "state").read_bytes()
    for one in (journal, opened(tmp_path)):
        assert (one.now.facts, one.base) == ({"n": 3}, None)


def test_an_entry_of_which_a_byte_is_another_is_not_read(tmp_path):
    journal = Journal(tmp_path / "state")
    for number in (1, 2):
        step(journal, number, a=np.full(9, number))
    data = bytearray((tmp_path / "state").read_bytes())
    data[-9] ^= 1  # as after a loss of power
    (tmp_path / "state").write_bytes(data)
    assert opened(tmp_path).now.facts == {"n": 1}


def test_a_file_of_another_version_is_refused(tmp_path):
    (tmp_path / "state").write_bytes(b"fedapp 6" + bytes(PREFIX.size))
    with pytest.raises(DataError, match=r"^state must be of fedapp B: another version began"):
        opened(tmp_path)


def test_an_entry_is_on_the_disk_when_it_is_to_last(tmp_path, monkeypatch):
    synced = []

    def fsync(descriptor):
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)

    monkeypatch.setattr(os, "fsync", fsync)
    journal = Journal(tmp_path / "state", lasting=True)
    for number in range(2):
        step(journal, number)
    assert synced == ["state", tmp_path.name, "state"]
    step(Journal(tmp_path / "other"), 1)
    assert len(synced) == 3
