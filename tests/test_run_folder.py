"""What a run's folder keeps, and who may write it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedapp.conversation import Checkpoint
from fedapp.run_folder import RunFolder
from fedapp.run_state import RunState

STATE = RunState("f00d", step=3)


def test_a_checkpoint_that_is_not_written_whole_leaves_the_one_before(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.save(Checkpoint({"margins": np.arange(3.0)}, {"trees": 1}), STATE)
    # The first array is written; the second cannot be, as it would have to be pickled.
    broken = {"margins": np.arange(4.0), "no array": np.array([object()])}
    with pytest.raises(ValueError, match="allow_pickle"):
        folder.save(Checkpoint(broken, {"trees": 2}), STATE)
    saved = folder.saved()
    assert saved is not None
    assert saved[0].arrays["margins"].tolist() == [0.0, 1.0, 2.0]
    assert saved[0].facts == {"trees": 1}


def test_arrays_are_those_of_the_facts_where_a_step_is_saved_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path)
    folder.save(Checkpoint({"margins": np.zeros(2)}, {"trees": 1}), STATE)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "write_json", killed)
        with pytest.raises(KeyboardInterrupt):
            folder.save(Checkpoint({"margins": np.ones(2)}, {"trees": 2}), STATE)
    saved = folder.saved()
    assert saved is not None
    assert (saved[0].arrays["margins"].tolist(), saved[0].facts) == ([0.0, 0.0], {"trees": 1})
    folder.save(Checkpoint({"margins": np.ones(2)}, {"trees": 2}), STATE)
    assert len(list(tmp_path.glob("checkpoint-*.npz"))) == 1
