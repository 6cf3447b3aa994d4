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
from fedapp.trees.model import load_model
from tests.conftest import MakeSettings, MakeSites, WriteTable

Refuse = Callable[..., None]
# Values and lines stay at the site.
MORE = r"the site's own log says more$"


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


# Tables


def test_a_missing_file_is_refused_by_name_without_its_path(refuse_site: Refuse) -> None:
    rule = r"data must be a built-in name, a registry name or an existing file, got 'none.csv'$"
    refuse_site(rf"^shop \(step 1\): {rule}", node={"data": "/secret/place/none.csv"})


def test_a_missing_file_of_a_simulated_run_is_refused(refuse: Refuse) -> None:
    refuse(PartyError, r"^party-1 \(step 1\): data must be .*, got 'none.csv'", data="none.csv")


def test_a_name_that_is_nearly_a_data_set_is_helped(refuse: Refuse) -> None:
    refuse(PartyError, r"got 'brest-cancer'; close matches: .*breast-cancer", data="brest-cancer")


def test_a_table_without_rows_is_refused(refuse_site: Refuse) -> None:
    refuse_site(r"^shop \(step 1\): table must have at least one row, got 0$", table={"n_rows": 0})


def test_an_empty_file_is_refused(refuse_site: Refuse, tmp_path: Path) -> None:
    path = tmp_path / "empty.csv"
    path.touch()
    rule = "data file 'empty.csv' must be a well-formed csv file, got an empty file"
    refuse_site(rf"^shop \(step 1\): {rule}$", node={"data": str(path)})


def test_a_table_with_one_row_is_refused(refuse_site: Refuse) -> None:
    refuse_site(
        r"^shop \(step 1\): table must have at least 2 training rows, got 1$", table={"n_rows": 1}
    )


def test_a_table_without_features_is_refused(refuse_site: Refuse) -> None:
    refuse_site(
        r"^shop \(step 1\): table must have a feature column, got only 'y'$",
        table={"a": None, "b": None},
    )


@pytest.mark.parametrize("value", ["inf", "-inf", "1e39"])
def test_an_infinite_feature_is_refused_by_its_column(refuse_site: Refuse, value: str) -> None:
    refuse_site(
        r"^shop \(step 1\): feature columns must be finite as float32, "
        rf"got 1 in 'a' infinite; {MORE}",
        table={"a": [value, *range(39)]},
    )


def test_a_feature_of_mixed_types_is_refused_by_its_column(refuse_site: Refuse) -> None:
    refuse_site(
        r"^shop \(step 1\): feature columns must be of one type each, "
        "got numbers and other text in 'b': ",
        table={"b": ["x", *range(39)]},
    )


# Columns of two parties


def test_a_column_that_one_party_lacks_is_named(refuse_site: Refuse) -> None:
    refuse_site(
        r"^shop: columns must be those of bank, got 'b' is missing$",
        table={"b": None},
        error=DataError,
    )


def test_a_column_that_one_party_has_alone_is_named(refuse_site: Refuse) -> None:
    refuse_site(
        r"^shop: columns must be those of bank, got 'c', which bank does not have$",
        table={"c": range(40)},
        error=DataError,
    )


# Labels


def test_a_label_column_that_is_absent_is_refused(refuse_site: Refuse) -> None:
    rule = "label column 'z' must be in the table, got columns 'a', 'b', 'y'"
    refuse_site(rf"^shop \(step 1\): {rule}$", node={"label": "z"})


def test_a_site_without_a_label_is_refused(refuse_site: Refuse) -> None:
    rule = 'label must name the label column, as in label="y"; got none'
    refuse_site(rf"^shop \(step 1\): {rule}$", node={"label": ""})


def test_a_missing_label_is_refused(refuse_site: Refuse) -> None:
    rule = (
        "label column 'y' must have no missing values, got 1 of 40 rows; missing-label=drop drops"
    )
    refuse_site(rf"^shop \(step 1\): {rule} these rows; {MORE}", table={"y": ["", *[0, 1] * 19, 1]})


def test_an_infinite_label_is_refused(refuse_site: Refuse) -> None:
    refuse_site(
        rf"^shop \(step 1\): label column 'y' must be finite, got 1 of 40 rows; {MORE}",
        table={"y": ["inf", *[0, 1] * 19, 1]},
        objective="reg:squarederror",
    )


def test_a_label_past_float32_is_refused(refuse_site: Refuse) -> None:
    refuse_site(
        r"^shop \(step 1\): label must be finite as float32$",
        table={"y": ["1e39", *range(39)]},
        objective="reg:squarederror",
    )


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
    refuse(
        DataError,
        f"^label must not be the same in every row of every party{found}",
        sites(*nodes),
        parties=2,
        objective=objective,
    )


def test_a_label_that_is_the_same_at_one_party_trains(
    settings: MakeSettings, write_table: WriteTable, sites: MakeSites
) -> None:
    bank = {"name": "bank", "data": write_table("bank")}
    shop = {"name": "shop", "data": write_table("shop", y=[1] * 40)}
    folder = run_local(settings(parties=2), sites(bank, shop))
    assert load_model(folder.path / "model.json").classes == ("0", "1")


def test_three_classes_at_a_party_are_refused_for_a_binary_objective(refuse_site: Refuse) -> None:
    rule = "label must have at most 2 different values for binary:logistic, got 3; set objective="
    refuse_site(rf"^shop \(step 1\): {rule}", table={"y": [0, 1, 2, 0] * 10})


def test_three_classes_of_two_parties_are_refused_for_a_binary_objective(
    refuse_site: Refuse,
) -> None:
    rule = (
        "label must have 2 values for binary:logistic, the parties have 3: 0, 1, 2; set objective="
    )
    refuse_site(f"^{rule}", table={"y": [1, 2] * 20}, error=DataError)


def test_a_text_label_is_refused_for_regression(refuse_site: Refuse) -> None:
    refuse_site(
        rf"^shop \(step 1\): label must be numbers for reg:squarederror, got text; {MORE}",
        table={"y": ["no", "yes"] * 20},
        objective="reg:squarederror",
    )


def test_text_labels_at_one_party_and_numbers_at_another_are_refused(refuse_site: Refuse) -> None:
    refuse_site(
        r"^label must have 2 values for binary:logistic, the parties have 4: 0, 1, no, yes",
        table={"y": ["no", "yes"] * 20},
        error=DataError,
    )


# Weights


@pytest.mark.parametrize("weight", ["-1", "inf", ""])
def test_a_weight_that_is_no_weight_is_refused(refuse_site: Refuse, weight: str) -> None:
    rule = "weight column 'w' must be finite and >= 0 in every row, got 1 of 40 rows"
    refuse_site(
        rf"^shop \(step 1\): {rule}; {MORE}",
        node={"weight": "w"},
        table={"w": [weight, *[1] * 39]},
    )


def test_a_weight_column_that_is_absent_is_refused(refuse_site: Refuse) -> None:
    refuse_site(
        r"^shop \(step 1\): weight column 'w' must be in the table, got columns 'a', 'b', 'y'$",
        node={"weight": "w"},
    )


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


def test_two_parties_of_one_name_are_refused(refuse_site: Refuse) -> None:
    refuse_site(
        "^bank: name must be unique in the federation, two parties have it$",
        node={"name": "bank"},
        error=DataError,
    )


@pytest.mark.parametrize("name", ["../x", "", ".", "a/b", "a b", "x" * 65, "-x"])
def test_a_name_that_is_no_folder_is_refused(refuse_site: Refuse, name: str) -> None:
    rule = r"name in the node config must be letters, digits, '\.', '_' or '-', got"
    refuse_site(rf"{rule} '{name}'$", node={"name": name})


def test_a_bad_name_makes_no_folder(refuse_site: Refuse, tmp_path: Path) -> None:
    refuse_site(r"got '\.\./x'$", node={"name": "../x"})
    assert [path.name for path in (tmp_path / "home" / "sites").iterdir()] == ["bank"]


def test_a_site_that_names_no_table_is_refused(refuse: Refuse, sites: MakeSites) -> None:
    refuse(
        PartyError,
        r"^shop \(step 0\): data in the node config must name a table, as in data=\"rows.csv\"$",
        sites({"name": "shop"}),
        parties=1,
    )


def test_too_few_nodes_are_refused_after_a_while(
    refuse: Refuse, write_table: WriteTable, sites: MakeSites
) -> None:
    refuse(
        ConfigError,
        r"^parties must be 2, got 1 within 0.1 s \(start-deadline\)$",
        sites({"name": "bank", "data": write_table()}),
        parties=2,
        start_deadline=0.1,
    )


def test_too_many_nodes_are_refused(
    refuse: Refuse, write_table: WriteTable, sites: MakeSites
) -> None:
    nodes = [{"name": name, "data": write_table(name)} for name in ("bank", "shop")]
    refuse(
        ConfigError,
        "^parties must be the number of nodes, 2, or 0, which takes all, got 1$",
        sites(*nodes),
        parties=1,
    )


def test_more_parties_than_rows_are_refused(refuse: Refuse, write_table: WriteTable) -> None:
    refuse(
        PartyError,
        r"^party-1 \(step 1\): number of parties must be in \[1, \d+\] \(rows\), got 9$",
        data=str(write_table(n_rows=5)),
        label="y",
        parties=9,
    )


def test_a_partition_that_is_no_rule_is_refused(refuse: Refuse) -> None:
    refuse(
        PartyError,
        r"^party-1 \(step 1\): partition must be one of iid, .*, got 'alphabetical'$",
        partition="alphabetical",
    )


# Settings


def test_an_unknown_strategy_is_refused(settings: MakeSettings) -> None:
    run = settings(strategy="paxx")
    with pytest.raises(
        ConfigError, match=r"^strategy must be one of .*pax.*, got 'paxx'; did you mean pax\?$"
    ):
        run_local(run)
    assert not Path(run.run_dir).exists()


def test_a_way_of_predicting_is_no_method_to_train_with() -> None:
    error = CliRunner().invoke(cli, ["run", "one-round"]).exception
    rule = "must be one that trains (fedapp predict --inference one-round predicts)"
    assert str(error) == f"strategy {rule}, got 'one-round'"


def test_a_setting_of_a_section_is_checked_before_the_run_begins(settings: MakeSettings) -> None:
    run = settings(pax__bins="half")
    with pytest.raises(
        ConfigError, match=r"^pax.bins must be one of 'auto', 'share' or 'equal', got 'half'"
    ):
        run_local(run)
    assert not Path(run.run_dir).exists()


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


def test_the_command_refuses_a_strategy_there_is_not(tmp_path: Path) -> None:
    words = ["run", "paxx", "--engine", "local", "-c", f"run-dir={tmp_path / 'run'}"]
    error = CliRunner().invoke(cli, words).exception
    assert isinstance(error, FedappError)
    assert str(error).startswith("strategy must be one of ")
    assert str(error).endswith(", got 'paxx'; did you mean pax?")
    assert not (tmp_path / "run").exists()
