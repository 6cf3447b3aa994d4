"""Facts of pages and documents are those of the run's record: no file's time, one importance."""

import html
import json
import os
import re
import shutil
from datetime import UTC, datetime, timedelta

import pytest

import fedapp
from fedapp.commands import cli
from fedapp.deploy.exporter import FolderCollector
from fedapp.errors import StoppedError
from fedapp.report.summary import times_text
from fedapp.run_folder import RunFolder, resumed_settings
from fedapp.runs.clean import list_runs
from fedapp.runs.local import run_local
from fedapp.settings import load_settings
from tests.deploy_folders import invoke
from tests.report.test_page import run


@pytest.fixture(scope="module")
def found(binary):
    invoke(cli, "documents", str(binary))  # whose size is part of a list
    return outputs(binary)


def outputs(run):
    """Everything that is written or shown of a run, made again."""
    for command in ("report", "documents"):
        invoke(cli, command, str(run))
    files = {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*.*")}
    (line,) = (line | {"run": ""} for line in list_runs(run.parent))
    samples = [
        (sample.name, sample.value)
        for family in FolderCollector([run.parent]).collect()
        for sample in family.samples
    ]
    return {**files, "runs list": repr(line).encode(), "metrics": repr(samples).encode()}


def test_a_copy_of_a_runs_folder_says_the_same_in_every_word(binary, found, tmp_path):
    shutil.copytree(binary, copied := tmp_path / "elsewhere" / "renamed")
    for path in copied.rglob("*"):
        os.utime(path, (10**9, 10**9))  # 2001
    after = outputs(copied)
    assert {*found} == {*after}
    for name, content in found.items():
        assert after[name] == content, name


def test_start_and_end_are_shown_everywhere_and_runs_of_early_versions_have_none(
    binary, found, tmp_path
):
    summary = RunFolder(binary).summary
    started, ended = (datetime.fromisoformat(summary[name]) for name in ("started", "ended"))
    assert started.utcoffset() == ended.utcoffset() == timedelta(0)
    assert timedelta(0) <= ended - started < timedelta(hours=1)
    assert datetime.now(UTC) - ended < timedelta(hours=1)
    assert summary["started"].encode() in found["runs list"]
    shutil.copytree(binary, path := tmp_path / "run")
    (path / "started").unlink()
    early = {name: value for name, value in summary.items() if name not in ("started", "ended")}
    (path / "summary.json").write_text(json.dumps(early))
    without = outputs(path)
    for name in ("report.html", "model-card.md", "documents/validation-report.md"):
        assert times_text(summary) in found[name].decode(), name
        assert re.search(r"trained:? not recorded", without[name].decode()), name


def test_a_resumed_run_has_the_first_start_and_the_last_end(settings, tmp_path, monkeypatch):
    times = iter([f"2026-01-0{day}T10:00:00+00:00" for day in range(1, 9)])
    monkeypatch.setattr("fedapp.run_folder.utc_now", lambda: next(times))
    with pytest.raises(StoppedError):
        run_local(settings(parties=2, num_boost_round=3), on_round=lambda line: line["round"] < 2)
    folder = RunFolder(tmp_path / "run-1")
    assert (folder.started[:10], folder.ended[:10]) == ("2026-01-01", "2026-01-02")
    again = load_settings({"resume": str(folder.path), "strategy": "pax"})
    run_local(resumed_settings(again))
    assert times_text(folder.summary) == "2026-01-01 10:00 to 2026-01-03 10:00 UTC"


def test_times_are_in_words():
    day, night = "2026-01-02T23:58:00+00:00", "2026-01-03T00:01:02+00:00"
    for started, ended, text in (
        ("", "", "not recorded"),
        (day, "2026-01-02T23:58:09+00:00", "2026-01-02 23:58 UTC"),
        (day, "", "since 2026-01-02 23:58 UTC"),
        ("", "2026-01-03T00:58:00+01:00", "until 2026-01-02 23:58 UTC"),
        (day, night, "2026-01-02 23:58 to 2026-01-03 00:01 UTC"),
    ):
        assert times_text({"started": started, "ended": ended}) == text


@pytest.mark.parametrize("kind", ["gain", "total_gain"])
def test_one_importance_is_shown_everywhere_by_xgboosts_name(kind, binary, found, tmp_path):
    if kind == "gain":
        path, shown = binary, found
    else:
        few = {"horizontal-forest.trees": 3, "horizontal-forest.max-depth": 4}
        path = run(tmp_path / "run", "horizontal-forest", **few)
        shown = outputs(path)
    loaded = fedapp.load(path)
    by_kind = loaded.summary["importance"]
    values = by_kind[kind]
    ranked = sorted(values, key=lambda name: -values[name])
    other = by_kind["gain" if kind == "total_gain" else "total_gain"]
    assert ranked != sorted(other, key=lambda name: -other[name])
    texts = {name: content.decode() for name, content in shown.items() if b"Importance" in content}
    assert {"report.html", "model-card.md", "documents/validation-report.md"} <= {*texts}
    for name, text in texts.items():
        row = r"<tr>\s*<td>([^<]*)</td>" if name.endswith(".html") else r"\| ([^|]+) \|"
        assert f"({kind} in XGBoost)" in text.replace("\\_", "_"), name
        cells = map(html.unescape, re.findall(row, text.partition("Importance")[2]))
        order = [name for name in cells if name in values]
        assert order[: len(ranked)] == ranked[: len(order)], name
        assert len(order) >= min(len(ranked), 20), name
        assert f"{values[ranked[0]]:.6g}" in text, name
    axes = loaded.plot_importance().axes[0]
    assert axes.get_xlabel().startswith(f"{kind}, as a share")
    assert [label.get_text() for label in axes.get_yticklabels()] == ranked[:20]
    if kind == "gain":
        assert loaded.to_xgboost().get_score(importance_type=kind) == pytest.approx(
            values, rel=1e-5
        )
