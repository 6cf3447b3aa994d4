"""The same table in two spellings, one at each party: equal codes, or a refusal that names both.

``SPELLINGS`` has what a column means and how it may be written. Trees are functions of the codes
that are compared here, so hundreds of pairs of tables can be tried; some are trained with.
"""

import json
import tempfile
import unicodedata
from collections.abc import Callable
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedapp
from fedapp.data.labels import label_texts, number_written
from fedapp.data.predictions import read_columns_of
from fedapp.data.read import load_table, table_of_frame
from fedapp.data.schema import Declared, Reader, Roles
from fedapp.errors import ConfigError, DataError, FedappError
from fedapp.runs.tables import check_tables, stacked_tables
from fedapp.settings import load_settings
from tests.serving import Client

N_ROWS = 24
FIRST_DAY = date(2019, 1, 1)
OTHERS = np.random.default_rng(3).normal(size=2 * N_ROWS).round(3)


class Spelling(NamedTuple):
    """How values of one meaning are written: as text of a CSV file, or typed in a Parquet file."""

    of: Callable[[Any], Any]
    type: pa.DataType | None = None  # None: a CSV file
    suffix: str = ""
    cast: bool = False  # whether Arrow must convert values to the type

    def column(self, values):
        return [None if value is None else self.of(value) for value in values]


def composed(text):
    return unicodedata.normalize("NFC", text)


def decomposed(text):
    return unicodedata.normalize("NFD", text)


def day(number):
    return FIRST_DAY + timedelta(days=number)


SPELLINGS = {
    "whole": {
        "plain": Spelling(str),
        "decimal": Spelling(lambda n: f"{n}.0"),
        "padded": Spelling(lambda n: f"{n:05d}"),
        "blanks": Spelling(lambda n: f" {n} "),
        "thousands": Spelling(lambda n: f'"{n:,}"'),
        "power": Spelling(lambda n: f"{n}e0"),
        "int64": Spelling(int, pa.int64()),
        "float64": Spelling(float, pa.float64()),
        "decimal128": Spelling(str, pa.decimal128(9, 2), cast=True),
        "text": Spelling(str, pa.string()),
        "padded text": Spelling(lambda n: f"{n:05d}", pa.string()),
        "libsvm": Spelling(str, suffix=".libsvm"),
    },
    "flag": {
        "yes": Spelling(lambda is_one: "yes" if is_one else "no"),
        "Y": Spelling(lambda is_one: "Y" if is_one else "N"),
        "true": Spelling(lambda is_one: str(is_one).lower()),
        "1 or 0": Spelling(lambda is_one: str(int(is_one))),
        "1.0 or 0.0": Spelling(lambda is_one: str(float(is_one))),
        "1 or 2": Spelling(lambda is_one: "1" if is_one else "2"),
        "bool": Spelling(bool, pa.bool_()),
        "int8": Spelling(int, pa.int8()),
        "text": Spelling(lambda is_one: "yes" if is_one else "no", pa.string()),
        "2 of text": Spelling(lambda is_one: "1" if is_one else "2", pa.string()),
    },
    "day": {
        "ISO": Spelling(lambda n: day(n).isoformat()),
        "yyyymmdd": Spelling(lambda n: day(n).strftime("%Y%m%d")),
        "Excel": Spelling(lambda n: str((day(n) - date(1899, 12, 30)).days)),
        "German": Spelling(lambda n: day(n).strftime("%d.%m.%Y")),
        "date32": Spelling(day, pa.date32()),
        "timestamp": Spelling(day, pa.timestamp("us"), cast=True),
        "text": Spelling(lambda n: day(n).isoformat(), pa.string()),
        "duration": Spelling(lambda n: timedelta(days=n), pa.duration("s")),
    },
    "name": {
        "plain": Spelling(composed),
        "NFD": Spelling(decomposed),
        "blanks": Spelling(lambda name: f" {name}"),
        "text": Spelling(composed, pa.string()),
        "NFD text": Spelling(decomposed, pa.large_string()),
        "coded": Spelling(composed, pa.dictionary(pa.int8(), pa.string())),
    },
}
DRAWN = {
    "whole": st.integers(0, 3) | st.integers(998, 1003) | st.sampled_from([4672, 10**5]),
    "flag": st.booleans(),
    "day": st.integers(0, 2000),
    "name": st.sampled_from(["café", "Zürich", "tea", "Ångström", "NA", "null"]),
}
# No table tells apart two kinds of numbers: days, or 0 and 1 beside 1 and 2. Names of categories
# are any texts, so what they mean is known of numbers and of Unicode's forms only.
NUMBERED = [
    {"yyyymmdd", "Excel"},
    *({"1 or 2", other} for other in ("1 or 0", "1.0 or 0.0", "int8")),
]
PAIRS = [
    (meaning, role, a, b)
    for meaning, ways in SPELLINGS.items()
    for role in ("feature", "label", *(["category"] if meaning in ("whole", "name") else []))
    for a in ways
    for b in ways
    if role != "feature" or {a, b} not in NUMBERED
]


def write(path, way, role, values, others):
    """Write a table whose column f1, or other column of the role, is written in one way."""
    column, n_rows = way.column(values), len(values)
    labels = [str(row % 2) for row in range(n_rows)]
    names = {"feature": "f1", "category": "f1", "label": "label", "id": "id"}
    if way.suffix:
        y = column if role == "label" else labels
        f1 = range(n_rows) if role == "label" else column
        rows = zip(y, f1, others, strict=True)
        path = path.with_suffix(way.suffix)
        path.write_text("".join(f"{a} 1:{b} 2:{c}\n" for a, b, c in rows))
        return path
    columns = {
        "label": labels,
        "f1": [str(row) for row in range(n_rows)],
        "f2": [str(other) for other in others],
    }
    columns |= {"id": [f"row {row}" for row in range(n_rows)]} if role == "id" else {}
    if way.type is None:
        columns[names[role]] = ["" if value is None else value for value in column]
        lines = [",".join(columns), *map(",".join, zip(*columns.values(), strict=True))]
        path = path.with_suffix(".csv")
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path
    typed = {
        "label": pa.array(map(int, labels)),
        "f1": pa.array(range(n_rows)),
        "f2": pa.array(others),
    }
    typed |= {"id": pa.array(columns["id"])} if role == "id" else {}
    typed[names[role]] = pa.array(column, None if way.cast else way.type).cast(way.type)
    path = path.with_suffix(".parquet")
    pq.write_table(pa.table(typed), path)
    return path


class Outcome(NamedTuple):
    """What both parties' rows become, or why they do not."""

    values: Any
    labels: Any
    notes: tuple[str, ...]
    error: str = ""


def outcome(folder, ways, role, parts):
    """The codes of two parties whose tables are written in two ways."""
    paths = [
        write(folder / f"p{number}-{hash(way)}", way, role, values, OTHERS[at : at + N_ROWS])
        for number, (way, values, at) in enumerate(zip(ways, parts, (0, N_ROWS), strict=True), 1)
    ]
    given = {"data": f"p1={paths[0]},p2={paths[1]}", "label": "label"}
    given |= {"strategy": "pax", "parties": "2", "test-fraction": "0"}
    given |= {"valid-fraction": "0"}
    if role == "category":
        schema = '[columns.f1]\ntype = "category"\n'
        if names := {value for values in parts for value in values if isinstance(value, str)}:
            schema += f"categories = {sorted(names)}\n"
        (folder / "schema.toml").write_text(schema, encoding="utf-8")
        given["schema"] = str(folder / "schema.toml")
    try:
        run = load_settings(given)
        notes = check_tables(run)
        table, _ = stacked_tables(run)
    except (ConfigError, DataError) as error:
        return Outcome(None, None, (), str(error))
    assert table.labels is not None
    names = [] if not table.categories else [n or () for n in table.categories]
    values = [
        [names[at][int(code)] if names and names[at] and code == code else code for code in row]
        for at, row in enumerate(table.values.T.tolist())
    ]
    return Outcome(values, label_texts(table.labels).tolist(), tuple(notes))


@pytest.fixture(scope="module")
def folder():
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.mark.slow
@given(pair=st.sampled_from(PAIRS), data=st.data())
@settings(max_examples=50)
def test_two_spellings_are_the_same_table_or_are_refused(folder, pair, data):
    meaning, role, *names = pair
    first, second = (SPELLINGS[meaning][name] for name in names)
    values = DRAWN[meaning] if role == "label" else DRAWN[meaning] | st.none()
    if role != "category":  # only a schema makes these names in a CSV file
        values = values.filter(lambda value: value not in ("NA", "null"))
    pool = data.draw(st.lists(values, min_size=2, max_size=4, unique=True))
    parts = [
        (pool + data.draw(st.lists(st.sampled_from(pool), min_size=N_ROWS, max_size=N_ROWS)))[
            :N_ROWS
        ]
        for _ in range(2)
    ]
    found = outcome(folder, [first, second], role, parts)
    name = "label" if role == "label" else "f1"
    if name in found.error and "p2" in found.error:
        return
    same = outcome(folder, [first, first], role, parts)
    if found.error:
        assert same.error or outcome(folder, [second] * 2, role, parts).error
    elif not same.error:
        assert str(found.values) == str(same.values)
        assert found.labels == same.labels


@pytest.mark.slow
@given(pair=st.sampled_from([pair for pair in PAIRS if pair[1] != "label"]), data=st.data())
@settings(max_examples=40)
def test_a_table_to_predict_is_read_as_in_training_or_is_refused(folder, pair, data):
    meaning, role, *names = pair
    # In a CSV file only a schema makes names of these; a column of nothing else has no value.
    words = () if role == "category" else ("NA", "null")
    drawn = DRAWN[meaning].filter(lambda value: value not in words)
    pool = data.draw(st.lists(drawn, min_size=2, max_size=4, unique=True))
    values = (pool * N_ROWS)[:N_ROWS]
    one, names_of = Declared("f1"), tuple(sorted(map(composed, pool))) if meaning == "name" else ()
    if role == "category":
        one = Declared("f1", type="category", categories=names_of)
    reader, roles = Reader(declared=(one,)), Roles(label="label")
    paths = [
        write(folder / f"predict-{number}", SPELLINGS[meaning][name], role, values, OTHERS[:N_ROWS])
        for number, name in enumerate(names)
    ]
    try:
        trained = load_table(paths[0], roles, reader)
        load_table(paths[1], roles, reader)
    except DataError:
        return  # refused whatever the model
    model = trained.columns, roles, "", reader, trained.categories, trained.kinds
    error, found = "", None
    try:
        found = read_columns_of(str(paths[1]), *model)
    except DataError as refused:
        error = str(refused)
    if found is None:
        assert "'f1'" in error
        return
    is_told = any("no category of the model" in note.rule for note in found.notes)
    assert is_told or np.array_equal(found.values, trained.values, equal_nan=True)


@pytest.mark.parametrize(
    ("a", "b"), [(a, b) for a in SPELLINGS["whole"] for b in SPELLINGS["whole"]]
)
def test_ids_in_two_spellings_match_or_are_told(tmp_path, a, b):
    ways = [SPELLINGS["whole"][name] for name in (a, b)]
    if any(way.suffix for way in ways):
        pytest.skip("a LIBSVM file has no ids")
    numbers = [7, 21, 300, *range(1000, 1000 + N_ROWS)]
    others = np.arange(len(numbers)) / 8
    tables = [
        load_table(write(tmp_path / str(at), way, "id", numbers, others), Roles("label", "id"))
        for at, way in enumerate(ways)
    ]
    ids = [set() if table.ids is None else set(table.ids.tolist()) for table in tables]
    notes = [note.text(True) for table in tables for note in table.notes]
    told = any("zeros before the number" in note for note in notes)
    # Of what no number is written like, few rows match, which the run tells.
    is_text = {a, b} & {"thousands", "power"}
    assert ids[0] == ids[1] or told or is_text


# Some are trained with, and predicted with.


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where runs go


HORIZONTAL = ("pax", "bagging", "cyclic", "fedavg-linear", "fedxgbllr")
KEY = {"key_bits": 512, "insecure_small_key": True}
OF_METHOD = {
    "pax": {"num_boost_round": 2, "max_depth": 2},
    "bagging": {"num_boost_round": 2, "max_depth": 2},
    "cyclic": {"num_boost_round": 2, "max_depth": 2},
    "fedavg-linear": {"fedavg_linear": {"rounds": 2}},
    "fedxgbllr": {"fedxgbllr": {"rounds": 1, "trees": 2}},
    "secureboost": {"num_boost_round": 2, "max_depth": 2, "secureboost": KEY},
    "federated-forest": {"federated_forest": {"trees": 2, "max_depth": 3}},
}
POOLS = {
    "flag": [True, False],
    "day": [3, 500, 1900],
    "name": ["café", "tea", "Zürich"],
}


def tables(folder, ways, meaning):
    """A table of each party whose column f1 is written in its way."""
    rng, found = np.random.default_rng(5), {}
    for number, name in enumerate(ways):
        values = [POOLS[meaning][at] for at in rng.integers(0, len(POOLS[meaning]), N_ROWS)]
        others = OTHERS[number * N_ROWS :][:N_ROWS]
        path = folder / f"p{number + 1}-{'-'.join(ways)}"
        found[f"p{number + 1}"] = write(path, SPELLINGS[meaning][name], "feature", values, others)
    return found


@pytest.mark.slow
@pytest.mark.by_default("pax-flag-yes-1 or 0", "pax-day-ISO-timestamp", "pax-name-*")
@pytest.mark.parametrize(
    ("method", "meaning", "a", "b"),
    [
        *(("pax", "flag", "yes", other) for other in ("bool", "1 or 0", "true", "text")),
        *(("pax", "day", "ISO", other) for other in ("date32", "timestamp", "text")),
        ("pax", "name", "plain", "NFD text"),
        *(
            pytest.param(method, "name", "plain", "NFD text", marks=pytest.mark.slow)
            for method in HORIZONTAL[1:]
        ),
    ],
)
def test_models_of_two_spellings_are_equal_and_predict_alike(tmp_path, method, meaning, a, b):
    if method == "fedxgbllr":
        pytest.importorskip("torch")
    data = [tables(tmp_path, ways, meaning) for ways in ((a, a), (a, b))]
    runs = [fedapp.run(method, data=each, label="label", **OF_METHOD[method]) for each in data]
    texts = [(run.path / "model.json").read_text() for run in runs]
    assert texts[0] == texts[1]
    scores = [runs[0].predict_proba(each["p2"]) for each in data]
    assert np.array_equal(*scores)


@pytest.mark.by_default("flag-yes-*", "day-date32-*")
@pytest.mark.parametrize(
    ("meaning", "a", "b", "kinds"),
    [
        ("flag", "yes", "1 or 2", ("yes or no", "numbers")),
        ("flag", "bool", "1 or 2", ("yes or no", "numbers")),
        ("day", "ISO", "yyyymmdd", ("dates", "numbers")),
        ("day", "date32", "Excel", ("dates", "numbers")),
        ("day", "timestamp", "duration", ("dates", "durations")),
    ],
)
def test_other_kinds_are_refused_in_training_prediction_and_requests(
    tmp_path, meaning, a, b, kinds
):
    same, other = (tables(tmp_path, ways, meaning) for ways in ((a, a), (a, b)))
    given = {"label": "label", **OF_METHOD["pax"]}
    rule = f"column 'f1' must be of one kind at all parties, got {kinds[0]} at p1, {kinds[1]} at p2"
    with pytest.raises(DataError, match=rule):
        fedapp.run("pax", data=other, **given)
    run = fedapp.run("pax", data=same, **given)
    with pytest.raises(
        DataError, match=f"'f1' must be {kinds[0]}, as in the model, got {kinds[1]}"
    ):
        run.predict(other["p2"])
    value = SPELLINGS[meaning][b].of(POOLS[meaning][-1])
    number = int(value) if isinstance(value, str) else value.total_seconds()
    status, answer = Client(run.path).score({"row": {"f1": number, "f2": 0.5}})
    assert status == 422
    assert f"'f1' must hold {kinds[0]}, or null, got {number}" in answer["error"]
    initial = fedapp.run("pax", data=dict.fromkeys(same, other["p2"]), **given)
    with pytest.raises(
        ConfigError, match=f"'f1' must be {kinds[1]}, as in init.model, got {kinds[0]}"
    ):
        fedapp.run("pax", data=same, init_model=initial.path, **given)


@pytest.mark.slow
@pytest.mark.by_default("secureboost")
@pytest.mark.parametrize("method", ["secureboost", "federated-forest"])
def test_a_part_keeps_the_kinds_of_its_columns(tmp_path, method):
    rows = np.arange(60)
    ids = {"id": [f"c{row}" for row in rows]}
    labels = pa.table({**ids, "y": rows % 2})
    days = pa.array([day(int(row)) for row in rows * 7 % 60], pa.date32())
    bank = pa.table({**ids, "since": days, "x": rows % 7})
    data = {"clinic": labels, "bank": bank}  # a party may have the labels alone
    run = fedapp.run(method, data=data, label="y", id="id", **OF_METHOD[method])
    assert len(run.predict_proba(data, id="id")) == 60
    numbers = bank.set_column(1, "since", days.cast(pa.int32()))
    with pytest.raises(FedappError, match="must be dates, as in the model, got numbers"):
        run.predict_proba({"clinic": labels, "bank": numbers}, id="id")


@pytest.mark.slow
@pytest.mark.by_default("federated-forest")
@pytest.mark.parametrize("method", ["secureboost", "federated-forest"])
def test_the_model_of_a_party_with_labels_alone_is_that_of_one_with_a_constant_column(
    tmp_path, method
):
    rng, rows = np.random.default_rng(7), np.arange(80)
    shop = pa.table({"id": rows, "a": rng.normal(size=80), "b": rng.normal(size=80)})
    labels = {"id": rows, "y": (shop["a"].to_numpy() + rng.normal(size=80) / 2 > 0) * 1}
    runs = [
        fedapp.run(
            method,
            data={"clinic": pa.table({**labels, **more}), "shop": shop},
            label="y",
            id="id",
            **OF_METHOD[method],
        )
        for more in ({}, {"none": np.zeros(80)})
    ]
    scores = [run.summary["metrics"]["test"] for run in runs]
    assert method == "federated-forest" or scores[0] == scores[1]  # forests draw by column
    assert set(scores[0]) == set(scores[1])


# The inputs of which people reported that they are read in two ways


def classes_of(*columns):
    """Classes of a run on tables whose label has these names; they follow from one feature."""
    frames = {}
    for number, names in enumerate(columns):
        x = np.arange(90) % len(names)
        frames[f"p{number}"] = pa.table(
            {"x": x + OTHERS[0] / 9, "y": pa.array(list(names)).take(x)}
        )
    run = fedapp.run("pax", data=frames, label="y", test_fraction=0.3, **OF_METHOD["pax"])
    assert run.summary["metrics"]["test"]["accuracy"] == 1
    return run.summary["classes"]


@pytest.mark.slow
@pytest.mark.by_default("names0", "names2", "names3")
@pytest.mark.parametrize(
    "names",
    [
        ["01", "1", "2"],
        [str(10**16 + last) for last in (40, 41, 47)],
        ["10E4", "1E5"],
        ["café", "milk", "tea"],
    ],
)
def test_classes_have_the_names_of_the_file(tmp_path, names):
    path, x = tmp_path / "rows.csv", [row % len(names) for row in range(90)]
    lines = [f"{at},{names[at]}" for at in x]
    path.write_text("\n".join(["x,y", *lines]) + "\n", encoding="utf-8")
    run = fedapp.run("pax", data=path, label="y", parties=2, **OF_METHOD["pax"])
    assert run.summary["classes"] == names
    assert classes_of(names, list(map(decomposed, names))) == names
    if all(name.isdigit() and name[0] != "0" for name in names):
        frame = pa.table({"x": x, "y": [int(names[at]) for at in x]})
        assert fedapp.run("pax", data=frame, label="y", parties=2).summary["classes"] == names


def test_classes_whose_numbers_are_written_otherwise_are_refused():
    rule = "label must be spelled alike at all parties, got names that differ only in case or spa"
    with pytest.raises(DataError, match=rule):
        classes_of(["01", "02", "10"], ["1", "2", "10"])


def test_ids_that_are_floats_beyond_two_to_the_53_are_refused():
    ids = np.arange(40) * 2 + 2**53 + 2
    data = {
        "a": pa.table({"id": ids, "x": OTHERS[:40], "y": ids // 2 % 2}),
        "b": pa.table({"id": ids.astype(float), "z": OTHERS[:40]}),
    }
    rule = (
        "b: id column 'id' must be whole numbers or text, got floats beyond 2.53, which are not e"
    )
    with pytest.raises(DataError, match=rule):
        fedapp.run("secureboost", data=data, label="y", id="id", **OF_METHOD["secureboost"])


def test_codes_of_a_category_are_one_as_1_and_as_1_0(tmp_path):
    codes, rows = [1, 2, 3, 4, 5], range(100)
    (tmp_path / "k.toml").write_text('[columns.k]\ntype = "category"\n')
    texts = [[str(codes[row % 5]) for row in rows], [f"{codes[row % 5]}.0" for row in rows]]
    texts[1][:9] = [""] * 9
    data = {}
    for number, column in enumerate(texts):
        data[f"p{number}"] = tmp_path / f"p{number}.csv"
        lines = [f"{name},{row % 7},{row % 2}" for row, name in zip(rows, column, strict=True)]
        data[f"p{number}"].write_text("\n".join(["k,x,y", *lines]) + "\n")
    run = fedapp.run("pax", data=data, label="y", schema=tmp_path / "k.toml", **OF_METHOD["pax"])
    assert run.summary["categories"]["k"]["names"] == 5


COUNTRIES = ["DE", "NA", ""] * 30


@pytest.mark.parametrize("by", ["schema", "text", "frame"])
def test_na_is_a_name_where_a_schema_or_a_frame_says_so(tmp_path, by):
    path, schema = tmp_path / "k.csv", tmp_path / "k.toml"
    lines = [f"{name},{row % 7},{int(name == 'NA')}" for row, name in enumerate(COUNTRIES)]
    path.write_text("\n".join(["k,x,y", *lines]) + "\n")
    schema.write_text('[columns.k]\ntype = "category"\ncategories = ["DE", "NA"]\n')
    given = {"data": path, "label": "y", "parties": 2, **OF_METHOD["pax"]}
    if by == "schema":
        given["schema"] = schema
    if by == "frame":
        names = [name or None for name in COUNTRIES]
        y = [int(name == "NA") for name in COUNTRIES]
        given["data"] = pa.table({"k": names, "x": [row % 7 for row in range(90)], "y": y})
    run = fedapp.run("pax", **given)
    note = "feature column 'k' has NA in 30 rows, read as missing: among the categories of a schema"
    assert any(each.startswith(note) for each in run.summary["warnings"]) == (by == "text")
    assert (run.summary["metrics"]["test"]["auc"] == 1) == (by != "text")


def test_a_name_typed_in_another_form_of_unicode_is_the_same_column(tmp_path):
    path = tmp_path / "rows.csv"
    lines = [f"{row},{row % 3},{row % 2}" for row in range(40)]
    path.write_text("\n".join([decomposed("größe,übrig,y"), *lines]) + "\n", encoding="utf-8")
    given = {"label": decomposed("y"), "drop_columns": composed("übrig"), **OF_METHOD["pax"]}
    run = fedapp.run("pax", data=path, parties=2, **given)
    assert run.model.columns == ("größe",)
    client, scored = Client(run.path), []
    for form in (composed, decomposed):
        status, answer = client.score({"row": {form("größe"): 3}})
        assert status == 200
        scored.append(answer["scores"])
    assert scored[0] == scored[1]


# Notes where a value silently becomes something else

NOTED = {
    "marked": (["$1,200", "$800", "$2,400"] * 20, "has numbers with marks, as in $1,200, 12% or"),
    "per cent": (["12%", "7%", "30%"] * 20, "has numbers with marks"),
    "underscores": (["1_000", "2_000", "3_500"] * 20, "has numbers with marks"),
    "years": (
        [f"{18 + n % 12} years" for n in range(60)],
        "feature columns 'a' ('18 years', in 60 rows) have numbers with a unit, read as categories",
    ),
    "weights": (["37.5 kg", "40kg", "-2,5 KG", "?"] * 15, "('-2,5 KG', in 45 rows) have numbers"),
    "speeds": (["3 km/h", "7 km/h", "9 m/s", "8 m/s"] * 15, "('3 km/h', in 60 rows) have numbers"),
    "times": (
        [f"2024-03-0{1 + n % 9}T10:{n:02d}:30" for n in range(60)],
        "has times of day that float32 moves by up to 3 minutes",
    ),
    "a code": (
        [-999] * 15 + [n / 9 for n in range(45)],
        "columns 'a' (-999 in 15 rows) have one value in 10 rows or",
    ),
}


CODES = {
    "letters": ["1a", "1b", "2c", "2d"] * 15,
    "one": ["3rd", "first", "last"] * 20,
    "sizes": ["S", "M", "34 L", "XL"] * 15,
    "spans": ["10-19 years", "20-29 years"] * 30,
}


@pytest.mark.parametrize("case", CODES)
def test_codes_are_not_taken_for_numbers_with_a_unit(tmp_path, case):
    path = tmp_path / "rows.csv"
    lines = [f"{value},{row % 2}" for row, value in enumerate(CODES[case])]
    path.write_text("\n".join(["a,y", *lines]) + "\n")
    assert not load_table(path, Roles(label="y")).notes


@pytest.mark.parametrize("case", NOTED)
def test_a_value_that_becomes_something_else_is_noted(tmp_path, case):
    values, note = NOTED[case]
    path = tmp_path / "rows.csv"
    lines = [f'"{value}",{row % 2}' for row, value in enumerate(values)]
    path.write_text("\n".join(["a,y", *lines]) + "\n")
    told = [one.text(True) for one in load_table(path, Roles(label="y")).notes]
    assert any(note in each for each in told), told
    plain = [f"{row % 11},{row % 2}" for row in range(60)]
    path.write_text("\n".join(["a,y", *plain]) + "\n")
    assert load_table(path, Roles(label="y")).notes == ()


@pytest.mark.by_default("auto-pax", "multi:softprob-pax")
@pytest.mark.parametrize("method", ["pax", "secureboost"])
@pytest.mark.parametrize("objective", ["auto", "multi:softprob"])
def test_whole_numbers_that_become_classes_are_noted(method, objective):
    rows = np.arange(160)
    data = pa.table({"id": rows, "x": rows % 9, "z": OTHERS[0] * rows, "y": rows % 16})
    how = {"data": {"p1": data.drop("z"), "p2": data.select(["id", "z"])}, "id": "id"}
    given = how if method == "secureboost" else {"data": data, "parties": 2, "drop_columns": "id"}
    run = fedapp.run(method, label="y", objective=objective, **given, **OF_METHOD[method])
    told = "the 16 whole numbers of the label are trained as classes"
    assert any(told in each for each in run.summary["warnings"]) == (objective == "auto")


# Found by trying


@pytest.mark.slow
@pytest.mark.by_default("labels0-*", "labels3-*")
@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        (["true", "false"], ["false", "true"]),
        (["NA", "1"], ["1", "NA"]),
        (["nan", "1"], ["1", "nan"]),
        (["inf", "1"], ["1", "inf"]),
        (["1e4567890", "a"], ["1e4567890", "a"]),
    ],
)
def test_texts_of_a_frame_are_names_whatever_they_look_like(labels, classes):
    assert classes_of(labels, labels) == classes
    assert number_written("1" * 30) != number_written("1" * 29 + "2")
    frame = pa.table({"k": [*labels, "b", "c"] * 10, "x": range(40), "y": [0, 1] * 20})
    run = fedapp.run("pax", data={"p1": frame, "p2": frame}, label="y", **OF_METHOD["pax"])
    assert run.summary["categories"]["k"]["names"] == 4


@pytest.mark.slow
@pytest.mark.parametrize("decimal", [".", ","])
def test_classes_that_are_one_number_in_two_ways_are_refused(tmp_path, decimal):
    names, path = ["1", f"1{decimal}0", "0"], tmp_path / "rows.csv"
    path.write_text("x;y\n" + "".join(f"{row};{names[row % 3]}\n" for row in range(60)))
    given = {"data": path, "label": "y", "decimal": decimal, **OF_METHOD["pax"]}
    with pytest.raises(DataError, match="label must name a class in one way, got one number writ"):
        fedapp.run("pax", parties=2, **given)
    assert fedapp.run("pax", parties=2, objective="reg:squarederror", **given).summary["metrics"]
    path.write_text(path.read_text().replace(";1\n", f";1{decimal}0\n"))
    assert fedapp.run("pax", parties=2, **given).summary["classes"] == ["0", "1"]


@pytest.mark.parametrize(
    "values", [["1.0", "2.0"], ["1", "2"], [1.0, 2.0], [1.0, 2.0, float("nan")]]
)
def test_codes_and_missing_values_of_a_schema_are_numbers_however_written(tmp_path, values):
    codes = (("1", "A"), ("2", "B"))
    reader = Reader(declared=(Declared("c", type="category", codes=codes, missing=("9",)),))
    column = [*values, *(["9.0"] if isinstance(values[0], str) else [9.0])] * 3
    if isinstance(values[0], str):
        path = tmp_path / "rows.csv"
        path.write_text("\n".join(["c,x", *(f"{v},{row}" for row, v in enumerate(column))]) + "\n")
        table = load_table(path, reader=reader)
    else:
        frame = pa.table({"c": pa.array(column), "x": range(len(column))})
        table = table_of_frame(frame, reader=reader)
    assert table.categories == (("A", "B"), None)
    assert np.isnan(table.values[:, 0]).sum() == 3 * (len(column) // 3 - 2)


def test_a_float_of_two_to_the_53_names_nothing():
    frame = pa.table({"id": [2.0**53, 1.0], "x": [1, 2]})
    with pytest.raises(DataError, match=r"got floats beyond 2\^53"):
        table_of_frame(frame, Roles(id_column="id"))
    declared = Reader(declared=(Declared("id", type="category"),))
    rule = "feature column 'id' must be read in one way, got floats beyond .*: store them as whole"
    with pytest.raises(DataError, match=rule):
        table_of_frame(frame, reader=declared)


def test_a_number_in_two_ways_is_refused_with_a_way_out():
    rule = "feature column 'v' must be read in one way, got one number written as 1 and as 1.0: wr"
    with pytest.raises(DataError, match=rule):
        table_of_frame(pa.table({"v": ["a", "1", "1.0"]}))


@pytest.mark.parametrize(
    ("header", "schema"),
    [("x;c;y", ""), ("x; c;y", '[columns.c]\ntype = "number"\n'), ("x;c;y", "drop")],
)
def test_commas_are_thousands_only_where_a_column_is_used_and_not_declared(
    tmp_path, header, schema
):
    path = tmp_path / "rows.csv"
    path.write_text(header + "\n" + "".join(f"{n};1,{n};{n % 2}\n" for n in range(100, 150)))
    declared = (Declared("c", type="number"),) if "number" in schema else ()
    reader, roles = Reader(decimal=",", declared=declared), Roles(label="y")
    if schema:
        dropped = replace(roles, drop=("c",) if schema == "drop" else ())
        table = load_table(path, dropped, reader)
        assert schema == "drop" or table.values[0, 1] == np.float32(1.1)
        return
    with pytest.raises(DataError, match="'c' must have decimal commas"):
        load_table(path, roles, reader)
    found = read_columns_of(str(path), ["x", "c"], roles, reader=reader)  # of a model of both
    assert found.values[0, 1] == np.float32(1.1)
    path.write_text("x;x;y\n1;1,250;2\n")
    with pytest.raises(DataError, match="column names must be distinct"):
        load_table(path, roles, reader)


def test_ordinals_in_another_order_are_of_another_kind(tmp_path):
    data, schemas = {}, []
    for number, order in enumerate((["low", "mid", "high"], ["high", "mid", "low"]), 1):
        data[f"p{number}"] = tmp_path / f"p{number}.csv"
        lines = [f"{order[row % 3]},{row},{row % 2}" for row in range(60)]
        data[f"p{number}"].write_text("\n".join(["k,x,y", *lines]) + "\n")
        schema = tmp_path / f"p{number}.toml"
        schema.write_text(f'[columns.k]\ntype = "ordinal"\norder = {json.dumps(order)}\n')
        schemas.append(f"p{number}={schema}")
    order = r"names in the order of a schema \(\w+\)"
    rule = f"got {order} at p1, {order} at p2"
    with pytest.raises(DataError, match=rule):
        fedapp.run("pax", data=data, label="y", schema=",".join(schemas), **OF_METHOD["pax"])


@pytest.mark.slow
@pytest.mark.parametrize("privacy", [{}, {"epsilon": 50.0}])
def test_sites_that_send_only_sums_do_not_tell_that_numbers_are_0_or_1(tmp_path, privacy):
    ways = [("yes", "1 or 0"), ("yes", "yes")]
    mixed, same = (tables(tmp_path, each, "flag") for each in ways)
    given = {"label": "label", "pax": {"aggregation": "secure"}, **OF_METHOD["pax"]}
    given |= {"privacy": privacy} if privacy else {}
    three = [{**each, "p3": each["p1"]} for each in (mixed, same)]
    with pytest.raises(DataError, match="got yes or no at p3, numbers at p2: write it alike"):
        fedapp.run("pax", data=three[0], **given)
    schema = tmp_path / "flag.toml"
    schema.write_text('[columns.f1]\ntype = "boolean"\n')
    runs = [fedapp.run("pax", data=each, schema=schema, **given) for each in three]
    if not privacy:  # noise differs
        assert len({(run.path / "model.json").read_text() for run in runs}) == 1
