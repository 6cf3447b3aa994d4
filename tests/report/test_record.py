"""Facts of pages and documents are those of the run's record: no file's time, one importance."""

import html
import json
import os
import re
import shutil
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fedapp
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


def command(*words):
    ended = CliRunner().invoke(cli, [*words], catch_exceptions=False)
    assert ended.exit_code == 0, ended.output
    return ended.stdout


def run_of(path, strategy, *words, **settings):
    given = {"parties": 2, **{name.replace("__", "."): value for name, value in settings.items()}}
    options = [word for name, value in given.items() for word in ("-c", f"{name}={value}")]
    command(
        "run", strategy, *(one.replace("_", "-") for one in options), *words, "--output", str(path)
    )
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    path = tmp_path_factory.mktemp("trained") / "run"
    return run_of(path, "pax", "--baselines", num_boost_round=3, max_depth=3)


@pytest.fixture(scope="module")
def forest(tmp_path_factory):
    path = tmp_path_factory.mktemp("forest") / "run"
    few = {"horizontal_forest__trees": 3, "horizontal_forest__max_depth": 4}
    return run_of(path, "horizontal-forest", **few)


@pytest.fixture(scope="module")
def found(trained):
    command("documents", str(trained))  # whose size is part of a list
    return outputs(trained)


def dated_files(folder):
    """Give all files the same old time."""
    for path in folder.rglob("*"):
        os.utime(path, (LONG_AGO, LONG_AGO))


def outputs(run):
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


def test_a_copy_of_a_runs_folder_says_the_same_in_every_word(trained, found, tmp_path):
    copied = tmp_path / "elsewhere" / "renamed"
    shutil.copytree(trained, copied)
    dated_files(copied)
    after = outputs(copied)
    assert [*sorted(found)] == [*sorted(after)]
    for name, content in found.items():
        assert after[name] == content, name


def test_start_and_end_are_shown_everywhere(trained, found):
    summary = RunFolder(trained).summary
    started, ended = (datetime.fromisoformat(summary[name]) for name in ("started", "ended"))
    assert started.utcoffset() == ended.utcoffset() == timedelta(0)
    assert timedelta(0) <= ended - started < timedelta(hours=1)
    assert datetime.now(UTC) - ended < timedelta(hours=1)
    for name in ("report.html", "model-card.md", "documents/validation-report.md"):
        assert times_text(summary) in found[name].decode(), name
    assert summary["started"].encode() in found["runs list"]


def test_a_resumed_run_has_the_first_start_and_the_last_end(tmp_path, monkeypatch):
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


def test_times_are_in_words(trained):
    day, night = "2026-01-02T23:58:00+00:00", "2026-01-03T00:01:02+00:00"
    for started, ended, text in (
        ("", "", "not recorded"),
        (day, "2026-01-02T23:58:09+00:00", "2026-01-02 23:58 UTC"),
        (day, "", "since 2026-01-02 23:58 UTC"),
        ("", "2026-01-03T00:58:00+01:00", "until 2026-01-02 23:58 UTC"),
        (day, night, "2026-01-02 23:58 to 2026-01-03 00:01 UTC"),
    ):
        assert (
            times_text({**RunFolder(trained).summary, "started": started, "ended": ended}) == text
        )


def test_a_run_of_an_early_version_has_no_dates(trained, tmp_path):
    shutil.copytree(trained, path := tmp_path / "run")
    (path / "started").unlink()
    summary = json.loads((path / "summary.json").read_text())
    times = "started", "ended"
    early = {name: value for name, value in summary.items() if name not in times}
    (path / "summary.json").write_text(json.dumps(early))
    found = outputs(path)
    for name in ("report.html", "model-card.md", "documents/validation-report.md"):
        assert re.search(r"trained:? not recorded", found[name].decode()), name


def column_order(text, row, columns):
    """Names of columns in a table's rows, in which ``row`` finds the first cell."""
    return [name for name in map(html.unescape, re.findall(row, text)) if name in columns]


@pytest.mark.parametrize(("made", "kind"), [("trained", "gain"), ("forest", "total_gain")])
def test_one_importance_is_shown_everywhere_by_xgboosts_name(made, kind, request):
    path = request.getfixturevalue(made)
    run = fedapp.load(path)
    by_kind = run.summary["importance"]
    values = by_kind[kind]
    ranked = sorted(values, key=lambda name: -values[name])
    other = by_kind["gain" if kind == "total_gain" else "total_gain"]
    assert ranked != sorted(other, key=lambda name: -other[name])
    shown = request.getfixturevalue("found") if made == "trained" else outputs(path)
    texts = {name: content.decode() for name, content in shown.items() if b"Importance" in content}
    assert {"report.html", "model-card.md", "documents/validation-report.md"} <= {*texts}
    for name, text in texts.items():
        row = r"<tr>\s*<td>([^<]*)</td>" if name.endswith(".html") else r"\| ([^|]+) \|"
        assert f"({kind} in XGBoost)" in text.replace("\\_", "_"), name
        order = column_order(text.partition("Importance")[2], row, values)
        assert order[: len(ranked)] == ranked[: len(order)], name
        assert len(order) >= min(len(ranked), 20), name
        first = f"{values[ranked[0]]:.6g}"
        assert first in text, name
    axes = run.plot_importance().axes[0]
    assert axes.get_xlabel().startswith(f"{kind}, as a share")
    assert [label.get_text() for label in axes.get_yticklabels()] == ranked[:20]
    if kind == "gain":
        assert run.to_xgboost().get_score(importance_type=kind) == pytest.approx(values, rel=1e-5)
