import gzip
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedapp.data.load import load_table
from fedapp.data.schema import Reader, Roles
from fedapp.errors import DataError


def write(folder: Path, text: str, name: str = "rows.csv") -> Path:
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


def test_columns_without_a_role_are_features(tmp_path: Path) -> None:
    path = write(tmp_path, "id,a,y,w,g,b,t\n007,1,0,0.5,x,2.5,u\n8,2,1,2,01,3,v\n")
    table = load_table(path, Roles(label="y", id_column="id", weight="w", group="g", drop=("t",)))
    assert table.columns == ("a", "b")
    assert table.values.dtype == np.float32
    assert table.values.tolist() == [[1, 2.5], [2, 3]]
    assert table.labels is not None
    assert table.labels.dtype == np.float64
    assert table.labels.tolist() == [0, 1]
    assert table.weights is not None
    assert table.weights.tolist() == [0.5, 2]
    assert table.ids is not None
    assert table.ids.tolist() == ["007", "8"]
    assert table.groups is not None
    assert table.groups.tolist() == ["x", "01"]


def test_a_table_may_have_no_label(tmp_path: Path) -> None:
    table = load_table(write(tmp_path, "a,b\n1,2\n"))
    assert table.labels is None
    assert table.ids is None
    assert table.weights is None
    assert table.groups is None


def test_a_packed_file_reads_like_a_plain_one(tmp_path: Path) -> None:
    text = "a,y\n1,0\n2,1\n"
    plain = load_table(write(tmp_path, text), Roles(label="y"))
    packed = load_table(write(tmp_path, text, "rows.csv.gz"), Roles(label="y"))
    assert np.array_equal(plain.values, packed.values)


@pytest.mark.parametrize("missing", ["", "NA", "N/A", "nan", "NaN", "null", "?"])
def test_missing_words_become_nan(tmp_path: Path, missing: str) -> None:
    table = load_table(write(tmp_path, f"a,b\n1,2\n{missing},3\n"))
    assert np.isnan(table.values).tolist() == [[False, False], [True, False]]


def test_a_column_with_no_value_at_all_is_nan(tmp_path: Path) -> None:
    assert np.isnan(load_table(write(tmp_path, "a,b\n1,\n2,\n")).values[:, 1]).all()


def test_booleans_become_zero_and_one(tmp_path: Path) -> None:
    table = load_table(
        write(tmp_path, "a,b,y\ntrue,1,True\n,2,False\nfalse,3,True\n"), Roles(label="y")
    )
    assert np.array_equal(table.values[:, 0], [1, np.nan, 0], equal_nan=True)
    assert table.labels is not None
    assert table.labels.tolist() == [1, 0, 1]


def test_text_becomes_codes_of_its_sorted_names(tmp_path: Path) -> None:
    table = load_table(write(tmp_path, "a,city\n1,Rome\n2,\n3,Oslo\n4,Rome\n"))
    assert table.categories == (None, ("Oslo", "Rome"))
    assert np.array_equal(table.values[:, 1], [1, np.nan, 0, 1], equal_nan=True)
    assert table.take(np.array([0])).categories == table.categories


def test_numbers_past_the_first_block_may_be_decimal(tmp_path: Path) -> None:
    n_rows = 1_500_000
    table = load_table(write(tmp_path, "a,b\n" + "100,7\n" * n_rows + "2.5,7\n"))
    assert table.values[-1].tolist() == [2.5, 7]


def test_fields_of_several_lines_are_read_past_the_first_block(tmp_path: Path) -> None:
    text = "a line\n" * 20  # so that the block's last line end is within a field
    rows = "".join(f'"{text}",{n}\n' for n in range(100_000))
    table = load_table(write(tmp_path, "t,a\n" + rows), Roles(drop=("t",)))
    assert np.array_equal(table.values[:, 0], np.arange(100_000))


@pytest.mark.parametrize(
    ("fields", "labels"),
    [
        (["good", "bad"], ["good", "bad"]),
        (["1.", "2."], ["1.", "2."]),
        (["1.", "2.5"], [1.0, 2.5]),
        (["+1", "-1"], [1.0, -1.0]),
        (["1", "b"], ["1", "b"]),
    ],
)
def test_labels_are_numbers_only_where_all_are(
    tmp_path: Path, fields: list[str], labels: list[object]
) -> None:
    rows = "".join(f"0,{field}\n" for field in fields)
    table = load_table(write(tmp_path, "a,y\n" + rows), Roles(label="y"))
    assert table.labels is not None
    assert table.labels.tolist() == labels


@pytest.mark.parametrize(
    "values", [["0.7", "1.5"], ["0.700", "1.500"], ["1.5", "2,5"], ["1", ".5"]]
)
@pytest.mark.parametrize("column", ["a", "y"])
def test_decimal_points_are_refused_where_commas_are_said(
    tmp_path: Path, column: str, values: list[str]
) -> None:
    rows = "".join(f"{value};1\n" for value in values)
    path = write(tmp_path, f"{column};{'y' if column == 'a' else 'a'}\n{rows}")
    with pytest.raises(DataError, match=r"write 0,5 for 0.5, or set decimal=\.$") as caught:
        load_table(path, Roles(label="y"), Reader(decimal=","))
    assert f"'{column}'" in str(caught.value)
    assert values[0] not in str(caught.value.for_others(shares_names=True))


def test_points_that_may_set_off_thousands_do_and_are_noted(tmp_path: Path) -> None:
    path = write(tmp_path, "a;b;y\n1.500;1.500;1.500\n2.500;2,5;12.500\n")
    table = load_table(path, Roles(label="y"), Reader(decimal=","))
    assert table.values.tolist() == [[1500, 1500], [2500, 2.5]]
    assert table.labels is not None
    assert table.labels.tolist() == [1500, 12500]
    found = "has points before three digits, read as marks of thousands (decimal=,)"
    assert [note.told(shares_names=True) for note in table.notes if "three" in note.rule] == [
        f"feature column 'a' {found}",
        f"label column 'y' {found}",
    ]


def test_rows_without_a_group_are_a_group(tmp_path: Path) -> None:
    table = load_table(write(tmp_path, "a,g\n1,\n2,u\n"), Roles(group="g"))
    assert table.groups is not None
    assert table.groups.tolist() == ["missing", "u"]


def test_parquet_keeps_types_and_order(tmp_path: Path) -> None:
    path = tmp_path / "year=2008" / "rows.parquet"
    path.parent.mkdir()
    columns = {
        "b": pa.array([True, None, False]),
        "d": pa.array(["1", "2", "3"]).cast(pa.string()),
        "i": pa.array([1, None, 3]),
        "id": pa.array([10, 11, 12]),
        "c": pa.array([1.5, 2.5, 3.5]).cast(pa.decimal128(5, 2)),
    }
    pq.write_table(pa.table(columns), path)
    table = load_table(path, Roles(label="d", id_column="id"))
    assert table.columns == ("b", "i", "c")
    expected = [[1, 1, 1.5], [np.nan, np.nan, 2.5], [0, 3, 3.5]]
    assert np.array_equal(table.values, expected, equal_nan=True)
    assert table.labels is not None
    assert table.labels.tolist() == ["1", "2", "3"]
    assert table.ids is not None
    assert table.ids.tolist() == ["10", "11", "12"]


@pytest.mark.parametrize("name", ["rows.libsvm", "rows.svm", "rows.libsvm.gz"])
@pytest.mark.parametrize("label", ["", "y"])
def test_absent_libsvm_entries_are_zero(tmp_path: Path, name: str, label: str) -> None:
    table = load_table(write(tmp_path, "+1 1:0.5 3:2 \n-1 2:1\n", name), Roles(label=label))
    assert table.columns == ("f1", "f2", "f3")
    assert table.values.tolist() == [[0.5, 0, 2], [0, 1, 0]]
    assert table.labels is not None
    assert table.labels.tolist() == [1, -1]


def refuse(path: Path, message: str, **columns: object) -> None:
    with pytest.raises(DataError, match=message) as caught:
        load_table(path, Roles(**columns))  # type: ignore[arg-type]
    assert str(path.parent) not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "columns", "message"),
    [
        (
            "a,city\n1,7\n2,Rome\n3,Oslo\n",
            {},
            r"^feature columns must be of one type each: 2 of 3 values of 'city' are not numbers, "
            r"first 'Rome' in line 3: list it in a schema as missing = \[\"Rome\"\], or declare "
            r"type = \"category\" there, or exclude the columns with drop-columns=city$",
        ),
        (
            "a,b\ninf,1\n-inf,2\n1,3\n",
            {},
            "finite as float32, got 2 in 'a' infinite, first in line 2$",
        ),
        ("a\n1e39\n", {}, "got 1 in 'a' infinite, first in line 2$"),
        (
            "a,y\n1,\n2,NA\n3,1\n",
            {"label": "y"},
            "'y' must have no missing values, got 2 of 3 rows, first in line 2"
            "; missing-label=drop drops these rows$",
        ),
        (
            "a,y\n1,u\n2,\n",
            {"label": "y"},
            "'y' must have no missing values, got 1 of 2 rows, first in line 3"
            "; missing-label=drop drops these rows$",
        ),
        (
            "a,y\n1,inf\n2,1\n",
            {"label": "y"},
            "'y' must be finite, got 1 of 2 rows, first in line 2$",
        ),
        (
            "a,w\n1,-1\n2,\n3,inf\n4,1\n",
            {"weight": "w"},
            ">= 0 in every row, got 3 of 4 rows, first in line 2$",
        ),
        (
            "a,w\n1,u\n",
            {"weight": "w"},
            "^weight column must be numbers: 1 of 1 values of 'w' .* first 'u' in line 2",
        ),
        (
            "a,i\n1,\n",
            {"id_column": "i"},
            "'i' must have no missing values, got 1 of 1 rows, first in line 2$",
        ),
        ("a,b\n", {}, "table must have at least one row, got 0"),
        (",b,y\n0,1,1\n", {"label": "y"}, "got 'unnamed-1' without; .* drop-columns=unnamed-1"),
        ("", {}, "'rows.csv' must be a well-formed csv file, got an empty file"),
        ("y\n1\n", {"label": "y"}, "table must have a feature column, got only 'y'"),
        ("a,a,b\n1,2,3\n", {}, "column names must be distinct, got 'a' more than once"),
        (
            "a,b\n1,2\n",
            {"label": "y"},
            "label column 'y' must be in the table, got columns 'a', 'b'",
        ),
        ("a\n1\n", {"id_column": "i"}, "id column 'i' must be in the table"),
        ("a\n1\n", {"weight": "w"}, "weight column 'w' must be in the table"),
        ("a\n1\n", {"group": "g"}, "group column 'g' must be in the table"),
        ("a\n1\n", {"drop": ["b"]}, r"drop-columns must be columns of the table \('a'\), got 'b'"),
        (
            "a,b\n1,2\n3\n",
            {},
            "have the 2 fields of its first line in every row, got 1 in line 3$",
        ),
    ],
)
def test_broken_tables_are_refused(
    tmp_path: Path, text: str, columns: dict[str, object], message: str
) -> None:
    refuse(write(tmp_path, text), message, **columns)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    refuse(tmp_path / "no.csv", "data file must exist, got 'no.csv'")
    refuse(write(tmp_path, "1", "rows.doc"), r"must end in .csv, .*, got 'rows.doc'$")
    hint = "; this file's data set is known by the name space-ga$"
    refuse(
        write(tmp_path, "1", "space-ga.arff"), f"must end in .csv, .*, got 'space-ga.arff'{hint}"
    )
    for name in ("rows.parquet", "rows.libsvm"):
        refuse(write(tmp_path, "secret 1:x", name), rf"'{name}' must be a well-formed")
    path = tmp_path / "rows.csv.gz"
    path.write_bytes(gzip.compress(b"a,b\n" + b"1,2\n" * 1000)[:40])
    refuse(path, "'rows.csv.gz' must be a well-formed csv file, got a packed file that is damaged")
    folder = tmp_path / "folder.csv"
    folder.mkdir()
    refuse(folder, "data file must be a file, got the folder 'folder.csv'")


def test_libsvm_indices_start_at_one(tmp_path: Path) -> None:
    refuse(write(tmp_path, "1 0:5 1:2\n", "rows.libsvm"), "must be a well-formed libsvm file")


def test_a_reader_error_does_not_quote_a_row(tmp_path: Path) -> None:
    path = write(tmp_path, "a,b\n1,2\nhidden\n")
    with pytest.raises(DataError) as caught:
        load_table(path)
    assert "hidden" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_nameless_column_can_be_the_id(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(",b\n7,1\n8,2\n")
    table = load_table(path, Roles(id_column="unnamed-1"))
    assert table.columns == ("b",)
    assert table.ids is not None
    assert table.ids.tolist() == ["7", "8"]
