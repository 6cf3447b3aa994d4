"""Oddities of a table: found by its site, said once, and without names where these stay."""

import json
import os
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from clients import handshake
from fedapp.data.read import load_table
from fedapp.data.schema import Declared, Reader, Roles
from fedapp.data.table import notes_on_leaks
from fedapp.errors import PartyError
from fedapp.messages.handshake import HelloRequest
from fedapp.report.summary import warning_lines
from fedapp.runs.local import run_local
from fedapp.runs.tables import check_tables
from fedapp.site.settings import SiteConfig


def notes_of(path, **roles):
    return [
        note.text(shares_names=True) for note in load_table(path, Roles(label="y", **roles)).notes
    ]


def test_a_sound_table_has_no_notes(write_table):
    assert notes_of(write_table()) == []


@pytest.mark.parametrize("value", ["3", "-1.5"])
def test_a_constant_column_is_noted(write_table, value):
    path = write_table(c=[value] * 39 + [""])
    assert notes_of(path) == ["feature column 'c' has the same value in every row"]


def test_columns_without_a_value_are_noted(write_table):
    path = write_table(c=[""] * 40, d=["NA"] * 40)
    assert notes_of(path) == ["feature columns 'c', 'd' have no value in any row"]


@pytest.mark.parametrize("word", ["NULL", "None", "n/a", "#N/A", "<NA>"])
def test_words_that_pandas_takes_for_missing_are_noted(write_table, word):
    rule = "words that pandas takes for missing, read as names"
    path = write_table(c=["u", word] * 20)
    assert [f"feature columns 'c' ({word}) have {rule}" in note for note in notes_of(path)] == [
        True
    ]
    path = write_table(y=["u", "v", word, "v"] * 10)
    assert [f"label column 'y' ({word}) has {rule}" in note for note in notes_of(path)] == [True]


def test_words_that_a_schema_lists_are_not_noted(write_table):
    path = write_table(c=["u", "v", "NULL", "v"] * 10)
    for reader in (Reader(missing=("NULL",)), Reader(declared=(Declared("c", type="category"),))):
        assert load_table(path, Roles(label="y"), reader).notes == ()


def test_repeated_ids_are_noted_with_how_many_rows(write_table):
    path = write_table(i=["x", "x", "y", "y", "y", *range(35)])
    rule = "id column 'i' has 5 of 40 rows that share their id with another"
    assert notes_of(path, id_column="i") == [rule]


@pytest.mark.parametrize(
    ("value", "noted"),
    [
        (2**24, False),
        (2**24 + 1, True),
        (-(2**24) - 1, True),
        (2**25 + 4, False),
        (2**25 + 2, True),
        (2**50, False),
        (2**50 + 1, True),
        (2.0**24 + 0.5, False),  # a decimal is rounded anyway
    ],
)
def test_a_whole_number_is_noted_that_float32_does_not_have(write_table, value, noted):
    assert float(np.float32(10**15)) == 10**15 or value != 10**15
    rule = "feature column 'c' has whole numbers beyond 16,777,216 (2^24) that become others as "
    found = notes_of(write_table(c=[value, *range(0, 78, 2)]))
    assert found == ([rule + "float32"] if noted else [])


@pytest.mark.parametrize(
    "numbers",
    [
        range(40),
        range(1, 41),
        [*range(20, 40), *range(20)],
        range(2**31, 2**31 + 40),
        [f"{number}.0" for number in range(40)],
    ],
)
def test_a_column_that_numbers_the_rows_is_noted(write_table, numbers):
    rule = "feature column 'c' has the numbers of the rows, of no use for other rows: see "
    assert rule + "drop-columns" in notes_of(write_table(c=numbers))


@pytest.mark.parametrize(
    "numbers",
    [
        [*range(39), 0],
        [*range(39), 40],
        [*range(38), 37.5, 39],
        [*range(39), ""],
        [number / 2 for number in range(40)],
    ],
)
def test_other_columns_number_no_rows(write_table, numbers):
    assert notes_of(write_table(c=numbers)) == []


def test_a_column_of_a_parquet_file_is_looked_at_like_one_of_text(tmp_path):
    path = tmp_path / "rows.parquet"
    columns = {"a": pa.array(range(50)), "b": pa.array([None] * 50), "y": pa.array([0, 1] * 25)}
    pyarrow.parquet.write_table(pa.table(columns), path)
    assert len(notes_of(path)) == 2


@pytest.mark.parametrize(
    ("column", "auc"),
    [
        (lambda y, rng: y, "1.0000"),
        (lambda y, rng: np.where(np.cumsum(y) < 4, 0, -y), "0.9925"),  # 3 of 200 in error
        (lambda y, rng: np.where(y, rng.normal(size=400).round(3), ""), "1.0000"),
        (lambda y, rng: np.where(y == 1, "", "1"), "1.0000"),
        (lambda y, rng: np.where(y == 1, "paid", rng.choice(["open", "late"], 400)), "1.0000"),
    ],
)
def test_a_feature_that_alone_tells_the_label_is_noted(write_table, column, auc):
    rng = np.random.default_rng(0)
    labels = rng.permutation([0, 1] * 200)
    path = write_table(n_rows=400, c=column(labels, rng), y=labels)
    for table in (
        path,
        write_table("b", 400, c=column(labels, rng), y=np.array(["u", "v"])[labels]),
    ):
        (note,) = notes_on_leaks(load_table(table, Roles(label="y")))
        assert f"an AUC above 0.99 for the label: 'c' ({auc})" in note.text(shares_names=True)


@pytest.mark.parametrize(
    ("label", "column"),
    [
        (np.array([0, 1] * 200), np.r_[np.zeros(8), [0, 1] * 196]),  # 4 of 200: AUC 0.99
        (np.array([0] * 391 + [1] * 9), np.arange(400)),
        (np.arange(400) % 3, np.arange(400) % 3),
        (np.array([0, 1] * 200), [f"t{row % 2}{row // 18}" for row in range(400)]),
    ],
    ids=["below", "few rows of a class", "three classes", "categories of few rows"],
)
def test_other_features_do_not_tell_the_label(write_table, label, column):
    table = load_table(write_table(n_rows=400, c=column, y=label), Roles(label="y"))
    assert notes_on_leaks(table) == []


# Texts are the same in every process

TEXTS = """
import sys
from pathlib import Path
from fedapp.data.labels import check_spelling
from fedapp.data.read import load_table
from fedapp.data.schema import Roles
from fedapp.errors import DataError, did_you_mean

for note in load_table(Path(sys.argv[1]), Roles(label="y")).notes:
    print(note.text(True))
print(did_you_mean("valu", {"value_of_" + letter for letter in "abcdefgh"}))
classes = {"a": ("no", "yes"), "b": ("yes", "maybe"), "c": ("No", "yes"), "d": ("u", "v")}
for parties in (classes, {"d": ("u", "v"), **classes}):
    try:
        check_spelling(parties, is_open=True)
    except DataError as error:
        print(error)
"""


def test_texts_do_not_depend_on_the_seed_of_hashes(write_table):
    words = ["None", "NULL", "n/a", "u"] * 10
    path = write_table(c=words, d=["yes", "no"] * 20, e=[" u", "#NA"] * 20, f=["007", "1E2"] * 20)
    printed = {
        subprocess.run(
            [sys.executable, "-c", TEXTS, str(path)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(printed) == 1
    assert printed.pop().count("\n") == 7


# A run says them

FACTS = {
    "yes or no, read as 1 or 0": (["yes", "no"] * 20, True),
    "dates or times, read as days since 1970": (["2024-01-05", "2024-01-06"] * 20, True),
    "spaces around values, removed": ([" u", "v"] * 20, True),
    "the same value in every row": ([1] * 40, False),
    "numbers with marks, as in $1,200": (["$1", "$2"] * 20, False),
    "words that pandas takes for missing, read as names": (["u", "None"] * 20, False),
}


@pytest.mark.parametrize("text", FACTS)
@pytest.mark.parametrize("name", ["c", "left out", "removed: c"])
def test_a_note_is_a_fact_or_a_warning_by_its_kind_not_by_its_words(write_table, text, name):
    values, is_fact = FACTS[text]
    (note,) = load_table(write_table(**{name: values}), Roles(label="y")).notes
    assert f"{text}" in note.text(shares_names=True)
    assert note.is_fact == is_fact


def test_facts_and_warnings_reach_the_report_apart(settings, write_table):
    columns = {"left out": [1] * 90, "paid": ["yes", "no", "no"] * 30}
    path = write_table(n_rows=90, **columns)
    summary = run_local(settings(data=str(path), label="y", pax__bins="equal")).summary
    assert warning_lines(summary)[0] == CONSTANT.replace("'c'", "'left out'")
    assert summary["facts"] == ["feature column 'paid' has yes or no, read as 1 or 0"]


CONSTANT = "feature column 'c' has the same value in every row"


def warnings_of(settings, contexts=None):
    summary = json.loads((run_local(settings, contexts).path / "summary.json").read_text())
    warnings = summary["warnings"]
    return [text for text in warnings if "rows are of the rarer class" not in text]


def test_a_simulation_says_them_once_of_the_whole_table(settings, write_table):
    path = write_table(c=[1] * 90, i=["x", "x", *range(88)], n_rows=90)
    found = warnings_of(settings(data=str(path), label="y", id="i", pax__bins="equal"))
    rule = "id column 'i' has 2 of 90 rows that share their id with another"
    assert found == [rule, CONSTANT]


def test_shares_of_columns_say_them_once_too(vertical, tmp_path):
    rng = np.random.default_rng(0)
    lines = [f"{a:.3f},{b:.3f},7,{int(a > b)}" for a, b in rng.normal(size=(60, 2))]
    path = tmp_path / "rows.csv"
    path.write_text("\n".join(["a,b,c,y", *lines]))
    given = {"data": str(path), "label": "y", "num_boost_round": 1}
    assert warnings_of(vertical(**given)) == [CONSTANT]


def test_a_party_with_a_file_of_its_own_is_named(settings, write_table):
    bank, shop = write_table("bank", c=range(0, 80, 2)), write_table("shop", c=[1] * 40)
    given = {"data": f"bank={bank},shop={shop}", "parties": 2, "label": "y"}
    found = warnings_of(settings(**given, pax__bins="equal"))
    assert found == [f"shop: {CONSTANT}"]


def test_a_site_of_a_deployment_with_common_columns_is_named(settings, write_table, sites):
    bank, shop = write_table("bank", c=range(0, 80, 2)), write_table("shop", c=[1] * 40)
    nodes = [{"name": "bank", "data": bank}, {"name": "shop", "data": shop}]
    found = warnings_of(settings(parties=2, pax__bins="equal"), sites(*nodes))
    assert found == [f"shop: {CONSTANT}"]


LEAK = "features that alone have an AUC above 0.99 for the label: 'c' (1.0000); if they are"


@pytest.mark.parametrize("aggregation", ["plain", "secure"])
def test_a_simulation_warns_of_a_feature_that_tells_the_label(settings, write_table, aggregation):
    labels = [0, 1] * 45
    path = write_table(n_rows=90, y=labels, c=labels)
    given = {"data": str(path), "label": "y", "pax__bins": "equal", "pax__aggregation": aggregation}
    told = [text for text in warnings_of(settings(**given)) if text.startswith(LEAK)]
    assert len(told) == 1
    assert check_tables(settings(**given)) == told


@pytest.mark.parametrize("rounded", [False, True])
def test_a_site_tells_of_such_a_feature_unless_only_sums_may_leave_it(write_table, caplog, rounded):
    labels = [0, 1] * 45
    path = write_table(n_rows=90, y=labels, c=labels)
    request = HelloRequest("binary:logistic", 0.2, 0.1, 0, rounded)
    reply, _ = handshake.look(SiteConfig("bank", str(path), label="y"), request)
    assert [note.startswith(LEAK) for note in reply.notes] == [True] * (not rounded)
    assert any(f"bank: {LEAK}" in one.message for one in caplog.records) == rounded


@pytest.mark.slow
def test_an_active_site_logs_such_a_feature_and_tells_nobody(vertical, vertical_sites, caplog):
    found = warnings_of(vertical(num_boost_round=1), vertical_sites(["7"] * 60))
    assert not any("AUC" in text for text in found)
    told = "bank: features that alone have an AUC above 0.99 for the label: 'a' (1.0000)"
    assert any(told in record.message for record in caplog.records)


@pytest.fixture
def vertical_sites(tmp_path, sites):
    """A bank with the label, and a shop whose secret column is this."""

    def make(column, **shop):
        rng = np.random.default_rng(0)
        values = rng.normal(size=(60, 2)).round(3)
        bank = [f"{row},{a},{int(a > 0)}" for row, (a, _) in enumerate(values)]
        (tmp_path / "bank.csv").write_text("\n".join(["i,a,y", *bank]))
        rows = enumerate(zip(values[:, 1], column, strict=True))
        others = [f"{row},{b},{c}" for row, (b, c) in rows]
        (tmp_path / "shop.csv").write_text("\n".join(["i,b,hidden", *others]))
        common = {"id": "i", "allow-export": "true"}
        nodes = [
            {"name": "bank", "data": tmp_path / "bank.csv", **common},
            {"name": "shop", "data": tmp_path / "shop.csv", "label": "", **common, **shop},
        ]
        return sites(*nodes)

    return make


@pytest.mark.slow
@pytest.mark.parametrize(("shared", "name"), [("false", "[withheld]"), ("true", "'hidden'")])
def test_a_deployed_vertical_site_names_the_column_only_where_it_shares_names(
    vertical, vertical_sites, shared, name
):
    contexts = vertical_sites(["7"] * 60, **{"share-column-names": shared})
    found = warnings_of(vertical(num_boost_round=1), contexts)
    assert found == [f"shop: feature column {name} has the same value in every row"]


@pytest.mark.parametrize(("shared", "name"), [("false", "[withheld]"), ("true", "'hidden'")])
def test_values_of_a_deployed_vertical_site_stay_in_its_log(
    vertical, vertical_sites, caplog, shared, name
):
    contexts = vertical_sites(["7"] * 59 + ["rare"], **{"share-column-names": shared})
    with pytest.raises(PartyError) as caught:
        run_local(vertical(num_boost_round=1), contexts)
    told = str(caught.value)
    assert f"got numbers and other text in {name}" in told
    assert told.endswith("; the site's own log says more")
    assert "rare" not in told
    own = "1 of 60 values of 'hidden' is not a number, first 'rare' in line 61"
    assert any(own in record.message for record in caplog.records)


def test_values_of_a_deployed_horizontal_site_stay_in_its_log(settings, write_table, sites, caplog):
    table = write_table("bank", c=["rare", *range(39)])
    with pytest.raises(PartyError) as caught:
        run_local(settings(parties=1), sites({"name": "bank", "data": table}))
    told = str(caught.value)
    assert "got numbers and other text in 'c'" in told
    assert told.endswith("; the site's own log says more")
    assert "rare" not in told
    assert any("first 'rare' in line 2" in record.message for record in caplog.records)


def test_a_simulated_party_tells_all(settings, write_table):
    table = write_table(c=["rare", *range(39)])
    with pytest.raises(PartyError, match=r"1 of 40 values of 'c' .* first 'rare' in line 2"):
        run_local(settings(data=str(table), label="y"))
