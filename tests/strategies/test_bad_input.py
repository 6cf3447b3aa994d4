"""What a run refuses, and in which words: site, field and rule."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context
from typer.testing import CliRunner

from fedapp.commands import cli
from fedapp.errors import ConfigError, DataError, FedappError, PartyError
from fedapp.runs.local import run_local
from fedapp.settings import Settings
from fedapp.trees.model import load_model

WriteTable = Callable[..., Path]
MakeSettings = Callable[..., Settings]
MakeSites = Callable[..., list[Context]]
Refuse = Callable[..., None]


@pytest.fixture
def refuse(settings: MakeSettings) -> Refuse:
    """Holds that a run is refused with this error, and leaves no model but the reason."""

    def check(
        error: type[FedappError],
        match: str,
        contexts: Iterable[Context] | None = None,
        **overrides: Any,
    ) -> None:
        run = settings(num_boost_round=1, **overrides)
        with pytest.raises(error, match=match) as caught:
            run_local(run, contexts)
        folder = Path(run.run_dir)
        assert not (folder / "model.json").exists()
        assert not (folder / "summary.json").exists()
        failure = json.loads((folder / "failure.json").read_text())
        assert failure == {"error": error.__name__, "message": str(caught.value)}

    return check


@pytest.fixture
def refuse_site(refuse: Refuse, write_table: WriteTable, sites: MakeSites) -> Refuse:
    """Holds that a run of a sound bank and a shop with this table is refused."""

    def check(
        match: str,
        node: dict[str, str] | None = None,
        table: dict[str, Any] | None = None,
        error: type[FedappError] = PartyError,
        **overrides: Any,
    ) -> None:
        bank = {"name": "bank", "data": write_table("bank", seed=1)}
        shop = {"name": "shop", "data": write_table("shop", **table or {})}
        refuse(error, match, sites(bank, {**shop, **(node or {})}), parties=2, **overrides)

    return check


def test_two_sound_tables_train(
    settings: MakeSettings, write_table: WriteTable, sites: MakeSites
) -> None:
    nodes = [{"name": name, "data": write_table(name)} for name in ("bank", "shop")]
    folder = run_local(settings(parties=2), sites(*nodes))
    assert len(load_model(folder.path / "model.json").trees) == 2


# What a site with this table and this node config says. Values and lines stay at the site.
MORE = "the site's own log says more"
AT_SHOP = r"shop \(step 1\): "
NO_FILE = "data must be a built-in name, a registry name or an existing file, got 'none.csv'"
OF_TABLES: dict[str, tuple[dict[str, Any], dict[str, str], str]] = {
    "missing file, without its path": ({}, {"data": "/secret/place/none.csv"}, NO_FILE),
    "no rows": ({"n_rows": 0}, {}, "table must have at least one row, got 0"),
    "one row": ({"n_rows": 1}, {}, "table must have at least 2 training rows, got 1"),
    "no features": ({"a": None, "b": None}, {}, "table must have a feature column, got only 'y'"),
    **{
        f"a feature of {value}": (
            {"a": [value, *range(39)]},
            {},
            f"feature columns must be finite as float32, got 1 in 'a' infinite; {MORE}",
        )
        for value in ("inf", "-inf", "1e39")
    },
    "mixed types": (
        {"b": ["x", *range(39)]},
        {},
        "feature columns must be of one type each, got numbers and other text in 'b': .*",
    ),
    "no label column": (
        {},
        {"label": "z"},
        "label column 'z' must be in the table, got columns 'a', 'b', 'y'",
    ),
    "no label named": (
        {},
        {"label": ""},
        'label must name the label column, as in label="y"; got none',
    ),
    "a missing label": (
        {"y": ["", *[0, 1] * 19, 1]},
        {},
        "label column 'y' must have no missing values, got 1 of 40 rows; missing-label=drop drops "
        f"these rows; {MORE}",
    ),
    "three classes": (
        {"y": [0, 1, 2, 0] * 10},
        {},
        "label must have at most 2 different values for binary:logistic, got 3; set objective=.*",
    ),
    **{
        f"a weight of '{weight}'": (
            {"w": [weight, *[1] * 39]},
            {"weight": "w"},
            "weight column 'w' must be finite and >= 0 in every row, got 1 of 40 rows; " + MORE,
        )
        for weight in ("-1", "inf", "")
    },
    "no weight column": (
        {},
        {"weight": "w"},
        "weight column 'w' must be in the table, got columns 'a', 'b', 'y'",
    ),
}


@pytest.mark.parametrize("given", OF_TABLES)
def test_a_table_that_breaks_a_rule_is_refused(refuse_site: Refuse, given: str) -> None:
    table, node, rule = OF_TABLES[given]
    refuse_site(f"^{AT_SHOP}{rule}$", node=node, table=table)


@pytest.mark.parametrize(
    ("labels", "rule"),
    [
        (["inf", *[0, 1] * 19, 1], f"label column 'y' must be finite, got 1 of 40 rows; {MORE}"),
        (["1e39", *range(39)], "label must be finite as float32"),
        (["no", "yes"] * 20, f"label must be numbers for reg:squarederror, got text; {MORE}"),
    ],
)
def test_a_label_that_is_no_number_is_refused_for_regression(
    refuse_site: Refuse, labels: list[Any], rule: str
) -> None:
    refuse_site(f"^{AT_SHOP}{rule}$", table={"y": labels}, objective="reg:squarederror")


TWO = "label must have 2 values for binary:logistic, the parties have"


@pytest.mark.parametrize(
    ("table", "node", "rule"),
    [
        ({"b": None}, {}, "shop: columns must be those of bank, got 'b' is missing$"),
        (
            {"c": range(40)},
            {},
            "shop: columns must be those of bank, got 'c', which bank does not have$",
        ),
        ({"y": [1, 2] * 20}, {}, f"{TWO} 3: 0, 1, 2; set objective="),
        ({"y": ["no", "yes"] * 20}, {}, f"{TWO} 4: 0, 1, no, yes"),
        ({}, {"name": "bank"}, "bank: name must be unique in the federation, two parties have it$"),
    ],
)
def test_tables_that_do_not_fit_together_are_refused(
    refuse_site: Refuse, table: dict[str, Any], node: dict[str, str], rule: str
) -> None:
    refuse_site(f"^{rule}", node=node, table=table, error=DataError)


def test_an_empty_file_is_refused(refuse_site: Refuse, tmp_path: Path) -> None:
    path = tmp_path / "empty.csv"
    path.touch()
    rule = "data file 'empty.csv' must be a well-formed csv file, got an empty file"
    refuse_site(f"^{AT_SHOP}{rule}$", node={"data": str(path)})


@pytest.mark.parametrize(
    ("objective", "found"),
    [
        ("binary:logistic", ", got only '1'$"),
        ("multi:softprob", ", got only '1'$"),
        ("reg:squarederror", "$"),
    ],
)
def test_a_label_that_is_the_same_everywhere_is_refused(
    refuse: Refuse, write_table: WriteTable, sites: MakeSites, objective: str, found: str
) -> None:
    nodes = [{"name": name, "data": write_table(name, y=[1] * 40)} for name in ("bank", "shop")]
    rule = f"^label must not be the same in every row of every party{found}"
    refuse(DataError, rule, sites(*nodes), parties=2, objective=objective)


def test_a_label_that_is_the_same_at_one_party_trains(
    settings: MakeSettings, write_table: WriteTable, sites: MakeSites
) -> None:
    bank = {"name": "bank", "data": write_table("bank")}
    shop = {"name": "shop", "data": write_table("shop", y=[1] * 40)}
    folder = run_local(settings(parties=2), sites(bank, shop))
    assert load_model(folder.path / "model.json").classes == ("0", "1")


def test_weights_that_are_all_zero_at_all_parties_are_refused(
    refuse: Refuse, write_table: WriteTable, sites: MakeSites
) -> None:
    nodes = [
        {"name": name, "data": write_table(name, w=[0] * 40), "weight": "w"}
        for name in ("bank", "shop")
    ]
    refuse(DataError, r"^weight must be > 0 in some row of some party", sites(*nodes), parties=2)


def test_weights_that_are_all_zero_at_one_party_leave_the_model_to_the_others(
    settings: MakeSettings, write_table: WriteTable, sites: MakeSites
) -> None:
    def base_score(label: list[int], weight: int) -> np.float32:
        bank = {"name": "bank", "data": write_table("bank")}
        shop = write_table("shop", y=label, w=[weight] * 40)
        nodes = sites(bank, {"name": "shop", "data": shop, "weight": "w"})
        return load_model(run_local(settings(parties=2), nodes).path / "model.json").base_score

    ones, zeros = [1] * 40, [0] * 40
    assert base_score(ones, 0) == base_score(zeros, 0)
    assert base_score(ones, 1) > base_score(zeros, 1)


# Names and numbers of parties


@pytest.mark.parametrize("name", ["../x", "", ".", "a/b", "a b", "x" * 65, "-x"])
def test_a_name_that_is_no_folder_is_refused(
    refuse_site: Refuse, name: str, tmp_path: Path
) -> None:
    rule = r"name in the node config must be letters, digits, '\.', '_' or '-', got"
    refuse_site(rf"{rule} '{name}'$", node={"name": name})
    assert [path.name for path in (tmp_path / "home" / "sites").iterdir()] == ["bank"]


FIRST = r"party-1 \(step 1\): "
PARTIES = "parties must be"


@pytest.mark.parametrize(
    ("nodes", "given", "error", "rule"),
    [
        (
            0,
            {"data": "none.csv"},
            PartyError,
            f"{FIRST}data must be .*, got 'none.csv'",
        ),
        (
            0,
            {"data": "brest-cancer"},
            PartyError,
            ".*got 'brest-cancer'; close matches: .*breast-",
        ),
        (
            0,
            {"partition": "alphabetical"},
            PartyError,
            f"{FIRST}partition must be one of iid, .*, got 'alphabetical'$",
        ),
        (
            1,
            {"parties": 2, "start_deadline": 0.1},
            ConfigError,
            rf"{PARTIES} 2, got 1 within 0.1 s \(start-deadline\)$",
        ),
        (
            2,
            {"parties": 1},
            ConfigError,
            f"{PARTIES} the number of nodes, 2, or 0, which takes all, got 1$",
        ),
    ],
)
def test_parties_that_cannot_be_are_refused(
    refuse: Refuse,
    write_table: WriteTable,
    sites: MakeSites,
    nodes: int,
    given: dict[str, Any],
    error: type[FedappError],
    rule: str,
) -> None:
    names = ("bank", "shop")[:nodes]
    contexts = sites(*({"name": name, "data": write_table(name)} for name in names))
    refuse(error, f"^{rule}", contexts if nodes else None, **given)


def test_more_parties_than_rows_are_refused(refuse: Refuse, write_table: WriteTable) -> None:
    rule = rf"^{FIRST}number of parties must be in \[1, \d+\] \(rows\), got 9$"
    refuse(PartyError, rule, data=str(write_table(n_rows=5)), label="y", parties=9)


def test_a_site_that_names_no_table_is_refused(refuse: Refuse, sites: MakeSites) -> None:
    rule = r"^shop \(step 0\): data in the node config must name a table, as in data=\"rows.csv\"$"
    refuse(PartyError, rule, sites({"name": "shop"}), parties=1)


# Settings


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({"strategy": "paxx"}, r"strategy must be one of .*pax.*, got 'paxx'; did you mean pax\?$"),
        ({"pax__bins": "half"}, "pax.bins must be one of 'auto', 'share' or 'equal', got 'half'"),
    ],
)
def test_a_setting_is_checked_before_the_run_begins(
    settings: MakeSettings, given: dict[str, Any], rule: str
) -> None:
    run = settings(**given)
    with pytest.raises(ConfigError, match=f"^{rule}"):
        run_local(run)
    assert not Path(run.run_dir).exists()


def test_a_way_of_predicting_is_no_method_to_train_with() -> None:
    error = CliRunner().invoke(cli, ["run", "one-round"]).exception
    rule = "must be one that trains (fedapp predict --inference one-round predicts)"
    assert str(error) == f"strategy {rule}, got 'one-round'"


def test_a_folder_that_holds_a_run_is_not_written_to(settings: MakeSettings) -> None:
    run = settings(num_boost_round=1)
    folder = run_local(run).path
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ConfigError, match=r"^run-dir must be a new folder, got .* holds a run$"):
        run_local(run)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_the_command_shows_nothing_of_another_run_in_the_folder(
    settings: MakeSettings,
) -> None:
    run_dir = str(run_local(settings(num_boost_round=1)).path)
    command = ["run", "pax", "--engine", "local", "-c", f"run-dir={run_dir}"]
    result = CliRunner().invoke(cli, command)
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception) == f"run-dir must be a new folder, got {run_dir} which holds a run"
    assert "round" not in result.output


def test_a_prediction_by_a_run_that_has_not_finished_is_refused(tmp_path: Path) -> None:
    given = ["--data", "new.csv", "--output", "scores.csv"]
    error = CliRunner().invoke(cli, ["predict", str(tmp_path), *given]).exception
    assert isinstance(error, ConfigError)
    assert str(error).startswith("model must be a file of a run that has finished; failure.json ")


def test_an_error_says_nothing_of_where_a_site_keeps_its_table(
    settings: MakeSettings, write_table: WriteTable, sites: MakeSites, tmp_path: Path
) -> None:
    run = settings(parties=1)
    with pytest.raises(PartyError, match="label column") as caught:
        run_local(run, sites({"name": "shop", "data": write_table(), "label": "z"}))
    assert str(tmp_path) not in str(caught.value)


# The command line


def fedapp(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "fedapp"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)


def test_the_command_ends_with_one_line_and_status_1(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    given = ("-c", "data=none.csv", "-c", f"run-dir={run_dir}")
    done = fedapp("run", "pax", "--engine", "local", *given)
    rule = "data must be a built-in name, a registry name or an existing file, got 'none.csv'"
    assert done.returncode == 1
    assert done.stderr.splitlines() == [f"error: {rule}"]
    assert not re.search("round|Traceback", done.stdout)
    assert not (run_dir / "model.json").exists()


def test_an_error_of_the_system_is_said_in_words(tmp_path: Path) -> None:
    (tmp_path / "folder.toml").mkdir()
    done = fedapp("site", "check", "--config", str(tmp_path / "folder.toml"))
    told = f"'{tmp_path / 'folder.toml'}' must be a path that can be used as asked, got: is a direc"
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {told}")


@pytest.mark.parametrize(
    ("pair", "rule"),
    [
        ("eta=-1", "eta must be > 0.0 or 'auto', got -1"),
        ("max-bin=1", "max-bin must be >= 2, got 1"),
        ("etta=1", "etta is not a setting; did you mean eta?"),
        ("eta", "a setting must be written as key=value, got eta"),
    ],
)
def test_a_bad_setting_ends_the_command(tmp_path: Path, pair: str, rule: str) -> None:
    words = ["run", "pax", "--engine", "local", "-c", pair, "-c", f"run-dir={tmp_path / 'run'}"]
    result = CliRunner().invoke(cli, words)
    assert isinstance(result.exception, FedappError)
    assert str(result.exception) == rule
    told = [line[6:] for line in result.output.splitlines()]
    assert told == (["reading the settings"] if "=" in pair else [])
    assert not (tmp_path / "run").exists()
