"""Labels: rows without one, classes of no training row, and which of two classes counts as 1."""

import re
from types import SimpleNamespace

import numpy as np
import pytest

from fedapp.data.labels import note_on_measure, positive_last
from fedapp.data.partition import split_rows
from fedapp.data.read import load_table
from fedapp.data.schema import Roles
from fedapp.errors import ConfigError, DataError
from fedapp.runs.baselines import run_baselines
from fedapp.runs.local import run_local
from fedapp.runs.predict import predict_table
from fedapp.runs.tables import check_tables
from fedapp.settings import load_settings
from strategies.common_table import classes_without_rows
from tests.federated import model_bytes, summary_of
from tests.strategies.test_auto_objective import METHODS
from tests.tables import made_columns, write_rows

N_ROWS, N_WITHOUT = 400, 40
TOLD = f"{N_WITHOUT} of {N_ROWS} rows have no label in 'y' and are dropped"
SHORT = {"label": "y", "num_boost_round": 1, "max_depth": 2}
DROPS = {**SHORT, "missing_label": "drop"}


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


def test_what_is_left_is_the_table_of_the_rows_with_a_label_and_all_are_predicted(
    settings, rows, tmp_path
):
    paths = rows()
    holes, kept = (load_table(path, Roles("y", drop_unlabelled=True)) for path in paths)
    np.testing.assert_array_equal(holes.values, kept.values)
    np.testing.assert_array_equal(holes.labels, kept.labels)
    assert TOLD in holes.notes[0].text(shares_names=True)
    assert "'y'" not in holes.notes[0].text(shares_names=False)
    assert kept.notes == ()
    folders = [run_local(settings(data=str(path), **DROPS)) for path in paths]
    assert model_bytes(folders[0]) == model_bytes(folders[1])
    has_fact = [any("no label" in fact for fact in summary_of(each)["facts"]) for each in folders]
    assert has_fact == [True, False]
    predict_table(folders[0].path, str(paths[0]), "", tmp_path / "out.csv")
    assert len((tmp_path / "out.csv").read_text().splitlines()) == 1 + N_ROWS


def test_ids_of_rows_without_a_label_are_not_matched_and_are_predicted(vertical, rows, tmp_path):
    ids = [f"p{row}" for row in range(N_ROWS)]
    shop = write_rows(tmp_path / "shop.csv", {"id": ids, "z": np.arange(N_ROWS) % 7})
    data = f"bank={rows(with_ids=True)[0]},shop={shop}"
    folder = run_local(vertical(data=data, id="id", align="psi", **DROPS))
    assert sum(summary_of(folder)["matched_rows"].values()) == N_ROWS - N_WITHOUT
    predict_table(folder.path, data, "id", tmp_path / "out.csv")
    assert len((tmp_path / "out.csv").read_text().splitlines()) == 1 + N_ROWS


LATE = r"classes of the label in no training row, which the model cannot know: 'green'; correct"


def test_a_class_that_only_held_back_rows_have_is_told_with_the_way_out(settings, tmp_path, caplog):
    labels = ["red" if row % 3 else "blue" for row in range(60)]
    labels[int(split_rows(60, 0.2, 0.1, 42).test[0])] = "green"
    columns = {"a": np.arange(60) % 7, "b": np.arange(60) % 5, "y": labels}
    given = {"data": str(write_rows(tmp_path / "rows.csv", columns)), "objective": "auto", **SHORT}
    run_local(settings(**given))
    assert re.search(LATE, caplog.text)
    caplog.clear()
    schema = tmp_path / "rows.toml"
    schema.write_text('missing-label = "drop"\n[columns.y]\nmissing = ["green"]\n')
    folder = run_local(settings(schema=str(schema), **given))
    assert not re.search(LATE, caplog.text)
    assert summary_of(folder)["objective"] == "binary:logistic"


def test_a_class_of_another_partys_training_rows_is_no_matter():
    parties = {
        name: SimpleNamespace(classes=tuple(classes), untrained=tuple(untrained))
        for name, classes, untrained in (("bank", "ab", "b"), ("shop", "bc", "c"), ("p", "ac", "c"))
    }
    assert classes_without_rows(parties) == ("c",)


# Which of two classes counts as 1: by default the later, or the one that is named


@pytest.fixture
def labelled(write_table):
    """The same rows, whatever their two classes are called."""

    def make(low="good", high="bad"):
        rng = np.random.default_rng(7)
        a = rng.normal(size=80).round(3)
        labels = np.where(a + rng.normal(size=80) > 0, high, low)
        return str(write_table(f"{low}-rows", 80, a=a, y=labels))

    return make


@pytest.mark.by_default("pax")
@pytest.mark.parametrize("method", METHODS)
def test_the_class_named_is_the_one_that_counts(method, labelled, tmp_path):
    # By text "bad" comes before "good"; counted as 1 it is the later of "0" and "1".
    (schema := tmp_path / "schema.toml").write_text('label = "y"\npositive-label = "bad"\n')
    given = {"strategy": method, **METHODS[method]}
    named = {**given, "data": labelled(), "label": "y", "positive-label": "bad"}
    numbered = {**given, "data": labelled("0", "1"), "label": "y"}
    runs = [load_settings(each) for each in (named, numbered)]
    notes = [check_tables(run) for run in runs]
    assert notes[0] == notes[1]
    folders = [run_local(run) for run in runs]
    summaries = [summary_of(folder) for folder in folders]
    # Between parties with different columns the server is not told of the classes.
    assert summaries[0].get("classes", ["good", "bad"]) == ["good", "bad"]
    assert summaries[1].get("classes", ["0", "1"]) == ["0", "1"]
    assert summaries[0]["positive_label"] == "bad"
    assert summaries[0]["metrics"] == summaries[1]["metrics"]
    if method == "pax":  # so do a schema, predictions and baselines
        by_schema = run_local(
            load_settings({**given, "data": named["data"], "schema": str(schema)})
        )
        assert summary_of(by_schema)["classes"] == ["good", "bad"]
        output = tmp_path / "scores.csv"
        predicted = predict_table(folders[0].path, named["data"], "", output, "y")
        assert "probability_bad" in output.read_text().splitlines()[0]
        assert predicted.scores["auc"] > 0.5
        assert run_baselines(runs[0])["pooled"] == run_baselines(runs[1])["pooled"]


def test_a_name_that_is_no_class_is_refused(labelled):
    given = {"strategy": "pax", "data": labelled(), "label": "y", **METHODS["pax"]}
    rule = "positive-label must be one of the two classes, 'bad' or 'good', got 'worse'"
    with pytest.raises(DataError, match=rule):
        check_tables(load_settings({**given, "positive-label": "worse"}))


def test_many_whole_numbers_that_become_classes_are_noted():
    numbers = [str(number) for number in range(16)]
    assert note_on_measure(numbers).startswith("the 16 whole numbers of the label are trained as")
    assert note_on_measure(numbers[:3]) == note_on_measure(["a", *numbers]) == ""


def test_others_are_not_told_of_the_classes_and_one_of_three_is_not_named():
    with pytest.raises(DataError) as caught:
        positive_last(("bad", "good"), "worse", "binary:logistic")
    text = str(caught.value.for_others(shares_names=True))
    assert text.startswith("positive-label must be one of the two classes, got another name")
    assert not any(name in text for name in ("bad", "good", "worse"))
    with pytest.raises(DataError, match="positive-label must be empty for multi:softprob"):
        positive_last(("a", "b", "c"), "b", "multi:softprob")


def test_sites_name_one_class_and_of_different_columns_the_owner_of_the_label(labelled, sites):
    bank, shop = ({"name": name, "data": labelled()} for name in ("bank", "shop"))
    nodes = {**bank, "positive-label": "bad"}, {**shop, "positive-label": "good"}
    with pytest.raises(DataError, match=r"positive-label must be the same .* 'bad' of bank"):
        run_local(load_settings({**METHODS["pax"], "parties": 2}), sites(*nodes))
    given = {"strategy": "secureboost", **METHODS["secureboost"], "align": "ordered"}
    run = load_settings({**given, "positive-label": "bad"})
    with pytest.raises(ConfigError, match="positive-label must be in the node config or schema"):
        run_local(run, sites(bank, {**shop, "label": ""}))
