"""Codes, times and events that are written otherwise than a column of numbers: what is said."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from fedapp.data.describe import describe
from fedapp.data.labels import class_names
from fedapp.data.read import load_table
from fedapp.data.schema import Declared, Reader, Roles, read_schema
from fedapp.errors import DataError

CATEGORY = 'declare type = "category" in a schema'
MISSING = "list it in a schema as missing"
CODES = "numbers written as 007, 0x1F or 1E2, read as 7, 31 and 100: where they are codes, let a"
ZONES = "times with and without a zone, of which the latter are read as UTC"


@pytest.mark.parametrize(
    ("values", "first"),
    [
        (["E11.9", "250", "I10"], CATEGORY),
        (["250", "401", "V58.1", "272"], CATEGORY),
        (["0x1F", "1.5"], CATEGORY),
        (["1", "2", "-", "unknown"], MISSING),
        (["1", "2", "3", "unknown"], "correct them"),
        (["12 kg", "3"], MISSING),
    ],
)
def test_codes_among_numbers_are_categories_before_they_are_missing(write_table, values, first):
    path = write_table(c=[values[row % len(values)] for row in range(40)])
    with pytest.raises(DataError, match=r"first '.*' in line \d: " + first):
        load_table(path, Roles(label="y"))


def test_codes_among_numbers_of_the_label_are_classes_before_they_are_missing(write_table):
    path = write_table(y=["250", "401", "V58", "272"] * 10)
    table = load_table(path, Roles(label="y"))
    with pytest.raises(DataError, match=r"as 'V58'; where they are names .*correct"):
        class_names(table.labels, "auto")


@pytest.mark.parametrize(
    ("values", "note"),
    [
        (["01234", "02345", "10001"], CODES),
        (["0x1F", "0x2A"], CODES),
        (["0x1f", "10"], CODES),
        (["1E2", "2e3", "115"], CODES),
        ([" 007", "8"], CODES),
        (["0", "0.5", "10"], ""),
        (["1e-05", "2.5E3", "1e+05"], ""),
        (["2024-01-05T10:00", "2024-01-06T10:00Z"], ZONES),
        (["2024-01-05", "2024-01-06T10:00+02:00"], ZONES),
        (["2024-01-05T10:00Z", "2024-01-06T10:00+02:00"], ""),
        (["2024-01-05T10:00", "2024-01-06"], ""),
    ],
)
def test_numbers_written_as_codes_and_times_of_two_kinds_are_noted(write_table, values, note):
    path = write_table(c=[values[row % len(values)] for row in range(40)])
    table = load_table(path, Roles(label="y"))
    described = describe(str(path), Roles(label="y"), Reader())
    warned = [each.text(True) for each in table.notes if not each.is_fact]
    for notes in (warned, described.warnings):
        for text in (CODES, ZONES):
            found = any(f"feature column 'c' has {text}" in each for each in notes)
            assert found == (text == note), notes


def test_a_column_that_a_schema_declares_is_not_noted(write_table):
    path = write_table(c=["01234", "2"] * 20)
    for type, first in (("category", 0), ("number", 1234)):
        table = load_table(path, Roles(label="y"), Reader(declared=(Declared("c", type=type),)))
        assert (table.notes, table.values[0, -1]) == ((), first)


EVENTS = [("yes", "no"), ("dead", "alive"), ("2", "1")]


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
@pytest.mark.parametrize("values", EVENTS, ids=str)
def test_events_in_words_come_with_the_way_to_read_them(tmp_path, values, suffix):
    event, other = values
    frame = pa.table(
        {
            "x": np.arange(40.0),
            "time": np.arange(1.0, 41),
            "event": [event if row % 3 else other for row in range(40)],
        }
    )
    path = tmp_path / f"rows.{suffix}"
    write = pyarrow.parquet.write_table if suffix == "parquet" else pa.csv.write_csv
    write(frame, path)
    roles = Roles(label="time", event="event")
    with pytest.raises(DataError, match=r"let a schema have codes .*\[columns\.event\.codes\]"):
        load_table(path, roles)
    schema = tmp_path / "schema.toml"
    schema.write_text(f'[columns.event.codes]\n{event} = "1"\n{other} = "0"\n')
    table = load_table(path, roles, read_schema(schema).reader())
    assert table.labels is not None
    assert np.array_equal(table.labels > 0, np.arange(40) % 3 > 0)


def test_a_weight_that_is_no_number_is_not_offered_as_a_category(write_table):
    path = write_table(w=["heavy", 1] * 20)
    with pytest.raises(DataError, match=r"first 'heavy' in line 2: correct them$"):
        load_table(path, Roles(label="y", weight="w"))
