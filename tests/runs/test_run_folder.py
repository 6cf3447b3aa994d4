"""What a run's folder keeps, how far the run has come, and who may write the folder."""

import errno
import fcntl
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, make_dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import numpy as np
import pytest

from fedapp.errors import ConfigError, DataError
from fedapp.messages.wire import from_records
from fedapp.records.codec import IN_FILE, Array
from fedapp.report.progress import QUIET
from fedapp.run_folder import Checkpoints, RunFolder, RunState, State
from fedapp.runs.local import LocalGrid, run_local, simulated_contexts
from fedapp.runs.predict import predicted_rows, trained_settings
from fedapp.runs.session import carry_out
from fedapp.serve.scorer import Scorer
from fedapp.settings import load_settings
from fedapp.trees.categories import CategorySets
from fedapp.trees.limits import Limits
from fedapp.trees.model import Grown
from strategies.run import train

ASKED = {"asked": {"clinic": 9, "lab": 7}, "fingerprints": {"clinic": "ab"}}
LOST = {"left_out": ({"party": "bank", "step": 4, "reason": "no answer"},), "warnings": ("few",)}
STATE = RunState("f00d", 2, step=9, rounds=2, bytes=(1, 2), seconds=(0.1, 1 / 3), **ASKED, **LOST)


@dataclass(slots=True, eq=False)
class Round:
    """A live record within another."""

    scores: tuple[float, ...]
    n_trees: int


@dataclass(slots=True, eq=False)
class Training:
    """The state of a method."""

    margins: Array
    grown: Grown
    last: Round
    parcels: Mapping[str, tuple[tuple[str, Annotated[bytes, IN_FILE]], ...]]
    limits: Limits = field(default_factory=Limits)
    unit: np.float32 = field(default_factory=lambda: np.float32(0.1))
    n_read: int = field(init=False)  # no part of the record


def training():
    grown, last = Grown((np.zeros(2, dtype=np.int32),)), Round((0.5, math.nan), 1)
    return Training(np.arange(3.0), grown, last, {"bank": (("shop", b"sealed"),), "shop": ()})


def test_a_state_is_read_back_as_it_was_saved(tmp_path):
    folder, state = RunFolder(tmp_path), training()
    assert folder.saved_state is None
    state.limits = Limits(seed=7, interactions=(frozenset((2, 1)), frozenset((3,))))
    Checkpoints(tmp_path).save(STATE, state)
    assert folder.saved_state == STATE
    read = Checkpoints(tmp_path).read(Training)
    assert read.margins.tolist() == [0, 1, 2]
    assert (read.last.scores[0], math.isnan(read.last.scores[1])) == (0.5, True)
    assert [tree.tolist() for tree in read.grown.trees] == [[0, 0]]
    assert read.limits.interactions == state.limits.interactions
    assert (read.parcels, read.unit.dtype) == (state.parcels, np.float32)
    assert read.unit == state.unit
    assert not hasattr(read, "n_read")
    Checkpoints(tmp_path).restart(replace(STATE, attempt=3))
    again = Checkpoints(tmp_path)
    assert again.state == replace(STATE, attempt=3)
    assert again.read(Training).last.n_trees == 1
    state.last.n_trees, state.margins = 9, np.zeros(1)  # after it was saved
    assert again.read(Training).last.n_trees == 1
    assert STATE.has_lost("bank")
    assert not STATE.has_lost("clinic")
    # Steps since a party was last asked; one without a name yet was asked when all were.
    assert [STATE.gap(name) for name in ("clinic", "lab", "node 1")] == [0, 2, 0]
    assert RunState("f00d", step=9, asked={"clinic": 7, "lab": 7}).gap("node 1") == 2
    assert RunState("f00d", step=1).gap("node 1") == 1


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ([("margins", Array), ("aggregation", str)], "aggregation"),
        ([("grown", Round)], "grown.scores"),
        ([("limits", CategorySets)], "limits"),
    ],
)
def test_what_another_version_did_not_write_is_named(tmp_path, fields, name):
    Checkpoints(tmp_path).save(STATE, training())
    other = make_dataclass("Other", fields)
    rule = rf"^checkpoint must have '{re.escape(name)}': another version of fedapp has begun this"
    with pytest.raises(DataError, match=rule):
        Checkpoints(tmp_path).read(other)
    (tmp_path / "checkpoint").write_bytes(b"fedapp 6" + bytes(100))
    with pytest.raises(DataError, match=r"^checkpoint must be of fedapp B: another version began"):
        _ = RunFolder(tmp_path).saved_state


class FarGrid(LocalGrid):
    """Like that of a deployment: its class is not one of a simulation's."""


@pytest.mark.parametrize("kind", [FarGrid, LocalGrid])
def test_only_where_parties_are_elsewhere_a_checkpoint_is_on_the_disk_before_they_hear_of_it(
    settings, monkeypatch, kind
):
    events, push = list[str](), LocalGrid.push_messages

    def fsync(descriptor):
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)

    def sent(grid, messages):
        messages = list(messages)
        events.append(str(from_records(messages[0].content, "")[0].checkpoint))
        return push(grid, messages)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(LocalGrid, "push_messages", sent)
    run = settings(num_boost_round=2, max_depth=2)
    train(grid := kind(simulated_contexts(run)), run)
    grid.close()
    named = [place for place, event in enumerate(events) if event.isdigit()]
    new = [b for a, b in pairwise(named) if events[a] != events[b]]
    synced = ["checkpoint" in events[place - 2 : place] for place in new]
    assert synced == [kind is FarGrid] * 2


def test_a_second_writer_is_refused_and_changes_nothing(settings, monkeypatch):
    run = settings(num_boost_round=1)
    folder = RunFolder(Path(run.run_dir))
    folder.begin(run)
    folder.write_json("failure.json", {"error": "SystemExit", "message": ""})
    again = load_settings({"resume": run.run_dir})
    refused = f"^run folder must be free, got one that another process writes: {run.run_dir}$"
    with folder.written():
        with pytest.raises(ConfigError, match=refused):
            run_local(again)
        with pytest.raises(ConfigError, match=refused):
            run_local(run)
        with pytest.raises(ConfigError, match=refused):
            carry_out(again.model_copy(update={"run_dir": run.run_dir}), "local", QUIET)
        assert (folder.path / "failure.json").exists()
    with folder.held():  # by a command that waits
        run_local(again)
    assert folder.state is State.FINISHED

    def unsupported(*_):
        raise OSError(errno.ENOTSUP, "no locks")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    assert folder.is_held
    with folder.written():
        assert folder.state is State.RUNNING


def test_a_run_keeps_the_schema_that_it_was_trained_with_and_predicts_by_it(
    settings, write_table, tmp_path
):
    (schema := tmp_path / "rows.toml").write_text('missing = ["-9"]\n')
    path = write_table(c=["-9", "1", "2", "3"] * 10)
    folder = run_local(settings(data=str(path), label="y", schema=str(schema)))
    before = predicted_rows(folder.path, str(path))
    assert np.isnan(before.table.values[:, 2]).sum() == 10
    moved = folder.path.rename(tmp_path / "moved")
    for change in (lambda: schema.write_text('missing = ["1"]\n'), schema.unlink):
        change()
        found = predicted_rows(moved, str(path))
        assert np.array_equal(found.table.values, before.table.values, equal_nan=True)
        assert np.array_equal(found.predictions, before.predictions)
    assert trained_settings(moved)["schema"] == str(moved / "schema.toml")
    (moved / "schema.toml").unlink()
    rule = r"^schema\.toml must be in the folder .*, got none: copy the schema there as it was"
    for predict in (lambda: predicted_rows(moved, str(path)), lambda: Scorer(moved)):
        with pytest.raises(ConfigError, match=rule):
            predict()
