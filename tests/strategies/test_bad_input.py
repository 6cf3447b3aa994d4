"""What a run refuses, and in which words: site, field and rule."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedapp.commands import cli
from fedapp.errors import ConfigError, DataError, FedappError, PartyError, without_folders
from fedapp.runs.local import run_local
from tests.federated import model_of

# Values and lines stay at the site.
MORE = r"the site's own log says more$"


@pytest.fixture
def refuse(settings):
    """Holds that a run is refused with this error, and leaves no model but the reason."""

    def check(error, match, contexts=None, **overrides):
        run = settings(num_boost_round=1, **overrides)
        with pytest.raises(error, match=match) as caught:
            run_local(run, contexts)
        folder = Path(run.run_dir)
        assert not (folder / "model.json").exists()
        assert not (folder / "summary.json").exists()
        failure = json.loads((folder / "failure.json").read_text())
        del failure["ended"], failure["model_id"]
        assert failure == {"error": error.__name__, "message": str(caught.value)}

    return check


@pytest.fixture
def two(write_table, sites):
    """``two(bank, shop)``: sites of these columns, and what more the shop's node config says."""

    def make(bank=(), shop=(), **node):
        data = {"bank": write_table("bank", seed=1, **dict(bank))}
        data["shop"] = write_table("shop", **dict(shop))
        first, second = ({"name": name, "data": path} for name, path in data.items())
        return sites(first, {**second, **node})

    return make


@pytest.fixture
def refuse_site(refuse, two):
    """Holds that a run of a sound bank and a shop with this table is refused."""

    def check(match, node=None, table=None, error=PartyError, **overrides):
        refuse(error, match, two(shop=table or {}, **(node or {})), parties=2, **overrides)

    return check


# What a site's table and node config may be wrong in

ONE = "got 1 of 40 rows"
BINARY = "binary:logistic"


def first(value, *rest):
    """A column that begins with this value."""
    return [value, *(rest * 39)[:39]] if rest else [value, *range(39)]


NUMBERS = {"objective": "reg:squarederror"}
WEIGHTS = f"weight column 'w' must be finite and >= 0 in every row, {ONE}; {MORE}"
MISSING = f"label column 'y' must have no missing values, {ONE}; missing-label=drop .*; {MORE}"
# The rule that a message of site shop ends with, its table, node config and objective.
REFUSED = [
    ("table must have at least 2 training rows, got 1$", {"n_rows": 1}, {}, {}),
    (f"feature columns must be finite .* in 'a' infinite; {MORE}", {"a": first("1e39")}, {}, {}),
    ('label must name the label column, as in label="y"; got none$', {}, {"label": ""}, {}),
    (MISSING, {"y": first("", 0, 1)}, {}, {}),
    (f"label column 'y' must be finite, {ONE}; {MORE}", {"y": first("inf", 0, 1)}, {}, NUMBERS),
    ("label must be finite as float32$", {"y": first("1e39")}, {}, NUMBERS),
    *((WEIGHTS, {"w": first(value, 1)}, {"weight": "w"}, {}) for value in ("-1", "inf", "")),
    ("data must be .* file, got 'none.csv'$", {}, {"data": "/secret/place/none.csv"}, {}),
]


@pytest.mark.parametrize(("rule", "table", "node", "more"), REFUSED)
def test_what_is_wrong_with_a_site_is_told_by_its_name(refuse_site, rule, table, node, more):
    refuse_site(rf"^shop \(step 1\): {rule}", node, table, **more)


@pytest.mark.parametrize(
    ("rule", "table", "node"),
    [
        (
            "shop: columns must be those of bank, got 'b' is missing: drop.*methods$",
            {"b": None},
            {},
        ),
        (
            "label must have 2 values for bin.*, the parties have 3: 0, 1, 2; ",
            {"y": [1, 2] * 20},
            {},
        ),
        ("bank: name must be unique in the federation, two parties have it$", {}, {"name": "bank"}),
    ],
)
def test_what_does_not_fit_together_is_refused(refuse_site, rule, table, node):
    refuse_site(f"^{rule}", node, table, DataError)


def test_a_partition_that_is_none_is_refused(refuse):
    rule = r"^party-1 \(step 1\): partition must be one of iid, .*, got 'alphabetical'$"
    refuse(PartyError, rule, partition="alphabetical")


@pytest.mark.parametrize("name", ["../x", "", ".", "x" * 65, "-x"])
def test_a_name_that_is_no_folder_is_refused_and_makes_none(refuse_site, tmp_path, name):
    rule = r"name in the node config must be letters, digits, '\.', '_' or '-', got"
    refuse_site(rf"{rule} '{name}'$", node={"name": name})
    assert [path.name for path in (tmp_path / "home" / "sites").iterdir()] == ["bank"]


SAME = "label must not be the same in every row of every party"


@pytest.mark.parametrize(
    ("objective", "columns", "node", "rule"),
    [
        (BINARY, {"y": [1] * 40}, {}, f"{SAME}, got only '1'$"),
        ("reg:squarederror", {"y": [1] * 40}, {}, f"{SAME}$"),
        (BINARY, {"w": [0] * 40}, {"weight": "w"}, "weight must be > 0 in some row of some party"),
    ],
)
def test_labels_and_weights_that_say_nothing_at_all_parties_are_refused(
    refuse, write_table, sites, objective, columns, node, rule
):
    nodes = ({"name": n, "data": write_table(n, **columns), **node} for n in ("bank", "shop"))
    refuse(DataError, f"^{rule}", sites(*nodes), parties=2, objective=objective)


def test_one_label_or_weights_of_zero_at_one_party_leave_the_model_to_the_others(settings, two):
    def model(label, weight):
        nodes = two(shop={"y": [label] * 40, "w": [weight] * 40}, weight="w")
        return model_of(run_local(settings(parties=2), nodes))

    assert model(1, 0).base_score == model(0, 0).base_score
    assert model(1, 1).base_score > model(0, 1).base_score
    assert model(1, 1).classes == ("0", "1")


def test_too_few_nodes_are_refused_after_a_while(refuse, write_table, sites, monkeypatch):
    monkeypatch.setattr("strategies.handshake.QUIET_SECONDS", 0.3)  # longer than the deadline
    refuse(
        ConfigError,
        r"^parties must be 2, got 1 within 0.1 s \(start-deadline\)$",
        sites({"name": "bank", "data": write_table()}),
        parties=2,
        start_deadline=0.1,
    )


def test_too_many_nodes_are_refused(refuse, two):
    rule = "^parties must be the number of nodes, 2, or 0, which takes all, got 1$"
    refuse(ConfigError, rule, two(), parties=1)


# Settings


def test_a_folder_that_holds_a_run_is_not_written_to(settings):
    run = settings(num_boost_round=1)
    folder = run_local(run).path
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    rule = f"run-dir must be a new folder, got {folder} which holds a run"
    with pytest.raises(ConfigError, match=f"^{rule}$"):
        run_local(run)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


@pytest.mark.parametrize("name", ["none.csv", "my folder/it's/none.csv", "empty.csv", "none.toml"])
def test_a_path_is_shown_as_typed_and_leaves_a_site_as_a_name(
    refuse_site, monkeypatch, tmp_path, name
):
    (tmp_path / "empty.csv").touch()
    (tmp_path / "rows.csv").write_text("a,y\n1,0\n")
    monkeypatch.chdir(tmp_path)
    for path in (f"{tmp_path}/{name}", f"../{tmp_path.name}/{name}"):
        is_schema = name.endswith(".toml")
        words = ["data", "describe", *(["rows.csv", "--schema"] if is_schema else []), path]
        if not is_schema:  # that command writes a schema that is not there
            assert f"'{path}'" in str(CliRunner().invoke(cli, words).exception)
        given = {"data": "rows.csv", "schema": path} if is_schema else {"data": path}
        refuse_site(rf"^shop \(step .\): [^/]*'{Path(name).name}'[^/]*$", node=given)


@pytest.mark.parametrize(
    ("text", "shortened"),
    [
        ("data file '/srv/my data/loans.csv' must exist", "data file 'loans.csv' must exist"),
        ("got:/a/b.csv,/c/d.csv (/e/f.csv)", "got:b.csv,d.csv (f.csv)"),
        ("'/a/b' and 'km/h' and N/A and a / b", "'b' and 'km/h' and N/A and a / b"),
        ("see https://fed.example.org/a/b", "see https://fed.example.org/a/b"),
    ],
)
def test_folders_are_left_out_of_a_text_that_leaves(text, shortened):
    assert without_folders(text) == shortened


@pytest.mark.parametrize("typed", ["./secret/s.toml", "secret//s.toml", "secret/./s.toml"])
def test_folders_of_a_relative_path_are_left_out_in_every_spelling(typed):
    for spelled in (typed, str(Path(typed))):
        text = f"schema {spelled!r} must be TOML, got {spelled}"
        assert without_folders(text, [typed]) == "schema 's.toml' must be TOML, got s.toml"


# The command line


def fedapp(*arguments):
    command = [str(Path(sys.executable).parent / "fedapp"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)


def test_the_command_ends_with_one_line_and_status_1(tmp_path):
    run_dir = tmp_path / "run"
    given = ("-c", "data=none.csv", "-c", f"run-dir={run_dir}")
    done = fedapp("run", "pax", "--engine", "local", *given)
    rule = "data must be a built-in name, a registry name or an existing file, got 'none.csv'"
    assert done.returncode == 1
    assert done.stderr.splitlines() == [f"error: {rule}"]
    assert not re.search("round|Traceback", done.stdout)
    assert not (run_dir / "model.json").exists()


@pytest.mark.parametrize(
    ("method", "pair", "rule"),
    [
        ("pax", "eta=-1", "eta must be > 0.0 or 'auto', got -1"),
        ("pax", "eta", "a setting must be written as key=value, got eta"),
        ("paxx", "eta=1", "strategy must be one of .*, got 'paxx'; did you mean pax?"),
        ("one-round", "eta=1", "strategy must be one that trains (.*), got 'one-round'"),
    ],
)
def test_a_bad_setting_ends_the_command(tmp_path, method, pair, rule):
    words = ["run", method, "--engine", "local", "-c", pair, "-c", f"run-dir={tmp_path / 'run'}"]
    result = CliRunner().invoke(cli, words)
    assert isinstance(result.exception, FedappError)
    begin, _, end = rule.partition(".*")
    assert str(result.exception).startswith(begin)
    assert str(result.exception).endswith(end)
    told = [line[6:] for line in result.output.splitlines()]
    assert method != "pax" or told == (["reading the settings"] if "=" in pair else [])
    assert not (tmp_path / "run").exists()
