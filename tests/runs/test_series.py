"""Results that stay on disk serve again only where what decides on them is the same."""

import json
import shutil
import time

import pytest
from typer.testing import CliRunner

from fedapp.commands import cli
from fedapp.errors import ConfigError, StoppedError
from fedapp.run_folder import INPUTS_FILE
from fedapp.runs import series as module
from fedapp.runs.local import run_local
from fedapp.runs.series import NO_INPUTS, Series, code_digest, other_code, table_digest
from fedapp.settings import load_settings
from simulations import study

NAME = "pax-42"


@pytest.fixture
def settings(write_table):
    own = {"data": str(write_table(n_rows=60)), "label": "y", "parties": 2}
    return load_settings({**own, "num-boost-round": 2, "max-depth": 2, "max-bin": 16})


def stopped(settings):
    return run_local(settings, on_round=lambda line: False)


def not_run(settings):
    raise AssertionError


def told_by(settings, output, engine):
    told = []
    Series(output, told.append).run(settings, engine)
    return told


def run_or_stop(settings, output, engine):
    if engine is stopped:
        with pytest.raises(StoppedError):
            told_by(settings, output, engine)
    else:
        told_by(settings, output, engine)


def change(path, **facts):
    """What a file says that it was made from."""
    content = json.loads(path.read_text())
    content["made_from"] |= facts
    path.write_text(json.dumps(content))


def test_a_run_serves_again_where_all_is_the_same(settings, tmp_path):
    assert told_by(settings, tmp_path, run_local) == [f"{NAME}: done"]
    assert told_by(settings, tmp_path, not_run) == [f"{NAME}: finished before"]
    assert other_code(tmp_path) == ""


@pytest.mark.slow
@pytest.mark.parametrize("engine", [run_local, stopped])
def test_a_run_on_another_content_of_the_file_does_not_serve(
    settings, tmp_path, write_table, engine
):
    run_or_stop(settings, tmp_path, engine)
    write_table(n_rows=50)
    rule = f"^table must be that of the runs in {tmp_path}/{NAME}, got one with another content; "
    with pytest.raises(ConfigError, match=rule + "delete that folder, or name another"):
        told_by(settings, tmp_path, not_run)
    shutil.rmtree(tmp_path / NAME)
    assert told_by(settings, tmp_path, run_local) == [f"{NAME}: done"]


def test_a_run_of_other_code_serves_and_is_named(settings, tmp_path):
    told_by(settings, tmp_path, run_local)
    change(tmp_path / NAME / INPUTS_FILE, code="other")
    assert told_by(settings, tmp_path, not_run) == [f"{NAME}: finished before, by other code"]
    line = f"of other code than today's: 1 result in {tmp_path} ({NAME}); what is deleted there is "
    assert other_code(tmp_path) == f"{line}made again"
    shutil.rmtree(tmp_path / NAME)
    told_by(settings, tmp_path, run_local)
    assert other_code(tmp_path) == ""


def test_a_run_that_was_begun_by_other_code_goes_on_and_stays_named(settings, tmp_path):
    with pytest.raises(StoppedError):
        told_by(settings, tmp_path, stopped)
    change(tmp_path / NAME / INPUTS_FILE, code="other")
    told = told_by(settings, tmp_path, run_local)
    assert told == [f"{NAME}: goes on, by other code", f"{NAME}: done"]
    assert f"1 result in {tmp_path} ({NAME})" in other_code(tmp_path)


@pytest.mark.parametrize("engine", [run_local, stopped])
def test_a_run_that_does_not_say_what_it_was_made_from_is_made_again(settings, tmp_path, engine):
    run_or_stop(settings, tmp_path, engine)
    (tmp_path / NAME / INPUTS_FILE).unlink()
    assert told_by(settings, tmp_path, run_local) == [f"{NAME}: {NO_INPUTS}", f"{NAME}: done"]
    assert told_by(settings, tmp_path, not_run) == [f"{NAME}: finished before"]


def test_a_run_that_was_killed_before_it_began_is_begun_again(settings, tmp_path):
    with pytest.raises(AssertionError):
        told_by(settings, tmp_path, not_run)
    assert [path.name for path in (tmp_path / NAME).iterdir()] == [INPUTS_FILE]
    assert told_by(settings, tmp_path, run_local) == [f"{NAME}: done"]


def rows_of(path, settings, value):
    """What is kept, where ``value`` would be made now, and what is told."""
    told = []
    series = Series(path.parent, told.append)
    return series.rows(path.stem, settings, lambda: [{"value": value}]), told


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


def test_rows_in_a_file_of_before_are_made_again(settings, tmp_path):
    (tmp_path / "rows.json").write_text('{"rows": [{"value": 1}]}')
    found = rows_of(tmp_path / "rows.json", settings, 2)
    assert found == ([{"value": 2}], [f"rows.json: {NO_INPUTS}"])


def test_a_table_is_read_once_for_as_long_as_it_stays(settings, monkeypatch, write_table):
    first, file_digest = table_digest(settings), module.hashlib.file_digest
    calls = []
    monkeypatch.setattr(
        module.hashlib, "file_digest", lambda *how: calls.append(how) or file_digest(*how)
    )
    assert table_digest(settings) == first
    assert not calls
    write_table(n_rows=50)
    assert table_digest(settings) != first
    assert len(calls) == 1


def test_a_schema_is_part_of_the_table(settings, tmp_path):
    (schema := tmp_path / "schema.toml").write_text("one")
    named = settings.model_copy(update={"schema_file": str(schema)})
    first = table_digest(named)
    schema.write_text("another")
    assert len({table_digest(settings), first, table_digest(named)}) == 3


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


def test_many_results_of_other_code_are_counted(settings, tmp_path):
    for number in range(8):
        rows_of(tmp_path / f"{number}.json", settings, number)
        change(tmp_path / f"{number}.json", code="other")
    assert "8 results in" in other_code(tmp_path)
    assert "5.json and 2 more)" in other_code(tmp_path)


@pytest.mark.slow
def test_commands_end_with_what_is_of_other_code(settings, tmp_path, capsys):
    output = tmp_path / "out"
    given = [f"data={settings.data}", "label=y", "parties=2", "num-boost-round=1", "max-depth=1"]
    words = ["compare", "pax", "--output", str(output)]
    words += [word for pair in given for word in ("-c", pair)]
    assert "of other code" not in CliRunner().invoke(cli, words).output
    change(output / NAME / INPUTS_FILE, code="other")
    again = CliRunner().invoke(cli, words).output
    assert f"{NAME}: finished before, by other code" in again
    last = again.splitlines()[-1]
    assert last.startswith("! of other code than today's: 1 result in ")
    study.write_tables(output, "none", time.monotonic(), {"notes": ""})
    assert capsys.readouterr().out.splitlines()[-1] == last.removeprefix("! ")
