"""Tables as people have them: what is read of a text, or the error that says what to do."""

import gzip
import os
import re
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from fedapp.data.columns import Columns
from fedapp.data.datasets import as_arrow
from fedapp.data.labels import class_names
from fedapp.data.read import load_table, table_of_frame
from fedapp.data.schema import PLAIN, Declared, Reader, Roles, read_schema
from fedapp.errors import WITHHELD, DataError, without_folders

NAN, NOBODY = np.nan, 65534
COMMA = Reader(decimal=",")
NO_HEADER = Reader(header=False)
LATIN = Reader(encoding="latin-1")
IN_ALL, IN_ONE = Reader(missing=("-9", "none")), Reader(declared=(Declared("a", missing=("-9",)),))
NAMES = "".join(f"{row},person {row}\n" for row in range(30))
SEMICOLONS = "data file is read as one with semicolons between its fields"


@pytest.fixture
def write(tmp_path):
    """Writes a text, bytes, or columns as a Parquet file."""

    def write_file(content, name="rows.csv"):
        path = tmp_path / name
        if isinstance(content, dict):
            path = path.with_suffix(".parquet")
            pq.write_table(pa.table(content), path)
            return path
        content = content.encode() if isinstance(content, str) else content
        path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        return path

    return write_file


def error_of(path, reader=PLAIN, **roles):
    with pytest.raises(DataError) as caught:
        load_table(path, Roles(**roles), reader)
    assert str(path.parent) not in without_folders(str(caught.value))
    return caught.value


# What is read of a text: its roles and options; labels (y), columns and values, categories, notes.

MOST, DAYS = 2**63 - 1, pa.array(["1970-01-02", "1900-01-01"]).cast(pa.date32())
OTHERWISE = (
    "feature column 'a' has 1 values that equal a number declared as missing but are written "
    "otherwise, read as missing"
)
TRIMMED = "feature column 'a' has spaces around values, removed"
RED, MARKED = [[1, 1], [2, 0]], {"note": SEMICOLONS}
ALL_ROLES = {"label": "y", "id_column": "id", "weight": "w", "partition": "g", "drop": ("t",)}
READ = {
    **{
        f"separator {mark}": (f"a{mark}b\n1{mark}red\n2{mark}blue\n", {"values": RED, **more})
        for mark, more in {
            ",": {"notes": []},
            "|": {"note": "with bars"},
            "\t": {"note": "with tabs"},
            ";": MARKED,
        }.items()
    },
    "blanks by a schema": (
        "a   b\n1  red\n2 blue \n",
        {"reader": Reader(delimiter=" "), "values": RED, "note": "with blanks"},
    ),
    "most fields": ("a;b,x;c\n1;red;0\n2;blue;7\n", {"columns": ("a", "b,x", "c"), **MARKED}),
    "a mark in quotes": ('"a;x";"b"\n1;2\n2;3\n', {"columns": ("a;x", "b"), **MARKED}),
    "a decimal comma is no mark": (
        "1,5;2,5;3,25\n",
        {"reader": Reader(decimal=",", header=False), "values": [[1.5, 2.5, 3.25]]},
    ),
    "decimal commas": ("a;b\n1,5;1\n-2;,5\n", {"reader": COMMA, "values": [[1.5, 1], [-2, 0.5]]}),
    "a missing number with a decimal comma": (
        "a;b\n1,25;2\n-9,50;3\n",
        {"reader": Reader(decimal=",", missing=("-9,5",)), "values": [[1.25, 2], [NAN, 3]]},
    ),
    "no header": (
        "1,red,0\n2,blue,1\n",
        {"reader": NO_HEADER, "label": "f3", "columns": ("f1", "f2"), "values": RED, "y": [0, 1]},
    ),
    "another encoding": (
        "a,stra\xdfe\n1,K\xf6ln\n2,Rom\n".encode("latin-1"),
        {"reader": LATIN, "columns": ("a", "stra\xdfe"), "categories": (None, ("K\xf6ln", "Rom"))},
    ),
    "a mark of byte order": ("a,b\n1,2\n".encode("utf-8-sig"), {"columns": ("a", "b")}),
    "spaces": (
        "a, b ,c\n1, u,Y\n2,u ,n\n3, ?,\n",
        {
            "categories": (None, ("u",), None),
            "values": [[1, 0, 1], [2, 0, 0], [3, NAN, NAN]],
            "notes": [
                "spaces around the names of columns are removed: 'b'",
                "feature column 'c' has yes or no, read as 1 or 0",
                "feature column 'b' has spaces around values, removed",
                "feature column 'b' has ? in 1 rows, read as missing: among the categories of a "
                "schema it is a name",
                "feature column 'b' has the same value in every row",
            ],
        },
    ),
    "booleans": (
        "a,b,y\ntrue,1,True\n,2,False\nfalse,3,True\n",
        {"label": "y", "values": [[1, 1], [NAN, 2], [0, 3]], "y": ["True", "False", "True"]},
    ),
    "dates": (
        "a,b\n1970-01-02,1970-01-01 12:00\n,2024-01-01T00:00:00Z\n",
        {
            "values": [[1, 0.5], [NAN, 19723]],
            "note": "feature columns 'a', 'b' have dates or times, read as days since 1970",
        },
    ),
    "names": (
        "a,city\n1,Rome\n2,\n3,Oslo\n4,Rome\n",
        {"categories": (None, ("Oslo", "Rome")), "values": [[1, 1], [2, NAN], [3, 0], [4, 1]]},
    ),
    "a name that equals a missing number": (
        "a,b\n01,2\n1,3\n02,4\n",
        {
            "reader": Reader(missing=("1",), declared=(Declared("a", type="category"),)),
            "categories": (("01", "02"), None),
            "values": [[0, 2], [NAN, 3], [1, 4]],
        },
    ),
    "no partition": ("a,g\n1,\n2,u\n", {"partition": "g", "partitions": ["missing", "u"]}),
    "a nameless id": (",b\n7,1\n8,2\n", {"id_column": "unnamed-1", "ids": ["7", "8"]}),
    "all roles": (
        "id,a,y,w,g,b,t\n007,1,0,0.5,x,2.5,u\n8,2,1,2,01,3,v\n",
        {
            **ALL_ROLES,
            "columns": ("a", "b"),
            "values": [[1, 2.5], [2, 3]],
            "y": [0, 1],
            "ids": ["007", "8"],
            "partitions": ["x", "01"],
            "weights": [0.5, 2],
        },
    ),
    "bytes of a dropped column": (b"a,city\n1,K\xf6ln\n", {"drop": ("city",), "columns": ("a",)}),
    **{
        f"label {fields}": (f"a,y\n0,{fields[0]}\n0,{fields[1]}\n", {"label": "y", "y": labels})
        for fields, labels in (
            (("good", "bad"), ["good", "bad"]),
            (("1.0", "-1.0"), [1.0, -1.0]),
            (("1", "1.0"), ["1", "1.0"]),
            (("10000000000000041", "7"), ["10000000000000041", "7"]),
        )
    },
    **{
        f"missing {word}": (f"a,b\n1,2\n{word},3\n", {"values": [[1, 2], [NAN, 3]]})
        for word in ("", "NA", "?")
    },
    # Numbers that mean "missing"; of text that is made plain nothing is said.
    **{
        f"missing as {written} {reader is IN_ALL}": (
            f"a,b\n1,2\n{written},3\n2.5,4\n",
            {"reader": reader, "values": [[1, 2], [NAN, 3], [2.5, 4]], "notes": notes},
        )
        for reader, written, notes in (
            (IN_ALL, "-9", []),
            (IN_ALL, "-9.0", [OTHERWISE]),
            (IN_ONE, " -9", [TRIMMED]),
            (IN_ONE, "-0.9e1", [OTHERWISE]),
        )
    },
    **{
        f"missing in {column.type}": (
            {"a": column, "b": [0.5, 1.5, 2.5]},
            {"reader": IN_ONE, "values": [[low, 0.5], [NAN, 1.5], [high, 2.5]]},
        )
        for column, low, high in (
            (pa.array([1, -9, 3], pa.int8()), 1, 3),
            (pa.array(["1.00", "-9.00", "3.00"]).cast(pa.decimal128(5, 2)), 1, 3),
            (pa.array([1, -9, 3], pa.int64()).dictionary_encode(), 0, 1),
        )
    },
    **{
        f"missing {missing}": (columns, {"reader": Reader(missing=(missing,)), "values": values})
        for columns, missing, values in (
            ({"a": pa.array([MOST, MOST - 1])}, str(MOST), [[NAN], [2.0**63]]),
            ({"a": DAYS, "b": DAYS.cast(pa.timestamp("us"))}, "1900-01-01", [[1, 1], [NAN, NAN]]),
        )
    },
    **{
        f"labels missing of {kind}": (
            table,
            {"reader": IN_ALL, "label": "y", "drop_unlabelled": True, "y": labels},
        )
        for kind, table, labels in (
            ("text", "a,y\n0,0\n0,1\n0,-9.0\n0,1\n", [0, 1, 1]),
            ("numbers", {"a": range(3), "y": [0, -9, 1]}, [0, 1]),
            ("names", {"a": range(3), "y": pa.array(["no", "-9", "yes"])}, ["no", "yes"]),
            ("codes", {"a": range(3), "y": pa.array([0, -9, 1]).dictionary_encode()}, [0, 1]),
        )
    },
    **{
        f"names {header}": (f"{header}\n4,5,6\n7,8,9\n", {"columns": tuple(header.split(","))})
        for header in ("0,1,2", "1,2,3", "x,2020,2021")
    },
}


@pytest.mark.parametrize("case", READ)
def test_a_table_is_read_also_packed(write, case):
    text, expected = READ[case]
    roles = Roles(**{n: expected[n] for n in Roles.__dataclass_fields__ if n in expected})
    reader = expected.get("reader", PLAIN)
    table = load_table(write(text), roles, reader)
    assert table.values.dtype == np.float32
    if "values" in expected:
        due = np.float32(expected["values"])
        assert np.array_equal(table.values, due, equal_nan=True)
    assert table.take(np.array([0])).categories == table.categories
    if isinstance(text, str):
        packed = load_table(write(text.encode(), "rows.csv.gz"), roles, reader)
        assert np.array_equal(table.values, packed.values, equal_nan=True)
    lists = {"y": table.labels, "ids": table.ids, "weights": table.weights}
    for name, given in {**lists, "partitions": table.partitions}.items():
        assert (None if given is None else given.tolist()) == expected.get(name)
    assert table.columns == expected.get("columns", table.columns)
    assert table.categories == expected.get("categories", table.categories)
    notes = [note.text(shares_names=True) for note in table.notes]
    assert notes == expected.get("notes", notes)
    assert expected.get("note", "") in "; ".join(notes)


# What is refused: the text, the error, and its roles and options.

IS_MIXED = "^feature columns must be of one type each: "
AS_CATEGORY = 'declare type = "category" in a schema'
THOUSANDS = "remove the marks that set off thousands"
NOT_COMMAS = r"write 0,5 for 0.5 and 1500 for 1.500, or set decimal=\."
OLD_EXCEL, ID_AND_MARGIN = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "a,i,m\n1,7,0.5\n2,-9,-9\n"
LABEL, WEIGHT = {"label": "y"}, {"weight": "w"}
DROPS = LABEL | {"drop_unlabelled": True}
REFUSED = {
    "mixed types": (
        "a,b\n1,2\n2,x\n3,4\n",
        IS_MIXED + r"1 of 3 values of 'b' is not a number, first 'x' in line 3: .* "
        r'missing = \["x\"], or declare type = "category"',
    ),
    "six columns of text": (
        "a,b,c,d,e,f\n1,2,3,4,5,6\n" + "1,u,v,w,x,y\n" * 3,
        "3 of 4 values of 'd' are not numbers.*; and in 2 more columns: 'e', 'f': list it in a "
        "schema as missing.*drop-columns=b,c,d,e,f$",
    ),
    "a long value": (f"a,b\n{'x' * 50},1\n2,1\n", f"first '{'x' * 37}...' in line 2"),
    "a row of several lines": (
        't,a\n"one\ntwo",1\n\n"three\r\nfour\nfive",2\n"six\nseven",x\n"eight",3\n',
        "1 of 4 values of 'a' .*, first 'x' in line 8: correct",
        {"drop": ("t",)},
    ),
    **{
        f"dates {days}": ("a,day\n" + "".join(f"1,{day}\n" for day in days), message)
        for days, message in (
            (("2024-01-31", "2024-02-30"), "1 of 2 .* is not a date, first '2024-02-30' in line 3"),
            (("31.1.2024", "1.2.2024"), "first '31.1.2024' in line 2: write them as 2024-12-31"),
            (("12/31/2024", "2024-12-30"), "first '12/31/2024' in line 2: write them as"),
        )
    },
    # Codes among numbers are categories before they are missing.
    **{
        f"a code among {values}": (
            "c,y\n" + "".join(f"{values[row % len(values)]},{row % 3}\n" for row in range(40)),
            r"first '.*' in line \d: " + way,
            LABEL,
        )
        for values, way in (
            (("E11.9", "250", "I10"), AS_CATEGORY),
            (("0x1F", "1.5"), AS_CATEGORY),
            (("1", "2", "3", "unknown"), "correct them"),
        )
    },
    **{
        f"decimal comma {value}": (
            f"a;b\n1;2\n1;2\n1;{value}\n",
            f"1 of 3 values of 'b' is not a number, first '{value}' in line 4: it looks like a "
            f"decimal comma, write {value.replace(',', '.')} or set decimal=,$",
        )
        for value in ("1,5", ",5e2")
    },
    # A decimal mark instead of the advice would divide marked thousands by a thousand.
    **{
        f"{values} in {column}, decimal {reader.decimal}": (
            f"{column};{'y' if column == 'a' else 'a'}\n"
            + "".join(f"{value};1\n" for value in values.split()),
            rf"'{column}'.* {way}",
            {"reader": reader, "label": "y"},
        )
        for reader, column, values, way in (
            (PLAIN, "a", "2 2 1.234,5", THOUSANDS),
            (COMMA, "a", "2 2 1.234.567", THOUSANDS),
            (PLAIN, "a", "37,752 1,512", THOUSANDS),
            (COMMA, "a", "37,752 512", THOUSANDS),
            (COMMA, "y", "7.500 2,5", THOUSANDS),
            (COMMA, "a", "0.700 1.500", NOT_COMMAS),
            (COMMA, "a", "1 .5", NOT_COMMAS),
            (COMMA, "y", "7.500 2.25", NOT_COMMAS),
        )
    },
    "infinite": (
        "a,b\ninf,1\n-inf,2\n1,3\n",
        "finite as float32, got 2 in 'a' infinite, first in line 2: leave the field empty"
        '.* missing = ."inf".*, divide values .* drop-col',
    ),
    "no labels": (
        "a,y\n1,\n2,NA\n3,1\n",
        "got 2 of 3 rows, first in line 2; missing-label=drop drops these rows$",
        LABEL,
    ),
    "infinite label": ("a,y\n1,inf\n2,1\n", "finite, got 1 of 2 rows, first in line 2$", LABEL),
    "no label at all": ("a,y\n1,\n2,NA\n", "a value in some row, got none in 2 rows", DROPS),
    "weights": ("a,w\n1,-1\n2,\n3,inf\n4,1\n", ">= 0 .* got 3 of 4 rows, first in line 2$", WEIGHT),
    "a weight where rows are dropped": (
        "a,w,y\n1,1,\n2,1,0\n3,,\n4,-1,1\n",
        r"weight column 'w' .* got 1 of 2 rows, first in line 5$",
        WEIGHT | DROPS,
    ),
    "a weight that is no number": ("a,w\n1,heavy\n2,1\n", "'heavy' in line 2: correct .*$", WEIGHT),
    "no id": ("a,i\n1,\n", "'i' must .* got 1 of 1 rows, first in line 2$", {"id_column": "i"}),
    "missing id by a schema": (
        ID_AND_MARGIN,
        "id column 'i' must have no missing values, got 1",
        {"reader": IN_ALL, "id_column": "i", "drop": ("m",)},
    ),
    "missing margin by a schema": (
        ID_AND_MARGIN,
        "base-margin column 'm' must be finite in every row",
        {"reader": IN_ALL, "base_margin": "m", "drop": ("i",)},
    ),
    "names": ("a, a,b\n1,2,3\n", "column names must be distinct, got 'a' more than once"),
    "header only": ("a,b\n", "table must have at least one row, got 0"),
    "nothing": ("", "'rows.csv' must be a well-formed csv file, got an empty file"),
    "only a label": ("y\n1\n", "table must have a feature column, got only 'y'", LABEL),
    "nameless": ("a,\n1,2\n", "must have names, got 'unnamed-2' without; .*=unnamed-2"),
    **{
        f"no {role}": (
            "age,balance,default\n1,2,0\n",
            rf"^{role} column '{wrong}' must be in the table, got columns 'age', 'balance', "
            rf"'default'; did you mean {near}\?$",
            {field: wrong},
        )
        for field, role, wrong, near in (
            ("label", "label", "defualt", "default"),
            ("id_column", "id", "ballance", "balance"),
            ("weight", "weight", "Default", "default"),
        )
    },
    "no partition": ("a\n1\n", "partition column 'g' must be in the table", {"partition": "g"}),
    "no dropped column": (
        "age,balance\n1,2\n",
        r"of the table \('age', 'balance'\), got 'blance', 'xyz'; did you mean balance\?$",
        {"drop": ("blance", "xyz")},
    ),
    "of many columns": (
        ",".join(f"c{place:03d}" for place in range(100)) + "\n" + ",".join(["1"] * 100),
        "'c018', 'c019' and 80 more$",
        LABEL,
    ),
    **{
        f"a first line of numbers {text[:9]}": (
            text,
            f"^data file 'rows.csv' must name its columns in the first line, got a row of numbers "
            f"there: put a line of {text.split(chr(10))[0].count(',') + 1} .* set header=false$",
        )
        for text in ("5.1,3.5,0\n4.9,3,1\n", "2019,2021\n1,2\n")
    },
    "an open quote": ('a,b\n1,"x\n2,y\n3,z\n', "'rows.csv' must close every .* odd number of quot"),
    "NUL bytes": (b"a,b\n1,2\n2,\0\n", "got NUL bytes in line 3: is it"),
    "Excel": (b"PK\x03\x04\x14\0" + bytes(200), "got an Excel or zip file: save the sheet as CSV$"),
    "old Excel": (OLD_EXCEL + bytes(200), "got an Excel file: save the sheet as CSV$"),
    "Parquet": (b"PAR1abc", "got a Parquet file: name it .parquet$"),
    "gzip": (b"\x1f\x8babc", "got a packed file: name it .gz$"),
    "bzip2": (b"BZh9abc", "got a bzip2 file: unpack it$"),
    "names of people": (
        "id,who\n" + NAMES,
        "categories, got 30 different texts in 30 rows in 'who': .* drop-columns=who, name it "
        'as the id, or let a schema say type = "category"$',
    ),
    "blanks between the fields": (
        "a b\n" + NAMES.replace(",", " "),
        '; where blanks separate the fields, let it say separator = "blank"$',
    ),
    "bytes": (
        b"a,city\n1,Rome\n2,K\xf6ln\n",
        "^data file 'rows.csv' must be UTF-8, got byte 0xf6 in line 3 .byte 17 of "
        "the text.: save it as UTF-8, or name its encoding, as in encoding=latin-1$",
    ),
    "bytes past the first chunk": (
        b"a,y\n" + "1,\N{EURO SIGN}\n".encode() * 200_000 + b"2,\xff\n",
        "byte 0xff in line 200,002 .byte 1,200,006 of",
        LABEL,
    ),
    "UTF-16": ("a,b\n1,2\n".encode("utf-16"), "save it as UTF-8, or set encoding=utf-16$"),
    "ragged": (
        "a,b,c\n1,2,3\n1,2\n\n1,2,3,4\n1,2,3\n",
        "^data file 'rows.csv' must have the 3 fields of its first line in every row, got 2 in line"
        " 3 and other than 3 in 2 of 4 rows$",
    ),
    "ragged in another encoding": (b"a,b\n\xf6,2\n1\n", "got 1 in line 3$", {"reader": LATIN}),
    "a short first line": (
        "1,2,class\n" + "5,6,7,8\n" * 3,
        "got 4 in line 2 and other than 3 in 3 of 3 rows: does the first line name every column.$",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_table_is_refused_and_others_learn_neither_values_nor_lines(write, case):
    text, message, *given = REFUSED[case]
    error = error_of(write(text), **(given[0] if given else {}))
    assert re.search(message, without_folders(str(error)), re.DOTALL)
    assert error.__cause__ is None  # a reader's own error may quote a row
    assert not re.search(r"in line|first '", str(error.for_others(shares_names=True)))


@pytest.mark.parametrize("name", ["rows.csv", "rows.csv.gz"])
def test_values_that_are_no_numbers_are_counted_and_the_first_one_is_quoted(write, name):
    fields = {line: f"{line}.5" for line in range(2, 2002)} | {17: "n/a ", 90: "n/a", 2001: "-"}
    text = "age,balance\n" + "".join(f"30,{field}\n" for field in fields.values())
    error = error_of(write(text, name))
    assert str(error) == (
        "feature columns must be of one type each: 3 of 2,000 values of 'balance' are not numbers, "
        "first 'n/a ' in line 17: correct them, or leave the field empty where a value is missing; "
        'list it in a schema as missing = ["n/a"], or declare type = "category" there'
    )
    for shares_names, column in ((True, "'balance'"), (False, WITHHELD)):
        told = str(error.for_others(shares_names))
        assert f"got numbers and other text in {column}" in told
        assert not any(own in told for own in ("n/a", "17"))
        assert told.endswith("; the site's own log says more")


def test_an_unknown_column_is_told_to_others_without_names(write):
    error = error_of(write("age,balance\n1,2\n"), label="balanec")
    assert error.outside.endswith(f"column {WITHHELD} must be in the table, got columns {WITHHELD}")
    assert str(DataError("table must be one").for_others(True)) == "table must be one"


def test_a_code_among_numbers_of_the_label_is_a_class_before_it_is_missing(write):
    table = load_table(write("a,y\n" + "1,250\n2,401\n3,V58\n4,272\n" * 10), Roles(label="y"))
    with pytest.raises(DataError, match=r"as 'V58'; where they are names .*correct"):
        class_names(table.labels, "auto")


@pytest.mark.parametrize("values", [("dead", "alive"), ("2", "1")], ids=str)
def test_events_in_words_come_with_the_way_to_read_them(write, tmp_path, values):
    events = [values[0] if row % 3 else values[1] for row in range(40)]
    path = write({"x": np.arange(40.0), "time": np.arange(1.0, 41), "event": events})
    rule = r"let a schema have codes .*\[columns\.event\.codes\]"
    assert re.search(rule, str(error_of(path, label="time", event="event")))
    codes = f'[columns.event.codes]\n{values[0]} = "1"\n{values[1]} = "0"\n'
    (tmp_path / "schema.toml").write_text(codes)
    reader = read_schema(tmp_path / "schema.toml").reader()
    table = load_table(path, Roles(label="time", event="event"), reader)
    assert np.array_equal(table.labels > 0, np.arange(40) % 3 > 0)


@pytest.mark.parametrize("begin", ["a,b\n1,", 'a,b\n1,"', ""])
def test_a_line_of_two_gigabytes_is_refused_at_its_first_block(tmp_path, begin):
    path = tmp_path / "rows.csv"
    with path.open("wb") as file:
        file.write(begin.encode() + b"x" * (20 << 20))
        file.seek(2 << 30)  # a hole: no disk is used, but who reads on reads NULs
        file.write(b"\n")
    began = time.process_time()
    with pytest.raises(DataError, match=r"got a (line longer than 8 MiB|field of more than)"):
        load_table(path)
    assert time.process_time() - began < 5


def test_a_file_that_may_not_be_read_is_told_as_such():
    is_root = os.geteuid() == 0
    with tempfile.TemporaryDirectory() as folder:  # for all, as the test's is root's
        (path := Path(folder) / "rows.csv").write_text("a,b\n1,2\n")
        path.parent.chmod(0o755)
        path.chmod(0)
        if is_root:
            os.seteuid(NOBODY)
        try:
            rule = f"data file '{path}' must be readable for the user that runs this"
            assert str(error_of(path)) == f"{rule}, got permission denied"
        finally:
            if is_root:
                os.seteuid(0)


WELL_FORMED = "' must be a well-formed "


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("folder.csv", "", r"data file must be a file, or a .*files, got .*/folder.csv'$"),
        ("no.csv", None, "data file must exist, got '.*/no.csv'"),
        ("rows.doc", b"1", "must end in .csv, .* with .gz., got '.*/rows.doc'; save a sheet"),
        ("space-ga.arff", b"1", "/space-ga.arff'; this file's data set is known by the name space"),
        ("rows.parquet", b"secret 1:x", f"/rows.parquet{WELL_FORMED}parquet file"),
        ("rows.libsvm", b"secret 1:x", f"/rows.libsvm{WELL_FORMED}libsvm file"),
        (
            "rows.csv.gz",
            gzip.compress(b"a,b\n" + b"1,2\n" * 1000, mtime=0)[:40],
            f"/rows.csv.gz{WELL_FORMED}csv file, got a packed file that is damaged",
        ),
    ],
)
def test_a_file_that_cannot_be_read_is_refused(tmp_path, name, content, message):
    if content == "":
        (tmp_path / name).mkdir()
    elif content is not None:
        (tmp_path / name).write_bytes(content)
    error = str(error_of(tmp_path / name))
    assert re.search(message, error)
    assert "secret" not in error


def test_fields_of_several_lines_and_decimals_are_read_past_the_first_block(write):
    text = "a line\n" * 20  # so that the block's last line end is within a field
    rows = "".join(f'"{text}",{n}\n' for n in range(100_000))
    table = load_table(write(f"t,a\n{rows}x,2.5\n"), Roles(drop=("t",)))
    assert np.array_equal(table.values[:, 0], [*range(100_000), 2.5])


@pytest.mark.parametrize("name", ["rows.svm", "rows.libsvm.gz"])
def test_absent_libsvm_entries_are_zero(write, name):
    table = load_table(write("+1 1:0.5 3:2 \n-1 2:1\n", name), Roles(label="y"))
    assert table.columns == ("f1", "f2", "f3")
    assert table.values.tolist() == [[0.5, 0, 2], [0, 1, 0]]
    assert table.labels.tolist() == [1, -1]


# Columns of a model, Parquet files and frames

OF_MODEL = "column 'n' must be numbers, as in the model, got "


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["x"], OF_MODEL + "names of cat"),
        ([[1]], "'n' must be read in one way, got bytes, lists or other val"),
        ([1e300], "finite as float32, got 1 in 'n' infinite"),
    ],
)
def test_columns_of_a_model_refuse_values_of_another_type(values, message):
    columns = Columns.of_model(("n", "c"), (None, ("u", "v")), PLAIN)
    with pytest.raises(DataError, match=message):
        columns.convert(pa.table({"n": values, "c": ["u"]}))
    empty, _ = columns.convert(pa.table({"n": pa.array([None], pa.string()), "c": [None]}))
    assert np.isnan(empty).all()


def test_a_category_of_a_model_is_not_read_as_numbers_and_what_a_schema_lacks_is_missing():
    reader = Reader(declared=(Declared("c", type="number"),))
    columns = Columns.of_model(("c",), (("1", "2"),), reader)
    with pytest.raises(DataError, match=r"'c' must be names of cat.*, as in the model, got numb"):
        columns.convert(pa.table({"c": [2]}))
    reader = Reader(declared=(Declared("c", type="category", categories=("v", "x")),))
    columns = Columns.of_model(("c",), (("u", "v"),), reader)
    values, (converted,) = columns.convert(pa.table({"c": ["u", "v", "x", "z"]}))
    assert np.array_equal(values[:, 0], [NAN, 1, NAN, NAN], equal_nan=True)
    assert converted.n_outside == 1


def test_labels_of_a_parquet_file_may_mean_missing(write):
    roles = Roles(label="y", drop_unlabelled=True)
    path = write({"a": [1.0, 2, 3], "y": [np.nan, 5.5, None]})
    reader = Reader(decimal=",", missing=("7",))  # no decimal commas
    assert load_table(path, roles, reader).labels == pytest.approx([5.5])
    refused = "got 2 of 3 rows; missing-label=drop drops these rows"
    assert str(error_of(path, label="y")).endswith(refused)


def test_parquet_keeps_types_and_order(tmp_path):
    (tmp_path / "year=2008").mkdir()
    columns = {"b": [True, None, False], "d": ["1", "2", "3"], "id": [10, 11, 12]}
    pq.write_table(pa.table(columns), path := tmp_path / "year=2008" / "rows.parquet")
    table = load_table(path, Roles(label="d", id_column="id"))
    assert table.columns == ("b",)
    assert np.array_equal(table.values, [[1], [NAN], [0]], equal_nan=True)
    assert (table.labels.tolist(), table.ids.tolist()) == ([1, 2, 3], ["10", "11", "12"])


@pytest.mark.parametrize("values", [["12", "7", "007"], ["0,5", None, "2,5"]])
def test_text_of_a_typed_table_is_text_even_where_it_looks_like_numbers(write, values):
    frame = as_arrow(pa.table({"a": values, "b": [1.0, 2.0, 3.0]}))
    names = tuple(sorted(filter(None, values)))
    file = write(dict(zip(frame.column_names, frame.columns, strict=True)))
    for table in (load_table(file), table_of_frame(frame)):
        assert table.categories == (names, None)
        found = [None if np.isnan(code) else names[int(code)] for code in table.values[:, 0]]
        assert found == values
