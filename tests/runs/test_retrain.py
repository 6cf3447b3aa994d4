"""Erasure: a retrained run is that of tables that never had the rows."""

import csv
import hashlib
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import settings as drawing
from hypothesis import strategies as st
from pyarrow import parquet
from typer.testing import CliRunner

from fedapp.commands import cli
from fedapp.data.read import load_table, text_file
from fedapp.data.schema import Roles
from fedapp.errors import ConfigError, DataError
from fedapp.report.summary import resolved_facts
from fedapp.run_folder import read_run
from fedapp.runs.local import run_local
from fedapp.runs.predict import trained_settings
from fedapp.runs.retrain import model_digest, remains, retraining
from fedapp.settings import load_settings
from fedapp.site.settings import site_config
from fedapp.site.table import read_table
from strategies.run import load_strategy
from tests.contract.conftest import _silent  # noqa: F401 (noise is 0)
from tests.contract.methods import METHODS, ROUNDS
from tests.federated import summary_of
from tests.tables import made_columns, write_rows

N_ROWS = 120
TRAINING = [name for name, method in METHODS.items() if not method.trained]


def write_table(path, ids, columns=()):
    """Rows of one table by their numbers: of numbers, names, booleans and times."""
    every = made_columns("binary:logistic", N_ROWS)
    rng = np.random.default_rng(8)
    every["kind"] = rng.choice(["low", "middle", "high"], N_ROWS)
    every["flag"] = rng.integers(0, 2, N_ROWS).astype(str)
    every["hour"] = [f"{hour}:30" for hour in rng.integers(10, 20, N_ROWS)]
    # In three rows only, each of which decides how its column is read.
    every["kind"][5], every["flag"][6], every["hour"][7] = "rare or never", "true", "noon"
    every = {"id": [f"c{row}" for row in range(N_ROWS)], **every}
    names = ["id", *columns] if columns else every
    return write_rows(path, {name: [every[name][row] for row in ids] for name in names})


def write_ids(path, rows, *others):
    path.write_text("\n".join(["id", *(f"c{row}" for row in rows), *others, ""]))
    return str(path)


def settings_of(method, data, run_dir, **more):
    own = {"strategy": method.strategy, "data": data, "label": "y", "id": "id", "parties": 3}
    read = load_strategy(method.strategy).settings_read(
        load_settings({"strategy": method.strategy})
    )
    if "num-boost-round" in read:
        own |= {"num_boost_round": ROUNDS, "early_stopping_rounds": 0, method.depth: 2}
    own |= {"privacy__clip": 0.0} if "privacy__clip" in method.settings else {}
    every = {**method.settings, **own, "run_dir": str(run_dir), **more}
    return load_settings(
        {name.replace("__", ".").replace("_", "-"): value for name, value in every.items() if name}
    )


def retrained(earlier, without, engine="local"):
    run_dir = f"{earlier.path}-again"
    folder = retraining(earlier, without, engine, run_dir).carry_out()
    assert folder is not None
    return folder


@pytest.mark.by_default("pax, secure", "bagging", "secureboost")
@pytest.mark.parametrize("name", TRAINING)
def test_a_retrained_model_is_that_of_a_table_that_never_had_the_rows(tmp_path, name):
    """Whichever rows are erased; also the three that decide how a column is read."""
    method = METHODS[name]
    rng = np.random.default_rng(1)
    gone = {5, 6, 7, *rng.choice(N_ROWS, rng.integers(1, 30), replace=False).tolist()}
    data = write_table(tmp_path / "rows.csv", range(N_ROWS))
    earlier = run_local(settings_of(method, str(data), tmp_path / "run"))
    again = retrained(earlier, write_ids(tmp_path / "ids.csv", gone, "nobody"))
    rest = write_table(tmp_path / "rest.csv", sorted({*range(N_ROWS)} - gone))
    expected = run_local(settings_of(method, str(rest), tmp_path / "expected"))
    assert method.result(again) == method.result(expected)
    assert method.result(again) != method.result(earlier)
    facts = summary_of(again)["retrained"]
    assert facts["rows_left_out"] == {"rows.csv": len(gone)}
    assert facts["absent_ids"] == 1
    assert facts["digest"] == model_digest(expected) != facts["earlier_digest"]


def test_deleted_rows_prove_that_a_retrained_model_has_none_of_them(tmp_path):
    """Of parties with files of their own; then no file of ids is needed any more."""
    rows = {"bank": range(40), "lab": range(40, 80), "shop": range(80, N_ROWS)}
    files = {one: write_table(tmp_path / f"{one}.csv", rows[one], "abcdefy") for one in rows}
    data = ",".join(f"{one}={file}" for one, file in files.items())
    earlier = run_local(settings_of(METHODS["cyclic"], data, tmp_path / "run"))
    ids = write_ids(tmp_path / "ids.csv", [5, 6, 50])
    again = retrained(earlier, ids)
    n_gone = {"bank": 2, "lab": 1, "shop": 0}
    assert summary_of(again)["retrained"]["rows_left_out"] == n_gone
    for one in rows:
        write_table(files[one], [row for row in rows[one] if row not in (5, 6, 50)], "abcdefy")
    proof = retrained(again, "")
    facts = summary_of(proof)["retrained"]
    assert facts["digest"] == facts["earlier_digest"]
    assert "the earlier model's" in resolved_facts(proof.summary)["digest"]
    assert remains(again, proof, "local") == []
    Path(ids).unlink()
    assert not trained_settings(proof.path)["without"]
    assert summary_of(retrained(proof, ""))["retrained"]["digest"] == facts["digest"]


FIELDS = st.one_of(
    st.sampled_from(
        ["", "NA", "true", "FALSE", "yes", "0", "1", "1.0", "007", " 2", "1e3", "10:00"]
    ),
    st.sampled_from(["2024-02-29", "2024-02-29 10:00", "a", 'b "c"', "d, e", "f\ng", "-0.5"]),
)


@drawing(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(FIELDS, FIELDS), min_size=2, max_size=12),
    st.sets(st.integers(0, 11), min_size=1),
)
def test_rows_are_left_out_as_if_the_file_had_never_had_them(tmp_path_factory, rows, gone):
    """Also where only these rows made a column one of text, of booleans or of times."""
    folder = tmp_path_factory.mktemp("tables")
    gone = {row for row in gone if row < len(rows)} - {0}

    def write(name, numbers):
        with (folder / name).open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerows([["id", "a", "b"], *([f"c{row}", *rows[row]] for row in numbers)])
        return folder / name

    whole = write("whole.csv", range(len(rows)))
    rest = write("rest.csv", [row for row in range(len(rows)) if row not in gone])
    roles = Roles(id_column="id", without=tuple(f"c{row}" for row in sorted(gone)))
    text = text_file(whole, roles=roles)
    assert text is not None
    assert b"".join(text.lines()) == rest.read_bytes()
    assert outcome(whole, roles) == outcome(rest, Roles(id_column="id"))


def outcome(path, roles):
    """A table's content, or that it has none that can be read."""
    try:
        table = load_table(path, roles)
    except DataError:
        return None
    assert table.ids is not None
    content = table.values.tobytes(), table.ids.tolist(), table.kinds, table.categories
    return content, [note for note in table.notes if "left out" not in note.rule]


def test_rows_of_a_parquet_file_are_left_out(tmp_path):
    names = pa.array(["low", "high", "rare"]).dictionary_encode()
    frame = pa.table({"id": [7, 8, 9], "kind": names, "a": [1.0, 2.0, 3.0]})
    parquet.write_table(frame, tmp_path / "rows.parquet")
    table = load_table(tmp_path / "rows.parquet", Roles(id_column="id", without=("9",)))
    assert table.categories[0] == ("high", "low")
    assert table.values[:, 1].tolist() == [1.0, 2.0]


def test_a_site_leaves_out_the_rows_that_its_node_config_names(tmp_path):
    """Of every file; ids that no row has change nothing, and numbers are written in one way."""
    (tmp_path / "rows.csv").write_text("id,a,y\n1,2,0\n2,3,1\n3,4,1\n4,5,0\n")
    (tmp_path / "may.csv").write_text("name,id\nAda,1.0\n")
    (tmp_path / "june.csv").write_text("id\n9\n 4\n")
    files = f"{tmp_path}/may.csv, {tmp_path}/june.csv"
    node = {"name": "bank", "data": str(tmp_path / "rows.csv"), "label": "y", "id": "id"}
    table = read_table(site_config({**node, "without": files}, {}))
    assert table.ids is not None
    assert table.ids.tolist() == ["2", "3"]
    assert "2 of 4 rows are left out, by ids of without" in [note.rule for note in table.notes]


NO_ID = r"file of ids '.*/ids.csv' must have a first line .*, and an id, as in id"


@pytest.mark.parametrize(
    ("ids", "rule"),
    [
        ("id\n1\n2\n", r"^table must have at least one row, got 0"),
        ("c1\nc2\n", rf"{NO_ID}; got columns 'c1'$"),
        ("", NO_ID),
        (None, r"data file must exist, got '.*/ids.csv'"),
    ],
)
def test_files_of_ids_that_are_refused(tmp_path, ids, rule):
    """What a file without a line of names begins with stays at the site: it is an id."""
    (tmp_path / "rows.csv").write_text("id,a\n1,2\n2,3\n")
    if ids is not None:
        (tmp_path / "ids.csv").write_text(ids)
    node = {"name": "bank", "data": str(tmp_path / "rows.csv"), "id": "id"}
    node["without"] = str(tmp_path / "ids.csv")
    with pytest.raises(DataError, match=rule) as error:
        read_table(site_config(node, {}))
    assert "c1" not in str(error.value.for_others(True))
    rule = r"id must name the column of the ids in \S*ids.csv, got none"
    with pytest.raises(ConfigError, match=rule):
        read_table(site_config({**node, "id": ""}, {}))


def simple(folder, **more):
    data = write_table(folder / "rows.csv", range(N_ROWS), "abcdefy")
    return settings_of(METHODS["bagging"], str(data), **{"run_dir": folder / "run", **more})


NONE = "without must name rows of the tables, got 2 ids of none: omit"
REFUSED = {  # settings, ids that are erased, the engine, and the rule
    "no such rows": ({}, [500, 501], "local", NONE),
    "too few": ({}, range(N_ROWS - 2), "local", "number of parties must be in .1, 2. .rows., got "),
    "sites": ({}, [3], "office", "engine must be local, for .*/run, got office"),
    "continued": ({"init_model": ""}, [3], "local", "init-model must be empty, as that model may "),
    "unfinished": ({}, [3], "local", "run must have finished, got .*/run"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_retrainings_that_are_refused(case, tmp_path):
    given, gone, engine, rule = REFUSED[case]
    earlier = run_local(simple(tmp_path, **given))
    if case == "continued":
        more = {"init_model": str(earlier.path), "run_dir": tmp_path / "more"}
        earlier = run_local(simple(tmp_path, **more))
    if case == "unfinished":
        (earlier.path / "summary.json").unlink()
    ids = write_ids(tmp_path / "ids.csv", gone)
    with pytest.raises((ConfigError, DataError), match=rule):
        retrained(earlier, ids, engine)


def test_a_run_of_sites_is_trained_again_on_what_they_have(tmp_path, monkeypatch):
    earlier, later = (
        run_local(simple(tmp_path)),
        run_local(simple(tmp_path, run_dir=tmp_path / "b")),
    )
    rows = earlier.summary["rows"]
    earlier.add_to_summary({"engine": "deployment"})
    later.add_to_summary({"engine": "deployment", "rows": {**rows, "train": rows["train"] - 2}})
    monkeypatch.setattr("fedapp.runs.session.check_method", lambda *_: None)
    monkeypatch.setattr("fedapp.runs.session.describe_engine", str)
    monkeypatch.setattr("fedapp.runs.session.carry_out", lambda *_: later)
    monkeypatch.setattr("fedapp.runs.session.run_dir_of", lambda *_: "")
    again = retrained(earlier, "", "office")
    assert again.summary["retrained"]["rows_left_out"] == {"all parties": 2}
    assert remains(earlier, again, "office") == []  # the same model
    assert remains(earlier, None, "office") == [
        f"the earlier run: rm -r {earlier.path}",
        f"its parties: rm -r the home of each site/sites/*/{earlier.summary['model_id']}",
        "other runs on these tables, and what was predicted: fedapp runs --all",
    ]
    ids = write_ids(tmp_path / "ids.csv", [3])
    with pytest.raises(ConfigError, match=r"without must be in the sites' node configs, got .*ids"):
        retrained(earlier, ids, "office")
    with pytest.raises(
        ConfigError, match=r"engine must be a SuperLink's name, whose sites have th"
    ):
        retrained(earlier, "")


def test_the_command_shows_the_digest_and_what_still_has_the_rows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_local(simple(tmp_path, run_dir="first"))
    write_ids(tmp_path / "ids.csv", [3, 4], "nobody")
    write_ids(tmp_path / "more.csv", [5])
    words = ["runs", "retrain", "first", "--without", "ids.csv", "--output", "second"]
    shown = " ".join(CliRunner().invoke(cli, words, env={"COLUMNS": "300"}).output.split())
    model = (tmp_path / "second" / "model.json").read_bytes()
    assert f"digest {hashlib.sha256(model).hexdigest()}" in shown
    assert "trees kept none: each follows from all rows" in shown
    assert "2 of 120 rows are left out, by ids of without" in shown
    assert "still has the rows: the earlier run: rm -r first" in shown
    words = ["runs", "retrain", "second", "--without", "more.csv", "--output", "third", "--json"]
    third = json.loads(CliRunner().invoke(cli, words).stdout)
    assert third["remains"][0] == "the earlier run: rm -r second"
    assert sum(third["summary"]["rows"].values()) == N_ROWS - 3
    facts = resolved_facts(read_run(tmp_path / "third").summary)
    assert "second, without rows: rows.csv 3" in facts["retrains"]
