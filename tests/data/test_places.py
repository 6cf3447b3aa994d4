"""Where in a text an error is: line, column, value and how many; and what of it may be told."""

from __future__ import annotations

import gzip
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pytest

from fedapp.data.csv_errors import is_number
from fedapp.data.predictions import read_columns_of
from fedapp.data.read import load_table
from fedapp.data.schema import Reader, Roles
from fedapp.errors import WITHHELD, DataError

NOBODY = 65534
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_file(content: str | bytes, name: str = "rows.csv") -> Path:
        data = content.encode() if isinstance(content, str) else content
        if name.endswith(".gz"):
            data = gzip.compress(data)
        path = tmp_path / name
        path.write_bytes(data)
        return path

    return write_file


def error_of(path: Path, **roles: str) -> DataError:
    with pytest.raises(DataError) as caught:
        load_table(path, Roles(**roles))  # type: ignore[arg-type]
    return caught.value


def balances(*bad: tuple[int, str], n_rows: int = 2000) -> str:
    """Lines of a table with these fields in place of a balance."""
    fields = {line: f"{line}.5" for line in range(2, n_rows + 2)} | dict(bad)
    return "age,balance\n" + "".join(f"30,{field}\n" for field in fields.values())


@pytest.mark.parametrize("name", ["rows.csv", "rows.csv.gz"])
def test_values_that_are_no_numbers_are_counted_and_the_first_one_is_quoted(
    write: Write, name: str
) -> None:
    path = write(balances((17, "n/a "), (90, "n/a"), (2001, "-")), name)
    assert str(error_of(path)) == (
        "feature columns must be of one type each: 3 of 2,000 values of 'balance' are not numbers, "
        "first 'n/a ' in line 17: correct them, or leave the field empty where a value is missing; "
        'list it in a schema as missing = ["n/a"], or declare type = "category" there'
    )


def test_a_row_of_several_lines_is_at_its_first(write: Write) -> None:
    path = write('t,a\n"one\ntwo",1\n\n"three\r\nfour\nfive",2\n"six\nseven",x\n"eight",3\n')
    with pytest.raises(DataError, match=r"1 of 4 values of 'a' .*, first 'x' in line 8: correct"):
        load_table(path, Roles(drop=("t",)))


def test_many_columns_of_text_are_named_and_three_are_told_of(write: Write) -> None:
    told = str(error_of(write("a,b,c,d,e,f\n1,2,3,4,5,6\n" + "1,u,v,w,x,y\n" * 3)))
    assert "3 of 4 values of 'd' are not numbers" in told
    assert "; and in 2 more columns: 'e', 'f': list it in a schema as missing" in told
    assert told.endswith("drop-columns=b,c,d,e,f")


@pytest.mark.parametrize(
    ("value", "number"), [("1,5", "1.5"), ("-0,25", "-0.25"), (",5e2", ".5e2")]
)
@pytest.mark.parametrize("form", ["a,b\n1,2\n1,2\n1,{}\n", "a;b\n1;2\n1;2\n1;{}\n"])
def test_a_decimal_comma_is_recognised(write: Write, form: str, value: str, number: str) -> None:
    field = value if ";" in form else f'"{value}"'
    told = str(error_of(write(form.format(field))))
    found = f"1 of 3 values of 'b' is not a number, first '{value}' in line 4"
    assert told.endswith(f"{found}: it looks like a decimal comma, write {number} or set decimal=,")


@pytest.mark.parametrize("value", ["1.234,5", "1,234.5", "1.234.567"])
@pytest.mark.parametrize("decimal", [".", ","])
def test_marks_of_thousands_are_refused(write: Write, value: str, decimal: str) -> None:
    path = write(f"a;b\n1;2\n1;2\n1;{value}\n")
    found = f"1 of 3 values of 'b' is not a number, first '{value}' in line 4: remove the marks"
    with pytest.raises(DataError, match=re.escape(found)):
        load_table(path, reader=Reader(decimal=decimal))


def test_a_long_value_is_cut(write: Write) -> None:
    assert f"first '{'x' * 37}...' in line 2" in str(error_of(write(f"a,b\n{'x' * 50},1\n2,1\n")))


@pytest.mark.parametrize("name", ["rows.csv", "rows.csv.gz"])
def test_ragged_rows_are_counted_and_the_first_has_its_line(write: Write, name: str) -> None:
    path = write("a,b,c\n1,2,3\n1,2\n\n1,2,3,4\n1,2,3\n", name)
    assert str(error_of(path)) == (
        f"data file '{name}' must have the 3 fields of its first line in every row, "
        "got 2 in line 3 and other than 3 in 2 of 4 rows"
    )


def test_a_first_line_that_is_shorter_than_all_rows_is_doubted(write: Write) -> None:
    told = str(error_of(write("1,2,class\n" + "5,6,7,8\n" * 3)))
    assert told.endswith(
        "got 4 in line 2 and other than 3 in 3 of 3 rows: does the first line name every column?"
    )


def test_bytes_that_are_not_utf8_have_a_line_a_column_and_an_offset(write: Write) -> None:
    path = write(b"a,city\n1,Rome\n2,K\xf6ln\n")
    assert str(error_of(path)) == (
        "data file 'rows.csv' must be UTF-8, got byte 0xf6 in line 3, column 'city' "
        "(byte 17 of the text): save it as UTF-8, or name its encoding, as in encoding=latin-1"
    )
    assert "byte 0xf6 in line 3, column 'city'" in str(error_of(path, label="city"))


def test_the_offset_of_a_byte_is_right_past_the_first_chunk_of_reading(write: Write) -> None:
    before = b"a,b\n" + "\N{EURO SIGN},1\n".encode() * 400_000  # a letter on the chunks' edge
    told = str(error_of(write(before + b"\xff,2\n"), label="a"))
    assert f"byte 0xff in line 400,002, column 'a' (byte {len(before):,} of" in told


def test_utf16_is_recognised(write: Write) -> None:
    told = str(error_of(write("a,b\n1,2\n".encode("utf-16"))))
    assert told.endswith("it looks like UTF-16: save it as UTF-8, or set encoding=utf-16")


def test_a_column_of_other_bytes_that_is_dropped_is_no_error(write: Write) -> None:
    table = load_table(write(b"a,city\n1,K\xf6ln\n"), Roles(drop=("city",)))
    assert table.columns == ("a",)


@pytest.fixture
def as_nobody() -> Iterator[Path]:
    """A folder for all, seen as a user without rights where the tests are root's."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        path.chmod(0o755)
        (path / "rows.csv").write_text("a,b\n1,2\n")
        (path / "rows.csv").chmod(0)
        is_root = os.geteuid() == 0
        if is_root:
            os.seteuid(NOBODY)
        yield path / "rows.csv"
        if is_root:
            os.seteuid(0)


def test_a_file_that_may_not_be_read_is_told_as_such(as_nobody: Path) -> None:
    rule = "data file 'rows.csv' must be readable for the user that runs this"
    assert str(error_of(as_nobody)) == f"{rule}, got permission denied"


def test_a_table_to_predict_may_have_another_separator(write: Write) -> None:
    found = read_columns_of(str(write("b;a;i\n1;2;x\n")), ["a", "b"], Roles(id_column="i"))
    assert found.values.tolist() == [[2, 1]]
    assert found.ids is not None
    assert found.ids.tolist() == ["x"]


@pytest.mark.parametrize(
    "text", ["5.1,3.5,0\n4.9,3,1\n", "1,0,0.5,1,g\n1,0,0.7,0,b\n", "2019,2021\n1,2\n"]
)
def test_a_first_line_of_numbers_is_told_as_no_names(write: Write, text: str) -> None:
    n = text.index("\n")
    rule = r"^data file 'rows.csv' must name its columns in the first line, got a row of numbers"
    with pytest.raises(DataError, match=rf"{rule} there: put a line of {text[:n].count(',') + 1}"):
        load_table(write(text))


@pytest.mark.parametrize("header", ["0,1,2", "1,2,3", "1,2,class", "x,2020,2021"])
def test_names_may_be_numbers_that_count_the_columns(write: Write, header: str) -> None:
    table = load_table(write(f"{header}\n4,5,6\n7,8,9\n"))
    assert table.columns == tuple(header.split(","))


# Of text, whole, decimal; a blank around a number is no matter, one around NA is.
FIELDS = "+1 1. -.5 1e5 1E+5 nan NaN inf Infinity -inf 1_000 1d5 1f --1 yes 1e . 0x1p 12e-3 ?"


@pytest.mark.parametrize("field", [*FIELDS.split(), " 1", "1 ", "\t1", "NA ", " NA", "N/A", "1,5"])
def test_a_number_is_what_arrow_takes_for_one(tmp_path: Path, field: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(f'a,b\n1.5,0\n"{field}",0\n')
    missing = pa.csv.ConvertOptions(null_values=["NA", "N/A", "nan", "NaN", "?"])
    found = pa.csv.read_csv(path, convert_options=missing)["a"].type
    assert is_number(field) == pa.types.is_floating(found)


@pytest.mark.parametrize(
    ("wrong", "near"), [("defualt", "default"), ("Default", "default"), ("ballance", "balance")]
)
@pytest.mark.parametrize("role", ["label", "id_column", "weight"])
def test_the_name_of_a_column_spelled_like_one_is_suggested(
    write: Write, role: str, wrong: str, near: str
) -> None:
    error = error_of(write("age,balance,default\n1,2,0\n"), **{role: wrong})
    assert str(error).endswith(f"'balance', 'default'; did you mean {near}?")
    assert error.outside.endswith(f"column {WITHHELD} must be in the table, got columns {WITHHELD}")


def test_near_names_of_dropped_columns_are_suggested(write: Write) -> None:
    with pytest.raises(DataError, match=r"got 'blance', 'xyz'; did you mean balance\?$"):
        load_table(write("age,balance\n1,2\n"), Roles(drop=("blance", "xyz")))


def test_of_many_columns_twenty_are_listed(write: Write) -> None:
    names = [f"c{place:03d}" for place in range(100)]
    told = str(error_of(write(",".join(names) + "\n" + ",".join(["1"] * 100)), label="y"))
    assert told.endswith("'c018', 'c019' and 80 more")


def test_values_and_lines_are_left_out_for_others(write: Write) -> None:
    error = error_of(write(balances((17, "secret"))))
    named, withheld = error.for_others(shares_names=True), error.for_others(shares_names=False)
    for told in (named, withheld):
        assert "secret" not in str(told)
        assert "17" not in str(told)
        assert str(told).endswith("; the site's own log says more")
    assert "got numbers and other text in 'balance'" in str(named)
    assert f"got numbers and other text in {WITHHELD}" in str(withheld)


def test_an_error_without_values_is_told_to_others_as_it_is() -> None:
    assert str(DataError("table must be one").for_others(True)) == "table must be one"


def test_values_are_the_same_with_any_separator(write: Write) -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(50, 3)).round(4).astype(str)
    texts = {mark: "\n".join(map(mark.join, [["a", "b", "c"], *rows])) for mark in (",", ";")}
    comma, semicolon = (load_table(write(text, f"{ord(m)}.csv")) for m, text in texts.items())
    assert np.array_equal(comma.values, semicolon.values)
