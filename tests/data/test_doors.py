"""Every Arrow type is read alike by every door, or refused by the column's name."""

import traceback
from contextlib import suppress
from dataclasses import replace
from decimal import Decimal
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from pyarrow import parquet

import fedapp
from fedapp import PAXClassifier, PAXRegressor
from fedapp.data.columns import Columns
from fedapp.data.datasets import as_arrow, write_tables
from fedapp.data.describe import describe
from fedapp.data.labels import class_ids, class_names, number_labels
from fedapp.data.predictions import columns_of_frame, read_columns_of
from fedapp.data.read import load_table, table_of_frame
from fedapp.data.schema import NO_ROLES, PLAIN, Declared, Roles
from fedapp.errors import DataError
from fedapp.serve.scorer import as_frame

N_ROWS = 12
SECRET = 98_760  # where a value is one, no error has its digits
UNITS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}  # per second
ZONES = (None, "UTC", "Europe/Berlin", "+05:30")
SECONDS = [SECRET, -SECRET, None, 0, 86_400, -86_399, 2**30, -(2**31), 5, 7 * 86_400, 1, -1]
OF_A_DAY = [86_399, 0, None, 1, 3_600, 43_200, 7, 9, 60, 61, 62, 59]
NAMES = pa.array(["a", None, "b", "c"] * 3)


class Unknown(pa.ExtensionType):
    """A type that no other process knows."""

    def __init__(self):
        super().__init__(pa.int64(), "tests.unknown")

    def __arrow_ext_serialize__(self):
        return b""


def counts(values, unit):
    return pa.array([None if n is None else n * UNITS[unit] for n in values], pa.int64())


def categories(values, codes="int8"):
    indices = [None if n % 4 == 3 else n % 4 % len(values) for n in range(N_ROWS)]
    return pa.DictionaryArray.from_arrays(pa.array(indices, codes), values)


def run_ends(values):
    return pa.RunEndEncodedArray.from_arrays(pa.array(range(1, N_ROWS + 1), pa.int32()), values)


extension = pa.ExtensionArray.from_storage


WHOLE = [SECRET + n % 3 for n in range(N_ROWS)]
INTS, FLAGS = pa.array(WHOLE), pa.array([True, None, False] * 4)
DATES = pa.array([None if n is None else n // 86_400 for n in SECONDS], pa.int32())
DECIMALS = [Decimal(n) / 8 for n in range(N_ROWS)]
READ = {  # columns of a family have the same codes
    "timestamps": {
        f"{unit} {zone}": counts(SECONDS, unit).cast(pa.timestamp(unit, zone))
        for unit in UNITS
        for zone in ZONES
    },
    "durations": {unit: counts(SECONDS, unit).cast(pa.duration(unit)) for unit in UNITS},
    "times": {
        str(type): counts(OF_A_DAY, type.unit).cast(pa.int32() if at < 2 else pa.int64()).cast(type)
        for at, type in enumerate(
            (pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns"))
        )
    },
    "dates": {"date32": DATES.cast(pa.date32()), "date64": DATES.cast(pa.date32()).cast("date64")},
    "decimals": {
        type.__name__: pa.array(DECIMALS, type(8, 3))
        for type in (pa.decimal32, pa.decimal64, pa.decimal128, pa.decimal256)
    },
    "numbers": {
        **{
            str(type): pa.array([n % 5 for n in range(N_ROWS)], type)
            for type in (pa.int8(), pa.uint64(), pa.float16(), pa.float64())
        },
        "run ends": run_ends(pa.array([n % 5 for n in range(N_ROWS)])),
    },
    "booleans": {"bool": FLAGS, "bool8": extension(pa.bool8(), FLAGS.cast(pa.int8()))},
    "names": {
        **{str(type): NAMES.cast(type) for type in (pa.string(), pa.large_string())},
        "string_view": NAMES.cast(pa.string_view()),
        "json": extension(pa.json_(), NAMES),
        "run ends": run_ends(NAMES),
    },
    "categories": {
        f"{type} {codes}": categories(pa.array(["a", "b", "c"], type), codes)
        for type, codes in ((pa.string(), "int8"), (pa.string_view(), "uint32"))
    },
    "categories of numbers": {
        str(type): categories(pa.array([1, 2, 3]).cast(type))
        for type in (pa.int8(), pa.float64(), pa.decimal128(22, 0))
    },
    "categories of booleans": {"bool": categories(pa.array([True, False]))},
    "categories of dates": {
        str(type): categories(
            pa.array([0, 86_400, SECRET * 86_400]).cast(pa.timestamp("s")).cast(type)
        )
        for type in (pa.date32(), pa.timestamp("s"), pa.timestamp("us", "UTC"))
    },
    "nothing": {"null": pa.nulls(N_ROWS), "float": pa.nulls(N_ROWS, pa.float64())},
}
REFUSED = {
    **{str(type): NAMES.cast(pa.binary()).cast(type) for type in (pa.binary(), pa.large_binary())},
    **{
        str(type): pa.array([[n] for n in WHOLE], type)
        for type in (pa.list_(pa.int64()), pa.list_(pa.int64(), 1), pa.large_list_view(pa.int64()))
    },
    "struct": pa.array([{"n": n} for n in WHOLE]),
    "map": pa.array([[("n", n)] for n in WHOLE], pa.map_(pa.string(), pa.int64())),
    "union": pa.UnionArray.from_dense(
        pa.array([0] * N_ROWS, pa.int8()), pa.array(range(N_ROWS), pa.int32()), [INTS]
    ),
    "interval of a calendar": pa.array([(1, n, 0) for n in WHOLE], pa.month_day_nano_interval()),
    "periods": pa.array(pd.period_range("2020-01", periods=N_ROWS, freq="M")),
    "intervals": pa.array(pd.arrays.IntervalArray.from_breaks(range(SECRET, SECRET + N_ROWS + 1))),
    "uuids": extension(
        pa.uuid(), pa.array([bytes([n]) * 16 for n in range(N_ROWS)], pa.binary(16))
    ),
    "opaque": extension(pa.opaque(pa.int64(), "t", "v"), INTS),
    "unknown": extension(Unknown(), INTS),
    "categories of durations": categories(pa.array([SECRET, 1, 2], pa.duration("s"))),
    "categories of bytes": categories(pa.array([b"98760", b"b", b"c"])),
}
LABEL = Roles(label="y")


def as_parquet(frame, folder):
    parquet.write_table(frame, folder / "t.parquet")
    return folder / "t.parquet"


def as_csv(frame, folder):
    frame.to_pandas().to_csv(folder / "t.csv", index=False)
    return folder / "t.csv"


def read_frame(frame, folder):
    return load_table(Path(write_tables(frame, folder)), LABEL)


def fitted(frame, folder):
    """The table that an estimator's ``fit`` trains on."""
    rows = PAXRegressor()._read(frame.drop(columns="y"), reset=True)
    return read_frame(rows.append_column("y", [frame["y"]]), folder)


# What other libraries make of an Arrow table, and how it is read.
DOORS = {
    "in memory": (lambda frame, _: frame, lambda frame, _: table_of_frame(frame, LABEL)),
    "Parquet": (as_parquet, lambda path, _: load_table(path, LABEL)),
    "CSV": (as_csv, lambda path, _: load_table(path, LABEL)),
    "Arrow": (lambda frame, _: frame, read_frame),
    "pandas": (lambda frame, _: frame.to_pandas(), read_frame),
    "polars": (lambda frame, _: pl.from_arrow(frame), read_frame),
    "estimator": (lambda frame, _: frame.to_pandas(), fitted),
}
# Types that these libraries do not have.
NOT_MADE = (pa.ArrowException, pl.exceptions.PolarsError, NotImplementedError, OSError, TypeError)
# What they make of these types is of another kind, or a panic.
UNLIKE = {
    "CSV": ("durations", "categories of", "booleans bool8"),
    "pandas": ("booleans bool8", "opaque", "unknown"),
    "estimator": ("booleans bool8", "opaque", "unknown"),
    "polars": ("categories of", "decimals decimal256"),
}


def frame_of(values):
    return pa.table({"x": values, "y": [0, 1] * (N_ROWS // 2)})


def made(case, values, folder):
    """By the name of every door that has the type, a frame or file, and how it is read."""
    for name, (make, read) in DOORS.items():
        if not case.startswith(UNLIKE.get(name, "-")):
            with suppress(*NOT_MADE):
                source = make(frame_of(values), folder)
                yield name, source, read


def in_json(values, table):
    """The rows as a request has them."""
    if table.categories[:1] != (None,) and table.categories:
        names = table.categories[0]
        return [None if np.isnan(code) else names[int(code)] for code in table.values[:, 0]]
    if table.kinds[0] in ("time", "duration"):
        return [None if np.isnan(days) else float(days) for days in table.values[:, 0]]
    rows = values.to_pylist()
    rows = [float(row) if isinstance(row, Decimal) else row for row in rows]
    return [row.isoformat() if hasattr(row, "isoformat") else row for row in rows]


@pytest.mark.parametrize("family", READ)
def test_a_type_has_the_same_codes_by_every_door_and_in_every_unit(family, tmp_path):
    """In training, in a prediction and served."""
    expected, names = None, set()
    for type, values in READ[family].items():
        for name, source, read in made(f"{family} {type}", values, tmp_path):
            table = read(source, tmp_path)
            got = table.kinds[0], table.categories[:1], table.values[:, 0].tolist()
            expected = expected or got
            assert repr(got) == repr(expected), (type, name)
            path = source if isinstance(source, Path) else write_tables(source, tmp_path)
            how = PLAIN, table.categories[:1], table.kinds[:1]
            predicted = read_columns_of(str(path), ("x",), NO_ROLES, "", *how)
            np.testing.assert_array_equal(predicted.values[:, 0], table.values[:, 0])
            names.add(name)
    assert len(names) >= 6 or family.startswith("categories of")
    rows = as_frame({"x": in_json(values, table)}, {"x": table.kinds[0]})
    model = Columns.of_model(("x",), table.categories[:1], PLAIN, table.kinds[:1])
    served = columns_of_frame(rows, model, NO_ROLES).values[:, 0]
    np.testing.assert_allclose(served, table.values[:, 0], rtol=1e-6)


@pytest.mark.parametrize("type", REFUSED)
def test_a_type_without_codes_is_refused_by_its_column_and_without_a_value(type, tmp_path):
    names = set()
    for name, source, read in made(type, REFUSED[type], tmp_path):
        if name == "CSV":  # whatever it is, it is text there
            continue
        with pytest.raises(DataError, match=r"'x'.* (numbers|drop-columns)") as caught:
            read(source, tmp_path)
        whole = "".join(traceback.format_exception(caught.value))
        assert str(SECRET)[:4] not in whole.replace(f"SECRET = {SECRET}", "")
        names.add(name)
    assert names >= {"in memory", "Arrow"}
    if "Parquet" in names:
        columns = describe(str(tmp_path / "t.parquet"), LABEL, PLAIN).columns
        assert [column.refused for column in columns] == [True, False]


@pytest.mark.parametrize("type", REFUSED)
def test_rows_without_a_label_are_dropped_whatever_the_other_columns_are(type, tmp_path):
    roles = Roles(label="y", drop=("x",), drop_unlabelled=True)
    labels = [1, None, 0] * (N_ROWS // 3)
    frame = pa.table({"x": REFUSED[type], "a": range(N_ROWS), "y": labels})
    assert table_of_frame(frame, roles).n_rows == N_ROWS * 2 // 3
    with suppress(*NOT_MADE):
        assert load_table(as_parquet(frame, tmp_path), roles).n_rows == N_ROWS * 2 // 3


def test_texts_of_times_do_not_depend_on_units_or_zones():
    """Of labels and ids."""
    roles = Roles(label="x", id_column="y")
    tables = [
        table_of_frame(frame_of(values.fill_null(0)), roles)
        for values in READ["timestamps"].values()
    ]
    assert len({tuple(table.labels) for table in tables}) == 1
    days = pa.array([0, 86_400] * 6, pa.timestamp("s"))
    for unit in UNITS:
        table = table_of_frame(frame_of(days.cast(pa.timestamp(unit))), Roles(id_column="x"))
        assert table.ids[:2].tolist() == ["1970-01-01", "1970-01-02"]
    far = pa.array([2**60] * N_ROWS, pa.timestamp("s"))
    refused = {"dates beyond the y": far, "durations: write": READ["durations"]["s"]}
    for text, values in refused.items():
        with pytest.raises(DataError, match=f"'x' must be whole numbers or text, got {text}"):
            table_of_frame(frame_of(values), Roles(label="x"))


def test_what_else_arrow_raises_names_the_column_and_no_value(monkeypatch):
    def raising(*_):
        raise pa.ArrowInvalid(str(SECRET))

    monkeypatch.setattr("fedapp.data.convert._converted", raising)
    with pytest.raises(
        DataError, match="'x' must be read in one way, got values that Ar"
    ) as caught:
        table_of_frame(frame_of(NAMES), NO_ROLES)
    assert str(SECRET) not in "".join(traceback.format_exception(caught.value))


@pytest.mark.parametrize(
    "column", [[SECRET, f"{SECRET}x"], [SECRET + 1j] * 2, pd.arrays.SparseArray([SECRET, 0])]
)
def test_a_column_of_a_frame_that_arrow_refuses_is_named_without_a_value(column):
    rule = "column 'x' of a frame must be of one type that Arrow has, got another"
    with pytest.raises(DataError, match=f"^{rule}") as caught:
        as_arrow(pd.DataFrame({"x": column}))
    assert str(SECRET) not in f"{caught.value}{caught.value.outside}"
    assert "'x'" not in caught.value.outside


# Names of classes are those of the file


FLAGGED = {"a": [0.5, 1.5, 2.5, 3.5] * 5, "y": [True, False, True, False] * 5}


@pytest.mark.parametrize("is_text", [False, True])
@pytest.mark.parametrize("door", ["CSV", "Parquet", "Arrow", "pandas", "polars"])
def test_true_and_false_are_names_of_classes_by_every_door(door, is_text, tmp_path):
    make, read = DOORS[door]
    frame = pa.table(FLAGGED | {"y": list(map(str, FLAGGED["y"]))} if is_text else FLAGGED)
    labels = read(make(frame, tmp_path), tmp_path).labels
    for objective in ("auto", "binary:logistic", "multi:softprob"):
        assert class_names(labels, objective) == ("False", "True")
    assert class_names(labels, "reg:squarederror") == ()
    assert class_ids(labels, ()).tolist() == [1, 0, 1, 0] * 5
    assert number_labels(labels, "binary:logistic", 20, "False")[1].tolist() == [0, 1, 0, 1] * 5


def test_true_and_false_are_grades_of_ranked_rows_and_are_aggregated_as_1_and_0():
    frame = pa.table(FLAGGED | {"q": [1] * 20, "id": [n // 2 for n in range(20)]})
    ranked = table_of_frame(frame, Roles(label="y", qid="q", drop=("id",)))
    assert ranked.labels.tolist() == [1, 0, 1, 0] * 5
    reader = replace(PLAIN, declared=tuple(Declared(name, aggregate="max") for name in "ay"))
    aggregated = table_of_frame(frame, Roles(label="y", id_column="id", drop=("q",)), reader)
    assert class_names(aggregated.labels, "binary:logistic") == ("1",)


def test_a_run_on_true_and_false_names_its_classes_and_predictions_so(own_folder):
    frame = pd.DataFrame(FLAGGED)
    run = fedapp.run(
        "pax", data=frame, label="y", positive_label="False", parties=1, num_boost_round=1
    )
    assert run.classes == ("True", "False")
    assert set(run.predict(frame)) <= {"True", "False"}
    model = PAXClassifier(n_estimators=1, parties=1).fit(frame[["a"]], frame["y"])
    assert model.classes_.tolist() == [False, True]
    assert model.predict(frame[["a"]]).dtype == bool
