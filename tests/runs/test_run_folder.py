"""What a run's folder keeps, how far the run has come, and who may write the folder."""

from __future__ import annotations

import errno
import fcntl
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedapp.commands.common import new_follower
from fedapp.conversation import Checkpoint
from fedapp.errors import ConfigError, DataError
from fedapp.run_folder import RunFolder, RunState, State
from fedapp.runs.local import run_local
from fedapp.runs.predict import predicted_rows, trained_settings
from fedapp.runs.session import carry_out
from fedapp.serve.scorer import Scorer
from fedapp.settings import load_settings
from tests.conftest import MakeSettings

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


@pytest.mark.parametrize("what", ["arrays", "facts"])
def test_what_an_older_version_did_not_keep_is_named(tmp_path: Path, what: str) -> None:
    folder = RunFolder(tmp_path)
    folder.save(Checkpoint({"margins": np.zeros(2)}, {"trees": 1}), STATE)
    saved = folder.saved()
    assert saved is not None
    with pytest.raises(DataError, match=r"^checkpoint must have 'aggregation': another version"):
        getattr(saved[0], what)["aggregation"]


def test_arrays_are_those_of_the_facts_where_a_step_is_saved_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path)
    folder.save(Checkpoint({"margins": np.zeros(2)}, {"trees": 1}), STATE)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "write", killed)
        with pytest.raises(KeyboardInterrupt):
            folder.save(Checkpoint({"margins": np.ones(2)}, {"trees": 2}), STATE)
    saved = folder.saved()
    assert saved is not None
    assert (saved[0].arrays["margins"].tolist(), saved[0].facts) == ([0.0, 0.0], {"trees": 1})
    folder.save(Checkpoint({"margins": np.ones(2)}, {"trees": 2}), STATE)
    assert len(list(tmp_path.glob("checkpoint-*.npz"))) == 1


def test_a_second_writer_is_refused_and_changes_nothing(settings: MakeSettings) -> None:
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
            carry_out(again.model_copy(update={"run_dir": run.run_dir}), "local", new_follower())
        assert (folder.path / "failure.json").exists()
    assert run_local(again).state is State.FINISHED


def test_a_command_that_waits_does_not_lock_out_its_server_app(settings: MakeSettings) -> None:
    run = settings(num_boost_round=1)
    with RunFolder(Path(run.run_dir)).held():
        assert (run_local(run).path / "summary.json").exists()


def test_a_folder_that_cannot_be_locked_counts_as_held_and_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOTSUP, "no locks")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    folder = RunFolder(tmp_path)
    assert folder.is_held
    with folder.written():
        assert folder.state is State.RUNNING


def test_a_run_keeps_the_schema_that_it_was_trained_with_and_predicts_by_it(
    settings: MakeSettings, write_table: Callable[..., Path], tmp_path: Path
) -> None:
    schema = tmp_path / "rows.toml"
    schema.write_text('missing = ["-9"]\n')
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


def test_a_run_whose_schema_is_not_in_its_folder_predicts_nothing(
    settings: MakeSettings, write_table: Callable[..., Path], tmp_path: Path
) -> None:
    schema = tmp_path / "rows.toml"
    schema.write_text('missing = ["-9"]\n')
    path = write_table()
    folder = run_local(settings(data=str(path), label="y", schema=str(schema)))
    (folder.path / "schema.toml").unlink()
    rule = r"^schema\.toml must be in the folder .*, got none: copy the schema there as it was"
    with pytest.raises(ConfigError, match=rule):
        predicted_rows(folder.path, str(path))
    with pytest.raises(ConfigError, match=rule):
        Scorer(folder.path)
