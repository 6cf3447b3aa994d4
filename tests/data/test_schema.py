"""Schemas: what they say of a table, and the rules that they keep."""

import numpy as np
import pytest

from fedapp.data.describe import describe, schema_text
from fedapp.data.read import load_table
from fedapp.data.schema import Reader, Roles, read_schema
from fedapp.errors import ConfigError, DataError
from fedapp.site.settings import SiteConfig, site_config, table_settings
from fedapp.site.table import read_table

NAN = np.nan


def config_of(folder, schema, rows="", **settings):
    """A site with a schema for its rows.csv."""
    (folder / "rows.toml").write_text(schema)
    if rows:
        (folder / "rows.csv").write_text(rows)
    given = {"data": str(folder / "rows.csv"), "schema": str(folder / "rows.toml"), **settings}
    return SiteConfig("bank", **table_settings(given))


COLUMN = "[columns.a]\n"


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("separator = ", "schema '.*rows.toml' must be TOML"),
        ("seperator = 'tab'", "/rows.toml': seperator is not a field of a schema"),
        ("separator = 'dash'", "/rows.toml': separator must be one of '', 'comma', .* got 'dash'"),
        ("header = 'no'", "/rows.toml': header must be true or false, got 'no'"),
        ("encoding = 'latin-99'", "/rows.toml': encoding must be one that Python knows"),
        ("names = ['a', 'a']", "/rows.toml': names must be distinct"),
        ("skip-lines = -1", "/rows.toml': skip-lines must be >= 0, got -1"),
        (COLUMN + "type = 'text'", r"columns.a.type must be one of .*, got 'text'"),
        (COLUMN + "type = 'ordinal'", "columns.a.order must name the values from the lowest"),
        (
            COLUMN + "type = 'number'\ncategories = ['x']",
            'columns.a.categories needs type = "category", got "number"',
        ),
        (
            COLUMN + "type = 'category'\ncategories = ['x', 'x']",
            "columns.a.categories must list every name once",
        ),
        (COLUMN + "name = 'b'\n[columns.b]", "columns must have distinct names, got 'b' twice"),
        # Rules by which rows that share an id become one
        (COLUMN + "aggregate = 'median'", r"columns\.a\.aggregate must be one of .*, got 'medi"),
        (COLUMN + "aggregate = 'last'", 'order-by must come with aggregate = "last", columns'),
        ("order-by = 't'\n" + COLUMN + "aggregate = 'sum'", "order-by must come .*, no column has"),
        (COLUMN + "type = 'drop'\naggregate = 'sum'", r"columns\.a\.aggregate must be omitted"),
    ],
)
def test_a_malformed_schema_is_refused(tmp_path, schema, message):
    with pytest.raises(ConfigError, match=message):
        config_of(tmp_path, schema)


def test_a_schema_that_is_not_there_and_columns_that_are_not_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"schema '.*no\.toml' must be a file that can be read"):
        read_schema(tmp_path / "no.toml")
    config = config_of(tmp_path, "[columns.amuont]\ntype = 'number'", "amount,b\n1,2\n")
    with pytest.raises(DataError, match=r"columns of the schema .* got 'amuont' .*mean amount\?"):
        read_table(config)


@pytest.mark.parametrize(
    ("type", "last", "message"),
    [
        ("number", "9", "1 of 3 values of 'b' is not a number, first 'x' in line 3"),
        ("boolean", "no", "2 of 3 values of 'b' are not booleans, first '7' in line 2"),
        ("date", "no", "3 of 3 values of 'b' are not dates, first '7' in line 2"),
    ],
)
def test_values_of_another_type_than_declared_are_refused(tmp_path, type, last, message):
    config = config_of(tmp_path, f"[columns.b]\ntype = '{type}'", f"a,b\n1,7\n2,x\n3,{last}\n")
    with pytest.raises(DataError, match=message):
        read_table(config)


def test_a_schema_says_what_columns_are(tmp_path):
    config = config_of(
        tmp_path,
        """
        decimal = ","
        [columns.amt]
        name = "amount"
        missing = [-9]
        [columns.grade]
        type = "ordinal"
        order = ["low", "high"]
        [columns.town]
        type = "category"
        categories = ["Rome", "Oslo"]
        codes = {1 = "Oslo", 2 = "Rome", 3 = "Bonn"}
        [columns.paid]
        missing = ["none"]
        [columns.free]
        type = "drop"
        """,
        "amt;grade;town;paid;day;free\n"
        "1,5;low;1;Y;2024-01-01;u\n-9;high;2;N;1970-01-02 12:00;v\n2;mid;3;;;w\n",
        **{"drop-columns": "paid"},
    )
    table = read_table(config)
    assert table.columns == ("amount", "grade", "town", "day")
    expected = [[1.5, 0, 1, 19723], [NAN, 1, 0, 1.5], [2, NAN, NAN, NAN]]
    assert np.array_equal(table.values, expected, equal_nan=True)
    assert table.categories == (None, None, ("Rome", "Oslo"), None)
    assert table.given == {"town"}
    told = [note.text(shares_names=True) for note in table.notes]
    assert any("'town' has 1 values that are none of its categories" in note for note in told)
    assert any("'grade' has 1 values that are none" in note for note in told)


def test_a_schema_that_was_written_reads_the_table_alike(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("i,c,d,b\n1,x,2024-05-01,yes\n2,y,2024-05-02,no\n3,x,,\n")
    described = describe(str(path), Roles(), Reader())
    plain, declared = load_table(path), read_table(config_of(tmp_path, schema_text(described)))
    assert np.array_equal(plain.values, declared.values, equal_nan=True)
    assert plain.categories == declared.categories
    types = [column.type for column in described.columns]
    assert types == ["number", "category", "date", "boolean"]


def test_a_node_config_names_a_schema_of_its_own(tmp_path):
    config_of(tmp_path, "names = ['a', 'y']\nlabel = 'y'\n", "1,u\n2,v\n")
    node = {"data": str(tmp_path / "rows.csv"), "schema": str(tmp_path / "rows.toml")}
    table = read_table(site_config({"name": "bank", **node}, {"schema": "not-read.toml"}))
    assert table.columns == ("a",)
    assert table.labels.tolist() == ["u", "v"]
