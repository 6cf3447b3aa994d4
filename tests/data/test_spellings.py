"""The same table in two spellings: equal codes, or a refusal that names both."""

import json
import unicodedata
from dataclasses import replace
from datetime import date

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import fedapp
from clients.handshake import look
from fedapp.data.labels import class_names
from fedapp.data.predictions import read_columns_of
from fedapp.data.read import load_table, table_of_frame
from fedapp.data.schema import Declared, Reader, Roles
from fedapp.errors import ConfigError, DataError, FedappError
from fedapp.messages.handshake import HelloRequest
from fedapp.runs.tables import check_tables
from fedapp.settings import load_settings
from fedapp.site.settings import SiteConfig
from tests.serving import Client
from tests.tables import write_rows

SHORT = {"num_boost_round": 2, "max_depth": 2}
SECUREBOOST = {**SHORT, "secureboost": {"key_bits": 512, "insecure_small_key": True}}


def composed(text):
    return unicodedata.normalize("NFC", text)


def decomposed(text):
    return unicodedata.normalize("NFD", text)


DAYS = [date(2019, 1, 4), date(2020, 5, 15), date(2024, 3, 15)]
TEXTS = [day.isoformat() for day in DAYS]
CUPS = ["café", "tea", "Zürich"]
SPELLINGS = {  # values of one meaning, as texts of a CSV file or typed
    "whole": (
        ["3", "998", "4672"],
        ["3.0", "998.00", "4672."],
        [" 3", "998 ", "4.672e3"],
        [3, 998, 4672],
        [3.0, 998.0, 4672.0],
        pa.array(["3", "998", "4672"]).cast(pa.decimal128(9, 2)),
    ),
    "flag": (
        *(["yes", "no", "yes"], ["Y", "N", "Y"], ["true", "false", "true"], [True, False, True]),
        pa.array(["yes", "no", "yes"]),
    ),
    "day": (TEXTS, DAYS, pa.array(DAYS).cast(pa.timestamp("us")), pa.array(TEXTS)),
    "name": (
        *(CUPS, [*map(decomposed, CUPS)], [f" {name}" for name in CUPS], pa.array(CUPS)),
        pa.array([*map(decomposed, CUPS)], pa.large_string()),
        pa.array(CUPS).dictionary_encode(),
    ),
}


@pytest.mark.parametrize("meaning", SPELLINGS)
def test_spellings_of_one_meaning_have_the_same_codes_also_to_predict(tmp_path, meaning):
    first = None
    for number, values in enumerate(SPELLINGS[meaning]):
        columns = {"f": values, "x": range(3)}
        if isinstance(values, list) and isinstance(values[0], str):
            path = write_rows(tmp_path / f"{number}.csv", columns)
        else:
            pq.write_table(pa.table(columns), path := tmp_path / f"{number}.parquet")
        table = load_table(path)
        first = first or table
        assert (table.kinds, table.categories) == (first.kinds, first.categories)
        given = {"categories": first.categories, "kinds": first.kinds}
        predicted = read_columns_of(str(path), first.columns, Roles(), **given)
        for found in (table, predicted):
            np.testing.assert_array_equal(found.values, first.values)


def test_ids_in_two_spellings_match_or_are_told(tmp_path):
    numbers, noted, other = [7, 21, 300, 1000, 4672], set(), set()
    for way in ("{}", "{}.0", " {} ", "{}e0", "{:05d}", '"{:,}"'):
        columns = {"id": [way.format(number) for number in numbers], "x": range(5)}
        table = load_table(write_rows(tmp_path / "rows.csv", columns), Roles(id_column="id"))
        if any("zeros before the number" in note.text(True) for note in table.notes):
            noted.add(way)
        if table.ids.tolist() != [*map(str, numbers)]:  # few rows match, which the run tells
            other.add(way)
    assert (noted, other) == ({"{:05d}", '"{:,}"'}, {"{:05d}", '"{:,}"', "{}e0"})


def test_other_kinds_are_refused_in_training_prediction_and_requests(tmp_path, own_folder):
    rows, same, other = np.arange(24), {}, {}
    days = pa.array(rows * 7 + 17_900, pa.int32())
    for party, shift in (("p1", 0.0), ("p2", 0.5)):
        columns = {"label": rows % 2, "f1": days.cast(pa.date32()), "f2": rows % 5 + shift}
        same[party] = pa.table(columns)
        other[party] = pa.table({**columns, "f1": days} if party == "p2" else columns)
    given = {"label": "label", **SHORT}
    rule = "column 'f1' must be of one kind at all parties, got dates at p1, numbers at p2"
    with pytest.raises(DataError, match=rule):
        fedapp.run("pax", data=other, **given)
    run = fedapp.run("pax", data=same, **given)
    with pytest.raises(DataError, match="'f1' must be dates, as in the model, got numbers"):
        run.predict(other["p2"])
    status, answer = Client(run.path).score({"row": {"f1": 45366, "f2": 0.5}})
    assert status == 422
    assert "'f1' must hold dates, or null, got 45366" in answer["error"]
    initial = fedapp.run("pax", data=dict.fromkeys(same, other["p2"]), **given)
    with pytest.raises(ConfigError, match="'f1' must be numbers, as in init_model, got dates"):
        fedapp.run("pax", data=same, init_model=initial.path, **given)


def test_a_party_may_have_labels_alone_and_a_part_keeps_the_kinds_of_its_columns(own_folder):
    rows, ids = np.arange(60), [f"c{row}" for row in range(60)]
    days = pa.array(rows * 7 % 60, pa.int32()).cast(pa.date32())
    bank = pa.table({"id": ids, "since": days, "x": rows % 7})
    labels = {"id": ids, "y": rows % 2}
    runs = [
        fedapp.run("secureboost", data=data, label="y", id="id", **SECUREBOOST)
        for more in ({}, {"none": np.zeros(60)})
        if (data := {"clinic": pa.table({**labels, **more}), "bank": bank})
    ]
    assert runs[0].summary["metrics"] == runs[1].summary["metrics"]
    assert len(runs[1].predict_proba(data, id="id")) == 60
    numbers = bank.set_column(1, "since", days.cast(pa.int32()))
    with pytest.raises(FedappError, match="must be dates, as in the model, got numbers"):
        runs[1].predict_proba({**data, "bank": numbers}, id="id")


# The inputs of which people reported that they are read in two ways


@pytest.mark.parametrize(
    "labels",
    [
        *(["01", "1", "2"], ["10E4", "1E5"], ["NA", "1"], ["true", "false"]),
        *([str(10**16 + last) for last in (40, 41, 47)], [*map(decomposed, CUPS)]),
    ],
)
def test_classes_have_the_names_of_the_file_and_one_has_one(labels):
    frame, roles = pa.table({"x": range(len(labels)), "y": labels}), Roles(label="y")
    names = class_names(table_of_frame(frame, roles).labels, "auto")
    assert sorted(names) == sorted(map(composed, labels))
    twice = pa.table({"x": range(3), "y": ["1", "1.0", "0"]})
    with pytest.raises(DataError, match="label must name a class in one way, got one number writ"):
        class_names(table_of_frame(twice, roles).labels, "auto")


COUNTRIES = ["DE", "NA", ""] * 30


@pytest.mark.parametrize("by", ["schema", "text", "frame"])
def test_na_is_a_name_where_a_schema_or_a_frame_says_so(tmp_path, by):
    columns = {"k": COUNTRIES, "x": range(90)}
    path = write_rows(tmp_path / "k.csv", columns)
    declared = Declared("k", type="category", categories=("DE", "NA"))
    table = load_table(path, reader=Reader(declared=(declared,) if by == "schema" else ()))
    if by == "frame":
        table = table_of_frame(pa.table({**columns, "k": [name or None for name in COUNTRIES]}))
    note = "feature column 'k' has NA in 30 rows, read as missing: among the categories of a schema"
    is_told = any(each.text(True).startswith(note) for each in table.notes)
    n_missing = np.isnan(table.values[:, 0]).sum()
    assert (is_told, n_missing) == ((True, 60) if by == "text" else (False, 30))


def test_a_name_typed_in_another_form_of_unicode_is_the_same_column(tmp_path, own_folder):
    columns = {decomposed("größe"): range(40), decomposed("übrig"): [0, 1, 2, 3] * 10}
    path = write_rows(tmp_path / "rows.csv", {**columns, "y": [0, 1] * 20})
    run = fedapp.run("pax", data=path, parties=2, label="y", drop_columns="übrig", **SHORT)
    assert run.model.columns == ("größe",)
    client = Client(run.path)
    found = [client.score({"row": {form("größe"): 3}}) for form in (composed, decomposed)]
    assert [status for status, _ in found] == [200, 200]
    assert found[0][1]["scores"] == found[1][1]["scores"]


# Found by trying


@pytest.mark.parametrize("values", [["1.0", "2.0", "9.0"], [1.0, 2.0, 9.0, float("nan")]])
def test_codes_and_missing_values_of_a_schema_are_numbers_however_written(tmp_path, values):
    codes = (("1", "A"), ("2", "B"))
    reader = Reader(declared=(Declared("c", type="category", codes=codes, missing=("9",)),))
    columns = {"c": values, "x": range(len(values))}
    if "9.0" in values:
        table = load_table(write_rows(tmp_path / "rows.csv", columns), reader=reader)
    else:
        table = table_of_frame(pa.table(columns), reader=reader)
    assert table.categories == (("A", "B"), None)
    assert np.isnan(table.values[:, 0]).tolist() == [False, False, *[True] * (len(values) - 2)]


BEYOND = {"id": [2.0**53, 1.0], "x": [1, 2]}
IN_ONE_WAY = "feature column '{}' must be read in one way, got "


@pytest.mark.parametrize(
    ("columns", "roles", "declared", "rule"),
    [
        (BEYOND, Roles(id_column="id"), (), r"got floats beyond 2\^53, which are not e"),
        (
            BEYOND,
            Roles(),
            (Declared("id", type="category"),),
            IN_ONE_WAY.format("id") + "floats beyond .*: store them as whole",
        ),
        (
            {"v": ["a", "1", "1.0"]},
            Roles(),
            (),
            IN_ONE_WAY.format("v") + "one number written as 1 and as 1.0: wr",
        ),
    ],
)
def test_values_that_name_two_things_are_refused_with_a_way_out(columns, roles, declared, rule):
    with pytest.raises(DataError, match=rule):
        table_of_frame(pa.table(columns), roles, Reader(declared=declared))


def test_commas_are_thousands_only_where_a_column_is_used_and_not_declared(tmp_path):
    path, roles = tmp_path / "rows.csv", Roles(label="y")
    path.write_text("x; c;y\n" + "".join(f"{n};1,{n};{n % 2}\n" for n in range(100, 150)))
    with pytest.raises(DataError, match="'c' must have decimal commas"):
        load_table(path, roles, Reader(decimal=","))
    assert load_table(path, replace(roles, drop=("c",)), Reader(decimal=",")).columns == ("x",)
    declared = Reader(decimal=",", declared=(Declared("c", type="number"),))
    of_model = read_columns_of(str(path), ["x", "c"], roles, reader=Reader(decimal=","))
    for table in (load_table(path, roles, declared), of_model):
        assert table.values[0, 1] == np.float32(1.1)


def test_ordinals_in_another_order_are_of_another_kind(tmp_path):
    given = {"data": "", "schema": ""}
    for name, order in (("p1", ["low", "mid", "high"]), ("p2", ["high", "mid", "low"])):
        columns = {"k": order * 20, "x": range(60), "y": [0, 1] * 30}
        given["data"] += f"{name}={write_rows(tmp_path / f'{name}.csv', columns)},"
        (schema := tmp_path / f"{name}.toml").write_text(
            f'[columns.k]\ntype = "ordinal"\norder = {json.dumps(order)}\n'
        )
        given["schema"] += f"{name}={schema},"
    given = {name: value.strip(",") for name, value in given.items()}
    order = r"names in the order of a schema \(\w+\)"
    with pytest.raises(DataError, match=f"got {order} at p1, {order} at p2"):
        check_tables(load_settings({**given, "label": "y", "parties": 2}))


@pytest.mark.parametrize("how", [{"rounded": True}, {"epsilon": 1.0}, {}])
def test_sites_that_send_only_sums_do_not_tell_that_numbers_are_0_or_1(write_table, how):
    config = SiteConfig("a", str(write_table(flag=[0, 1] * 20)), label="y")
    request = HelloRequest("binary:logistic", 0.2, 0.2, 0, how.pop("rounded", False), **how)
    is_told = "binary" in look(config, request)[0].kinds
    assert is_told == (not request.rounded and not request.epsilon)
