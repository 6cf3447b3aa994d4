"""Facts of pages and documents are those of the run's record: no file's time, one importance."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedapp.commands import cli
from fedapp.deploy.exporter import FolderCollector
from fedapp.errors import StoppedError
from fedapp.report.summary import times_text
from fedapp.run_folder import RunFolder, resumed_settings
from fedapp.runs.clean import list_runs
from fedapp.runs.local import run_local
from fedapp.settings import load_settings

SMALL = {"num-boost-round": 3, "max-depth": 3, "parties": 2}
LONG_AGO = 10**9  # 2001


def command(*words: str) -> str:
    ended = CliRunner().invoke(cli, [*words], catch_exceptions=False)
    assert ended.exit_code == 0, ended.output
    return ended.stdout


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trained") / "run"
    given = [word for name, value in SMALL.items() for word in ("-c", f"{name}={value}")]
    command("run", "pax", *given, "--baselines", "--output", str(path))
    return path


def dated_files(folder: Path) -> None:
    """Give all files the same old time."""
    for path in folder.rglob("*"):
        os.utime(path, (LONG_AGO, LONG_AGO))


def outputs(run: Path) -> dict[str, bytes]:
    """Everything that is written or shown of a run, made again."""
    command("report", str(run))
    command("documents", str(run))
    files = {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*.*")}
    (line,) = (replace(run, path=Path(), began=0, changed=0) for run in list_runs(run.parent))
    samples = [
        (sample.name, sample.value)
        for family in FolderCollector([run.parent]).collect()
        for sample in family.samples
    ]
    return {**files, "runs list": repr(line).encode(), "metrics": repr(samples).encode()}


def test_a_copy_of_a_runs_folder_says_the_same_in_every_word(trained: Path, tmp_path: Path) -> None:
    copied = tmp_path / "elsewhere" / "renamed"
    command("documents", str(trained))  # whose size is part of a list
    shutil.copytree(trained, copied)
    dated_files(copied)
    before, after = outputs(trained), outputs(copied)
    assert [*sorted(before)] == [*sorted(after)]
    for name, content in before.items():
        assert after[name] == content, name


def test_start_and_end_are_shown_everywhere(trained: Path) -> None:
    summary = RunFolder(trained).summary
    started, ended = (datetime.fromisoformat(summary[name]) for name in ("started", "ended"))
    assert started.utcoffset() == ended.utcoffset() == timedelta(0)
    assert timedelta(0) <= ended - started < timedelta(hours=1)
    assert datetime.now(UTC) - ended < timedelta(hours=1)
    found = outputs(trained)
    for name in ("report.html", "model-card.md", "documents/validation-report.md"):
        assert times_text(summary) in found[name].decode(), name
    assert summary["started"].encode() in found["runs list"]


def test_a_resumed_run_has_the_first_start_and_the_last_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([f"2026-01-0{day}T10:00:00+00:00" for day in range(1, 9)])
    monkeypatch.setattr("fedapp.run_folder.utc_now", lambda: next(times))
    given = {"strategy": "pax", **SMALL, "run-dir": str(tmp_path / "run")}
    with pytest.raises(StoppedError):
        run_local(load_settings(given), on_round=lambda line: line["round"] < 2)
    folder = RunFolder(tmp_path / "run")
    assert (folder.started[:10], folder.ended[:10]) == ("2026-01-01", "2026-01-02")
    again = load_settings({"resume": str(folder.path), "strategy": "pax"})
    run_local(resumed_settings(again))
    assert times_text(folder.summary) == "2026-01-01 10:00 to 2026-01-03 10:00 UTC"


@pytest.mark.parametrize(
    ("times", "text"),
    [
        ({}, "not recorded"),
        ({"started": "2026-01-02T23:58:00+00:00"}, "since 2026-01-02 23:58 UTC"),
        ({"ended": "2026-01-03T00:58:00+01:00"}, "until 2026-01-02 23:58 UTC"),
    ],
)
def test_what_is_not_recorded_is_said_to_be(
    trained: Path, tmp_path: Path, times: Mapping[str, str], text: str
) -> None:
    shutil.copytree(trained, path := tmp_path / "run")
    (path / "started").unlink()
    summary: dict[str, Any] = json.loads((path / "summary.json").read_text())
    summary = {name: value for name, value in summary.items() if name not in ("started", "ended")}
    (path / "summary.json").write_text(json.dumps({**summary, **times}))
    found = outputs(path)
    for name in ("report.html", "model-card.md", "documents/validation-report.md"):
        assert re.search(rf"trained[^\n]{{0,3}} {text}", found[name].decode()), name
