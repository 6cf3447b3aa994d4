"""Tables are read and held to the rules of a run before it starts, by the run's own code."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedapp.commands import cli
from fedapp.errors import ConfigError, DataError, FedappError
from fedapp.home import home
from fedapp.runs.local import run_local
from fedapp.runs.tables import check_tables


def refused(settings, match):
    """Holds that the check refuses a table in the words of the run."""
    with pytest.raises(FedappError, match=match):
        run_local(settings)
    with pytest.raises((DataError, ConfigError), match=match):
        check_tables(settings)


@pytest.mark.parametrize("strategy", ["pax", "secureboost"])
@pytest.mark.parametrize(
    ("match", "columns", "given"),
    [
        ("1 of 40 values of 'c' .*first 'x' in line 2", {"c": ["x", *range(39)]}, {}),
        ("did you mean y", {}, {"label": "Y"}),
        ("drop-columns must be columns", {}, {"drop_columns": "z"}),
        ("label must not be the same in every", {"y": [1] * 40}, {}),
        ("weight must be > 0 in some", {"w": [0] * 40}, {"weight": "w"}),
    ],
)
def test_what_breaks_a_rule_is_refused_in_the_words_of_the_run(
    vertical, write_table, strategy, match, columns, given
):
    table = {"data": str(write_table(**columns)), "label": "y"}
    refused(vertical(strategy=strategy, **{**table, **given}), match)


def test_what_is_wrong_with_the_one_table_is_wrong_with_no_party(settings, write_table):
    given = {"data": str(write_table(y=["no", "yes", "n/a "] * 14, n_rows=42)), "label": "y"}
    with pytest.raises(DataError, match=r"^label must .* got 3, as 'n/a', 'no', "):
        check_tables(settings(**given))
    with pytest.raises(DataError, match=r"^label must .* got 42 of 42 that are none, as 'no'$"):
        check_tables(settings(**given, objective="reg:squarederror"))
    given = {"data": str(write_table(n_rows=4)), "label": "y", "parties": 3}
    refused(settings(**given), "^party-[123].* must have at least 2 training rows, got 1$")


@pytest.fixture
def two_files(vertical, write_table):
    """A run on a bank's file with the label and a shop's without, with these ids."""

    def make(bank, shop, **given):
        paths = [
            write_table("bank", i=bank, n_rows=len(bank)),
            write_table("shop", i=shop, n_rows=len(shop), y=None),
        ]
        data = ",".join(f"{path.stem}={path}" for path in paths)
        return vertical(**{"data": data, "label": "y", "id": "i", "align": "psi", **given})

    return make


@pytest.mark.parametrize(
    ("shop", "given", "match"),
    [
        ([*range(100, 140)], {}, "ids must have 2 rows in common at least, got 0"),
        ([0, *range(39)], {}, "shop.* got 2 rows of 40 that share one"),
        ([*range(40)], {"id": ""}, "id must name the column to match rows by"),
        ([*range(1, 41)], {"align": "ordered"}, "ids must be those of bank, in the same order"),
        ([*range(40)], {"align_most_rows": 39}, "align-most-rows must be >= .* 40 at bank"),
    ],
)
def test_ids_are_held_to_the_rules_of_alignment(two_files, shop, given, match):
    refused(two_files([*range(40)], shop, **given), match)


def test_labels_are_those_of_the_common_rows(two_files):
    settings = two_files([*range(40)], [*range(40)])
    bank, shop = (Path(entry.partition("=")[2]) for entry in settings.data.split(","))
    rows = zip(bank.read_text().splitlines(), shop.read_text().splitlines(), strict=True)
    of_one = [line for number, (own, line) in enumerate(rows) if not number or ",1," in own]
    shop.write_text("\n".join([*of_one, ""]))
    refused(settings, "label must not be the same in every training row")


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"label": "Y"}, "label column 'Y' must be in the table of a party.* did you mean y"),
        ({"drop_columns": "bb"}, "drop column 'bb' must be in the table of a party"),
        ({"columns": "random"}, "columns must be omitted where every party has a table of its"),
        ({"partition": "sizes:0.5,0.5"}, "partition must be omitted where every party has a"),
    ],
)
def test_settings_that_fit_no_file_of_a_party_are_refused(two_files, given, match):
    with pytest.raises(FedappError, match=match):
        check_tables(two_files([*range(40)], [*range(40)], **given))


def test_a_table_that_was_changed_is_read_again(settings, write_table):
    given = settings(data=str(write_table(n_rows=40)), label="y")
    check_tables(given)
    write_table(n_rows=50, y=["u"] * 50)
    with pytest.raises(DataError, match="label must not be the same"):
        check_tables(given)


@pytest.mark.parametrize("command", [["run", "pax"], ["compare", "pax", "bagging"]])
def test_a_command_refuses_a_table_before_flower_starts(write_table, tmp_path, own_folder, command):
    given = ["-c", f"data={write_table(c=['x', *range(39)])}", "-c", "label=y"]
    found = CliRunner().invoke(cli, [*command, "--engine", "simulation", *given])
    assert isinstance(found.exception, DataError)
    assert "1 of 40 values of 'c' is not a number, first 'x' in line 2" in str(found.exception)
    assert not (home() / "flower").exists()
    assert not (tmp_path / "runs").exists()


def test_a_column_may_be_called_by_a_number(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("1,2,3\n" + "".join(f"{n * n % 7},{n % 5},{n % 2}\n" for n in range(60)))
    given = ["-c", f"data={path}", "-c", "label=3", "-c", "drop-columns=2"]
    given += ["-c", "num-boost-round=1", "-c", f"run-dir={tmp_path / 'run'}"]
    found = CliRunner().invoke(cli, ["run", "pax", "--engine", "local", *given])
    assert found.exception is None
    assert (tmp_path / "run" / "model.json").exists()
