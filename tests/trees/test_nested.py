"""Files that are nested too deeply, or too large, are refused by name."""

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fedapp
from fedapp.commands import cli
from fedapp.data.schema import read_schema
from fedapp.errors import ConfigError, DataError
from fedapp.records.document import MOST_BYTES
from fedapp.runs.predict import load_model, parts_of, trained_settings
from fedapp.serve.scorer import open_scorer
from fedapp.site.settings import parse_node_config
from fedapp.site.trust import PINNED, pins_in
from fedapp.superlinks import superlinks
from fedapp.trees.kinds import DIVIDED

DEEP = 20_000
NESTED = {
    "lists": "a = " + "[" * DEEP + "]" * DEEP,
    "tables": "a = " + "{a=" * DEEP + "1" + "}" * DEEP,
    "dotted keys": "a" + ".a" * (DEEP // 10) + " = 1",
}
SHORT = {"num_boost_round": 1, "max_depth": 2, "max_bin": 16, "parties": 2}


pytestmark = pytest.mark.usefixtures("own_folder")


READ = {
    "schema": ("rows.toml", read_schema, "schema '.*rows.toml' must be TOML: "),
    "node config": (
        "site.toml",
        lambda path: parse_node_config(str(path)),
        'node config must be like name="bank" data="rows.csv": ',
    ),
    "keys": (PINNED, lambda path: pins_in(path.parent), "trusted.toml must have a fingerprint "),
    "run": (
        "config.toml",
        lambda path: trained_settings(path.parent),
        "config.toml must be TOML, got: ",
    ),
    "SuperLinks": ("config.toml", lambda path: superlinks(), r".*config.toml must be TOML, got: "),
}


@pytest.mark.parametrize("nested", NESTED)
@pytest.mark.parametrize("kind", READ)
def test_toml_that_is_nested_too_deeply_is_refused(kind, nested, monkeypatch, tmp_path):
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    name, read, rule = READ[kind]
    Path(name).write_text(NESTED[nested])
    with pytest.raises(ConfigError, match=rf"^{rule}.*nested at most 32 deep$"):
        read(Path(name).absolute())


@pytest.mark.slow
@pytest.mark.parametrize("nested", NESTED)
def test_settings_that_are_nested_too_deeply_are_refused(nested):
    name, _, value = NESTED[nested].partition("=")
    found = CliRunner().invoke(cli, ["run", "pax", "-c", f"{name.strip()}={value}"])
    assert isinstance(found.exception, ConfigError)
    assert str(found.exception).startswith("a")
    Path("runs/unfinished").mkdir(parents=True)
    Path("runs/unfinished/config.toml").write_text(NESTED[nested])
    with pytest.raises(ConfigError, match=r"^config.toml of the run must be TOML: nested at most"):
        fedapp.run("pax", resume="runs/unfinished")
    listed = CliRunner().invoke(cli, ["runs"])
    assert "skipped: runs/unfinished: config.toml must be TOML: nested at most" in listed.output


def test_toml_of_the_usual_depth_is_read():
    Path("site.toml").write_text("name = 'bank'\n[a.b.c]\nd = [[1], [2]]\n")
    assert parse_node_config("site.toml")["name"] == "bank"


def test_a_model_too_large_or_nested_too_deeply_is_not_read():
    run = fedapp.run("pax", **SHORT)
    (run.path / "model.xgb.json").write_text('{"learner":' + "[" * DEEP + "]" * DEEP + "}")
    with pytest.raises(DataError, match=r"^model must be JSON, got RecursionError"):
        run.to_xgboost()
    # Without blocks on the disk: nothing reads it.
    for name in ("model.json", "model.xgb.json"):
        os.truncate(run.path / name, MOST_BYTES + 1)
    loaded = fedapp.load(run.path)
    rule = r"^model must be a file of <= 1,073,741,824 bytes, got 1,073,741,825: .*model"
    for read in (
        lambda: loaded.predict("breast-cancer"),
        loaded.to_xgboost,
        lambda: open_scorer(run.path),
        lambda: fedapp.run("pax", init_model=run.path, **SHORT),
    ):
        with pytest.raises(DataError, match=rule):
            read()
    words = ["predict", str(run.path), "--data", "breast-cancer", "--output", "out.csv"]
    assert isinstance(CliRunner().invoke(cli, words).exception, DataError)


@pytest.mark.parametrize("kind", ["", DIVIDED, "forest", "linear"])
def test_a_model_that_is_nested_too_deeply_is_refused(kind):
    told = f',"kind":"{kind}"' if kind else ""
    nested = "[" * DEEP + "]" * DEEP
    Path("model.json").write_text(f'{{"format":1{told},"parts":{nested}}}')
    read = parts_of if kind == DIVIDED else load_model
    with pytest.raises(DataError, match=r"^model must be JSON.*, got RecursionError"):
        read(Path() if kind == DIVIDED else Path("model.json"))
