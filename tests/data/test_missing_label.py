"""Rows without a label, refused or dropped, and said; and labels of no training row."""

import csv
import re
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from fedapp.commands.data import data_app
from fedapp.data.partition import split_rows
from fedapp.data.read import load_table
from fedapp.data.schema import Roles
from fedapp.errors import DataError
from fedapp.runs.local import run_local
from fedapp.runs.predict import predict_table
from fedapp.site.settings import table_settings
from strategies.common_table import classes_without_rows
from tests.federated import summary_of
from tests.tables import made_columns, write_rows

DROP = Roles("y", drop_unlabelled=True)
N_ROWS, N_WITHOUT = 400, 40
TOLD = f"{N_WITHOUT} of {N_ROWS} rows have no label in 'y' and are dropped"


@pytest.fixture
def rows(tmp_path):
    """A table where every tenth row has no label, and the table without these rows; ids on wish."""

    def make(with_ids=False):
        columns = made_columns("binary:logistic", N_ROWS)
        if with_ids:
            columns["id"] = [f"p{row}" for row in range(N_ROWS)]
        labelled = np.arange(N_ROWS) % 10 != 3
        holes = {**columns, "y": np.where(labelled, columns["y"], np.nan)}
        kept = {name: np.asarray(values)[labelled] for name, values in columns.items()}
        return write_rows(tmp_path / "holes.csv", holes), write_rows(tmp_path / "kept.csv", kept)

    return make


def test_what_is_left_is_the_table_of_the_rows_with_a_label(rows):
    holes, kept = (load_table(path, DROP) for path in rows())
    np.testing.assert_array_equal(holes.values, kept.values)
    np.testing.assert_array_equal(holes.labels, kept.labels)
    assert TOLD in holes.notes[0].text(shares_names=True)
    assert "'y'" not in holes.notes[0].text(shares_names=False)
    assert kept.notes == ()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["pax", "secureboost"])
def test_a_run_is_that_of_the_rows_with_a_label_and_says_how_many_were_dropped(
    settings, vertical, rows, strategy
):
    make = vertical if strategy == "secureboost" else settings
    given = {"label": "y", "objective": "binary:logistic", "num_boost_round": 1}
    given |= {"max_depth": 2, "missing_label": "drop"}
    holes, kept = (run_local(make(data=str(path), **given)) for path in rows())
    texts = [(folder.path / "model.json").read_text() for folder in (holes, kept)]
    assert texts[0] == texts[1]
    assert any(TOLD in fact for fact in summary_of(holes)["facts"])
    assert not any("no label" in fact for fact in summary_of(kept)["facts"])


def test_ids_of_rows_without_a_label_are_not_matched(vertical, rows, tmp_path):
    bank, _ = rows(with_ids=True)
    ids = [f"p{row}" for row in range(N_ROWS)]
    shop = write_rows(tmp_path / "shop.csv", {"id": ids, "z": np.arange(N_ROWS) % 7})
    folder = run_local(
        vertical(
            data=f"bank={bank},shop={shop}",
            label="y",
            id="id",
            align="psi",
            missing_label="drop",
            num_boost_round=1,
            max_depth=2,
        )
    )
    assert sum(summary_of(folder)["matched_rows"].values()) == N_ROWS - N_WITHOUT
    # The rows are predicted all the same.
    data, output = f"bank={bank},shop={shop}", tmp_path / "out.csv"
    predict_table(folder.path, data, "id", output)
    assert len(output.read_text().splitlines()) == 1 + N_ROWS


def test_rows_without_a_label_are_predicted(settings, rows, tmp_path):
    holes, _ = rows()
    given = {"label": "y", "num_boost_round": 1, "max_depth": 2, "missing_label": "drop"}
    folder = run_local(settings(data=str(holes), **given))
    predict_table(folder.path, str(holes), "", tmp_path / "out.csv")
    with (tmp_path / "out.csv").open() as file:
        assert len(list(csv.DictReader(file))) == N_ROWS


def test_numbers_that_are_none_are_no_labels(tmp_path):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"a": [1.0, 2, 3], "y": [np.nan, 5.0, None]}), path)
    assert load_table(path, DROP).labels == pytest.approx([5.0])
    with pytest.raises(DataError, match=r"got 2 of 3 rows; missing-label=drop drops these rows$"):
        load_table(path, Roles("y"))


def test_faults_of_the_other_rows_are_named_by_their_lines(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("a,w,y\n1,1,\n2,1,0\n3,,\n4,-1,1\n")
    roles = Roles("y", weight="w", drop_unlabelled=True)
    with pytest.raises(DataError, match=r"weight column 'w' .* got 1 of 2 rows, first in line 5$"):
        load_table(path, roles)


def test_a_table_without_any_label_is_refused(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text("a,y\n1,\n2,NA\n")
    with pytest.raises(DataError, match="'y' must have a value in some row, got none in 2 rows"):
        load_table(path, DROP)


def test_a_schema_and_a_setting_say_what_becomes_of_the_rows(tmp_path):
    (tmp_path / "rows.toml").write_text('missing-label = "drop"\n')
    schema = {"data": "rows.csv", "schema": str(tmp_path / "rows.toml")}
    assert table_settings(schema)["drops_unlabelled"]
    assert table_settings({"data": "rows.csv", "missing-label": "drop"})["drops_unlabelled"]
    assert not table_settings({"data": "rows.csv"})["drops_unlabelled"]


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ([], "are refused by a run; missing-label=drop drops them.* refuses this table: rows with"),
        (["--missing-label", "drop"], "and are dropped before rows are held back or matched"),
    ],
)
def test_a_description_says_so(rows, tmp_path, more, told):
    holes, _ = rows()
    schema = tmp_path / "new.toml"
    given = ["describe", str(holes), "--label", "y", "--schema", str(schema), *more]
    result = CliRunner().invoke(data_app, given)
    assert result.exit_code == 0, result.output
    text = " ".join(result.output.split())
    assert re.search(told, text)
    assert ("refuses this table" in text) == (not more)
    said = "drop" if more else "refuse"
    assert f'missing-label = "{said}"' in schema.read_text()


LATE = r"classes of the label in no training row, which the model cannot know: 'green'; correct"


@pytest.fixture
def late_class(tmp_path):
    """A table with a class whose only row is held back for the test; the label in two columns."""
    labels = ["red" if row % 3 else "blue" for row in range(60)]
    labels[int(split_rows(60, 0.2, 0.1, 42).test[0])] = "green"
    rows = [f"{row % 7},{row % 5},{label}" for row, label in enumerate(labels)]
    (tmp_path / "rows.csv").write_text("\n".join(["a,b,y", *rows]) + "\n")
    return tmp_path / "rows.csv"


@pytest.mark.by_default("pax")
@pytest.mark.parametrize("strategy", ["pax", "secureboost"])
def test_a_class_that_only_held_back_rows_have_is_told_with_the_way_out(
    settings, vertical, late_class, caplog, strategy
):
    make = settings if strategy == "pax" else vertical
    given = {"label": "y", "objective": "auto", "num_boost_round": 1, "max_depth": 2, "parties": 2}
    run_local(make(data=str(late_class), **given))
    assert re.search(LATE, caplog.text)
    caplog.clear()
    schema = late_class.parent / "rows.toml"
    schema.write_text('missing-label = "drop"\n[columns.y]\nmissing = ["green"]\n')
    folder = run_local(make(data=str(late_class), schema=str(schema), **given))
    assert not re.search(LATE, caplog.text)
    assert summary_of(folder)["objective"] == "binary:logistic"


def test_a_class_of_another_partys_training_rows_is_no_matter():
    def hello(classes, untrained):
        return SimpleNamespace(classes=tuple(classes), untrained=tuple(untrained))

    parties = {"bank": hello("ab", "b"), "shop": hello("bc", "c"), "post": hello("ac", "c")}
    assert classes_without_rows(parties) == ("c",)
