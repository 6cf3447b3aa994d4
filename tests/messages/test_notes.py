"""Oddities of a table: found by its site, said once, and without names where these stay."""

import os
import subprocess
import sys
from contextlib import nullcontext

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from clients import handshake
from fedapp.data.describe import describe
from fedapp.data.read import load_table
from fedapp.data.schema import PLAIN, Declared, Reader, Roles
from fedapp.data.table import notes_on_leaks
from fedapp.errors import PartyError
from fedapp.messages.handshake import HelloRequest
from fedapp.report.summary import warning_lines
from fedapp.runs.compare import carry_out
from fedapp.runs.local import run_local
from fedapp.runs.tables import check_tables
from fedapp.site.settings import SiteConfig
from tests.federated import summary_of

N_ROWS = 40
CONSTANT = "feature column 'c' has the same value in every row"
CODES = "numbers written as 007, 0x1F or 1E2, read as 7, 31 and 100: where they are codes, let a"
ZONES = "times with and without a zone, of which the latter are read as UTC"
MARKS = "numbers with marks, as in $1,200, 12% or"
ROUNDED = "whole numbers beyond 16,777,216 (2^24) that become others as float32"
NUMBERED = "the numbers of the rows, of no use for other rows: see drop-columns"
WORDS = "words that pandas takes for missing, read as names"
COLON = "removed: c"  # a name that is like a note's words
FACTS = {
    "yes or no, read as 1 or 0": ["yes", "no"],
    "dates or times, read as days since 1970": ["2024-01-05", "2024-01-06"],
    "spaces around values, removed": [" u", "v"],
}
# Values of a column, repeated, and what is noted of it; nothing else is.
NOTED = {
    "constant": (["3"] * 39 + [""], CONSTANT),
    "no value": ([""], "no value in any row"),
    **{
        f"pandas' {word}": (["u", word], f"feature columns 'c' ({word}) have {WORDS}")
        for word in ("NULL", "#N/A")
    },
    **{text: (values, text) for text, values in FACTS.items()},
    "marked": (["$1,200", "$800", "$2,400"], MARKS),
    "years": (
        [f"{18 + n % 12} years" for n in range(N_ROWS)],
        "feature columns 'c' ('18 years', in 40 rows) have numbers with a unit, read as categories",
    ),
    "times": (
        [f"2024-03-0{1 + n % 9}T10:{n:02d}:30" for n in range(N_ROWS)],
        "has times of day that float32 moves by up to 3 minutes",
    ),
    "a code": ([-999] * 10 + [n / 9 for n in range(30)], "columns 'c' (-999 in 10 rows) have one"),
    "zeros before": (["01234", "02345", "10001"], CODES),
    "hexadecimal": (["0x1F", "0x2A"], CODES),
    "powers": (["1E2", "2e3", "115"], CODES),
    "some without a zone": (["2024-01-05T10:00", "2024-01-06T10:00Z"], ZONES),
    **{
        f"rounded {value}": ([value, *range(0, 78, 2)], ROUNDED)
        for value in (2**24 + 1, -(2**24) - 1, 2**50 + 1)
    },
    "numbers of rows": (range(N_ROWS), NUMBERED),
    "in another order": ([*range(20, 40), *range(20)], NUMBERED),
    "large": (range(2**31, 2**31 + 40), NUMBERED),
    **{
        f"none of {values}": (values, "")
        for values in (
            ["S", "M", "34 L", "XL"],
            ["10-19 years", "20-29 years"],
            ["1e-05", "2.5E3", "1e+05"],
            *([value, *range(0, 78, 2)] for value in (2**24, 2**50, 2.0**24 + 0.5)),
            [*range(39), 40],
            [*range(38), 37.5, 39],
            [*range(39), ""],
        )
    },
}


@pytest.mark.parametrize("case", NOTED)
def test_a_column_is_noted_by_site_and_description_in_whatever_name(write_table, case):
    values, text = NOTED[case]
    values = [values[row % len(values)] for row in range(N_ROWS)]
    path = write_table(c=[f'"{value}"' for value in values])
    notes = load_table(path, Roles(label="y")).notes
    texts = [note.text(shares_names=True) for note in notes]
    is_told = [bool(text) and text in each for each in texts]
    assert sum(is_told) == bool(text), texts
    assert any(ZONES in each for each in texts) == (text == ZONES)
    for note, it_is in zip(notes, is_told, strict=True):
        assert note.is_fact == (text in FACTS) if it_is else note.is_fact or text not in (CODES, "")
    assert not any("'c'" in note.text(shares_names=False) for note in notes)
    if text in (CODES, ZONES):
        assert any(
            text in each for each in describe(str(path), Roles(label="y"), Reader()).warnings
        )
    if text in FACTS or text == MARKS:  # by their kind, not by their words
        named = write_table(**{COLON: [f'"{value}"' for value in values]})
        (note,) = load_table(named, Roles(label="y")).notes
        assert note.is_fact == (text in FACTS)


def notes_of(path, reader=PLAIN, **roles):
    table = load_table(path, Roles(label="y", **roles), reader)
    return [note.text(shares_names=True) for note in table.notes]


def test_a_sound_table_and_what_a_schema_says_have_no_notes(write_table):
    assert notes_of(write_table()) == []
    path = write_table(c=["u", "v", "NULL", "v"] * 10)
    category = Reader(declared=(Declared("c", type="category"),))
    assert notes_of(path, Reader(missing=("NULL",))) == notes_of(path, category) == []
    path = write_table(c=["01234", "2"] * 20)
    for kind, first in (("category", 0), ("number", 1234)):
        table = load_table(path, Roles(label="y"), Reader(declared=(Declared("c", type=kind),)))
        assert (table.notes, table.values[0, -1]) == ((), first)


def test_labels_ids_and_columns_of_a_parquet_file_are_noted_too(write_table, tmp_path):
    (text,) = notes_of(write_table(y=["u", "v", "NULL", "v"] * 10))
    assert f"label column 'y' (NULL) has {WORDS}" in text
    path = write_table(i=["x", "x", "y", "y", "y", *range(35)])
    rule = "id column 'i' has 5 of 40 rows that share their id with another"
    assert notes_of(path, id_column="i") == [rule]
    columns = {"a": pa.array(range(50)), "b": pa.array([None] * 50), "y": pa.array([0, 1] * 25)}
    pyarrow.parquet.write_table(pa.table(columns), tmp_path / "rows.parquet")
    assert len(notes_of(tmp_path / "rows.parquet")) == 2


@pytest.mark.parametrize(
    ("column", "auc"),
    [
        (lambda y, rng: np.where(np.cumsum(y) < 4, 0, -y), "0.9925"),  # 3 of 200 in error
        (lambda y, rng: np.where(y, rng.normal(size=400).round(3), ""), "1.0000"),
        (lambda y, rng: np.where(y == 1, "2", np.where(np.arange(400) % 3, "1", "")), "1.0000"),
        (lambda y, rng: np.where(y == 1, "paid", rng.choice(["open", "late"], 400)), "1.0000"),
        (lambda y, rng: np.where(np.cumsum(y) < 5, 0, -y), ""),  # 4 of 200: AUC 0.99
        (lambda y, rng: [f"t{row % 2}{row // 18}" for row in range(400)], ""),  # of few rows
    ],
)
def test_a_feature_that_alone_tells_the_label_is_noted(write_table, column, auc):
    rng = np.random.default_rng(0)
    labels = rng.permutation([0, 1] * 200)
    for names in (labels, np.array(["u", "v"])[labels]):
        path = write_table(n_rows=400, c=column(labels, rng), y=names)
        notes = notes_on_leaks(load_table(path, Roles(label="y")))
        texts = [note.text(shares_names=True) for note in notes]
        assert len(texts) == bool(auc)
        assert all(f"an AUC above 0.99 for the label: 'c' ({auc})" in text for text in texts)


@pytest.mark.parametrize("labels", [[0] * 391 + [1] * 9, [0, 1, 2] * 133 + [0]])
def test_of_few_rows_of_a_class_or_three_classes_no_feature_tells(write_table, labels):
    table = load_table(write_table(n_rows=400, c=labels, y=labels), Roles(label="y"))
    assert notes_on_leaks(table) == []


# A run says them


def warnings_of(settings, contexts=None):
    warnings = summary_of(run_local(settings, contexts))["warnings"]
    return [text for text in warnings if "rows are of the rarer class" not in text]


LEAK = "features that alone have an AUC above 0.99 for the label: 'leak' (1.0000); if they are"


@pytest.mark.parametrize("aggregation", ["plain", "secure"])
def test_a_simulation_says_them_once_of_the_whole_table(
    settings, vertical, write_table, aggregation
):
    more = {"y": [0, 1] * 45, "leak": [0, 1] * 45}
    columns = {"c": [1] * 90, "paid": ["yes", "no", "no"] * 30, "i": ["x", "x", *range(88)]}
    given = {"data": str(write_table(n_rows=90, **more, **columns)), "label": "y", "id": "i"}
    run = settings(**given, pax__bins="equal", pax__aggregation=aggregation)
    summary = run_local(run).summary
    rule = "id column 'i' has 2 of 90 rows that share their id with another"
    others = [text for text in summary["warnings"] if "rarer class" not in text]
    (leak,) = [text for text in others if text.startswith(LEAK)]
    assert sorted(others) == sorted([rule, CONSTANT, leak])
    assert leak in check_tables(run)
    assert warning_lines(summary)[:3] == others
    assert summary["facts"] == ["feature column 'paid' has yes or no, read as 1 or 0"]
    path = write_table("columns", c=[7] * 90, n_rows=90)
    assert warnings_of(vertical(data=str(path), label="y", num_boost_round=1)) == [CONSTANT]


class Lines(list):
    """What a command prints."""

    tell = list.append

    def begin(self, doing, ends=False):
        pass

    def run(self, folder, metric):
        return nullcontext()


def test_methods_of_a_comparison_say_them_once(write_table, tmp_path):
    table = str(write_table(n_rows=90, y=[0, 1] * 45, c=[1] * 90))
    given = {"data": table, "label": "y", "parties": 2, "num-boost-round": 1, "max-depth": 1}
    carry_out(["pax", "bagging"], given, 1, "local", lines := Lines(), tmp_path / "new")
    assert lines.count(f"! {CONSTANT}") == 1


def test_a_party_with_a_table_of_its_own_is_named(settings, write_table, sites):
    bank, shop = write_table("bank", c=range(0, 80, 2)), write_table("shop", c=[1] * 40)
    given = {"parties": 2, "pax__bins": "equal"}
    found = warnings_of(settings(data=f"bank={bank},shop={shop}", label="y", **given))
    nodes = [{"name": "bank", "data": bank}, {"name": "shop", "data": shop}]
    assert found == warnings_of(settings(**given), sites(*nodes)) == [f"shop: {CONSTANT}"]


@pytest.mark.parametrize("rounded", [False, True])
def test_a_site_tells_of_such_a_feature_unless_only_sums_may_leave_it(write_table, caplog, rounded):
    path = write_table(n_rows=90, y=[0, 1] * 45, leak=[0, 1] * 45)
    request = HelloRequest("binary:logistic", 0.2, 0.1, 0, rounded)
    reply, _ = handshake.look(SiteConfig("bank", str(path), label="y"), request)
    assert [note.startswith(LEAK) for note in reply.notes] == [True] * (not rounded)
    assert any(f"bank: {LEAK}" in one.message for one in caplog.records) == rounded


@pytest.mark.parametrize(("shared", "name"), [("false", "[withheld]"), ("true", "'hidden'")])
def test_a_vertical_site_names_the_column_only_where_it_shares_names_and_tells_no_leak_or_value(
    vertical, write_table, sites, caplog, shared, name
):
    common = {"id": "i", "allow-export": "true"}
    given = {"n_rows": 60, "i": range(60)}
    leak = np.linspace(-1, 1, 60).round(3)
    bank = write_table("bank", a=leak, b=None, y=(leak > 0).astype(int), **given)

    def contexts(hidden):
        shop = write_table("shop", a=None, y=None, hidden=hidden, **given)
        more = {"label": "", "share-column-names": shared, **common}
        return sites(
            {"name": "bank", "data": bank, **common}, {"name": "shop", "data": shop, **more}
        )

    found = warnings_of(vertical(num_boost_round=1), contexts(["7"] * 60))
    assert found == [f"shop: feature column {name} has the same value in every row"]
    warning = "bank: features that alone have an AUC above 0.99 for the label: 'a' (1.0000)"
    assert any(warning in record.message for record in caplog.records)
    with pytest.raises(PartyError) as caught:
        run_local(vertical(num_boost_round=1), contexts(["7"] * 59 + ["rare"]))
    assert_stays(str(caught.value), name, caplog, "1 of 60 values of 'hidden' is not a number, ")


def assert_stays(line, name, caplog, own):
    """Others are told the column, if any, and the site's own log the value and its line."""
    assert f"got numbers and other text in {name}" in line
    assert line.endswith("; the site's own log says more")
    assert "rare" not in line
    assert any(f"{own}first 'rare' in line" in record.message for record in caplog.records)


def test_values_of_a_horizontal_site_stay_in_its_log_unless_it_is_simulated(
    settings, write_table, sites, caplog
):
    table = write_table("bank", c=["rare", *range(39)])
    with pytest.raises(PartyError) as caught:
        run_local(settings(parties=1), sites({"name": "bank", "data": table}))
    assert_stays(str(caught.value), "'c'", caplog, "")
    with pytest.raises(PartyError, match=r"1 of 40 values of 'c' .* first 'rare' in line 2"):
        run_local(settings(data=str(table), label="y"))


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
