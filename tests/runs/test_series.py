"""Runs of a comparison, of a search or of a study: what has finished serves again, where what
decides on it is the same."""

import json
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow.csv
import pytest
from typer.testing import CliRunner

import fedapp
from fedapp.commands import cli
from fedapp.errors import ConfigError, StoppedError
from fedapp.run_folder import INPUTS_FILE
from fedapp.runs import series as module
from fedapp.runs import session
from fedapp.runs.local import run_local
from fedapp.runs.run_groups import read_trials
from fedapp.runs.series import NO_INPUTS, Series, code_digest, other_code, table_digest
from fedapp.settings import load_settings
from tests.federated import model_bytes

SHORT = {"label": "y", "parties": 2, "num_boost_round": 2, "max_depth": 2, "max_bin": 16}
NAME = "pax-42"


def lines_are_means(found, shown):
    of_pax = next(line for line in found.summary["table"] if line["strategy"] == "pax")
    tests = [run.summary["metrics"]["test"] for run in found.runs["pax"]]
    for metric in ("auc", "logloss"):
        assert of_pax[metric] == pytest.approx(np.mean([test[metric] for test in tests]))
    page = (found.path / "comparison.html").read_text()
    for line in found.summary["lines"]:
        assert line["name"].replace("'", "&#39;") in page
    for runs in found.runs.values():
        for run in runs:
            assert f'<a href="{run.path.name}/report.html">' in page
            assert (run.path / "report.html").is_file()
            assert f"{run.path.name}: finished before" in shown
    assert shown.splitlines()[-1].startswith("! of other code than today's: 1 result in ")


def best_is_run_and_shown_first(found, shown):
    trials = sorted(read_trials(found.path), key=lambda trial: -trial.score)
    best = found.run.summary["metrics"]
    assert found.summary["valid"] == trials[0].score == best["valid"]["auc"]
    assert found.summary["test"] == best["test"]
    assert trials[0].settings.items() <= found.best.items()
    assert {"gamma", "eta"} <= set(trials[0].settings)
    assert "max-depth" not in trials[0].settings  # it is given
    assert not list(found.path.glob("trial-*"))
    lines = [line.split() for line in shown.splitlines()]
    numbers = [line[0] for line in lines if len(line) > 5 and line[0].isdigit()]
    assert numbers == [str(trial.number) for trial in trials]
    assert f"-c gamma={found.best['gamma']}" in shown
    assert "fedapp run pax -c data=" in shown
    assert "finished before: its test rows have been looked at" in shown


SEARCH = {"runs": 2, "space": {"gamma": "int:0:3"}}
GROUPS = {  # a call, the words of the command, the runs, who judges them, what else is refused
    "folds": (
        partial(fedapp.compare, ["bagging", "pax"], folds=2),
        "compare bagging pax --folds 2",
        [f"{name}-42-fold-{fold}" for name in ("bagging", "pax") for fold in (1, 2)],
        lines_are_means,
        {},
    ),
    "search": (
        partial(fedapp.tune, "pax", **SEARCH),
        "tune pax --runs 2 --space gamma=int:0:3",
        ["trial-1", "trial-2", "best"],
        best_is_run_and_shown_first,
        {"seed": 1, "space": {"gamma": [1, 2]}, "search": "optuna"},
    ),
}


@pytest.fixture
def trained(monkeypatch):
    """The runs that are trained, by name, with their test scores; one whose value is set is
    interrupted after its first round."""
    runs, carry_out = {}, session.carry_out

    def interrupt(info):
        raise KeyboardInterrupt

    def note(settings, engine, watcher, on_round=None):
        name = Path(settings.run_dir).name
        on_round = interrupt if runs.pop(name, None) else on_round
        runs[name] = None
        folder = carry_out(settings, engine, watcher, on_round)
        runs[name] = folder.summary["metrics"]["test"]
        return folder

    monkeypatch.setattr(session, "carry_out", note)
    return runs


@pytest.mark.usefixtures("own_folder")
@pytest.mark.parametrize("name", GROUPS)
def test_several_runs_go_on_where_they_were_interrupted(name, write_table, trained):
    """On a frame, which does not stay, as on a file; by a command as by a call."""
    call, words, names, judge, others = GROUPS[name]
    path = write_table(n_rows=90)
    given = {"data": pyarrow.csv.read_csv(path), "output": "python", **SHORT}
    trained[names[1]] = "interrupted"
    with pytest.raises(KeyboardInterrupt):
        call(**given)
    assert [*trained] == names[:2]
    trained.clear()
    found = call(**given)
    assert [*trained] == names[1:]
    for run, test in trained.items():
        assert bool(test) != run.startswith("trial")  # which no test row decides on
    trained.clear()
    assert call(**given).summary == found.summary
    assert not trained
    assert found.summary["data"] == "frame"
    assert not list(found.path.rglob("*.parquet"))
    for changed in ({"eta": 0.1}, {"max_bin": 8}, others):
        for key, value in changed.items():
            rule = rf"^{key} must be .* as in \S*python, got .*; delete that folder, or name anot"
            with pytest.raises(ConfigError, match=rule):
                call(**{**given, key: value})
    pairs = {"data": path, **SHORT}.items()
    words = [*words.split(), "--output", "command"]
    words += [f"-c{key.replace('_', '-')}={value}" for key, value in pairs]
    assert CliRunner().invoke(cli, words).exit_code == 0
    assert [*trained] == names
    for path in Path("command", names[-1]).glob(INPUTS_FILE):
        change(path, code="other")
    judge(found, CliRunner().invoke(cli, words).output)
    for run in found.path.glob("*/model.json"):
        assert (Path("command") / run.parent.name / run.name).read_bytes() == run.read_bytes()
    write_table(n_rows=80)
    rule = r"^table must be that of the runs in \S*command, got one with another content; "
    with pytest.raises(ConfigError, match=rule):
        raise CliRunner().invoke(cli, words).exception


@pytest.fixture
def settings(write_table):
    own = {name.replace("_", "-"): value for name, value in SHORT.items()}
    return load_settings({"data": str(write_table(n_rows=60)), **own})


def stopped(settings):
    return run_local(settings, on_round=lambda line: False)


def not_run(settings):
    raise AssertionError


def told_by(settings, output, engine):
    lines = []
    Series(output, lines.append).run(settings, engine)
    return lines


def change(path, **facts):
    """What a file says that it was made from."""
    content = json.loads(path.read_text())
    facts = content["made_from"] | facts
    content["made_from"] = {key: fact for key, fact in facts.items() if fact is not None}
    path.write_text(json.dumps(content))


AGAIN = [  # how far the run came, what it says that it was made from, what is told of it
    (run_local, {}, ["finished before"]),
    (run_local, {"code": "other"}, ["finished before, by other code"]),
    (run_local, {"gamma": None}, ["finished before"]),  # by a version that had no such setting
    (stopped, {}, ["goes on", "done"]),
    (stopped, {"code": "other"}, ["goes on, by other code", "done"]),
    (not_run, {}, ["done"]),  # killed before it began
]


@pytest.mark.parametrize(("engine", "facts", "lines"), AGAIN)
def test_a_run_serves_again_or_goes_on(engine, facts, lines, settings, tmp_path, trained_once):
    with suppress(StoppedError, AssertionError):
        told_by(settings, tmp_path, engine)
    if facts:
        change(tmp_path / NAME / INPUTS_FILE, **facts)
    again = not_run if lines[0].startswith("finished") else run_local
    assert told_by(settings, tmp_path, again) == [f"{NAME}: {text}" for text in lines]
    line = f"of other code than today's: 1 result in {tmp_path} ({NAME}); what is deleted there is "
    assert other_code(tmp_path) == (f"{line}made again" if "code" in facts else "")
    whole = trained_once(settings.model_copy(update={"run_dir": str(tmp_path / "whole")}))
    assert model_bytes(whole) == (tmp_path / NAME / "model.json").read_bytes()
    if "gamma" in facts:
        with pytest.raises(ConfigError, match=r"^gamma must be 0\.0 as in .*, got 1\.0; "):
            told_by(settings.model_copy(update={"gamma": 1.0}), tmp_path, not_run)


def test_a_folder_that_is_no_run_stays(settings, tmp_path):
    told_by(settings, tmp_path, run_local)
    folder = tmp_path / NAME
    (folder / "summary.json").unlink()
    (folder / "config.toml").unlink()
    with pytest.raises(ConfigError, match=r"^run folder must have a config\.toml, got "):
        told_by(settings, tmp_path, not_run)
    assert (folder / "model.json").exists()


def rows_of(path, settings, value):
    """What is kept, where ``value`` would be made now, and what is told."""
    lines = []
    series = Series(path.parent, lines.append)
    return series.rows(path.stem, settings, lambda: [{"value": value}]), lines


def test_rows_in_a_file_serve_again_where_all_is_the_same(settings, tmp_path, write_table):
    path = tmp_path / "new" / "rows.json"
    assert rows_of(path, settings, 1) == ([{"value": 1}], [])
    assert rows_of(path, settings, 2) == ([{"value": 1}], [])
    other = settings.model_copy(update={"asked_eta": 0.1})
    assert rows_of(path, other, 3) == ([{"value": 3}], ["rows.json: made again, as eta differs"])
    write_table(n_rows=50)
    assert rows_of(path, other, 4) == ([{"value": 4}], ["rows.json: made again, as table differs"])
    change(path, code="other")
    assert rows_of(path, other, 5) == ([{"value": 4}], ["rows.json: made before, by other code"])
    assert f"1 result in {tmp_path} (new/rows.json)" in other_code(tmp_path)
    path.write_text('{"rows": [{"value": 1}]}')
    assert rows_of(path, settings, 2) == ([{"value": 2}], [f"rows.json: {NO_INPUTS}"])


def test_a_table_is_what_its_file_and_its_schema_hold(settings, write_table, tmp_path):
    first = table_digest(settings)
    assert table_digest(settings) == first
    write_table(n_rows=50)
    (schema := tmp_path / "schema.toml").write_text("one")
    named = settings.model_copy(update={"schema_file": str(schema)})
    of_one = table_digest(named)
    schema.write_text("another")
    assert len({first, table_digest(settings), of_one, table_digest(named)}) == 4


def test_code_is_that_of_all_sources_and_libraries(monkeypatch, tmp_path):
    monkeypatch.setattr("fedapp.home.app_folder", lambda: tmp_path)
    (source := tmp_path / "clients" / "deep" / "a.py").parent.mkdir(parents=True)
    found = set()
    for text, version in (("x = 1", "1.0"), ("x = 2", "1.0"), ("x = 2", "1.1"), ("x = 2", "1.1")):
        source.write_text(text)
        monkeypatch.setattr(
            module, "versions", lambda names, one=version: dict.fromkeys(names, one)
        )
        found.add(code_digest.__wrapped__())
    assert len(found) == 3
