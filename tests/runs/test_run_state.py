"""How far a run has come: the same after a checkpoint, and how long ago each party was asked."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fedapp.conversation import Checkpoint
from fedapp.run_folder import RunFolder, RunState

STATE = RunState(
    "f00d",
    attempt=2,
    step=9,
    exchanges=8,
    rounds=2,
    left_out=({"party": "bank", "step": 4, "reason": "no answer"},),
    warnings=("few bins",),
    asked={"clinic": 9, "lab": 7},
    fingerprints={"clinic": "ab"},
    bytes=(1, 2),
    seconds=(0.1, 1 / 3),
)


def test_a_state_is_read_back_as_it_was_saved(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.saved_state is None
    assert folder.saved() is None
    folder.save(Checkpoint({"margins": np.arange(3)}, {"best": 1}), STATE)
    assert folder.saved_state == STATE
    saved = folder.saved()
    assert saved is not None
    checkpoint, state = saved
    assert state == STATE
    assert checkpoint.facts == {"best": 1}
    assert checkpoint.arrays["margins"].tolist() == [0, 1, 2]


def test_an_excluded_party_is_lost() -> None:
    assert STATE.has_lost("bank")
    assert not STATE.has_lost("clinic")


def test_steps_are_counted_from_when_a_party_was_last_asked() -> None:
    assert STATE.gap("clinic") == 0
    assert STATE.gap("lab") == 2


def test_a_party_without_a_name_yet_was_asked_when_all_were() -> None:
    assert STATE.gap("node 1") == 0  # the parties were asked at several steps
    assert RunState("f00d", step=9, asked={"clinic": 7, "lab": 7}).gap("node 1") == 2
    assert RunState("f00d", step=1).gap("node 1") == 1
