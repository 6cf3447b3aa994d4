import gzip
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedapp.data.datasets import as_arrow
from fedapp.data.read import load_table
from fedapp.data.schema import PLAIN, Declared, Reader, Roles
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


IN_ALL, IN_ONE = Reader(missing=("-9", "none")), Reader(declared=(Declared("a", missing=("-9",)),))


@pytest.mark.parametrize("reader", [IN_ALL, IN_ONE])
@pytest.mark.parametrize(
    ("written", "n_told"), [("-9", 0), ("-9.0", 1), ("-9.00", 1), (" -9", 1), ("-0.9e1", 1)]
)
def test_a_number_that_means_missing_is_so_however_it_is_written(
    tmp_path: Path, reader: Reader, written: str, n_told: int
) -> None:
    table = load_table(write(tmp_path, f"a,b\n1,2\n{written},3\n2.5,4\n"), reader=reader)
    assert np.isnan(table.values).tolist() == [[False, False], [True, False], [False, False]]
    told = [note.text(True) for note in table.notes if "otherwise" in note.rule]
    if reader is IN_ONE and written == " -9":  # it is read as text, whose spaces are removed
        n_told = 0
    assert told == n_told * [
        "feature column 'a' has 1 values that equal a number declared as missing but are written "
        "otherwise, read as missing"
    ]


def test_a_number_that_means_missing_may_have_a_decimal_comma(tmp_path: Path) -> None:
    reader = Reader(decimal=",", missing=("-9,5",))
    table = load_table(write(tmp_path, "a;b\n1,25;2\n-9,50;3\n"), reader=reader)
    assert np.array_equal(table.values, [[1.25, 2], [np.nan, 3]], equal_nan=True)


def test_a_name_that_equals_a_missing_number_stays(tmp_path: Path) -> None:
    reader = Reader(missing=("1",), declared=(Declared("a", type="category"),))
    table = load_table(write(tmp_path, "a,b\n01,2\n1,3\n02,4\n"), reader=reader)
    assert table.categories == (("01", "02"), None)
    assert np.isnan(table.values[:, 0]).tolist() == [False, True, False]


@pytest.mark.parametrize("reader", [IN_ALL, IN_ONE])
@pytest.mark.parametrize(
    "column",
    [
        pa.array([1, -9, 3], pa.int8()),
        pa.array([1.5, -9.0, None], pa.float32()),
        pa.array(["1.50", "-9.00", "3.00"]).cast(pa.decimal128(5, 2)),
        pa.array([4, -9, 5], pa.int64()).dictionary_encode(),
    ],
)
def test_numbers_of_a_parquet_file_may_mean_missing(
    tmp_path: Path, reader: Reader, column: pa.Array
) -> None:
    pq.write_table(pa.table({"a": column, "b": [0.5, 1.5, 2.5]}), tmp_path / "rows.parquet")
    plain = load_table(tmp_path / "rows.parquet", reader=PLAIN)
    table = load_table(tmp_path / "rows.parquet", reader=reader)
    absent = np.isnan(plain.values)
    absent[1, 0] = True
    assert np.array_equal(np.isnan(table.values), absent)
    if pa.types.is_dictionary(column.type):
        assert table.categories == (("4", "5"), None)
    else:
        assert table.categories == ()
        assert np.array_equal(table.values[~absent], plain.values[~absent])


@pytest.mark.parametrize("code", [2**63 - 1, -(2**63)])
def test_the_largest_whole_number_may_mean_missing(tmp_path: Path, code: int) -> None:
    largest = pa.array([code, code - 1 if code > 0 else code + 1, 3], pa.int64())
    pq.write_table(pa.table({"a": largest}), tmp_path / "rows.parquet")
    table = load_table(tmp_path / "rows.parquet", reader=Reader(missing=(str(code),)))
    assert np.isnan(table.values[:, 0]).tolist() == [True, False, False]


def test_dates_of_a_parquet_file_may_mean_missing(tmp_path: Path) -> None:
    days = pa.array(["1970-01-02", "1900-01-01"]).cast(pa.date32())
    frame = pa.table({"a": days, "b": days.cast(pa.timestamp("us"))})
    pq.write_table(frame, tmp_path / "rows.parquet")
    table = load_table(tmp_path / "rows.parquet", reader=Reader(missing=("1900-01-01",)))
    assert np.array_equal(table.values, [[1, 1], [np.nan, np.nan]], equal_nan=True)


@pytest.mark.parametrize("dropped", ["-9", "-9.0"])
@pytest.mark.parametrize("labels", [[0, 1, -9, 1], ["no", "yes", "-9", "yes"]])
def test_labels_that_mean_missing_are_so_in_every_kind_of_file(
    tmp_path: Path, labels: list[int] | list[str], dropped: str
) -> None:
    reader, roles = Reader(missing=("-9",)), Roles(label="y", drop_unlabelled=True)
    if isinstance(labels[0], str):
        dropped = "-9"
    values = [dropped if label in (-9, "-9") else label for label in labels]
    lines = [f"{row},{value}" for row, value in enumerate(values)]
    of_text = load_table(write(tmp_path, "\n".join(["a,y", *lines]) + "\n"), roles, reader)
    columns = [pa.array(labels), pa.array(labels).dictionary_encode()]
    for column in columns:
        pq.write_table(pa.table({"a": range(4), "y": column}), tmp_path / "rows.parquet")
        table = load_table(tmp_path / "rows.parquet", roles, reader)
        assert of_text.labels is not None
        assert table.labels is not None
        assert table.labels.tolist() == of_text.labels.tolist()
        assert len(table.labels) == 3


def test_labels_of_a_parquet_file_have_no_decimal_commas(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1, 2, 3], "y": [0.5, -9.0, 2.5]}), tmp_path / "rows.parquet")
    reader = Reader(decimal=",", declared=(Declared("y", missing=("-9",)),))
    table = load_table(tmp_path / "rows.parquet", Roles(label="y", drop_unlabelled=True), reader)
    assert table.labels is not None
    assert table.labels.tolist() == [0.5, 2.5]


def test_ids_and_base_margins_that_mean_missing_are_refused_in_every_kind_of_file(
    tmp_path: Path,
) -> None:
    text = write(tmp_path, "a,i,m\n1,7,0.5\n2,-9,-9\n")
    frame = pa.table({"a": [1, 2], "i": [7, -9], "m": [0.5, -9.0]})
    pq.write_table(frame, tmp_path / "rows.parquet")
    for path in (text, tmp_path / "rows.parquet"):
        with pytest.raises(DataError, match="id column 'i' must have no missing values, got 1"):
            load_table(path, Roles(id_column="i", drop=("m",)), IN_ALL)
        with pytest.raises(DataError, match="base-margin column 'm' must be finite in every row"):
            load_table(path, Roles(base_margin="m", drop=("i",)), IN_ALL)


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
    "values",
    [["0.7", "1.5"], ["0.700", "1.500"], ["7.500", "2,5"], ["12.500", "1500"], ["1", ".5"]],
)
@pytest.mark.parametrize("column", ["a", "y"])
def test_decimal_points_are_refused_where_commas_are_said(
    tmp_path: Path, column: str, values: list[str]
) -> None:
    rows = "".join(f"{value};1\n" for value in values)
    path = write(tmp_path, f"{column};{'y' if column == 'a' else 'a'}\n{rows}")
    with pytest.raises(
        DataError, match=r"write 0,5 for 0.5 and 1500 for 1.500, or set d.*\.$"
    ) as caught:
        load_table(path, Roles(label="y"), Reader(decimal=","))
    assert f"'{column}'" in str(caught.value)
    assert f"'{values[0]}'" not in str(caught.value.for_others(shares_names=True))


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
            "finite as float32, got 2 in 'a' infinite, first in line 2: leave the field empty",
        ),
        ("a\n1e39\n", {}, 'in line 2: .* missing = ."inf".*, divide values .* drop-columns$'),
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


@pytest.mark.parametrize(
    "values", [["12", "7", "007"], ["A3", "12", "7"], ["0,5", "1,5", "2,5"], ["1", None, "x"]]
)
@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view()])
def test_text_of_a_typed_table_is_text_even_where_it_looks_like_numbers(
    tmp_path: Path, values: list[str | None], kind: pa.DataType
) -> None:
    frame = as_arrow(pa.table({"a": pa.array(values, kind), "b": [1.0, 2.0, 3.0]}))
    pq.write_table(frame, tmp_path / "rows.parquet")
    table = load_table(tmp_path / "rows.parquet")
    names = tuple(sorted(filter(None, values)))
    assert table.categories == (names, None)
    found = [None if np.isnan(code) else names[int(code)] for code in table.values[:, 0]]
    assert found == values
