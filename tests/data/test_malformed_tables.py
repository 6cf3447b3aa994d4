"""Tables and schemas as people have them that cannot be trained on: each with its message."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedapp.data.describe import describe, schema_text
from fedapp.data.partition import split_rows
from fedapp.data.read import load_table
from fedapp.data.schema import Reader, Roles, read_schema
from fedapp.errors import ConfigError, DataError
from fedapp.runs.local import run_local
from fedapp.settings import Settings
from fedapp.site.settings import SiteConfig, site_config, table_settings
from fedapp.site.table import read_table
from strategies.horizontal import classes_without_rows
from tests.transcript import summary_of

NAN = np.nan
ROWS = "".join(f"{row},{row % 3}\n" for row in range(30))
NAMES = "".join(f"{row},person {row}\n" for row in range(30))
EXCEL = b"PK\x03\x04\x14\0\x06\0" + bytes(200)
OLD_EXCEL = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(200)


def config_of(folder: Path, schema: str, **settings: object) -> SiteConfig:
    """A site with a schema for its rows.csv."""
    (folder / "rows.toml").write_text(schema)
    given = {"data": str(folder / "rows.csv"), "schema": str(folder / "rows.toml"), **settings}
    return SiteConfig("bank", **table_settings(given))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(
            "a,b\n1,2\n2,x\n3,4\n",
            r"of one type each: 1 of 3 values of 'b' is not a number, first 'x' in line 3: .* "
            r'missing = \["x"\], or declare type = "category"',
            id="mixed types",
        ),
        pytest.param(
            "a,day\n1,2024-01-31\n2,2024-02-30\n3,2024-03-01\n",
            "1 of 3 values of 'day' is not a date, first '2024-02-30' in line 3",
            id="a date that is none",
        ),
        pytest.param(
            "a,day\n1,31.1.2024\n2,1.2.2024\n",
            "'day' are not dates, first '31.1.2024' in line 2: write them as 2024-12-31",
            id="dates that are not ISO",
        ),
        pytest.param(
            "a,day\n1,12/31/2024\n2,2024-12-30\n",
            "1 of 2 values of 'day' is not a date, first '12/31/2024' in line 2: write them as",
            id="some dates that are not ISO",
        ),
        pytest.param(
            "a;b\n1;1,5\n2;2,25\n",
            "'b' are not numbers, .* a decimal comma, write 1.5 or set decimal=,$",
            id="decimal commas",
        ),
        pytest.param("a,a,b\n1,2,3\n", "must be distinct, got 'a' more than once", id="names"),
        pytest.param("a, a,b\n1,2,3\n", "must be distinct, got 'a' more", id="names with spaces"),
        pytest.param("a,b\n", "must have at least one row, got 0", id="header only"),
        pytest.param("", "got an empty file", id="nothing"),
        pytest.param("5,2\n3,4\n", "or set header=false$", id="no header"),
        pytest.param(
            "1,red,7\n2,red,8\n3,blue,9\n",
            "got a row of values there: put a line of 3 names .* or set header=false$",
            id="no header, with text",
        ),
        pytest.param(
            'a,b\n1,"x\n2,y\n3,z\n',
            "'rows.csv' must close every quote that it opens, got an odd number of quotes",
            id="a quote that is not closed",
        ),
        pytest.param(
            '"a,b\n1,x\n2,y\n', "must close every quote that it opens", id="such in the header"
        ),
        pytest.param(b"a,b\n1,2\n2,\0\n", "got NUL bytes in line 3: is it", id="NUL bytes"),
        pytest.param(EXCEL, "got an Excel or zip file: save the sheet as CSV$", id="Excel"),
        pytest.param(OLD_EXCEL, "got an Excel file: save the sheet as CSV$", id="old Excel"),
        pytest.param(b"PAR1abc", "got a Parquet file: name it .parquet$", id="Parquet"),
        pytest.param(b"\x1f\x8babc", "got a packed file: name it .gz$", id="gzip"),
        pytest.param(b"BZh9abc", "got a bzip2 file: unpack it$", id="bzip2"),
        pytest.param(
            "id,who\n" + NAMES,
            "categories, got 30 different texts in 30 rows in 'who': .* drop-columns=who, name it "
            'as the id, or let a schema say type = "category"',
            id="names of people",
        ),
        pytest.param(
            b"a,city\n1,K\xf6ln\n2,Rome\n", "must be UTF-8, .* as in encoding=latin-1$", id="latin"
        ),
        pytest.param("a,b\n1,2\n1,2,3\n", "have the 2 fields of its first line", id="ragged"),
        pytest.param("a,\n1,2\n", "must have names, got 'unnamed-2' without", id="nameless"),
    ],
)
def test_a_malformed_table_is_refused(tmp_path: Path, content: str | bytes, message: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(DataError, match=message) as caught:
        load_table(path)
    assert str(tmp_path) not in str(caught.value)


LATE = r"classes of the label in no training row, which the model cannot know: 'green'; correct"


@pytest.fixture
def late_class(tmp_path: Path) -> Path:
    """A table with a class whose only row is held back for the test; the label in two columns."""
    labels = ["red" if row % 3 else "blue" for row in range(60)]
    labels[int(split_rows(60, 0.2, 0.1, 42).test[0])] = "green"
    rows = [f"{row % 7},{row % 5},{label}" for row, label in enumerate(labels)]
    (tmp_path / "rows.csv").write_text("\n".join(["a,b,y", *rows]) + "\n")
    return tmp_path / "rows.csv"


@pytest.mark.parametrize("strategy", ["pax", "secureboost"])
def test_a_class_that_only_held_back_rows_have_is_told_with_the_way_out(
    settings: Callable[..., Settings],
    vertical: Callable[..., Settings],
    late_class: Path,
    caplog: pytest.LogCaptureFixture,
    strategy: str,
) -> None:
    make = settings if strategy == "pax" else vertical
    given = {"label": "y", "objective": "auto", "num_boost_round": 1, "max_depth": 2, "parties": 2}
    run_local(make(data=str(late_class), **given))
    assert re.search(LATE, caplog.text)
    caplog.clear()
    schema = late_class.parent / "rows.toml"
    schema.write_text('missing-label = "drop"\n[columns.y]\nmissing = ["green"]\n')
    folder = run_local(make(data=str(late_class), schema=str(schema), **given))
    assert not re.search(LATE, caplog.text)
    assert summary_of(folder)["objective"] == "binary:logistic"


def test_a_class_of_another_partys_training_rows_is_no_matter() -> None:
    def hello(classes: str, untrained: str) -> Any:
        return SimpleNamespace(classes=tuple(classes), untrained=tuple(untrained))

    parties = {"bank": hello("ab", "b"), "shop": hello("bc", "c"), "post": hello("ac", "c")}
    assert classes_without_rows(parties) == ("c",)


@pytest.mark.parametrize("begin", ["a,b\n1,", 'a,b\n1,"', ""])
def test_a_line_of_two_gigabytes_is_refused_at_its_first_block(tmp_path: Path, begin: str) -> None:
    path = tmp_path / "rows.csv"
    with path.open("wb") as file:
        file.write(begin.encode() + b"x" * (20 << 20))
        file.seek(2 << 30)  # a hole: no disk is used, but who reads on reads NULs
        file.write(b"\n")
    began = time.process_time()
    with pytest.raises(DataError, match=r"got a (line longer than 8 MiB|field of more than)"):
        load_table(path)
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ("separator = ", "schema 'rows.toml' must be TOML"),
        ("seperator = 'tab'", "'rows.toml': seperator is not a field of a schema"),
        ("separator = 'dash'", "'rows.toml': separator must be one of '', 'comma', .* got 'dash'"),
        ("header = 'no'", "'rows.toml': header must be true or false, got 'no'"),
        ("decimal = ';'", "'rows.toml': decimal must be one of '.' or ','"),
        ("encoding = 'latin-99'", "'rows.toml': encoding must be one that Python knows"),
        ("names = ['a', 'a']", "'rows.toml': names must be distinct"),
        ("names = 'a'", "'rows.toml': names must be a list, got 'a'"),
        ("skip-lines = -1", "'rows.toml': skip-lines must be >= 0, got -1"),
        ("[columns.a]\ntype = 'text'", r"columns.a.type must be one of .*, got 'text'"),
        ("[columns.a]\nkind = 'number'", "columns.a.kind is not a field of a schema"),
        ("[columns.a]\ntype = 'ordinal'", "columns.a.order must name the values from the lowest"),
        (
            "[columns.a]\ntype = 'number'\ncategories = ['x']",
            'columns.a.categories needs type = "category", got "number"',
        ),
        (
            "[columns.a]\ntype = 'category'\ncategories = ['x', 'x']",
            "columns.a.categories must list every name once",
        ),
        ("[columns.a]\nname = 'b'\n[columns.b]", "columns must have distinct names, got 'b' twice"),
    ],
)
def test_a_malformed_schema_is_refused(tmp_path: Path, schema: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(tmp_path, schema)


def test_a_schema_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"schema 'no\.toml' must be a file that can be read"):
        read_schema(tmp_path / "no.toml")


def test_a_column_of_the_schema_must_be_in_the_table(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("amount,b\n1,2\n")
    config = config_of(tmp_path, "[columns.amuont]\ntype = 'number'")
    with pytest.raises(DataError, match=r"columns of the schema .* got 'amuont' .*mean amount\?"):
        read_table(config)


@pytest.mark.parametrize(
    ("type", "message"),
    [
        ("number", "1 of 3 values of 'b' is not a number, first 'x' in line 3"),
        ("boolean", "2 of 3 values of 'b' are not booleans, first '7' in line 2"),
        ("date", "3 of 3 values of 'b' are not dates, first '7' in line 2"),
    ],
)
def test_values_of_another_type_than_declared_are_refused(
    tmp_path: Path, type: str, message: str
) -> None:
    (tmp_path / "rows.csv").write_text(
        "a,b\n1,7\n2,x\n3,no\n".replace("no", "9" if type == "number" else "no")
    )
    with pytest.raises(DataError, match=message):
        read_table(config_of(tmp_path, f"[columns.b]\ntype = '{type}'"))


def test_a_schema_says_what_columns_are(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(
        "amt;grade;town;paid;day;free\n"
        "1,5;low;1;Y;2024-01-01;u\n-9;high;2;N;1970-01-02 12:00;v\n2;mid;3;;;w\n"
    )
    config = config_of(
        tmp_path,
        """
        decimal = ","
        label = "paid"
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
        """.replace('label = "paid"\n', ""),
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


def test_a_schema_that_was_written_reads_the_table_alike(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("i,c,d,b\n1,x,2024-05-01,yes\n2,y,2024-05-02,no\n3,x,,\n")
    described = describe(str(path), Roles(), Reader())
    config = config_of(tmp_path, schema_text(described))
    plain, declared = load_table(path), read_table(config)
    assert np.array_equal(plain.values, declared.values, equal_nan=True)
    assert plain.categories == declared.categories
    assert [column.type for column in described.columns] == [
        "number",
        "category",
        "date",
        "boolean",
    ]


def test_a_node_config_names_a_schema_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("1,u\n2,v\n")
    (tmp_path / "rows.toml").write_text("names = ['a', 'y']\nlabel = 'y'\n")
    node = {
        "name": "bank",
        "data": str(tmp_path / "rows.csv"),
        "schema": str(tmp_path / "rows.toml"),
    }
    table = read_table(site_config(node, {"schema": "not-read.toml"}))
    assert table.columns == ("a",)
    assert table.labels is not None
    assert table.labels.tolist() == ["u", "v"]


@pytest.mark.parametrize(
    ("text", "said", "columns", "name"),
    [
        ("a|b\n1|red\n2|blue\n", "", ("a", "b"), "bars"),
        ("a\tb\n1\tred\n2\tblue\n", "", ("a", "b"), "tabs"),
        ("a;b\n1;red\n2;blue\n", "", ("a", "b"), "semicolons"),
        ("a   b\n1  red\n2 blue \n", " ", ("a", "b"), "blanks"),
        ("a,b\n1,red\n2,blue\n", "", ("a", "b"), ""),
        ("a;x,b\n1,red\n2,blue\n", "", ("a;x", "b"), "commas"),
        ("a;b,x;c\n1;red;0\n2;blue;0\n", "", ("a", "b,x", "c"), "semicolons"),
        ('"a;x";"b"\n1;red\n2;blue\n', "", ("a;x", "b"), "semicolons"),
        ("a,b;x\n1;red\n2;blue\n", ";", ("a,b", "x"), "semicolons"),
    ],
)
def test_the_first_line_or_a_schema_says_what_separates_fields(
    tmp_path: Path, text: str, said: str, columns: tuple[str, ...], name: str
) -> None:
    path = tmp_path / "rows.txt"
    path.write_text(text)
    table = load_table(path, reader=Reader(delimiter=said))
    assert table.columns == columns
    assert table.values[:, :2].tolist() == [[1, 1], [2, 0]]
    told = [note.text(True) for note in table.notes if "same value" not in note.rule]
    rule = f"data file is read as one with {name} between its fields"
    assert told == ([rule] if name else [])


def test_a_decimal_comma_separates_no_fields(tmp_path: Path) -> None:
    path = tmp_path / "rows.txt"
    path.write_text("1,5;2,5;3,25\n")
    table = load_table(path, reader=Reader(decimal=",", header=False))
    assert table.values.tolist() == [[1.5, 2.5, 3.25]]


def test_without_a_header_columns_are_numbered(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("1,red,0\n2,blue,1\n3,red,0\n")
    table = load_table(path, Roles(label="f3"), Reader(header=False))
    assert table.columns == ("f1", "f2")
    assert table.values.tolist() == [[1, 1], [2, 0], [3, 1]]


def test_another_encoding_and_a_byte_order_mark_are_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes("a,stra\xdfe\n1,K\xf6ln\n2,Rom\n".encode("latin-1"))
    table = load_table(path, reader=Reader(encoding="latin-1"))
    assert table.columns == ("a", "stra\xdfe")
    assert table.categories == (None, ("K\xf6ln", "Rom"))
    path.write_bytes("a,b\n1,2\n".encode("utf-8-sig"))
    assert load_table(path).columns == ("a", "b")


def test_spaces_are_removed_and_said(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("a, b ,c\n1, u,Y\n2,u ,n\n3, ?,\n")
    table = load_table(path)
    assert table.columns == ("a", "b", "c")
    assert table.categories == (None, ("u",), None)
    assert np.array_equal(table.values[:, 2], [1, 0, NAN], equal_nan=True)
    assert [note.text(True) for note in table.notes] == [
        "spaces around the names of columns are removed: 'b'",
        "feature column 'c' has yes or no, read as 1 or 0",
        "feature column 'b' has spaces around values, removed",
        "feature column 'b' has the same value in every row",
    ]


def test_a_dictionary_of_parquet_is_of_categories(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    columns = {"a": [1.0, 2.0, 3.0], "c": pa.array(["y", "x", None]).dictionary_encode()}
    pq.write_table(pa.table({**columns, "t": ["07", "08", "07"]}), path)
    table = load_table(path)
    assert table.categories == (None, ("x", "y"), ("07", "08"))
    assert np.array_equal(table.values[:, 1], [1, 0, NAN], equal_nan=True)
